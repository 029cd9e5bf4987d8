"""How many items a pipeline gives in an epoch, where that is known: one rule for PipeLoader, pipes and datasets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.loader.parts import Parts
from wds_pipes.stages import (
    BatchSamples,
    CacheShards,
    DecodeByExt,
    GroupByKey,
    InterleaveShards,
    LoadTar,
    MapSamples,
    Mix,
    OpenShards,
    ShardList,
    ShuffleBuffer,
    ToTuple,
)

# The steps that give as many samples as they take.
_KEEP_COUNT = (
    ShardList,
    CacheShards,
    OpenShards,
    LoadTar,
    GroupByKey,
    ShuffleBuffer,
    DecodeByExt,
    ToTuple,
    MapSamples,
    BatchSamples,
    InterleaveShards,
    Parts,
)


def _steps(stage: Stage[Any]) -> Iterator[Stage[Any]]:
    """The steps of a chain, from its last."""
    step: Stage[Any] | None = stage
    while step is not None:
        yield step
        step = step.source


def batching(stage: Stage[Any]) -> list[BatchSamples]:
    """The steps of a chain that make batches, from its first."""
    return [step for step in _steps(stage) if isinstance(step, BatchSamples)][::-1]


def batches_of(steps: Iterable[BatchSamples], samples: int) -> int:
    """How many batches these steps make of so many samples."""
    for step in steps:
        samples = samples // step.size if step.drop_last else -(-samples // step.size)
    return samples


def why_uncounted(stage: Stage[Any]) -> str | None:
    """Why the number of samples of a lane is not known, with the mend; None if it is."""
    for step in _steps(stage):
        if isinstance(step, ShardList) and step.samples is None:
            return "the samples of the shards are not counted: pass ShardList(index=...), or samples_per_shard=, a number or a list of them"
        if isinstance(step, Parts) and step.counts_delivered:
            return "a step after batch_samples() holds batches, so that not all of them are full: put batch_samples() last"
        if changes := _changes(step):
            return changes
    return None


def _changes(step: Stage[Any]) -> str | None:
    """Why a step may give another number of items than it takes; None if it does not."""
    if isinstance(step, Mix):
        return "how many samples a mix() gives is not known"
    name = step.graph()[-1].partition("(")[0]
    if isinstance(step, Tolerant) and step.on_error == "skip":
        return f"{name}(on_error='skip') changes their number"
    return None if isinstance(step, _KEEP_COUNT) else f"{name}() may change their number"


def length(stage: Stage[Any], *, ranks_are_dealt: bool) -> int:
    """How many items an epoch has, for ``len()`` of a pipe or dataset, and of torch's DataLoader over it.

    Args:
        stage: the pipeline.
        ranks_are_dealt: whether DataLoader gives each rank its part.

    Raises:
        TypeError: it is not known, or not the same for any number of workers and ranks; the message says what to do.
    """
    if why := _unknown(stage) or _uneven(stage, ranks_are_dealt):
        raise TypeError(f"len() is not known: {why}")
    source = stage.root
    assert isinstance(source, ShardList)
    if source.samples is None or not _is_grouped(stage):
        return batches_of(batching(stage), len(source.urls))
    return batches_of(batching(stage), sum(source.samples))


def _is_grouped(stage: Stage[Any]) -> bool:
    return any(isinstance(step, GroupByKey) for step in _steps(stage))


def _unknown(stage: Stage[Any]) -> str | None:
    source = stage.root
    if isinstance(source, Mix) or not isinstance(source, ShardList):
        return _changes(source)
    if _is_grouped(stage):
        if source.resampled and len(set(source.samples or ())) > 1:
            return "resampled=True draws other shards in each epoch, and they have different numbers of samples"
        return why_uncounted(stage)
    if any(isinstance(step, LoadTar) for step in _steps(stage)):
        return "the index counts samples, not members: add group_by_key()"
    return next(filter(None, map(_changes, _steps(stage))), None)


def _uneven(stage: Stage[Any], ranks_are_dealt: bool) -> str | None:
    """Why this process, or the DataLoader that asks, may get another number of items than one process that reads all."""
    loader, host = _asking(), stage.host
    mend = "use wds_pipes.PipeLoader, whose len() is right on any number of workers and ranks"
    if host.lanes > 1:
        return f"this process gives part {host.lane} of {host.lanes} of the epoch: {mend}"
    if loader is None:
        return None
    if ranks_are_dealt and torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return f"DataLoader gives each rank whole shards, which may have different numbers of samples: {mend}"
    if loader.num_workers > 1 and (loader.batch_size is not None or batching(stage)):
        return f"each of the {loader.num_workers} workers makes batches of its own, and their last ones may be smaller: {mend}"
    return None


def _asking() -> DataLoader[Any] | None:
    """The DataLoader whose ``len()`` asks for the length, if one does."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_name == "__len__":
        asking = frame.f_locals.get("self")
        if isinstance(asking, DataLoader):
            return asking
        frame = frame.f_back
    return None
