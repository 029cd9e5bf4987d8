"""PipeLoader with other trainers: each function trains, leaves checkpoints in ``directory``, and
resumes from those that it finds there.

Each stops after ``stop`` steps (None: at the end of the second epoch) and returns the keys of the
batches that it trained on. A loader has its own rank, so the same functions run on one rank and on
several (``ranks.py``).
"""

import os

import torch
import torch.distributed as dist
from your_trainer import class_of

import wds_pipes as wp
from wds_pipes import checkpoint

EPOCHS, BATCH = 2, 3


def make_loader(urls, **options):
    pipe = (
        wp.ShardList(urls, shuffle=True, seed=3, samples_per_shard=6)
        .open_shards()
        .load_tar()
        .group_by_key()
        .shuffle_buffer(4)
        .decode_by_ext()
    )
    return wp.PipeLoader(pipe, batch_size=BATCH, epoch_end="drop", **options)


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, batch):
    model(batch["cls"].float()[:, None]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return batch["__key__"]


# A loop of your own, with DistributedDataParallel. Every rank writes its own small file; the model
# is saved by one of them.


def own_loop(urls, directory, stop):
    loader, (model, optimizer) = make_loader(urls), make_model()
    ddp = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    os.makedirs(f"{directory}/data", exist_ok=True)
    steps, given = checkpoint.load(f"{directory}/data", loader) or 0, []
    if steps:
        model.load_state_dict(torch.load(f"{directory}/model-{steps}.pt", weights_only=True))
    while loader.state_dict()["epoch"] < EPOCHS and steps != stop:
        for batch in loader:
            given.append(step(ddp, optimizer, batch))
            steps += 1
            if loader.rank.number == 0:
                torch.save(model.state_dict(), f"{directory}/model-{steps}.pt")
            if dist.is_initialized():
                dist.barrier()  # the model first: a checkpoint of the data is never without it
            checkpoint.save(f"{directory}/data", loader, step=steps)
            if steps == stop:
                break
    return given


# torch.distributed.checkpoint, as TorchTitan saves: the loader is one of the Stateful objects.


def distributed_checkpoint(urls, directory, stop):
    import torch.distributed.checkpoint as dcp

    loader, (model, optimizer) = make_loader(urls), make_model()
    state = {
        "model": model.state_dict(),
        "data": checkpoint.DCPState(loader),
        "steps": torch.zeros(1, dtype=torch.int64),
    }
    given = []
    if saved := sorted(os.listdir(directory)):
        dcp.load(state, checkpoint_id=f"{directory}/{saved[-1]}")
    while loader.state_dict()["epoch"] < EPOCHS and state["steps"] != stop:
        for batch in loader:
            given.append(step(model, optimizer, batch))
            state["steps"] += 1
            if state["steps"] == stop:
                break
        dcp.save(state, checkpoint_id=f"{directory}/step-{int(state['steps']):06d}")
    return given


# Accelerate. Do not prepare() the loader, which is for this rank already; register an object that
# speaks for the loaders of all ranks.


def accelerate(urls, directory, stop):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader, (model, optimizer) = make_loader(urls), make_model()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(checkpoint.AllRanks(loader))
    if os.path.exists(f"{directory}/accelerate"):
        accelerator.load_state(f"{directory}/accelerate")
    given, steps = [], 0
    while loader.state_dict()["epoch"] < EPOCHS and steps != stop:
        for batch in loader:
            given.append(batch["__key__"])
            accelerator.backward(model(batch["cls"].float()[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == stop:
                break
        accelerator.save_state(f"{directory}/accelerate")
    return given


# The Trainer of transformers, as in the tutorial.


def huggingface_classes():
    from transformers import Trainer

    return class_of("PipeTrainer", {"Trainer": Trainer, "checkpoint": checkpoint, "os": os})


def huggingface(urls, directory, stop):
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, cls, **rest):
            given.append(rest["__key__"])
            return {"loss": self.layer(cls.float()[:, None]).mean()}

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            if stop == state.global_step:
                control.should_save = control.should_training_stop = True

    given = []
    arguments = TrainingArguments(
        f"{directory}/huggingface",
        use_cpu=True,
        num_train_epochs=EPOCHS,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
    )
    trainer = huggingface_classes()(Model(), arguments, loader=make_loader(urls), callbacks=[Stop()])
    os.makedirs(arguments.output_dir, exist_ok=True)
    trainer.train(get_last_checkpoint(arguments.output_dir))
    return given
