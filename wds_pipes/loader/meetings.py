"""Where the ranks of torch.distributed wait for each other: a meeting never waits for ever.

Rules:
1. A meeting has a name, the call that the user makes, and a number: the n-th meeting of a process
   group on one rank is the n-th one of this group on the other ranks.
2. Ranks meet in the store of torch.distributed before they begin a collective of the group,
   which would wait for ever for a rank that does not come.
3. The first rank that knows how a meeting ends writes it into the store: all have come, or why it
   failed. This is the end for all ranks, also for one that comes later. So no rank begins the
   collective if another one has given up.
4. Each rank notes where it stands, for the message of a rank that waits for it. If the main threads
   of two ranks wait for each other at two places, both places have failed at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from wds_pipes.core.options import check_seconds
from wds_pipes.core.words import some
from wds_pipes.errors import StateError

TIMEOUT_SECONDS = 300.0  # how long a rank waits for the others

_MET = "all ranks have come"
_MOST_NAMED = 10  # ranks whose place a message names
_LOOK_SECONDS = 0.5  # after which a rank that waits looks for the first time where absent ranks stand
_STAND = "wds_pipes/rank {} stands"

_numbers: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


class Stand(NamedTuple):
    """Where a rank is or was last: in which call, and the key of the store at which its main thread
    waits for all ranks (empty: it does not).
    """

    what: str
    waits: str = ""


def exchange(value: Any, what: str, group: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Return what each process of a group passed, in the order of the processes.

    Args:
        value: the value of this process, which can be pickled.
        what: the call that meets the other ranks, for messages.
        group: the process group; None: the default group.
        timeout_seconds: how long to wait for the others.

    Raises:
        StateError: on all ranks: a rank has not come in this time, or has come to another call.
    """
    check_seconds("timeout_seconds", timeout_seconds)
    values: list[Any] = [None] * dist.get_world_size(group)
    if has_store():
        _meet(what, group or dist.distributed_c10d._get_default_group(), timeout_seconds)
    dist.all_gather_object(values, value, group=group)
    return values


def has_store() -> bool:
    """Whether the processes of torch.distributed have a store."""
    return dist.get_backend() not in ("mpi", "fake")


def _meet(what: str, group: Any, timeout_seconds: float) -> None:
    """Return when all ranks of a group have come to this call."""
    store, rank, ranks = _store(), dist.get_rank(), dist.get_process_group_ranks(group)
    number, prefix = next(_numbers.setdefault(group, itertools.count(1))), f"wds_pipes/group {group.group_name}"
    place, whole = f"{prefix}/meeting {number}", len(ranks) == dist.get_world_size()
    named = f"{what} (meeting {number})"
    came = {other: f"{prefix}/rank {other} came" for other in ranks}
    store.set(came[rank], str(number))

    def absent() -> list[int]:
        return [other for other, name in came.items() if not store.check([name]) or int(store.get(name)) < number]

    with standing(named, place if whole else ""):
        first, _, meant = store.compare_set(f"{place}/what", "", f"{rank} {what}").decode().partition(" ")
        if meant != what:
            how = (
                f"rank {first} has called {meant} (meeting {number}), and rank {rank} {what}: all ranks make the same "
                "calls in the same order, none of them under 'if rank == 0'."
            )
            end_meeting(store, place, how)
        elif store.add(f"{place}/count", 1) == len(ranks):
            end_meeting(store, place, _MET)
            for earlier in (f"{prefix}/meeting {number - 1}{key}" for key in ("", "/what", "/count")):
                store.delete_key(earlier)  # all ranks have read it
        if not wait(store, place, timeout_seconds, absent, named):
            late = absent()
            how = (
                f"rank {rank} has waited {timeout_seconds:g} seconds in {named} for rank {some(late)}, which "
                f"did not come ({where(late)}). All ranks must make this call at the same step, not under "
                "'if rank == 0'; a rank that needs longer passes timeout_seconds=."
            )
            end_meeting(store, place, how)
        check_end(store, place)


def wait(store: Any, place: str, seconds: float, absent: Callable[[], list[int]], what: str) -> bool:
    """Wait until it is known how a meeting ends, and return whether it is after these seconds.

    Args:
        store: that of torch.distributed.
        place: the key of the meeting.
        seconds: how long to wait.
        absent: returns which ranks have not come.
        what: the call of this rank, for messages.
    """
    start, pause, look = time.monotonic(), 0.001, _LOOK_SECONDS
    while not (ended := store.check([place])) and (waited := time.monotonic() - start) < seconds:
        if waited > look:
            look = 2 * waited  # it asks the store for each rank
            _end_of_both(store, place, absent(), what)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return bool(ended)


def end_meeting(store: Any, place: str, how: str = _MET) -> None:
    """Say how a meeting ends, unless that is known already: all have come, or why it failed."""
    store.compare_set(place, "", how)


def check_end(store: Any, place: str) -> None:
    """Raise StateError if a meeting has failed."""
    if (how := store.get(place).decode()) != _MET:
        raise StateError(how)


@contextlib.contextmanager
def standing(what: str, waits: str = "") -> Iterator[None]:
    """Note for the other ranks that this one is in a call, and then that it has been there.

    Args:
        what: the call, for messages.
        waits: the key of the store at which it waits for all ranks; empty: for some only.
    """
    _note(Stand(f"is in {what}", waits if _is_main() else ""))
    try:
        yield
    finally:
        _note(Stand(f"has last been in {what}"))


def where(ranks: Iterable[int]) -> str:
    """Return where ranks stand, as far as they have noted it."""
    named = list(itertools.islice(ranks, _MOST_NAMED))
    return "; ".join(f"rank {rank} {_stand_of(rank).what}" for rank in named)


def _end_of_both(store: Any, place: str, absent: list[int], what: str) -> None:
    """End a meeting at which this rank waits, and that at which an absent rank waits for it."""
    if not _is_main():
        return
    rank = dist.get_rank()
    for other in absent[:_MOST_NAMED]:
        stand = _stand_of(other)
        if stand.waits and stand.waits != place and not store.check([stand.waits]):
            how = (
                f"rank {rank} is in {what}, and rank {other} {stand.what}: each would wait for the other for ever. All "
                "ranks make the same calls in the same order, none of them under 'if rank == 0' or 'if the directory "
                "exists'."
            )
            end_meeting(store, place, how)
            end_meeting(store, stand.waits, how)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _note(stand: Stand) -> None:
    _store().set(_STAND.format(dist.get_rank()), json.dumps(stand))


def _stand_of(rank: int) -> Stand:
    store, name = _store(), _STAND.format(rank)
    return Stand(*json.loads(store.get(name))) if store.check([name]) else Stand("has made no call that meets others")
