"""The stream of a shard that is in the cache or is being downloaded into it."""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from dataclasses import replace
from typing import Any

from wds_pipes.errors import CacheError, ShardError
from wds_pipes.io.cache.download import CHUNK, Download, Fetch, Fetched, FullError, chunks, md5_of, using
from wds_pipes.io.cache.files import CacheDirectory, Entry, Facts, boot
from wds_pipes.io.locks import LockedFile, open_locked

# After this long without a byte from another process's download, read directly from the store.
STALL_SECONDS = 60.0
FULL_SECONDS = 60.0  # after the disk was full, nothing is stored for this long
POLL_SECONDS = 0.02
# Directories whose disk was full (a warning was issued), and when to try again.
_full: dict[str, float] = {}


class CachedStream(io.RawIOBase):
    """A shard that is stored, is being stored (by this process or another), or cannot be stored."""

    def __init__(self, directory: str, max_bytes: int, entry: Entry, fetch: Fetch, expected: Facts) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._directory = CacheDirectory(directory)
        self._max_bytes = max_bytes
        self._entry, self._fetch, self._expected = entry, fetch, expected
        self._position = 0
        self._given = 0  # the reader has received the bytes up to here
        self._file: LockedFile | None = None
        self._complete = False
        self._download: Download | None = None
        self._direct: Fetched | None = None
        # Of all bytes read, if the rest comes directly from the store and the MD5 is known.
        self._checksum: Any = None
        self._facts: Facts | None = None  # about the bytes that were read
        self._broken: ShardError | None = None  # why nothing more may be read
        self._doubted = False

    def begin(self, start: int) -> None:
        """Open the stored shard, start to store it, or read it directly from the store."""
        self._position = start
        if self.begin_stored():
            return
        if start or time.monotonic() < _full.get(self._directory.path, 0.0):
            self._go_direct()
        else:
            self._advance()

    def begin_stored(self) -> bool:
        """Open the stored shard; return whether there is one."""
        whole = self._open_whole()
        if whole is not None:
            self._take(whole)
        return whole is not None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._direct is None

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("this shard has no file")
        return self._file.fd

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if not self.seekable():
            raise io.UnsupportedOperation("a shard that is read straight from its store cannot be sought")
        self._position = max(0, offset + (0, self._position, self._end() if whence == os.SEEK_END else 0)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        while self._direct is None:
            self._check_open()
            if self._file is not None and (self._complete or not self._file.removed):
                with using(self._directory):
                    count = os.preadv(self._file.fd, [buffer], self._position)
                if count or self._complete or not len(buffer):
                    break
            self._advance()
        else:
            chunk = self._direct.read(len(buffer))
            count = len(chunk)
            buffer[:count] = chunk
            if self._checksum is not None:
                self._checksum.update(chunk)
            if not count and self._expected.size is not None and self._position < self._expected.size:
                raise ShardError(
                    f"shard {self._expected.url} ended after {self._position} of {self._expected.size} bytes.",
                    url=self._expected.url,
                    offset=self._position,
                )
            if (
                not count
                and len(buffer)
                and self._checksum is not None
                and self._checksum.hexdigest() != self._expected.md5
            ):
                raise self._wrong(f"as its MD5 is {self._checksum.hexdigest()} instead of {self._expected.md5}")
        self._position += count
        self._given = max(self._given, self._position)
        return count

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
        with contextlib.suppress(OSError, CacheError):
            if self._doubted:
                self._entry.remove()
            self._directory.trim(self._max_bytes)

    def doubt(self) -> str | None:
        """The reader reports that the shard is unreadable.

        Its file is removed when it is closed, unless the MD5 of the shard is known.

        Returns:
            The path of the file that will be removed, or None.
        """
        if (
            self._file is None
            or self._expected.md5 is not None
            or (self._facts is not None and self._facts.md5 is not None)
        ):
            return None
        self._doubted = True
        return self._entry.whole

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("read of a closed shard")
        if os.getpid() != self._pid:
            raise ValueError("a shard of a cache was opened before a fork: open it in the process that reads it")
        if self._broken is not None:
            raise self._broken

    def _end(self) -> int:
        """The size of the shard in bytes. Waits for the download if the size is not known."""
        size = self._facts.size if self._facts is not None else None
        if self._file is not None and not self._complete and size is not None:
            return size
        while not self._complete and self._direct is None and self._file is not None:
            self._position = self._file.size
            self._advance()
        if self._direct is not None or self._file is None:
            raise io.UnsupportedOperation("the size of this shard is not known")
        return self._file.size

    def _advance(self) -> None:
        """Wait until there are bytes at the position, or until no more will come."""
        pause, patience, seen, stored = 0.001, time.monotonic() + STALL_SECONDS, 0, -1
        while True:
            self._check_open()
            if self._download is not None:
                seen = self._download.news
            try:
                if self._look():
                    return
            except FullError as error:
                self._give_up(str(error))
                return
            if self._download is not None:
                self._download.wait(seen)
                continue
            with using(self._directory):
                growing = self._entry.growing()
            if growing != stored:
                stored, patience = growing, time.monotonic() + STALL_SECONDS
            elif time.monotonic() > patience:
                if self._file is not None and self._given and self._file.removed:
                    raise self._wrong("and could not be downloaded again")
                self._go_direct()
                return
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)

    def _look(self) -> bool:
        """Examine the download and the files once; return whether reading can continue."""
        # Read this before the files: they are then as the download left them.
        ended = self._download is not None and not self._download.running
        if self._has_more():
            return True
        whole = self._open_whole()
        if whole is not None:
            self._take(whole)
            return True
        if ended and self._file is None and self._open_growing():
            return True  # it failed before its file was opened here; read the bytes that came first
        if ended and self._end_download():
            return True
        if self._download is None:
            with using(self._directory):
                os.makedirs(self._directory.path, 0o700, exist_ok=True)
                lock = self._entry.lock()
            if lock is not None:
                try:
                    whole = self._open_whole()  # it may have become complete just now
                except BaseException:
                    lock.close()
                    raise
                if whole is not None:
                    lock.close()
                    self._take(whole)
                    return True
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
        return self._has_more() if self._file is not None else self._open_growing()

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
        if download.full is not None:
            if download.problem is not None and self._given:
                raise self._wrong("and could not be stored again, as the disk is full")
            raise FullError(download.full)
        return False

    def _open_growing(self) -> bool:
        """Open the file of a running download, if any; return whether it has bytes to read."""
        with using(self._directory):
            self._facts = self._entry.read()
            if self._facts is not None and self._facts.boot == boot():
                self._file = open_locked(self._entry.part, shared=True, wait=True)
        return self._has_more()

    def _has_more(self) -> bool:
        """Whether the file has bytes at the position and was not removed."""
        return self._file is not None and self._file.size > self._position and not self._file.removed

    def _open_whole(self) -> LockedFile | None:
        """Open the complete file, if it exists and is valid."""
        with using(self._directory):
            file = open_locked(self._entry.whole, shared=True, wait=True)
        if file is None:
            return None
        try:
            with using(self._directory):
                if self._is_good(file):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _is_good(self, file: LockedFile) -> bool:
        facts, size = self._entry.read(), file.size
        if facts is None or facts.size != size or self._expected.size not in (None, size) or file.removed:
            # The facts are about another file.
            return False
        md5 = self._expected.md5
        if facts.md5 is not None and md5 is not None and facts.md5 != md5:
            return False
        # After a power failure, a file may have its size but not all its bytes.
        unsure = facts.boot != boot()
        if unsure and size and os.lseek(file.fd, 0, os.SEEK_HOLE) < size:
            return False
        if md5 is not None and (unsure or facts.md5 is None):
            if md5_of(file, size).hexdigest() != md5:
                return False
            with contextlib.suppress(OSError):
                # The disk is full or read-only: the MD5 is compared again the next time.
                lock = self._entry.lock()
                if lock is not None:
                    try:
                        self._entry.write(lock, replace(facts, md5=md5, boot=boot()))
                    finally:
                        lock.close()
        self._facts = facts
        return True

    def _take(self, whole: LockedFile) -> None:
        """Continue with the complete file; ShardError if it differs from the bytes read so far."""
        with contextlib.suppress(OSError):
            os.utime(whole.fd)
        if self._file is not None and os.path.samestat(os.fstat(self._file.fd), os.fstat(whole.fd)):
            whole.close()
        else:
            read, self._file = self._file, whole
            if read is not None:
                same = all(
                    chunk == os.pread(whole.fd, len(chunk), place * CHUNK)
                    for place, chunk in enumerate(chunks(read, self._given))
                )
                read.close()
                if not same:
                    raise self._wrong("and has been stored again")
        self._complete = True

    def _wrong(self, since: str) -> ShardError:
        self._broken = ShardError(
            f"shard {self._expected.url} was damaged on its way or changed at its store while "
            f"it was read, {since}: what was read of it, up to byte "
            f"{self._given}, is wrong. Start again from a checkpoint before this shard.",
            url=self._expected.url,
            offset=self._given,
        )
        return self._broken

    def _give_up(self, reason: str) -> None:
        """The disk is full: continue directly from the store, with one warning per directory."""
        warned = self._directory.path in _full
        _full[self._directory.path] = time.monotonic() + FULL_SECONDS
        self._go_direct()
        if not warned:
            warnings.warn(
                f"the disk of the cache {self._directory.path} is full ({reason}): shards are "
                "read without storing them. Free some space, or lower its limit.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _go_direct(self) -> None:
        """Continue directly from the store."""
        if self._expected.md5 is not None and (
            self._position == 0 or (self._file is not None and self._given >= self._position)
        ):
            self._checksum = md5_of(self._file, self._position)
        direct = self._direct = self._fetch(self._position)
        direct.wait()
        if self._expected.size is None:
            self._expected = replace(self._expected, size=direct.size)
        etag = self._facts.tag if self._facts is not None and self._given else None
        if direct.size not in (None, self._expected.size) or (etag is not None and direct.tag not in (None, etag)):
            raise ShardError(
                f"shard {self._expected.url} is not what it should be: it has {direct.size} "
                f"bytes and the ETag {direct.tag}, instead of "
                f"{self._expected.size} bytes and the ETag {etag or direct.tag}.",
                url=self._expected.url,
                offset=self._position,
            )
