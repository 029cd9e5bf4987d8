"""A local cache of remote shards: stored while they are read, once per machine.

Rules:
1. One process at a time downloads a shard, in a thread; who else reads it, in any process, reads the file as it grows. When that process dies or stops, one
   that waits goes on from the byte reached, if the object is still the same.
2. A file is complete when it has its final name, and its end is given only then. Nothing is given from what an earlier download has left before the store
   has said that it is still the same object.
3. A wrong size or checksum is seen at the end. The shard is then downloaded once more, and who has read wrong bytes of it gets an error.
4. Where the disk is full, shards are read straight from the store.
5. Only what something vouches for is stored: a checksum; or a beginning like that of a tar or of a compressed one, and a length that the store or an index
   tells, or the end mark of the tar and that of its compression. Anything else (a page that asks for a password, an answer that was cut and had no length) is
   given to its reader and forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import tarfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import md5 as md5_hash
from typing import Any, BinaryIO, Protocol

from wds_pipes.errors import CacheError, ShardError
from wds_pipes.io.cache_files import FACTS_BYTES, STEP, CacheDirectory, Entry, Facts, boot
from wds_pipes.io.compression import decompress, detect
from wds_pipes.io.locks import LockedFile, open_locked
from wds_pipes.io.urls import redact

FIRST, CHUNK = 1 << 16, 1 << 20  # so much is taken from the store and stored at a time: little at first, so that there is something to read at once
NEARLY = 4 << 20  # with so little to come, a download gets some seconds to end: who reads a tar may close it before its padding
NEARLY_SECONDS = 2.0
STALL_SECONDS = 60.0  # after so long without a byte from another process's download, a shard is read straight from the store
FULL_SECONDS = 60.0  # after a full disk, nothing is stored for so long
POLL_SECONDS = 0.02

_SIZE = re.compile(r"(?i)\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*")
_full: dict[str, float] = {}  # directories whose disk was full, and when to try again; whoever is there has been warned


class Fetched(Protocol):
    """A shard that arrives from the store, from some byte on.

    ``close`` may be called while another thread is in ``wait`` or ``read``: these are then to end, in whatever way.
    """

    def wait(self) -> object:
        """Return when the store has answered, so that size and tag are known."""

    @property
    def size(self) -> int | None:
        """The bytes of the whole object, if the store has told."""

    @property
    def tag(self) -> str | None:
        """What the store calls this version of the object (ETag), if it has told."""

    def read(self, n: int, /) -> bytes:
        """At most ``n`` bytes; none at the end."""

    def close(self) -> None:
        """End it; again: nothing."""


Fetch = Callable[[int], Fetched]


def parse_size(size: int | str) -> int:
    """``"200GB"``, ``"50GiB"``, ``"1.5 TB"`` or a number as bytes.

    Raises:
        TypeError: it is neither an int nor a string.
        ValueError: it is no size, or nothing.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"a size is an int or a string such as '200GB', not {size!r}")
    if isinstance(size, str):
        parts = _SIZE.fullmatch(size)
        if parts is None or (parts[3] and not parts[2]):
            raise ValueError(f"{size!r} is not a size: write bytes, or a number with a unit such as 200GB or 50GiB")
        size = int(float(parts[1]) * (1024 if parts[3] else 1000) ** " kmgtp".index(parts[2].lower() or " "))
    if size < 1:
        raise ValueError(f"a size must be at least 1 byte, not {size}")
    return size


def cache_path(directory: str | os.PathLike[str] | None) -> str:
    """``directory`` or what WDS_PIPES_CACHE_DIR says, as an absolute path.

    Raises:
        ValueError: neither is there.
        TypeError: it is not a path.
    """
    directory = directory if directory is not None else os.environ.get("WDS_PIPES_CACHE_DIR") or None
    if directory is None:
        raise ValueError("the cache needs a directory: give one, or set WDS_PIPES_CACHE_DIR")
    path = os.fspath(directory)
    if not isinstance(path, str):
        raise TypeError(f"the directory of the cache must be a string or a path, not {path!r}")
    return os.path.abspath(os.path.expanduser(path))


def cache_limit(max_bytes: int | str | None) -> int:
    """``max_bytes`` or what WDS_PIPES_CACHE_SIZE says, in bytes.

    Raises:
        ValueError: neither is there, or it is not a size.
        TypeError: it is neither an int nor a string.
    """
    limit = max_bytes if max_bytes is not None else os.environ.get("WDS_PIPES_CACHE_SIZE") or None
    if limit is None:
        raise ValueError("the cache needs a limit: give a number of bytes or '200GB', or set WDS_PIPES_CACHE_SIZE")
    return parse_size(limit)


class ShardCache:
    """Shards that are stored in a local directory while they are read, for all processes of the machine.

    Of what is stored, the shards used least recently are removed when there would be more than ``max_bytes``; never one that is open in any process, so that
    all there ever is beyond the limit belongs to open shards. A stored shard is used without asking the store again: write changed data to a new URL.

    Args:
        directory: where, on a local disk; made if it is not there. None: what WDS_PIPES_CACHE_DIR says.
        max_bytes: how much is kept: an int, or a string such as ``"200GB"`` or ``"50GiB"``. None: what WDS_PIPES_CACHE_SIZE says.
        verify: check the MD5 of a shard where one is known.

    Raises:
        ValueError: a directory or limit is not given, or is not one.
        TypeError: an argument is of another type.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, max_bytes: int | str | None = None, verify: bool = True) -> None:
        if not isinstance(verify, bool):
            raise TypeError(f"verify must be True or False, not {verify!r}")
        self.directory = cache_path(directory)
        self.max_bytes = cache_limit(max_bytes)
        self.verify = verify

    def __repr__(self) -> str:
        return f"ShardCache({self.directory!r}, max_bytes={self.max_bytes}, verify={self.verify})"

    def open(self, url: str, fetch: Fetch, *, start: int = 0, size: int | None = None, md5: str | None = None, store: str = "") -> BinaryIO:
        """A buffered binary stream of the shard at ``url`` that stands at byte ``start``.

        It is to be read by one thread. Until the shard is stored, reading waits for its bytes, and seeking to its end for its size. A shard that is
        not stored and not wanted from its beginning is read straight from the store, is not stored, and cannot be sought.

        Args:
            url: the name of the shard.
            fetch: called with an offset, asks the store for the shard from there on, without waiting for an answer; retries are its own business. It is called
                in another thread.
            start: the first byte wanted.
            size: the bytes that it must have, if they are known.
            md5: the MD5 that they must have, in hexadecimal digits, if it is known.
            store: tells stores apart in which ``url`` means different things, such as the endpoint of S3.

        Raises:
            ShardError: here or from reading: the size or the checksum is wrong, twice; the shard changed while it was read.
            CacheError: the directory cannot be used.
            Exception: whatever ``fetch`` and its streams raise, here or from reading.
        """
        expected = Facts(redact(url), size, md5=md5.lower() if md5 is not None and self.verify else None)
        stream = _CachedStream(self, CacheDirectory(self.directory).entry(url, store), fetch, expected)
        try:
            stream.begin(start)
        except BaseException:
            stream.close()
            raise
        return io.BufferedReader(stream, 1 << 20)


class _FullError(Exception):
    """The disk takes no more."""


class _StoppedError(Exception):
    """Nobody here wants the download any more."""


@contextlib.contextmanager
def _using(directory: CacheDirectory) -> Iterator[None]:
    """Tell what goes wrong with the cache's files from what goes wrong with the store."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _FullError(str(error)) from error
        raise CacheError(
            f"the cache {directory.path} cannot be used ({type(error).__name__}: {error}). Give a directory that this user may write, or read without a cache.",
            path=directory.path,
        ) from error


class _Download(threading.Thread):
    """A shard on its way into the cache. It has the lock of the entry, and ends as soon as it is stopped.

    Attributes:
        news: changes whenever there is something to look at.
        running: whether it may still store something.
        error: what went wrong.
        full: what was said when the disk was full.
        problem: what was wrong with the bytes that were stored first.
        passing: it came to its end, but nothing vouches for it (rule 5): its bytes are in ``file``, which has no name any more.
        end_is_vouched_for: as ``RemoteShard`` has it.
        file: the .part, later the complete file; it stays open, so that nobody removes it, until ``stop``.
    """

    def __init__(self, lock: LockedFile, *, directory: CacheDirectory, entry: Entry, fetch: Fetch, expected: Facts, max_bytes: int) -> None:
        super().__init__(name="wds_pipes-cache", daemon=True)
        self.news = 0
        self.running = True
        self.error: BaseException | None = None
        self.full: str | None = None
        self.problem: str | None = None
        self.passing = False
        self.end_is_vouched_for = True
        self.file: LockedFile | None = None
        self._directory, self._entry, self._lock, self._fetch, self._expected, self._max_bytes = directory, entry, lock, fetch, expected, max_bytes
        self._changed = threading.Condition()
        self._stream: Fetched | None = None
        self._stopping = False
        self._left: int | None = None  # bytes that are still to come

    def wait(self, seen: int) -> None:
        """Return when ``news`` is no longer ``seen``."""
        with self._changed:
            self._changed.wait_for(lambda: self.news != seen)

    def stop(self) -> None:
        """End it, and let go of the file."""
        within = threading.current_thread() is self  # where the garbage collector runs in this thread
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
            with _using(self._directory):
                self._directory.sweep_once()
            with _using(self._directory), contextlib.suppress(FileNotFoundError):
                os.remove(self._entry.whole)  # it is not as it should be, and the facts will be those of another
            self.problem = self._store()
            if self.problem is not None:
                self._discard()
                problem = self._store()
                if problem is not None:
                    self._discard()
                    raise ShardError(f"shard {self._expected.url} was downloaded twice, and both times {problem}.", url=self._expected.url)
        except _StoppedError:
            pass
        except _FullError as error:
            self.full = str(error)
            self._discard()
        except BaseException as error:
            self.error = None if self._stopping else error
        finally:
            self._end()

    def _end(self) -> None:
        """Let go of everything, and tell the readers, whatever fails."""
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
        """Forget what is stored; readers of it keep what they have open."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._entry.part)
        if self.file is not None:
            self.file.close()

    def _open_part(self) -> LockedFile:
        with _using(self._directory):
            self.file = open_locked(self._entry.part, os.O_RDWR | os.O_CREAT, shared=True, wait=True)
        if self.file is None:
            raise CacheError(f"the cache {self._directory.path} was removed while it was in use: start again.", path=self._directory.path)
        return self.file

    def _store(self) -> str | None:
        """Store the shard; what is wrong with it."""
        with _using(self._directory):
            known = self._entry.read()
        file = self._open_part()
        facts = Facts(self._expected.url)
        with _using(self._directory):
            self._entry.write(self._lock, facts)
        offset = self._usable(file, known)
        stream = self._begin_stream(offset)
        if offset and known is not None and (stream.size, stream.tag) != (known.size, known.tag):
            offset = 0
            stream = self._begin_stream(0)
        if file.size and not offset:
            self._discard()
            file = self._open_part()
        size = stream.size
        if not _end_is_vouched_for(stream):
            size = None  # it is over already, and this is only how far it came
        if size is not None and self._expected.size is not None and size != self._expected.size:
            return f"it had {size} bytes instead of {self._expected.size}"
        total = size if size is not None else self._expected.size
        facts = replace(facts, size=total, tag=stream.tag, boot=boot())
        with _using(self._directory):
            self._entry.write(self._lock, facts)
            self._directory.reserve((2 * STEP if total is None else total - offset) + FACTS_BYTES + len(facts.url), self._max_bytes)
        self._tell()
        checksum = md5_hash(usedforsecurity=False) if self._expected.md5 is not None else None
        if checksum is not None:
            for chunk in _chunks(file, offset):
                checksum.update(chunk)
        begin = offset
        while True:
            self._left = total - offset if total is not None else None
            chunk = stream.read(min(CHUNK, max(FIRST, offset - begin)))
            if self._stopping:
                raise _StoppedError
            if not chunk:
                break
            if total is not None and offset + len(chunk) > total:
                return f"it had more bytes than {total}"
            if checksum is not None:
                checksum.update(chunk)
            with _using(self._directory):
                _write(file, chunk, offset)
                offset += len(chunk)
                if total is None and offset // STEP != (offset - len(chunk)) // STEP:
                    self._directory.reserve(STEP, self._max_bytes)
            self._tell()
        if total is not None and offset != total:
            return f"it ended after {offset} of {total} bytes"
        md5 = checksum.hexdigest() if checksum is not None else None
        if md5 != self._expected.md5:
            return f"its MD5 was {md5} instead of {self._expected.md5}"
        with _using(self._directory):
            if md5 is None and not _is_vouched_for(file, total):
                self.end_is_vouched_for = _end_is_vouched_for(stream)
                self.passing = True
                os.remove(self._entry.part)
                return None
            self._entry.write(self._lock, replace(facts, size=offset, md5=md5))
            os.replace(self._entry.part, self._entry.whole)
        return None

    def _usable(self, file: LockedFile, known: Facts | None) -> int:
        """From where on an earlier download is to be continued: at the last byte at the latest, so that the store says what it is."""
        have = file.size
        if known is None or known.boot != boot() or known.size is None or have > known.size or (known.tag is None and self._expected.md5 is None):
            return 0
        return max(0, min(have, known.size - 1))


class _CachedStream(io.RawIOBase):
    """A shard that is stored, is being stored here or in another process, or cannot be stored."""

    def __init__(self, cache: ShardCache, entry: Entry, fetch: Fetch, expected: Facts) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._directory = CacheDirectory(cache.directory)
        self._max_bytes = cache.max_bytes
        self._entry, self._fetch, self._expected = entry, fetch, expected
        self._position = 0
        self._given = 0  # to here the reader has had its bytes
        self._file: LockedFile | None = None
        self._complete = False
        self._download: _Download | None = None
        self._direct: Fetched | None = None
        self._checksum: Any = None  # of all that was read, where it is read on straight from the store and its MD5 is known
        self._facts: Facts | None = None  # of what was read
        self._broken: ShardError | None = None  # why nothing may be read any more
        self._doubted = False
        self._is_vouched_for = True  # the end of what was downloaded

    def begin(self, start: int) -> None:
        """Find the shard, or begin to store it."""
        self._position = start
        whole = self._open_whole()
        if whole is not None:
            self._take(whole)
        elif start or time.monotonic() < _full.get(self._directory.path, 0.0):
            self._go_direct()
        else:
            self._advance()

    @property
    def end_is_vouched_for(self) -> bool:
        """As ``RemoteShard`` has it."""
        return self._checksum is not None or (self._is_vouched_for and _end_is_vouched_for(self._direct))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._direct is None

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
                with _using(self._directory):
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
                    f"shard {self._expected.url} ended after {self._position} of {self._expected.size} bytes.", url=self._expected.url, offset=self._position
                )
            if not count and len(buffer) and self._checksum is not None and self._checksum.hexdigest() != self._expected.md5:
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
        """The file is closed: it may be removed."""
        with contextlib.suppress(OSError, CacheError):
            if self._doubted:
                self._entry.remove()
            self._directory.trim(self._max_bytes)

    def doubt(self) -> str | None:
        """The shard makes no sense to its reader: forget it when it is closed, unless its checksum is right.

        Returns:
            The file in the cache that will be removed, if there is one.
        """
        if self._file is None or self._expected.md5 is not None or (self._facts is not None and self._facts.md5 is not None):
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
        """How many bytes there are."""
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
        """Wait until there is more to read at the position, or nothing will come any more."""
        pause, patience, seen, stored = 0.001, time.monotonic() + STALL_SECONDS, 0, -1
        while True:
            self._check_open()
            if self._download is not None:
                seen = self._download.news
            try:
                if self._look():
                    return
            except _FullError as error:
                self._give_up(str(error))
                return
            if self._download is not None:
                self._download.wait(seen)
                continue
            with _using(self._directory):
                growing = self._entry.growing()
            if growing != stored:
                stored, patience = growing, time.monotonic() + STALL_SECONDS
            elif time.monotonic() > patience:
                if self._file is not None and self._given and self._file.removed:
                    raise self._wrong("and has not arrived again")
                self._go_direct()
                return
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)

    def _look(self) -> bool:
        """See how things stand: whether reading can go on."""
        ended = self._download is not None and not self._download.running  # before the files are looked at, which are then as it has left them
        if self._has_more():
            return True
        whole = self._open_whole()
        if whole is not None:
            self._take(whole)
            return True
        if ended and self._file is None and self._open_growing():
            return True  # it failed before this was looked at; what had come before that is read first
        if ended:
            assert self._download is not None
            download, self._download = self._download, None
            if download.passing:
                assert download.file is not None
                self._is_vouched_for = download.end_is_vouched_for
                self._take(download.file)
                return True
            download.stop()
            if download.error is not None:
                raise download.error
            if download.full is not None:
                if download.problem is not None and self._given:
                    raise self._wrong("and could not be stored again, as the disk is full")
                raise _FullError(download.full)
        if self._download is None:
            with _using(self._directory):
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
                self._download = _Download(
                    lock, directory=self._directory, entry=self._entry, fetch=self._fetch, expected=self._expected, max_bytes=self._max_bytes
                )
                self._download.start()
                return False
        return self._has_more() if self._file is not None else self._open_growing()

    def _open_growing(self) -> bool:
        """Open what has come so far, if there is a download; whether something of it is to be read."""
        with _using(self._directory):
            self._facts = self._entry.read()
            if self._facts is not None and self._facts.boot == boot():
                self._file = open_locked(self._entry.part, shared=True, wait=True)
        return self._has_more()

    def _has_more(self) -> bool:
        """Whether something is to be read in a file that is still wanted."""
        return self._file is not None and self._file.size > self._position and not self._file.removed

    def _open_whole(self) -> LockedFile | None:
        """The complete file, if it is there and as it should be."""
        with _using(self._directory):
            file = open_locked(self._entry.whole, shared=True, wait=True)
        if file is None:
            return None
        try:
            with _using(self._directory):
                if self._is_good(file):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _is_good(self, file: LockedFile) -> bool:
        facts, size = self._entry.read(), file.size
        if facts is None or facts.size != size or self._expected.size not in (None, size) or file.removed:  # then these are the facts of another
            return False
        md5 = self._expected.md5
        if facts.md5 is not None and md5 is not None and facts.md5 != md5:
            return False
        unsure = facts.boot != boot()  # what a loss of power has left may have its size, but not all its bytes
        if unsure and size and os.lseek(file.fd, 0, os.SEEK_HOLE) < size:
            return False
        if md5 is not None and (unsure or facts.md5 is None):
            checksum = md5_hash(usedforsecurity=False)
            for chunk in _chunks(file, size):
                checksum.update(chunk)
            if checksum.hexdigest() != md5:
                return False
            with contextlib.suppress(OSError):  # a disk that is full or may not be written to: then it is compared again the next time
                lock = self._entry.lock()
                if lock is not None:
                    try:
                        self._entry.write(lock, replace(facts, md5=md5, boot=boot()))
                    finally:
                        lock.close()
        self._facts = facts
        return True

    def _take(self, whole: LockedFile) -> None:
        """Go on with the complete file, if what was read so far is the same in it."""
        with contextlib.suppress(OSError):
            os.utime(whole.fd)
        if self._file is not None and os.path.samestat(os.fstat(self._file.fd), os.fstat(whole.fd)):
            whole.close()
        else:
            read, self._file = self._file, whole
            if read is not None:
                same = all(chunk == os.pread(whole.fd, len(chunk), place * CHUNK) for place, chunk in enumerate(_chunks(read, self._given)))
                read.close()
                if not same:
                    raise self._wrong("and has been stored again")
        self._complete = True

    def _wrong(self, since: str) -> ShardError:
        self._broken = ShardError(
            f"shard {self._expected.url} was damaged on its way or changed at its store while it was read, {since}: what was read of it, up to byte "
            f"{self._given}, is wrong. Start again from a checkpoint before this shard.",
            url=self._expected.url,
            offset=self._given,
        )
        return self._broken

    def _give_up(self, reason: str) -> None:
        """The disk is full: go on without it."""
        warned = self._directory.path in _full
        _full[self._directory.path] = time.monotonic() + FULL_SECONDS
        self._go_direct()
        if not warned:
            warnings.warn(
                f"the disk of the cache {self._directory.path} is full ({reason}): shards are read without storing them. Free some space, or lower its limit.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _go_direct(self) -> None:
        """Read on straight from the store."""
        if self._expected.md5 is not None and (self._position == 0 or (self._file is not None and self._given >= self._position)):
            checksum = md5_hash(usedforsecurity=False)
            for chunk in _chunks(self._file, self._position) if self._file is not None else ():
                checksum.update(chunk)
            self._checksum = checksum
        direct = self._direct = self._fetch(self._position)
        direct.wait()
        if self._expected.size is None:
            self._expected = replace(self._expected, size=direct.size)
        tag = self._facts.tag if self._facts is not None and self._given else None
        if direct.size not in (None, self._expected.size) or (tag is not None and direct.tag not in (None, tag)):
            raise ShardError(
                f"shard {self._expected.url} is not what it should be: it has {direct.size} bytes and the tag {direct.tag}, instead of "
                f"{self._expected.size} bytes and the tag {tag or direct.tag}.",
                url=self._expected.url,
                offset=self._position,
            )


def _chunks(file: LockedFile, end: int) -> Iterator[bytes]:
    """The bytes of ``file`` before ``end``."""
    for place in range(0, end, CHUNK):
        yield os.pread(file.fd, min(CHUNK, end - place), place)


def _is_vouched_for(file: LockedFile, size: int | None) -> bool:
    """Rule 5, for bytes without a checksum; ``size`` is what they have by the store or an index."""
    head = os.pread(file.fd, tarfile.BLOCKSIZE, 0)
    kind = detect(head)
    if not kind and head != bytes(tarfile.BLOCKSIZE):
        try:
            tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.TarError:
            return False
    if size is not None:
        return True
    with open(file.fd, "rb", buffering=CHUNK, closefd=False) as stream:
        try:
            stream.seek(0)
            return _has_end(decompress(stream, kind) if kind else stream)
        except Exception:  # in whatever way it is no whole tar
            return False


def _end_is_vouched_for(stream: Fetched | None) -> bool:
    """As ``RemoteShard`` has it; other streams tell lengths that are true."""
    return bool(getattr(stream, "end_is_vouched_for", True))


def _has_end(tar: BinaryIO) -> bool:
    """Whether there is an end-of-archive mark after the last member, and the stream too comes to its end."""
    while any(head := tar.read(tarfile.BLOCKSIZE)):
        left = -(-tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape").size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        while left:
            got = len(tar.read(min(left, CHUNK)))
            if not got:
                return False
            left -= got
    while tar.read(CHUNK):
        pass
    return len(head) == tarfile.BLOCKSIZE


def _write(file: LockedFile, chunk: bytes, offset: int) -> None:
    left = memoryview(chunk)
    while left:
        count = os.pwrite(file.fd, left, offset)
        left, offset = left[count:], offset + count
