# %% [markdown]
# # Lightning
#
# **You learn** how to train on shards with Lightning's Trainer: a DataModule that resumes in the
# middle of an epoch, on any number of devices; statistics in your logger; and a mixin for a
# DataModule of your own.
#
# **You need** `pip install 'wds_pipes[lightning]'`

# %%
import csv
import logging
import os
import tempfile
import warnings

warnings.filterwarnings("ignore", "IProgress not found")  # tqdm looks for its notebook widget

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import wds_pipes as wp
from wds_pipes.lightning import ResumableData, StatsCallback, WdsDataModule
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no start-up messages
# such as the advice to use more workers than this machine has cores
warnings.filterwarnings("ignore", module="lightning.*")

index_shards(make_shards("train", shards=4, samples=50, fields=("npy", "cls")), "train/index.json")
index_shards(make_shards("val", shards=1, samples=30, fields=("npy", "cls"), seed=1), "val/index.json")
print(sorted(os.listdir("train")))

# %% [markdown]
# ## A DataModule
#
# `WdsDataModule` builds the usual pipeline from URLs: shuffled shards, a shuffle buffer, decoding,
# and the fields that you name. Its arguments are plain values, so it works with LightningCLI. With
# an index the length of an epoch is known, and all ranks get the same number of batches.


# %%
def make_data():
    return WdsDataModule(
        train="train/index.json",
        val="val/index.json",
        fields=["npy", "cls", "__key__"],
        batch_size=10,
        shuffle_buffer=50,
        seed=7,
    )


# %% [markdown]
# Any model works. This one stores the keys of the samples that it was trained on, so that we can
# compare runs.


# %%
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))
        self.trained_on = []

    def training_step(self, batch):
        values, labels, keys = batch
        self.trained_on += keys
        loss = nn.functional.cross_entropy(self.layers(values), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        values, labels, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(values), labels))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        # The length of the whole training, which Lightning computes from the length of the data.
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_trainer(folder, *callbacks):
    saving = ModelCheckpoint(
        dirpath=folder, save_last=True, every_n_train_steps=5, save_top_k=0, save_on_train_epoch_end=False
    )
    options = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 5}
    return pl.Trainer(
        max_epochs=2,
        val_check_interval=0.5,
        accelerator="cpu",
        callbacks=[saving, *callbacks],
        logger=CSVLogger("logs", name=folder, version=0),
        **options,
    )


# %% [markdown]
# ## A run without interruption, with statistics
#
# `StatsCallback` logs `loader.stats()`: samples per second, the share of time in which training
# waits for data, and so on. With `all_ranks=True` it also writes to the log which rank waits most.

# %%
pl.seed_everything(0, verbose=False)
whole = Model()
trainer = make_trainer("whole", StatsCallback(every_n_steps=10))
trainer.fit(whole, make_data())
assert len(whole.trained_on) == 2 * 200
assert len(set(whole.trained_on[:200])) == 200
assert whole.trained_on[:200] != whole.trained_on[200:]

with open("logs/whole/version_0/metrics.csv") as file:
    rows = [row for row in csv.DictReader(file) if row.get("data/samples_per_second")]
print(
    {name: value for name, value in rows[-1].items() if name in ("step", "data/samples_per_second", "data/wait_share")}
)

# %% [markdown]
# ## A crash, and `ckpt_path="last"`
#
# The training fails at step 28, in the middle of the second epoch. The last checkpoint is that of
# step 25.


# %%
class Crash(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 28:
            raise RuntimeError("the machine goes down")


pl.seed_everything(0, verbose=False)
crashed = Model()
try:
    make_trainer("crashed", Crash()).fit(crashed, make_data())
except RuntimeError as error:
    print(error)

resumed = Model()
make_trainer("crashed").fit(resumed, make_data(), ckpt_path="crashed/last.ckpt", weights_only=True)
assert crashed.trained_on[:250] + resumed.trained_on == whole.trained_on
print("after the crash:", len(resumed.trained_on), "samples, the same as without it")

# %% [markdown]
# For a plain stateful loader, Lightning does not resume exactly. It saves only the state of rank 0
# and loads it on all ranks. It drops the state if `estimated_stepping_batches` is used. And it
# saves the loader's position, which may be one batch ahead of the model. Here the **DataModule**
# saves the state of all ranks: the position after the last batch that was trained on.
#
# (The samples are the same. The losses also depend on everything else: for example, Lightning does
# not save the state of the random generator that dropout draws from.)
#
# ## On several devices, and on another number of them
#
# Only the Trainer changes: `pl.Trainer(devices=4, strategy="ddp")`. Each rank gets its part, and a
# checkpoint of four ranks can be loaded on two. The rest of the epoch is then repartitioned, and
# each sample comes at most once. See `04_ranks_and_elastic_resume` for what happens to the samples
# that are left over.
#
# ## From the command line
#
# This is not run here, for it reads from a bucket. `train.py` has the model, and:
#
# ```python
# from lightning.pytorch.cli import LightningCLI
#
# LightningCLI(Model, WdsDataModule)
# ```
#
# ```sh
# python train.py fit --data.train=s3://bucket/train/index.json --data.fields='["jpg;png", "cls"]' --data.batch_size=64 --data.num_workers=8 --ckpt_path=last
# ```
#
# ## A pipeline of your own
#
# `train`, `val` and `test` may also be pipes, or functions without arguments that return pipes. A
# transform that draws from global generators, as torchvision's do, needs such a pipe with
# `map_samples(transform, seed_all=True)`.


# %%
def pairs(sample, rng):
    return sample["npy"] + rng.normal(0, 0.1, 3).astype("float32"), sample["cls"], sample["__key__"]


def make_pipe():
    pipe = (
        wp.ShardList("train/index.json", shuffle=True, seed=7)
        .open_shards()
        .load_tar()
        .group_by_key()
        .shuffle_buffer(50)
        .decode_by_ext()
    )
    return pipe.map_samples(pairs)


model = Model()
make_trainer("own").fit(
    model, WdsDataModule(train=make_pipe, val="val/index.json", fields=["npy", "cls", "__key__"], batch_size=10)
)
assert sorted(model.trained_on[:200]) == sorted(whole.trained_on[:200])

# %% [markdown]
# ## A DataModule of your own
#
# Put `ResumableData` before `LightningDataModule` in the list of base classes, and pass your
# `PipeLoader` to `self.resumable`. Of a `PipeLoader` that Lightning gets itself, as in
# `trainer.fit(model, loader)`, its checkpoints do not hold the exact position; the first one warns.


# %%
class MyData(ResumableData, pl.LightningDataModule):
    def train_dataloader(self):
        return self.resumable(wp.PipeLoader(make_pipe(), batch_size=10, epoch_end="drop"))


def make_own_trainer(steps):
    saving = ModelCheckpoint(dirpath="mine", save_last=True, every_n_train_steps=1, save_top_k=0)
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


first, second = Model(), Model()
make_own_trainer(7).fit(first, MyData())
make_own_trainer(20).fit(second, MyData(), ckpt_path="mine/last.ckpt", weights_only=True)
assert len(first.trained_on + second.trained_on) == 200
assert len(set(first.trained_on + second.trained_on)) == 200
print(len(first.trained_on), "+", len(second.trained_on), "samples, each once")

# %% [markdown]
# ## Things to know
#
# - The state is in the checkpoint under the name of the DataModule's class, so do not rename the
#   class.
# - Validation may run in the middle of an epoch; its data are the same each time.
# - `shuffle` and samplers of a `DataLoader` have no effect here.
#
# ## What to read next
#
# - `07_imagenet_resnet`: the training loop written out.
# - `help(WdsDataModule)`: all arguments.
