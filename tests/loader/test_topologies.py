"""An epoch continues from any number of ranks and workers on any other: each sample exactly once,
and in the same order where the lanes stay.
"""

import itertools

import pytest
from pipelines import keys_of, samples, through_json, wanted
from scripts import run_proof

import wds_pipes as wp
from wds_pipes.testing import make_shards


def loader(urls, size=2, **options):
    pipe = samples(urls).shuffle_buffer(4).filter_samples(wanted)
    return wp.PipeLoader(pipe, **{"batch_size": size, "collate": keys_of, "epoch_end": "exact", **options})


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Twelve shards with about seven samples each."""
    return make_shards(tmp_path_factory.mktemp("many"), shards=12, samples=[7, 5, 8, 9, 6, 7, 8, 5, 9, 7, 6, 8])


# The same lanes


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


# Real ranks and workers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ledger", "equal"])
def test_random_histories_of_topologies(kind):
    """Random chains on changing numbers of ranks, lanes and workers: each sample once."""
    run = run_proof("histories.py", "--rounds", 40, "--kind", kind)
    assert run.returncode == 0, run.stdout + run.stderr


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
