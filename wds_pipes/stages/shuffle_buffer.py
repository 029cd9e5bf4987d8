"""ShuffleBuffer: shuffle samples in a window; its position is two numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice, repeat, takewhile
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

import numpy as np

from wds_pipes.core.chain import Chain, makes_one_of_each
from wds_pipes.core.counts import NO_NETWORK, Network
from wds_pipes.core.lane import Lane, LaneFacts, ShardRange, ShardRanges
from wds_pipes.core.occurrences import occurring
from wds_pipes.core.options import check_count, check_seed
from wds_pipes.core.order import below
from wds_pipes.core.reads_again import ReadsAgain
from wds_pipes.core.stage import (
    Ended,
    Given,
    Mark,
    OpensAnywhere,
    Out,
    Reorders,
    Reports,
    SamplePlace,
    Stage,
    run_over,
)
from wds_pipes.core.state import read_count
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.io.open import is_remote
from wds_pipes.stages.fetch_samples import FetchSamples, range_of
from wds_pipes.stages.group_by_key import GroupByKey
from wds_pipes.stages.load_tar import LoadTar
from wds_pipes.stages.open_shards import OpenShards
from wds_pipes.stages.sample_list import SampleRef
from wds_pipes.stages.shard_list import ShardList, shard_of
from wds_pipes.tar.located import ShardOffsets

if TYPE_CHECKING:
    import numpy.typing as npt

# How many remote samples are read in the order in which they are needed. Later ones are read in
# runs: how many bytes a run has, and how many may be between two samples of it that are needed. In
# 50 ms, a connection of 50 MB/s brings 2.5 MB, so a run of 8 MB loses a quarter of its time. All
# samples of a run are held soon anyway.
_IN_TURN = 128
_MOST_RUN, _MOST_GAP = 8 << 20, 1 << 19
_JITTER = 2  # the salt of the jitter
_LATER = object()  # a sample that is read when it leaves
# After a resume, so many samples more than those that were held are read when they leave. The first
# batch then needs no others, and remote shards are streamed only when most of the window is there:
# until then, both would share the connections.
_MORE = 1024
_MOST = 1 << 53  # the most samples of an epoch: the numbers, plus the jitter and a block, fit into 64 bits


class _Ahead(NamedTuple, Generic[Out]):
    """How a resume goes on without the samples that were held.

    Attributes:
        items: the samples of the source, from the saved position on.
        come: how many of them had come; what was not held had left.
        later: how many of them are read when they leave; the source runs from there on.
        turns: for each of these that has not left, how many will have come when it leaves.
        read: these, in this order.
    """

    items: NumberedSamples
    come: int
    later: int
    turns: list[int]
    read: Stage[Out]


class ShuffleBuffer(Reorders, Reports, ReadsAgain[Out]):
    """Shuffle samples within a moving window (functional name: ``shuffle_buffer``).

    Sample i gets the key ``i + jitter``. The jitter is a function of (seed, epoch, lane, i) and is
    uniform over 0 to 2 * size - 1. Samples leave in the order of their keys. So about ``size``
    samples are held (never more than 2 * size), a sample leaves at most 2 * size - 1 places late,
    and the first samples leave at once: they do not wait until the buffer is full. Which samples
    are held follows from how many have left, so no sample needs to be saved. The displacement has a
    standard deviation of 0.58 * size. Put this step before decoding, where samples are small.

    Args:
        source: any pipe.
        size: how many samples are held on average, at least 1 (which keeps the order as it is).
        seed: an integer to shuffle by, instead of the seed of ``ShardList``.

    Checkpoint: two numbers, and an earlier position of the source. A resume reads at most
    2.25 * size samples again to fill the buffer. With an index of offsets it reads none again: see
    ``ShardList(index=...)``. Each held sample is then read when its turn comes, if the steps before
    this one are ``group_by_key`` without ``fields``, and after it only ``decode_by_ext``,
    ``select_fields``, ``rename_fields`` or ``to_tuple``, and none of them may skip errors or leave
    out the end of a cut shard, nor might when the state was saved. ``fields`` leave out samples
    that have none of them, which an index does not know: use ``select_fields`` instead. Until
    the epoch ends, ``counts()`` reports the steps before this one as they were at that earlier
    position.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):
        first: int = 0  # the number of the sample at the saved position of the source; all samples before it have left
        left: int = 0  # how many samples have left
        # steps before this one may have dropped samples: then their numbers say nothing
        lossy: bool = False

    keeps_count = True
    scope = "window"
    _foreseen = True
    order_options = ("size", "own_seed")

    def __init__(self, source: Stage[Out], size: int, *, seed: int | None = None) -> None:
        super().__init__(source)
        self.size = check_count("size", size)
        if size > 1 << 30:
            raise ValueError(f"size must be at most 2**30, not {size}")
        self.own_seed = None if seed is None else check_seed(seed)
        self.holds = 0  # while running, about how many samples are held
        self._ahead: _Ahead[Out] | None = None  # while running, if it was opened without the samples that it holds
        self._come = 0  # while running, then: how many samples have come since the saved position

    @property
    def held_items(self) -> int:
        return self.holds

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        left, first = (read_count(entry.get(name, 0), repr(name)) for name in ("left", "first"))
        return f"shuffle at {left:,}, read again from its sample {first:,}"

    def problem(self, at: Any) -> str | None:
        window = 2 * self.size
        if at.left > _MOST:
            return f"no epoch has more than {_MOST} samples"
        if not at.first <= at.left <= at.first + window + 2 * max(1, window // 16):
            return f"a buffer that starts at sample {at.first} cannot have yielded this number of samples"
        return None

    def had_items(self, at: Any) -> bool:
        return bool(at.left > at.first)

    def open(self, lane: Lane, mark: Mark | None = None) -> ShuffleBuffer[Out]:
        ahead = None if mark is None or isinstance(mark, Ended) else self._look_ahead(lane, mark)
        if ahead is None:
            return cast(ShuffleBuffer[Out], super().open(lane, mark))
        assert mark is not None
        own, before = mark
        running = cast(ShuffleBuffer[Out], super().open(lane, (own, ahead.items.mark(ahead.later))))
        running.earlier, running._ahead, running._come = before, ahead, ahead.come
        return running

    def _look_ahead(self, lane: Lane, mark: Mark) -> _Ahead[Out] | None:
        """Return how to go on from a position without reading again what was held there; None: that
        is not possible.
        """
        own, before = mark
        at, window = self._at(own), 2 * self.size
        items = numbered_samples(self.source, lane, before) if at.left and not at.lossy else None
        if items is None:
            return None
        # All samples that have left, and all that are held, are among these numbers.
        more = self._more
        count = min(at.left - at.first + window + more, items.count)
        keys = np.arange(count) + below(window, self._key(lane), at.first, count)
        order = np.argsort(keys, kind="stable")
        left = min(at.left - at.first, count)
        # the last one left when the sample with the number of its key had come
        come = min(int(keys[order[left - 1]]) + 1 if left else 0, items.count)
        count = min(come + more, items.count)
        if not items.prepare(count):
            return None
        wanted = order[left:][order[left:] < count]
        turns = np.minimum(keys[wanted] + 1, items.count).tolist()
        return _Ahead(items, come, count, turns, items.read(wanted.tolist()))

    def _after(self, lane: Lane, mark: Mark, count: int) -> Mark | None:
        """Do what ``mark_after`` does."""
        own, before = mark
        at, window = self._at(own), 2 * self.size
        items = None if at.lossy or at.skips else numbered_samples(self.source, lane, before)
        if items is None:
            return None
        left = at.left - at.first + count
        known = min(left + window, items.count)
        keys = np.arange(known) + below(window, self._key(lane), at.first, known)
        held = np.argsort(keys, kind="stable")[left:]
        first = int(held.min()) if len(held) else known
        first = min(first, left - 1)  # ``run`` must see that samples have left
        if left > known or not items.prepare(first):
            return None
        own = self._own(self.At(first=at.first + first, left=at.left + count))
        return own, items.mark(first)

    @property
    def _more(self) -> int:
        """How many samples more than those that were held are read when they leave."""
        return min(_MORE, max(1, 2 * self.size // 16))

    def _key(self, lane: Lane) -> int:
        """Return the key of the random numbers of a lane."""
        return (lane if self.own_seed is None else replace(lane, seed=self.own_seed)).key(_JITTER, self.depth)

    # The order in which samples leave, without reading. With the window w = 2 * size, sample i has
    # a key from i to i + w - 1. So the one that leaves at place p has a key from p to p + w - 1,
    # and a number less than w away from p.

    def leaving(self, lane: Lane, start: int, stop: int, count: int) -> npt.NDArray[np.int64]:
        first, window = max(0, start - 2 * self.size), 2 * self.size
        last = min(count, stop + window)
        keys = np.arange(first, last) + below(window, self._key(lane), first, last - first)
        return first + np.argsort(keys, kind="stable")[start - first : stop - first].astype(np.int64, copy=False)

    def place_of(self, lane: Lane, number: int, count: int) -> int:
        first, window = max(0, number - 2 * self.size), 2 * self.size
        last = min(count, number + window)
        keys = np.arange(first, last) + below(window, self._key(lane), first, last - first)
        own = keys[number - first]
        return first + int((keys < own).sum()) + int((keys[: number - first] == own).sum())

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        if self._ahead is None:  # else the source is needed later
            super().start(offset, ahead=ahead)

    def run(self) -> Iterator[Out]:
        at = self.at
        at.lossy = at.lossy or any(isinstance(step, Tolerant) and step.may_lose for step in Chain(self.source))
        samples = self._shuffle()
        # no generator of its own without need, which would cost each sample a little
        return self._rest_of(samples, at.left - at.first) if at.left > at.first else samples

    def _rest_of(self, samples: Iterator[Out], left: int) -> Iterator[Out]:
        """Drop the samples that had left before the state was saved, and yield the others."""
        dropped = sum(1 for _ in islice(samples, left))
        self.check_again(whole=dropped == left)
        if self._ahead is not None:
            for turn in self._ahead.turns:
                yield from takewhile(_is_there, samples)
                self._come = turn
                yield next(self._ahead.read.items)
        yield from samples

    def _shuffle(self) -> Iterator[Out]:
        """Yield the samples after the position of the source, in the order in which they leave."""
        at, source, window, first = self.at, self.source, 2 * self.size, self.at.first
        key = self._key(self.lane)
        step = max(1, window // 16)  # a position of the source is kept for each step
        block = step * (1 + 2048 // step)  # the order is computed for one block at a time
        held: list[Any] = [None] * window  # sample i is at place i % window: it leaves before sample i + window arrives
        numbers = keys = np.empty(0, np.int64)  # of the waiting samples, in the order in which they leave
        items, known, ahead = source.items, first, self._ahead  # samples before ``known`` are read when they leave
        if ahead is None:
            self.earlier = source.mark()
        else:
            later = ahead.later
            known += later
            soon = min(self._more // 2, later)
            items = chain(repeat(_LATER, later - soon), _begin(source), repeat(_LATER, soon), source.items)
        marks = deque([(first, self.earlier)])
        left = begun = first
        last = first + step - 1  # the number of the last sample of a step
        for start in count(first, block):
            new = np.arange(start, start + block)
            numbers = np.concatenate([numbers, new])
            keys = np.concatenate([keys, new + below(window, key, start, block)])
            order = np.argsort(keys, kind="stable")
            numbers, keys = numbers[order], keys[order]
            leaving = int(np.searchsorted(keys, start + block))
            turns = zip([*keys[:leaving].tolist(), -1], [*(numbers[:leaving] % window).tolist(), -1], strict=True)
            turn, place = next(turns)
            number, begun = start - 1, left
            for number, item in zip(range(start, start + block), items, strict=False):
                held[number % window] = item
                while turn == number:
                    left += 1
                    at.left = left
                    yield held[place]
                    held[place] = None
                    turn, place = next(turns)
                if number == last:
                    # Every sample that leaves from here on has a greater key, so it arrived less
                    # than `window` samples ago.
                    marks.append((last + 1, source.mark() if last + 1 >= known else None))
                    while marks[1][0] <= last - window + 2:
                        marks.popleft()
                    at.first, earlier = marks[0]
                    self.earlier = earlier if ahead is None or earlier else ahead.items.mark(at.first - first)
                    last += step
            if number < start + block - 1:
                break
            numbers, keys = numbers[leaving:], keys[leaving:]
            self.holds = len(numbers)
        rest = numbers[left - begun :]
        for place in (rest[rest <= number] % window).tolist():
            left += 1
            at.left = left
            yield held[place]
            held[place] = None
        at.first, self.earlier = left, source.mark()  # for the counts of the whole epoch

    @property
    def opened(self) -> int | None:
        if self._ahead is None:
            return None
        return max(Chain(self.source).opened, self._ahead.items.opened(self._come))

    def close(self) -> None:
        super().close()
        if self._ahead is not None:
            self._ahead.read.close()

    @property
    def bytes_so_far(self) -> int:
        return 0 if self._ahead is None else self._ahead.items.fetching.bytes_so_far

    @property
    def network(self) -> Network:
        return NO_NETWORK if self._ahead is None else self._ahead.items.fetching.network


def _is_there(sample: Any) -> bool:
    return sample is not _LATER


def _begin(source: Stage[Any]) -> Iterator[Any]:
    """Request what a source will need first; yield nothing."""
    source.start()
    yield from ()


# The samples of group_by_key by their numbers, read with indexes of offsets


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
    at: list[Any] = []  # the position of each stage
    for step in reversed(steps):
        if mark is None or isinstance(mark, Ended):
            return None
        own, mark = mark
        at.insert(0, step._at(own))
    ranges = None if listed.offsets is None else _ranges_after(listed.offsets, listed.order(lane), at)
    return None if ranges is None else NumberedSamples(steps, lane, at, ranges)


def mark_after(last: Stage[Any], lane: Lane, mark: Mark | None, count: int) -> Mark | None:
    """Return the position of a chain after the next ``count`` samples, without reading these; None
    if it is not known: see ``numbered_samples``, after which there may be a ``shuffle_buffer``.

    Args:
        last: the last step of the chain, a recipe.
        lane: the lane.
        mark: the position from which to count.
        count: how many samples, which the lane has.
    """
    if mark is None or isinstance(mark, Ended):
        return None
    if type(last) is ShuffleBuffer:
        return last._after(lane, mark, count)
    items = numbered_samples(last, lane, mark)
    return items.mark(count) if items is not None and items.prepare(count) else None


def _ranges_after(offsets: ShardOffsets, order: Sequence[ShardRange], at: list[Any]) -> ShardRanges | None:
    """Return the shard ranges of an order after a position of the stages; None if it is not that of
    a sample.
    """
    listed, _, tar, group, *_ = at
    ranges, offset, number = ShardRanges.of(order[listed.next :]), tar.offset, group.number
    if tar.compression or (group.uncounted and number):
        return None
    if not offset:
        return ranges
    if not ranges or (places := offsets.of(shard_of(ranges[0][0]))) is None:
        return None
    shard, start, stop = ranges[0]
    first = bisect_left(places, offset, hi=len(places) - 1)
    if number not in (0, first) or not start <= first <= stop:
        return None
    return ShardRanges.of_all([ShardRanges.of([(shard, first, stop)]), ranges[1:]])


class NumberedSamples:
    """The samples that a chain yields after a position, by their numbers from there: 0 is the next
    one. They, and the positions between them, are exactly those of the running chain. See
    ``numbered_samples``.

    Args:
        steps: the steps of the chain.
        lane: the lane.
        at: the position of each stage.
        ranges: the shard ranges after the position.

    Attributes:
        count: how many samples there are, to the end of the lane.
        fetching: what reads them.
    """

    def __init__(self, steps: list[Any], lane: Lane, at: list[Any], ranges: ShardRanges) -> None:
        self._list, opened, load, group, *self._later = self._steps = steps
        self._lane, self._at, self._ranges, self._most_bytes = lane, at, ranges, load.max_member_bytes
        self._begins_inside = at[2].offset > 0  # the first of these ranges
        self._passed: int = at[0].next  # how many shards of the lane are before the first of these ranges
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
        shards = [shard_of(number) for number, start, stop in self._ranges[:last] if start < stop]
        # what may have too large a member is left to load_tar
        return self._list.offsets.read_all(shards) and all(
            np.diff(self._list.offsets.of(shard)).max() <= self._most_bytes for shard in shards
        )

    def mark(self, number: int) -> Mark:
        """Return the position of the chain before a sample."""
        place = len(self._ranges) if number >= self.count else bisect_right(self._starts, number) - 1
        offset = of_shard = 0
        if number != self._starts[place] or (place == 0 and self._begins_inside):  # it is not the first one of a range
            ref = self._ref(number)
            offset, of_shard = ref.start, ref.number
            if of_shard:  # the sample before it in the shard must end where it begins
                before = self._ref(number, back=1)
                self.fetching.parser()(before, self.fetching.files.read_one(*range_of(before)))
        mark: Any = None
        there = SamplePlace(self._passed + place, offset, of_shard)
        for step, at in zip(self._steps, self._at, strict=True):
            mark = step._own(step.at_sample(at, there) if isinstance(step, OpensAnywhere) else at), mark
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

    def _samples(self, numbers: list[int]) -> Iterator[Any]:
        order, wanted = self._order(numbers), set(numbers)
        ready: dict[int, Any] = {}
        self.fetching = run_over(self.fetching, self._lane, Given(map(self._ref, order)))
        with closing(self.fetching):
            fetched = zip(order, self.fetching.items, strict=False)
            for number in numbers:
                while number not in ready:
                    near, sample = next(fetched)
                    if near in wanted:
                        sample = {**sample, "__url__": self._ref(near).url}
                        draw = self._list.draw_of(self._range_of(near)[0]) if self._lane.occurrences else None
                        ready[near] = sample if draw is None else occurring(sample, draw)
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

    def _range_of(self, number: int) -> ShardRange:
        """Return the range with a sample."""
        return self._ranges[bisect_right(self._starts, number) - 1]

    def _ref(self, number: int, back: int = 0) -> SampleRef:
        """Return a sample, whose ``number`` is that in its shard; or the sample that many places
        before it in the shard.
        """
        place = bisect_right(self._starts, number) - 1
        ranged, start, _ = self._ranges[place]
        shard, of_shard = shard_of(ranged), start + number - self._starts[place] - back
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
