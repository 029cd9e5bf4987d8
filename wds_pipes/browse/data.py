"""The shards of a data set, and ranges of their samples, by numbers. A shard is read in parts, back
and forth, in bounded memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from time import monotonic
from typing import Any, BinaryIO, TypeVar

from wds_pipes.errors import ShardError, WdsError, for_commands
from wds_pipes.io.compression import MAGIC_BYTES, decompress, detect, unreadable
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.threads import DaemonThreads
from wds_pipes.io.urls import Urls, redact
from wds_pipes.io.versions import Version, version_of
from wds_pipes.tar.index import Facts, MissingIndexError, ShardFacts, find_facts, folder_of, list_shards
from wds_pipes.tar.located import ShardOffsets
from wds_pipes.tar.reader import pass_link
from wds_pipes.tar.samples import AFTER
from wds_pipes.tools.outputs import common_classes
from wds_pipes.tools.reading import Found, Member, ShardWalk, is_stream, size_of
from wds_pipes.tools.verifying import Finding, VerifyReport, verify

_LEAST, _MOST = 1 << 16, 1 << 21  # bytes that are read at once: more each time if they follow each other
_WHOLE = 1 << 24  # bytes that are read at once where it is known that they are needed
_HELD = 1 << 25  # bytes that stay in memory
_REQUESTS = 8  # requests at once
UNPACKED = 1 << 28  # bytes that the fields of a page unpack to


class Budget:
    """What a page may take: one page of a stalled or hostile shard stops no other one.

    Args:
        seconds: how long it may begin to read or decode something.
        unpacked: the bytes to which its fields may unpack.

    Attributes:
        unpacked: those that are left.
    """

    def __init__(self, seconds: float = math.inf, unpacked: int = UNPACKED) -> None:
        self._end, self.unpacked = monotonic() + seconds, unpacked

    @property
    def seconds(self) -> float:
        """How many seconds are left."""
        return max(0.0, self._end - monotonic())

    def end(self) -> None:
        """Use up the time: nobody waits for the page any more."""
        self._end = -math.inf

    def check(self) -> None:
        """Raise TimeoutError if no time is left."""
        if not self.seconds:
            raise TimeoutError(
                "It took too long to read. Look at less of it, or write an index: wds-pipes index --offsets"
            )


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

    def __init__(self, open_it: Callable[[], BinaryIO], kind: str, budget: Budget | None = None) -> None:
        self._open, self._kind, self._budget = open_it, kind, budget or Budget()
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
        self._budget.check()
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


T = TypeVar("T")
SAMPLES = 24  # of a page
_BUFFER = 1 << 13  # bytes
_CONNECTIONS = 16
SECONDS = 20.0  # in which a page begins to read or decode something
_SOON = 1.0  # seconds in which a page without an answer of a store is shown
_KNOWN = 10_000  # places and counts that are remembered of shards without an index
AT_ONCE = 64 << 20  # bytes of a local shard that is checked when it is looked at
_REPORTS = 16  # of shards that were checked, which stay


class DataSet:
    """The shards that URLs name.

    Counts come from an ``index.json`` or from the indexes of offsets beside the shards. Without an
    index, a shard is read when it is looked at, from its beginning up to the samples that are
    shown: headers only, where the storage can seek.

    Args:
        urls: the shards, or an ``index.json``.
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.

    Attributes:
        shards: the URLs of the shards.
        note: why there is no index; "": there is one.
        total: how many samples there are; None: no index counts them.

    Raises:
        ValueError: nothing matches, or a shard is a stream, which cannot be read again.
        ShardError: a store cannot be listed.
    """

    def __init__(
        self, urls: Urls, storage_options: dict[str, Any] | None = None, *, key_split: str = "first-dot"
    ) -> None:
        self.shards, facts = list_shards(urls, storage_options)
        if streams := [url for url in self.shards if is_stream(url)]:
            raise ValueError(f"{redact(streams[0])} can be read only once: write it to a file, and browse that")
        self.note, self._options, self._key_split = "", storage_options, key_split
        self._ranges, self._kinds = RangeReader(storage_options, _REQUESTS), dict[tuple[str, Version], str]()
        if key_split != "first-dot":
            self.note, facts = f"Indexes are not used with another rule of keys ({key_split}).", None
        elif facts is None:
            try:
                facts = find_facts(self.shards, True, storage_options)
            except (ValueError, WdsError, OSError) as error:
                self.note = for_commands(error)
        self._facts: Facts | None = facts
        self.total = None if facts is None else sum(facts.samples)
        self._offsets = None if facts is None else ShardOffsets(self.shards, facts, None, storage_options)
        self._keys: dict[tuple[int, Version], dict[str, int]] = {}  # of shards without an index that were searched
        self._threads, self._waiting = DaemonThreads(_CONNECTIONS), dict[Hashable, Future[Any]]()
        # of shards without an index: where samples begin, and how many there are
        self._starts: dict[tuple[int, Version, int], int] = {}
        self._counts: dict[tuple[int, Version], int] = {}
        self._seen: dict[int, Version] = {}  # the versions of which the indexes were read
        self._reports: dict[tuple[int, Version], VerifyReport] = {}
        self._classes: dict[str, list[str]] = {}  # by folder
        self._lock = threading.Lock()  # of the starts and the counts

    def check(self) -> None:
        """Look whether the first shard is there, as its name may be misspelt.

        Raises:
            ShardError: it does not exist. Other errors are for its page.
        """
        try:
            with self.look(0, 0, 0, whole=False):
                pass
        except ShardError as error:
            if error.missing:
                raise

    def count(self, shard: int) -> int | None:
        """Return how many samples a shard has; None: it is not known yet."""
        if self._facts is None:
            return self._counts.get((shard, version_here(self.shards[shard])))
        count: int | None = self._facts.samples[shard]
        return count

    def soon(self, calls: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
        """Return what calls return within a second, by their names, all made at once. What takes
        longer is returned the next time that it is called.
        """
        with self._lock:
            made = {
                name: self._waiting.pop(name) if name in self._waiting else self._threads.submit(call)
                for name, call in calls.items()
            }
        wait(made.values(), _SOON)
        with self._lock:
            self._waiting |= {name: call for name, call in made.items() if not call.done()}
        return {name: call.result() for name, call in made.items() if call.done()}

    def size(self, shard: int) -> int | None:
        """Return the size of a shard in bytes; None: it is not known."""
        known = ShardFacts() if self._facts is None else self._facts[shard]
        return size_of(self.shards[shard], known, self._options)

    def class_named(self, shard: int, label: str) -> str:
        """Return a label in ``cls`` with the name of its class, if ``classes.json`` beside the
        shards, as ``create`` writes it, says it and has come within a second; else the label.
        """
        url = self.shards[shard]
        folder = folder_of(url)
        if folder not in self._classes:
            read = partial(common_classes, [url], self._options)
            # What has not come then has no names: a store that hangs costs one second, and not one
            # for each label.
            content = next(iter(self.soon({("classes", folder): read}).values()), None)
            self._remember(self._classes, folder, list(map(str, json.loads(content or b"[]"))))
        names = self._classes.get(folder, [])
        number = int(label) if label.isascii() and label.isdecimal() and len(label) < 16 else len(names)
        return f"{label} ({names[number]})" if number < len(names) else label

    def report(self, shard: int, *, now: bool = False) -> VerifyReport | None:
        """Return what ``verify`` finds in a shard, without decoding its fields; None: it was not
        checked.

        A local shard of at most 64 MiB is checked when it is looked at, and again if it has
        changed, unless it is compressed; any other one when that is requested, since it is read to
        its end.

        Args:
            shard: the number of the shard.
            now: check it in any case.

        Raises:
            ShardError: the shard does not exist.
        """
        url = self.shards[shard]
        place = shard, version_here(url)
        report = self._reports.get(place)
        if now or (report is None and self._is_small(*place)):
            report = verify(url, storage_options=self._options, key_split=self._key_split)
            self._remember(self._reports, place, report, _REPORTS)
        return report

    def _is_small(self, shard: int, version: Version) -> bool:
        if version.size is None or not 0 < version.size <= AT_ONCE:
            return False
        with self._ranges.opener.open(self.shards[shard]) as stream:
            return not detect(stream.read(MAGIC_BYTES))  # it could unpack to a thousand times as much

    def shown(self, shard: int) -> str:
        """Return the URL of a shard, without credentials."""
        return redact(self.shards[shard])

    @contextlib.contextmanager
    def look(
        self, shard: int, number: int, count: int = SAMPLES, *, whole: bool = True, budget: Budget | None = None
    ) -> Iterator[ShardView]:
        """Look at samples ``number`` to ``number + count - 1`` of a shard.

        Args:
            shard: the number of the shard.
            number: the number of the first sample in the shard.
            count: how many samples, at most.
            whole: their data will be read too: it is requested with the headers if it is small.
            budget: how long it may take; None: as long as it takes.

        Raises:
            LookupError: there is no such shard.
            ShardError: it cannot be opened.
            TimeoutError: it has taken too long.
        """
        if not 0 <= shard < len(self.shards):
            raise LookupError(f"there is no shard {shard:,}: there are {len(self.shards):,}, from 0 on")
        version, offsets, problem = version_here(self.shards[shard]), None, ""
        if self._offsets is not None:
            try:
                offsets = self._offsets.of(shard)
            except ShardError as error:
                problem = for_commands(error)
            if self._seen.setdefault(shard, version)[:2] != version[:2]:
                offsets, problem = None, f"{self.shown(shard)} has changed: start wds-pipes browse again for its index"
        expected = (0, 0)
        if whole and offsets is not None and number < len(offsets) - 1:
            expected = offsets[number], offsets[min(number + count, len(offsets) - 1)] + AFTER
        with self._open(self.shards[shard], version, expected, budget or Budget()) as window:
            view = ShardView(self, shard, version, window)
            begin = self._begin(view, number) if offsets is None else (number, offsets[min(number, len(offsets) - 1)])
            view.problem = self._walk(view, begin, range(number, number + count)) or problem
            yield view

    @contextlib.contextmanager
    def _open(self, url: str, version: Version, expected: tuple[int, int], budget: Budget) -> Iterator[Window]:
        """Open a window on a shard, which is decompressed if it is compressed. ``expected``: as of
        ``Window``, of an uncompressed shard.
        """
        opener = self._ranges.opener

        def read(at: int, size: int) -> tuple[Any, int]:
            budget.check()
            if is_remote(url):
                return self._ranges.read_one(url, at, at + size)
            with opener.open(url) as stream:
                stream.seek(at)
                return stream.read(size), at

        kind = self._kinds.get((url, version))
        if kind is None:
            kind = detect(Window(read, (0, MAGIC_BYTES)).read(MAGIC_BYTES) or b"")
            self._remember(self._kinds, (url, version), kind)
        with contextlib.closing(Unpacked(lambda: opener.open(url), kind, budget)) as unpacked:
            yield Window(unpacked.read) if kind else Window(read, expected)

    def _begin(self, view: ShardView, number: int) -> tuple[int, int]:
        """Return the last sample up to a number whose start is known, and this start."""
        place = view.shard, view.version
        with self._lock:
            known = [(of[2], start) for of, start in self._starts.items() if of[:2] == place and of[2] <= number]
        return max(known, default=(0, 0))

    def _walk(self, view: ShardView, begin: tuple[int, int], wanted: range) -> str:
        """Find samples of a shard, and return why the reader stopped. ``begin``: the number of the
        sample where reading begins, and the byte where it starts.
        """
        at, start = begin
        walk = ShardWalk(view, self.shards[view.shard], self._key_split, start=start, on_link=pass_link)
        try:
            for sample in walk.samples():
                if not at % SAMPLES:
                    self._remember(self._starts, (view.shard, view.version, at), sample.start)
                view.more = at == wanted.stop
                if view.more:
                    return ""
                if at in wanted:
                    view.found.append(sample._replace(number=at))
                at += 1
            self._remember(self._counts, (view.shard, view.version), at)
        except WdsError as error:
            return for_commands(error)
        return ""

    def find(self, text: str, shard: int | None, budget: Budget | None = None) -> tuple[int, int]:
        """Return the shard and the number in it of the sample with a number or a key.

        A text of digits that does not start with a zero is a number: over all shards if an index
        counts them, else in the shard that is looked at.

        Args:
            text: the number or the key.
            shard: the shard that is looked at, which is searched if no index has the keys; None:
                none is.
            budget: how long it may take; None: as long as it takes.

        Raises:
            LookupError: there is no such sample.
            ShardError: a shard or an index cannot be read.
        """
        if text.isdecimal() and text.isascii() and (text == "0" or text[0] != "0") and len(text) < 16:
            return self._find_number(int(text), shard)
        return self.find_key(text, shard, budget)

    def find_key(self, key: str, shard: int | None, budget: Budget | None = None) -> tuple[int, int]:
        """Return the same of the sample with a key."""
        if self._offsets is not None and self._facts is not None:
            with contextlib.suppress(MissingIndexError):  # an index of another program has no keys
                found = [self._find_number(number, None) for number in self._offsets.find(key)]
                if not found:
                    raise LookupError(f"no sample has the key {key!r:.300}")
                return next((place for place in found if place[0] == shard), found[0])
        if shard is None:
            raise LookupError("there is no index of keys: look at a shard, and search in it, or write the index first")
        if not 0 <= shard < len(self.shards):
            raise LookupError(f"there is no shard {shard:,}")
        place = shard, version_here(self.shards[shard])
        if (numbers := self._keys.get(place)) is None:
            numbers = self._keys_of(shard, budget)
            self._remember(self._keys, place, numbers, 2)
        if key not in numbers:
            raise LookupError(f"no sample of shard {self.shown(shard)} has the key {key!r:.300}")
        return shard, numbers[key]

    def _keys_of(self, shard: int, budget: Budget | None) -> dict[str, int]:
        """Return the numbers of the samples of a shard by their keys, up to a damaged place."""
        found: dict[str, int] = {}
        with self.look(shard, 0, 0, budget=budget) as view, contextlib.suppress(ShardError):
            for sample in ShardWalk(view, self.shards[shard], self._key_split, on_link=pass_link).samples():
                found.setdefault(sample.key, sample.number)
        return found

    def _find_number(self, number: int, shard: int | None) -> tuple[int, int]:
        if self._facts is None and shard is not None:
            return shard, number
        if self._facts is None:
            raise LookupError("without an index, numbers are those in a shard: look at the shard first")
        left = number
        for place, count in enumerate(self._facts.samples):
            if left < count:
                return place, left
            left -= count
        raise LookupError(f"there is no sample {number:,}: there are {self.total:,}, from 0 on")

    def _remember(self, known: dict[Any, T], name: Any, value: T, most: int = _KNOWN) -> None:
        """Keep a value, and forget the oldest one if there are many."""
        with self._lock:
            if len(known) >= most:
                known.pop(next(iter(known)))
            known[name] = value


def findings_at(report: VerifyReport | None, sample: Found) -> list[Finding]:
    """Return what was found at a sample: by its key, or at its bytes."""
    found = [] if report is None else report.findings
    return [
        one
        for one in found
        if one.key == sample.key or (one.byte is not None and sample.start <= one.byte < sample.end)
    ]


class ShardView:
    """Samples of a shard that is open.

    Attributes:
        data: the data set.
        shard: the number of the shard.
        version: its version before it was read.
        found: the samples, which follow each other; the data of their members was not read.
        more: whether there is another one after them.
        problem: why the reader stopped after them, or why the index cannot be used; "": nothing
            is wrong.
    """

    def __init__(self, data: DataSet, shard: int, version: Version, window: Window) -> None:
        self.data, self.shard, self.version, self._window = data, shard, version, window
        self.found, self.more, self.problem = list[Found](), False, ""

    def open(self, url: str, start: int = 0) -> BinaryIO:
        """Return a stream of the shard from a byte on, as ``ShardWalk`` opens it."""
        self._window.seek(start)
        return io.BufferedReader(self._window, _BUFFER)

    def read(self, member: Member, most: int | None = None) -> bytes:
        """Return the data of a member, at most the first ``most`` bytes."""
        size = member.size if most is None else min(member.size, most)
        return self.bytes_at(member.offset, size)

    def bytes_at(self, start: int, size: int) -> bytes:
        """Return some bytes of the (decompressed) tar."""
        return self.open(self.data.shards[self.shard], start).read(size)
