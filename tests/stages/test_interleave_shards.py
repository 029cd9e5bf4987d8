"""interleave_shards: several shards in turn, each sample once, and exact at every cut."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import even, loaded, resumed, samples
from torch.utils.data import DataLoader

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards

# The samples of interleave_shards(3) over those shards in the order of seed 5, epochs 0 and 1:
# they never change.
GOLDEN = [
    [10, 8, 0, 11, 9, 1, 12, 3, 2, 13, 4, 5, 6, 7],
    [8, 0, 3, 9, 1, 4, 10, 2, 5, 11, 6, 12, 7, 13],
]


def numbers_of(pipe):
    return [int(sample["__key__"]) for sample in pipe]


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(["", "before", "after", "both"]),
)
def test_random_shards_at_every_pair_of_cuts(tmp_path_factory, sizes, count, shuffle):
    """Also with a shuffle in each shard, or after interleaving."""
    urls = make_shards(tmp_path_factory.mktemp("random"), shards=len(sizes), samples=sizes)

    def make():
        pipe = samples(urls)
        pipe = pipe.shuffle_buffer(2) if shuffle in ("before", "both") else pipe
        pipe = pipe.interleave_shards(count)
        return pipe.shuffle_buffer(3) if shuffle in ("after", "both") else pipe

    assert all(sorted(numbers_of(epoch)) == list(range(sum(sizes))) for epoch in check_resume(make))


def test_golden_order(urls):
    """The order is part of the checkpoint format."""
    pipe = samples(urls).interleave_shards(3)
    assert [numbers_of(pipe), numbers_of(pipe)] == GOLDEN


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, range(18)),
        (3, [0, 3, 10, 1, 4, 11, 2, 5, 12, 13, 6, 14, 7, 15, 8, 16, 9, 17]),
        (8, [0, 3, 10, 11, 13, 1, 4, 12, 14, 2, 5, 15, 6, 16, 7, 17, 8, 9]),
    ],
)
def test_takes_one_from_each_in_turn(tmp_path, count, expected):
    """A shard that has ended is replaced by the next one at once; one shard at a time leaves the
    order as it is.
    """
    urls = make_shards(tmp_path, shards=8, samples=[3, 0, 0, 7, 1, 2, 5, 0])
    assert numbers_of(samples(urls, shuffle=False).interleave_shards(count)) == list(expected)


def test_nothing_but_empty_shards(tmp_path):
    """And fewer shards than lanes: an epoch without samples, not one without end."""
    urls = make_shards(tmp_path, shards=3, samples=0)
    assert check_resume(lambda: samples(urls).interleave_shards(2)) == [[], []]
    dataset = samples(urls[:1]).interleave_shards(2).as_dataset()
    assert list(DataLoader(dataset, batch_size=None, num_workers=2)) == []


def test_steps_before_depend_on_the_shard_alone(urls):
    """A shuffle before it orders a shard in the same way whatever other shards are open, and each
    shard in another way.
    """
    orders = []
    for count in (1, 2, 5):
        of = {}
        for sample in samples(urls).shuffle_buffer(4).interleave_shards(count):
            of.setdefault(sample["__url__"], []).append(int(sample["__key__"]))
        orders.append(of)
    assert orders[0] == orders[1] == orders[2]
    assert len({tuple(number - min(shard) for number in shard)[:2] for shard in orders[0].values()}) > 1


def test_counts_include_open_and_finished_shards(urls):
    """At every position: the delivered and the filtered samples."""
    pipe = samples(urls).filter_samples(even).interleave_shards(3)
    for number, _ in enumerate(pipe, 1):
        counts = pipe.counts()
        again = loaded(samples(urls).filter_samples(even).interleave_shards(3), pipe.state_dict())
        assert counts["delivered"] == number
        assert again.counts() == counts
    assert pipe.counts() == {"delivered": 7, "filtered": 7, "skipped": 0, "dropped": 0}


@pytest.mark.parametrize("count", [1, 2])
def test_broken_shards_are_skipped_and_counted(tmp_path, count):
    """One that is missing and one that is cut, at every cut; without on_error="skip" they are
    errors that name the shard.
    """
    urls = make_shards(tmp_path, shards=3, samples=3)
    with open(urls[1], "r+b") as file:
        file.truncate(4 * 512 + 100)
    urls.insert(2, str(tmp_path / "missing.tar"))

    def make(on_error):
        return (
            wp.ShardList(urls)
            .open_shards(on_error=on_error)
            .load_tar(on_error=on_error)
            .group_by_key(on_error=on_error)
            .interleave_shards(count)
        )

    [epoch, _] = check_resume(lambda: make("skip"))
    assert set(range(9)) - set(numbers_of(epoch)) <= {3, 4, 5}
    pipe = make("skip")
    assert len(list(pipe)) == len(epoch)
    assert (pipe.counts()["skipped_shards"], pipe.counts()["damaged"]) == (1, 1)
    broken = make("raise")
    with pytest.raises(wp.ShardError, match="shard-000001.tar"):
        list(broken)
    with pytest.raises(wp.ShardError, match="shard-000001.tar"):
        list(loaded(make("raise"), broken.state_dict()))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resume_opens_the_open_shards_again(tmp_path, counted, ahead):
    """Each from its position on, not from its start, and no finished shard. Only the next one is
    requested from its start, ahead of its turn.
    """
    blob = bytes(50_000)
    urls = [
        f"counted://{url}"
        for url in make_shards(tmp_path, shards=4, samples=60, fields={"bin": lambda rng, number: blob})
    ]
    make = lambda: (  # noqa: E731
        wp.ShardList(urls).open_shards(shards_ahead=ahead).load_tar().group_by_key().interleave_shards(2)
    )
    [*_, expected], _ = resumed(make, 101)
    _, again = resumed(make, 100)
    counted.clear()
    assert next(iter(again)) == expected
    from_the_beginning = [offset for offset, _ in counted if offset < 40 * 50_000]
    assert from_the_beginning == sorted(set(from_the_beginning))  # those of one shard
    assert bool(ahead) >= bool(from_the_beginning)
    assert len(counted) > len(from_the_beginning)


def test_state_is_small(tmp_path):
    """At most 80 bytes for an open shard after group_by_key()."""
    urls = make_shards(tmp_path, shards=40, samples=10)
    for count in (4, 40):
        pipe = samples(urls).interleave_shards(count)
        largest = 0
        for _ in pipe:
            largest = max(largest, len(json.dumps(pipe.state_dict()["lanes"]["0"]["position"])))
        assert largest < 150 + 80 * count


@pytest.mark.parametrize(
    "own",
    [
        {"next": -1},
        {"next": "2"},
        {"next": 2, "turn": 2, "chains": [{}, {"place": 1}]},
        {"next": 1, "chains": [{"place": 1}]},
        {"next": 1, "chains": [{"position": [{}, {}]}]},
        {"next": 1, "chains": [0]},
        {"next": 3, "chains": [{"place": place} for place in range(3)]},
        {"chains": {}},
        {"more": 1},
    ],
)
def test_damaged_states_are_refused(urls, own):
    pipe = samples(urls).interleave_shards(2)
    state = pipe.state_dict()
    state["lanes"]["0"]["position"][-1] = own
    with pytest.raises(wp.StateError, match="the state is damaged: .*(interleave_shards|a position has 2 entries)"):
        pipe.load_state_dict(state)


def test_a_state_beyond_the_lane_is_refused(urls):
    pipe = samples(urls).interleave_shards(2)
    state = pipe.state_dict()
    state["lanes"]["0"]["position"][-1] = {"next": 9, "chains": [{"place": 8}]}
    pipe.load_state_dict(state)
    with pytest.raises(wp.StateError, match="opened 9 shards of a lane of 5"):
        next(iter(pipe))


@pytest.mark.parametrize("count", [1, 3])
def test_a_description_names_the_shard_that_is_next(urls, count):
    pipe = samples(urls, shuffle=False).interleave_shards(count)
    stream = iter(pipe)
    for _ in range(9):
        next(stream)
        state = pipe.state_dict()
        place = urls.index(state["lanes"]["0"]["url"]) + 1
        lane = wp.describe_state(state).splitlines()[1]
        assert lane.startswith(f"lane 0 of 1: shard {place} of {len(urls)} (")
        assert lane.count("shard ") == 1
