"""The training program of ``wds-pipes demo``: it can be killed at any moment, and then continues
from its last checkpoint.

It trains a small CNN. ``python -m wds_pipes.cli.train`` reads a Plan as JSON from standard input,
and prints one line of JSON for each step and each checkpoint. It does not depend on the demo: it is
an example of a training script with wds_pipes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from functools import partial
from typing import Any

import click
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes.cli.plan import Plan

SIZE = 32  # pixels, of the square images that the model sees
SEED = 7


def build_pipeline(plan: Plan) -> wp.WdsPipe:
    """Build the pipeline: batches of (keys, images as uint8 of shape (batch, 3, SIZE, SIZE),
    labels).
    """
    fields = plan.image.split(";") + ([plan.label] if plan.label else [])
    pipe: wp.WdsPipe = (
        wp.ShardList(plan.urls, shuffle=True, seed=SEED)
        .open_shards()
        .load_tar()
        .group_by_key(fields=fields)
        .shuffle_buffer(200)
        .decode_by_ext("pil")
        .to_tuple("__key__", plan.image, plan.label or "__key__")
        .map_samples(partial(augment, classes=plan.classes))
        .batch_samples(plan.batch_size)
    )
    return pipe


def augment(
    sample: tuple[str, Image.Image, int | str], rng: np.random.Generator, *, classes: int
) -> tuple[str, np.ndarray[Any, Any], int]:
    """Crop the image at random and mirror it or not.

    All randomness comes from ``rng``, which is the same for this sample after a resume.
    """
    key, image, label = sample
    left, top = rng.integers(5, size=2).tolist()
    image = ImageOps.fit(image, (SIZE + 4, SIZE + 4)).crop((left, top, left + SIZE, top + SIZE))
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    number = label if isinstance(label, int) else zlib.crc32(label.encode())
    return key, np.asarray(image).transpose(2, 0, 1), number % classes


def build_model(classes: int) -> nn.Module:
    """Build a CNN of three convolutional layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, classes))


def train(plan: Plan) -> None:
    """Train from the last checkpoint, or from the beginning if there is none."""
    torch.set_num_threads(1)  # sums of floats depend on how threads divide them
    torch.manual_seed(SEED)
    model = build_model(plan.classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # The loader has its own generator: torch's global one must be for dropout alone.
    loader = StatefulDataLoader(
        build_pipeline(plan).as_dataset(), batch_size=None, num_workers=plan.workers, generator=torch.Generator()
    )

    step, first_epoch, start = resume(plan.checkpoint, model, optimizer, loader)
    for epoch in range(first_epoch, plan.epochs):
        for keys, images, labels in loader:
            seconds = time.perf_counter() - start
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            tell(event="step", step=step, epoch=epoch, loss=loss.item(), keys=keys, seconds=seconds)
            if step % plan.checkpoint_every == 0:
                state = loader.state_dict()
                save(
                    plan.checkpoint,
                    {
                        "step": step,
                        "epoch": epoch,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "rng": torch.get_rng_state(),
                        "loader": state,
                    },
                )
                tell(event="checkpoint", step=step, state_bytes=len(json.dumps(state)))
            if step == plan.steps:
                return


def resume(
    path: str, model: nn.Module, optimizer: torch.optim.Optimizer, loader: StatefulDataLoader
) -> tuple[int, int, float]:
    """Load the checkpoint, if there is one.

    Returns:
        The number of steps done, the epoch to continue, and the time when the loader starts.
    """
    if not os.path.exists(path):
        return 0, 0, time.perf_counter()
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"])
    start = time.perf_counter()
    loader.load_state_dict(checkpoint["loader"])
    return checkpoint["step"], checkpoint["epoch"], start


def save(path: str, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint atomically: a crash at any moment leaves the old file or the new one, both
    complete.
    """
    with open(f"{path}.partial", "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.partial", path)


def tell(**facts: Any) -> None:
    """Print a line of JSON."""
    click.echo(json.dumps(facts))


if __name__ == "__main__":
    train(Plan(**json.load(sys.stdin)))
