"""The download of a shard into the cache, in its own thread."""

from __future__ import annotations

import contextlib
import errno
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import md5 as md5_hash
from typing import Any, Protocol

from wds_pipes.errors import CacheError, ShardError
from wds_pipes.io.cache.files import FACTS_BYTES, STEP, CacheDirectory, Entry, Facts, boot
from wds_pipes.io.compression import detect
from wds_pipes.io.locks import LockedFile, open_locked

# If at most this many bytes are missing when a reader closes the shard, the download gets
# NEARLY_SECONDS to finish: a tar's reader may close it before the padding at its end.
NEARLY = 4 << 20
NEARLY_SECONDS = 2.0
# Bytes that are read from the store and stored at a time: few at first, so that
# readers get bytes early.
FIRST, CHUNK = 1 << 16, 1 << 20


class Fetched(Protocol):
    """The stream of a shard from the store, from some byte on.

    ``close`` may be called while another thread is in ``wait`` or ``read``. These calls must then
    end, with a result or an error.
    """

    def wait(self) -> object:
        """Wait for the response of the store: then size and tag are known."""

    @property
    def size(self) -> int | None:
        """The size of the whole object in bytes; None if the store has not reported it."""

    @property
    def tag(self) -> str | None:
        """The ETag of the object, which changes with its content; None if the store has none."""

    def read(self, n: int, /) -> bytes:
        """At most ``n`` bytes; none at the end."""

    def close(self) -> None:
        """End the transfer. Closing again does nothing."""


Fetch = Callable[[int], Fetched]


class FullError(Exception):
    """The disk cannot store more bytes."""


class _StoppedError(Exception):
    """The readers in this process have stopped the download."""


@contextlib.contextmanager
def using(directory: CacheDirectory) -> Iterator[None]:
    """Raise errors of the cache's files as FullError or CacheError.

    This distinguishes them from errors of the store.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise FullError(str(error)) from error
        raise CacheError(
            f"the cache {directory.path} cannot be used ({type(error).__name__}: {error}). "
            "Give a directory that this user may write, or read without a cache.",
            path=directory.path,
        ) from error


class Download(threading.Thread):
    """The download of a shard into the cache.

    It holds the lock of the entry. It ends as soon as it is stopped.

    Attributes:
        news: a number that changes whenever the state of the download does.
        running: whether it may still store something.
        error: the error that ended it.
        full: the system's message when the disk was full.
        problem: what was wrong with the bytes of the first attempt.
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
        self.news = 0
        self.running = True
        self.error: BaseException | None = None
        self.full: str | None = None
        self.problem: str | None = None
        self.passing = False
        self.file: LockedFile | None = None
        self._directory, self._entry, self._lock, self._fetch, self._expected, self._max_bytes = (
            directory,
            entry,
            lock,
            fetch,
            expected,
            max_bytes,
        )
        self._changed = threading.Condition()
        self._stream: Fetched | None = None
        self._stopping = False
        self._left: int | None = None  # bytes that have not arrived yet

    def wait(self, seen: int) -> None:
        """Wait until ``news`` differs from ``seen``."""
        with self._changed:
            self._changed.wait_for(lambda: self.news != seen)

    def stop(self) -> None:
        """End the download, and close the file."""
        within = threading.current_thread() is self  # if the garbage collector runs in this thread
        if self._left is not None and self._left <= NEARLY and not within:
            self.join(NEARLY_SECONDS)
        with self._changed:
            self._stopping = True
            stream = self._stream
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()
        if not within:
            self.join()
            if self.file is not None:
                self.file.close()

    def run(self) -> None:
        try:
            with using(self._directory):
                self._directory.sweep_once()
            with using(self._directory), contextlib.suppress(FileNotFoundError):
                # It is not valid, and the .json will describe the new download.
                os.remove(self._entry.whole)
            self.problem = self._store()
            if self.problem is not None:
                self._discard()
                problem = self._store()
                if problem is not None:
                    self._discard()
                    raise ShardError(
                        f"shard {self._expected.url} was downloaded twice, and both times {problem}.",
                        url=self._expected.url,
                    )
        except _StoppedError:
            pass
        except FullError as error:
            self.full = str(error)
            self._discard()
        except BaseException as error:
            self.error = None if self._stopping else error
        finally:
            self._end()

    def _end(self) -> None:
        """Release everything, and notify the readers, whatever fails."""
        try:
            self._end_stream()
            with contextlib.suppress(OSError):
                if not self._entry.growing():
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(self._entry.part)
                    if not os.path.exists(self._entry.whole):
                        os.remove(self._entry.known)
            with contextlib.suppress(OSError):
                self._lock.close()
            if self._stopping and self.file is not None:
                self.file.close()
        finally:
            self.running = False
            self._tell()

    def _tell(self) -> None:
        with self._changed:
            self.news += 1
            self._changed.notify_all()

    def _begin_stream(self, offset: int) -> Fetched:
        self._end_stream()
        stream = self._fetch(offset)
        with self._changed:
            self._stream = stream
            if self._stopping:
                raise _StoppedError
        stream.wait()
        return stream

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()

    def _discard(self) -> None:
        """Remove what is stored; its readers keep the file that they have open."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._entry.part)
        if self.file is not None:
            self.file.close()

    def _open_part(self) -> LockedFile:
        with using(self._directory):
            self.file = open_locked(self._entry.part, os.O_RDWR | os.O_CREAT, shared=True, wait=True)
        if self.file is None:
            raise CacheError(
                f"the cache {self._directory.path} was removed while it was in use: start again.",
                path=self._directory.path,
            )
        return self.file

    def _store(self) -> str | None:
        """Store the shard; return what is wrong with it, or None."""
        file, stream, offset = self._connect()
        # If only the transfer has ended, the size of the stream is the number of bytes that came:
        # see ``RemoteShard.end_is_vouched_for``. The lengths of other streams are taken as true.
        size = stream.size if getattr(stream, "end_is_vouched_for", True) else None
        if size is not None and self._expected.size is not None and size != self._expected.size:
            return f"it had {size} bytes instead of {self._expected.size}"
        total = size if size is not None else self._expected.size
        facts = Facts(self._expected.url, size=total, tag=stream.tag, boot=boot())
        with using(self._directory):
            self._entry.write(self._lock, facts)
            self._directory.reserve(
                (2 * STEP if total is None else total - offset) + FACTS_BYTES + len(facts.url), self._max_bytes
            )
        self._tell()
        checksum = md5_of(file, offset) if self._expected.md5 is not None else None
        end = self._copy(stream, file, offset, total, checksum)
        if total is not None and end > total:
            return f"it had more bytes than {total}"
        if total is not None and end != total:
            return f"it ended after {end} of {total} bytes"
        md5 = checksum.hexdigest() if checksum is not None else None
        if md5 != self._expected.md5:
            return f"its MD5 was {md5} instead of {self._expected.md5}"
        with using(self._directory):
            if md5 is None and not _is_vouched_for(file, total):
                self.passing = True
                os.remove(self._entry.part)
            else:
                self._check_alone(file)
                self._entry.write(self._lock, replace(facts, size=end, md5=md5))
                os.replace(self._entry.part, self._entry.whole)
        return None

    def _check_alone(self, file: LockedFile) -> None:
        """Raise CacheError if another process has replaced the .part, which the lock forbids."""
        try:
            alone = os.path.samestat(os.stat(self._entry.part), os.fstat(file.fd))
        except FileNotFoundError:
            alone = False
        if not alone:
            raise CacheError(
                f"a file of the cache {self._directory.path} was replaced while it was written, as by another machine "
                "through a file system that keeps locks (flock) within one machine only. Give each machine a "
                "directory of its own, on its own disk.",
                path=self._directory.path,
            )

    def _connect(self) -> tuple[LockedFile, Fetched, int]:
        """Open the file and the stream of the store; return them, and the byte from which both
        continue.
        """
        with using(self._directory):
            known = self._entry.read()
        file = self._open_part()
        with using(self._directory):
            self._entry.write(self._lock, Facts(self._expected.url))
        offset = self._usable(file, known)
        stream = self._begin_stream(offset)
        if offset and known is not None and (stream.size, stream.tag) != (known.size, known.tag):
            offset = 0
            stream = self._begin_stream(0)
        if file.size and not offset:
            self._discard()
            file = self._open_part()
        return file, stream, offset

    def _copy(self, stream: Fetched, file: LockedFile, offset: int, total: int | None, checksum: Any) -> int:
        """Store the bytes from ``offset`` on, and add them to the checksum of those before.

        Returns:
            The byte after the last one. It is more than ``total`` if the store has more bytes; then
            these are not stored.
        """
        begin = offset
        while True:
            self._left = total - offset if total is not None else None
            chunk = stream.read(min(CHUNK, max(FIRST, offset - begin)))
            if self._stopping:
                raise _StoppedError
            if not chunk or (total is not None and offset + len(chunk) > total):
                return offset + len(chunk)
            if checksum is not None:
                checksum.update(chunk)
            with using(self._directory):
                _write(file, chunk, offset)
                offset += len(chunk)
                if total is None and offset // STEP != (offset - len(chunk)) // STEP:
                    self._directory.reserve(STEP, self._max_bytes)
            self._tell()

    def _usable(self, file: LockedFile, known: Facts | None) -> int:
        """The byte from which an earlier download continues; 0 if it cannot.

        At least the last byte is always requested, so that the response says which object it is.
        """
        have = file.size
        if (
            known is None
            or known.boot != boot()
            or known.size is None
            or have > known.size
            or (known.tag is None and self._expected.md5 is None)
        ):
            return 0
        return max(0, min(have, known.size - 1))


def chunks(file: LockedFile, end: int) -> Iterator[bytes]:
    """The bytes of ``file`` before ``end``."""
    for place in range(0, end, CHUNK):
        yield os.pread(file.fd, min(CHUNK, end - place), place)


def md5_of(file: LockedFile | None, end: int) -> Any:
    """The MD5 of the bytes of ``file`` before ``end``, to which more can be added. None: there are
    no bytes yet.
    """
    md5 = md5_hash(usedforsecurity=False)
    for chunk in chunks(file, end) if file is not None else ():
        md5.update(chunk)
    return md5


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


def _write(file: LockedFile, chunk: bytes, offset: int) -> None:
    left = memoryview(chunk)
    while left:
        count = os.pwrite(file.fd, left, offset)
        left, offset = left[count:], offset + count
