"""Which data-parallel rank this process is, and whether all ranks begin the same iteration.

Rules of the comparison:
1. Ranks compare what they begin if the ranks are the processes of torch.distributed. The n-th
   comparison of a loader belongs to the n-th one of the same loader on the other ranks, and the
   n-th loader that a rank compares to the n-th one of the other ranks: since each rank waits for
   the others, ranks that begin two loaders in different orders would wait for each other under any
   names.
2. Ranks exchange text through the store of the process group. A collective of the group would wait
   for ever for a rank that has failed, and could meet one that another thread of the caller began.
3. A rank waits for the others for at most ``WAIT_SECONDS``, then it warns and goes on. If another
   rank waits for this one elsewhere, for example in ``checkpoint.load``, both raise.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from wds_pipes.core.counts import logger
from wds_pipes.core.options import check_count
from wds_pipes.core.state import MOST
from wds_pipes.core.words import shown, some
from wds_pipes.errors import StateError
from wds_pipes.loader.meetings import check_end, end_meeting, exchange, has_store, standing, wait, where


class Rank(NamedTuple):
    """Rank ``number`` of ``of``."""

    number: int
    of: int


def find_rank(rank: int | None = None, world_size: int | None = None) -> Rank:
    """Return the rank of this process.

    It is, in this order: the arguments, the rank in torch.distributed if that is initialised, the
    environment variables RANK and WORLD_SIZE, rank 0 of 1.

    Under tensor or pipeline parallelism several processes share a data-parallel rank. Then pass the
    arguments, for example from a DeviceMesh:
    ``rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()``.

    Raises:
        ValueError: only one of the two is passed, or the rank is negative or not below the world
        size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    where = ""
    if rank is None or world_size is None:
        rank, world_size = _from_surroundings()
        where = " (by RANK and WORLD_SIZE in the environment)"
    rank, world_size = check_count("rank", rank, least=-MOST), check_count("world_size", world_size, least=-MOST)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below world_size, not {rank} of {world_size}{where}")
    return Rank(rank, world_size)


def rank() -> Rank:
    """Return the data-parallel rank of this process and the number of ranks, as a named tuple
    (``number``, ``of``), by the rule of ``PipeLoader``::

        number, of = wp.rank()

    It is that of torch.distributed if that is initialised, else that in the environment variables
    RANK and WORLD_SIZE, else rank 0 of 1. A loader says the same: ``loader.rank``. Under tensor or
    pipeline parallelism several processes share a data-parallel rank, which only the caller knows,
    who passes ``rank=`` and ``world_size=`` to ``PipeLoader``.

    Raises:
        ValueError: RANK and WORLD_SIZE are no numbers, or do not fit.
    """
    return find_rank()


def _from_surroundings() -> tuple[int, int]:

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _from_environment("RANK"), _from_environment("WORLD_SIZE")
    return 0, 1


def _from_environment(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise ValueError(
            f"the environment variable {name} must be a number, not {os.environ[name]!r:.80}: unset RANK and "
            "WORLD_SIZE if there is one rank"
        ) from error


def warn_of_ranks(what: str, *, divided: bool = False) -> None:
    """If there are several ranks, warn that each of them gets all samples.

    Args:
        what: what is iterated, for the message.
        divided: whether torch divides the samples over the ranks if torch.distributed is
            initialised.
    """
    if dist.is_available() and dist.is_initialized():
        ranks = 1 if divided else dist.get_world_size()
    else:
        ranks = _from_surroundings()[1]
    if ranks > 1:
        message = (
            "gives all samples of its shards to every rank: use wds_pipes.PipeLoader, or let each "
            "rank list shards of its own, or Accelerate divide the samples (then ignore this)."
        )
        warnings.warn(f"{what} {message}", stacklevel=4)


WAIT_SECONDS = 60.0

_SHOWN = {  # what a message says instead of the name and the values of a fact
    "data": "the names or the order of the shards",
    "sources": "the sources of mix() or join()",
    "graph": "the steps and their options",
    "partition": "how the rest of the epoch was partitioned",
}

_numbers = itertools.count()
# of each loader that was compared: its number in this process, and how often it was
_compared: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()


def is_compared(loader: object) -> bool:
    """Whether this rank of a loader has been compared with the others before."""
    return loader in _compared


def note(loader: object, rank: Rank, name: str, text: str) -> None:
    """Note a text of rank 0 for the other ranks of a loader, if they have been compared."""
    if loader in _compared and rank.number == 0:
        dist.distributed_c10d._get_default_store().set(f"wds_pipes/{_compared[loader][0]}/{name}", text)


def noted(loader: object, name: str) -> str | None:
    """Return what rank 0 has noted last; None: nothing. It does not wait."""
    if loader not in _compared:
        return None
    store, place = dist.distributed_c10d._get_default_store(), f"wds_pipes/{_compared[loader][0]}/{name}"
    return str(store.get(place).decode()) if store.check([place]) else None


def check_alike(loader: object, rank: Rank, facts: dict[str, Any], what: str) -> None:
    """Check that all ranks of a loader pass the same facts.

    Args:
        loader: an object that stands for the loader on this rank.
        rank: the rank of this process.
        facts: plain JSON types by their names.
        what: the call of this rank, for messages.

    Raises:
        StateError: on all ranks: they differ.
    """
    if rank.of == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    if rank != (dist.get_rank(), dist.get_world_size()) or not has_store():
        return
    number, turn = _compared.get(loader) or (next(_numbers), 0)
    _compared[loader] = number, turn + 1
    text = json.dumps([turn, facts], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    begun, same = f"wds_pipes/{number}/{turn}", f"wds_pipes/{number}/{turn}/{digest}"
    names = [f"wds_pipes/{number}/rank {at}" for at in range(rank.of)]

    store = dist.distributed_c10d._get_default_store()
    store.set(names[rank.number], text)
    store.add(same, 1)

    def absent() -> list[int]:
        return [at for at, name in enumerate(names) if _read(store, name)[0] < turn]

    with standing(what, begun):
        met = _met(store, begun, rank.of, WAIT_SECONDS, absent, what=what)
        if not met:
            late = absent()
            logger.warning(
                "rank %d goes on alone, since rank %s did not begin this iteration of the loader within %g seconds "
                "(%s). All ranks must iterate a loader equally often; where one rank iterates alone, pass rank=0, "
                "world_size=1 to its PipeLoader.", rank.number, some(late), WAIT_SECONDS, where(late),
            )  # fmt: skip
        elif int(store.get(same)) < rank.of:
            told = _differences([_read(store, name)[1] for name in names])
            waits = 0 if rank.number else WAIT_SECONDS  # the store may end with rank 0
            _met(store, f"{begun}/told", rank.of, waits, list, what=what)
            raise StateError(told)


def of_all_ranks(value: Any, rank: Rank, group: Any, what: str, timeout_seconds: float) -> list[Any]:
    """Return the values of all ranks, in their order: one collective operation. Of processes that
    share a rank, it is the value of the first. ``what`` and ``timeout_seconds`` are as in
    ``exchange``.

    Raises:
        RuntimeError: there are several ranks, and torch.distributed is not initialised.
        StateError: as in ``exchange``.
    """
    if rank.of == 1:
        return [value]
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"this is rank {rank.number} of {rank.of}, and torch.distributed, which asks the others, is not "
            "initialised: call init_process_group()"
        )
    values = dict(reversed(exchange((rank.number, value), what, group, timeout_seconds)))
    return [values[number] for number in sorted(values)]


def _met(store: Any, place: str, ranks: int, seconds: float, absent: Callable[[], list[int]], *, what: str) -> bool:
    """Note that this rank has come to a place, and return whether all ranks have within a time.

    Raises:
        StateError: another rank waits for this one at another place.
    """
    if store.add(f"{place}/count", 1) == ranks:
        end_meeting(store, place)
    if not wait(store, place, seconds, absent, what):
        return False
    check_end(store, place)
    return True


def _read(store: Any, name: str) -> tuple[int, dict[str, Any]]:
    """Return which comparison a rank has begun last, -1 for none, and its facts."""
    turn, facts = json.loads(store.get(name)) if store.check([name]) else (-1, {})
    return turn, facts


def _differences(ranks: list[dict[str, Any]]) -> str:
    """Return which ranks differ from most others, in which facts."""
    texts = [json.dumps(facts, sort_keys=True) for facts in ranks]
    most = json.loads(Counter(texts).most_common(1)[0][0])
    others = {number: facts for number, facts in enumerate(ranks) if facts != most}
    differing = []
    for name in dict.fromkeys(itertools.chain(most, *others.values())):
        value = most.get(name)
        if found := [facts.get(name) for facts in others.values() if facts.get(name) != value]:
            values = "" if name in _SHOWN else f" ({shown(found[0])} instead of {shown(value)})"
            differing.append(f"{_SHOWN.get(name, name)}{values}")
    return (
        f"rank {some(others)} of {len(ranks)} does not begin the same iteration as the other ranks, so samples would "
        f"be lost or repeated: it differs in {', '.join(differing)}. Give all ranks the same list of shards in the "
        "same order, the same options and num_workers, and the same epoch or state; a rank that reads shards of its "
        "own passes rank=0, world_size=1 to PipeLoader. All ranks begin several loaders in the same order."
    )
