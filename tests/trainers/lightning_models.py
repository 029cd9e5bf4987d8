"""What the tests of WdsDataModule train with. It imports Lightning, which takes seconds: the tests
get it by a fixture, so that only the process imports it that runs them.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader

import wds_pipes as wp
from wds_pipes.lightning import ResumableData, StatsCallback, WdsDataModule

__all__ = [
    "CombinedLoader",
    "Estimating",
    "Late",
    "Model",
    "Own",
    "ResumableData",
    "Save",
    "StatsCallback",
    "Steps",
    "StopAt",
    "Stopped",
    "WdsDataModule",
    "fit",
    "pl",
]

BATCH = 3


class Model(pl.LightningModule):
    """Notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches, self.validated, self.tested = [], [], []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch)

    def test_step(self, batch, batch_idx):
        self.tested.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(pl.Callback):
    """Saves after the batches of these numbers, and at the end of epochs that end there."""

    def __init__(self, directory, *numbers):
        self.directory, self.numbers = directory, numbers

    def save(self, trainer, model, name):
        if len(model.batches) in self.numbers:
            trainer.save_checkpoint(f"{self.directory}/{name}{len(model.batches)}.ckpt")

    def on_train_batch_end(self, trainer, model, *rest):
        self.save(trainer, model, "")

    def on_train_epoch_end(self, trainer, model):
        self.save(trainer, model, "end-")


class Steps(Model):
    """Also notes the epoch, the number of the batch, and the optimizer's steps before it."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def training_step(self, batch, batch_idx):
        self.steps.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step, batch["__key__"]))
        return super().training_step(batch, batch_idx)


class Stopped(Exception):
    """The run ends here, as if it was killed."""


class StopAt(pl.Callback):
    """Saves in a hook, at or after so many batches of this run, and ends the run there."""

    def __init__(self, path, batches, hook):
        self.path, self.batches, self.hook = path, batches, hook

    def stop(self, trainer, model, hook):
        if hook == self.hook and len(model.batches) >= self.batches and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise Stopped

    def on_train_batch_end(self, trainer, model, *rest):
        self.stop(trainer, model, "batch")

    def on_validation_end(self, trainer, model):
        self.stop(trainer, model, "validation")

    def on_train_epoch_end(self, trainer, model):
        self.stop(trainer, model, "epoch")


def fit(data, *callbacks, model=None, load=None, **options):
    model = model or Model()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "callbacks": list(callbacks), **quiet, **options}
    )
    trainer.fit(model, data, ckpt_path=load)
    return model, trainer


class Own(ResumableData, pl.LightningDataModule):
    """A user's own DataModule, which builds its loader anew at each call."""

    def __init__(self, urls, **options):
        super().__init__()
        self.urls, self.options = urls, options

    def train_dataloader(self):
        pipe = (
            wp.ShardList(self.urls, shuffle=True, seed=3)
            .open_shards()
            .load_tar()
            .group_by_key(fields=["cls"])
            .shuffle_buffer(5)
            .decode_by_ext()
        )
        loader = wp.PipeLoader(pipe, batch_size=BATCH, epoch_end="exact")
        return self.resumable(loader, **self.options)


class Late(pl.strategies.SingleDeviceStrategy):
    """Loads the checkpoint when the training data are set up already, as FSDP and DeepSpeed do."""

    restore_checkpoint_after_setup = True


class Estimating(Model):
    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()
