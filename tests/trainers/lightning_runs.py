"""Trainings with Lightning by a plan in a file: rounds of ranks as real processes, each with
several runs. The keys that were trained on are written to files.

    python lightning_runs.py plan.json

It is a program of its own so that Lightning, which takes seconds to import, is imported once for
all ranks of all rounds.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from importlib.util import find_spec

import lightning.pytorch as pl
import torch

import wds_pipes as wp
from wds_pipes.lightning import WdsDataModule

SAMPLES, BATCH = 6, 3  # of each shard; in a batch


class Model(pl.LightningModule):
    """Notes the keys of what it is trained on."""

    def __init__(self, plan, file):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.plan, self.file, self.count = plan, file, 0

    def training_step(self, batch, batch_idx):
        if self.plan.get("kill") == self.count:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        self.note({"keys": batch["__key__"]})
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx):
        if self.plan.get("kill") == "validation" and not self.trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("samples", float(len(batch["__key__"])), batch_size=len(batch["__key__"]), sync_dist=True)

    def configure_optimizers(self):
        if self.plan.get("estimate"):
            self.note({"estimate": self.trainer.estimated_stepping_batches})
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def note(self, line):
        print(json.dumps(line), file=self.file, flush=True)


class Save(pl.Callback):
    """Saves when hooks are called for the first time after a number of batches."""

    def __init__(self, saves):
        self.saves = saves  # names of files by "hook-batches"

    def save(self, hook, trainer, model):
        path = self.saves.pop(f"{hook}-{model.count}", None)
        if path and not trainer.sanity_checking:
            trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer, model, *rest):
        self.save("batch", trainer, model)

    def on_validation_batch_end(self, trainer, model, *rest):
        self.save("validation", trainer, model)

    def on_train_epoch_end(self, trainer, model):
        self.save("epoch", trainer, model)


def data(plan):
    counts = {"samples_per_shard": SAMPLES} if plan["sized"] else {}

    def train():
        pipe = (
            wp.ShardList(plan["train"], shuffle=True, seed=3, **counts)
            .open_shards()
            .load_tar()
            .group_by_key(fields=["txt"])
        )
        return pipe.shuffle_buffer(4).decode_by_ext()

    return WdsDataModule(
        train=train,
        val=plan["val"],
        fields=None,
        batch_size=BATCH,
        num_workers=plan.get("workers", 0),
        lanes=plan.get("lanes"),
        epoch_end=None if plan["sized"] else "exact",
        multiprocessing_context="fork" if plan.get("workers") else None,
    )


def run(plan, rank, ranks):
    with open(f"{plan['out']}-{rank}.jsonl", "w") as file:
        callbacks = [Save(dict(plan.get("saves", {})))]
        if plan.get("every"):
            callbacks.append(
                pl.callbacks.ModelCheckpoint(
                    plan["directory"], every_n_train_steps=plan["every"], save_last=True, filename="{step}"
                )
            )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            max_epochs=plan.get("epochs", 2),
            max_steps=plan.get("steps", -1),
            val_check_interval=plan.get("validate", 1.0),
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=bool(plan.get("every")),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(plan, file), data(plan), ckpt_path=plan.get("load"))


def run_all(runs, rank, ranks, rendezvous):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for harmless in (
        "The '.*_dataloader' does not have many workers",
        "`lr_scheduler",
        "The `LightningModule`",
        "Checkpoint directory .* exists",
        ".*last.* is set",
    ):
        warnings.filterwarnings("ignore", message=harmless)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if ranks > 1:
        os.environ.update(
            {name: str(rank) for name in ("RANK", "LOCAL_RANK")},
            WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0", TORCHELASTIC_RUN_ID="1", GLOO_SOCKET_IFNAME="lo",  # noqa: E501
        )  # fmt: skip
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    for plan in runs:
        run(plan, rank, ranks)


def main(path):
    with open(path) as file:
        rounds = json.load(file)
    # Lightning imports them when it saves; that would take each rank a second.
    for name in ("gcsfs", "s3fs"):
        if find_spec(name):
            importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    for number, one in enumerate(rounds):
        processes = [
            context.Process(target=run_all, args=(one["runs"], rank, one["ranks"], f"{path}-{number}"))
            for rank in range(one["ranks"])
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(100)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        expected = -signal.SIGKILL if any("kill" in plan for plan in one["runs"]) else 0
        if codes != [expected] * one["ranks"]:
            sys.exit(f"round {number}: the ranks ended with {codes}, not with {expected}: {one['runs'][-1]}")


if __name__ == "__main__":
    main(sys.argv[1])
