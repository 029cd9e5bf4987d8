# %% [markdown]
# # A first pipeline: from shards to batches
#
# **You learn** how to build a pipeline, how to look at the output of each step, what an epoch is,
# and what shuffling does.
#
# **You need** `pip install 'wds_pipes[demo]'` (the extra installs matplotlib, for one plot).

# %%
import os
import tempfile

import matplotlib.pyplot as plt
import numpy as np

import wds_pipes as wp
from wds_pipes.display import show
from wds_pipes.testing import make_shards

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there

# %% [markdown]
# ## Some shards
#
# A shard is a plain tar file. Neighbouring files in it with the same name up to the first dot form
# one *sample*; the part of the name after this dot is the *field*. So `00000007.jpg` and
# `00000007.cls` are an image and its class. `make_shards` writes a few shards to try things out;
# the next tutorial makes shards from your own files.

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
# A pipeline is a chain of method calls. Each call returns a new pipe, and nothing is read before
# you iterate. You can iterate every pipe of the chain, so you can look at the output of each step:

# %%
# braces, globs, directories, lists, s3://...
pipe = wp.ShardList("data/shard-{000000..000003}.tar", shuffle=True, seed=7)
print(list(pipe))

# %%
samples = pipe.open_shards().load_tar().group_by_key()
sample = next(iter(samples))
show(sample)

# %% [markdown]
# A sample is a dict of bytes, with its key and its shard; `show` displays it in a notebook, images
# included. (The sample is not from the shard that was first above: printing the URLs was epoch 0 of
# this list, so this is epoch 1, in another order.) `decode_by_ext` decodes the bytes by the field's
# extension to text, numbers, JSON, arrays, and images in the form that you name: `"pil"`, `"rgb8"`
# (uint8, height x width x 3), `"torchrgb"` (float, 3 x height x width), ...

# %%
sample = next(iter(samples.decode_by_ext("rgb8")))
print(sample["jpg"].shape, sample["jpg"].dtype, sample["cls"])

# %% [markdown]
# Now the whole chain, up to batches. `to_tuple("jpg;png", "cls")` takes `jpg`, or `png` where there
# is no `jpg`.

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
# A notebook also displays a pipe: its steps with the options that you set.

# %%
pipe

# %% [markdown]
# ## Epochs
#
# Each loop over a pipe is the next epoch: the same samples in another order. The order depends only
# on the seed and the number of the epoch, so it is the same at any time and on any machine.
# `set_epoch` chooses an epoch.


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
# `counts()` says how many samples of the epoch were delivered, left out by a filter, skipped
# because they were bad, or dropped with an incomplete batch (`batch_samples(32, drop_last=True)`).
#
# ## What shuffling does
#
# Two steps shuffle. `ShardList(shuffle=True)` reads the shards in another order, and
# `shuffle_buffer(size)` moves samples within a window of about `size` samples, which it holds in
# memory. A sample leaves the buffer at most `2 * size - 1` places late. How far do samples move?
# The shards below hold 4000 samples in order. The plot shows, for each place in the stream, the
# original place of its sample.

# %%
make_shards("many", shards=8, samples=500, fields=("txt",))
figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), sharey=True)
places = np.arange(4000)
for axis, size, shards in zip(axes, (100, 1000, 100), (False, False, True), strict=True):
    moved = (
        wp.ShardList("many/*.tar", shuffle=shards, seed=7).open_shards().load_tar().group_by_key().shuffle_buffer(size)
    )
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
# A small buffer alone leaves the shards in their order (left). A larger one mixes over longer
# distances, and needs memory for the samples that it holds (middle). With the shards in a random
# order (right), neighbours still come from the same shard. If all samples of a shard are alike, put
# `interleave_shards(4)` before the buffer: it keeps four shards open and takes a sample from each
# in turn.
#
# Put `shuffle_buffer` before `decode_by_ext`: it then holds small, encoded samples. It yields its
# first sample at once, not after it has filled.

# %%
mixed = (
    wp.ShardList("many/*.tar", shuffle=True, seed=7)
    .open_shards()
    .load_tar()
    .group_by_key()
    .interleave_shards(4)
    .shuffle_buffer(100)
)
origins = [int(sample["__key__"]) // 500 for sample in mixed]
print("shards among 50 neighbours:", sorted(set(origins[1000:1050])))
assert len(set(origins[1000:1050])) >= 3

# %% [markdown]
# ## Your own functions
#
# `map_samples(fn)` and `filter_samples(fn)` take functions. A function with a second parameter,
# `fn(sample, rng)`, receives a random generator that is seeded for this sample and epoch. If it draws
# from `rng`, augmentation is the same after a resume. torchvision draws from global generators: with
# `map_samples(fn, seed_all=True)` those of torch, numpy and `random` are seeded for each sample, so
# what it draws is the same, too. A library with generators of its own, such as albumentations, must
# be seeded from `rng`.


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
# - `03_resume_after_a_crash` shows the main purpose of this package: exact resume.
# - `help(pipe.shuffle_buffer)`, and so on for every step, says what the step does, raises and
#   saves.
