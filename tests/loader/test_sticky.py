"""``ShardList(sticky=True)``: each rank has the same shards in all epochs, few of them move where
the number of ranks changes, and a resume is exact.
"""

import itertools
import json
import random

import numpy as np
import pytest
from pipelines import keys_of, through_json

import wds_pipes as wp
from wds_pipes.core.lane import ShardRanges
from wds_pipes.loader.sticky import arranged
from wds_pipes.testing import make_shards

SAMPLES = [5, 3, 8, 6, 4, 7, 5, 9, 6, 5, 0, 7, 8, 4, 6, 5, 3, 9, 6, 7, 5, 4, 6, 8]
KEYS = [f"{number:08d}" for number in range(sum(SAMPLES))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("sticky"), shards=len(SAMPLES), samples=SAMPLES)


def make_loader(urls, rank, ranks, *, counted=True, batch_size=2, **options) -> wp.PipeLoader:
    source = wp.ShardList(urls, shuffle=True, seed=4, sticky=True, samples_per_shard=SAMPLES if counted else None)
    pipe = source.open_shards().load_tar().group_by_key().shuffle_buffer(3)
    options = {"epoch_end": "exact", "lanes": 2 * ranks, **options}
    return wp.PipeLoader(pipe, batch_size=batch_size, collate="list", rank=rank, world_size=ranks, **options)


def take(loader, count=None) -> list[str]:
    return [key for batch in itertools.islice(loader, count) for key in keys_of(batch)]


@pytest.mark.parametrize("counted", [True, False])
def test_each_rank_has_the_same_shards_in_all_epochs(shards, counted):
    """Each sample comes once in an epoch, on one rank in all epochs, in another order."""
    owners = {}
    for rank in range(3):
        loader = make_loader(shards, rank, 3, counted=counted)
        epochs = [take(loader) for _ in range(3)]
        assert set(map(frozenset, epochs)) == {frozenset(epochs[0])}
        assert len(set(map(tuple, epochs))) == 3
        owners |= dict.fromkeys(epochs[0], rank)
    assert sorted(owners) == KEYS
    if counted:
        sizes = [list(owners.values()).count(rank) for rank in range(3)]
        assert max(sizes) - min(sizes) <= 2  # of two lanes each


@pytest.mark.parametrize(("mode", "after"), [*itertools.product(["exact", "drop"], [1, 2, 3, 4]), ("loop", 3)])
def test_a_resume_is_exact(shards, mode, after):
    """On the same ranks each rank goes on as if it had not stopped, on others each sample that is
    left comes once. The next epoch is that of a loader that began on these ranks.
    """

    def make(rank, ranks):
        loader = make_loader(shards, rank, ranks, epoch_end=mode)
        return loader.with_epoch(batches=1200) if mode == "loop" else loader

    cut, count = random.Random(after).randrange(1, 8), 12 if mode == "loop" else None
    loaders = [make(rank, 3) for rank in range(3)]
    had = [take(loader, cut) for loader in loaders]
    states = through_json([loader.state_dict() for loader in loaders])
    again = [make(rank, after) for rank in range(after)]
    for loader in again:
        loader.load_state_dict(states)
    rest = [take(loader, count) for loader in again]
    if after == 3:
        wholes = [take(make(rank, 3), count and cut + count) for rank in range(3)]
        assert [one + other for one, other in zip(had, rest, strict=True)] == wholes
    seen = [key for keys in had + rest for key in keys]
    if mode != "loop":
        assert len(seen) == len(set(seen))
    if mode == "exact":
        assert sorted(seen) == KEYS
        for rank, loader in enumerate(again):
            other = make_loader(shards, rank, after, lanes=loader.state_dict()["lane_count"])
            other.set_epoch(1)
            assert take(loader) == take(other)


def test_the_same_lanes_on_fewer_ranks_go_on(shards):
    """Their shards are those of the ranks with which the epoch began, after another load, too."""
    had = list[str]()
    states = list[object]()
    for ranks, count in ((4, 2), (2, 3), (1, 1), (1, None)):
        loaders = [make_loader(shards, rank, ranks, lanes=8) for rank in range(ranks)]
        for loader in loaders if states else []:
            loader.load_state_dict(through_json(states))
        had += [key for loader in loaders for key in take(loader, count)]
        states = [loader.state_dict() for loader in loaders]
        assert json.loads(states[0]["partition"])["history"] == []
    assert sorted(had) == KEYS


def shards_of_ranks(count, ranks, workers, epoch) -> list[set[int]]:
    """Which shards the ranks of a large job read."""
    numbers = np.random.default_rng(epoch).permutation(count)
    samples = np.random.default_rng(99).integers(50, 150, count)
    ranges = ShardRanges.whole(numbers, samples.tolist())
    lanes, total = ranks * workers, ranges.samples
    sizes = [(lane + 1) * total // lanes - lane * total // lanes for lane in range(lanes)]
    shares = list(arranged(ranges, 7, ranks, lanes, sizes).cut(sizes))
    assert sum(share.samples for share in shares) == total
    return [{int(n) for share in shares[rank::ranks] for n in share.numbers} for rank in range(ranks)]


@pytest.mark.parametrize("workers", [1, 8])
def test_what_nodes_fetch(workers):
    """Each of 4 nodes fetches its part once in 5 epochs, together at most 1.02 of the data; 3 nodes
    fetch at most 0.35 of it again.
    """
    count = 4000
    held = [
        set.union(*parts)
        for parts in zip(*(shards_of_ranks(count, 4, workers, epoch) for epoch in range(5)), strict=True)
    ]
    assert sum(map(len, held)) <= 1.02 * count
    after = shards_of_ranks(count, 3, workers, 6)
    assert sum(len(now - before) for now, before in zip(after, held)) <= 0.35 * count


def test_wrong_options(shards):
    for options in ({}, {"shuffle": True, "resampled": True}):
        with pytest.raises(ValueError, match="sticky=True goes with shuffle=True"):
            wp.ShardList(shards, sticky=True, **options)


@pytest.mark.parametrize("ranks", [0, 5, -1, "3", 1 << 70])
def test_a_damaged_number_of_ranks(shards, ranks):
    states = through_json([make_loader(shards, rank, 3).state_dict() for rank in range(3)])
    for state in states:
        state["partition"] = json.dumps(json.loads(state["partition"]) | {"ranks": ranks})
        state["lanes"] = {number: {**lane, "delivered": 0} for number, lane in state["lanes"].items()}
    with pytest.raises(wp.StateError, match="ranks"):
        make_loader(shards, 0, 2).load_state_dict(states)
