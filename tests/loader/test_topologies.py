"""An epoch continues from any number of ranks and workers on any other: each sample exactly once,
and in the same order where the lanes stay.
"""

import itertools
import os

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from launch import Topology, run_pairs
from pipelines import keys_of, samples, shuffled, through_json
from scripts import run_proof

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards


def wanted(sample):
    return int(sample["__key__"]) % 5 != 2


def loader(urls, size=2, **options):
    pipe = samples(urls).shuffle_buffer(4).filter_samples(wanted)
    return wp.PipeLoader(pipe, **{"batch_size": size, "collate": keys_of, "epoch_end": "exact", **options})


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Twelve shards with about seven samples each."""
    return make_shards(tmp_path_factory.mktemp("many"), shards=12, samples=[7, 5, 8, 9, 6, 7, 8, 5, 9, 7, 6, 8])


# The same lanes


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "lanes"), [(1, 4), (2, 6)])
def test_the_batches_of_a_rank_are_the_same_whatever_its_workers(world_size, lanes, many):
    def run(workers, rank, state=None):
        source = loader(
            many,
            lanes=lanes,
            num_workers=workers,
            rank=rank,
            world_size=world_size,
            multiprocessing_context="fork" if workers else None,
        )
        if state is not None:
            source.load_state_dict(state)
        epochs = [list(source) for _ in range(2)]
        source.close()
        return epochs

    for rank in range(world_size):
        expected = run(0, rank)
        half = loader(many, lanes=lanes, rank=rank, world_size=world_size)
        for _ in zip(range(5), half, strict=False):
            state = half.state_dict()
        for workers in (1, 2, 3):
            assert run(workers, rank) == expected
            assert run(workers, rank, state) == [expected[0][5:], expected[1]]


def steps(ranks):
    """The batches of all ranks in turn: what one optimizer step sees after another."""
    return [batch for row in zip(*ranks, strict=False) for batch in row]


@pytest.mark.parametrize("batches", [1, None])
def test_the_number_of_lanes_that_is_requested(batches, many):
    """It is that of the loader, also if the state stands at the end of an epoch."""
    before, after = [loader(many, lanes=6, rank=rank, world_size=2) for rank in range(2)], loader(many, lanes=2)
    for rank in before:
        list(itertools.islice(rank, batches))
    after.load_state_dict([rank.state_dict() for rank in before])
    assert after.state_dict()["lane_count"] == 2
    assert after.state_dict()["epoch"] == (batches is None)


def test_order_in_each_lane_and_global_batches_are_the_same_on_any_number_of_ranks(many):
    """4 lanes on 1, 2 and 4 ranks, also changed in the middle: R ranks x 1 step = 1 rank x R steps,
    while no lane has ended.
    """
    run = lambda world_size: [  # noqa: E731
        list(loader(many, lanes=4, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    by_lane = run(4)
    lane_of = {key: lane for lane, batches in enumerate(by_lane) for batch in batches for key in batch}
    full = 4 * min(map(len, by_lane))
    expected = steps(by_lane)[:full]
    assert full > 20

    def check(batches):
        for lane in range(4):
            assert [batch for batch in batches if lane_of[batch[0]] == lane] == by_lane[lane]

    for world_size in (1, 2):
        ranks = run(world_size)
        assert steps(ranks)[:full] == expected
        check([batch for rank in ranks for batch in rank])
    states, done = None, []
    for world_size, count in ((4, 2), (1, 4), (2, 2), (4, 1), (2, None)):
        sources = [loader(many, lanes=4, rank=rank, world_size=world_size) for rank in range(world_size)]
        for source in sources if states else ():
            source.load_state_dict(states)
        ranks = [[batch for _, batch in zip(range(count or 1000), source, strict=False)] for source in sources]
        done += steps(ranks) if count else [batch for rank in ranks for batch in rank]
        if count:
            assert done == expected[: len(done)]
            states = [through_json(source.state_dict()) for source in sources]
    check(done)


# Random histories in one process


def bad(rng, number):
    return b"none" if number % 7 == 3 else b"%d" % number


def break_some(sample):
    if int(sample["__key__"]) % 6 == 1:
        raise ValueError("bad")
    return sample


def not_bad(number):
    return number % 7 != 3


def mixed(urls, fn=lambda pipe: pipe):
    """A mix of the even and the odd shards."""
    halves = {"even": urls[::2], "odd": urls[1::2]}
    return wp.mix(
        {name: fn(samples(half)) for name, half in halves.items() if half},
        weights=[2, 1][: len(urls)],
        exhausted="drop",
        seed=5,
    )


def by_offsets(urls):
    """The samples in one global order."""
    return wp.SampleList(urls, index=f"{os.path.dirname(urls[0])}/offsets", shuffle=True, seed=5).fetch_samples()


# Pipes by name: the chain, which samples of the epoch it yields, and whether all of them (not those
# of batches that are left out).
PIPES = {
    "plain": (samples, lambda number: True, True),
    "shuffle": (lambda urls: samples(urls).shuffle_buffer(4), lambda number: True, True),
    "large shuffle": (lambda urls: samples(urls).shuffle_buffer(1000), lambda number: True, True),
    "filter": (
        lambda urls: samples(urls).shuffle_buffer(4).filter_samples(wanted),
        lambda number: number % 5 != 2,
        True,
    ),
    "bad samples": (lambda urls: shuffled(urls).decode_by_ext(on_error="skip"), not_bad, True),
    "skipped": (
        lambda urls: samples(urls).filter_samples(wanted).map_samples(break_some, on_error="skip").shuffle_buffer(3),
        lambda number: number % 5 != 2 and number % 6 != 1,
        True,
    ),
    "batches": (
        lambda urls: shuffled(urls).batch_samples(3, collate="list").map_samples(list),
        lambda number: True,
        True,
    ),
    "full batches": (
        lambda urls: shuffled(urls).batch_samples(3, collate="list", drop_last=True),
        lambda number: True,
        False,
    ),
    "torch": (lambda urls: samples(urls).map(dict).shuffle_buffer(3), lambda number: True, True),
    "mix": (lambda urls: mixed(urls).shuffle_buffer(3), lambda number: True, True),
    "mix of filtered": (
        lambda urls: mixed(urls, lambda pipe: pipe.shuffle_buffer(3).filter_samples(wanted)),
        lambda number: number % 5 != 2,
        True,
    ),
    "mix of batches": (
        lambda urls: mixed(urls, lambda pipe: pipe.shuffle_buffer(3).batch_samples(2, collate="list")),
        lambda number: True,
        True,
    ),
    "counted": (
        lambda urls: samples(urls, samples_per_shard=counts_of(urls)).shuffle_buffer(4),
        lambda number: True,
        True,
    ),
    "counted and filtered": (
        lambda urls: samples(urls, samples_per_shard=counts_of(urls)).filter_samples(wanted),
        lambda number: number % 5 != 2,
        True,
    ),
}
PIPES |= {
    "by offsets": (by_offsets, lambda number: True, True),
    "by offsets, in lanes": (
        lambda urls: by_offsets(urls).shuffle_buffer(4).filter_samples(wanted),
        lambda number: number % 5 != 2,
        True,
    ),
}
BATCHED = ("batches", "full batches", "mix of batches")
SHARDS = {
    "some": [3, 0, 5, 2, 9, 4, 6],
    "few": [7, 11],
    "one": [13],
    "many": [1, 2, 0, 3, 1, 2, 0, 0, 4, 1, 2, 1, 3, 2],
    "empty": [0, 0, 3],
}
counted = {}


def counts_of(urls):
    return counted[urls[0]]


@pytest.fixture(scope="session")
def collections(tmp_path_factory):
    found = {}
    for name, counts in SHARDS.items():
        urls = make_shards(tmp_path_factory.mktemp(name), shards=len(counts), samples=counts, fields={"cls": bad})
        counted[urls[0]] = counts
        os.mkdir(offsets := f"{os.path.dirname(urls[0])}/offsets")
        index_shards(urls, offsets=offsets)
        found[name] = urls
    return found


# Ranks, workers, batch size, steps until it is cut.
TOPOLOGY = st.tuples(
    st.integers(1, 3), st.sampled_from([0, 0, 1, 2, 3]), st.integers(1, 3), st.sampled_from([1, 1, 2, 0, 3, 6])
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    pipe=st.sampled_from(sorted(PIPES)),
    shards=st.sampled_from(sorted(SHARDS)),
    history=st.lists(TOPOLOGY, min_size=3, max_size=7),
)
def test_random_histories_of_topologies(pipe, shards, history, collections):
    """Up to six changes: all that was delivered is the epoch exactly once, and at each cut the
    counts are those of the delivered samples.
    """
    make, given_by, whole = PIPES[pipe]
    urls, total = collections[shards], sum(SHARDS[shards])
    got, states = [], None
    for place, (ranks, workers, size, cut) in enumerate(history):
        options = {} if pipe in BATCHED else {"batch_size": size, "collate": "list"}
        lanes = ranks * max(1, workers)
        sources = [
            wp.PipeLoader(make(urls), lanes=lanes, rank=rank, world_size=ranks, epoch_end="exact", **options)
            for rank in range(ranks)
        ]
        for source in sources if states else ():
            source.load_state_dict(states)
            assert source.state_dict()["epoch"] in (0, 1)
        if sources[0].state_dict()["epoch"] == 1:
            break
        running = [iter(source) for source in sources]
        step = 0
        while running and (step < cut or place == len(history) - 1):
            for items in list(running):
                batch = next(items, None)
                if batch is None:
                    running.remove(items)
                else:
                    got += keys_of(batch)
            step += 1
        states = [through_json(source.state_dict()) for source in sources]
        counts = {}
        for source in sources:
            for name, count in source.counts().items():
                counts[name] = counts.get(name, 0) + count
        assert counts["delivered"] == len(got)
        assert sum(counts.values()) <= total
        if not running:
            assert sum(counts.values()) == total, counts
            break
        states = wp.merge_states(states)
    event(f"{place} changes")
    expected = [f"{number:08d}" for number in range(total) if given_by(number)]
    if whole:
        assert sorted(got) == expected
    else:
        assert len(set(got)) == len(got)
        assert set(got) <= set(expected)


# Real ranks and workers

SAMPLES = [5, 9, 0, 12, 7, 10, 3, 11, 8, 6]
PAIRS = [
    ((2, 1), (3, 0)),
    ((3, 0), (1, 3)),
    ((1, 3), (2, 1)),
    ((1, 0), (3, 0)),
    ((2, 1), (2, 1)),
    ((3, 0), (3, 0)),
    ((1, 3), (1, 3)),
    ((2, 1), (1, 0)),
]


@pytest.mark.slow
def test_real_ranks_and_workers(tmp_path):
    """Some pairs of topologies, each at three cuts and on to a third topology;
    tests/proofs/topologies.py does all 81.
    """
    urls = make_shards(tmp_path / "data", shards=len(SAMPLES), samples=SAMPLES)
    keys = {f"{number:08d}" for number in range(sum(SAMPLES)) if number % 10 != 7}
    tally = run_pairs(str(tmp_path), urls, keys, [(Topology(*before), Topology(*after)) for before, after in PAIRS])
    assert (tally.pairs, tally.lost, tally.repeated) == (len(PAIRS), 0, 0)


@pytest.mark.slow
def test_killed_by_sigkill():
    """A round of tests/proofs/kill.py: torchrun, and SIGKILL of a rank or a worker."""
    run = run_proof("kill.py", "--rounds", 1, "--forked")
    assert run.stdout.startswith("rounds=1 lost=0 repeated=0 "), run.stderr


@pytest.mark.slow
def test_ended_by_a_cluster():
    """A round of tests/proofs/preempt.py: SIGTERM through torchrun."""
    run = run_proof("preempt.py", "--rounds", 1, "--forked")
    assert run.stdout.startswith("rounds=1 bad=0 "), run.stderr
