"""A stage is a recipe: nothing changes it after it is built, whatever runs over it."""

import inspect
from collections import deque
from functools import cached_property

import pytest
from pipelines import draw

import wds_pipes as wp
from wds_pipes.core import chain, stage
from wds_pipes.core.stage import Stage
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

OPENERS = (stage.__name__, chain.__name__)  # the modules that make running copies, and copies that read from others


def length(sample):
    return len(sample["txt"])


def samples(urls, **options):
    return wp.ShardList(urls, on_error="skip", **options).open_shards().load_tar().group_by_key()


def mixed(urls):
    joined = wp.join({"a": samples(urls, shuffle=True, seed=4), "b": samples(urls)}, prefix=True)
    first = samples(urls, shuffle=True, seed=1).shuffle_buffer(3)
    mix = wp.mix({"first": first.repeat(2), "other": samples(urls).interleave_shards(2), "joined": joined}, seed=3)
    return mix.shuffle_buffer(4).map_samples(draw)


def packed(urls):
    return samples(urls, index=True).shuffle_buffer(3).decode_by_ext("rgb8", threads=2).pack_samples(length, 200)


def by_offsets(urls):
    listed = wp.SampleList(urls, shuffle=True, block_samples=2)
    return listed.fetch_samples(connections=3).map_samples(draw).filter_samples(len)


PIPES = {"mix": mixed, "pack": packed, "offsets": by_offsets}


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    found = make_shards(tmp_path_factory.mktemp("shards"), shards=4, samples=[3, 4, 5, 4], fields=("txt", "cls"))
    index_shards(found, offsets=True)
    return found


def run(make, urls, workers):
    """Run loaders over a pipeline: a whole epoch, and the rest of one on another number of lanes.
    Yield their stages before and after it.
    """
    pipe = make(urls)
    options = {"num_workers": workers, "epoch_end": "exact"}
    options |= {"multiprocessing_context": "fork"} if workers else {}  # with what a test has patched
    options |= {} if make is packed else {"batch_size": 2, "collate": list}
    loader = wp.PipeLoader(pipe, lanes=4, ledger=True, **options)
    other = wp.PipeLoader(pipe, lanes=2, **options)
    yield [pipe._stream.stage, loader._plan.stage, other._plan.stage]
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    list(batches)
    loader.load_state_dict(state)
    list(loader)
    other.load_state_dict([state])
    list(other)
    loader.stats()
    next(iter(pipe))
    yield [pipe._stream.stage, loader._plan.stage, other._plan.stage]


def contents(value, place="", seen=None):
    """Return what stages and containers hold, by where it is. What a cached property keeps follows
    from the rest.
    """
    seen = {} if seen is None else seen
    found = {place: value}
    parts = []
    if id(value) in seen:
        return found
    seen[id(value)] = value
    if isinstance(value, Stage):
        parts = [
            (f"{place}.{name}", part)
            for name, part in vars(value).items()
            if not isinstance(inspect.getattr_static(type(value), name, None), cached_property)
        ]
    elif isinstance(value, dict):
        parts = [(f"{place}[{name!r}]", part) for name, part in value.items()]
    elif isinstance(value, list | tuple | deque):
        parts = [(f"{place}[{number}]", part) for number, part in enumerate(value)]
    if not isinstance(value, Stage) and isinstance(value, dict | set | list | deque | bytearray):
        found[place] = (type(value), repr(value) if isinstance(value, set) else len(value))
    for where, part in parts:
        found |= contents(part, where, seen)
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pipe", PIPES)
def test_running_changes_no_recipe(pipe, workers, urls):
    before, after = map(contents, run(PIPES[pipe], urls, workers))
    assert before.keys() == after.keys()
    assert [place for place in before if before[place] is not after[place] and before[place] != after[place]] == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pipe", PIPES)
def test_only_a_stage_sets_its_attributes(pipe, workers, urls, monkeypatch):
    """Or what opens it, so that all that a running chain does follows from its stages and from
    what ``open`` was passed.
    """

    def setting(self, name, value):
        caller = inspect.currentframe().f_back
        first = next(iter(inspect.getargvalues(caller).locals.values()), None)
        if caller.f_globals["__name__"] not in OPENERS and not (
            isinstance(first, Stage) and (isinstance(self, type(first)) or isinstance(first, type(self)))
        ):
            where = f"{caller.f_globals['__name__']}.{caller.f_code.co_name}()"
            raise AssertionError(f"{where} sets {name} of {type(self).__name__}")
        object.__setattr__(self, name, value)

    monkeypatch.setattr(Stage, "__setattr__", setting, raising=False)
    for _ in run(PIPES[pipe], urls, workers):
        pass
