# %% [markdown]
# # On a Ray cluster
#
# **You learn** how to run the commands of `wds-pipes` on a Ray cluster, how to read shards with Ray
# Data, and how to decode on other machines than the one that trains, with an exact resume.
#
# **You need** `pip install 'wds_pipes[ray]'`, the same on all machines of the cluster.

# %%
import glob
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque

warnings.filterwarnings("ignore", "IProgress not found")  # Ray Data's bars, in a notebook without ipywidgets

import ray
from ray.exceptions import ObjectLostError, RayActorError

import wds_pipes as wp
from wds_pipes.testing import make_shards

HERE = tempfile.mkdtemp()  # this tutorial writes its files there
os.chdir(HERE)
make_shards("shards", shards=6, samples=40)

# %% [markdown]
# Here this machine is the cluster, and plays one with four CPUs. On a real one, call
# `ray.init("auto")` on one of its machines, or submit the program with `ray job submit`. All
# machines read the same files: on a disk that they share, or in a store.

# %%
quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
cluster = ray.init(address="local", num_cpus=4, object_store_memory=200 << 20, **quiet)

# %% [markdown]
# ## Commands
#
# `--engine ray` runs the tasks of a command on the cluster of `RAY_ADDRESS`; without this variable it
# starts one on this machine. The bytes are those of one process. If the process of a task is
# killed, or its machine is lost, the task is tried again; what is finished is skipped when you run
# the command again.

# %%
os.environ["RAY_ADDRESS"] = cluster.address_info["gcs_address"]


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "wds_pipes", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())


command("index", "shards/*.tar", "-o", "shards/index.json", "--offsets", "--engine", "ray")
command("verify", "shards", "--engine", "ray")

# %% [markdown]
# `create` and the other commands that write shards take it, too. From Python:
# `wds_pipes.tasks.run(job, engine=wds_pipes.tasks.on_ray)`.
#
# ## Ray Data
#
# A pipe in `flat_map` makes rows of whole samples, decoded as `decode_by_ext` does. A shard whose
# samples are in pieces is an error, and never rows with parts of samples.

# %%
ray.data.DataContext.get_current().enable_progress_bars = False
logging.getLogger("ray.data").setLevel("ERROR")


def samples_of(row):
    pipe = wp.ShardList([row["item"]]).open_shards().load_tar().group_by_key(fields=["cls", "txt"]).decode_by_ext()
    return list(pipe)


shards = sorted(glob.glob(f"{HERE}/shards/*.tar"))
data = ray.data.from_items(shards, override_num_blocks=len(shards)).flat_map(samples_of)  # a task for each shard
print(data.count(), "rows;", data.schema().names)
sums = data.map_batches(lambda batch: {"sum": [int(batch["cls"].sum())]}, batch_size=40)
total = sum(row["sum"] for row in sums.take_all())
assert total == sum(sample["cls"] for sample in wp.IndexedShards("shards/*.tar", decode=True))

# %% [markdown]
# Ray Data has no exact resume. For training, use a `PipeLoader`.
#
# ## Decode on other machines
#
# If a machine has too few CPUs for its GPUs, others can decode. Each decoder is an actor of Ray with
# the `PipeLoader` of one rank: of three decoders, decoder 1 is rank 1 of 3, and hosts its lanes of
# the epoch. With each batch it returns the position after it.


# %%
def make_loader(rank=0, ranks=1, **options):
    pipe = (
        wp.ShardList(f"{HERE}/shards/index.json", shuffle=True, seed=7)
        .open_shards()
        .load_tar()
        .group_by_key()
        .shuffle_buffer(30)
        .decode_by_ext()
        .to_tuple("__key__", "cls")
    )
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
# - `14_slurm_arrays` does the same without Ray, by shares of a job.
# - `04_ranks_and_elastic_resume` explains lanes, ranks, and what a state fits.
# - [Jobs that write files](docs/reference/tasks): the engine of commands, and your own tasks.
