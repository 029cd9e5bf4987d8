"""What ``wds_pipes.cli.train`` trains; without torch, for the command that starts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What to train on, how long, and where the checkpoint is.

    Attributes:
        urls: the shards.
        image: the field with the image, or several fields, of which the first that exists is used:
            ``"jpg;png"``.
        label: the field with the integer label; None: a label is computed from the key.
        classes: the number of classes of the model; labels are taken modulo this number.
        batch_size: samples in a batch.
        workers: worker processes that read and decode.
        epochs: how many epochs to train.
        steps: stop after this number of steps, even within an epoch; None: train all epochs.
        checkpoint: the file to save to; if it exists, training continues from it.
        checkpoint_every: steps from one checkpoint to the next.
    """

    urls: list[str]
    image: str
    label: str | None
    classes: int
    batch_size: int
    workers: int
    epochs: int
    steps: int | None
    checkpoint: str
    checkpoint_every: int
