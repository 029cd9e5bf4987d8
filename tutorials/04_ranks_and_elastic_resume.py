# %% [markdown]
# # Several ranks, and resuming on another number of them
#
# **You learn** how `PipeLoader` partitions an epoch over workers and ranks, how all ranks get the
# same number of batches, how to save and load checkpoints of all ranks, also on another number of
# ranks, how to mix data sets, and how to see what training waits for.
#
# **You need** `pip install 'wds_pipes[demo]'` (the extra installs matplotlib, for one plot).

# %%
import os
import subprocess
import sys
import tempfile
import time

import matplotlib.pyplot as plt
import numpy as np

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

# When this file runs as a script, worker processes that are not forked (the default on macOS and
# Windows, and everywhere from Python 3.14 on) would run it again. With this line they start as they
# do from a notebook. In a program of your own, put the code under `if __name__ == "__main__":`.
__file__ = None

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
counts = [20 + number % 7 for number in range(30)]
index_shards(make_shards("shards", shards=30, samples=counts), "shards/index.json")
everything = {f"{number:08d}" for number in range(sum(counts))}  # the keys
print(len(everything), "samples")

# %% [markdown]
# ## Lanes
#
# An epoch is partitioned into **lanes**: by default one for each worker of each rank. A lane has
# its own part of the data, its own shuffle buffer, its own position. Workers and ranks only *host*
# lanes and yield a batch of each in turn. So, with the same lanes, the number of workers changes
# only the speed:


# %%
def make_loader(**options):
    pipe = wp.ShardList("shards/index.json", shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    return wp.PipeLoader(pipe.shuffle_buffer(20).decode_by_ext().to_tuple("__key__", "cls"), batch_size=8, **options)


def keys_of(batches):
    return [key for keys, _ in batches for key in keys]


one_process = list(make_loader(lanes=2, num_workers=0))
with_workers = make_loader(lanes=2, num_workers=2)
assert keys_of(one_process) == keys_of(with_workers)
with_workers.close()
print(len(one_process), "batches; each key once:", sorted(keys_of(one_process)) == sorted(everything))

# %% [markdown]
# ## Equal epochs for all ranks
#
# If one rank has one batch more than the others, training hangs, because that rank waits for the
# gradients of the others. With an index (or `samples_per_shard=`) the samples are partitioned
# evenly, and `epoch_end` says what happens to the samples that are left over. With `rank=` and
# `world_size=` we can see in one process what each of two ranks would get. (In a real training,
# PipeLoader finds them itself, from torch.distributed or the environment.)

# %%
for epoch_end in ("drop", "pad", "exact"):
    ranks = [make_loader(rank=rank, world_size=2, epoch_end=epoch_end) for rank in range(2)]
    batches = [list(loader) for loader in ranks]
    assert [len(loader) for loader in ranks] == [len(given) for given in batches]
    given = keys_of(batches[0] + batches[1])
    print(
        f"{epoch_end:>5}: {[len(given) for given in batches]} batches; {len(given)} samples "
        f"yielded, {len(set(given))} different ones;",
        ranks[1].counts(),
    )
    if epoch_end != "exact":
        assert len(batches[0]) == len(batches[1])
    if epoch_end != "drop":
        assert set(given) == everything

# %% [markdown]
# - `"drop"` is for training: only full batches, the same number on each rank. The samples left out
#   are counted, and are others in each epoch.
# - `"pad"` is for evaluation under DDP: some samples are repeated. Each sample that is a dict has
#   the field `"__padding__"`, which is true for repeats, so you can leave them out of a mean.
# - `"exact"` yields each sample once; ranks may differ by a few batches.
#
# Without counts, several ranks raise an error that says what to do, instead of hanging:

# %%
uncounted = wp.ShardList("shards/*.tar").open_shards().load_tar().group_by_key()
try:
    next(iter(wp.PipeLoader(uncounted, batch_size=8, rank=0, world_size=2)))
except ValueError as error:
    print(error)
else:
    raise AssertionError

# %% [markdown]
# ## Equal epochs with any steps: `epoch_end="loop"`
#
# `"drop"` and `"pad"` need to know how many samples each lane yields. That number is not known if samples
# are filtered, skipped because they are broken, mixed, or not counted. Then use `"loop"`: each lane
# goes on to its next epoch of the data by itself, without end, and `with_epoch()` cuts this stream.
# So every rank gets the same number of batches, and each batch is full.


# %%
def is_kept(sample):
    return int(sample["__key__"]) % 100 < 70  # the shards differ in how many samples they keep


def make_endless(**options):
    pipe = wp.ShardList("shards/*.tar", shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    pipe = pipe.filter_samples(is_kept).shuffle_buffer(20).to_tuple("__key__", "cls")
    return wp.PipeLoader(pipe, batch_size=8, epoch_end="loop", **options).with_epoch(samples=320)


ranks = [make_endless(rank=rank, world_size=2) for rank in range(2)]
for _ in range(2):
    batches = [list(loader) for loader in ranks]
    print([len(given) for given in batches], "batches, with", {len(keys) for given in batches for keys, _ in given})
    assert [len(given) for given in batches] == [20, 20]

# %% [markdown]
# A lane with fewer samples is then in a later epoch of the data than the others, but of each epoch
# of the data each sample comes once. That holds on any number of ranks and workers: what is left of
# the epochs that were begun comes before new ones. The rest of an epoch of `with_epoch()` is that
# of all ranks together.

# %%
begun = make_endless(rank=0, world_size=2), make_endless(rank=1, world_size=2)
seen = [key for loader in begun for _, (keys, _) in zip(range(13), loader) for key in keys]
one = make_endless()
one.load_state_dict([loader.state_dict() for loader in begun])
rest = keys_of(one)
assert len(seen) + len(rest) == 320
kept = {key for key in everything if is_kept({"__key__": key})}
assert len({*seen, *rest}) == 320 < len(kept), "a sample came twice within an epoch of the data"
print(f"two ranks: {len(seen)} samples, then one rank: {len(rest)}, all different")

# %% [markdown]
# Use `"loop"` for training by steps, with any steps in the pipeline, also with
# `ShardList(resampled=True)` and `wp.mix`. Use `"drop"` if an epoch of the training must be an
# epoch of the data, `"pad"` for evaluation under DDP, and `"exact"` in one process.
#
# With `"drop"` and `"pad"`, `loader.with_epoch(batches=1000)` cuts the stream of the epochs in the
# same way.
#
# ## A real run of two ranks
#
# Each rank saves its part of a checkpoint with `checkpoint.save(directory, loader, step=step)`: it
# writes one small file and does not wait for the other ranks. The checkpoint is complete when the
# files of all ranks exist. Save the model *first*, so that a complete checkpoint of the data never
# lacks its model.
#
# At the start, **every rank** calls `checkpoint.load(directory, loader)`, without an `if`: at a first
# start, when the directory does not exist or is empty for all ranks, it returns None. Otherwise it
# returns the step of the newest complete checkpoint, the same on all ranks. (With
# `if os.path.isdir(directory)` one rank might look before another one has made the directory. Then a
# rank calls `load` alone: an error that names both ranks.)
#
# If the number of ranks may change, set `epoch_end="drop"` explicitly: the default depends on that
# number (`"exact"` for one rank, `"drop"` for several).

# %%
TRAINING = """\
import json

import torch.distributed as dist

import wds_pipes as wp
from wds_pipes import checkpoint


def main():
    dist.init_process_group("gloo")
    pipe = wp.ShardList("shards/index.json", shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    loader = wp.PipeLoader(pipe.shuffle_buffer(20).decode_by_ext().to_tuple("__key__", "cls"), batch_size=8, epoch_end="drop")
    done = checkpoint.load("checkpoints", loader)  # every rank; None at a first start
    trained = []
    for step, (keys, _) in enumerate(loader, 1 if done is None else done + 1):
        trained += keys  # a real program trains the model here
        if step == 5:
            dist.barrier()  # after rank 0 has saved the model
            checkpoint.save("checkpoints", loader, step=step)
            break
    with open(f"rank-{dist.get_rank()}.json", "w") as file:
        json.dump(trained, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
with open("train_ranks.py", "w") as file:
    file.write(TRAINING)

# %%
start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train_ranks.py"]
done = subprocess.run(start, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
for folder, _, files in os.walk("checkpoints"):
    for name in sorted(files):
        print(os.path.join(folder, name), os.path.getsize(os.path.join(folder, name)), "bytes")

# %% [markdown]
# ## Resuming on one rank with two workers
#
# `checkpoint.load` reads the newest complete checkpoint, whatever number of ranks wrote it, and
# returns its step. If the ranks and workers can host the same lanes, the order of the samples is
# that of an uninterrupted run. Otherwise the rest of the epoch is repartitioned, and each remaining
# sample comes exactly once; `epoch_end="drop"` leaves out the samples that do not fit into equal
# full batches.

# %%
import json

before = [json.load(open(f"rank-{rank}.json")) for rank in range(2)]
loader = make_loader(epoch_end="drop", num_workers=2)
assert checkpoint.load("checkpoints", loader) == 5
after = keys_of(loader)
assert len(before[0] + before[1] + after) == len({*before[0], *before[1], *after}), "a sample came twice"
assert len(everything) - len(before[0] + before[1] + after) == loader.counts()["dropped"]
print(
    f"two ranks: {len(before[0])} + {len(before[1])} samples, then one rank: {len(after)}; of {len(everything)}:",
    loader.counts(),
)
loader.close()

# %% [markdown]
# Next, the same with four ranks. In a training each rank is a process of its own; here all four are
# in one process, so that we can compare them. What is left is divided evenly, also of the shards that
# a lane had open, so `"drop"` leaves out less than one batch of all ranks together. With
# `PipeLoader(lanes=8)` from the beginning, the order stays the same, too, on 1, 2, 4 or 8 ranks.

# %%
four = [make_loader(epoch_end="drop", rank=rank, world_size=4) for rank in range(4)]
for loader in four:
    checkpoint.load("checkpoints", loader)
parts = [keys_of(loader) for loader in four]
left = [key for part in parts for key in part]
assert len({*before[0], *before[1], *left}) == len(before[0] + before[1] + left)
assert len({len(part) for part in parts}) == 1
dropped = sum(loader.counts()["dropped"] for loader in four)
assert len(before[0] + before[1] + left) + dropped == len(everything)
print("each of four ranks yields", len(parts[0]), "of the remaining samples;", dropped, "are dropped")

# %% [markdown]
# There are other ways to save the state of all ranks: `checkpoint.gather(loader)` returns one state
# for `torch.save`, `checkpoint.DCPState(loader)` is for `torch.distributed.checkpoint`, and
# `checkpoint.AllRanks(loader)` for Accelerate.
#
# ## Mixing data sets
#
# `wp.mix` draws from several pipelines in exact proportions, not at random: at every place, the
# number of samples from each source differs from its share by less than one. The result is a pipe
# like any other.

# %%
make_shards("photos", shards=2, samples=60, fields={"txt": lambda rng, number: "photo"})
make_shards("drawings", shards=2, samples=20, fields={"txt": lambda rng, number: "drawing"})


def make_mix():
    sources = {
        name: wp.ShardList(f"{name}/*.tar", shuffle=True, seed=1).open_shards().load_tar().group_by_key()
        for name in ("photos", "drawings")
    }
    return wp.mix(sources, weights={"photos": 3, "drawings": 1}).decode_by_ext().to_tuple("txt", "__key__")


kinds = [kind for kind, _ in make_mix()]
share = np.cumsum([kind == "drawing" for kind in kinds])
assert all(abs(count - place / 4) < 1 for place, count in enumerate(share, 1))
print(kinds[:8], "... in all", len(kinds))

mixed = make_mix()
items = iter(mixed)
head = [next(items) for _ in range(30)]
again = make_mix()
again.load_state_dict(mixed.state_dict())
assert list(again) == list(items)

# %% [markdown]
# `exhausted=` says what happens when one source ends: stop (as here), continue with the others, or
# begin that source again. When an epoch is repartitioned, the lanes of a mix are not divided: what is
# left of each stays together.
#
# ## Which samples come when
#
# The order is a function of (seed, epoch, place), so the loader can say it without reading: over a
# `SampleList`, and over counted shards, also through `shuffle_buffer`, if no step filters or skips
# samples. `plan` says which samples a rank gets at a step (here of the step at which a loss went up),
# and `find` when a sample comes. Any rank may be asked, and the time does not grow with the step.
# `skip` leaves the next batches out; every rank calls it.

# %%
loader = make_loader(rank=0, world_size=2)
for sample in loader.plan(40, rank=1)[:3]:
    print(sample.url, sample.number)
print(loader.find(123))  # sample 123 of all, counted over the shards in the order of the list
batches = keys_of(make_loader(rank=1, world_size=2))
[visit] = loader.find(int(batches[77]))
assert (visit.rank, visit.step, visit.place) == (1, 77 // 8, 77 % 8)

one = make_loader()
expected = list(make_loader())
one.skip(batches=50)
assert keys_of(one) == keys_of(expected[50:])
print({name: count for name, count in one.counts().items() if count})

# %% [markdown]
# On a shell, `wds-pipes state at --step 40 --rank 1 --world-size 2 train:make_loader` and `--find
# KEY` print the same; `train:make_loader` is a function that returns the loader.
#
# ## What training waits for
#
# `loader.stats()` returns a flat dict of numbers for a logger: samples per second, and how the time
# is spent. `wait_share` is the share of time in which training waited for a batch; if it is near 0,
# reading data does not slow down training. `read_share` and `decode_share` are shares of the
# workers' time: for reading (up to `group_by_key`) and for all steps after it. `stall_share` is the
# share of reading time in which workers waited for bytes from a store (here it is 0, because the
# shards are on a disk). We measure three loops over the same images:

# %%
make_shards(
    "images",
    shards=2,
    samples=60,
    fields={"jpg": lambda rng, number: np.frombuffer(rng.randbytes(96 * 96 * 3), np.uint8).reshape(96, 96, 3)},
)


def measure(step_seconds, *specs):
    pipe = wp.ShardList("images/*.tar").open_shards().load_tar().group_by_key().decode_by_ext(*specs)
    loader = wp.PipeLoader(pipe, batch_size=8, collate="list", num_workers=1)
    for _ in loader:
        time.sleep(step_seconds)  # the model
    stats = loader.stats()
    loader.close()
    return stats


runs = {
    "raw bytes,\nno model": measure(0),
    "decoded,\nno model": measure(0, "torchrgb"),
    "decoded,\na model of 30 ms": measure(0.03, "torchrgb"),
}
shares = ["wait_share", "read_share", "decode_share"]
figure, axis = plt.subplots(figsize=(8, 3.5))
for place, share in enumerate(shares):
    axis.bar(np.arange(len(runs)) + 0.25 * (place - 1), [stats[share] for stats in runs.values()], 0.24, label=share)
axis.set_xticks(range(len(runs)), runs)
axis.set(ylim=(0, 1), ylabel="share", title="wait: of training's time; read and decode: of the workers' time")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
stats = runs["decoded,\na model of 30 ms"]
assert stats["wait_share"] < runs["decoded,\nno model"]["wait_share"]
print({name: round(value, 2) for name, value in stats.items()})

# %% [markdown]
# If `wait_share` is high, the last table of `11_troubleshooting` says what to do. The first batches of
# an iteration are late, because workers start and shards are opened, so look at the numbers after a
# few hundred batches.
#
# On several ranks, one that waits makes all wait. All call `loader.stats_of_ranks()` at the same step
# (one collective operation), and `describe_stats` says which one waits for what. A rank that waits
# for others in such a call, or in `load` or `gather`, never waits for ever: after `timeout_seconds=`
# (300 by default) it raises an error that names the ranks that did not come, and where each of them
# has been last.

# %%
print(wp.describe_stats(one.stats_of_ranks()))

# %% [markdown]
# ## What to read next
#
# - `05_s3_gcs_http`: shards in a store.
# - `06_lightning` and `07_imagenet_resnet`: all of this in a training.
