# %% [markdown]
# # Resume after a crash
#
# **You learn** what a state is, what belongs in a checkpoint, and that a killed training continues
# exactly: with the same samples and the same losses, bit for bit.
#
# **You need** `pip install 'wds_pipes[demo]'` (the extra installs matplotlib, for one plot).

# %%
import json
import os
import signal
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw

import wds_pipes as wp

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there

# %% [markdown]
# ## Data: discs, squares and triangles

# %%
rng = np.random.default_rng(0)
os.mkdir("shards")
with wp.ShardWriter("shards/train-%06d.tar", max_samples=100) as writer:
    for number in range(480):
        image = Image.fromarray(rng.integers(0, 60, (32, 32, 3), np.uint8))
        x, y, size = (int(value) for value in rng.integers((12, 12, 6), (20, 20, 11)))
        pencil, color = ImageDraw.Draw(image), tuple(int(value) for value in rng.integers(100, 256, 3))
        if number % 3 == 0:
            pencil.ellipse((x - size, y - size, x + size, y + size), fill=color)
        else:
            pencil.regular_polygon((x, y, size + 2), 4 if number % 3 == 1 else 3, fill=color)
        writer.write({"__key__": f"{number:06d}", "jpg": np.asarray(image), "cls": number % 3})

# %% [markdown]
# ## A state
#
# `state_dict()` returns the position of a pipe. With `load_state_dict()`, another pipe that is
# built in the same way continues from there. The state is the position after the last batch that
# you received; what was read ahead does not count.


# %%
def make_pipe(seed=7, batch_size=16):
    pipe = wp.ShardList("shards/*.tar", shuffle=True, seed=seed).open_shards().load_tar().group_by_key()
    return pipe.shuffle_buffer(100).decode_by_ext("rgb8").to_tuple("__key__", "jpg", "cls").batch_samples(batch_size)


pipe = make_pipe()
given = []
for keys, _, _ in pipe:
    given.append(keys)
    if len(given) == 9:
        state = pipe.state_dict()  # the position after this batch
rest = given[9:]

resumed = make_pipe()  # in practice, in another process
resumed.load_state_dict(json.loads(json.dumps(state)))  # plain JSON types: any format can hold it
assert [keys for keys, _, _ in resumed] == rest
print(f"{len(rest)} batches after the cut are the same; the state has {len(json.dumps(state))} bytes")

# %% [markdown]
# The state is small although the shuffle buffer holds 100 images, because a state contains no
# samples. The order is a function of the seed, the epoch and the place in the epoch, so a resume
# reads samples again to fill the buffer; `help(pipe.shuffle_buffer)` says how many at most.
# `describe_state` shows a state in words:

# %%
print(wp.describe_state(state))

# %% [markdown]
# Everything that decides the order must be the same when you resume: the shards, the seed, the
# steps. The shards may be at another place: a state also fits a copy with the same names on a job's
# own disk or in a store, and a line in the log reports it. For renamed shards, call
# `load_state_dict(state, moved=True)`. You may change the batch size:

# %%
smaller = make_pipe(batch_size=4)
smaller.load_state_dict(state)
assert [key for keys, _, _ in smaller for key in keys] == [key for keys in rest for key in keys]

# %% [markdown]
# A state that does not fit is refused, and the error says what differs. Nothing ever starts again
# silently.

# %%
try:
    make_pipe(seed=8).load_state_dict(state)
except wp.StateError as error:
    print(error)
else:
    raise AssertionError

# %% [markdown]
# ## A training that can be killed
#
# To resume exactly, a training must save everything that the next step depends on: the model, the
# optimizer (and the learning-rate schedule), the state of the random generator that dropout draws
# from, the number of the step, and the state of the data. Put all of it in *one* file, write that
# file under a temporary name and rename it. Then a crash leaves the old file or the new one, never
# half of one.
#
# `PipeLoader` reads with worker processes, so the program has `if __name__ == "__main__":` at its
# end: workers that are not forked (the default on macOS and Windows, and everywhere from Python
# 3.14 on) import the program. `augment` draws from its own `rng`, not from a global generator, so
# it needs no state.

# %%
TRAINING = """\
import json
import os
import sys

import torch
from torch import nn

import wds_pipes as wp


def augment(sample, rng):
    if rng.random() < 0.5:
        sample["jpg"] = sample["jpg"].flip(-1)
    return sample


def main(checkpoint_path, steps):
    torch.set_num_threads(1)  # sums of floats depend on how they are split
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 6 * 6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    pipe = wp.ShardList("shards/*.tar", shuffle=True, seed=7).open_shards().load_tar().group_by_key().shuffle_buffer(100)
    pipe = pipe.decode_by_ext("torchrgb").map_samples(augment).to_tuple("__key__", "jpg", "cls")
    loader = wp.PipeLoader(pipe, batch_size=16, num_workers=2)

    step = 0
    if os.path.exists(checkpoint_path):
        checkpoint = torch.load(checkpoint_path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
        loader.load_state_dict(checkpoint["data"])
        step = checkpoint["step"]

    while step < steps:
        for keys, images, labels in loader:  # each loop is an epoch, or the rest of one
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
                checkpoint |= {"step": step, "data": loader.state_dict()}
                torch.save(checkpoint, checkpoint_path + ".new")
                os.replace(checkpoint_path + ".new", checkpoint_path)
            print(json.dumps({"step": step, "loss": loss.item(), "keys": keys}), flush=True)
            if step == steps:
                break
    loader.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
"""
with open("train.py", "w") as file:
    file.write(TRAINING)

# %% [markdown]
# ## Kill it
#
# We run the program once without interruption. A second run is killed by SIGKILL (as by `kill -9`,
# or when a machine fails) after it has printed step 42, in the second epoch. Started again, it
# continues from the last checkpoint, that of step 40. (A process may have done more steps than it
# printed before it was killed, so on a busy machine the checkpoint may be that of step 50.)


# %%
def start(checkpoint):
    return subprocess.Popen(
        [sys.executable, "train.py", checkpoint, "60"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def follow(process, kill_after=None):
    """The steps that a training prints."""
    told = []
    for line in process.stdout:
        told.append(json.loads(line))
        if told[-1]["step"] == kill_after:
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
            break
    process.stdout.close()
    assert process.wait() == (0 if kill_after is None else -signal.SIGKILL)
    return told


whole, killed = start("whole.pt"), start("killed.pt")  # side by side
killed = follow(killed, kill_after=42)
whole = follow(whole)
resumed = follow(start("killed.pt"))
last = resumed[0]["step"] - 1
print("killed after step", killed[-1]["step"], "- resumed from the checkpoint of step", last)

# %% [markdown]
# ## Compare
#
# The runs are equal: each batch has the same samples in the same order, and each loss is exactly
# the same number.

# %%
assert killed == whole[:42]
assert last >= 40
assert resumed == whole[last:]
print(len(resumed), "steps after the crash: all keys and all losses are equal")

# %%
figure, axis = plt.subplots(figsize=(9, 4))
for run, style, label in (
    (whole, {"linewidth": 6, "color": "0.8"}, "uninterrupted"),
    (killed, {"color": "C3"}, "killed"),
    (resumed, {"color": "C0"}, "resumed"),
):
    axis.plot([told["step"] for told in run], [told["loss"] for told in run], label=label, **style)
axis.plot(42, killed[-1]["loss"], "x", color="C3", markersize=12, markeredgewidth=3)
axis.axvline(last, color="0.5", linestyle=":")
axis.annotate("checkpoint", (last, axis.get_ylim()[1] * 0.95), xytext=(4, 0), textcoords="offset points", color="0.4")
axis.set(xlabel="step", ylabel="loss", title=f"SIGKILL after step 42, resumed from the checkpoint of step {last}")
axis.legend()
plt.show()

# %% [markdown]
# ## Things to know
#
# - **Take the state after the model has been trained on the batch**, as above. A state taken after
#   the last batch of an epoch is the beginning of the next epoch.
# - **After an exception, the state is that of the item before**: `state_dict()` is still correct in
#   `except` and `finally`, and also in a signal handler.
# - A GPU may add numbers in another order in each run, unless
#   `torch.use_deterministic_algorithms(True)` is set. The samples are the same in any case, but the
#   losses agree only to some digits.
#
# ## What to read next
#
# - `04_ranks_and_elastic_resume`: several ranks and workers, and resuming on another number of
#   both.
# - `07_imagenet_resnet`: a training script to copy, which also saves a checkpoint when the cluster
#   stops the job.
