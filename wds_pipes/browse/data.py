"""The shards of a data set, and ranges of their samples, by numbers."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.browse.findings import Checks
from wds_pipes.browse.windows import Files, Window, version_here
from wds_pipes.errors import ShardError, WdsError, for_commands
from wds_pipes.io.urls import Urls, redact
from wds_pipes.io.versions import Version, version_of
from wds_pipes.tar.index import Facts
from wds_pipes.tar.listing import find_facts, list_shards
from wds_pipes.tar.located import ShardOffsets
from wds_pipes.tar.members import pass_link
from wds_pipes.tar.offsets import MissingIndexError
from wds_pipes.tar.samples import AFTER
from wds_pipes.tools.reading import Found, Member, ShardWalk, is_stream

SAMPLES = 24  # of a page
_BUFFER = 1 << 13  # bytes
_CONNECTIONS = 16
_KNOWN = 10_000  # places and counts that are remembered of shards without an index


class Samples(NamedTuple):
    """Samples of a shard that follow each other.

    Attributes:
        found: the samples; the data of their members was not read.
        more: whether there is another one after them.
        problem: why the reader stopped after them, or why the index cannot be used; "": nothing
            is wrong.
    """

    found: list[Found]
    more: bool
    problem: str


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
        self.files = Files(storage_options)
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
        self._keys = lru_cache(2)(self._keys_of)  # of the shards without an index in which was searched
        # of shards without an index: where samples begin, and how many there are
        self._starts: dict[tuple[int, Version, int], int] = {}
        self._counts: dict[tuple[int, Version], int] = {}
        self._seen: dict[int, Version] = {}  # the versions of which the indexes were read
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

    def sizes(self, shards: range) -> list[int | None]:
        """Return the sizes of shards in bytes; None: a size is not known."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(self._size, shards))

    def _size(self, shard: int) -> int | None:
        known = None if self._facts is None else self._facts[shard].size
        try:
            return version_of(self.shards[shard], self._options).size if known is None else known
        except WdsError:  # looking at the shard says why
            return None

    def start(self, shard: int, number: int) -> int | None:
        """Return the byte where a sample begins; None: no index of offsets says it."""
        try:
            offsets = None if self._offsets is None else self._offsets.of(shard)
        except ShardError:  # looking at the shard says why
            return None
        return offsets[number] if offsets is not None and number < len(offsets) - 1 else None

    def checks(self) -> Checks:
        """Return what checks the shards."""
        return Checks(self.shards, storage_options=self._options, key_split=self._key_split)

    def shown(self, shard: int) -> str:
        """Return the URL of a shard, without credentials."""
        return redact(self.shards[shard])

    @contextlib.contextmanager
    def look(self, shard: int, number: int, count: int = SAMPLES, *, whole: bool = True) -> Iterator[ShardView]:
        """Look at samples ``number`` to ``number + count - 1`` of a shard.

        Args:
            shard: the number of the shard.
            number: the number of the first sample in the shard.
            count: how many samples, at most.
            whole: their data will be read too: it is requested with the headers if it is small.

        Raises:
            LookupError: there is no such shard.
            ShardError: it cannot be opened.
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
        with self.files.open(self.shards[shard], expected) as window:
            view = ShardView(self, shard, version, window)
            begin = self._begin(view, number) if offsets is None else (number, offsets[min(number, len(offsets) - 1)])
            found = self._walk(view, begin, range(number, number + count))
            view.samples = found._replace(problem=found.problem or problem)
            yield view

    def _begin(self, view: ShardView, number: int) -> tuple[int, int]:
        """Return the last sample up to a number whose start is known, and this start."""
        place = view.shard, view.version
        with self._lock:
            known = [(of[2], start) for of, start in self._starts.items() if of[:2] == place and of[2] <= number]
        return max(known, default=(0, 0))

    def _walk(self, view: ShardView, begin: tuple[int, int], wanted: range) -> Samples:
        """Return samples of a shard. ``begin``: the number of the sample where reading begins, and
        the byte where it starts.
        """
        at, start = begin
        found: list[Found] = []
        walk = ShardWalk(view, self.shards[view.shard], self._key_split, start=start, on_link=pass_link)
        try:
            for sample in walk.samples():
                if not at % SAMPLES:
                    self._remember(self._starts, (view.shard, view.version, at), sample.start)
                if at == wanted.stop:
                    return Samples(found, True, "")
                if at in wanted:
                    found.append(sample._replace(number=at))
                at += 1
            self._remember(self._counts, (view.shard, view.version), at)
        except WdsError as error:
            return Samples(found, False, for_commands(error))
        return Samples(found, False, "")

    def find(self, text: str, shard: int | None) -> tuple[int, int]:
        """Return the shard and the number in it of the sample with a number or a key.

        A text of digits that does not start with a zero is a number: over all shards if an index
        counts them, else in the shard that is looked at.

        Args:
            text: the number or the key.
            shard: the shard that is looked at, which is searched if no index has the keys; None:
                none is.

        Raises:
            LookupError: there is no such sample.
            ShardError: a shard or an index cannot be read.
        """
        if text.isdecimal() and text.isascii() and (text == "0" or text[0] != "0") and len(text) < 16:
            return self._find_number(int(text), shard)
        return self.find_key(text, shard)

    def find_key(self, key: str, shard: int | None) -> tuple[int, int]:
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
        if key not in (numbers := self._keys(shard, version_here(self.shards[shard]))):
            raise LookupError(f"no sample of shard {self.shown(shard)} has the key {key!r:.300}")
        return shard, numbers[key]

    def _keys_of(self, shard: int, version: Version) -> dict[str, int]:
        """Return the numbers of the samples of a shard by their keys, up to a damaged place."""
        found: dict[str, int] = {}
        with self.look(shard, 0, 0) as view, contextlib.suppress(ShardError):
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

    def _remember(self, known: dict[Any, int], name: Any, value: int) -> None:
        """Keep a value, and forget the oldest one if there are many."""
        with self._lock:
            if len(known) >= _KNOWN:
                known.pop(next(iter(known)))
            known[name] = value


class ShardView:
    """Samples of a shard that is open.

    Attributes:
        data: the data set.
        shard: the number of the shard.
        version: its version before it was read.
        samples: the samples.
    """

    samples: Samples

    def __init__(self, data: DataSet, shard: int, version: Version, window: Window) -> None:
        self.data, self.shard, self.version, self._window = data, shard, version, window

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
