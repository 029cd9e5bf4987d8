# %% [markdown]
# # A first pipeline: from shards to batches
#
# **You learn** how a pipeline is put together, how to look at what comes out of each step, what an
# epoch is, and what shuffling really does.
#
# **You need** `pip install 'wds_pipes[demo]'` (the extra brings matplotlib, for one plot).

# %%
import os
import tempfile

import matplotlib.pyplot as plt
import numpy as np

import wds_pipes as wp
from wds_pipes.display import show
from wds_pipes.testing import make_shards

os.chdir(tempfile.mkdtemp())  # all that is written here goes there

# %% [markdown]
# ## Some shards
#
# A shard is a plain tar file. Neighbouring files in it with the same name up to the first dot are
# one *sample*; what stands behind the dot is a *field*. So `00000007.jpg` and `00000007.cls` are an
# image and its class. `make_shards` writes a few of them to play with; the next tutorial makes them
# of your own files.

# %%
urls = make_shards("data", shards=4, samples=100, fields=("jpg", "cls"))
print(urls)

# %%
import tarfile

with tarfile.open(urls[0]) as tar:
    print(tar.getnames()[:6])

# %% [markdown]
# ## One step after the other
#
# A pipeline is a chain of methods. Each gives a new pipe, and nothing is read before you iterate.
# You can iterate any of them, so look at what each step gives:

# %%
pipe = wp.ShardList("data/shard-{000000..000003}.tar", shuffle=True, seed=7)  # braces, globs, directories, lists, s3://...
print(list(pipe))

# %%
samples = pipe.open_shards().load_tar().group_by_key()
sample = next(iter(samples))
show(sample)

# %% [markdown]
# A sample is a dict of bytes, with its key and its shard; `show` draws it in a notebook, images
# too. (It is not from the shard that was first above: looking at the URLs was epoch 0 of this list,
# so this is epoch 1, in another order.) `decode_by_ext` makes objects of the bytes, by the field's
# extension: text, numbers, JSON, arrays, and images in the form that you name: `"pil"`, `"rgb8"`
# (uint8, height x width x 3), `"torchrgb"` (float, 3 x height x width), ...

# %%
sample = next(iter(samples.decode_by_ext("rgb8")))
print(sample["jpg"].shape, sample["jpg"].dtype, sample["cls"])

# %% [markdown]
# And the whole chain, down to batches. `to_tuple("jpg;png", "cls")` takes `jpg`, or `png` where
# there is no `jpg`.

# %%
pipe = (
    wp.ShardList("data/shard-{000000..000003}.tar", shuffle=True, seed=7)
    .open_shards()
    .load_tar()
    .group_by_key()
    .shuffle_buffer(100)
    .decode_by_ext("torchrgb")
    .to_tuple("__key__", "jpg;png", "cls")
    .batch_samples(32)
)
keys, images, labels = next(iter(pipe))
print(images.shape, images.dtype, labels[:8], keys[:3])
assert images.shape == (32, 3, 8, 8)

# %% [markdown]
# A pipe, too, shows itself: its steps with the options that you gave. (`pipe.to_mermaid()` and
# `pipe.to_dot()` are for a README and for Graphviz.)

# %%
pipe

# %% [markdown]
# ## Epochs
#
# Each loop over a pipe is the next epoch: the same samples in another order. The order depends on
# the seed and the number of the epoch and on nothing else, so it is the same tomorrow and on
# another machine. `set_epoch` chooses an epoch.


# %%
def keys_of(pipe):
    return [key for keys, _, _ in pipe for key in keys]


pipe.set_epoch(0)
first, second = keys_of(pipe), keys_of(pipe)
assert first != second
assert sorted(first) == sorted(second)
assert len(set(first)) == 400

pipe.set_epoch(0)
assert keys_of(pipe) == first
print(pipe.counts())

# %% [markdown]
# `counts()` tells what became of the samples of the epoch: how many were delivered, how many were
# left out by a filter, skipped because they were bad, or dropped with an incomplete batch
# (`batch_samples(32, drop_last=True)`).
#
# ## What shuffling does
#
# Two things shuffle: `ShardList(shuffle=True)` brings the shards into another order, and
# `shuffle_buffer(size)` moves samples within a window, holding about `size` of them. A sample
# leaves at most `2 * size - 1` places late. How far do samples move? Here are shards with 4000
# samples in order, and where each went.

# %%
make_shards("many", shards=8, samples=500, fields=("txt",))
figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), sharey=True)
places = np.arange(4000)
for axis, size, shards in zip(axes, (100, 1000, 100), (False, False, True), strict=True):
    moved = wp.ShardList("many/*.tar", shuffle=shards, seed=7).open_shards().load_tar().group_by_key().shuffle_buffer(size)
    order = np.array([int(sample["__key__"]) for sample in moved])
    assert sorted(order) == list(places)
    if not shards:
        assert (places - order).max() <= 2 * size - 1
        print(f"shuffle_buffer({size}): displacement with a standard deviation of {np.std(places - order):.0f}")
    axis.plot(order, ".", markersize=1.5)
    axis.set(title=f"shuffle_buffer({size})" + (", shards shuffled" if shards else ""), xlabel="place in the stream")
axes[0].set_ylabel("place in the shards")
plt.show()

# %% [markdown]
# A small buffer alone leaves the shards in their order (left). A larger one mixes further, and
# costs memory for the samples that it holds (middle). With the shards in a random order (right),
# neighbours still come from the same shard: if all samples of a shard are alike,
# `interleave_shards(4)` in front of the buffer keeps four shards open and takes a sample from each
# in turn.
#
# Put `shuffle_buffer` before `decode_by_ext`: what waits in it is then small. It gives its first
# sample at once, not after it has filled.

# %%
mixed = wp.ShardList("many/*.tar", shuffle=True, seed=7).open_shards().load_tar().group_by_key().interleave_shards(4).shuffle_buffer(100)
origins = [int(sample["__key__"]) // 500 for sample in mixed]
print("shards among 50 neighbours:", sorted(set(origins[1000:1050])))
assert len(set(origins[1000:1050])) >= 3

# %% [markdown]
# ## Your own functions
#
# `map_samples(fn)` and `filter_samples(fn)` take functions. A function with a second parameter,
# `fn(sample, rng)`, gets a random generator that is made for this sample and epoch: draw from it,
# and augmentation is the same after a resume. (Global generators such as `random` would not be.)


# %%
def augment(sample, rng):
    return {**sample, "jpg": np.roll(sample["jpg"], rng.integers(0, 8), axis=1)}


augmented = (
    wp.ShardList(urls, seed=7)
    .open_shards()
    .load_tar()
    .group_by_key()
    .decode_by_ext("rgb8")
    .filter_samples(lambda sample: sample["cls"] < 5)
    .map_samples(augment)
)
once = [sample["jpg"] for sample in augmented]
augmented.set_epoch(0)
again = [sample["jpg"] for sample in augmented]
assert all(map(np.array_equal, once, again))
print(len(once), "samples;", augmented.counts())

# %% [markdown]
# ## What to read next
#
# - `02_folder_to_shards` makes shards of your own images.
# - `03_resume_after_a_crash` shows what this package is for.
# - `help(pipe.shuffle_buffer)`, and so on for every step, says what it does, raises and saves.
