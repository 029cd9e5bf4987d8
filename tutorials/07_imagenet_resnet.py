# %% [markdown]
# # A ResNet on ImageNet, with resume
#
# **You learn** what a complete training script looks like, which you can copy: augmentation, DDP,
# mixed precision, checkpoints, stopping when the cluster ends the job, and resuming.
#
# **You need** `pip install 'wds_pipes[demo]'` (the extra installs matplotlib, for one plot), and
# `train_resnet.py`, which is in the same folder as this notebook.

# %%
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw

import wds_pipes as wp

script = os.path.abspath(os.path.join(os.path.dirname(globals().get("__file__", "")), "train_resnet.py"))
os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
shutil.copy(script, "train_resnet.py")

# %% [markdown]
# ## The script
#
# The script is [train_resnet.py](train_resnet.py). Its main points:
#
# - **Data**: shards of `jpg` and `cls`. Augmentation is a class whose instances are called with
#   `(sample, rng)`. It can be pickled, so it works with every start method of workers, and it draws
#   all random numbers from `rng`.
# - **Ranks**: `PipeLoader` finds its rank itself. With the index, each rank gets the same number of
#   full batches, and `len(loader)` is known; the learning-rate schedule needs it.
# - **One checkpoint file**: `checkpoint.gather(loader)` returns the state of all ranks. It is small
#   and has plain types, so it is saved in the same file as the model. Any number of ranks can load
#   it.
# - **SIGTERM**: the signal handler only sets a flag. Every few steps all ranks agree whether to
#   stop, and save a checkpoint.
# - **The epoch** comes from the loader, `loader.state_dict()["epoch"]`, so the script does not
#   count it.
#
# ## A small data set
#
# The images are red discs and blue triangles: after two seconds of training the model can tell them
# apart.

# %%
rng = np.random.default_rng(0)


def write(folder, count, **options):
    os.mkdir(folder)
    with wp.ShardWriter(f"{folder}/%06d.tar", max_samples=10, **options) as writer:
        for number in range(count):
            image = Image.fromarray(rng.integers(0, 60, (40, 56, 3), np.uint8))
            pencil, (red, green, blue) = ImageDraw.Draw(image), (int(value) for value in rng.integers(60, 160, 3))
            if number % 2:
                pencil.ellipse((8, 2, 48, 38), fill=(red + 95, green, blue))
            else:
                pencil.polygon([(8, 38), (28, 2), (48, 38)], fill=(red, green, blue + 95))
            writer.write({"__key__": f"{number:06d}", "jpg": np.asarray(image), "cls": number % 2})


write("train", 160, index="train/index.json")
write("val", 40)
sorted(os.listdir("train"))

# %% [markdown]
# ## Once without interruption, and once with SIGTERM in the middle of an epoch
#
# We train a tiny ResNet on tiny images, which takes seconds. (It uses one thread, because sums of
# floats depend on how they are divided among threads.)

# %%
options = "--train train/index.json --val val/*.tar --classes 2 --epochs 4 --batch-size 20 --workers 1 --lanes 4"
options += " --shuffle 50 --size 32 --width 8 --lr 0.05 --save-every 5 --log-every 1"
environment = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(out, *launcher):
    command = [sys.executable, *launcher, "train_resnet.py", *options.split(), "--out", out]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def follow(process, stop_after=None):
    """The lines that a training prints; SIGTERM is sent after a step."""
    told = []
    for line in process.stdout:
        told.append(json.loads(line))
        if stop_after and told[-1].get("step") == stop_after:
            process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait() == 0, process.stderr.read()
    return told


whole, stopped = start("whole"), start("stopped")  # side by side
stopped = follow(stopped, stop_after=3)
whole = follow(whole)
print(*stopped[-3:], sep="\n")
assert "stopped" in stopped[-1]

# %% [markdown]
# ## Resume
#
# We start the same command again, and also run it on two ranks, from a copy of the same checkpoint.

# %%
shutil.copytree("stopped", "two-ranks")
resumed, two_ranks = (
    start("stopped"),
    start("two-ranks", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
)
resumed, two_ranks = follow(resumed), follow(two_ranks)


def losses(told):
    return {facts["step"]: facts["loss"] for facts in told if "loss" in facts}


assert losses(stopped) | losses(resumed) == losses(whole)
assert len(losses(stopped)) + len(losses(resumed)) == len(losses(whole)) == 32
accuracies = [facts["accuracy"] for facts in whole if "accuracy" in facts]
assert [facts["accuracy"] for facts in stopped + resumed if "accuracy" in facts] == accuracies
assert accuracies[-1] > 0.8
print("all", len(losses(whole)), "losses are equal; accuracy by epoch:", accuracies)
print("two ranks went on with step", min(losses(two_ranks)), "and ended with step", max(losses(two_ranks)))
assert min(losses(two_ranks)) == min(losses(resumed))

# %%
figure, axis = plt.subplots(figsize=(9, 3.5))
for told, style, label in (
    (whole, {"linewidth": 6, "color": "0.8"}, "uninterrupted"),
    (stopped, {"color": "C3"}, "stopped by SIGTERM"),
    (resumed, {"color": "C0"}, "resumed"),
):
    axis.plot(list(losses(told)), list(losses(told).values()), label=label, **style)
axis.plot(list(losses(two_ranks)), list(losses(two_ranks).values()), "--", color="C2", label="resumed on two ranks")
axis.set(xlabel="step", ylabel="loss")
axis.legend()
plt.show()

# %% [markdown]
# Two ranks use twice as many images in each step, so they need half the steps for the rest of the
# training. The losses of that run are those of rank 0 alone. With `--lanes 4` both ranks can host
# the lanes of the checkpoint. After an odd number of batches, the lanes cannot continue as they
# are: the rest of the epoch is repartitioned, and each image comes at most once. See
# `04_ranks_and_elastic_resume`.
#
# ## For the real ImageNet
#
# - ImageNet has 1.28 million images, 110 KB each: 140 shards of 1 GB are few for 8 x 8 workers.
#   With an index that is enough; without one, make 1000 shards.
# - `torchrun --nproc-per-node 8 train_resnet.py --train s3://bucket/train/index.json ...`: see
#   `05_s3_gcs_http`.
# - Your cluster sends SIGTERM some time before SIGKILL: make sure that `--log-every` steps and a
#   save fit into that time. With SLURM: `#SBATCH --signal=TERM@120`, `--requeue`.
# - If you change the number of ranks often, set `--lanes` to a multiple of every ranks x workers
#   that you will use.
#
# ## What to read next
#
# - `11_troubleshooting`, if something does not work.
# - `06_lightning`, if you prefer not to write the loop.
