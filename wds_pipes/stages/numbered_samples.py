"""The samples of group_by_key by their numbers, read with indexes of offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import accumulate, chain
from typing import Any, cast

import numpy as np

from wds_pipes.core.chain import Chain, makes_one_of_each
from wds_pipes.core.given import Given, run_over
from wds_pipes.core.lane import Lane
from wds_pipes.core.running import Ended, Mark
from wds_pipes.core.shard_ranges import ShardRange, ShardRanges, joined
from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.io.open import is_remote
from wds_pipes.stages.fetch_samples import FetchSamples, range_of
from wds_pipes.stages.group_by_key import GroupByKey
from wds_pipes.stages.load_tar import LoadTar
from wds_pipes.stages.open_shards import OpenShards
from wds_pipes.stages.sample_list import SampleRef
from wds_pipes.stages.shard_list import ShardList
from wds_pipes.tar.located import ShardOffsets

# How many remote samples are read in the order in which they are needed. Later ones are read in
# runs: how many bytes a run has, and how many may be between two samples of it that are needed. In
# 50 ms, a connection of 50 MB/s brings 2.5 MB, so a run of 8 MB loses a quarter of its time. All
# samples of a run are held soon anyway.
_IN_TURN = 128
_MOST_RUN, _MOST_GAP = 8 << 20, 1 << 19

Sample = dict[str, Any]


def numbered_samples(last: Stage[Any], lane: Lane, mark: Mark | None) -> NumberedSamples | None:
    """Return the samples that a chain yields in a lane after a position, by their numbers; None if
    they are not known without reading the shards: another chain than ``ShardList > open_shards >
    load_tar > group_by_key`` and steps that make one sample of each, no index, or steps that may
    leave samples out.
    """
    steps: list[Any] = Chain(last).steps
    if list(map(type, steps[:4])) != [ShardList, OpenShards, LoadTar, GroupByKey]:
        return None
    listed, opened, _, group, *later = steps
    losing = any((isinstance(step, Tolerant) and step.may_lose) or step.changes_count() for step in steps)
    uncached = opened.cache is None or not any(map(is_remote, listed.urls))
    if losing or group.fields is not None or not uncached or not all(map(makes_one_of_each, later)):
        return None
    own: list[tuple[Any, ...]] = []  # the values of each stage
    for _ in steps:
        if mark is None or isinstance(mark, Ended):
            return None
        values, mark = mark
        own.insert(0, values)
    ranges = None if listed.offsets is None else _ranges_after(listed.offsets, listed.order(lane), own)
    return None if ranges is None else NumberedSamples(steps, lane, own, ranges)


def _ranges_after(offsets: ShardOffsets, order: Sequence[ShardRange], own: list[tuple[Any, ...]]) -> ShardRanges | None:
    """Return the shard ranges of an order after the position whose stages have these values; None
    if it is not that of a sample.
    """
    (passed,), _, (offset, compression, _), (_, _, number, uncounted), *_ = own
    ranges = ShardRanges.of(order[passed:])
    if compression or (uncounted and number):
        return None
    if not offset:
        return ranges
    if not ranges or (places := offsets.of(ranges[0][0])) is None:
        return None
    shard, start, stop = ranges[0]
    first = bisect_left(places, offset, hi=len(places) - 1)
    if number not in (0, first) or not start <= first <= stop:
        return None
    return joined([ShardRanges.of([(shard, first, stop)]), ranges[1:]])


class NumberedSamples:
    """The samples that a chain yields after a position, by their numbers from there: 0 is the next
    one. They, and the positions between them, are exactly those of the running chain. See
    ``numbered_samples``.

    Args:
        steps: the steps of the chain.
        lane: the lane.
        own: the values of each stage at the position.
        ranges: the shard ranges after the position.

    Attributes:
        count: how many samples there are, to the end of the lane.
        fetching: what reads them.
    """

    def __init__(self, steps: list[Any], lane: Lane, own: list[tuple[Any, ...]], ranges: ShardRanges) -> None:
        self._list, opened, load, group, *self._later = steps
        self._lane, self._own, self._ranges, self._most_bytes = lane, own, ranges, load.max_member_bytes
        self._passed: int = own[0][0]  # how many shards of the lane are before the first of these ranges
        self._starts = [0, *accumulate((ranges.stops - ranges.starts).tolist())]
        self.count = self._starts[-1]
        options, connections = opened.reading.storage_options, opened.reading.connections
        self.fetching: Any = FetchSamples(
            self._list, storage_options=options, connections=connections, key_split=group.split
        )

    def prepare(self, count: int) -> bool:
        """Read the indexes of the first ``count`` samples; return whether all of these samples can
        be read.
        """
        last = min(bisect_left(self._starts, count) + 1, len(self._ranges))
        shards = [shard for shard, start, stop in self._ranges[:last] if start < stop]
        # what may have too large a member is left to load_tar
        return self._list.offsets.read_all(shards) and all(
            np.diff(self._list.offsets.of(shard)).max() <= self._most_bytes for shard in shards
        )

    def mark(self, number: int) -> Mark:
        """Return the position of the chain before a sample."""
        place = len(self._ranges) if number >= self.count else bisect_right(self._starts, number) - 1
        _, opened, (began, _, damaged), (skipped, filtered, _, _), *later = self._own
        offset = of_shard = 0
        if number != self._starts[place] or (place == 0 and began):  # it is not the first one of a range
            ref = self._ref(number)
            offset, of_shard = ref.start, ref.number
            if of_shard:  # the sample before it in the shard must end where it begins
                before = self._ref(number, back=1)
                self.fetching.parser()(before, self.fetching.files.read_one(*range_of(before)))
        mark: Any = None
        for own in ((self._passed + place,), opened, (offset, "", damaged), (skipped, filtered, of_shard, 0), *later):
            mark = own, mark
        return cast(Mark, mark)

    def opened(self, number: int) -> int:
        """Return what ``Chain.opened`` is when so many samples have come."""
        return self._passed + bisect_left(self._starts, number)  # the range of the next one is not begun

    def read(self, numbers: list[int]) -> Stage[Any]:
        """Return a running stage that yields samples in this order. A bounded number is read
        ahead.
        """
        stage: Stage[Any] = Given(self._samples(numbers))
        for step in self._later:
            stage = run_over(step, self._lane, stage)
        return stage

    def _samples(self, numbers: list[int]) -> Iterator[Sample]:
        order, wanted = self._order(numbers), set(numbers)
        ready: dict[int, Sample] = {}
        self.fetching = run_over(self.fetching, self._lane, Given(map(self._ref, order)))
        with closing(self.fetching):
            fetched = zip(order, self.fetching.items, strict=False)
            for number in numbers:
                while number not in ready:
                    near, sample = next(fetched)
                    if near in wanted:
                        ready[near] = {**sample, "__url__": self._ref(near).url}
                wanted.remove(number)
                yield ready.pop(number)

    def _order(self, numbers: list[int]) -> list[int]:
        """Return in which order to read samples, so that each is read when its turn comes, or
        before: see ``_IN_TURN``. There may be others between them.
        """
        later = sorted(numbers[_IN_TURN:])
        if not later or not is_remote(self._list.urls[0]):
            return numbers
        runs: list[range] = []
        first = last = self._ref(later[0])
        for number in later:
            ref = self._ref(number)
            near = ref.url == first.url and ref.stop - first.start < _MOST_RUN and ref.start - last.stop < _MOST_GAP
            if runs and near:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
                first = ref
            last = ref
        turns = {number: turn for turn, number in enumerate(numbers)}
        runs.sort(key=lambda run: min(turns.get(number, len(numbers)) for number in run))
        return [*numbers[:_IN_TURN], *chain.from_iterable(runs)]

    def _ref(self, number: int, back: int = 0) -> SampleRef:
        """Return a sample, whose ``number`` is that in its shard; or the sample that many places
        before it in the shard.
        """
        place = bisect_right(self._starts, number) - 1
        shard, start, _ = self._ranges[place]
        of_shard = start + number - self._starts[place] - back
        offsets, url = self._list.offsets.of(shard), self._list.urls[shard]
        return SampleRef(
            url,
            of_shard,
            offsets[of_shard],
            offsets[of_shard + 1],
            self._list.offsets.index_of(shard),
            last=of_shard + 2 == len(offsets),
            padding=self._lane.padding,
            size=self._list.facts.size(shard),
            before=offsets[of_shard - 1] if of_shard else -1,
        )
