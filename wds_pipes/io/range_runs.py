"""Ranges of files, and runs of them, which one request reads."""

from __future__ import annotations

import mmap
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.remote.budget import UnreadError
from wds_pipes.io.remote.queue import RangeQueue
from wds_pipes.io.remote.shard import RemoteShard
from wds_pipes.io.urls import redact

if TYPE_CHECKING:
    from wds_pipes.io.ranges import Parts, RangeReader

GAP = 1 << 16  # bytes between two ranges that are read with them, rather than with two requests


class Range(NamedTuple):
    """Bytes ``start`` to ``stop`` - 1 of a file. A remote one must have ``size`` bytes; None: any
    number.
    """

    url: str
    start: int
    stop: int
    size: int | None = None


# Bytes of a file, and which byte of it the first one is. If the file ends before a requested range,
# there are fewer.
Part = tuple[bytes | mmap.mmap, int]


class Run:
    """Consecutive ranges of a file.

    Attributes:
        ranges: those that are not yet read.
        start: the first byte of the first one.
        stop: the byte after the last one.
    """

    def __init__(self, reader: RangeReader, first: Range) -> None:
        self._reader = reader
        self.url, self.start, self.stop, self._size = first
        self.ranges = deque([first])
        self._stream: RemoteShard | None = None
        self._error: Exception | None = None  # why it cannot be requested
        self._held, self._base = b"", self.start  # bytes that were read, and the place of the first one

    def add(self, wanted: Range, most: int) -> bool:
        """Add the next range; return False if it does not belong to the run, which has at most
        ``most`` bytes.
        """
        fits = (
            wanted.url == self.url
            and self.ranges[-1].start <= wanted.start <= self.stop + GAP
            and wanted.stop - self.start <= most
        )
        if fits:
            self.ranges.append(wanted)
            self.stop = max(self.stop, wanted.stop)
        return fits

    def request(self, queue: RangeQueue) -> None:
        """Request the bytes."""
        start = self.ranges[0].start
        self._held, self._base = b"", start
        try:
            size, reported = self._size, self._reader.reported(self.url)
            self._stream = self._reader.opener.open_range(
                self.url, start, self.stop, queue, size=size, reported=reported
            )
        except ShardError as error:
            self._error = error

    def read_next(self, parts: Parts) -> Part:
        """Return the part with the next range."""
        if self._stream is None and self._error is None:
            part = self._reader.map(*self.ranges[0][:3])
            if part is not None:
                self.ranges.popleft()
                return part
            self.request(parts.queue)  # the cache has removed it meanwhile
        wanted = self.ranges.popleft()
        try:
            if self._error is not None:
                raise self._error
            part = self._read(wanted)
            self._reader.compare(self.url, self._reader.reported(self.url).validators.get("etag"))
            return part
        except Exception:
            self.close()
            if self.ranges:  # they are requested without it
                self._error = None
                self.request(parts.queue)
            raise

    def _read(self, wanted: Range) -> Part:
        held, base = self._held, self._base
        end = base + len(held)
        if end < wanted.stop:
            base = min(max(base, wanted.start), end)
            chunks = [held[base - end :]] if base < end else []
            while end < wanted.stop and (chunk := self._next_chunk()):
                end += len(chunk)
                if end <= wanted.start:  # it is all between two ranges
                    base = end
                else:
                    chunks.append(chunk)
            self._held, self._base = chunks[0] if len(chunks) == 1 else b"".join(chunks), base
        return self._held, self._base

    def _next_chunk(self) -> bytes:
        """Return the next bytes; none if the file ends."""
        assert self._stream is not None
        try:
            return self._stream.next_chunk()
        except StateError:  # the file ends before the range
            return b""
        except UnreadError as error:
            shown = redact(self.url)
            problem = ShardError(f"shard {shown}: {error}.", url=shown)
            problem.__cause__ = error.__cause__
        raise problem

    def close(self) -> None:
        """Cancel the request if it runs."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
