"""Which rank waits for what."""

import time

import pytest
from pipelines import samples
from process_group import on_ranks

import wds_pipes as wp
from wds_pipes.testing import make_shards


def slow(sample):
    time.sleep(0.01)
    return sample


def fast_and_slow(rank, ranks, urls):
    loader = wp.PipeLoader(
        samples(urls, samples_per_shard=4).map_samples(slow), batch_size=2, rank=rank, world_size=ranks
    )
    for _ in loader:
        time.sleep(0 if rank else 0.2)  # the training
    found = loader.stats_of_ranks()
    return [(stats["rank"], stats["world_size"]) for stats in found], wp.describe_stats(found)


@pytest.mark.slow
def test_all_ranks_say_the_same(tmp_path):
    told = on_ranks(2, fast_and_slow, make_shards(tmp_path, shards=4, samples=4))
    assert told[0] == told[1]
    ranks, text = told[0]
    assert ranks == [(0, 2), (1, 2)]
    assert text.startswith("The limit is rank 1, which waits for data ")


def test_one_rank_needs_no_group(urls):
    loader = wp.PipeLoader(samples(urls), batch_size=2)
    [stats] = loader.stats_of_ranks()
    assert (stats["rank"], stats["world_size"]) == (0, 1)
    assert wp.describe_stats(loader.stats()) == "no rank has begun an iteration"
    list(loader)
    stats = loader.stats()
    assert wp.describe_stats(stats) == wp.describe_stats([stats])
    assert wp.describe_stats(loader.stats_of_ranks()).startswith("The limit is the data: rank 0 waits for them ")
    alone = wp.PipeLoader(samples(urls), batch_size=2, rank=1, world_size=2, epoch_end="exact")
    with pytest.raises(RuntimeError, match="rank 1 of 2, and torch.distributed"):
        alone.stats_of_ranks()


def test_reading_is_measured_before_later_steps(urls):
    """With and without a ledger, which stands between reading and the steps after it."""
    for ledger in (False, True):
        loader = wp.PipeLoader(samples(urls).map_samples(dict), batch_size=2, ledger=ledger)
        list(loader)
        assert 0 < loader.stats()["read_share"] < 1


def test_figures_stay_when_a_state_edits_the_pipeline(urls):
    loader = wp.PipeLoader(samples(urls), batch_size=2, collate=list)
    for _, batch in zip(range(2), loader, strict=False):
        key = batch[0]["__key__"]
    before = loader.stats()["samples"]
    loader.load_state_dict(loader.state_dict(), exclude=[key])
    assert loader.stats()["samples"] == before > 0


def test_the_slowest_rank_in_words():
    idle = {"wait_share": 0.02, "read_share": 0.5, "decode_share": 0.5, "stall_share": 0.0}
    busy = {"wait_share": 0.41, "read_share": 0.72, "decode_share": 0.28, "stall_share": 0.65}
    ranks = [{"rank": float(rank), "world_size": 3.0, **(busy if rank == 1 else idle)} for rank in range(3)]
    assert wp.describe_stats(ranks) == (
        "The limit is rank 1, which waits for data 41% of its time, and the others 2%; its workers spend 65% of their "
        "time on waiting for bytes of a store, and theirs 0%. Look at the host of rank 1, and compare its network and "
        "its cache with those of the others. All ranks wait for it, and make more steps without that."
    )
