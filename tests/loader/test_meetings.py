"""Calls in which all ranks meet end on every rank, also where one rank does not come: with an error
that names it and says where it has last been.
"""

import logging.handlers
import random

import pytest
import torch.distributed as dist
from pipelines import samples
from process_group import on_ranks

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.loader import checkpoint_ranks
from wds_pipes.loader import ranks as comparing
from wds_pipes.testing import make_shards

SOON = 0.3  # seconds that a rank waits in vain here
ENOUGH = 120  # seconds where all ranks come
HISTORIES = 12


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("meetings"), shards=6, samples=6)


def make_loader(urls) -> wp.PipeLoader:
    return wp.PipeLoader(samples(urls, samples_per_shard=6), batch_size=2, collate="list")


def begin(loader, path, group, seconds):
    next(iter(loader))


CALLS = {
    "checkpoint.load()": lambda loader, path, group, seconds: checkpoint.load(
        path / "none", loader, group=group, timeout_seconds=seconds
    ),
    "checkpoint.gather()": lambda loader, path, group, seconds: checkpoint.gather(
        loader, group, timeout_seconds=seconds
    ),
    "stats_of_ranks()": lambda loader, path, group, seconds: loader.stats_of_ranks(group, timeout_seconds=seconds),
    "AllRanks.state_dict()": lambda loader, path, group, seconds: checkpoint.AllRanks(
        loader, group, timeout_seconds=seconds
    ).state_dict(),
    "DCPState.state_dict()": lambda loader, path, group, seconds: checkpoint.DCPState(
        loader, group, timeout_seconds=seconds
    ).state_dict(),
}


def error_of(call, *arguments):
    """The message of a StateError of a call; None: it returned."""
    try:
        call(*arguments)
    except wp.StateError as error:
        return str(error)
    return None


def call_on_rank_0_only(rank, ranks, urls, path):
    """What each call says if only rank 0 makes it, while rank 1 goes on to a collective of its
    own, and what both say if rank 1 makes it later.
    """
    loader, found = make_loader(urls), {}
    next(iter(loader))
    for name, call in CALLS.items():
        group = dist.new_group()
        alone = error_of(call, loader, path, group, SOON) if rank == 0 else None
        dist.barrier()
        found[name] = alone, error_of(call, loader, path, group, ENOUGH) if rank else None
    return found


def test_a_call_on_one_rank_only_names_the_others(shards, tmp_path):
    (first, second) = on_ranks(2, call_on_rank_0_only, shards, tmp_path)
    for name in CALLS:
        alone, _ = first[name]
        assert f"rank 0 has waited 0.3 seconds in {name} (meeting 1) for rank 1, which did not come" in alone
        _, late = second[name]
        assert late == alone
    assert "(rank 1 has last been in next() of epoch 0)" in first["checkpoint.load()"][0]
    assert "(rank 1 has last been in checkpoint.load() (meeting 1))" in first["checkpoint.gather()"][0]


def load_where_the_directory_is(rank, ranks, urls, path):
    """A first start with ``if the directory exists``, which only rank 0 sees: rank 1 begins."""
    loader = make_loader(urls)
    group = dist.new_group()  # which has the same ranks
    return error_of(CALLS["checkpoint.load()"] if rank == 0 else begin, loader, path, None if rank else group, ENOUGH)


def test_ranks_that_wait_for_each_other_elsewhere_say_so(shards, tmp_path):
    """At once, on both."""
    first, second = on_ranks(2, load_where_the_directory_is, shards, tmp_path)
    assert first == second
    assert "checkpoint.load() (meeting 1)" in first
    assert "in next() of epoch 0" in first
    assert "each would wait for the other for ever" in first


def skip_somewhere(rank, ranks, urls, path, seed):
    """Make random calls, of which one rank leaves one out; returns what this rank was told in each
    history.
    """
    comparing.WAIT_SECONDS = SOON
    said = logging.handlers.BufferingHandler(1000)
    logging.getLogger("wds_pipes").addHandler(said)
    draw, found = random.Random(seed), []
    for _ in range(HISTORIES):
        names = [draw.choice([*CALLS, "next()"]) for _ in range(draw.randrange(1, 6))]
        place, skips = draw.randrange(len(names)), draw.randrange(ranks)
        group, loader = dist.new_group(), make_loader(urls)
        next(iter(loader))
        said.buffer.clear()
        told = None
        for at, name in enumerate(names):
            if told is None and not (at == place and rank == skips):
                told = error_of(begin if name == "next()" else CALLS[name], loader, path, group, SOON)
        dist.barrier()
        warned = [record.getMessage() for record in said.buffer if "goes on alone" in record.getMessage()]
        found.append(([*([] if told is None else [told]), *warned], (names, place, skips)))
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_whichever_rank_skips_whichever_call_it_is_named(shards, tmp_path, seed):
    """Random histories of three ranks: never a hang, and always a rank that is told which ranks are
    apart. (On a busy machine another rank may be late, too.)
    """
    for on_each in zip(*on_ranks(3, skip_somewhere, shards, tmp_path, seed), strict=True):
        told, (_, _, skips) = [text for texts, _ in on_each for text in texts], on_each[0][1]
        named = [f"rank {skips}", "the states", "waited", "goes on alone"]
        assert any(text in one for one in told for text in named), (told, on_each[0][1])


def save_on(rank, ranks, urls, directories):
    checkpoint_ranks.LATE_SECONDS = 0.0
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("wds_pipes").addHandler(said)
    loader = wp.PipeLoader(samples(urls), batch_size=2, lanes=2, epoch_end="exact")
    for _, step in zip(loader, range(4), strict=False):
        checkpoint.save(directories[rank], loader, step=step, keep=1)
        dist.barrier()
    return [record.getMessage() for record in said.buffer]


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")])
def test_a_rank_that_saves_to_a_directory_of_its_own_says_so(shards, tmp_path, names):
    """As one on each node: once."""
    first, second = on_ranks(2, save_on, shards, [tmp_path / name for name in names])
    assert not first
    apart = names[0] != names[1]
    assert len(second) == apart
    assert all("rank 1 saves checkpoints to" in text and "load() will refuse them" in text for text in second)
