# %% [markdown]
# # Clusters: Slurm and Ray
#
# **You learn** how to run a command of `wds-pipes` on many machines: as an array of Slurm jobs, or
# on a Ray cluster; how to read shards with Ray Data, and how to decode on other machines than the
# one that trains, with an exact resume.
#
# **You need** `pip install 'wds_pipes[ray]'`. The first half needs neither `[ray]` nor Slurm: a loop
# plays it here.

# %%
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there


def command(*arguments, fails=False):
    """Run a command of wds-pipes, as a terminal or a job script would."""
    done = subprocess.run([sys.executable, "-m", "wds_pipes", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stderr
    print((done.stderr if fails else done.stdout).strip())


# %% [markdown]
# All machines see the same files: on a disk that they share, or in a store (`s3://`, `gs://`, ...).

# %%
numbers = random.Random(0)
for number in range(240):
    path = Path("photos", f"{number:04d}.bin")  # photos would be .jpg
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(numbers.randbytes(numbers.randrange(1000, 5000)))
    path.with_suffix(".cls").write_text(str(number))

# %% [markdown]
# ## Slurm: each job does a share
#
# A command that writes shards is a list of tasks, and the names of what they write are known
# beforehand. `--dry-run` shows them. `--task 0 --tasks 4` is the first of four shares.

# %%
options = ["--max-samples", "40", "--shuffle", "7"]
create = ["create", "photos", "shards", *options]
command(*create, "--dry-run")
command(*create, "--task", "0", "--tasks", "4")

# %% [markdown]
# Each element of an array runs one share. This is the whole job script, after its first line,
# `#!/bin/bash`:
#
# ```sh
# #SBATCH --array=0-3
# #SBATCH --cpus-per-task=4
# #SBATCH --requeue
# wds-pipes create photos shards --max-samples 40 --shuffle 7 \
#     --task $SLURM_ARRAY_TASK_ID --tasks 4 -j $SLURM_CPUS_PER_TASK
# ```
#
# Elements run at any time, in any order, and several at once. What is finished is skipped, so an
# element may be submitted again. When Slurm ends a job (SIGTERM, then SIGKILL), what was being
# written is discarded; nothing incomplete has a final name. Here element 2 never ran:

# %%
for element in (3, 1, 0):
    command(*create, "--task", str(element), "--tasks", "4")
print(sorted(os.listdir("shards")))

# %% [markdown]
# Some shards are left, so there is no `index.json` yet. The element that finds all others finished
# writes it, whichever it is. Without `--task`, the command finishes what is left, and says so if
# nothing is:

# %%
command(*create, "--task", "2", "--tasks", "4")
assert "index.json" in os.listdir("shards")
command(*create)

# %% [markdown]
# With other options, the directory is refused: it belongs to one job.

# %%
command("create", "photos", "shards", "--max-samples", "20", fails=True)

# %% [markdown]
# Which process writes a shard does not change it. One process makes the same data set:


# %%
def digest(folder):
    files = [path for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


command("create", "photos", "again", *options)
assert digest("again") == digest("shards")
print(len(digest("shards")), "files with the same SHA-256")

# %% [markdown]
# `verify` reads all shards. Its exit code is 1 if something is wrong, so a job can stop there. A job
# that depends on the array starts when all its elements have ended well:
#
# ```sh
# made=$(sbatch --parsable create.sh)
# sbatch --dependency=afterok:$made verify.sh
# ```
#
# Kubernetes has the same in an indexed job: `--task $JOB_COMPLETION_INDEX --tasks 4`.
#
# ## Ray: the cluster shares the tasks
#
# Here this machine is the cluster, and plays one with four CPUs. On a real one, call
# `ray.init("auto")` on one of its machines, or submit the program with `ray job submit`.

# %%
import glob
import logging
import time
import warnings
from collections import deque

warnings.filterwarnings("ignore", "IProgress not found")  # Ray Data's bars, in a notebook without ipywidgets

import ray
from ray.exceptions import ObjectLostError, RayActorError

import wds_pipes as wp

quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
cluster = ray.init(address="local", num_cpus=4, object_store_memory=200 << 20, **quiet)

# %% [markdown]
# `--engine ray` runs the tasks of a command on the cluster of `RAY_ADDRESS`; without this variable it
# starts one on this machine. If the process of a task is killed, or its machine is lost, the task is
# tried again. The bytes are the same again:

# %%
os.environ["RAY_ADDRESS"] = cluster.address_info["gcs_address"]
command("create", "photos", "on_ray", *options, "--engine", "ray")
assert digest("on_ray") == digest("shards")
command("verify", "on_ray", "--engine", "ray")

# %% [markdown]
# ## Ray Data
#
# A pipe in `flat_map` makes rows of whole samples, decoded as `decode_by_ext` does.

# %%
ray.data.DataContext.get_current().enable_progress_bars = False
logging.getLogger("ray.data").setLevel("ERROR")


def samples_of(row):
    return list(wp.ShardList([row["item"]]).open_shards().load_tar().group_by_key(fields=["cls"]).decode_by_ext())


shards = sorted(glob.glob(f"{os.getcwd()}/shards/*.tar"))
data = ray.data.from_items(shards, override_num_blocks=len(shards)).flat_map(samples_of)  # a task for each shard
print(data.count(), "rows;", data.schema().names)
sums = data.map_batches(lambda batch: {"sum": [int(batch["cls"].sum())]}, batch_size=40)
assert sum(row["sum"] for row in sums.take_all()) == sum(range(240))

# %% [markdown]
# Ray Data has no exact resume. For training, use a `PipeLoader`.
#
# ## Decode on other machines
#
# If a machine has too few CPUs for its GPUs, others can decode. Each decoder is an actor of Ray with
# the `PipeLoader` of one rank: of three decoders, decoder 1 is rank 1 of 3, and hosts its lanes of
# the epoch. With each batch it returns the position after it.

# %%
INDEX = f"{os.getcwd()}/shards/index.json"


def make_loader(rank=0, ranks=1, **options):
    pipe = wp.ShardList(INDEX, shuffle=True, seed=7).open_shards().load_tar().group_by_key().shuffle_buffer(30)
    pipe = pipe.decode_by_ext().to_tuple("__key__", "cls")
    return wp.PipeLoader(pipe, batch_size=10, lanes=6, rank=rank, world_size=ranks, epoch_end="drop", **options)


@ray.remote(num_cpus=1, max_restarts=-1)  # Ray starts it again, where it can
class Decoder:
    def __init__(self):
        self.loader = None

    def begin(self, rank, ranks, state, epoch):
        self.loader = make_loader(rank, ranks)
        if state is not None:
            self.loader.load_state_dict(state)
        left = self.loader.state_dict()["epoch"] == epoch  # else it has taken its last batch of this epoch
        self.batches = iter(self.loader if left else ())

    def next(self):
        if self.loader is None:  # it was started again, and knows nothing
            return None
        return next(self.batches, None), self.loader.state_dict()


# %% [markdown]
# The trainer takes one batch from each decoder in turn, and keeps the position that came with it.
# `ahead` batches of each decoder are on their way meanwhile, in Ray's object store; they do not count
# before the trainer has taken them. If a decoder is lost, the one that Ray starts instead begins at
# its last position. A batch counts only if its decoder has begun where it had to.


# %%
class Feed:
    """The batches of an epoch, or of what is left of it, from decoders."""

    def __init__(self, decoders, states=None, turn=0, epoch=0, ahead=2):
        self.decoders, self.ahead = decoders, ahead
        self.states, self.turn, self.epoch = states or [None] * len(decoders), turn, epoch

    def begin(self, rank):
        decoder = self.decoders[rank]
        self.begun[rank] = decoder.begin.remote(rank, len(self.decoders), self.states[rank], self.epoch)
        self.coming[rank] = deque(decoder.next.remote() for _ in range(self.ahead))

    def take(self, rank):
        tried_until = time.monotonic() + 600  # so long may Ray take to start another decoder
        while True:
            try:
                _, found = ray.get([self.begun[rank], self.coming[rank].popleft()])
                if found is not None:
                    return found
            except (RayActorError, ObjectLostError):  # the process or the machine is gone
                if time.monotonic() > tried_until:
                    raise
                time.sleep(0.1)
            self.begin(rank)

    def __iter__(self):
        self.begun, self.coming, ended = {}, {}, 0
        for rank in range(len(self.decoders)):
            self.begin(rank)
        while ended < len(self.decoders):
            rank = self.turn
            batch, self.states[rank] = self.take(rank)
            self.turn = (rank + 1) % len(self.decoders)
            if batch is None:
                ended += 1  # the others have ended, too
                continue
            self.coming[rank].append(self.decoders[rank].next.remote())
            yield batch
        self.epoch += 1

    def state_dict(self):
        return {"states": list(self.states), "turn": self.turn, "epoch": self.epoch}


# %% [markdown]
# The batches are those of one process with the same lanes, in the same order:

# %%
alone = [list(keys) for keys, _ in make_loader()]
decoders = [Decoder.remote() for _ in range(3)]
assert [list(keys) for keys, _ in Feed(decoders)] == alone
print(len(alone), "batches")

# %% [markdown]
# Now a decoder is killed in the middle, and the trainer stops after some batches more. The epoch
# continues from the checkpoint:

# %%
feed, seen = Feed(decoders), []
for keys, _ in feed:
    seen.append(list(keys))
    if len(seen) == 5:
        ray.kill(decoders[2], no_restart=False)
    if len(seen) == 13:
        break
checkpoint = feed.state_dict()
seen += [list(keys) for keys, _ in Feed(decoders, **checkpoint)]
assert seen == alone

# %% [markdown]
# The states are those of a `PipeLoader`, so they also fit another number of decoders. It changes at
# the end of a round, where each of the six lanes has given the same number of batches:

# %%
feed, seen = Feed(decoders), []
for keys, _ in feed:
    seen.append(list(keys))
    if len(seen) == 12:
        break
merged = wp.merge_states(feed.states)
for decoder in decoders:
    ray.kill(decoder)
pair = [Decoder.remote() for _ in range(2)]
seen += [list(keys) for keys, _ in Feed(pair, [merged] * 2, epoch=feed.epoch)]
assert seen == alone

# %% [markdown]
# It also fits no decoders at all: `make_loader()` on the training machine loads it.
#
# - **Several trainers**: with 2 trainers of 3 decoders each, decoder `d` of trainer `t` is rank
#   `3 * t + d` of 6. Save the states of all of them at the same step.
# - **Workers**: a decoder on a machine with many CPUs takes `num_workers=8`, and
#   `@ray.remote(num_cpus=9)`.
# - **`epoch_end`**: `"drop"`, `"pad"` and `"loop"` give all decoders the same number of batches, which
#   the turns need.
# - **GPU**: the trainer moves what it gets. Arrays come from Ray's object store without a copy, and
#   are then read-only; `torch.as_tensor(array.copy())` makes a tensor that can be written.

# %%
ray.shutdown()

# %% [markdown]
# ## What to read next
#
# - `04_ranks_and_elastic_resume` explains lanes, ranks, and what a state fits.
# - [Writing data sets](docs/reference/writing): shares, engines and tasks of your own programs.
