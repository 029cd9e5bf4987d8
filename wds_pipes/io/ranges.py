"""Read ranges of bytes of many files: local ones are mapped into memory, of remote ones many ranges
are requested at once.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from wds_pipes.core.counts import Network
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.remote.budget import Reading, UnreadError
from wds_pipes.io.remote.shard import RemoteShard
from wds_pipes.io.urls import at_home, local_path, redact

_MOST_OPEN = 128  # local files


class Range(NamedTuple):
    """Bytes ``start`` to ``stop`` - 1 of a file."""

    url: str
    start: int
    stop: int


# Bytes of a file, and which byte of it the first one is. If the file ends before a requested range,
# there are fewer.
Part = tuple[bytes | mmap.mmap, int]


class RangeReader:
    """Reads ranges of local and remote files. Threads may share one; it can be pickled and forked.

    Args:
        storage_options: how to reach the storage, as fsspec takes it.
        connections: the maximum number of requests at once.
    """

    def __init__(self, storage_options: dict[str, Any] | None, connections: int) -> None:
        self._connections = connections
        self._opener = Opener(Reading(storage_options or {}, connections=connections), buffer_bytes=512)
        self._files: dict[str, mmap.mmap] = {}  # in the order in which they were opened
        self._locks: dict[int, threading.Lock] = {}  # by process: a forked one may inherit a lock that is held

    @property
    def network(self) -> Network:
        """The network use of this process."""
        return self._opener.used

    def stall_clock(self) -> Callable[[], float]:
        """Return a function that returns for how many seconds this process has waited for bytes."""
        return self._opener.stall_clock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_connections": self._connections, "_opener": self._opener}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files={}, _locks={})

    def read(self, ranges: Iterable[Range]) -> Iterator[Part]:
        """Yield a part of the file for each range; it has at least the bytes of the range.

        Raises:
            ShardError: a file cannot be read.
        """
        ranges = list(ranges)
        ahead: list[RemoteShard] = []
        requests = (wanted for wanted in ranges if not self._is_local(wanted.url))
        try:
            for wanted in ranges:
                if self._is_local(wanted.url):
                    yield self._map(*wanted)
                    continue
                while len(ahead) < self._connections and (request := next(requests, None)) is not None:
                    ahead.append(self._opener.open_range(*request))
                with ahead.pop(0) as stream:
                    yield self._read_remote(stream, wanted), wanted.start
        finally:
            for stream in ahead:
                stream.close()

    @staticmethod
    def _read_remote(stream: RemoteShard, wanted: Range) -> bytes:
        try:
            return stream.read()
        except StateError:  # the file ends before the range
            return b""
        except UnreadError as error:
            shown = redact(wanted.url)
            problem = ShardError(f"shard {shown}: {error}.", url=shown)
            problem.__cause__ = error.__cause__
        raise problem

    def read_one(self, url: str, start: int, stop: int) -> Part:
        """Return what ``read`` yields for one range."""
        mapped = self._files.get(url)
        if mapped is not None and mapped.size() >= stop:
            return mapped, 0
        if self._is_local(url):
            return self._map(url, start, stop)
        return next(iter(self.read([Range(url, start, stop)])))

    def _is_local(self, url: str) -> bool:
        return url in self._files or not is_remote(url)

    def _map(self, url: str, start: int, stop: int) -> Part:
        mapped = self._files.get(url)
        if mapped is None:
            with self._opener.open(url) as stream:
                if not os.fstat(stream.fileno()).st_size:  # it cannot be mapped
                    return b"", start
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                self._files[url] = mapped
                if len(self._files) > _MOST_OPEN:
                    self._files.pop(next(iter(self._files)))  # closed when no thread uses it any more
        # To read what a file does not have any more would end the process.
        return (mapped, 0) if mapped.size() >= min(stop, len(mapped)) else (b"", start)

    def size(self, url: str) -> int | None:
        """The size of a local file in bytes; None: the file is remote."""
        path = local_path(url)
        return None if path is None or is_remote(url) else os.stat(at_home(path)).st_size

    def close(self) -> None:
        """Close all files."""
        self._files.clear()
