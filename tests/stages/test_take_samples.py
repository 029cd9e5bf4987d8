"""take_samples: the first samples of an epoch, over any number of lanes, and nothing is read after
them.
"""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import FIFTY, flat, keys_of, over_lanes, resumed, samples, through_json
from sources import Given

import wds_pipes as wp
from wds_pipes.core.chain import Chain
from wds_pipes.core.lane import Lane
from wds_pipes.core.stream import Stream
from wds_pipes.stages import ShuffleBuffer, TakeSamples
from wds_pipes.testing import make_shards


def test_the_first_of_each_epoch(fifty):
    pipe, whole = samples(fifty).take_samples(12), samples(fifty)
    for _ in range(3):
        assert keys_of(pipe) == keys_of(whole)[:12]
        assert pipe.counts() == {"delivered": 12, "filtered": 0, "skipped": 0, "dropped": 0}
    assert keys_of(samples(fifty).take_samples(1000)) == keys_of(samples(fifty))


# The end


class Watched(Given):
    """Counts in ``taken[1]`` how often a run was closed before its end, and in ``taken[2]`` the
    starts.
    """

    def __init__(self, items):
        super().__init__(items)
        self.taken = [0, 0, 0]

    def run(self):
        try:
            yield from super().run()
        except GeneratorExit:
            self.taken[1] += 1
            raise

    def start(self, offset=0, *, ahead=False):
        self.taken[2] += 1


def test_nothing_is_read_after_the_last_sample():
    source = Watched(range(100))
    running = iter(Stream(TakeSamples(source, 5)))
    assert list(itertools.islice(running, 5)) == [0, 1, 2, 3, 4]
    assert source.taken[0] == 5
    assert list(running) == []
    assert source.taken[:2] == [5, 1]  # closed by the step itself


def test_the_source_is_closed_while_a_later_step_still_holds_samples():
    source = Watched(range(100))
    running = iter(Stream(ShuffleBuffer(TakeSamples(source, 20), 50)))
    rest = [next(running)]
    while source.taken[0] < 20:
        rest.append(next(running))
    rest.append(next(running))
    assert len(rest) < 20
    assert source.taken[:2] == [20, 1]
    assert sorted([*rest, *running]) == list(range(20))


@pytest.mark.parametrize(("n", "lane"), [(1, Lane(0, 0, 2, 3)), (2, Lane(0, 0, 2, 3))])
def test_a_lane_without_a_share_reads_nothing(n, lane):
    source = Watched(range(100))
    running = TakeSamples(source, n).open(lane)
    running.start()
    assert list(running.items) == []
    assert source.taken == [0, 0, 0]


def test_after_the_end_nothing_is_requested():
    """Neither from a state after the last sample, nor from one that knows the end."""
    source = Watched(range(100))
    stage = TakeSamples(source, 2)
    running = stage.open(Lane(0, 0))
    assert [next(running.items), next(running.items)] == [0, 1]
    marks = [running.mark()]
    assert list(running.items) == []
    marks.append(running.mark())
    dumped = [through_json(Chain(stage).dump(mark)) for mark in marks]
    assert dumped == [[{"number": 2}, {"read": 2}], [{"number": 2}, {"read": 2, "at end": True}]]
    source.taken[:] = [0, 0, 0]
    for position in dumped:
        again = stage.open(Lane(0, 0), Chain(stage).load(position))
        again.start()
        assert list(again.items) == []
        assert Chain(stage).dump(again.mark()) == dumped[1]
    assert source.taken == [0, 0, 0]


# Lanes


def test_fewer_shards_than_lanes(tmp_path):
    """Uncounted, lanes without a shard yield nothing; counted, all have samples."""
    urls = make_shards(tmp_path, shards=2, samples=20)
    for counts, total in ((None, 6), (20, 12)):
        pipe = samples(urls, samples_per_shard=counts).take_samples(12)
        assert len(list(wp.PipeLoader(pipe, lanes=4, epoch_end="exact"))) == total


def test_equal_epochs_are_refused(fifty):
    pipe = samples(fifty, samples_per_shard=FIFTY).take_samples(12)
    for end in ("drop", "pad"):
        with pytest.raises(ValueError, match=r"may change their number \(of SampleList\(urls, where="):
            wp.PipeLoader(pipe, epoch_end=end)
    with pytest.raises(TypeError, match=r"take_samples\(\) may change their number"):
        len(pipe)


# Each of these yields as fifty samples as given, whatever the lanes; and how fifty a pass reads.
PIPES = {
    "plain": lambda urls: samples(urls).take_samples(24),
    "before a shuffle": lambda urls: samples(urls).take_samples(24).shuffle_buffer(4),
    "after a shuffle": lambda urls: samples(urls).shuffle_buffer(4).take_samples(24),
    "between shuffles": lambda urls: samples(urls).shuffle_buffer(4).take_samples(24).shuffle_buffer(100),
    "counted": lambda urls: samples(urls, samples_per_shard=FIFTY).shuffle_buffer(3).take_samples(24),
    "interleaved": lambda urls: samples(urls).interleave_shards(2).take_samples(24).shuffle_buffer(4),
    "of the mix": lambda urls: wp.mix({"a": samples(urls[::2]), "b": samples(urls[1::2])}).take_samples(24),
    "of shards": lambda urls: (
        wp.ShardList(urls, shuffle=True, seed=5).take_samples(5).open_shards().load_tar().group_by_key()
    ),
    "slice": lambda urls: samples(urls).shuffle_buffer(4).slice_samples(7, 44, 2).shuffle_buffer(2),
    "rest": lambda urls: samples(urls).slice_samples(20).shuffle_buffer(2),
}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    pipe=st.sampled_from(sorted(PIPES)),
    history=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8)), min_size=2, max_size=5),
)
def test_random_histories(pipe, history, fifty):
    make = lambda: PIPES[pipe](fifty)  # noqa: E731
    lanes, _ = history[0]
    expected, counts = over_lanes(make, [(lanes, None)], collate=keys_of)
    got, found = over_lanes(make, [*history, (2, None)], collate=keys_of)
    assert (sorted(got), found) == (sorted(expected), counts)


class Numbered(wp.Stage):
    """Each sample with its number in its lane: a step that needs whole lanes, and keeps the
    count.
    """

    @dataclass(slots=True)
    class At:
        number: int = 0

    keeps_count = True

    def run(self):
        for sample in self.source.items:
            self.at.number += 1
            yield sample | {"number": (self.lane.number, self.lane.of, self.at.number)}


wp.register_stage(Numbered)


@pytest.mark.parametrize("end", ["exact", "pad", "drop"])
def test_a_step_of_ones_own_that_needs_whole_lanes(end, fifty):
    """It also works in equal epochs."""

    def load(lanes, end=end):
        pipe = samples(fifty, samples_per_shard=FIFTY).shuffle_buffer(3).numbered()
        return wp.PipeLoader(pipe, lanes=lanes, epoch_end=end, batch_size=1, collate=list)

    def numbers(batches):
        return {(item["__key__"], item["number"]) for item in flat(batches) if not item.get("__padding__")}

    whole = numbers(load(3, "exact"))
    assert len(whole) == 50
    for cut in (1, 7, 20, 40):
        got, rest = resumed(lambda: load(3), cut, lambda: load(5))
        found = numbers([*got, *rest])
        assert found <= whole if end == "drop" else found == whole
