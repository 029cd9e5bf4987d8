"""Runs with a ledger on changing numbers of ranks and lanes, and shards with a planted fault."""

import io
import itertools
import json
import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

from pipelines import flat, loaded, through_json

import wds_pipes as wp
from wds_pipes.core.digest import NOTHING, add, in_epoch, of_samples, of_shard, to_text

FAULTS = ("lost", "repeated", "swapped", "wrong shard")


class Phase(NamedTuple):
    """A run on some ranks until it is cut after some batches of each."""

    ranks: int
    lanes: int
    size: int
    cut: int
    workers: int = 0


def digest_of(got, urls):
    """The digest of samples, without repeats."""
    got = [sample for sample in got if not sample.get("__padding__")]
    return of_samples((sample["__key__"], of_shard(str(urls.index(sample["__url__"])))) for sample in got)


def entry(epoch, earlier=NOTHING):
    """The ledger in a state."""
    return {"epoch": to_text(epoch), "earlier": to_text(earlier)}


def play(urls, make, phases, *, end="exact", mix=1, drop_last=False, own=False, at_cut=None):
    """Run phases, the last one to the end of the epoch; AssertionError if at a cut the ledger of
    all ranks together is not that of the samples that they returned. Return how many were checked.
    ``at_cut`` is called with the state of all ranks at each. ``own``: each rank loads its own
    state where it can.
    """
    size, state, epoch, got, earlier, checked = phases[0].size, None, 0, [], NOTHING, 0
    states = []
    for ranks, lanes, other, cut, workers in [*phases, Phase(1, 1, 3, 100)]:
        batch = mix * (other if end == "exact" else size)
        options = {"batch_size": batch, "mix_lanes": mix, "drop_last": drop_last, "epoch_end": end, "collate": "list"}
        hosts = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loaders = [
            wp.PipeLoader(
                make(urls), rank=rank, world_size=ranks, lanes=ranks * lanes * mix, ledger=True, **options, **hosts
            )
            for rank in range(ranks)
        ]
        if state is not None:
            load(loaders, states if own and len(states) == ranks else [state] * ranks, state)
        for items in map(iter, loaders):
            got += flat(itertools.islice(items, min(cut, 20) if end == "loop" else cut))
        states = [through_json(loader.state_dict()) for loader in loaders]
        for loader in loaders:
            loader.close()
        if len({one["epoch"] for one in states}) > 1 or len({one["step"] for one in states}) > 1:
            return checked  # ranks may be in different epochs
        state, checked = wp.merge_states(states), checked + 1
        if at_cut is not None:
            at_cut(state)
        if end != "loop" and state["epoch"] > epoch:
            got, earlier, epoch = [], add([earlier, in_epoch(digest_of(got, urls), epoch)]), state["epoch"]
        assert state["ledger"] == entry(digest_of(got, urls), earlier), (phases, end, mix, drop_last)
        if end != "loop" and all(lane["ended"] for lane in state["lanes"].values()):  # the next epoch comes
            got, earlier, epoch = [], add([earlier, in_epoch(digest_of(got, urls), epoch)]), epoch + 1
        elif end != "loop":
            alone = loaded(wp.PipeLoader(make(urls), rank=0, world_size=1, ledger=True, **options), state)
            assert alone.state_dict()["ledger"] == state["ledger"]
    return checked


def load(loaders, states, together):
    """Load a state into each loader; that of all ranks together where it does not fit by itself."""
    try:
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
    except wp.StateError as error:
        assert "of one rank" in str(error) or "alone" in str(error)  # noqa: PT017
        for loader in loaders:
            loader.load_state_dict(together)


def with_fault(kind, urls, shard, place, directory):
    """The shards in another directory, of which one has a fault at a sample, which is not its
    first or last one.
    """
    found = [shutil.copy(url, directory) for url in urls]
    if kind == "wrong shard":
        shutil.copy(urls[shard - 1], found[shard])
        return found
    samples, others = _members_of(urls[shard]), _members_of(urls[shard - 1])
    if kind == "lost":
        del samples[place]
    elif kind == "repeated":
        samples += [samples[place - 1]]  # not beside itself, which would be one sample
    else:
        samples[place] = others[0]
    with tarfile.open(found[shard], "w") as tar:
        for member, data in itertools.chain.from_iterable(samples):
            tar.addfile(member, io.BytesIO(data))
    return found


def _members_of(url):
    """Return of each sample of a shard its members, with their data."""
    with tarfile.open(url) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    return [list(group) for _, group in itertools.groupby(members, lambda pair: pair[0].name.partition(".")[0])]


def states_after(make, steps, path, **options):
    """Write the states of all ranks after some steps of each as JSON, and return the path."""
    world = options.pop("world", 1)
    states = []
    for rank in range(world):
        loader = wp.PipeLoader(
            make(), **{"rank": rank, "world_size": world, "ledger": True, "epoch_end": "exact", **options}
        )
        for _ in itertools.islice(loader, steps):
            pass
        states.append(loader.state_dict())
        loader.close()
    Path(path).write_text(json.dumps(states))
    return str(path)
