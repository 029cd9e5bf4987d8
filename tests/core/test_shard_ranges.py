"""Ranges of shards in columns, against lists of tuples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wds_pipes.core.lane import ShardRanges

COUNTS = st.lists(st.one_of(st.integers(0, 5), st.just(1 << 40)), max_size=6)
RANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(3, 9)), max_size=6)


@given(COUNTS, st.randoms(), st.slices(6))
def test_whole_shards(counts, random, part):
    order = random.sample(range(len(counts)), len(counts))
    expected = [(number, 0, counts[number]) for number in order]
    ranges = ShardRanges.whole(np.array(order, np.int64), counts)
    assert (list(ranges), list(ranges[part]), ranges.samples) == (expected, expected[part], sum(counts))
    assert list(ranges.without_empty()) == [one for one in expected if one[2]]
    assert list(ShardRanges.whole(np.array(order, np.int64), None)) == [(number, 0, -1) for number in order]


@given(RANGES, st.data())
def test_runs_of_samples(ranges, data):
    """A run has the samples that a list of all samples has at these places."""
    each = [(number, sample) for number, start, stop in ranges for sample in range(start, stop)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(each)), max_size=4)))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, len(each)], strict=True)]
    found = list(ShardRanges.of(ranges).cut(sizes))
    assert [run.samples for run in found] == sizes
    for run, start, size in zip(found, [0, *cuts], sizes, strict=True):
        samples = [(number, sample) for number, first, stop in run for sample in range(first, stop)]
        assert samples == each[start : start + size]
        assert all(type(value) is int for one in run for value in one)


@given(RANGES)
def test_samples_by_their_places(ranges):
    """Among all samples in order, and the inverse: the places of a sample."""
    each = [(number, sample) for number, start, stop in ranges for sample in range(start, stop)]
    found = ShardRanges.of(ranges)
    numbers, insides = found.samples_after(np.arange(len(each)))
    assert list(zip(numbers.tolist(), insides.tolist(), strict=True)) == each
    for sample in {*each, (0, 100)}:
        assert found.before(*sample) == [place for place, one in enumerate(each) if one == sample]


@given(st.lists(RANGES, min_size=1, max_size=3))
def test_lists_are_joined(lists):
    whole = [one for ranges in lists for one in ranges]
    assert list(ShardRanges.of_all(map(ShardRanges.of, lists))) == whole
    assert ShardRanges.of(whole) == ShardRanges.of(whole) != ShardRanges.of([*whole, (0, 0, 1)])
    assert len({ShardRanges.of(whole), ShardRanges.of(whole)}) == 1
