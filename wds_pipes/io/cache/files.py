"""The files of a cache: their names, their metadata, their sizes, and the order of removal.

A shard has two files, named by a readable part and a hash of its URL:

    NAME.json     what is known about it. The process that downloads it holds an exclusive lock.
    NAME.part     its bytes while they arrive, or those that a stopped download left; or
    NAME.shard    all its bytes.

A reader of a .part or a .shard holds a shared lock on it. A shard with a locked file is never
evicted; only its own download may replace a bad file, and readers keep the file that they have
open. A .part becomes a .shard by a rename, which its readers do not notice. The cache does not wait
for the disk (no fsync). So a download is not continued after a reboot, and a .shard from an earlier
boot is used only if it has its full size and no hole: a power failure may leave holes.

``usage`` counts the bytes, including those that running downloads will need. After a SIGKILL it may
be too high, but never too low. The files themselves are examined only when it exceeds the limit.

A cache belongs to one user. It creates its directory with mode 0700 and its files with mode 0600,
and refuses files of other users (see ``locks``).

Methods that are ``guarded`` raise FullError or CacheError where the system raises OSError. So an
OSError comes from the store.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

from wds_pipes.errors import CacheError
from wds_pipes.io.locks import LockedFile, open_locked, open_own
from wds_pipes.io.urls import identify, redact

CHUNK = 1 << 20  # bytes that are read or stored at a time
STEP = 1 << 20  # a shard of unknown size reserves the step that it is in and the next one
FACTS_BYTES = 1024  # reserved for the .json of a shard, besides its URL

_NAME = re.compile(r"(.+-[0-9a-f]{32})\.(json|part|shard)")

P = ParamSpec("P")
T = TypeVar("T")


class FullError(Exception):
    """The disk cannot store more bytes."""


def guarded(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Make a method raise FullError or CacheError instead of OSError. Its object has a ``path``,
    that of the cache.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return method(self, *args, **options)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise FullError(str(error)) from error
            raise CacheError(
                f"the cache {self.path} cannot be used ({type(error).__name__}: {error}). "
                "Give a directory that this user may write, or read without a cache.",
                path=self.path,
            ) from error

    return call


def boot() -> str:
    """An identifier of this boot of the machine; the same for all boots if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def chunks(file: LockedFile, end: int) -> Iterator[bytes]:
    """The bytes of ``file`` before ``end``."""
    for place in range(0, end, CHUNK):
        yield os.pread(file.fd, min(CHUNK, end - place), place)


def md5_of(file: LockedFile | None, end: int) -> Any:
    """The MD5 of the bytes of ``file`` before ``end``, to which more can be added. None: there are
    no bytes yet.
    """
    md5 = hashlib.md5(usedforsecurity=False)
    for chunk in chunks(file, end) if file is not None else ():
        md5.update(chunk)
    return md5


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What is known about a stored shard.

    Attributes:
        url: where it is from, without credentials.
        size: its size in bytes; None while that is not known.
        tag: its ETag at the store.
        md5: its MD5, if that was verified.
        boot: the boot of the machine in which its bytes were written; empty until the store has
            confirmed that bytes of an earlier download are still valid.
    """

    url: str
    size: int | None = None
    tag: str | None = None
    md5: str | None = None
    boot: str = ""


class CacheEntry:
    """The files of one shard.

    Attributes:
        path: path of the directory.
        known: path of the facts (.json).
        part: path of the bytes while they arrive (.part).
        whole: path of the complete shard (.shard).
    """

    def __init__(self, stem: str) -> None:
        self.path = os.path.dirname(stem)
        self.known, self.part, self.whole = f"{stem}.json", f"{stem}.part", f"{stem}.shard"

    @guarded
    def lock(self) -> LockedFile | None:
        """The lock of its download; None if another process or thread holds it."""
        os.makedirs(self.path, 0o700, exist_ok=True)
        return open_locked(self.known, os.O_RDWR | os.O_CREAT)

    @guarded
    def growing(self) -> int:
        """The size of the .part in bytes; 0 if there is none."""
        try:
            return os.lstat(self.part).st_size
        except FileNotFoundError:
            return 0

    @guarded
    def read(self) -> CacheFacts | None:
        """What is known about it; None if there is nothing, as after its writer was killed."""
        try:
            with open(open_own(self.known, os.O_RDONLY), "rb") as file:
                facts = CacheFacts(**json.loads(file.readline(1 << 16)))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return None
        texts = (facts.url, facts.tag or "", facts.md5 or "", facts.boot)
        return facts if type(facts.size) in (int, type(None)) and all(isinstance(text, str) for text in texts) else None

    @guarded
    def write(self, lock: LockedFile, facts: CacheFacts) -> None:
        """Store what is known about it; ``lock`` is the lock of this entry."""
        line = json.dumps(asdict(facts)).encode() + b"\n"
        os.pwrite(lock.fd, line, 0)
        os.ftruncate(lock.fd, len(line))

    @guarded
    def open_new_part(self) -> LockedFile:
        """The .part to write to, which is created if it does not exist."""
        return _opened_or_created(self.part, shared=True)

    @guarded
    def open_part(self) -> tuple[LockedFile | None, CacheFacts | None]:
        """The .part to read from, if its bytes are confirmed, and what is known about it."""
        facts = self.read()
        usable = facts is not None and facts.boot == boot()
        return open_locked(self.part, shared=True, wait=True) if usable else None, facts

    @guarded
    def open_whole(self, expected: CacheFacts) -> tuple[LockedFile, CacheFacts] | None:
        """The complete file and what is known about it, if it exists and is as expected."""
        file = open_locked(self.whole, shared=True, wait=True)
        facts = None
        try:
            facts = None if file is None else self._verified(file, expected)
        finally:
            if file is not None and facts is None:
                file.close()
        return None if file is None or facts is None else (file, facts)

    def _verified(self, file: LockedFile, expected: CacheFacts) -> CacheFacts | None:
        """What is known about the complete file; None: it is not as expected."""
        facts, size = self.read(), file.size
        if facts is None or facts.size != size or expected.size not in (None, size) or file.removed:
            # The facts are about another file.
            return None
        # After a power failure, a file may have its size but not all its bytes.
        unsure = facts.boot != boot()
        if unsure and size and os.lseek(file.fd, 0, os.SEEK_HOLE) < size:
            return None
        if expected.md5 is None or (facts.md5 == expected.md5 and not unsure):
            return facts
        if md5_of(file, size).hexdigest() != expected.md5:
            return None
        facts = replace(facts, md5=expected.md5, boot=boot())
        # If the disk is full or read-only, the MD5 is compared again the next time.
        with contextlib.suppress(FullError, CacheError):
            lock = self.lock()
            if lock is not None:
                with contextlib.closing(lock):
                    self.write(lock, facts)
        return facts

    @guarded
    def complete(self, lock: LockedFile, file: LockedFile, facts: CacheFacts) -> None:
        """Make the .part, which is open as ``file``, the complete shard.

        Raises:
            CacheError: another process has replaced the .part, which the lock forbids.
        """
        try:
            alone = os.path.samestat(os.stat(self.part), os.fstat(file.fd))
        except FileNotFoundError:
            alone = False
        if not alone:
            raise CacheError(
                f"a file of the cache {self.path} was replaced while it was written, as by another machine "
                "through a file system that keeps locks (flock) within one machine only. Give each machine a "
                "directory of its own, on its own disk.",
                path=self.path,
            )
        self.write(lock, facts)
        os.replace(self.part, self.whole)

    @guarded
    def discard(self, *paths: str) -> None:
        """Remove some of its files; their readers keep what they have open."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    @guarded
    def remove(self) -> bool:
        """Remove it, unless it is being read or downloaded; return whether it was removed."""
        with contextlib.ExitStack() as held:
            for path in (self.known, self.whole, self.part):
                file = open_locked(path, os.O_RDWR | os.O_CREAT if path == self.known else os.O_RDWR)
                if file is not None:
                    held.callback(file.close)
                elif os.path.exists(path):
                    return False
            self.discard(self.whole, self.part, self.known)
            return True


def _opened_or_created(path: str, *, shared: bool) -> LockedFile:
    file = open_locked(path, os.O_RDWR | os.O_CREAT, shared=shared, wait=True)
    if file is None:
        folder = os.path.dirname(path)
        raise CacheError(f"the cache {folder} was removed while it was in use: start again.", path=folder)
    return file


class CachedShard(NamedTuple):
    """A shard in the cache, as listed by ``entries``.

    Attributes:
        url: where it is from, without credentials; "" if that is not known.
        bytes: its size on the disk.
        used: when it was last opened, in seconds since 1970.
        state: "complete", "partial" (a stopped download) or "downloading".
        path: the path of its bytes.
    """

    url: str
    bytes: int
    used: float
    state: str
    path: str


class CacheDirectory:
    """The directory of a cache.

    Args:
        path: its path; the directory is created when the first shard is stored.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._usage = os.path.join(path, "usage")

    def entry(self, url: str, store: str = "") -> CacheEntry:
        """The files of the shard at ``url``; ``store`` identifies the store that the URL leads
        to.
        """
        digest = hashlib.sha256(f"{identify(url)}\n{store}".encode(errors="surrogateescape")).hexdigest()[:32]
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", os.path.basename(urlsplit(redact(url)).path))[-80:]
        return CacheEntry(os.path.join(self.path, f"{readable or 'shard'}-{digest}"))

    @guarded
    def reserve(self, more: int, max_bytes: int) -> None:
        """Make room for ``more`` bytes before they are written, as far as shards can be removed."""
        with contextlib.closing(_opened_or_created(self._usage, shared=False)) as counter:
            try:
                used = int(os.pread(counter.fd, 32, 0))
            except ValueError:
                used = -1
            if used < 0 or used + more > max_bytes:
                self._evict(counter, max_bytes)
            elif more:
                _set(counter, used + more)

    @guarded
    def prune(self, max_bytes: int) -> tuple[int, int]:
        """Remove stopped downloads, then the least recently used shards down to ``max_bytes``.

        Returns:
            The number of shards removed, and their bytes.
        """
        if not os.path.exists(self._usage) and not self._scan():
            return 0, 0  # it is no cache: write nothing into it
        with contextlib.closing(_opened_or_created(self._usage, shared=False)) as counter:
            return self._evict(counter, max_bytes, stopped=True)

    @guarded
    def entries(self) -> list[CachedShard]:
        """The shards in the cache, the least recently used first."""
        found = []
        for stem, files in self._scan().items():
            entry = CacheEntry(stem)
            facts = entry.read()
            state = "complete" if "shard" in files else "downloading" if self._busy(entry) else "partial"
            path = entry.whole if "shard" in files else entry.part
            found.append(CachedShard(facts.url if facts else "", _bytes(files), _used(files), state, path))
        return sorted(found, key=lambda stored: stored.used)

    def _scan(self) -> dict[str, dict[str, os.stat_result]]:
        """The files of each entry, by kind: "json", "part" or "shard"."""
        found: dict[str, dict[str, os.stat_result]] = defaultdict(dict)
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as items:
            for item in items:
                name = _NAME.fullmatch(item.name)
                if name:
                    with contextlib.suppress(FileNotFoundError):
                        status = item.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found[os.path.join(self.path, name[1])][name[2]] = status
        return found

    def _busy(self, entry: CacheEntry) -> bool:
        """Whether it is being downloaded."""
        lock = open_locked(entry.known, os.O_RDWR)
        if lock is not None:
            lock.close()
        return lock is None and os.path.exists(entry.known)

    def _evict(self, counter: LockedFile, max_bytes: int, *, stopped: bool = False) -> tuple[int, int]:
        """Count the bytes, and remove the least recently used shards until ``max_bytes`` are left;
        with ``stopped``, first all downloads that were stopped.

        Returns:
            The number of shards removed, and their bytes.
        """
        found = self._scan()
        first = {stem for stem, files in found.items() if stopped and "shard" not in files}
        sizes = {
            stem: _bytes(files) if "shard" in files else self._at_most(CacheEntry(stem))
            for stem, files in found.items()
        }
        used = total = sum(sizes.values())
        count = 0
        # 2 % below the limit, so that many small shards do not cause a scan of the files each.
        goal = max_bytes - max_bytes // 50 if used > max_bytes else used
        for stem in sorted(found, key=lambda stem: (stem not in first, _used(found[stem]))):
            if used > goal or stem in first:
                with contextlib.suppress(CacheError):
                    if CacheEntry(stem).remove():
                        used -= sizes[stem]
                        count += 1
        _set(counter, used)
        return count, total - used

    def _at_most(self, entry: CacheEntry) -> int:
        """The bytes of a shard that is not complete, with those that its download will still write.

        The download may end at any time: so the files are read after its lock, and in the order in
        which a .part becomes a .shard. A download that begins now must wait before it reserves.
        """
        busy = self._busy(entry)
        files = {}
        for kind, path in (("part", entry.part), ("shard", entry.whole), ("json", entry.known)):
            with contextlib.suppress(FileNotFoundError):
                files[kind] = os.lstat(path)
        if not busy or "part" not in files:
            return _bytes(files)
        facts, have = entry.read(), files["part"].st_size
        size = facts.size if facts is not None else None
        return _bytes(files) + (2 * STEP - have % STEP if size is None else max(0, size - have) + FACTS_BYTES)


def _set(counter: LockedFile, used: int) -> None:
    os.pwrite(counter.fd, b"%020d\n" % used, 0)


def _bytes(files: dict[str, Any]) -> int:
    return sum(stat.st_size for stat in files.values())


def _used(files: dict[str, os.stat_result]) -> float:
    return max(stat.st_mtime for kind, stat in files.items() if kind != "json" or len(files) == 1)
