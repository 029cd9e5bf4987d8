"""What a store says is requested once for all ranks: rank 0 lists the shards and reads the index,
and the other ranks of torch.distributed get the result through the store of their process group.

Rules:
1. No rank depends on another one. A rank whose turn does not come, or not in time, requests by
   itself: lists may be made on one rank only.
2. The n-th request for a URL on one rank is the n-th one for this URL on the others.
3. Only stores count that are the same for all ranks: no local files, which each rank may have on
   its own disk.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

from wds_pipes.core.counts import logger
from wds_pipes.io.urls import links_of, local_path, redact

T = TypeVar("T")

PATIENCE_SECONDS = 10.0  # how long a rank waits for rank 0 to begin, from then on
TIMEOUT_SECONDS = 120.0  # how long it waits for the result
_CHUNK = 1 << 23  # bytes of a value that are compressed and stored at a time
_OWN = ("file", "local", "memory", "pipe")  # protocols of what each process has by itself

_turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_forked: list[bool] = []  # not empty in a process that was forked from a rank, whose connection to the store it has


def once(what: str, url: str, request: Callable[[], T]) -> T:
    """Return what ``request`` returns, which only rank 0 calls if there are several.

    Args:
        what: what is requested, such as ``"index"``.
        url: of what. The result depends on nothing else.
        request: requests it. The result can be pickled.
    """
    if (found := _store()) is None or local_path(url) is not None:
        return request()
    store, rank, ranks = found
    if any(link.partition("://")[0].partition(":")[0] in _OWN for link in links_of(url)):
        return request()
    name = blake2b(f"{what} {url}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    place = f"wds_pipes/once {name} {next(_turns[name])}"
    if rank:
        result = _taken(store, place, ranks)
        if result is None:
            logger.info("rank %d requests %s %s by itself: rank 0 has not", rank, what, redact(url))
        return request() if result is None else pickle.loads(result)
    store.set(f"{place}/begun", "")
    data = b""
    try:
        value = request()
        data = pickle.dumps(value)
    finally:  # after an error, the others see it for themselves
        store.set(f"{place}/chunks", str(-(-len(data) // _CHUNK)))
    for number, start in enumerate(range(0, len(data), _CHUNK)):  # the others take one while the next is compressed
        store.set(f"{place}/{number}", zlib.compress(data[start : start + _CHUNK], 1))
    return value


def _store() -> tuple[Any, int, int] | None:
    """Return the store of the ranks, the rank and their number; None: there is one rank."""
    dist: Any = sys.modules.get("torch.distributed")  # without it, nothing has made a group
    if dist is None or _forked or not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_world_size() == 1 or dist.get_backend() in ("mpi", "fake"):  # without a store
        return None
    return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()


def _taken(store: Any, place: str, ranks: int) -> bytearray | None:
    """Return the result of rank 0; None: it has none, or not in time. The last rank removes it."""
    chunks = 0
    if _is_there(store, f"{place}/begun", PATIENCE_SECONDS) and _is_there(store, f"{place}/chunks", TIMEOUT_SECONDS):
        chunks = int(store.get(f"{place}/chunks"))
    data = bytearray()
    for number in range(chunks):
        if not _is_there(store, f"{place}/{number}", TIMEOUT_SECONDS):
            data.clear()
            break
        data += zlib.decompress(store.get(f"{place}/{number}"))
    if store.add(f"{place}/taken", 1) == ranks - 1:
        for number in range(chunks):
            store.delete_key(f"{place}/{number}")
    return data or None


def _is_there(store: Any, name: str, seconds: float) -> bool:
    """Return whether a name is in the store within a time."""
    end, pause = time.monotonic() + seconds, 0.001
    while not (found := store.check([name])) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return bool(found)


def _after_fork() -> None:
    if _store() is not None:
        _forked.append(True)


os.register_at_fork(after_in_child=_after_fork)
