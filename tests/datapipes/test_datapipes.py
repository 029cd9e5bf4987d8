"""IterDataPipes: registration, help, torch's own pipes around ours, and torch's DataLoader."""

import inspect
import itertools
import pickle
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch
from pipelines import keys_of, resumed, shuffled
from torch.utils.data import ChainDataset, DataLoader, Sampler
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import datapipes, nodes, stages
from wds_pipes.core.stage import functional_name, shown_signature


def same_sample(sample):
    return sample


# those that read from one pipe; mix and join are functions
NAMES = [name for name in stages.__all__ if name not in ("ShardList", "SampleList", "Mix", "Join")]


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_is_a_method_a_pipe_and_a_node_of_one_name(name, urls):
    method = getattr(wp.ShardList(urls), functional_name(getattr(stages, name)))
    stage, pipe, node = getattr(stages, name), getattr(datapipes, name), getattr(nodes, name)
    assert pipe.__doc__ == node.__doc__ == stage.__doc__
    assert f"(functional name: ``{functional_name(stage)}``)" in " ".join(stage.__doc__.split())
    assert "Checkpoint:" in stage.__doc__
    assert method.__doc__ == stage.__doc__
    assert inspect.signature(method).return_annotation is wp.WdsPipe
    assert inspect.signature(pipe) == inspect.signature(node) == shown_signature(stage)
    assert list(inspect.signature(pipe).parameters) == list(inspect.signature(stage).parameters)
    assert pickle.loads(pickle.dumps(pipe)) is pipe
    assert functional_name(stage) in dir(wp.ShardList(urls))


def test_wrong_sources_fail_when_built(urls):
    with pytest.raises(TypeError, match="needs a pipe as its source"):
        datapipes.LoadTar(urls)
    with pytest.raises(TypeError, match="needs a node as its source"):
        nodes.LoadTar(urls)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (lambda pipe: pipe.load_tar(), r"load_tar\(\) takes open shards.* gave ShardRef.*put .open_shards\(\) before"),
        (lambda pipe: pipe.group_by_key(), r"group_by_key\(\) takes the members.* gave ShardRef.*put .load_tar\(\)"),
        (lambda pipe: pipe.open_shards().open_shards(), r"open_shards\(\) takes URLs.*: put it after"),
        (lambda pipe: pipe.fetch_samples(), r"fetch_samples\(\) takes what SampleList\(...\) yields"),
        (lambda pipe: pipe.decode_by_ext(), r"decode_by_ext\(\) takes samples"),
        (lambda pipe: pipe.to_tuple("txt"), r"to_tuple\(\) takes samples"),
    ],
)
def test_steps_in_the_wrong_order_say_so(chain, message, urls):
    with pytest.raises(TypeError, match=message):
        list(chain(wp.ShardList(urls)))


def test_two_pipes_over_one_source_do_not_disturb_each_other(urls):
    source = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    one, other = source.shuffle_buffer(2), source.batch_samples(2, collate="list")
    together = [(a["__key__"], b[0]["__key__"]) for a, b in zip(one, other, strict=False)]
    assert len(together) == 7


@pytest.mark.parametrize(
    "build",
    [lambda pipe: pipe.as_dataset(), lambda pipe: pipe.as_node(), lambda pipe: pipe.batch_samples(2), wp.as_dataset],
)
def test_a_loaded_state_is_kept_by_steps_added_later(build, urls):
    pipe = shuffled(urls)
    next(iter(pipe))
    state = pipe.state_dict()
    build(pipe)
    pipe.load_state_dict(state)
    with pytest.raises(wp.StateError, match="load it into what you iterate"):
        build(pipe)
    assert len(list(pipe)) == 13
    build(pipe)


@pytest.mark.parametrize(
    "build",
    [
        lambda pipe: wp.mix({"a": pipe, "b": pipe}),
        lambda pipe: wp.join({"a": pipe, "b": pipe}),
        lambda pipe: pipe.map(same_sample).filter_samples(bool),
        lambda pipe: nodes.TakeSamples(loaded_node(pipe), 3),
        lambda pipe: nodes.Mix({"a": loaded_node(pipe)}),
    ],
)
def test_a_loaded_state_is_not_dropped(build, urls):
    """Also in a source of a mix, and in a pipe before one of torch's."""
    pipe = shuffled(urls)
    next(iter(pipe))
    pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(wp.StateError, match="load it into what you iterate"):
        build(pipe)


def loaded_node(pipe):
    node = shuffled(pipe._stream.chain.root.urls).as_node()
    node.reset(pipe.state_dict())
    return node


def test_a_state_that_was_loaded_upstream_later_is_not_dropped(urls):
    pipe = shuffled(urls)
    after = pipe.take_samples(5)
    next(iter(pipe))
    pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(wp.StateError, match="a pipe that reads from it would not continue"):
        iter(after)
    assert len(list(pipe)) == 13


# torch's pipes


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda urls: shuffled(urls).shuffle(), "Shuffler"),
        (lambda urls: shuffled(urls).batch(2).unbatch(), "UnBatcher"),
        (lambda urls: shuffled(urls).sharding_filter(), "ShardingFilter"),
        (lambda urls: shuffled(urls).zip(shuffled(urls)), "Zipper"),
    ],
)
def test_pipes_of_torch_that_hold_items_are_named(make, name, urls):
    """They run; only their position is not known."""
    chain = make(urls).batch_samples(2, collate="list")
    assert list(chain)
    with pytest.raises(wp.StateError, match=f"torch's {name}"):
        chain.state_dict()


@pytest.mark.parametrize(
    ("take", "error", "message"),
    [
        (lambda urls: wp.state_dict(shuffled(urls).shuffle()), wp.StateError, r"use shuffle_buffer\(size\)"),
        (lambda urls: wp.state_dict(Mapper(shuffled(urls), same_sample)), wp.StateError, r"pipe.map\(\)"),
        (lambda urls: wp.state_dict(IterableWrapper([1])), wp.StateError, "no pipe of wds_pipes"),
        (
            lambda urls: IterableWrapper(iter(urls), deepcopy=False).open_shards().state_dict(),
            wp.StateError,
            "holds an iterator",
        ),
        (lambda urls: wp.state_dict([1]), TypeError, "an IterDataPipe is needed"),
    ],
)
def test_what_has_no_state_is_named(take, error, message, urls):
    with pytest.raises(error, match=message):
        take(urls)


@pytest.mark.parametrize("ending", ["map", "batch"])
def test_after_an_exception_a_chain_that_ends_in_a_torch_pipe_loses_nothing(ending, urls):
    """An item that torch has pulled and not returned is not part of the state."""
    expected, bad = keys_of(shuffled(urls)), True

    def fragile(sample):
        if bad and sample["__key__"] == expected[6]:
            raise ValueError("cannot")
        return sample

    def chain():
        pipe = shuffled(urls).map_samples(fragile)
        return pipe.map(same_sample) if ending == "map" else pipe.batch(4)

    pipe = chain()
    items = iter(pipe)
    got = list(itertools.islice(items, 6 if ending == "map" else 1))
    with pytest.raises(ValueError, match="cannot"):
        next(items)
    state = wp.state_dict(pipe)
    bad = False
    again = chain()
    wp.load_state_dict(again, state)
    items = [*got, *again]
    assert [sample["__key__"] for item in items for sample in (item if ending == "batch" else [item])] == expected


def test_a_batch_that_a_shuffle_counts_keeps_its_size(urls):
    state = shuffled(urls).batch_samples(2, collate="list").shuffle_buffer(4).state_dict()
    with pytest.raises(wp.StateError, match=r"batch_samples\(size=2.*batch_samples\(size=4"):
        shuffled(urls).batch_samples(4, collate="list").shuffle_buffer(4).load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda urls: IterableWrapper(urls[::-1]), "other URLs"),
        (lambda urls: IterableWrapper(urls[:2]), "made over 5 shards"),
        (lambda urls: IterableWrapper(urls).filter(str.isascii), r"was torch.*IterableWrapper.* is torch.*Filter"),
    ],
)
def test_a_state_of_other_urls_from_torch_is_refused(other, message, urls):
    state = IterableWrapper(urls).open_shards().load_tar().state_dict()
    with pytest.raises(wp.StateError, match=message):
        other(urls).open_shards().load_tar().load_state_dict(state)


# DataLoader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bare_pipe_in_a_plain_dataloader_returns_each_sample_once(workers, urls):
    """torch numbers the workers; each pipe takes its lane."""
    expected = sorted(keys_of(shuffled(urls)))
    assert sorted(keys_of(DataLoader(shuffled(urls), batch_size=None, num_workers=workers))) == expected
    from_torch = IterableWrapper(urls).open_shards().load_tar().group_by_key()
    assert sorted(keys_of(DataLoader(from_torch, batch_size=None, num_workers=workers))) == expected
    filtered = IterableWrapper(urls).sharding_filter().open_shards().load_tar().group_by_key()
    assert sorted(keys_of(DataLoader(filtered, batch_size=None, num_workers=workers))) == expected
    ending = shuffled(urls).map(same_sample)
    assert sorted(keys_of(DataLoader(ending, batch_size=None, num_workers=workers))) == expected


def epoch_of(loader):
    """The keys of an epoch, for which torch is seeded as for each other one, so that workers cannot
    distinguish the iterations by its seed.
    """
    torch.manual_seed(1)
    return keys_of(loader)


@pytest.mark.parametrize(
    ("make", "workers", "persistent"),
    [
        (lambda pipe: pipe, 0, False),
        (lambda pipe: pipe, 2, True),
        (wp.as_dataset, 2, False),
        (wp.as_dataset, 2, True),
    ],
)
def test_a_plain_dataloader_has_another_order_each_epoch(make, workers, persistent, urls):
    """Those of one stream."""
    pipe = make(shuffled(urls))
    loader = DataLoader(pipe, batch_size=None, num_workers=workers, persistent_workers=persistent)
    epochs = [epoch_of(loader) for _ in range(3)]
    assert sorted(epochs[0]) == sorted(keys_of(shuffled(urls)))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    if not persistent:
        pipe.set_epoch(1)
        assert keys_of(loader) == epochs[1]
        pipe.set_epoch(1)
        assert keys_of(loader) == epochs[1]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_sampler_that_reads_a_pipe_has_its_epochs(persistent, urls):
    """In a DataLoader within that of the samples, which is made or reset meanwhile."""
    pipe = shuffled(urls)
    epochs = [[sample["__key__"] for sample in pipe] for _ in range(4)]
    inner, found = DataLoader(shuffled(urls), batch_size=None, num_workers=1), []

    class Reads(Sampler):
        def __iter__(self):
            found.append(keys_of(inner))
            return iter(range(3))

        def __len__(self):
            return 3

    outer = DataLoader(range(3), sampler=Reads(), batch_size=None, num_workers=1, persistent_workers=persistent)
    while len(found) < 4:
        assert len(list(outer)) == 3
    assert found[:4] == epochs


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda pipe: pipe, wp.as_dataset])
def test_workers_that_are_kept_see_set_epoch(make, urls):
    """And count on from there; other processes that start meanwhile change nothing."""
    source, expected = make(shuffled(urls)), {}
    for epoch in range(6):
        source.set_epoch(epoch)
        expected[epoch] = keys_of(DataLoader(source, batch_size=None, num_workers=2))
    source = make(shuffled(urls))
    loader = DataLoader(source, batch_size=None, num_workers=2, persistent_workers=True)
    for selected, epoch in ((3, 3), (4, 4), (None, 5), (3, 3), (None, 4), (None, 5)):
        if selected is not None:
            source.set_epoch(selected)
        assert keys_of(loader) == expected[epoch]
        assert len(list(DataLoader(range(3), num_workers=1))) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("make", "workers"), [(lambda pipe: pipe, 2), (wp.as_dataset, 1)])
def test_a_state_that_kept_workers_do_not_see_is_an_error(make, workers, urls):
    source = make(shuffled(urls))
    loader = DataLoader(source, batch_size=None, num_workers=workers, persistent_workers=True)
    state = source.state_dict()
    keys_of(loader)
    source.load_state_dict(state)
    with pytest.raises(wp.StateError, match="which do not see it: .*PipeLoader"):
        list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda pipe: pipe, wp.as_dataset])
def test_a_loaded_state_that_workers_would_not_continue_is_an_error(make, urls):
    """One worker continues it, in the first iteration only."""
    first = make(shuffled(urls))
    expected = [keys_of(first) for _ in range(2)]
    cut = lambda: resumed(lambda: make(shuffled(urls)), 5)[1]  # noqa: E731
    for workers in (0, 1):
        loader = DataLoader(cut(), batch_size=None, num_workers=workers)
        assert [keys_of(loader) for _ in range(2)] == [expected[0][5:], expected[1]]
    with pytest.raises(wp.StateError, match=r"lane 0 of 1 .* lane 0 of 2: DataLoader passes no state to its workers"):
        list(DataLoader(cut(), batch_size=None, num_workers=2))


def refuse_warnings(worker):
    warnings.simplefilter("error")


@pytest.mark.slow
def test_a_pipe_in_another_dataset_is_warned_of(urls):
    """DataLoader divides pipes over its workers, but does not see this one."""
    options = {"batch_size": None, "num_workers": 2, "worker_init_fn": refuse_warnings}
    with pytest.raises(UserWarning, match=r"each of its 2 workers .*: use pipe.as_dataset"):
        list(DataLoader(ChainDataset([shuffled(urls)]), **options))
    mended = DataLoader(ChainDataset([shuffled(urls).as_dataset()]), **options)
    assert sorted(keys_of(mended)) == sorted(keys_of(shuffled(urls)))


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
@pytest.mark.slow
def test_a_pipe_in_accelerate_is_an_error_or_warned_of(urls):
    """In a process of its own: the import takes a while, and Accelerate keeps a global state."""
    code = """
import sys, warnings
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState
from torch.utils.data import DataLoader
import wds_pipes as wp

def loader(make=lambda pipe: pipe, **options):
    pipe = wp.ShardList(sys.argv[1:]).open_shards().load_tar().group_by_key(fields=["cls"]).decode_by_ext()
    data = make(pipe.to_tuple("cls"))
    return prepare_data_loader(DataLoader(data, batch_size=2), torch.device("cpu"), put_on_device=True, **options)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert len(list(loader(num_processes=1, process_index=0))) > 1
assert any("do not see set_epoch() of a pipe" in str(warning.message) for warning in caught), caught
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert len(list(loader(wp.as_dataset, num_processes=1, process_index=0))) > 1
PartialState().num_processes = 2
try:
    next(iter(loader(num_processes=2, process_index=0, dispatch_batches=True)))
except TypeError as error:
    assert "use wds_pipes.PipeLoader" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, *urls], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "context"), [(lambda pipe: pipe, "forkserver"), (lambda pipe: pipe.map(same_sample), "fork")]
)
def test_a_bare_pipe_in_workers_of_a_stateful_dataloader_is_an_error_with_the_mend(ending, context, urls):
    options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": context}
    loader = StatefulDataLoader(ending(shuffled(urls)), **options)
    with pytest.raises(wp.StateError, match=r"pipe.as_dataset\(\)"):
        list(loader)
    mended = StatefulDataLoader(wp.as_dataset(ending(shuffled(urls))), **options)
    assert sorted(keys_of(mended)) == sorted(keys_of(shuffled(urls)))


def test_a_state_of_another_number_of_workers_is_refused(urls):
    loader = StatefulDataLoader(shuffled(urls).as_dataset(), batch_size=None, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    worker = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    with pytest.raises(wp.StateError, match="holds lane 0 of 2, and this process gives lane 0 of 1"):
        shuffled(urls).as_dataset().load_state_dict(worker)


def test_a_number_in_brackets_is_refused(urls):
    """torch's own message speaks of subclasses."""
    with pytest.raises(TypeError, match=r"has no item \[0\]: take items with next\(iter\(pipe\)\)"):
        wp.ShardList(urls)[0]
