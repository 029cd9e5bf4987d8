"""What the states of all ranks share after a repartition stands once in a checkpoint."""

import json
from itertools import islice

import pytest
from pipelines import keys_of, samples
from process_group import on_ranks

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.testing import make_shards

SHARDS, SAMPLES, FIRST, SECOND = 24, 5, 8, 3
KEYS = [f"{number:08d}" for number in range(SHARDS * SAMPLES)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("sharing"), shards=SHARDS, samples=SAMPLES)


def make_loader(urls, rank=None, ranks=None) -> wp.PipeLoader:
    pipe = samples(urls, shuffle=True, samples_per_shard=SAMPLES).shuffle_buffer(4)
    return wp.PipeLoader(pipe, batch_size=1, collate="list", rank=rank, world_size=ranks, epoch_end="drop")


def run(urls, ranks, directory, batches, step) -> list[str]:
    """Ranks that load, take these batches each (None: all) and save; returns the keys."""
    loaders, keys = [make_loader(urls, rank, ranks) for rank in range(ranks)], list[str]()
    for loader in loaders:
        checkpoint.load(directory, loader)
    for loader in loaders:
        keys += [key for batch in islice(loader, batches) for key in keys_of(batch)]
        checkpoint.save(directory, loader, step=step)
    return keys


def test_files_have_the_partition_once(shards, tmp_path):
    """On ranks other than 0 they have a digest of it; all resume from it, also on other ranks."""
    had = run(shards, FIRST, tmp_path, 2, step=1) + run(shards, SECOND, tmp_path, 4, step=2)
    place = tmp_path / "step-0000000002"
    texts = [(place / f"rank-{rank:04d}-of-{SECOND:04d}.json").read_text() for rank in range(SECOND)]
    assert ["remainders" in text for text in texts] == [True, False, False]
    again = [make_loader(shards, rank, SECOND) for rank in range(SECOND)]
    for loader in again:
        assert checkpoint.load(tmp_path, loader) == 2
        assert "remainders" in loader.state_dict()["partition"]
    rest = run(shards, 1, tmp_path, None, step=3)
    for left in (rest, [key for loader in again for batch in loader for key in keys_of(batch)]):
        assert len(had + left) == len({*had, *left}) >= len(KEYS) - FIRST


def test_a_rank_of_another_partition_is_refused(shards, tmp_path):
    """Its digest is another one: when a rank saves, and when all are loaded."""
    for directory, batches in (("one", 2), ("other", 3)):
        run(shards, FIRST, tmp_path / directory, batches, step=1)
        run(shards, SECOND, tmp_path / directory, 1, step=2)
    name = f"step-0000000002/rank-0002-of-{SECOND:04d}.json"
    (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(wp.StateError, match="the states differ in 'partition'"):
        checkpoint.load(tmp_path / "one", make_loader(shards, 0, SECOND))
    loaders = [make_loader(shards, rank, SECOND) for rank in (1, 2)]
    for loader, directory in zip(loaders, ("one", "other"), strict=True):
        checkpoint.load(tmp_path / directory, loader, step=1)
    checkpoint.save(tmp_path / "new", loaders[0], step=3)
    with pytest.raises(wp.StateError, match="load.. would refuse checkpoint 3: .* differ in 'partition'"):
        checkpoint.save(tmp_path / "new", loaders[1], step=3)


def gather_after_a_load(rank, ranks, urls, path):
    """The states of all ranks in both forms, and the keys that come from each."""
    loader = make_loader(urls)
    checkpoint.load(path, loader)
    next(iter(loader))
    merged, dcp = checkpoint.gather(loader), checkpoint.DCPState(loader).state_dict()
    found = []
    for load in (
        lambda one: one.load_state_dict(merged),
        lambda one: checkpoint.DCPState(one).load_state_dict(dcp),
    ):
        again = make_loader(urls)
        load(again)
        found.append([key for batch in again for key in keys_of(batch)])
    return json.dumps(merged), dcp["ranks"], found


def test_gathered_states_have_the_partition_once(shards, tmp_path):
    run(shards, FIRST, tmp_path, 2, step=1)
    on_each = on_ranks(SECOND, gather_after_a_load, shards, tmp_path)
    assert len({text for text, *_ in on_each}) == len({text for _, text, _ in on_each}) == 1
    for text in on_each[0][:2]:
        assert text.count("remainders") == 1
    for _, _, (merged, dcp) in on_each:
        assert merged == dcp
