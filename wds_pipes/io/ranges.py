"""Read ranges of bytes of many files: local ones through a few open files, remote ones with many
requests at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.remote.budget import Reading, UnreadError
from wds_pipes.io.remote.shard import RemoteShard
from wds_pipes.io.urls import at_home, local_path, redact

_MOST_OPEN = 128  # local files
_SMALL = 1 << 20  # bytes


class _File:
    """A file descriptor, which is closed when nothing uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Range(NamedTuple):
    """Bytes ``start`` to ``stop`` - 1 of a file."""

    url: str
    start: int
    stop: int


class RangeReader:
    """Reads ranges of local and remote files. Threads may share one; it can be pickled and forked.

    Args:
        storage_options: how to reach the storage, as fsspec takes it.
        connections: the maximum number of requests at once.
    """

    def __init__(self, storage_options: dict[str, Any] | None, connections: int) -> None:
        self._connections = connections
        self._opener = Opener(Reading(storage_options or {}, connections=connections), buffer_bytes=512)
        self._files: dict[str, _File] = {}  # in the order in which they were opened
        self._locks: dict[int, threading.Lock] = {}  # by process: a forked one may inherit a lock that is held

    def __getstate__(self) -> dict[str, Any]:
        return {"_connections": self._connections, "_opener": self._opener}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files={}, _locks={})

    def read(self, ranges: Sequence[Range]) -> Iterator[bytes]:
        """Yield the bytes of each range, fewer than requested at the end of a file.

        Raises:
            ShardError: a file cannot be read.
        """
        ahead: list[RemoteShard] = []
        requests = (wanted for wanted in ranges if not self._is_local(wanted.url))
        try:
            for wanted in ranges:
                if self._is_local(wanted.url):
                    yield self._read_local(*wanted)
                    continue
                while len(ahead) < self._connections and (request := next(requests, None)) is not None:
                    ahead.append(self._opener.open_range(*request))
                with ahead.pop(0) as stream:
                    yield self._read_remote(stream, wanted)
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

    def read_one(self, url: str, start: int, stop: int) -> bytes:
        """Return the bytes of one range; errors as in ``read``."""
        if self._is_local(url):
            return self._read_local(url, start, stop)
        return next(iter(self.read([Range(url, start, stop)])))

    def _is_local(self, url: str) -> bool:
        return url in self._files or not is_remote(url)

    def _read_local(self, url: str, start: int, stop: int) -> bytes:
        file = self._files.get(url)
        if file is None:
            with self._opener.open(url) as stream:
                file = _File(os.dup(stream.fileno()))
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                self._files[url] = file
                if len(self._files) > _MOST_OPEN:
                    self._files.pop(next(iter(self._files)))  # closed when no thread uses it any more
        count = stop - start
        if count > _SMALL:  # an index may be wrong: do not allocate what the file does not have
            count = max(0, min(count, os.fstat(file.number).st_size - start))
        data = os.pread(file.number, count, start)
        while len(data) < count and (more := os.pread(file.number, count - len(data), start + len(data))):
            data += more
        return data

    def size(self, url: str) -> int | None:
        """The size of a local file in bytes; None: the file is remote."""
        path = local_path(url)
        return None if path is None or is_remote(url) else os.stat(at_home(path)).st_size

    def close(self) -> None:
        """Close all files."""
        self._files.clear()
