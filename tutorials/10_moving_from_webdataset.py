# %% [markdown]
# # Moving from webdataset
#
# **You learn** what replaces each call of `webdataset`, what is different, and why. Both libraries
# run on the same shards.
#
# **You need** `pip install wds_pipes webdataset wids`
#
# You need not change the shards: both libraries read the same tars.
#
# | webdataset | wds_pipes | what is different, and why |
# |---|---|---|
# | `WebDataset(urls)` | `ShardList(urls).open_shards().load_tar().group_by_key()` | Each step has its own options, and its position is saved. |
# | `SimpleShardList`, `shardlists`, braces | `ShardList(urls)` | Also globs, directories, `@list.txt`, and an index. |
# | `ResampledShards`, `resampled=True` | `ShardList(resampled=True)` | An epoch has as many draws as there are shards. It ends, and its position is saved. On several ranks, use it with `epoch_end="loop"` and `with_epoch()`. |
# | `shardshuffle=100`, `detshuffle` | `ShardList(shuffle=True, seed=7)` | All shards are permuted, differently in each epoch, by (seed, epoch). |
# | `split_by_node`, `split_by_worker` | nothing: `PipeLoader` partitions the data | Several ranks without equal epochs raise an error instead of hanging. |
# | `.shuffle(1000)` | `.shuffle_buffer(1000)` | Yields its first sample at once. Resumes exactly, with two numbers as its state. |
# | `.decode("rgb8")` | `.decode_by_ext("rgb8")` | The same specs. Pickles are refused unless you pass `allow_pickle=True`. |
# | `.decode(wds.handle_extension("x", fn))` | `.decode_by_ext({"x": fn})` | |
# | `.to_tuple("jpg;png", "cls")` | `.to_tuple("jpg;png", "cls")` | A missing field is an error that lists the existing fields. |
# | `.map(fn)` | `.map_samples(fn)` | `fn(sample, rng)` receives a random generator, so augmentation resumes exactly. torch's `.map(fn)` works too. |
# | `.map_dict(jpg=fn)` | `.map_fields({"jpg": fn})` | Other fields stay. |
# | `.rename(image="jpg;png")` | `.rename_fields({"image": "jpg;png"})` | The old name is removed. |
# | `.map_tuple(f, g)` | `.map_samples(lambda t: (f(t[0]), g(t[1])))` | |
# | `.select(fn)` | `.filter_samples(fn)` | Samples left out are counted in `counts()`. |
# | `.slice(100)`, `.slice(100, 200)` | `.take_samples(100)`, `.slice_samples(100, 200)` | The numbers count for all workers and ranks together, not for each. Reading ends after the last sample. |
# | `.batched(64)` | `.batch_samples(64)` | Yields tensors, or with `collate="numpy"` or `"list"` arrays or lists. `partial=False` is `drop_last=True`. |
# | `WebLoader(...)`, `DataLoader` | `PipeLoader(pipe, batch_size=64, num_workers=8)` | Has a state, for any number of workers and ranks. |
# | `.with_epoch(10_000)` | `PipeLoader(..., epoch_end="loop").with_epoch(samples=10_000)` | The number counts for all ranks together, not for each worker. Each rank gets the same number of full batches, whatever the steps filter or skip. |
# | `.with_length(n)` | `ShardList(index=...)` | The length is counted, not set by hand. |
# | `RandomMix([a, b], probs=[3, 1])` | `mix({"a": a, "b": b}, weights={"a": 3, "b": 1})` | Exact proportions at every place, not on average. |
# | `cache_dir=...` | `.open_shards(cache=...)` | Each shard is downloaded once for all processes of a machine. |
# | `pipe:aws s3 cp ... -` | `s3://...` | Several concurrent requests, with retries. `pipe:` needs `allow_pipe=True`, because it runs a shell. |
# | `handler=wds.warn_and_continue` | `on_error="skip", max_errors=100`; or `on_error={wp.DecodeError: "skip"}`, or a function of the error | Bad data is counted; too much is an error. Half a sample is never returned. |
# | `ShardWriter("x-%06d.tar", maxcount=...)` | `ShardWriter("x-%06d.tar", max_samples=...)` | A shard gets its name when complete. Can also write the index. |
# | `TarWriter` | `TarWriter` | The same samples always produce the same bytes. A key that could not be read back is refused. |
# | `wids.ShardListDataset("index.json")` | `ShardList("index.json")` | The same index, but read as a stream. For access by number keep using wids. |
# | `wds.DataPipeline(...)` | a chain of methods | |
#
# Not available: `pipe:` in URLs from files, `.xdecode`, `rsample`, LMDB caches.

# %%
import collections
import io
import os
import tarfile
import tempfile
import warnings

import numpy as np
import webdataset as wds
import wids

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards, same

# When this file runs as a script, worker processes that are not forked (the default on macOS and
# Windows, and everywhere from Python 3.14 on) would run it again. With this line they start as they
# do from a notebook. In a program of your own, put the code under `if __name__ == "__main__":`.
__file__ = None

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
urls = make_shards("data", shards=4, samples=50, fields=("jpg", "cls", "json", "txt"))


def contents(sample):
    """A sample without what the libraries add, such as URLs and paths."""
    return {name: value for name, value in sorted(sample.items()) if not name.startswith("__") or name == "__key__"}


# %% [markdown]
# ## Reading: the same samples

# %%
theirs = list(wds.WebDataset(urls, shardshuffle=False))
ours = list(wp.ShardList(urls).open_shards().load_tar().group_by_key())
assert list(map(contents, theirs)) == list(map(contents, ours))
print(len(ours), "samples,", sorted(ours[0]))

# %% [markdown]
# ## Decoding: the same values

# %%
for spec in ("l8", "rgb8", "rgb", "torchrgb8", "torchrgb", "pil"):
    theirs = [contents(sample) for sample in wds.WebDataset(urls, shardshuffle=False).decode(spec)]
    ours = [
        contents(sample) for sample in wp.ShardList(urls).open_shards().load_tar().group_by_key().decode_by_ext(spec)
    ]
    assert len(theirs) == len(ours) == 200
    differ = collections.Counter(
        name for one, other in zip(theirs, ours, strict=True) for name in one if not same(one[name], other[name])
    )
    print(f"{spec:>9}: {type(ours[0]['jpg']).__name__}", dict(differ) or "all equal")
    assert not differ

# %% [markdown]
# ## Tuples, functions, batches

# %%
one = (
    wds.WebDataset(urls, shardshuffle=False)
    .decode("torchrgb")
    .map_dict(jpg=lambda image: image.flip(-1))
    .to_tuple("jpg;png", "cls")
    .batched(16)
)
two = wp.ShardList(urls).open_shards().load_tar().group_by_key().decode_by_ext("torchrgb")
two = (
    two.map_samples(lambda sample: {**sample, "jpg": sample["jpg"].flip(-1)})
    .to_tuple("jpg;png", "cls")
    .batch_samples(16)
)
batches = 0
for (images, labels), (our_images, our_labels) in zip(one, two, strict=True):
    assert same(images, our_images)
    assert np.array_equal(labels, our_labels)
    batches += 1
print(batches, "batches are equal;", "labels were a", type(labels).__name__, "and are a", type(our_labels).__name__)

# %% [markdown]
# ## Shuffling: as good, without waiting for the buffer to fill, and with a state
#
# How far do samples move? In webdataset's buffer some samples wait very long; here no sample leaves
# more than `2 * size` places late. So for the same spread, `size` must be 1.7 times as large.

# %%
many = make_shards("many", shards=4, samples=1000, fields=("cls",))


def spread(samples):
    order = np.array([int(sample["__key__"]) for sample in samples])
    assert sorted(order) == list(range(4000))
    return np.std(order - np.arange(4000))


print(f"webdataset .shuffle(500):         {spread(wds.WebDataset(many, shardshuffle=False).shuffle(500)):.0f}")
print(
    "wds_pipes  .shuffle_buffer(500):  "
    f"{spread(wp.ShardList(many).open_shards().load_tar().group_by_key().shuffle_buffer(500)):.0f}"
)
print(
    "wds_pipes  .shuffle_buffer(850):  "
    f"{spread(wp.ShardList(many).open_shards().load_tar().group_by_key().shuffle_buffer(850)):.0f}"
)

# %% [markdown]
# ## Workers and epochs
#
# With `WebLoader` each worker reads its own shards, and you define the length of an epoch. With
# `PipeLoader` an epoch has all samples, and the loader knows its position.

# %%
loader = wds.WebLoader(
    wds.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("__key__", "cls").batched(10),
    num_workers=2,
    batch_size=None,
)
theirs = sorted(key for keys, _ in loader for key in keys)

pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key().decode_by_ext("rgb8").to_tuple("__key__", "cls")
loader = wp.PipeLoader(pipe, batch_size=10, num_workers=2)
ours = sorted(key for keys, _ in loader for key in keys)
loader.close()
assert ours == theirs
state = loader.state_dict()  # WebLoader has nothing like this

# epochs of 30 samples; each continues where the one before ended
loader = wp.PipeLoader(pipe, batch_size=10).with_epoch(samples=30)
print([len(list(loader)) for _ in range(3)])

# %% [markdown]
# ## Mixing
#
# `RandomMix` draws at random, so any proportions may occur in a short part of the stream. `mix` is
# always less than one sample away from the exact proportions.

# %%
make_shards("a", shards=1, samples=300, fields={"txt": lambda rng, number: "a"})
make_shards("b", shards=1, samples=100, fields={"txt": lambda rng, number: "b"})
mixed = wds.RandomMix(
    [wds.WebDataset(f"{name}/shard-000000.tar", shardshuffle=False).decode() for name in "ab"], probs=[3, 1]
)
theirs = [sample["txt"] for sample, _ in zip(mixed, range(300), strict=False)]
pipe = wp.mix(
    {name: wp.ShardList(f"{name}/*.tar").open_shards().load_tar().group_by_key().decode_by_ext() for name in "ab"},
    weights={"a": 3, "b": 1},
)
ours = [sample["txt"] for sample, _ in zip(pipe, range(300), strict=False)]


def furthest(kinds):
    return max(abs(kinds[:place].count("b") - place / 4) for place in range(1, len(kinds) + 1))


print(f"furthest from the proportions: {furthest(theirs):.2f} samples, {furthest(ours):.2f} samples")
assert furthest(ours) < 1

# %% [markdown]
# ## Writing: each reads what the other wrote

# %%
samples = [
    {
        "__key__": f"{number:04d}",
        "txt": f"text {number}",
        "cls": number,
        "json": {"number": number},
        "npy": np.arange(number),
    }
    for number in range(20)
]
with wds.ShardWriter("theirs-%06d.tar", maxcount=10, verbose=0) as writer:
    for sample in samples:
        writer.write(sample)
with wp.ShardWriter("ours-%06d.tar", max_samples=10) as writer:
    for sample in samples:
        writer.write(sample)
for name in ("theirs", "ours"):
    pattern = name + "-{000000..000001}.tar"
    by_them = [contents(sample) for sample in wds.WebDataset(pattern, shardshuffle=False).decode()]
    by_us = [
        contents(sample) for sample in wp.ShardList(pattern).open_shards().load_tar().group_by_key().decode_by_ext()
    ]
    assert same(by_them, by_us)
    assert same(by_us, [contents(sample) for sample in samples])
print("equal, both ways")

# %% [markdown]
# The index has the format of wids:

# %%
index_shards("data/*.tar", "data/index.json")
assert len(wids.ShardListDataset("data/index.json", cache_dir="cache", transformations=[])) == 200
assert len(wp.PipeLoader(wp.ShardList("data/index.json").open_shards().load_tar().group_by_key(), batch_size=10)) == 20

# %% [markdown]
# ## Handlers: bad data
#
# We make one shard with a field that cannot be decoded, and one that ends in the middle of its
# fifth sample.

# %%
with tarfile.open("bad.tar", "w") as tar:
    for number in range(10):
        for name, data in ((f"{number}.txt", b"text"), (f"{number}.json", b"{}" if number != 4 else b"{not json")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
with open("bad.tar", "rb") as whole, open("cut.tar", "wb") as cut:
    cut.write(whole.read(9 * 1024 + 300))  # in the header of the tenth member

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for url in ("bad.tar", "cut.tar"):
        skipping = {"handler": wds.warn_and_continue}
        theirs = list(wds.WebDataset(url, shardshuffle=False, **skipping).decode(**skipping))
        print(
            f"webdataset returns {len(theirs)} samples of {url}; without json:",
            [sample["__key__"] for sample in theirs if "json" not in sample],
        )
print(len(told), "warnings")

for url in ("bad.tar", "cut.tar"):
    pipe = (
        wp.ShardList(url).open_shards().load_tar(on_error="skip", on_truncated="ignore").group_by_key(on_error="skip")
    )
    pipe = pipe.decode_by_ext(on_error="skip", max_errors=100)
    ours = list(pipe)
    print(f"wds_pipes returns {len(ours)} samples of {url}; counts:", pipe.counts())
    assert all({"txt", "json"} <= sample.keys() for sample in ours)

# %% [markdown]
# From the incomplete shard, webdataset returns five samples; the fifth is only half a sample,
# without its `json`. wds_pipes counts it as skipped.
#
# By default, bad data raises an error that says where it is:

# %%
try:
    list(wp.ShardList("bad.tar").open_shards().load_tar().group_by_key().decode_by_ext())
except wp.DecodeError as error:
    print(error)
else:
    raise AssertionError

# %% [markdown]
# ## Resuming
#
# The main difference: you can stop anywhere and continue exactly there.

# %%
pipe = (
    wp.ShardList(urls, shuffle=True, seed=7)
    .open_shards()
    .load_tar()
    .group_by_key()
    .shuffle_buffer(100)
    .to_tuple("__key__")
)
iterator = iter(pipe)
head = [next(iterator) for _ in range(77)]
state, rest = pipe.state_dict(), list(iterator)

resumed = (
    wp.ShardList(urls, shuffle=True, seed=7)
    .open_shards()
    .load_tar()
    .group_by_key()
    .shuffle_buffer(100)
    .to_tuple("__key__")
)
resumed.load_state_dict(state)
assert list(resumed) == rest

# %% [markdown]
# ## What to read next
#
# - `03_resume_after_a_crash` and `04_ranks_and_elastic_resume`.
# - `11_troubleshooting`: error messages, and what to do.
