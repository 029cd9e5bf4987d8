"""Read ranges of bytes of many files: of remote ones, many ranges are requested at once.

Local files are not mapped into memory: a process that reads a mapped page which its file does not
have any more is killed (SIGBUS).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_pipes.core.counts import Meters, Network
from wds_pipes.errors import ShardError, ShardWarning, StateError
from wds_pipes.io.open import LocalVersion, Opener, is_remote
from wds_pipes.io.remote.budget import Reading, UnreadError
from wds_pipes.io.remote.queue import RangeQueue, RemoteShard
from wds_pipes.io.remote.responses import RemoteObject
from wds_pipes.io.urls import at_home, local_path, redact
from wds_pipes.io.versions import version_of

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache

__all__ = ["LARGE", "LocalFile", "Part", "Parts", "Range", "RangeReader"]

_MOST_OPEN = 128  # local files
_WILL_NEED = getattr(os, "POSIX_FADV_WILLNEED", None)  # only some systems have it
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)  # likewise
_WINDOW = 1 << 12  # bytes of a local file that are read for a few of them, such as a header
LARGE = 1 << 14  # bytes of a range of a local file that the kernel is told of
_SURE = 64  # after so many such ranges in memory, only each eighth is looked at
_LONG = 64  # how many such ranges follow each other until the kernel reads ahead on its own
_MOST_KNOWN = 4096  # remote files of which the versions are compared
GAP = 1 << 16  # bytes between two ranges that are read with them, rather than with two requests
_AHEAD = 8  # requests for each connection: those that wait, those that run, and those that are not used yet


class Range(NamedTuple):
    """Bytes ``start`` to ``stop`` - 1 of a file. A remote one must have ``size`` bytes; None: any
    number.
    """

    url: str
    start: int
    stop: int
    size: int | None = None


class LocalFile:
    """An open local file. Its slices are bytes, which are read then. Threads may share it.

    Slicing raises ShardError if the file was cut since it was opened.

    Args:
        url: the file, for messages.
        descriptor: its descriptor, which is closed when nothing refers to this object.

    Attributes:
        found: how many ranges in a row were in memory.
    """

    _byte = (bytearray(1),)

    def __init__(self, url: str, descriptor: int) -> None:
        self._url, self._descriptor = url, descriptor
        self._size = os.fstat(descriptor).st_size
        self._held: tuple[bytes, int] = b"", 0  # bytes that were read, and the place of the first one
        self.found = 0
        path = None if is_remote(url) else local_path(url)  # what a cache has does not change
        self._version = None if path is None else LocalVersion(at_home(path), descriptor)

    # ``close`` is kept here: when the process exits, ``os`` may be gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)

    def check_same(self) -> None:
        """Raise ShardError if it was changed since it was opened."""
        if self._version is not None:
            self._version.check(self._descriptor)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, stop = part.start or 0, self._size if part.stop is None else min(part.stop, self._size)
        data, base = self._held
        if not base <= start < stop <= base + len(data):
            if start >= stop:
                return b""
            if stop - start >= _WINDOW:
                return self._read(start, stop)
            data, base = self._held = self._read(start, min(start + _WINDOW, self._size)), start
        return data[start - base : stop - base]

    def part(self, start: int, stop: int, pread: Callable[[int, int, int], bytes] = os.pread) -> Part:
        """Return a part of the file with the bytes from ``start`` on, up to ``stop`` - 1, or those
        that there are. Small parts in order are read together, and a large one when it is sliced.
        """
        if stop - start >= LARGE:
            return self, 0
        data, base = held = self._held
        end = base + len(data)
        if not base <= start or end < stop:
            size = LARGE if base <= start <= end else stop - start
            self._held = held = pread(self._descriptor, size, start), start
        return held

    def _read(self, start: int, stop: int) -> bytes:
        """Return bytes that it had when it was opened.

        Raises:
            ShardError: it does not have all of them any more.
        """
        data = os.pread(self._descriptor, stop - start, start)
        while len(data) < stop - start:  # a system reads 2 GiB at once, at most
            more = os.pread(self._descriptor, stop - start - len(data), start + len(data))
            if not more:
                url = redact(self._url)
                raise ShardError(
                    f"shard {url} was cut while it was read: it ends at byte {start + len(data)}. Write shards under "
                    "new names.",
                    url=url,
                    offset=start + len(data),
                )
            data += more
        return data

    def announce(self, start: int, stop: int) -> None:
        """Tell the kernel that a range will be read."""
        if _WILL_NEED is not None:
            os.posix_fadvise(self._descriptor, start, stop - start, _WILL_NEED)

    def is_in_memory(self, place: int) -> bool:
        """Whether a byte can be read without waiting; False also where the system cannot say."""
        if _NO_WAIT is None:
            return False
        try:
            return os.preadv(self._descriptor, self._byte, place, _NO_WAIT) == 1
        except OSError:
            return False


# Bytes of a file, and which byte of it the first one is. If the file ends before a requested range,
# there are fewer.
Part = tuple[bytes | LocalFile, int]


class RangeReader:
    """Reads ranges of local and remote files. Threads may share one; it can be pickled and forked.

    All ranges of a remote file are of one version of it: if the store reports another size or ETag
    for a later range, that is an error. ``forget`` ends this; it also ends when very many other
    files were read.

    Args:
        storage_options: how to reach the storage, as fsspec takes it.
        connections: the maximum number of requests at once.
        readahead_bytes: the maximum number of bytes that are requested and not yet returned.
        cache: remote files that are stored there are read there. Nothing is stored.
        versions: returns the version of a file that an index knows; None: it is not known. A
            remote file that has another one is an error. A local one, which may only have been
            touched, is a ShardWarning, the first time.
    """

    def __init__(
        self,
        storage_options: dict[str, Any] | None,
        connections: int,
        readahead_bytes: int = 64 << 20,
        cache: ShardCache | None = None,
        versions: Callable[[str], str | None] | None = None,
    ) -> None:
        self._versions = versions
        self._compared: set[str] = set()
        self.reading = Reading(storage_options or {}, connections=connections, readahead_bytes=readahead_bytes)
        self.opener = Opener(self.reading, cache=cache, buffer_bytes=512)
        self._files: dict[str, LocalFile] = {}  # in the order in which they were opened
        self._locks: dict[int, threading.Lock] = {}  # by process: a forked one may inherit a lock that is held
        # the file of the last large range, where it ends, and how many before it were in order
        self._last = "", 0, 0
        self._known: dict[str, RemoteObject] = {}  # remote files, in the order in which they were first read

    @property
    def network(self) -> Network:
        """The network use of this process."""
        return self.opener.used

    def __getstate__(self) -> dict[str, Any]:
        return {
            "reading": self.reading,
            "opener": self.opener,
            "_versions": self._versions,
            "_compared": self._compared,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files={}, _locks={}, _last=("", 0, 0), _known={})

    def read(self, ranges: Iterable[Range], meters: Meters | None = None) -> Parts:
        """Return an iterator over the parts of files that have these ranges, in their order; each
        has at least the bytes of its range. There may be ranges without end. ``meters``: those of
        the chain that reads them.
        """
        return Parts(self, ranges, meters)

    def read_one(self, url: str, start: int, stop: int, size: int | None = None, *, before: int | None = None) -> Part:
        """Return what ``read`` yields for one range. ``before``: of a local file, also with the
        bytes from there on.
        """
        file = self._files.get(url) or self._find(url)
        if file is None:
            with self.read([Range(url, start, stop, size)]) as parts:
                return next(parts)
        if stop - start >= LARGE:
            self.announce(file, url, start, stop)
        return file.part(start if before is None else max(before, 0), stop)

    def reported(self, url: str) -> RemoteObject:
        """Return what the store has reported of a remote file; each response updates it."""
        found = self._known.get(url)
        if found is None:
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                found = self._known.setdefault(url, RemoteObject(url))
                if len(self._known) > _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
        return found

    def compare(self, url: str, now: str | None) -> None:
        """Compare the version of a file that was opened with that in its index, once.

        Raises:
            ShardError: a remote file is another one.
        """
        if self._versions is None or now is None or url in self._compared:
            return
        known = self._versions(url)
        # that of a local file is a number, and an ETag may have quotes
        if known is None or known.isdigit() == is_remote(url) or known.strip('"') == now.strip('"'):
            self._compared.add(url)
            return
        problem = (
            f"shard {redact(url)} was written again since it was indexed, maybe with other samples. Run wds-pipes "
            "index again: then a state of other samples is refused."
        )
        if not is_remote(url):
            self._versions = None
            warnings.warn(problem, ShardWarning, stacklevel=2)
        elif version_of(url, self.reading.storage_options).mark in (None, known):
            self._versions = None  # this store has two names for a version
        else:
            raise ShardError(problem, url=redact(url))

    def forget(self) -> None:
        """Forget what stores have reported, and close local files: they may be others from here
        on.
        """
        self._known = {}
        self.close()

    def check_same(self) -> None:
        """Raise ShardError if an open local file was changed since it was opened."""
        for file in [*self._files.values()]:
            file.check_same()

    def is_local(self, url: str) -> bool:
        """Whether a file is on this disk: it is local, or in the cache."""
        return url in self._files or not is_remote(url) or self._find(url) is not None

    def file(self, url: str) -> LocalFile | None:
        """Return a local file, or one in the cache; None: there is none. ``announce`` the large
        ranges that are read.
        """
        return self._files.get(url) or self._find(url)

    def map(self, url: str, start: int, stop: int) -> Part | None:
        """Return all of a local file, of which a range is read; None: it is not local."""
        file = self.file(url)
        if file is None:
            return None
        if stop - start >= LARGE:
            self.announce(file, url, start, stop)
        return file, 0

    def announce(self, file: LocalFile, url: str, start: int, stop: int) -> None:
        """Tell the kernel which bytes will be read, unless they are in memory, or much has been
        read in order: a sample is read with several calls.
        """
        file.found = found = file.found + 1
        # to ask takes a tenth of the time of reading a small image
        if (found > _SURE and found & 7) or file.is_in_memory((start + stop) // 2):
            return
        file.found = 0
        last, end, run = self._last
        run = run + 1 if last == url and abs(start - end) <= GAP else 0
        self._last = url, stop, run
        if run < _LONG:
            file.announce(start, stop)

    def _find(self, url: str) -> LocalFile | None:
        """Open a local file, or one in the cache; None: there is none."""
        stream = self.opener.open_stored(url) if is_remote(url) else self.opener.open(url)
        if stream is None:
            return None
        with stream:
            if not is_remote(url):
                self.compare(url, str(os.fstat(stream.fileno()).st_mtime_ns))
            file = LocalFile(url, os.dup(stream.fileno()))
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            self._files[url] = file
            first = self._files.pop(next(iter(self._files))) if len(self._files) > _MOST_OPEN else None
        if first is not None:  # closed when no thread uses it any more
            first.check_same()
        return file

    def size(self, url: str) -> int | None:
        """The size of a local file in bytes; None: the file is remote."""
        path = local_path(url)
        return None if path is None or is_remote(url) else os.stat(at_home(path)).st_size

    def close(self) -> None:
        """Close all files."""
        self._files.clear()


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
        self._held, self._base, self._error = b"", self.ranges[0].start, None
        self._known = self._reader.reported(self.url)
        self._known.expected = self._size
        try:
            self._stream = RemoteShard(queue, self.url, start=self._base, stop=self.stop, known=self._known)
        except Exception as error:
            self._error = self._reader.opener.problem(self.url, error)

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
            part = self._read(wanted)
            self._reader.compare(self.url, self._known.validators.get("etag"))
            return part
        except Exception:
            self.close()
            if self.ranges:  # they are requested without it
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
        if self._error is not None:
            raise self._error
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


class Parts(Iterator[Part]):
    """Iterates over parts of files. Several requests run ahead of the consumer.

    An error is raised when the turn of its range comes; the next range can be read after it. Close
    it, or use it in a ``with`` statement, to cancel what is requested and was not yielded.

    Rules:
    1. Consecutive ranges of a file that begin in order, with gaps of at most 64 KiB, are one run,
       which one request reads.
    2. A run has at most a connection's share of the read-ahead bytes, or one range. The ranges are
       pulled as long as there is room for a whole run, so runs are the same however slow the
       consumer is; and one range further, to see that it begins another run.

    Raises:
        ShardError: a file cannot be read.
        Exception: what the iterator of the ranges raises.
    """

    def __init__(self, reader: RangeReader, ranges: Iterable[Range], meters: Meters | None = None) -> None:
        self._meters = meters
        self._runs: deque[Run] = deque()
        self._bytes = 0  # of the runs
        self._queue: RangeQueue | None = None
        self._next: Range | None = None  # it was pulled, and begins the next run
        self._error: Exception | None = None  # of ``ranges``; it comes after all runs
        self._reader, reading, self._ranges = reader, reader.reading, iter(ranges)
        self._readahead_bytes = reading.readahead_bytes
        self._most_bytes, self._most_runs = reading.readahead_bytes // reading.connections, _AHEAD * reading.connections

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __next__(self) -> Part:
        if self._next is None and not self._runs:
            wanted = self._pull()
            part = None if wanted is None else self._reader.map(*wanted[:3])
            if part is not None:
                return part
            self._next = wanted
        try:
            return self._next_part()
        except Exception:
            raise
        except BaseException:  # it may have come between any two steps, so the order is not certain
            self.close()
            raise

    def _next_part(self) -> Part:
        self._read_ahead()
        if not self._runs:
            self._close_queue()
            error, self._error = self._error, None
            if error is not None:
                raise error
            raise StopIteration
        run = self._runs[0]
        try:
            return run.read_next(self)
        finally:
            if not run.ranges:
                self._runs.popleft()
                self._bytes -= run.stop - run.start
                run.close()

    def _read_ahead(self) -> None:
        """Pull ranges, and request them."""
        while len(self._runs) < self._most_runs and (
            not self._runs or self._bytes + self._most_bytes <= self._readahead_bytes
        ):
            first = self._next or self._pull()
            if first is None:
                return
            run = Run(self._reader, first)
            self._next = self._pull()
            while self._next is not None and run.add(self._next, self._most_bytes):
                self._next = self._pull()
            self._runs.append(run)
            self._bytes += run.stop - run.start
            if not self._reader.is_local(run.url):
                run.request(self.queue)

    def _pull(self) -> Range | None:
        try:
            return None if self._error is not None else next(self._ranges, None)
        except Exception as error:
            self._error = error
            return None

    @property
    def queue(self) -> RangeQueue:
        """Where the requests are."""
        if self._queue is None:
            self._queue = RangeQueue(self._reader.opener.client, self._meters)
        return self._queue

    def _close_queue(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def close(self) -> None:
        """Cancel what is requested. The iteration is over; closing again does nothing."""
        self._ranges, self._next, self._error = iter(()), None, None
        self._close_queue()
        while self._runs:
            self._runs.popleft().close()
