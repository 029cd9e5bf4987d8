# %% [markdown]
# # Random access, and one order for any number of workers
#
# **You learn** what an index of offsets adds to plain tars: samples by number and by key, splits and
# other views, an epoch that is shuffled as a whole, the same batches on any number of ranks and
# workers, and a resume that reads nothing again.
#
# **You need** `pip install 'wds_pipes[meta]'` (the extra installs DuckDB).

# %%
import json
import os
import subprocess
import sys
import tempfile

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

# When this file runs as a script, worker processes that are not forked (the default on macOS and
# Windows, and everywhere from Python 3.14 on) would run it again. With this line they start as they
# do from a notebook. In a program of your own, put the code under `if __name__ == "__main__":`.
__file__ = None

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there

# %% [markdown]
# ## The index
#
# A stream needs no index. With one, the samples of a shard can be found without reading the shard
# from its beginning: `x.tar.idx` holds the first byte of each sample, 8 bytes for each, and
# `x.tar.keys` finds a sample by its key. The shards stay as they are. `ShardWriter(offsets=True)`
# writes both files as it writes the shards. For shards that exist, `index_shards` does, or
# `wds-pipes index 'shards/*.tar' -o shards/index.json --offsets`:

# %%
shards = make_shards("shards", shards=6, samples=[50, 40, 60, 50, 45, 55])
index_shards(shards, "shards/index.json", offsets=True)
print(sorted(os.listdir("shards"))[:5])
print(os.path.getsize("shards/shard-000000.tar.idx"), "bytes for 50 samples")

# %% [markdown]
# If a shard is written again and its index is not, reading is an error that says so, unless all files
# have the sizes that they had. Compressed shards (`.tar.gz`) cannot have offsets.
#
# ## Samples by number and by key

# %%
data = wp.IndexedShards("shards/*.tar", decode=True)
print(len(data), "samples;", data[123]["__key__"], data[-1]["__key__"], data.by_key("00000217")["cls"])
assert data[123]["__key__"] == "00000123"

# %% [markdown]
# It is a map-style dataset of torch, for `DataLoader` and for looking at the data. A slice or a list
# of numbers is a view. `split` divides by the hashes of the keys: a sample stays in its part when
# shards are added later, and duplicates of a key are never in two parts.

# %%
parts = data.split({"train": 0.9, "val": 0.1})
print({name: len(part) for name, part in parts.items()}, len(data[10:20]), len(data[::7]))
assert not set(parts["train"].keys()) & set(parts["val"].keys())

# %% [markdown]
# `select` takes more: a part of `split_by_key`, or keys, also as a file with a key on each line.
# `wds-pipes select` writes the keys of the samples whose metadata fulfil a condition, such as the
# parquet file that img2dataset puts beside each shard. DuckDB evaluates the condition. Here the
# metadata are lines of JSON in one file:

# %%
with open("metadata.jsonl", "w") as file:
    for number in range(300):
        file.write(json.dumps({"key": f"{number:08d}", "width": 200 + number}) + "\n")

wds_pipes = [sys.executable, "-m", "wds_pipes"]  # in a shell: wds-pipes
condition = ["--where", "width >= 256 and width % 2 = 0", "--metadata", "metadata.jsonl"]
subprocess.run([*wds_pipes, "select", *shards, *condition, "-o", "wide.txt"], check=True)
wide = data.select("@wide.txt")
print(len(wide), "wide images; the first is", wide[0]["__key__"])

# %% [markdown]
# `SampleOrder` is a sampler with a state: see `08_torchdata_graphs`. For training, a stream is simpler:
#
# ## A stream in one global order
#
# `ShardList(shuffle=True)` and `shuffle_buffer` mix the samples of the few shards that are open.
# `SampleList` permutes all samples of an epoch, and `fetch_samples` reads them. Their order is a
# function of (seed, epoch, place), computed when its turn comes: it needs no memory for 10^9
# samples, and the position in it is one number.


# %%
def shards_in(batches):
    """How many shards are in a batch, on average."""
    counts = [len(set(batch["__url__"])) for batch in batches]
    return sum(counts) / len(counts)


window = wp.ShardList("shards/*.tar", shuffle=True).open_shards().load_tar().group_by_key().shuffle_buffer(30)
everywhere = wp.SampleList("shards/*.tar", shuffle=True).fetch_samples()
for name, pipe in (("a window of 30", window), ("all samples", everywhere)):
    batches = list(wp.PipeLoader(pipe, batch_size=25, collate="columns"))
    print(f"shuffled in {name}: {shards_in(batches):.1f} shards in a batch of 25")
assert shards_in(batches) > 4

# %% [markdown]
# `SampleList(where=...)` takes the same selections as `select`. Then only these samples are read, their
# number is known, and a state of another selection is refused.
#
# Reading single samples of remote shards costs one request for each. `block_samples=64` keeps runs
# of 64 neighbours together, which one request reads, and a `shuffle_buffer` after it mixes the runs.
#
# ## The same batches on any number of ranks and workers
#
# With the steps of most trainings, which keep the number and the order of samples, PipeLoader needs
# no lanes here. Step `t` of an epoch has the samples from `t * G` to `(t + 1) * G` of the one order,
# where `G` is the number of ranks times the batch size. So with the same `G`, each step of the
# training has the same samples, on one GPU or on eight, with any number of workers:


# %%
def make_loader(ranks=1, rank=0, **options):
    pipe = wp.SampleList("shards/*.tar", shuffle=True, seed=7).fetch_samples().decode_by_ext()
    return wp.PipeLoader(
        pipe.to_tuple("__key__", "cls"), batch_size=24 // ranks, rank=rank, world_size=ranks, **options
    )


def steps_of(loaders):
    """The keys of each step, of all ranks together."""
    return [sorted(key for keys, _ in batches for key in keys) for batches in zip(*loaders, strict=True)]


one = steps_of([make_loader(epoch_end="drop")])
assert one == steps_of([make_loader(4, rank) for rank in range(4)])
assert one == steps_of([make_loader(3, rank, num_workers=1) for rank in range(3)])
print(len(one), "steps of 24 samples, the same for 1, 4 and 3 ranks")

# %% [markdown]
# That holds after a resume, too. Four ranks run five steps and stop; two ranks with other numbers of
# workers continue:

# %%
loaders = [make_loader(4, rank) for rank in range(4)]
iterators = [iter(loader) for loader in loaders]
first = [sorted(key for iterator in iterators for key in next(iterator)[0]) for _ in range(5)]
states = [loader.state_dict() for loader in loaders]

resumed = [make_loader(2, rank, num_workers=rank) for rank in range(2)]
for loader in resumed:
    loader.load_state_dict(states)
assert first + steps_of(resumed) == one
print(wp.describe_state(states[0]))

# %% [markdown]
# `map_samples(fn)` with `fn(sample, rng)` gives a sample the same random numbers wherever it runs.
# With another `G` the order stays, and the steps are cut elsewhere. Steps that change the number or
# the order of samples (`filter_samples`, `shuffle_buffer`, `on_error="skip"`) need lanes, as over
# `ShardList`: then each sample of an epoch still comes once, also after a resume on other numbers.
#
# ## What resumes at once
#
# | pipeline | what a resume reads again |
# |---|---|
# | `SampleList(...).fetch_samples()` | nothing |
# | `ShardList(...)...group_by_key()` | one member of a tar |
# | the same with `shuffle_buffer(size)` | about `2 * size` samples; with `ShardList(index=...)` that finds offsets, nothing that was yielded: the buffer fetches each sample that it held when its turn comes |
#
# ## Coming from other libraries
#
# | there | here |
# |---|---|
# | `wids.ShardListDataset` | `IndexedShards`, over the shards as they are, local or remote |
# | Mosaic: `MDSWriter`, `StreamingDataset(shuffle=True)` | `ShardWriter(offsets=True)`; `SampleList(shuffle=True).fetch_samples()` and `PipeLoader` |
# | Mosaic: `num_canonical_nodes`, elastic determinism | not needed: the order does not depend on ranks; keep ranks x batch size |
# | Mosaic: `StreamingDataLoader.state_dict()` | `PipeLoader.state_dict()` |
# | Mosaic: `cache_limit=`, `predownload=` | `open_shards(cache=...)` for whole shards; `fetch_samples(readahead_bytes=...)` |
# | LitData: `optimize(fn, ...)` | `ShardWriter(offsets=True)`: plain tars, which other tools read as well |
# | LitData: `StreamingDataset`, `StreamingDataLoader` | `SampleList(...).fetch_samples()`, `PipeLoader` |
# | LitData: `train_test_split(dataset, splits=[0.9, 0.1])` | `IndexedShards.split({"train": 0.9, "val": 0.1})`, by keys |
# | LitData: `CombinedStreamingDataset(weights=...)` | `mix({...}, weights={...})` |
# | Grain: `IndexSampler(num_records, shuffle=True, seed=7)` | `SampleOrder(len(data), shuffle=True, seed=7)`, or `SampleList` |
# | Grain: `MapDataset.source(s)` `.shuffle(seed).map(fn).batch(n)` | `SampleList(...).fetch_samples()` `.map_samples(fn).batch_samples(n)` |
# | Grain: `ShardByJaxProcess()` | nothing: ranks divide the order |
# | Grain: `random_map` with `fn(sample, rng)` | `map_samples(fn)` with `fn(sample, rng)` |
#
# Grain itself also reads `IndexedShards`, as a source of samples by number, in tars as they are:
#
# ```python
# import grain
#
# import wds_pipes as wp
#
# data = grain.MapDataset.source(wp.IndexedShards("shards/*.tar")).shuffle(seed=7).batch(8)
# ```
#
# ## What to read next
#
# - [The reference](docs/reference/shards) of `IndexedShards`, and of `SampleList` with the steps that
#   read.
# - `04_ranks_and_elastic_resume`: lanes, for pipelines over `ShardList`.
