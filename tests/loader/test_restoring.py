"""A state of torchdata's StatefulDataLoader continues in a PipeLoader, with any workers."""

import json

import pytest
from pipelines import flat, key_of
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SAMPLES = [6, 1, 7, 0, 4, 8, 2, 5]
KEYS = [f"{number:08d}" for number in range(sum(SAMPLES))]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), shards=len(SAMPLES), samples=SAMPLES)


def read(urls, **options):
    return wp.ShardList(urls, shuffle=True, seed=3, **options).open_shards().load_tar().group_by_key()


def is_kept(sample):
    return int(sample["__key__"]) % 3 > 0


PIPES = {
    "shuffled": lambda urls: read(urls).shuffle_buffer(9).map_samples(key_of),
    "counted": lambda urls: read(
        [url for url, count in zip(urls, SAMPLES, strict=True) if count],
        samples_per_shard=[count for count in SAMPLES if count],
    ).shuffle_buffer(4).map_samples(key_of),
    "interleaved": lambda urls: read(urls).interleave_shards(2).filter_samples(is_kept).map_samples(key_of),
    "threads": lambda urls: read(urls).shuffle_buffer(5).map_samples(key_of, threads=2),
    "mixed": lambda urls: wp.mix({"a": read(urls[:4]), "b": read(urls[4:])}, exhausted="drop").map_samples(key_of),
    "one shard a worker": lambda urls: read(urls[:3]).map_samples(key_of),
}  # fmt: skip


def states_of(pipe, workers):
    """The state after each batch of an epoch, with the samples so far: one start of workers."""
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    loader, given = StatefulDataLoader(pipe.as_dataset(), batch_size=2, collate_fn=list, **options), []
    found = []
    for batch in loader:
        given += batch
        found.append((list(given), json.loads(json.dumps(loader.state_dict()))))
    return found


def continued(state, pipe, **options):
    """What is left of the epoch of a state; resumed a second time, from the loader's own state."""

    def make():
        return wp.PipeLoader(pipe, batch_size=3, collate=list, **options)

    loader, given = make(), []
    checkpoint.load_stateful_dataloader(state, loader)
    for _ in range(3):
        if loader.epoch == 0:
            given += next(iter(loader), [])  # a lane may have ended without saying so
            again = make()
            again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            loader = again
    return given + (flat(loader) if loader.epoch == 0 else [])


def check(name, urls, workers, places):
    """Each remaining sample once, from states after these batches, on 1 to 4 lanes."""
    whole = sorted(PIPES[name](urls))
    found = states_of(PIPES[name](urls), workers)
    for place, (given, state) in list(enumerate(found))[places]:
        rest = continued(state, PIPES[name](urls), lanes=1 + place % 4, epoch_end="exact")
        assert sorted(given + rest) == whole, place


@pytest.mark.parametrize("name", PIPES)
def test_each_remaining_sample_comes_once(name, urls):
    check(name, urls, 0, slice(1, None, 5))


def test_each_remaining_sample_of_two_workers_comes_once(urls):
    check("counted", urls, 2, slice(2, None, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPES)
def test_from_every_cut_of_three_workers(name, urls):
    check(name, urls, 3, slice(None))


def test_later_epochs_ranks_and_batches_of_the_pipe(urls):
    """The second epoch, on two ranks; and the end of an epoch, after which the next one begins."""
    pipe = PIPES["shuffled"]
    old = StatefulDataLoader(pipe(urls).batch_samples(4, collate=list).as_dataset(), batch_size=None)
    whole = sorted(flat(old))
    loaders = [
        wp.PipeLoader(pipe(urls), batch_size=2, collate=list, rank=rank, world_size=2, epoch_end="exact")
        for rank in (0, 1)
    ]
    for loader in loaders:
        checkpoint.load_stateful_dataloader(old.state_dict(), loader)
        assert loader.epoch == 1
    batches = iter(old)
    given = next(batches) + next(batches)
    for loader in loaders:
        checkpoint.load_stateful_dataloader(old.state_dict(), loader)
        assert loader.epoch == 1
        given += flat(loader)
    assert sorted(given) == whole
    assert len({*given}) == len(KEYS)


def refused(state, pipe, match):
    loader = wp.PipeLoader(pipe, batch_size=2, collate=list)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(wp.StateError, match=match):
        checkpoint.load_stateful_dataloader(state, loader)
    assert loader.state_dict() == before


def test_what_cannot_continue_is_refused(urls):
    """In words, and the loader keeps its position."""
    pipe, name = PIPES["shuffled"], "a state of StatefulDataLoader"
    old = StatefulDataLoader(pipe(urls).as_dataset(), batch_size=2, collate_fn=list)
    next(iter(old))
    state = old.state_dict()
    refused({}, pipe(urls), f"this is not {name}")
    refused(None, pipe(urls), f"this is not {name}")
    refused(wp.PipeLoader(pipe(urls)).state_dict(), pipe(urls), f"this is not {name}")
    refused(state, read(urls).shuffle_buffer(8).map_samples(key_of), "does not fit this pipeline")
    refused(state, pipe(urls[:4]), "does not fit this pipeline")
    snapshot = {"_snapshot": {"_worker_snapshots": {"worker_0": {"dataset_state": state["dataset_state"]}}}}
    refused(
        snapshot | {"_steps_since_snapshot": 2}, pipe(urls), "are 2 batches old: save it with snapshot_every_n_steps=1"
    )
    refused({"_snapshot": {"_worker_snapshots": {}}}, pipe(urls), "it has no workers")
    two = json.loads(json.dumps(snapshot))
    two["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]["lane_count"] = 2
    refused(two, pipe(urls), r"it has workers \[0\] of 2")
    counted = read(urls, samples_per_shard=SAMPLES).shuffle_buffer(9).map_samples(key_of)
    refused(state, counted, "shards that are known to have no samples")
    with pytest.raises(TypeError, match=r"load_stateful_dataloader\(\) takes a PipeLoader, not ShardList"):
        checkpoint.load_stateful_dataloader(state, wp.ShardList(urls))


def test_a_list_of_samples_is_refused(urls):
    """Its workers have slices of one order, not shards."""
    index_shards(urls, offsets=True)

    def pipe():
        return wp.SampleList(urls).fetch_samples().map_samples(key_of)

    old = StatefulDataLoader(pipe().as_dataset(), batch_size=2, collate_fn=list)
    next(iter(old))
    refused(old.state_dict(), pipe(), "PipeLoader divides the samples of SampleList in another way")
