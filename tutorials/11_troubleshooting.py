# %% [markdown]
# # Troubleshooting, by symptom
#
# **You learn** what each error message means and what to do. The code below raises the messages, so
# you can search this page for a few words of yours.
#
# **You need** `pip install wds_pipes`

# %%
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import warnings

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import checkpoint, tools
from wds_pipes.testing import make_shards

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata calls it
logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stdout)  # the logger "wds_pipes" reports what is skipped
urls = make_shards("data", shards=4, samples=20, fields=("txt", "cls", "json"))


def samples(urls=urls, **options):
    return wp.ShardList(urls, **options).open_shards().load_tar().group_by_key()


@contextlib.contextmanager
def raises(kind):
    """Print the error that is raised."""
    try:
        yield
    except kind as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("nothing was raised")


# %% [markdown]
# ## It does not start
#
# ### Nothing matches; a shard does not exist
#
# **Cause:** a typing error, or another working directory than you think; the message names the
# directory. A pattern with `*` is looked up when the list is built. Braces are only expanded, so a
# missing shard is noticed when it is opened.

# %%
with raises(ValueError):
    wp.ShardList("data/train-*.tar")
with raises(wp.ShardError):
    list(samples("data/train-{000000..000003}.tar"))

# %% [markdown]
# ### A shard is not a tar
#
# **Cause:** often the file is an error page of a web server, or was not copied completely. **Do:**
# look at its first bytes and copy it again. `wds-pipes verify SHARDS` finds all damage of all
# shards at once, and `wds-pipes repair SHARDS NEW` writes the samples that are whole. With
# `open_shards(on_error="skip", max_errors=3)` and `load_tar(on_error="skip", max_errors=3)` a few bad
# shards are skipped, counted and logged; but first find out why they are bad.

# %%
with open("page.tar", "w") as file:
    file.write("<!DOCTYPE html><html><body>404 Not Found</body></html>\n" * 30)
with raises(wp.ShardError):
    list(samples("page.tar"))

with open(urls[0], "rb") as whole, open("cut.tar", "wb") as cut:
    cut.write(whole.read(3333))
with raises(wp.ShardError):
    list(samples("cut.tar"))

# %% [markdown]
# ### A shard has data after its end-of-archive mark, or no such mark
#
# **Cause:** several archives were joined (`cat a.tar b.tar`, `tar -A`); or a page of the file was
# zeroed; or it was cut. **Do:** read joined archives with `load_tar(concatenated=True)`, or make one
# archive of them with `wds-pipes repair --concatenated`. Fetch any other shard again. With
# `on_truncated="warn"`, a shard that was cut gives all its samples but the last one, which may be
# incomplete.

# %%
with open("joined.tar", "wb") as joined:
    for url in urls[:2]:
        with open(url, "rb") as part:
            joined.write(part.read())
with raises(wp.ShardError):
    list(samples("joined.tar"))
print(len(list(wp.ShardList("joined.tar").open_shards().load_tar(concatenated=True).group_by_key())))

# %% [markdown]
# ### A sample has no such field; an epoch is empty
#
# **Cause:** the field has another name. **Do:** look at a sample: `next(iter(samples))`. For a
# field that may have several names, use `to_tuple("jpg;jpeg;png")`. `group_by_key(fields=[...])`
# leaves out samples that have none of these fields; if it leaves out all samples, it raises an
# error.

# %%
with raises(wp.SampleError):
    list(samples().to_tuple("jpg", "cls"))

with raises(wp.SampleError):
    list(wp.ShardList(urls).open_shards().load_tar().group_by_key(fields=["text"]))

# %% [markdown]
# ### A key occurs twice; a field occurs twice
#
# **Cause:** the members of a sample are not next to each other in the tar. Or the names of
# different samples are the same up to the *first* dot (`photo.1.jpg` and `photo.2.jpg` both belong
# to sample `photo`). **Do:** `wds-pipes repair SHARDS NEW` joins the members of each sample; if names
# contain dots, use `group_by_key(key_split="last-dot")`.

# %%
import io
import tarfile


def write(path, *names):
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))


write("pieces.tar", "a.txt", "b.txt", "a.cls", "b.cls")
with raises(wp.SampleError):
    list(samples("pieces.tar"))

write("dots.tar", "photo.1.txt", "photo.2.txt")
dots = next(iter(samples("dots.tar")))
print(dots)
assert len(list(wp.ShardList("dots.tar").open_shards().load_tar().group_by_key(key_split="last-dot"))) == 2

# %% [markdown]
# ### No file of a shard makes a sample
#
# **Cause:** the names have no dot, or are hidden. **Do:** name the files `KEY.FIELD`. If each sample
# is a directory, as of a robot's run or a zarr tree, use `group_by_key(key_split="folder")`: the path
# below the directory is the field.

# %%
write("runs.tar", "run1/.zattrs", "run1/camera/0", "run2/.zattrs", "run2/camera/0")
with warnings.catch_warnings(record=True) as caught, raises(wp.SampleError):
    warnings.simplefilter("always")
    list(samples("runs.tar"))
print(caught[0].message)
for run in wp.ShardList("runs.tar").open_shards().load_tar().group_by_key(key_split="folder"):
    print(run)

# %% [markdown]
# ### A field cannot be decoded; pickles are refused
#
# **Cause:** bad data, or a format that can run code when it is read. **Do:** use
# `decode_by_ext(on_error="skip", max_errors=100)` to skip a few bad samples, and
# `allow_pickle=True` only for data that you wrote. In every step, `on_error={wp.DecodeError: "skip"}`
# skips only what is listed, and a function of the error may decide, too.

# %%
with wp.TarWriter("odd.tar") as writer:
    writer.write({"__key__": "a", "json": b"{not json"})
with raises(wp.DecodeError):
    list(samples("odd.tar").decode_by_ext())

with wp.TarWriter("pickle.tar") as writer:
    writer.write({"__key__": "a", "pkl": b"\x80\x04N."})
with raises(wp.DecodeError):
    list(samples("pickle.tar").decode_by_ext())

# %% [markdown]
# ### The samples of a batch cannot be stacked
#
# **Cause:** images of several sizes, or fields that only some samples have. **Do:** give all
# samples one shape in `map_samples`, choose fields with `to_tuple`, or use
# `batch_samples(8, collate="list")`.

# %%
sizes = {"npy": lambda rng, number: np.zeros((3, 4 + number % 2), np.float32)}
make_shards("sizes", shards=1, samples=4, fields=sizes)
with raises(wp.SampleError):
    list(samples("sizes/*.tar").decode_by_ext().batch_samples(4))

# %% [markdown]
# ### A step takes another kind of item
#
# **Cause:** the steps are in the wrong order. The usual order is `open_shards`, `load_tar`,
# `group_by_key`, `shuffle_buffer`, `decode_by_ext`, `map_samples`, `to_tuple`, `batch_samples`.

# %%
with raises(TypeError):
    list(samples().to_tuple("txt").decode_by_ext())
with raises(TypeError):
    list(wp.ShardList(urls).group_by_key())

# %% [markdown]
# ## It does not resume
#
# ### The state does not fit
#
# **Cause:** something that decides the order of samples has changed; the message lists what
# differs. **Do:** build the pipeline as it was. If you want the change, make it at the beginning of
# an epoch: call `set_epoch(n)` instead of loading the state.
#
# A copy of the shards at another place is accepted if the MD5s in the index are the same or,
# without an index, if the names below the common directory are the same. If shards were renamed, or
# moved out of their `train/` directory, but are the same data, pass `moved=True` to
# `load_state_dict` or `checkpoint.load`. If another library loads the state (`StatefulDataLoader`,
# torchdata's `Loader`), pass `moved=True` to `ShardList`; in Lightning, set `data.moved = True`
# before `fit`.

# %%
state = samples(shuffle=True, seed=1).shuffle_buffer(10).state_dict()
with raises(wp.StateError):
    samples(urls[:3], shuffle=True, seed=2).shuffle_buffer(20).load_state_dict(state)
with raises(wp.StateError):
    samples("https://host/renamed-{0..3}.tar", shuffle=True, seed=1).shuffle_buffer(10).load_state_dict(state)
samples("https://host/renamed-{0..3}.tar", shuffle=True, seed=1).shuffle_buffer(10).load_state_dict(state, moved=True)

# %% [markdown]
# ### The state of only one rank
#
# **Cause:** each rank has its own part of the state. **Do:** save and load with
# `wds_pipes.checkpoint`, or load a list of the states of all ranks.

# %%
ranks = [
    wp.PipeLoader(samples(samples_per_shard=20), batch_size=4, rank=rank, world_size=2, epoch_end="drop")
    for rank in range(2)
]
one = wp.PipeLoader(samples(samples_per_shard=20), batch_size=4, epoch_end="drop")
with raises(wp.StateError):
    one.load_state_dict(ranks[0].state_dict())
one.load_state_dict([loader.state_dict() for loader in ranks])

# %% [markdown]
# ### No complete checkpoint
#
# **Cause:** a crash while the first checkpoint was saved, or files that were lost in copying. `load`
# returns None, with a warning, and the training begins anew. (If an older checkpoint is complete, it
# is loaded instead.) It is the same, with another warning, if the directory does not exist: pass
# `step=` where a checkpoint must be there, for example after a disk was mounted.

# %%
assert checkpoint.load("nowhere", one) is None
with raises(wp.StateError):
    checkpoint.load("nowhere", one, step=10)
saved = checkpoint.save("checkpoints", ranks[0], step=10)
assert checkpoint.load("checkpoints", one) is None
checkpoint.save("checkpoints", ranks[1], step=10)
assert checkpoint.load("checkpoints", one) == 10

# %% [markdown]
# ### A pipe whose state cannot be saved
#
# **Cause:** one of torch's pipes does not expose the samples that it holds, or a worker of
# `StatefulDataLoader` is used with a datapipe, whose state it does not save. **Do:** what the
# message says.

# %%
with raises(wp.StateError):
    samples().shuffle().load_tar().state_dict()
with raises(wp.StateError):
    next(iter(StatefulDataLoader(samples(), batch_size=None, num_workers=1)))

# %% [markdown]
# ### It resumes, but the losses differ
#
# **Causes**, in the order in which to check them:
#
# 1. The checkpoint lacks something: optimizer, schedule, gradient scaler, `torch.get_rng_state()`
#    for dropout.
# 2. Augmentation draws from a global generator (`random`, `np.random`, `torch.rand`). Draw from the
#    `rng` of `map_samples(fn)`.
# 3. The state and the model were saved at different batches. Save both after the same step.
# 4. Threads or a GPU add floats in another order. Then the samples are the same; compare their keys
#    to check this.
#
# The next cell shows the second cause:


# %%
def by_global(sample):
    return np.random.rand()


def by_rng(sample, rng):
    return rng.random()


def resumes_alike(fn):
    whole = samples().map_samples(fn)
    items = iter(whole)
    for _ in range(10):
        next(items)
    resumed = samples().map_samples(fn)
    resumed.load_state_dict(whole.state_dict())
    return list(items) == list(resumed)


assert not resumes_alike(by_global)
assert resumes_alike(by_rng)

# %% [markdown]
# ## The order is not as expected
#
# ### Each epoch has the same order
#
# **Cause:** the pipe is built again for each epoch, so each epoch is epoch 0; or no step shuffles.
# **Do:** build the pipe once and loop over it again, or call `set_epoch(epoch)`.


# %%
def keys(pipe):
    return [sample["__key__"] for sample in pipe]


assert keys(samples().shuffle_buffer(20)) == keys(samples().shuffle_buffer(20))
pipe = samples().shuffle_buffer(20)
assert keys(pipe) != keys(pipe)

# %% [markdown]
# ### Samples of one class are next to each other
#
# **Cause:** the shards were written in the order of the folder. **Do:** shuffle the samples before
# writing them (`02_folder_to_shards`) or afterwards (`wds-pipes shuffle SHARDS NEW`), or use
# `interleave_shards(8)` and a larger `shuffle_buffer`.
#
# ### An iterator was replaced
#
# **Cause:** a pipe or a loader has one iterator at a time: using a second iterator ends the first
# one. **Do:** build two pipes.

# %%
pipe = samples()
first, second = iter(pipe), iter(pipe)
next(first)
next(second)
with raises(wp.StateError):
    next(first)

# %% [markdown]
# ## Several ranks
#
# ### Training hangs at the end of an epoch, or: "would not get the same number of batches"
#
# **Cause:** ranks with different numbers of batches would wait for each other forever, so
# `PipeLoader` refuses to start. **Do:** make an index (`wds-pipes index`) or pass
# `samples_per_shard=`. With either of them you can also use `with_epoch(batches=...)`.

# %%
with raises(ValueError):
    next(iter(wp.PipeLoader(samples(), batch_size=4, rank=0, world_size=2)))
with raises(TypeError):
    len(wp.PipeLoader(samples(), batch_size=4))

# %% [markdown]
# ### A shard has another number of samples
#
# **Cause:** the shard was written again after its samples were counted, or `samples_per_shard` is
# wrong. **Do:** make the index again.

# %%
with raises(wp.ShardError):
    list(wp.PipeLoader(samples(samples_per_shard=21), batch_size=4, epoch_end="drop"))

# %% [markdown]
# ## A worker
#
# ### A worker died
#
# **Cause:** usually too little memory: the system kills the worker. **Do:** use fewer workers or a
# smaller `shuffle_buffer`, and put it before `decode_by_ext`; in a container, increase `/dev/shm`.
# The state is still good.


# %%
def die(sample):
    if torch.utils.data.get_worker_info() is not None and sample["__key__"] == "00000061":
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


loader = wp.PipeLoader(samples().map_samples(die), batch_size=4, num_workers=1, multiprocessing_context="fork")
with raises(wp.WorkerError):
    for _ in loader:
        pass
state = loader.state_dict()
print(wp.describe_state(state))

# %% [markdown]
# ### An error in your function
#
# The error is raised in the main process as it was raised in the worker, with a note that names the
# sample, and one with the worker's traceback. The state is that before the failed batch: correct
# the function, load the state, and continue.


# %%
def broken(sample):
    return json.loads(sample["txt"])


try:
    list(samples().map_samples(broken))
except json.JSONDecodeError as error:
    print(error, "-", *error.__notes__)
else:
    raise AssertionError

# %% [markdown]
# ### "Can't pickle" a function
#
# **Cause:** the pipe is pickled for workers that are not forked (macOS, Windows, Python 3.14 and
# newer), and pickle finds functions by their names in modules. **Do:** define functions at the top
# level of a module, not as `lambda` or in a notebook; or use `multiprocessing_context="fork"` on
# Linux.
#
# ## It is slow
#
# `wds-pipes doctor train:make_loader` runs the loader that your function returns, as it is and with a
# clock after each step. It says what limits it, what to change, and what that brings. In Python:


# %%
def look_up(sample):
    time.sleep(0.002)  # a request to another machine
    return sample


slow = wp.PipeLoader(samples().map_samples(look_up), batch_size=4, collate="list")
found = tools.doctor(slow, seconds=0.5)  # measure longer than this example does
print(*found.sentences, sep="\n")
assert (found.limit, found.step) == ("function", "map_samples(look_up)")
print({part: round(microseconds) for part, microseconds in found.microseconds.items()})

# %% [markdown]
# In the training, look at `loader.stats()` after a few hundred batches; `04_ranks_and_elastic_resume` has a plot of
# it. On several ranks, `wp.describe_stats(loader.stats_of_ranks())` names the one that waits most, and
# `wds-pipes doctor --stats FILE`, with these stats as JSON, says what to compare on it.
#
# | symptom | cause | what to do |
# |---|---|---|
# | `wait_share` near 0 | the model takes most of the time | nothing: reading is fast enough |
# | `wait_share` high, `decode_share` high | decoding and augmentation | more workers; smaller images in the shards; `rgb8` and floats on the GPU |
# | `wait_share` high, `stall_share` high | the network | `05_s3_gcs_http`: `connections`, `readahead_bytes`, a cache |
# | `wait_share` high, `read_share` high, `stall_share` low | tiny samples, or a slow disk | put several values into one field; make a local copy |
# | a resume takes long | a large shuffle buffer is filled again; compressed shards are read again from their start | a smaller buffer; uncompressed tars |
# | `lane_imbalance` grows | some lanes have fewer or larger shards | an index, so that samples are partitioned instead of shards |
#
# ## What to read next
#
# - `05_s3_gcs_http` lists the errors of stores.
# - Errors have attributes with the facts (`.url`, `.key`, `.offset`, `.field`):
#   `help(wds_pipes.errors)`.
