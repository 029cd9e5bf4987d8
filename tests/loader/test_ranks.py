"""The rank of a process: as passed, else from torch.distributed, else from RANK and WORLD_SIZE,
else the only one.
"""

import logging.handlers
import re
import tarfile

import pytest
import torch.distributed as dist
from pipelines import key_of, keys_of, samples
from process_group import on_ranks
from torch.utils.data import DataLoader
from torchdata.nodes import Loader

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.loader import ranks as comparing
from wds_pipes.loader.ranks import Rank, find_rank
from wds_pipes.testing import make_shards


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A process group of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


BOTH = {"RANK": "3", "WORLD_SIZE": "5"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "5"}


@pytest.fixture
def around(monkeypatch):
    return lambda environment: [monkeypatch.setenv(name, value) for name, value in environment.items()]


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        ({}, (), (0, 1)),
        (BOTH, (), (3, 5)),
        ({"RANK": "3"}, (), (0, 1)),
        (SLURM, (), (0, 1)),
        (BOTH, (1, 2), (1, 2)),
        (BOTH, (0, 1), (0, 1)),
    ],
)
def test_where_a_rank_comes_from(environment, arguments, expected, around):
    around(environment)
    assert find_rank(*arguments) == expected
    if not arguments:
        number, of = wp.rank()
        assert (number, of) == expected == wp.PipeLoader(wp.ShardList("a.tar"), epoch_end="exact").rank


def test_a_process_group_comes_before_the_environment(urls, around, group):
    around(BOTH)
    assert find_rank() == (0, 1)
    assert find_rank(1, 2) == (1, 2)
    assert make(urls).state_dict()["world_size"] == 1


@pytest.mark.parametrize(
    ("environment", "arguments", "error", "message"),
    [
        (BOTH, (0, None), ValueError, "both rank and world_size"),
        (BOTH, (None, 2), ValueError, "both rank and world_size"),
        (BOTH, (2, 2), ValueError, "below world_size, not 2 of 2"),
        (BOTH, (-1, 2), ValueError, "at least 0"),
        (BOTH, (0, 0), ValueError, "not 0 of 0"),
        (BOTH, ("0", "2"), TypeError, "rank must be an int, not '0'"),
        (BOTH | {"RANK": "5"}, (), ValueError, "not 5 of 5 .by RANK and WORLD_SIZE"),
        (BOTH | {"RANK": ""}, (), ValueError, "the environment variable RANK must be a number, not ''"),
        (BOTH | {"WORLD_SIZE": "two"}, (), ValueError, "the environment variable WORLD_SIZE must be a number"),
    ],
)
def test_wrong_values_are_refused(environment, arguments, error, message, around):
    around(environment)
    with pytest.raises(error, match=message):
        find_rank(*arguments)


def make(urls, **options):
    return wp.PipeLoader(samples(urls).map_samples(key_of), epoch_end="exact", **options)


def test_a_loader_takes_its_rank_at_the_first_use(urls, monkeypatch):
    """It may be built before the process group is there; from then on the rank stays."""
    expected = [list(make(urls, rank=rank, world_size=2)) for rank in range(2)]
    assert sorted(expected[0] + expected[1]) == [f"{number:08d}" for number in range(14)]
    loader = make(urls)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(loader) == expected[1]
    monkeypatch.setenv("RANK", "0")
    assert loader.rank == Rank(1, 2)
    assert list(make(urls)) == expected[0]


def test_the_number_of_lanes_must_fit_the_ranks(urls):
    with pytest.raises(ValueError, match="lanes=3 must be a multiple of the 2 ranks"):
        list(make(urls, rank=0, world_size=2, lanes=3))


def test_a_source_that_gives_every_rank_all_samples_warns(around, tmp_path):
    """A pipe, a pipe in a DataLoader, a node and a dataset do; a PipeLoader partitions, and a
    single rank has nothing to share.
    """
    urls = make_shards(tmp_path, shards=1, samples=2)
    around(BOTH)
    for read in (
        lambda: list(wp.ShardList(urls)),
        lambda: list(DataLoader(wp.ShardList(urls), batch_size=None)),
        lambda: list(Loader(nodes.ShardList(urls))),
        lambda: wp.ShardList(urls).as_dataset(),
    ):
        with pytest.warns(UserWarning, match=r"to every rank: use wds_pipes\.PipeLoader"):
            read()
    with pytest.MonkeyPatch.context() as alone:
        alone.delenv("RANK")
        assert [ref.url for ref in wp.ShardList(urls)] == urls
    list(wp.PipeLoader(wp.ShardList(urls).open_shards().load_tar().group_by_key(), epoch_end="exact"))


DIFFERENT = {
    "order": "the names or the order of the shards",
    "fewer": r"shards \(7 instead of 8\)",
    "seed": r"seed \(1 instead of 0\)",
    "step": "the steps and their options",
    "mix": r"the sources of mix\(\)",
    "workers": r"lane_count \(6 instead of 3\)",
    "epoch": r"epoch \(1 instead of 0\)",
    "cut": r"the number of batches to the next cut of with_epoch\(\) \(3 instead of 2\)",
}


def begin_otherwise(rank, ranks, urls, path):
    """What the first ``next()`` says if the last rank differs in one thing, by this thing."""
    found = {}
    for what in DIFFERENT:
        changed = what if rank == ranks - 1 else None
        listed = {"order": urls[::-1], "fewer": urls[:-1]}.get(changed, urls)
        pipe = samples(listed, samples_per_shard=6, seed=int(changed == "seed"))
        if what == "mix":
            pipe = wp.mix({"a": pipe, "b": samples(listed[:4] if changed else listed[4:], samples_per_shard=6)})
        if changed == "step":
            pipe = pipe.shuffle_buffer(3)
        loader = wp.PipeLoader(
            pipe,
            batch_size=2,
            collate="list",
            num_workers=2 if changed == "workers" else 0,
            epoch_end="exact" if what == "mix" else None,
        )
        if changed == "epoch":
            loader.set_epoch(1)
        if what == "cut":
            loader.with_epoch(batches=9 if changed else 6)
        before = loader.state_dict()
        with pytest.raises(wp.StateError) as caught:
            next(iter(loader))
        assert loader.state_dict() == before
        found[what] = str(caught.value)
    return found


def test_all_ranks_say_which_of_them_differ(tmp_path):
    found = on_ranks(3, begin_otherwise, make_shards(tmp_path, shards=8, samples=6), tmp_path)
    assert found == [found[0]] * 3
    for what, message in DIFFERENT.items():
        assert re.match(f"rank 2 of 3 does not begin the same .* it differs in .*{message}", found[0][what])


def iterate_own_disk(rank, ranks, path):
    """Two epochs of a loader over this rank's copy of the shards, and one over half of them."""
    urls = sorted(map(str, (path / str(rank)).glob("*.tar")))
    loader = wp.PipeLoader(samples(urls, samples_per_shard=6), batch_size=2, collate="list")
    own = wp.PipeLoader(samples(urls[rank::ranks]), batch_size=2, collate="list", rank=0, world_size=1)
    return [[key for batch in one for key in keys_of(batch)] for one in (loader, loader, own)]


def test_ranks_that_begin_alike_iterate(tmp_path):
    """Also over copies of the shards on disks of their own, and over shards of their own with
    rank=0, world_size=1.
    """
    for rank in range(2):
        make_shards(tmp_path / str(rank), shards=4, samples=6)
    for mine, others in zip(*on_ranks(2, iterate_own_disk, tmp_path), strict=True):
        assert sorted(mine + others) == [f"{number:08d}" for number in range(24)]


def iterate_alone(rank, ranks, urls, path):
    """Only rank 0 iterates; returns how many batches came, and what the log said."""
    comparing.WAIT_SECONDS = 0.1
    said = logging.handlers.BufferingHandler(9)
    logging.getLogger("wds_pipes").addHandler(said)
    loader = wp.PipeLoader(samples(urls, samples_per_shard=6), batch_size=2, collate="list")
    return 0 if rank else len(list(loader)), [record.getMessage() for record in said.buffer]


def test_a_rank_that_iterates_alone_goes_on(tmp_path):
    (count, said), _ = on_ranks(2, iterate_alone, make_shards(tmp_path, shards=4, samples=6), tmp_path)
    assert count == 6
    assert "rank 0 goes on alone, since rank 1 did not begin this iteration of the loader" in said[0]


def iterate_pipe(rank, ranks, urls):
    """Return the keys that DataLoader yields, without and with a worker."""
    pipe = samples(urls, shuffle=False, seed=None, empty_check=True)
    return [[key_of(sample) for sample in DataLoader(pipe, batch_size=None, num_workers=count)] for count in (0, 1)]


def test_a_rank_whose_shards_are_empty_does_not_speak_for_all(tmp_path):
    """torch divides the shards over the ranks, of which each sees only its own."""
    empty = tmp_path / "empty.tar"
    tarfile.open(empty, "w").close()
    found = on_ranks(2, iterate_pipe, [*make_shards(tmp_path, shards=1, samples=3), str(empty)])
    assert found == [[["00000000", "00000001", "00000002"]] * 2, [[], []]]
