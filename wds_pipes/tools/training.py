"""What a training has had: whether the digest in its state is that of the samples of its epochs.

And the loader of a training, to ask which samples come when.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from wds_pipes.core.digest import Digest, add, in_epoch, of_samples, of_shard, to_text
from wds_pipes.core.moved import MEND, MEND_CLI, Data, Move
from wds_pipes.core.state import LEDGER, Saved, read_state
from wds_pipes.core.words import plural
from wds_pipes.errors import StateError
from wds_pipes.io.urls import Urls
from wds_pipes.loader.pipe_loader import PipeLoader
from wds_pipes.stages import ShardList
from wds_pipes.tools.looking import ls
from wds_pipes.tools.rewriting import function_of
from wds_pipes.tools.states import read_run, read_states, samples_of

_LEFT_OUT = ("filtered", "skipped", "dropped")
_OTHERS = (
    "other samples came, or some were left out or made by a step, skip(), exclude= (pass its keys), set_epoch(), "
    "drop_last or epoch_end='drop', or shards were added later"
)


class Proof(NamedTuple):
    """Whether the digests of a run are those of its data.

    Attributes:
        proven: whether they are.
        lines: what was compared, in words.
    """

    proven: bool
    lines: list[str]


def prove(
    path: str,
    urls: Urls,
    *,
    exclude: Iterable[str] = (),
    key_split: str = "first-dot",
    index: str | None = None,
    moved: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Proof:
    """Compare the digests of the epochs of a run that have ended with that of its shards.

    The keys of the samples are read from the headers of the shards.

    An epoch is proven if each sample of the shards came once in it, whatever the order, the ranks
    and the workers.

    Args:
        path: a file or directory with the states of all ranks of a run, as of ``read_states``.
        urls: the shards, in the order of the run.
        exclude: the keys that ``load_state_dict(exclude=...)`` left out from the first epoch on.
        key_split: as in ``group_by_key``.
        index: the ``index.json`` with which the shards were listed.
        moved: the shards are those of the state, whatever their names are.
        storage_options: how to reach the storage.

    Raises:
        StateError: the state has no ledger or no epoch that has ended, is of other shards or of
            several lists, or it counts samples of its epoch that were left out.
        ShardError: a shard cannot be read.
    """
    saved = read_state(read_run(path, moved=moved))
    assert saved.ledger is not None
    without, listed = frozenset(exclude), ShardList(urls, index=index, storage_options=storage_options)
    over = all(lane.ended for lane in saved.lanes.values())
    if (why := _why_not(saved, over)) is not None:
        raise StateError(f"{path} cannot be proven: {why}")
    if (differs := _other_data(saved, listed.which_data(), Move(moved))) is not None:
        what = f"the state is of other shards: {differs}"
        raise StateError(
            what, mend=f"Name the shards of the run. {MEND}", mend_cli=f"Name the shards of the run. {MEND_CLI}"
        )
    found = ls(listed.urls, key_split=key_split, storage_options=storage_options)
    shards = {url: of_shard(str(listed.number_of(url))) for url in listed.urls.shown}
    whole = of_samples((one.key, shards[one.url]) for one in found if one.key not in without)
    epoch, earlier = (saved.ledger[name] for name in LEDGER)
    compared: list[tuple[str, Digest, Digest]] = []
    if saved.epoch:
        epochs = f"epochs 0 to {saved.epoch - 1}" if saved.epoch > 1 else "epoch 0"
        compared.append((epochs, add(in_epoch(whole, number) for number in range(saved.epoch)), earlier))
    if over:
        compared.append((f"epoch {saved.epoch}", whole, epoch))
        left_out = sum(saved.counts.get(name, 0) for name in _LEFT_OUT)
        if epoch != whole and left_out:
            told = f"{plural(left_out, 'sample')} of epoch {saved.epoch} were left out, and it does not say which"
            raise StateError(f"{path} cannot be proven: {told} (pass the keys of exclude=)")
    lines = [
        f"proven: in {name} each sample of the shards came once (digest {to_text(told)})"
        if told == wanted
        else f"not proven: {name} has digest {to_text(told)}, and the shards {to_text(wanted)}: {_OTHERS}"
        for name, wanted, told in compared
    ]
    if not over and saved.counts.get("delivered"):
        lines.append(f"{samples_of(saved)} so far: an epoch can be proven when it has ended")
    return Proof(all(wanted == told for _, wanted, told in compared), lines)


def _why_not(saved: Saved, over: bool) -> str | None:
    """Return why no digest in a state can be that of shards; None: it can."""
    if saved.epoch_end == "loop":
        return "with epoch_end='loop' the lanes are in several epochs, which do not end together"
    if saved.sources:
        return "its samples come from several lists of shards"
    if not over and not saved.epoch:
        return f"it is of {samples_of(saved)}, which has not ended: name a later state, or compare it with another run"
    return None


def _other_data(saved: Saved, data: Data, move: Move) -> str | None:
    """Return how the shards of a state differ from others, for a message; None: they do not."""
    if saved.shards != data.shards:
        return f"it was made over {plural(saved.shards or 0, 'shard')}, and these are {data.shards}"
    return move.problem(Data(saved.fingerprint, saved.data), data)


def are_shards(what: Urls) -> bool:
    """Return whether an argument names shards, not a function."""
    if not isinstance(what, str):
        return True
    module, colon, name = what.partition(":")
    return not (colon and module.replace(".", "").isidentifier() and name.replace(".", "").isidentifier())


def loader_of(named: str, *, rank: int = 0, world_size: int | None = None, state: str | None = None) -> PipeLoader:
    """Return the PipeLoader of a training, to call its ``plan`` and ``find``.

    Args:
        named: a function without arguments that returns it: ``"module:function"``; the module may
            be a file in the current directory.
        rank: the rank that the function finds, if ``world_size`` is passed.
        world_size: the number of ranks that it finds, as if torchrun had started it; None: those of
            this process.
        state: a checkpoint from which the loader continues: see ``read_states``.

    Raises:
        ValueError: there is no such function, it returns something else, or a loader of other
            ranks.
        StateError: the state does not fit.
    """
    before = dict(os.environ)
    if world_size is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        make: Any = function_of(named)
        loader = make()
        if not isinstance(loader, PipeLoader):
            raise ValueError(f"{named}() must return the PipeLoader of the training, and it returned {loader!r:.80}")
        ranks = loader.rank.of
    finally:
        os.environ.clear()
        os.environ.update(before)
    if world_size not in (None, ranks):
        raise ValueError(
            f"the loader of {named}() has {plural(ranks, 'rank')}, not {world_size}: let the function take "
            "them from the environment, without rank= and world_size="
        )
    if state is not None:
        states = [placed.state for placed in read_states(state)]
        loader.load_state_dict(states if len(states) > 1 else states[0])
    return loader
