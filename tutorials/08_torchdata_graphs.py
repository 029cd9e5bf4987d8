# %% [markdown]
# # In torch's and torchdata's own graphs
#
# **You learn** how to use the steps together with torch's datapipes, with `Prefetcher`,
# `ParallelMapper` and `Loader` of `torchdata.nodes`, and in `DataLoader` and `StatefulDataLoader`;
# how to read a map-style dataset in a shuffled order that resumes; and where a state is exact.
#
# **You need** `pip install wds_pipes` (which installs torch and torchdata).

# %%
import json
import os
import tempfile
import warnings

from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.nodes import Loader, MapStyleWrapper, ParallelMapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.testing import check_resume, make_shards

# When this file runs as a script, worker processes that are not forked (the default on macOS and
# Windows, and everywhere from Python 3.14 on) would run it again. With this line they start as they
# do from a notebook. In a program of your own, put the code under `if __name__ == "__main__":`.
__file__ = None

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata calls it
urls = make_shards("data", shards=4, samples=25)

# %% [markdown]
# Each step exists in two forms with the same name, options and help: as a method of every torch
# `IterDataPipe`, and as a node of `torchdata.nodes`.
#
# ## Datapipes
#
# `import wds_pipes.datapipes` registers the methods, and so does `import wds_pipes` if torch was
# imported before. So a pipeline may start with one of torch's pipes, and torch's `.map`, `.filter`,
# `.batch` and `.collate` may come between our steps or after them.


# %%
def text(sample):
    return sample["txt"].upper()


pipe = IterableWrapper(urls).open_shards().load_tar().group_by_key().decode_by_ext().map(text).batch(10)
iterator = iter(pipe)
first = next(iterator)
state = pipe.state_dict()

resumed = IterableWrapper(urls).open_shards().load_tar().group_by_key().decode_by_ext().map(text).batch(10)
resumed.load_state_dict(state)
assert list(resumed) == list(iterator)
print(resumed)

# %% [markdown]
# `ShardList` yields `ShardRef` objects: a URL, and what is known of the shard. To read a copy of the
# shards elsewhere, return `ref.with_url(...)`. A step that returned a str would lose the rest, such
# as which samples of the shard to read, so `open_shards` refuses it:


# %%
def elsewhere(ref):
    return ref.with_url(ref.url.replace("original", "data"))


moved = wp.ShardList([url.replace("data", "original") for url in urls]).map(elsewhere)
assert len(list(moved.open_shards().load_tar().group_by_key())) == 100
try:
    next(iter(moved.map(str).open_shards()))
except TypeError as error:
    print(error)
else:
    raise AssertionError

# %% [markdown]
# torch's `.shuffle()` and some other pipes do not expose the samples that they hold, so their state
# cannot be exact. They run, but requesting a state raises an error that says what to use instead:

# %%
try:
    wp.state_dict(wp.ShardList(urls).shuffle().open_shards().load_tar().group_by_key())
except wp.StateError as error:
    print(error)
else:
    raise AssertionError

# %% [markdown]
# ## Nodes
#
# With `torchdata.nodes`, each node is built with its source as an argument, and `Loader` iterates
# the last node. Nodes can use threads: `ParallelMapper` decodes in several threads, and
# `Prefetcher` reads ahead. The state does not count what they have read ahead, so a resume is
# exact.


# %%
def decode(sample):
    return sample["__key__"], sample["txt"].decode()


def make_graph():
    samples = nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls, shuffle=True, seed=5))))
    shuffled = nodes.ShuffleBuffer(samples, 20)
    # in_order=False would lose samples in a resume
    decoded = ParallelMapper(shuffled, decode, num_workers=2, method="thread")
    return Loader(Prefetcher(nodes.BatchSamples(decoded, 8), prefetch_factor=4))


graph = make_graph()
iterator = iter(graph)
first = [next(iterator) for _ in range(5)]
state = json.loads(json.dumps(graph.state_dict()))
rest = list(iterator)

graph = make_graph()
graph.load_state_dict(state)
again = list(graph)
assert again == rest
print(len(first), "batches,", len(again), "after the resume")

# %% [markdown]
# `as_node()` makes a node of any pipe. For several sources, use
# `nodes.Mix({"a": node, "b": node}, weights=...)`.

# %%
node = wp.ShardList(urls).open_shards().load_tar().group_by_key().as_node()
keys = [sample["__key__"] for sample in Loader(node)]
assert keys == [f"{number:08d}" for number in range(100)]

# %% [markdown]
# ## StatefulDataLoader
#
# `StatefulDataLoader` saves the state of a plain dataset, but not the state of a datapipe, so pass
# it `pipe.as_dataset()`. Worker i of n reads its own shards, so use at least as many shards as
# workers. The workers make the batches (`batch_samples`), so pass `batch_size=None`.


# %%
def make_stateful():
    pipe = (
        wp.ShardList(urls, shuffle=True, seed=5)
        .open_shards()
        .load_tar()
        .group_by_key()
        .shuffle_buffer(20)
        .decode_by_ext()
    )
    return StatefulDataLoader(
        pipe.to_tuple("__key__", "cls").batch_samples(8).as_dataset(), batch_size=None, num_workers=2
    )


def keys_of(batches):
    return [key for keys, _ in batches for key in keys]


loader = make_stateful()
iterator = iter(loader)
first = [next(iterator) for _ in range(4)]
state = loader.state_dict()
rest = keys_of(iterator)

loader = make_stateful()
loader.load_state_dict(state)  # the same number of workers
assert keys_of(loader) == rest
assert sorted(keys_of(first) + rest) == keys
print(wp.describe_state(state))

# %% [markdown]
# It does not see the state of a bare pipe: a resume would start again with the first epoch. So its
# workers refuse a bare pipe; with `num_workers=0`, nothing notices.

# %%
try:
    next(iter(StatefulDataLoader(wp.ShardList(urls), batch_size=None, num_workers=1)))
except wp.StateError as error:
    print(error)
else:
    raise AssertionError

# %% [markdown]
# ## DataLoader
#
# A plain `DataLoader` has no state. It takes a pipe or `as_dataset()`, and divides the shards over
# its workers, in another order in each epoch. Shuffle with `ShardList(shuffle=True)` and
# `shuffle_buffer`.
#
# A bare pipe is also divided over ranks, which all must iterate it then. Pass `as_dataset()` where
# only rank 0 iterates, such as for validation. With Accelerate and the Trainer of transformers, use
# PipeLoader as `16_your_trainer` shows: they do not resume exactly from other loaders. Workers are
# processes; those of a future DataLoader that are threads are an error.
#
# With several workers that make batches, there may be more batches than `len()` of a DataLoader
# says, and Lightning stops there: use PipeLoader, whose `len()` is right.

# %%
pipe = wp.ShardList(urls, shuffle=True).open_shards().load_tar().group_by_key().decode_by_ext()
loader = DataLoader(pipe.to_tuple("__key__", "cls").batch_samples(8), batch_size=None, num_workers=2)
assert sorted(keys_of(loader)) == keys

# %% [markdown]
# ## A map-style dataset
#
# A dataset with `dataset[i]`, here a list, is read in the order of a sampler. `SampleOrder` is a
# sampler with a state. Its order is a function of (seed, epoch, place), computed as it is needed,
# so it takes no memory and resumes at once. The state is a few numbers, and several ranks divide
# one order. torch's `RandomSampler` makes a list of all indices, and has no state.

# %%
dataset = list(wp.ShardList(urls).open_shards().load_tar().group_by_key().map(decode))


def make_map_style():
    return Loader(MapStyleWrapper(dataset, wp.SampleOrder(len(dataset), shuffle=True, seed=5)))


graph = make_map_style()
iterator = iter(graph)
first = [next(iterator) for _ in range(30)]
state = json.loads(json.dumps(graph.state_dict()))
rest = list(iterator)

graph = make_map_style()
graph.load_state_dict(state)
assert list(graph) == rest
assert sorted(first + rest) == dataset
print(state)

# %% [markdown]
# The same sampler in a loader with workers. With `block_samples=5`, runs of five neighbours stay
# together. Save the state of the loader: the sampler itself is ahead of the batches. Pass
# `sampler=`, not a `batch_sampler=` without a state: a resume would start with the first epoch.


# %%
def make_sampled():
    order = wp.SampleOrder(len(dataset), shuffle=True, block_samples=5, seed=5)
    return StatefulDataLoader(dataset, sampler=order, batch_size=8, num_workers=2)


loader = make_sampled()
iterator = iter(loader)
first = [next(iterator) for _ in range(4)]
state = loader.state_dict()
rest = keys_of(iterator)

loader = make_sampled()
loader.load_state_dict(state)
assert keys_of(loader) == rest
assert sorted(keys_of(first) + rest) == keys

# %% [markdown]
# ## Which one?
#
# | | exact state | another number of workers | ranks |
# |---|---|---|---|
# | a bare pipe | yes | - | - |
# | `torchdata.nodes.Loader` | yes | threads: any | - |
# | `StatefulDataLoader` | yes | no | - |
# | `DataLoader` | - | - | a bare pipe: whole shards |
# | `StatefulDataLoader` or `MapStyleWrapper` with `SampleOrder` | yes | no | yes, any number |
# | `PipeLoader` | yes | yes | yes |
#
# ## A graph of your own? Check it
#
# `check_resume` interrupts a pipeline at every position, resumes it in a new one, compares the
# rest, and interrupts that one again. It takes any object that can be iterated and has
# `state_dict()` and `load_state_dict()`. Use it in your tests.

# %%
few = make_shards("few", shards=2, samples=5)
epochs = check_resume(
    lambda: wp.ShardList(few, shuffle=True).open_shards().load_tar().group_by_key().shuffle_buffer(4).batch(3)
)
print("exact at every cut of", len(epochs[0]), "batches")

# %% [markdown]
# ## What to read next
#
# - `09_your_own_stage`: how to write a step that the package does not have.
# - `04_ranks_and_elastic_resume`: `PipeLoader`.
