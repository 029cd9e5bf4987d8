"""repeat: the epochs of its source, in all hosts, and on any lanes."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import after, flat, keys_of, over_lanes, resumed, samples, stamps, through_json
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import FilterSamples, Repeat
from wds_pipes.testing import check_resume, make_shards

SIZES = [7, 5, 8, 9, 6, 7, 8]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("many"), shards=7, samples=SIZES, fields=("txt",))


def test_resumes_exactly(urls):
    """In other chains than those of tests/test_resume.py."""
    few = urls[:3]
    check_resume(lambda: samples(few).interleave_shards(2).shuffle_buffer(3).repeat(2).shuffle_buffer(4))
    shards = lambda: wp.ShardList(few, shuffle=True).repeat(2)  # noqa: E731
    check_resume(lambda: shards().open_shards().load_tar().group_by_key().shuffle_buffer(3))


def test_each_repetition_is_the_next_epoch_of_the_source(many):
    make = lambda: samples(many).shuffle_buffer(4).filter_samples(lambda sample: sample["__key__"][-1] != "3")  # noqa: E731
    source, pipe = make(), make().repeat(2)
    epochs = [keys_of(source) for _ in range(6)]
    assert [keys_of(pipe) for _ in range(3)] == [
        [*epochs[0], *epochs[1]],
        [*epochs[2], *epochs[3]],
        epochs[4] + epochs[5],
    ]
    assert pipe.counts() == {"delivered": 90, "filtered": 10, "skipped": 0, "dropped": 0}
    pipe.set_epoch(1)
    assert keys_of(pipe) == epochs[2] + epochs[3]
    assert keys_of(make().repeat(1)) == epochs[0]

    taken, again = resumed(lambda: make().repeat(), 250)
    assert keys_of(taken) == flat(epochs)[:250]
    described = wp.describe_state(again.state_dict())
    assert "epoch 0," in described
    assert "in repetition 6" in described
    assert keys_of(itertools.islice(again, 20)) == flat(epochs)[250:270]
    assert keys_of(make().repeat().take_samples(100)) == flat(epochs)[:100]
    assert repr(make().repeat(2)).endswith(".repeat(n=2)")


def test_lengths_and_counts(many):
    """A batch may be before it or after it."""
    pipe = samples(many, samples_per_shard=SIZES)
    for repeated, length in (
        (pipe.repeat(3), 150),
        (pipe.repeat(3).repeat(2).batch_samples(4), 75),
        (pipe.batch_samples(4).repeat(3), 39),
        (wp.ShardList(many).repeat(2), 14),
    ):
        assert len(repeated) == len(list(repeated)) == length
    batches = pipe.batch_samples(4).repeat(3)
    assert len([*after(batches, 20)]) == 19
    assert batches.counts()["delivered"] == 150
    with pytest.warns(UserWarning, match="batches of 4 already"):
        wp.PipeLoader(batches, batch_size=2)
    with pytest.raises(TypeError, match=r"len\(\) is not known: repeat\(\)"):
        len(pipe.repeat())


def test_without_end_an_empty_source_is_an_error():
    with pytest.raises(wp.ShardError, match="no item in 10 repetitions of lane 0 of 1"):
        list(Stream(Repeat(Given([]))))
    assert list(Stream(Repeat(Given([]), 3))) == []
    stage = FilterSamples(Given(range(9)), lambda number: False)
    with pytest.raises(wp.ShardError, match="filters"):
        list(Stream(Repeat(stage)))


def test_a_state_that_does_not_fit_is_refused(many):
    _, pipe = resumed(lambda: samples(many).repeat(3), 70)
    state = pipe.state_dict()
    with pytest.raises(wp.StateError, match=r"repeat\(n=3\)"):
        samples(many).repeat(2).load_state_dict(state)
    own = state["lanes"]["0"]["position"][-1]
    for name, value in (("repetition", 3), ("repetition", -1), ("position", 7), ("position", []), ("done", [1])):
        damaged = json.loads(json.dumps(state))
        damaged["lanes"]["0"]["position"][-1] = {**own, name: value}
        with pytest.raises(wp.StateError, match="damaged"):
            samples(many).repeat(3).load_state_dict(damaged)


# PipeLoader


def test_pipe_loader_refuses_what_it_cannot_do(many):
    counted = samples(many, samples_per_shard=SIZES)
    for end in ("drop", "pad"):
        with pytest.raises(ValueError, match=r"repeat\(\) changes their number"):
            wp.PipeLoader(counted.repeat(2), epoch_end=end)
    with pytest.raises(ValueError, match="leave it out, and pass epoch_end='loop'"):
        wp.PipeLoader(counted.repeat().batch_samples(4))
    assert len(list(wp.PipeLoader(counted.repeat().take_samples(120), batch_size=4))) == 30


# Each of these yields each sample in each of the two repetitions.
PIPES = {
    "plain": lambda urls: samples(urls).stamp_epoch().repeat(2),
    "shuffled": lambda urls: samples(urls).shuffle_buffer(4).stamp_epoch().repeat(2).shuffle_buffer(6),
    "counted": lambda urls: samples(urls, samples_per_shard=SIZES).shuffle_buffer(3).stamp_epoch().repeat(2),
    "interleaved": lambda urls: samples(urls).interleave_shards(2).stamp_epoch().repeat(2),
    "of the mix": lambda urls: (
        wp.mix({"a": samples(urls[::2]), "b": samples(urls[1::2])}, exhausted="drop").stamp_epoch().repeat(2)
    ),
}


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    pipe=st.sampled_from(sorted(PIPES)),
    history=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 16)), min_size=1, max_size=5),
)
def test_on_any_lanes_each_repetition_has_each_sample_once(pipe, history, many):
    got, counts = over_lanes(lambda: PIPES[pipe](many), [*history, (2, None)], collate=stamps)
    ledger = Counter(got)
    assert set(ledger.values()) == {1}
    assert Counter(epoch for epoch, _ in ledger) == {0: 50, 1: 50}
    assert counts["delivered"] == 100


@pytest.mark.parametrize("counted", [True, False])
def test_shards_are_repeated_too(counted, many):
    def make():
        shards = wp.ShardList(many, shuffle=True, samples_per_shard=SIZES if counted else None).repeat(2)
        return shards.open_shards().load_tar().group_by_key().stamp_epoch().shuffle_buffer(3)

    for history in ([(3, 5), (2, 7), (4, None)], [(1, None)], [(2, 20), (3, None)]):
        got, counts = over_lanes(make, history, collate=stamps)
        assert Counter(got) == Counter([(0, f"{number:08d}") for number in range(50)] * 2)
        assert counts["delivered"] == 100


def test_in_a_loop_on_ranks_with_filters(many):
    """Every rank gets full batches, and of each epoch of the data each sample comes once."""

    def load(rank, ranks, **options):
        pipe = samples(many).shuffle_buffer(3).filter_samples(lambda sample: sample["__key__"][-1] != "3")
        pipe = pipe.stamp_epoch().repeat(3)
        return wp.PipeLoader(
            pipe, batch_size=4, collate=stamps, epoch_end="loop", rank=rank, world_size=ranks, **options
        )

    seen, state = Counter(), None
    for ranks, steps in ((2, 9), (3, 11), (1, 40), (2, 20)):
        loaders = [load(rank, ranks) for rank in range(ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            batches = list(itertools.islice(loader, steps))
            assert [len(batch) for batch in batches] == [4] * steps
            seen.update(flat(batches))
        state = wp.merge_states(through_json([loader.state_dict() for loader in loaders]))
    assert set(seen.values()) == {1}
    epochs = Counter(epoch for epoch, _ in seen)
    assert [epochs[epoch] for epoch in range(6)] == [45] * 6
