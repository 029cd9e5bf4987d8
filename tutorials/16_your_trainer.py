# %% [markdown]
# # Your trainer
#
# **You learn** how a `PipeLoader` is given to DDP and FSDP, Hugging Face's Trainer and Accelerate,
# TorchTitan, Megatron, torchft and Ray Train, and where each saves the state of the data, so that a
# run that is killed continues with the next batch.
#
# **You need** `pip install 'wds_pipes[transformers]'`. The recipes for TorchTitan, Megatron,
# torchft and Ray Train are shown as text. They are tested with these libraries; that for
# Megatron with Megatron-Core, of which the training loop is no part.
#
# In all of them:
#
# - Each data-parallel rank has a `PipeLoader` of its own, which finds its rank itself, or gets
#   `rank=` and `world_size=`. Do not let the trainer wrap or divide it again.
# - For training by steps use `epoch_end="loop"`: the stream has no end, all batches are full, and
#   all ranks have as many, whatever the steps do and whether samples are counted or not.
# - The loader has a state after each batch that it returned. Save it where the model is saved.

# %%
import os
import tempfile
import warnings

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
warnings.filterwarnings("ignore", "IProgress not found")  # tqdm looks for its notebook widget
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of torch.distributed.checkpoint, on one rank

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.testing import make_shards

make_shards("shards", shards=6, samples=8, fields=("npy", "txt"))


def make_loader(epoch_end="loop", **options):
    pipe = wp.ShardList("shards/*.tar", shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    pipe = pipe.filter_samples(is_kept).shuffle_buffer(10).decode_by_ext()
    return wp.PipeLoader(pipe, batch_size=4, epoch_end=epoch_end, **options)


def is_kept(sample):  # so the number of samples is not known
    return not sample["__key__"].endswith("7")


def first_keys(count):
    """The batches of a run that is not interrupted."""
    return [batch["__key__"] for _, batch in zip(range(count), make_loader())]


# %% [markdown]
# ## DDP and FSDP: `torch.distributed.checkpoint`
#
# Pass `checkpoint.DCPState(loader)`, not the loader. It holds the states of all ranks as one string
# under one key, which any number of ranks can load, and works with `dcp.async_save`. (Of the loader
# itself, torch refuses to save the state: `duplicated flatten key data.use DCPState.`.)
# For FSDP, get the states of model and optimizer with `torch.distributed.checkpoint.state_dict`, as
# always. Without DCP, `checkpoint.save` of `04_ranks_and_elastic_resume` writes a file for each
# rank.


# %%
def train(directory, until):
    """Train up to a step, from the newest checkpoint in ``directory``; the keys of the batches."""
    loader, model = make_loader(), torch.nn.Linear(3, 1)
    state = {"model": model.state_dict(), "data": checkpoint.DCPState(loader), "step": torch.zeros(1)}
    if saved := sorted(os.listdir(directory)):
        dcp.load(state, checkpoint_id=f"{directory}/{saved[-1]}")
    seen, batches, saving = [], iter(loader), None
    while state["step"] < until:
        batch = next(batches)
        seen.append(batch["__key__"])  # and train the model
        state["step"] += 1
        if state["step"] % 3 == 0:
            if saving is not None:
                saving.result()  # the last one is written
            name = f"{directory}/step-{int(state['step']):06d}"
            group = {} if dist.is_initialized() else {"no_dist": True}
            saving = dcp.async_save(state, checkpoint_id=name, **group)
    if saving is not None:
        saving.result()
    return seen


# %% [markdown]
# ## Hugging Face's Trainer
#
# `PipeTrainer` takes a `PipeLoader` for `train_dataset` and `eval_dataset`, saves its position with
# the model, and resumes both, also with accumulated gradients and on several ranks. The loader makes
# the batches, so the batch sizes, workers and collators of `TrainingArguments` do not apply. Fields
# that the model does not take are left out, unless you pass `remove_unused_columns=False`.
#
# The Trainer itself resumes by skipping batches, and numbers epochs by the length of the data. If
# that is not known, a pipe or `pipe.as_dataset()` continues at another place after the first epoch,
# with a warning.

# %%
from transformers import TrainerCallback, TrainingArguments

from wds_pipes.huggingface import PipeTrainer, newest_checkpoint

# %% [markdown]
# With `epoch_end="loop"` the length of an epoch is not known: pass `max_steps`. With other ways to
# end, the Trainer begins the next epoch by itself. For evaluation on several ranks, pass a loader
# with `epoch_end="pad"`: the repeated samples are in no metric, prediction or loss.


# %%
class Model(torch.nn.Module):
    """Notes what it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(3, 1), []

    def forward(self, npy, **others):
        self.seen.append(others["__key__"])
        return {"loss": self.layer(npy.float()).mean()}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **rest):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def train_with_trainer(directory, stop=None, **options):
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(
        directory, max_steps=30, save_steps=4, remove_unused_columns=False, dataloader_pin_memory=False, **quiet
    )
    trainer = PipeTrainer(Model(), arguments, train_dataset=make_loader(**options), callbacks=[StopAt(stop)])
    trainer.train(newest_checkpoint(directory))
    return trainer.model.seen


# %% [markdown]
# ## Accelerate
#
# `accelerator.prepare(loader)` divides a stream that is divided already; and of batches with texts,
# it raises `Can only concatenate tensors but got <class 'str'>`, since it reads on rank 0 for all
# ranks. Prepare the model and the optimizer only, move the tensors of a batch with `send_to_device`,
# which leaves texts alone, and register `checkpoint.AllRanks(loader)`, which speaks for all ranks:

# %%
from accelerate import Accelerator
from accelerate.utils import send_to_device


def train_with_accelerate(directory, until):
    accelerator, loader, model = Accelerator(cpu=True), make_loader(), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(checkpoint.AllRanks(loader))
    if os.path.exists(directory):
        accelerator.load_state(directory)
    seen, batches = [], iter(loader)
    while loader.state_dict()["step"] < until:
        batch = send_to_device(next(batches), accelerator.device)
        seen.append(batch["__key__"])
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if loader.state_dict()["step"] % 4 == 0:
            accelerator.save_state(directory)
    return seen


# %% [markdown]
# Each is stopped after its first and after its second checkpoint, and then goes on from there:

# %%
os.makedirs("dcp")
for name, run, every in (
    ("dcp", train, 3),
    ("trainer", train_with_trainer, 4),
    ("accelerate", train_with_accelerate, 4),
):
    for stop, begin in ((every + 2, 0), (2 * every + 1, every), (20, 2 * every)):
        assert run(name, stop) == first_keys(20)[begin:stop], name
    print(name, "resumed twice: each time with the batch after its last checkpoint")

# %% [markdown]
# ## TorchTitan
#
# Its trainer builds a `BaseDataLoader`, and saves it with `torch.distributed.checkpoint`. Point
# `Config` of your model's configuration at this class. Unlike TorchTitan's own loader, it continues
# on another data-parallel degree. `make_pipe` is your pipeline of samples, each a tensor of
# `seq_len + 1` tokens.
#
# ```python
# from dataclasses import dataclass
#
# from torchtitan.components.dataloader import BaseDataLoader
#
# import wds_pipes as wp
# from wds_pipes.checkpoint import DCPState
#
#
# class PipeDataLoader(BaseDataLoader):
#     @dataclass(kw_only=True, slots=True)
#     class Config(BaseDataLoader.Config):
#         num_workers: int = 0
#
#     def __init__(self, config, *, dp_rank, dp_world_size, local_batch_size, seq_len, tokenizer=None, **others):
#         self.loader = wp.PipeLoader(
#             make_pipe(config.dataset_path, tokenizer, seq_len),
#             batch_size=local_batch_size,
#             num_workers=config.num_workers,
#             epoch_end="loop",
#             rank=dp_rank,
#             world_size=dp_world_size,
#         )
#         self.data = DCPState(self.loader)
#
#     def __iter__(self):
#         for tokens in self.loader:
#             yield {"input": tokens[:, :-1]}, tokens[:, 1:]
#
#     def state_dict(self):
#         return self.data.state_dict()
#
#     def load_state_dict(self, state):
#         self.data.load_state_dict(state)
# ```
#
# ## Megatron-LM and Megatron-Bridge
#
# With `--dataloader-type external`, the datasets provider returns the iterable itself, and with
# `--dataloader-save DIRECTORY` Megatron calls its `save_state()` on the first tensor- and
# pipeline-parallel rank of each data-parallel rank, and writes
# `DIRECTORY/iter_.../train_dataloader_dprank000.pt`, and so on. Megatron does not read these files;
# read all of them on each rank, then the number of ranks may change:
#
# ```python
# import itertools
# from pathlib import Path
#
# import torch
#
# import wds_pipes as wp
#
#
# class MegatronLoader:
#     def __init__(self, loader, directory=None, iteration=0):
#         """``iteration``: that of the loaded checkpoint; 0: a new run."""
#         self.loader, self.batches = loader, None
#         if iteration:
#             folder = Path(directory, f"iter_{iteration:07d}")
#             files = sorted(folder.rglob("train_dataloader_dprank*.pt"))
#             loader.load_state_dict([torch.load(file)["dataloader_state_dict"] for file in files])
#
#     def __iter__(self):
#         return self
#
#     def __next__(self):
#         self.batches = self.batches or iter(self.loader)
#         return next(self.batches)
#
#     def save_state(self):
#         return self.loader.state_dict()
#
#
# def train_valid_test_datasets_provider(mpu, args):
#     loader = wp.PipeLoader(
#         make_pipe(),
#         batch_size=args.micro_batch_size,
#         num_workers=args.num_workers,
#         epoch_end="loop",
#         rank=mpu.get_data_parallel_rank(),
#         world_size=mpu.get_data_parallel_world_size(),
#     )
#     return MegatronLoader(loader, args.dataloader_save, args.iteration), None, None
# ```
#
# ## torchft
#
# Each replica group is one rank of the loader, and saves its own position after each committed step;
# it never takes that of another replica. A replica that is killed between a commit and its save
# comes back one batch behind, and a step that was not committed has to be trained again. So the
# replicas count together how many batches of each were trained; the counts are part of the state
# that torchft sends to a replica that comes back.
#
# ```python
# import json
# import os
# from pathlib import Path
#
# import torch
#
#
# class ReplicaData:
#     """The batches of one replica, each trained once whatever fails."""
#
#     def __init__(self, loader, path):
#         self.loader, self.path, self.batches = loader, path, None
#         self.trained = torch.zeros(loader.rank.of, dtype=torch.int64)  # batches, of each replica
#         self.taken, self.batch = 0, None
#         if os.path.exists(path):
#             saved = json.loads(Path(path).read_text())
#             self.taken = saved["taken"]
#             self.trained = torch.tensor(saved["trained"])
#             loader.load_state_dict(saved["data"])
#
#     def state_dict(self):  # of all replicas: for Manager(state_dict=..., load_state_dict=...)
#         return {"trained": self.trained.clone()}
#
#     def load_state_dict(self, state):
#         self.trained = state["trained"].clone()
#
#     def next(self):
#         """The batch to train: the same again until it is committed."""
#         self.batches = self.batches or iter(self.loader)
#         while self.batch is None or self.taken <= self.trained[self.loader.rank.number]:
#             self.batch, self.taken = next(self.batches), self.taken + 1
#         return self.batch
#
#     def took_part(self, manager):
#         """Call it beside the gradients' allreduce, on every replica."""
#         self.part = torch.zeros(self.loader.rank.of)
#         self.part[self.loader.rank.number] = 1.0
#         manager.allreduce(self.part).wait()
#
#     def committed(self):
#         """Call it when should_commit() was true."""
#         self.trained += self.part > 0
#         saved = {"taken": self.taken, "trained": self.trained.tolist(), "data": self.loader.state_dict()}
#         Path(f"{self.path}.new").write_text(json.dumps(saved))
#         os.replace(f"{self.path}.new", self.path)
# ```
#
# ## Ray Train
#
# `pip install "ray[train]"`. The workers of a `TorchTrainer` are ranks of torch.distributed, which
# `PipeLoader` finds. Each reports a directory, and Ray merges those of all ranks into one checkpoint.
# With `RunConfig(failure_config=FailureConfig(max_failures=3))`, Ray starts all workers again if one
# fails. It takes note of reports every two seconds: if a worker fails sooner than that after a
# report, they continue from the checkpoint before. (`14_clusters` decodes on other machines.)
#
# ```python
# import os
# import tempfile
#
# import ray.train
#
# import wds_pipes as wp
# from wds_pipes import checkpoint
#
#
# def train_func(config):
#     loader, step = wp.PipeLoader(make_pipe(), batch_size=config["batch_size"], epoch_end="loop"), 0
#     if (saved := ray.train.get_checkpoint()) is not None:
#         with saved.as_directory() as directory:
#             step = checkpoint.load(f"{directory}/data", loader)  # and the model
#     for batch in loader:
#         train(batch)
#         step += 1
#         if step % config["every"] == 0:
#             with tempfile.TemporaryDirectory() as directory:
#                 os.makedirs(f"{directory}/data")
#                 checkpoint.save(f"{directory}/data", loader, step=step)  # and, on rank 0, the model
#                 ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory))
#         if step == config["steps"]:
#             break
# ```
#
# ## From `StatefulDataLoader`
#
# A PipeLoader does not read the states of another loader. Let `StatefulDataLoader` finish the epoch,
# then start a PipeLoader at the next one, and save its states from there on:

# %%
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 calls it
pipe = wp.ShardList("shards/*.tar", shuffle=True, seed=3).open_shards().load_tar().group_by_key()
old = StatefulDataLoader(pipe.as_dataset(), batch_size=8, collate_fn=list)
print(sum(map(len, old)), "samples of epoch 0")  # after old.load_state_dict(): its rest
loader = wp.PipeLoader(pipe, batch_size=8, lanes=3)
loader.set_epoch(1)
print(sum(len(batch["__key__"]) for batch in loader), "samples of epoch 1")

# %% [markdown]
# ## What to read next
#
# - `06_lightning`: Lightning.
# - `04_ranks_and_elastic_resume`: lanes, ranks, and checkpoints of all ranks.
# - `14_clusters`: Slurm and Ray.
