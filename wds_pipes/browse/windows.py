"""A shard that is read in parts, back and forth, in bounded memory."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from wds_pipes.io.compression import MAGIC_BYTES, decompress, detect, unreadable
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.versions import Version, version_of

_LEAST, _MOST = 1 << 16, 1 << 21  # bytes that are read at once: more each time if they follow each other
_WHOLE = 1 << 24  # bytes that are read at once where it is known that they are needed
_HELD = 1 << 25  # bytes that stay in memory
_KNOWN = 4096  # shards of which the compression is remembered

Read = Callable[[int, int], tuple[Any, int]]  # at, size: bytes, and the place of the first one


class Window(io.RawIOBase):
    """The content of a shard, decompressed, as a stream that can seek back.

    The bytes that were read last, at most 32 MiB, stay in memory, so that what stands between
    headers that were just read is not requested again.

    Args:
        read: reads some bytes at a place; fewer only at the end.
        expected: where the bytes start and end that will all be needed; they are read at once if
            they are at most 16 MiB.
    """

    def __init__(self, read: Read, expected: tuple[int, int] = (0, 0)) -> None:
        self._read, self._expected = read, expected
        self._held: list[tuple[int, bytes]] = []
        self._at, self._last, self._size = 0, 0, _LEAST

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the end is not known")
        self._at = offset + (self._at if whence == os.SEEK_CUR else 0)
        return self._at

    def close(self) -> None:
        """It stays open: several streams read it, one after another. ``Files`` closes the shard."""

    def readinto(self, buffer: Any) -> int:
        at = self._at
        start, held = next(
            ((start, held) for start, held in self._held if start <= at < start + len(held)), None
        ) or self._fetch(at)
        data = memoryview(held)[at - start : at - start + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _fetch(self, at: int) -> tuple[int, bytes]:
        """Read bytes from a place on, and hold them."""
        self._size = min(2 * self._size, _MOST) if at == self._last else _LEAST
        first, end = self._expected
        size = end - at if first <= at < end <= first + _WHOLE else self._size
        data, base = self._read(at, size)
        found = at, bytes(data[at - base : at - base + size])
        self._last = at + len(found[1])
        self._held.append(found)
        while sum(len(held) for _, held in self._held) > _HELD and len(self._held) > 1:
            self._held.pop(0)
        return found


class Unpacked:
    """Reads a compressed shard, which can only be read in order: from its beginning for what stands
    before the last byte that was read.
    """

    def __init__(self, open_it: Callable[[], BinaryIO], kind: str) -> None:
        self._open, self._kind = open_it, kind
        self._file: BinaryIO | None = None
        self._stream: Any = io.BytesIO()
        self._at = 0

    def read(self, at: int, size: int) -> tuple[bytes, int]:
        """Return some bytes at a place of what it unpacks to, and the place."""
        if self._file is None or at < self._at:
            self.close()
            self._file = self._open()
            self._stream, self._at = decompress(self._file, self._kind), 0
        while self._at < at and self._some(min(at - self._at, _MOST)):
            pass
        data = bytearray()
        try:
            while len(data) < size and (more := self._some(size - len(data))):
                data += more
        except unreadable():
            if not data:  # else the next read says so: what stands before the damage is shown
                raise
        return bytes(data), at

    def _some(self, most: int) -> bytes:
        data: bytes = self._stream.read1(most)
        self._at += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def version_here(url: str) -> Version:
    """Return the version of a local shard. Nothing is known of a remote one, which is not asked for
    it with each page.
    """
    return Version() if is_remote(url) else version_of(url, None)


class Files:
    """Opens windows on shards. Threads may share it.

    Args:
        storage_options: how to reach the storage.
        connections: the maximum number of requests at once.
    """

    def __init__(self, storage_options: dict[str, Any] | None, connections: int = 8) -> None:
        self._ranges = RangeReader(storage_options, connections)
        self._opener: Opener = self._ranges.opener
        self._kinds: dict[tuple[str, Version], str] = {}  # how shards are compressed

    @contextlib.contextmanager
    def open(self, url: str, expected: tuple[int, int] = (0, 0)) -> Iterator[Window]:
        """Open a window on a shard, which is decompressed if it is compressed.

        Args:
            url: the shard.
            expected: where the bytes start and end that will all be needed, of an uncompressed
                shard.

        Raises:
            ShardError: the shard cannot be opened.
        """
        read = self._remote(url) if is_remote(url) else self._local(url)
        place = url, version_here(url)
        kind = self._kinds.get(place)
        if kind is None:
            if len(self._kinds) == _KNOWN:
                self._kinds.clear()
            kind = self._kinds[place] = detect(Window(read, (0, MAGIC_BYTES)).read(MAGIC_BYTES) or b"")
        if kind:
            unpacked = Unpacked(lambda: self._opener.open(url), kind)
            with contextlib.closing(unpacked):
                yield Window(unpacked.read)
        else:
            yield Window(read, expected)

    def _remote(self, url: str) -> Read:
        return lambda at, size: self._ranges.read_one(url, at, at + size)

    def _local(self, url: str) -> Read:
        def read(at: int, size: int) -> tuple[bytes, int]:
            with self._opener.open(url) as stream:
                stream.seek(at)
                return stream.read(size), at

        return read
