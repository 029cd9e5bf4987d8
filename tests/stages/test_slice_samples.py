"""slice_samples: as itertools.islice, and over lanes a partition of the epoch."""

import itertools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import FIFTY, keys_of, resumed, samples
from sources import Given

import wds_pipes as wp
from wds_pipes.core.lane import Lane
from wds_pipes.core.stream import Stream
from wds_pipes.stages import ShuffleBuffer, SliceSamples
from wds_pipes.testing import check_resume

SLICES = st.tuples(st.integers(0, 12), st.none() | st.integers(1, 20), st.integers(1, 5)).filter(
    lambda given: given[1] is None or given[0] < given[1]
)


@settings(max_examples=25, deadline=None, database=None)
@given(given=SLICES)
def test_resumes_exactly(given):
    check_resume(lambda: Stream(ShuffleBuffer(SliceSamples(Given(range(9)), *given), 2)))


@given(length=st.integers(0, 30), given=SLICES)
def test_one_lane_is_islice_and_stops_reading(length, given):
    source = Given(range(length))
    found = list(Stream(SliceSamples(source, *given)))
    assert found == list(itertools.islice(range(length), *given))
    start, stop, step = given
    last = length if stop is None else range(start, stop, step)[-1]
    assert source.taken[0] == min(length, last + 1)


def lanes_of(stage, lanes):
    return [list(stage.open(Lane(0, 0, lane, lanes)).items) for lane in range(lanes)]


@given(
    cuts=st.lists(st.integers(1, 40), unique=True, max_size=5).map(sorted),
    lanes=st.integers(1, 7),
    length=st.integers(0, 50),
)
def test_slices_side_by_side_are_a_partition_on_any_lanes(cuts, lanes, length):
    """Of all samples, in order within each lane; and no slice is longer than it says."""
    slices = [
        lanes_of(SliceSamples(Given(range(length)), start, stop), lanes)
        for start, stop in itertools.pairwise([0, *cuts, None])
    ]
    for lane in range(lanes):
        assert [item for part in slices for item in part[lane]] == list(range(length))[lane::lanes]
    for (start, stop), part in zip(itertools.pairwise([0, *cuts]), slices, strict=False):
        assert sum(map(len, part)) <= stop - start
        if length >= 40 + lanes:  # every lane has its share
            assert sum(map(len, part)) == stop - start


@given(step=st.integers(1, 6), lanes=st.integers(1, 7), length=st.integers(0, 50))
def test_slices_by_step_are_a_partition_on_any_lanes(step, lanes, length):
    slices = [lanes_of(SliceSamples(Given(range(length)), start, step=step), lanes) for start in range(step)]
    for lane in range(lanes):
        found = [part[lane] for part in slices]
        assert sorted(itertools.chain(*found)) == list(range(length))[lane::lanes]
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(("lanes", "counted"), [(1, False), (3, True)])
def test_folds_of_a_loader(lanes, counted, fifty):
    """A training and a validation part of the same data, in each epoch."""

    def load(*given):
        pipe = samples(fifty, samples_per_shard=FIFTY if counted else None).slice_samples(*given)
        return wp.PipeLoader(pipe.shuffle_buffer(3), lanes=lanes, epoch_end="exact")

    head, tail = load(0, 10), load(10)
    for _ in range(2):
        first, rest = keys_of(head), keys_of(tail)
        assert len(first) == 10
        assert sorted([*first, *rest]) == [f"{number:08d}" for number in range(50)]
    assert (tail.counts()["delivered"], tail.counts()["filtered"]) == (40, 10)


def test_samples_that_are_left_out_are_counted_as_filtered(fifty):
    """Up to the last one that is yielded: the others are not read."""
    pipe = samples(fifty).slice_samples(4, 14, 3)
    assert keys_of(pipe) == keys_of(samples(fifty))[4:14:3]
    assert pipe.counts() == {"delivered": 4, "filtered": 10, "skipped": 0, "dropped": 0}
    _, again = resumed(lambda: samples(fifty).slice_samples(4, 14, 3), 1)
    assert again.counts() == {"delivered": 1, "filtered": 4, "skipped": 0, "dropped": 0}
    assert len(list(again)) == 3
    assert again.counts() == {"delivered": 4, "filtered": 10, "skipped": 0, "dropped": 0}


def test_a_slice_after_the_end_is_told(fifty, caplog):
    with caplog.at_level(logging.WARNING, logger="wds_pipes"):
        assert list(samples(fifty).slice_samples(50)) == []
    assert "this epoch gave nothing: 50 filtered. See what group_by_key(fields=...), filters, slices" in caplog.text


def test_a_position_that_cannot_be_is_refused(urls):
    pipe = samples(urls).slice_samples(2, 9)
    next(iter(pipe))
    for wrong in ({"read": 10}, {"read": 2, "filtered": 3}):
        state = pipe.state_dict()
        state["lanes"]["0"]["position"][-1] = wrong
        with pytest.raises(wp.StateError, match="cannot have read this number"):
            samples(urls).slice_samples(2, 9).load_state_dict(state)
