"""The stream of a shard that is in the cache or is being downloaded into it; and this download, in
its own thread.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wds_pipes.errors import CacheError, ShardError
from wds_pipes.io.cache.files import (
    CHUNK,
    FACTS_BYTES,
    STEP,
    CacheDirectory,
    CacheEntry,
    CacheFacts,
    FullError,
    boot,
    chunks,
    guarded,
    md5_of,
)
from wds_pipes.io.compression import detect
from wds_pipes.io.locks import LockedFile
from wds_pipes.io.verified import Verified

if TYPE_CHECKING:
    from wds_pipes.io.remote.queue import RemoteShard

FIRST = 1 << 16  # bytes that are read at first, so that readers get bytes early

# Requests a shard from a byte on, and does not wait for the response. ``close`` of the stream may
# be called while another thread is in ``wait`` or ``read``, which then end.
RequestFrom = Callable[[int], "RemoteShard"]
# After this long without a byte from another process's download, read directly from the store.
STALL_SECONDS = 60.0
FULL_SECONDS = 60.0  # after the disk was full, nothing is stored for this long
POLL_SECONDS = 0.02
# Directories whose disk was full (a warning was issued), and when to try again.
_full: dict[str, float] = {}


class CachedStream(io.RawIOBase):
    """A shard that is stored, is being stored (by this process or another), or cannot be stored."""

    def __init__(
        self, directory: str, max_bytes: int, entry: CacheEntry, fetch: RequestFrom, expected: CacheFacts
    ) -> None:
        super().__init__()
        self.path = directory
        self._pid = os.getpid()
        self._directory = CacheDirectory(directory)
        self._max_bytes = max_bytes
        self._entry, self._fetch, self._expected = entry, fetch, expected
        self._position = 0
        self._given = 0  # the reader has received the bytes up to here
        self._file: LockedFile | None = None
        self._complete = False
        self._download: Download | None = None
        self._direct: Any = None
        self._facts: CacheFacts | None = None  # about the bytes that were read
        self._broken: ShardError | None = None  # why nothing more may be read
        self._doubted = False

    def begin(self, start: int) -> None:
        """Open the stored shard, start to store it, or read it directly from the store."""
        self._position = start
        if self._open_whole():
            return
        if start or time.monotonic() < _full.get(self.path, 0.0):
            self._go_direct()
        else:
            self._advance()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._direct is None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        end = self._end() if whence == os.SEEK_END else 0
        if self._direct is not None:
            raise io.UnsupportedOperation("a shard that is read straight from its store cannot be sought")
        self._position = max(0, offset + (0, self._position, end)[whence])
        return self._position

    def _end(self) -> int:
        """The size of the shard in bytes. Waits for the download if the size is not known."""
        while self._direct is None and not self._complete:
            if self._facts is not None and self._facts.size is not None:
                return self._facts.size
            self._position = self._file.size if self._file is not None else 0
            self._advance()
        return self._file.size if self._file is not None else 0

    def readinto(self, buffer: Any) -> int:
        self._check_open()
        while self._direct is None and not self._complete and not self._has_more():
            self._advance()
        count: int = self._direct.readinto(buffer) if self._direct is not None else self._read_file(buffer)
        self._position += count
        self._given = max(self._given, self._position)
        return count

    @guarded
    def _read_file(self, buffer: Any) -> int:
        assert self._file is not None
        return os.preadv(self._file.fd, [buffer], self._position)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if os.getpid() != self._pid:
            return
        with contextlib.ExitStack() as stack:
            if self._direct is not None:
                stack.callback(self._direct.close)
            if self._file is not None:
                stack.callback(self._leave)
                stack.callback(self._file.close)
            if self._download is not None:
                stack.callback(self._download.stop)

    def _leave(self) -> None:
        """Called when the file is closed: remove it if it is in doubt, and trim the cache."""
        with contextlib.suppress(FullError, CacheError):
            if self._doubted:
                self._entry.remove()
            self._directory.reserve(0, self._max_bytes)

    def doubt(self) -> str | None:
        """The reader reports that the shard is unreadable.

        Its file is removed when it is closed, unless the MD5 of the shard is known.

        Returns:
            The path of the file that will be removed, or None.
        """
        md5 = self._expected.md5 or (self._facts and self._facts.md5)
        self._doubted = self._file is not None and md5 is None
        return self._entry.whole if self._doubted else None

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("read of a closed shard")
        if os.getpid() != self._pid:
            raise ValueError("a shard of a cache was opened before a fork: open it in the process that reads it")
        if self._broken is not None:
            raise self._broken

    def _advance(self) -> None:
        """Wait until there are bytes at the position, or until no more will come."""
        pause, patience, stored = 0.001, time.monotonic() + STALL_SECONDS, -1
        try:
            while not self._look():
                growing = self._entry.growing()
                if growing != stored or self._download is not None:
                    stored, patience = growing, time.monotonic() + STALL_SECONDS
                elif time.monotonic() > patience:
                    self._go_direct()
                    return
                if self._download is None:
                    time.sleep(pause)
                else:
                    self._download.ended.wait(pause)
                pause = min(2 * pause, POLL_SECONDS)
        except FullError as error:
            self._give_up(str(error))

    def _look(self) -> bool:
        """Examine the download and the files once; return whether reading can continue."""
        self._check_open()
        # Read this before the files: they are then as the download left them.
        ended = self._download is not None and self._download.ended.is_set()
        if self._has_more() or ((ended or self._download is None) and self._open_whole()):
            return True
        # If the download failed before its file was opened here, what came is read first.
        if self._file is None and self._download is not None and self._download.begun and self._open_part():
            return True
        if ended and self._end_download():
            return True
        if self._download is not None:
            return False
        lock = self._entry.lock()
        if lock is None:
            return self._file is None and self._open_part()
        self._download = Download(
            lock,
            directory=self._directory,
            entry=self._entry,
            fetch=self._fetch,
            expected=self._expected,
            max_bytes=self._max_bytes,
        )
        self._download.start()
        return False

    def _end_download(self) -> bool:
        """Handle the end of the download; return whether its bytes can be read.

        Raises:
            FullError: the disk is full.
            BaseException: whatever else has ended it.
        """
        assert self._download is not None
        download, self._download = self._download, None
        if download.passing:
            assert download.file is not None
            self._take(download.file)
            return True
        download.stop()
        if download.error is not None:
            raise download.error
        return False

    def _open_part(self) -> bool:
        """Open the file of a running download, if any; return whether it has bytes to read."""
        self._file, self._facts = self._entry.open_part()
        return self._has_more()

    def _has_more(self) -> bool:
        """Whether the file has bytes at the position and was not removed."""
        return self._file is not None and self._file.size > self._position and not self._file.removed

    def _open_whole(self) -> bool:
        """Open the complete file; return whether it exists and is valid."""
        found = self._entry.open_whole(self._expected)
        if found is not None:
            self._facts = found[1]
            self._take(found[0])
        return found is not None

    def _take(self, whole: LockedFile) -> None:
        """Continue with the complete file; ShardError if it differs from the bytes read so far."""
        with contextlib.suppress(OSError):
            os.utime(whole.fd)
        read, self._file, self._complete = self._file, whole, True
        if read is None:
            return
        with contextlib.closing(read):
            if not os.path.samestat(os.fstat(read.fd), os.fstat(whole.fd)) and any(
                chunk != other
                for chunk, other in zip(chunks(read, self._given), chunks(whole, self._given), strict=True)
            ):
                raise self._wrong()

    def _wrong(self) -> ShardError:
        self._broken = ShardError(
            f"shard {self._expected.url} was damaged on its way or changed at its store while it was read: what was "
            f"read of it, up to byte {self._given}, is wrong. Start again from a checkpoint before this shard.",
            url=self._expected.url,
            offset=self._given,
        )
        return self._broken

    def _give_up(self, reason: str) -> None:
        """The disk is full: continue directly from the store, with one warning per directory."""
        warned = self.path in _full
        _full[self.path] = time.monotonic() + FULL_SECONDS
        self._go_direct()
        if not warned:
            warnings.warn(
                f"the disk of the cache {self.path} is full ({reason}): shards are "
                "read without storing them. Free some space, or lower its limit.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _go_direct(self) -> None:
        """Continue directly from the store."""
        md5, direct = self._expected.md5, self._fetch(self._position)
        self._direct = direct
        direct.wait()
        if self._facts is not None and self._given:
            before_and_now = (self._facts.size, direct.object.size), (self._facts.tag, direct.object.etag)
            if any(None not in pair and pair[0] != pair[1] for pair in before_and_now):
                raise self._wrong()
        if md5 is not None and (self._position == 0 or (self._file is not None and self._given >= self._position)):
            self._direct = Verified(direct, md5, md5_of(self._file, self._position))


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
        entry: CacheEntry,
        fetch: RequestFrom,
        expected: CacheFacts,
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
        facts = CacheFacts(self._expected.url, size=total, tag=stream.object.etag, boot=boot())
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
        self._entry.write(self._lock, CacheFacts(self._expected.url))
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
