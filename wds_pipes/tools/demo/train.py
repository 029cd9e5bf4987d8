"""The training program of ``wds-pipes demo``: it can be killed at any moment, and then continues
from its last checkpoint.

It trains a small CNN. ``python -m wds_pipes.tools.demo.train PLAN`` gets the arguments of ``train``
as JSON, and prints one line of JSON for each step. It uses nothing else of the demo: it is an
example of a training script with wds_pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import zlib
from typing import Any

import numpy as np
import torch
from torch import nn

import wds_pipes as wp

IMAGES = ("jpg", "jpeg", "png", "webp")  # the fields, of which a sample has one
CLASSES = 10
SEED = 7

Sample = tuple[str, torch.Tensor, int]


def mirrored(sample: tuple[str, torch.Tensor, int | str], rng: np.random.Generator) -> Sample:
    """Mirror an image or not, and make a number of a label that is none.

    All randomness comes from ``rng``, which is the same for this sample after a resume.
    """
    key, image, label = sample
    number = label if isinstance(label, int) else zlib.crc32(label.encode())
    return key, image.flip(-1) if rng.random() < 0.5 else image, number % CLASSES


def build_loader(urls: list[str], label: str, batch_size: int, workers: int) -> wp.PipeLoader:
    """Build the loader: batches of (keys, images of shape (batch, 3, 32, 32), labels)."""
    pipe = (
        wp.ShardList(urls, shuffle=True, seed=SEED)
        .open_shards()
        .load_tar()
        .group_by_key(fields=[*IMAGES, "cls"])
        .shuffle_buffer(200)
        .decode_by_ext("torchrgb", size=32)
        .to_tuple("__key__", ";".join(IMAGES), label)
        .map_samples(mirrored)
    )
    return wp.PipeLoader(pipe, batch_size=batch_size, num_workers=workers)


def build_model() -> nn.Module:
    """Build a CNN of three convolutional layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def train(
    *,
    urls: list[str],
    label: str,
    batch_size: int,
    workers: int,
    epochs: int,
    steps: int | None,
    checkpoint: str,
    checkpoint_every: int,
) -> None:
    """Train from the last checkpoint, or from the beginning if there is none.

    Args:
        urls: the shards.
        label: the field with the label.
        batch_size: samples in a batch.
        workers: worker processes that read and decode.
        epochs: how many epochs to train.
        steps: stop after this number of steps, even within an epoch; None: train all epochs.
        checkpoint: the file to save to; if it exists, training continues from it.
        checkpoint_every: steps from one checkpoint to the next.
    """
    torch.set_num_threads(1)  # sums of floats depend on how threads divide them
    torch.manual_seed(SEED)
    model = build_model()
    optimizer, step = torch.optim.Adam(model.parameters(), lr=2e-3), 0
    with contextlib.closing(build_loader(urls, label, batch_size, workers)) as loader:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        if os.path.exists(checkpoint):
            saved = torch.load(checkpoint, weights_only=True)
            step = saved["step"]
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        start = time.perf_counter()
        while (epoch := loader.epoch) < epochs:
            for keys, images, labels in loader:
                seconds = time.perf_counter() - start
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step += 1
                fact = {"step": step, "epoch": epoch, "loss": loss.item(), "keys": keys, "seconds": seconds}
                saved = None
                if step % checkpoint_every == 0:
                    saved = {"step": step} | {name: part.state_dict() for name, part in parts.items()}
                    fact["state_bytes"] = len(json.dumps(saved["loader"]))
                # before the checkpoint: a step that is saved has been told
                sys.stdout.write(f"{json.dumps(fact)}\n")
                sys.stdout.flush()
                if saved is not None:
                    torch.save(saved, f"{checkpoint}.partial")
                    os.replace(f"{checkpoint}.partial", checkpoint)  # a crash leaves the old file or the new one
                if step == steps:
                    return


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
