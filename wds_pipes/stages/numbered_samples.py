"""The samples of group_by_key by their numbers, read with indexes of offsets."""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import Network
from wds_pipes.core.lane import Lane
from wds_pipes.core.numbered import Numbered
from wds_pipes.core.running import Ended, Mark
from wds_pipes.core.shard_ranges import ShardRange, ShardRanges, joined
from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import Part, Range, RangeReader
from wds_pipes.stages.cache_shards import CacheShards
from wds_pipes.stages.load_tar import LoadTar
from wds_pipes.stages.open_shards import OpenShards
from wds_pipes.stages.shard_list import ShardList
from wds_pipes.tar.index import known_version
from wds_pipes.tar.keys import KeySplit
from wds_pipes.tar.members import pass_link
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.samples import AFTER, SampleParser

# How many remote samples are read one by one; and how many bytes a run of later ones has, and how
# many may be between two of them. In 50 ms, a connection of 50 MB/s brings 2.5 MB, so a run of 8 MB
# loses a quarter of its time. All samples of a run are held soon anyway, and no others.
_ONE_BY_ONE = 128
_MOST_RUN, _MOST_GAP = 8 << 20, 1 << 19

if TYPE_CHECKING:
    from wds_pipes.tar.located import ShardOffsets


def numbered_samples(group: Stage[Any], split: KeySplit, lane: Lane, mark: Mark | None) -> NumberedSamples | None:
    """Return the samples of a chain ``ShardList > open_shards > load_tar > group_by_key`` after a
    position, by their numbers; None if they are not known without reading the shards: another
    chain, no index, or steps that may leave samples out.
    """
    load = group.source
    if type(load) is not LoadTar or type(load.source) is not OpenShards:
        return None
    opened = load.source
    listed: Stage[Any] | None = opened.source
    while type(listed) is CacheShards:
        listed = listed.source
    if type(listed) is not ShardList or listed.offsets is None:
        return None
    chain = Chain(group)
    if any((isinstance(step, Tolerant) and step.may_lose) or step.changes_count() for step in chain):
        return None
    if opened.cache is not None and any(map(is_remote, listed.urls)):
        return None  # the samples would not be read from the cache
    marks = []  # of each stage, from the last
    for _ in chain:
        if mark is None or isinstance(mark, Ended):
            return None
        own, mark = mark
        marks.append(own)
    ranges = _ranges_after(listed.offsets, listed.order(lane), marks)
    if ranges is None:
        return None
    parser = SampleParser(None, split, listed.offsets.stale)
    return NumberedSamples((parser, load, opened, listed, listed.offsets), lane.padding, marks, ranges)


def _ranges_after(offsets: ShardOffsets, order: Sequence[ShardRange], own: list[tuple[Any, ...]]) -> ShardRanges | None:
    """Return the shard ranges of an order after the position whose stages have these values, from
    the last stage; None if it is not that of a sample.
    """
    (_, _, number, uncounted), (offset, compression, _), (passed,) = own[0], own[1], own[-1]
    ranges = ShardRanges.of(order[passed:])
    if compression or (uncounted and number):
        return None
    if offset:
        if not ranges or (places := offsets.of(ranges[0][0])) is None:
            return None
        shard, start, stop = ranges[0]
        first = bisect_left(places, offset, hi=len(places) - 1)
        if number not in (0, first) or not start <= first <= stop:
            return None
        return joined([ShardRanges.of([(shard, first, stop)]), ranges[1:]])
    return ranges


class NumberedSamples(Numbered[dict[str, Any]]):
    """The samples after a position, by their numbers: see ``numbered_samples``.

    Args:
        steps: what makes samples of bytes, the steps of the chain, and the indexes of offsets.
        padding: that of the lane.
        own: the values of the stages at the position, from the last stage.
        ranges: the shard ranges after the position.
    """

    def __init__(
        self,
        steps: tuple[SampleParser, LoadTar, OpenShards, ShardList, ShardOffsets],
        padding: bool | None,
        own: list[tuple[Any, ...]],
        ranges: ShardRanges,
    ) -> None:
        self._parser, self._load, opened, listed, self._offsets = steps
        self._own, self._padding = own, padding
        self._urls, self._facts, self._ranges = listed.urls, listed.facts, ranges
        self._passed = own[-1][0]  # how many shards of the lane are before the first of these ranges
        self._starts = [0, *accumulate((ranges.stops - ranges.starts).tolist())]
        self.count = self._starts[-1]
        versions = partial(known_version, listed.urls, listed.facts)
        self._files = RangeReader(opened.reading.storage_options, opened.reading.connections, versions=versions)

    def prepare(self, count: int) -> bool:
        last = min(bisect_left(self._starts, count) + 1, len(self._ranges))
        return self._offsets.read_all(shard for shard, start, stop in self._ranges[:last] if start < stop)

    def _place(self, number: int) -> tuple[int, int]:
        """Return the place of the range of a sample, and its number in the shard."""
        place = bisect_right(self._starts, number) - 1
        return place, self._ranges[place][1] + number - self._starts[place]

    def mark(self, number: int) -> Mark:
        place, of_shard = self._place(number) if number < self.count else (len(self._ranges), 0)
        (skipped, filtered, _, _), (_, _, damaged), *others, _ = self._own
        passed: Mark = (self._passed + place,), None
        for own in reversed(others):
            passed = own, passed
        first = number == self._starts[place]
        if first and (place or self._own[1][0] == 0):  # the beginning of a range
            return (skipped, filtered, 0, 0), ((0, "", damaged), passed)
        url, start, *_ = self._range(place, of_shard)
        if of_shard:  # the sample before it in the shard must end where it begins
            before = self._range(place, of_shard - 1)
            self._parser.parse(self._files.read_one(*before), before.start, start, url, url)
        return (skipped, filtered, of_shard, 0), ((start, "", damaged), passed)

    def opened(self, number: int) -> int:
        return int(self._passed) + bisect_left(self._starts, number)  # the range of the next one is not begun

    def read(self, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        wanted = list(numbers)
        ahead: deque[list[int]] = deque()

        def ranges() -> Iterator[Range]:
            for run in self._runs(wanted):
                ahead.append(run)
                first, last = (self._range(*self._place(number)) for number in (run[0], run[-1]))
                yield first._replace(stop=last.stop)

        ready: dict[int, dict[str, Any]] = {}
        with closing(self._files.read(ranges())) as parts:
            for number in wanted:
                while number not in ready:
                    part, run = next(parts), ahead.popleft()
                    ready.update((one, self._sample(part, one)) for one in run)
                    self.bytes_read += self._range(*self._place(run[-1])).stop - AFTER
                    self.bytes_read -= self._range(*self._place(run[0])).start
                yield ready.pop(number)

    def _runs(self, wanted: list[int]) -> Iterator[list[int]]:
        """Yield runs of samples of a shard, each read by one request, so that each sample is read
        when its turn comes, or before. Local samples are read one by one; so are the first remote
        ones, since a consumer waits for them. Later ones are read with their neighbours.
        """
        left = set(wanted)
        for turn, number in enumerate(wanted):
            if number not in left:
                continue
            run = [number]
            left.remove(number)
            shard = self._place(number)[0]
            if turn >= _ONE_BY_ONE and is_remote(self._urls[self._ranges[shard][0]]):
                for step in (1, -1):
                    near, one = number, number + step
                    while self._starts[shard] <= one < self._starts[shard + 1] and self._bytes(near, one) < _MOST_GAP:
                        if one in left and self._bytes(run[0], run[-1]) < _MOST_RUN:
                            run.insert(len(run) if step > 0 else 0, one)
                            left.remove(one)
                            near = one
                        one += step
            yield run

    def _bytes(self, one: int, other: int) -> int:
        """Return how far apart two samples of a shard begin."""
        return abs(self._range(*self._place(one)).start - self._range(*self._place(other)).start)

    def _sample(self, part: Part, number: int) -> dict[str, Any]:
        """Return a sample from bytes of its shard."""
        place, of_shard = self._place(number)
        url, start, stop, _ = self._range(place, of_shard)
        stop -= AFTER
        before = self._range(place, of_shard - 1).start if of_shard else -1
        if stop - start > self._load.max_member_bytes:  # the reader raises the error for a member that is too large
            for _ in TarReader(
                io.BytesIO(part[0][start - part[1] : stop - part[1]]),
                url=url,
                offset=start,
                max_member_bytes=self._load.max_member_bytes,
                on_truncated="ignore",
                concatenated=True,
                on_link=pass_link,
            ):
                pass
        # a local shard was checked with its index
        last = is_remote(url) and of_shard + 2 == len(self._offsets_of(place))
        sample = self._parser.parse(part, start, stop, url, url, before=before, last=last)
        if self._padding is not None:
            key = sample.pop("__key__")
            sample = {"__key__": key, "__url__": sample.pop("__url__"), "__padding__": self._padding, **sample}
        return sample

    def _range(self, place: int, of_shard: int) -> Range:
        """Return the bytes of a sample of a range's shard, and of the header after it."""
        offsets, shard = self._offsets_of(place), self._ranges[place][0]
        size = None if self._facts is None else self._facts[shard].size
        return Range(self._urls[shard], int(offsets[of_shard]), int(offsets[of_shard + 1]) + AFTER, size)

    def _offsets_of(self, place: int) -> Sequence[int]:
        """Return the offsets of the shard of a range."""
        offsets = self._offsets.of(self._ranges[place][0])
        assert offsets is not None
        return offsets

    @property
    def network(self) -> Network:
        return self._files.network
