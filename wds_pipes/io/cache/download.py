"""The download of a shard into the cache, in its own thread."""

from __future__ import annotations

import contextlib
import os
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wds_pipes.errors import CacheError, ShardError
from wds_pipes.io.cache.files import (
    CHUNK,
    FACTS_BYTES,
    STEP,
    CacheDirectory,
    Entry,
    Facts,
    FullError,
    boot,
    guarded,
    md5_of,
)
from wds_pipes.io.compression import detect
from wds_pipes.io.locks import LockedFile

if TYPE_CHECKING:
    from wds_pipes.io.remote.queue import RemoteShard

FIRST = 1 << 16  # bytes that are read at first, so that readers get bytes early

# Requests a shard from a byte on, and does not wait for the response. ``close`` of the stream may
# be called while another thread is in ``wait`` or ``read``, which then end.
Fetch = Callable[[int], "RemoteShard"]


class _StoppedError(Exception):
    """The readers in this process have stopped the download."""


class Download(threading.Thread):
    """The download of a shard into the cache.

    It holds the lock of the entry. It ends as soon as it is stopped.

    Attributes:
        path: the directory of the cache.
        ended: set when it has ended, and the files are as it left them.
        begun: what is known about the shard concerns this download, not an earlier one.
        error: the error that ended it.
        passing: it reached its end, but its completeness is not confirmed (rule 5): the bytes are
            in ``file``, which has no name any more.
        file: the .part, later the complete file; it stays open until ``stop``, so that it is not
            evicted.
    """

    def __init__(
        self,
        lock: LockedFile,
        *,
        directory: CacheDirectory,
        entry: Entry,
        fetch: Fetch,
        expected: Facts,
        max_bytes: int,
    ) -> None:
        super().__init__(name="wds_pipes-cache", daemon=True)
        self.path = directory.path
        self.error: BaseException | None = None
        self.ended = threading.Event()  # a signal may end a wait for it, but would break ``join``
        self.begun = self.passing = False
        self.file: LockedFile | None = None
        self._lock, self._directory, self._entry = lock, directory, entry
        self._fetch, self._expected, self._max_bytes = fetch, expected, max_bytes
        self._stream: RemoteShard | None = None
        self._stopping = False

    def stop(self) -> None:
        """End the download, and close the file."""
        within = threading.current_thread() is self  # if the garbage collector runs in this thread
        self._stopping = True
        self._end_stream()
        if not within:
            self.join()
            self._close_file()

    def run(self) -> None:
        try:
            self._store_twice()
        except BaseException as error:
            self.error = None if self._stopping else error
            if isinstance(error, FullError):
                self._discard()
        finally:
            try:
                self._end()
            finally:
                self.ended.set()

    def _store_twice(self) -> None:
        """Store the shard, and if something is wrong with it, once more."""
        if (there := self._entry.open_whole(self._expected)) is not None:
            there[0].close()  # it has become complete just now
            return
        self._entry.discard(self._entry.whole)  # it is not valid, and the .json will describe the new download
        for _ in range(2):
            problem = self._store()
            if problem is None:
                return
            self._discard()
        raise ShardError(
            f"shard {self._expected.url} was downloaded twice, and both times {problem}.", url=self._expected.url
        )

    def _end(self) -> None:
        """Release everything, and remove files that nothing continues from."""
        self._end_stream()
        with contextlib.suppress(FullError, CacheError):
            if not self._entry.growing():
                is_stored = os.path.exists(self._entry.whole)
                self._entry.discard(self._entry.part, *([] if is_stored else [self._entry.known]))
        with contextlib.suppress(OSError):
            self._lock.close()
        if self._stopping:
            self._close_file()

    def _close_file(self) -> None:
        if self.file is not None:
            self.file.close()

    def _discard(self) -> None:
        """Remove what is stored; its readers keep the file that they have open."""
        self._entry.discard(self._entry.part)
        self._close_file()

    def _begin_stream(self, offset: int) -> RemoteShard:
        self._end_stream()
        self._stream = stream = self._fetch(offset)
        if self._stopping:  # ``stop`` may not have seen the stream
            raise _StoppedError
        stream.wait()
        return stream

    def _end_stream(self) -> None:
        if (stream := self._stream) is not None:
            with contextlib.suppress(Exception):
                stream.close()

    def _store(self) -> str | None:
        """Store the shard; return what is wrong with it, or None."""
        file, stream, offset = self._connect()
        total = self._expected.size
        if total is None and stream.object.end_is_vouched_for:  # otherwise, it is the number of bytes that came
            total = stream.object.size
        facts = Facts(self._expected.url, size=total, tag=stream.object.etag, boot=boot())
        self._entry.write(self._lock, facts)
        self._directory.reserve(
            (2 * STEP if total is None else total - offset) + FACTS_BYTES + len(facts.url), self._max_bytes
        )
        checksum = md5_of(file, offset) if self._expected.md5 is not None else None
        end = self._copy(stream, file, offset, total, checksum)
        if total is not None and end != total:
            return f"it had {end} bytes instead of {total}"
        md5 = checksum.hexdigest() if checksum is not None else None
        if md5 != self._expected.md5:
            return f"its MD5 was {md5} instead of {self._expected.md5}"
        self.passing = md5 is None and not _is_vouched_for(file, total)
        if self.passing:
            self._entry.discard(self._entry.part)
        else:
            self._entry.complete(self._lock, file, replace(facts, size=end, md5=md5))
        return None

    def _connect(self) -> tuple[LockedFile, RemoteShard, int]:
        """Open the file and the stream of the store; return them, and the byte from which both
        continue.

        At least the last byte is always requested, so that the response says which object it is.
        """
        known = self._entry.read()
        file = self.file = self._entry.open_new_part()
        self._entry.write(self._lock, Facts(self._expected.url))
        self.begun = True
        offset = 0
        if (
            known is not None
            and known.size is not None
            and known.boot == boot()
            and file.size <= known.size
            and (known.tag is not None or self._expected.md5 is not None)
        ):
            offset = max(0, min(file.size, known.size - 1))
        stream = self._begin_stream(offset)
        if offset and known is not None and (stream.object.size, stream.object.etag) != (known.size, known.tag):
            offset = 0
            stream = self._begin_stream(0)
        if file.size and not offset:
            self._discard()
            file = self.file = self._entry.open_new_part()
        return file, stream, offset

    def _copy(self, stream: RemoteShard, file: LockedFile, offset: int, total: int | None, checksum: Any) -> int:
        """Store the bytes from ``offset`` on, and add them to the checksum of those before.

        Returns:
            The byte after the last one. It is more than ``total`` if the store has more bytes; then
            these are not stored.
        """
        begin = offset
        while True:
            chunk = stream.read(min(CHUNK, max(FIRST, offset - begin)))
            if self._stopping:
                raise _StoppedError
            if not chunk or (total is not None and offset + len(chunk) > total):
                return offset + len(chunk)
            if checksum is not None:
                checksum.update(chunk)
            self._write(file, chunk, offset)
            offset += len(chunk)
            if total is None and offset // STEP != (offset - len(chunk)) // STEP:
                self._directory.reserve(STEP, self._max_bytes)

    @guarded
    def _write(self, file: LockedFile, chunk: bytes, offset: int) -> None:
        left = memoryview(chunk)
        while left:
            count = os.pwrite(file.fd, left, offset)
            left, offset = left[count:], offset + count


def _is_vouched_for(file: LockedFile, size: int | None) -> bool:
    """Rule 5: whether bytes without a checksum are kept. ``size``: what the store or an index has
    reported.
    """
    head = os.pread(file.fd, tarfile.BLOCKSIZE, 0)
    if not detect(head) and head != bytes(tarfile.BLOCKSIZE):
        try:
            tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.TarError:
            return False
    return size is not None
