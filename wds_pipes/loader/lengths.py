"""How many items a pipeline yields in an epoch, if that is known: the same rule for PipeLoader,
pipes and datasets.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from wds_pipes.core.chain import Chain, Composite
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Stage
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BatchSamples


def in_batches(
    stage: Stage[Any],
    batch_size: int | None,
    *,
    drop_last: bool,
    collate: Callable[[list[Any]], Any] | str | None,
    mix_lanes: int,
) -> Stage[Any]:
    """Return the chain with the batches that these options of PipeLoader request."""
    if batch_size is None:
        if drop_last or collate is not None or mix_lanes != 1:
            raise ValueError(
                "drop_last, collate and mix_lanes go with batch_size; without it the items of the pipe are the batches"
            )
        return stage
    if (batches := Chain(stage).batches) is not None:
        warnings.warn(
            f"the pipe gives batches of {batches} already, and batch_size={batch_size} makes batches of "
            "these: leave one of the two out. If it is meant, write the second one as "
            f".batch_samples({batch_size}), too.",
            stacklevel=5,
        )
    if stage.gives in _NO_SAMPLES and not callable(collate):
        items, step = _NO_SAMPLES[stage.gives]
        raise TypeError(
            f"the items of this chain are {items}, not samples, of which batch_size={batch_size} would make batches: "
            f"add {step} at its end. If it is meant, pass a function as collate="
        )
    size, mixed = check_count("batch_size", batch_size), check_count("mix_lanes", mix_lanes) > 1
    if size % mix_lanes:
        raise ValueError(f"batch_size={size} must be a multiple of mix_lanes={mix_lanes}")
    in_lane = "list" if mixed and callable(collate) else collate
    return BatchSamples(stage, size // mix_lanes, drop_last=drop_last, collate=in_lane)


def uneven(stage: Stage[Any]) -> Stage[Any] | None:
    """The step that makes batches of different numbers of samples; None if there is none."""
    chain = Chain(stage)
    step: Stage[Any]
    for step in itertools.takewhile(lambda step: not step.expands, reversed(chain.steps)):
        if step.items_per_batch is None and "delivered" in step.tallies:
            return step
    found: list[Stage[Any] | None] = [uneven(branch) for branch in chain.root.branches.values()]
    return next(filter(None, found), None)


def batches_of(steps: Iterable[Stage[Any]], samples: int) -> int:
    """How many batches these steps make of this number of samples."""
    for step in steps:
        samples = step.batches_of(samples)
    return samples


def why_uncounted(stage: Stage[Any], *, repeats: bool = False) -> str | None:
    """Why the number of samples of a lane is not known, and what to do; None if it is known.
    ``repeats``: the caller takes ``repeat(n)`` into account.
    """
    if changes := _changes(stage, repeats=repeats):
        return changes
    if Chain(stage).root.epoch_order.sample_counts is None:
        return (
            "the samples of the shards are not counted: pass ShardList(index=...) the index.json that wds-pipes "
            "create wrote beside the shards, or one that wds-pipes index SHARDS -o index.json writes; or pass "
            "samples_per_shard=, a number or a list of them"
        )
    return None


def _changes(stage: Stage[Any], *, repeats: bool) -> str | None:
    """Why a step may yield another number of items than it takes; None if no step does."""
    steps = (step for step in reversed(Chain(stage).steps) if not (repeats and _repeats(step) > 1))
    return next(filter(None, (step.changes_count() for step in steps)), None)


def _repeats(step: Stage[Any]) -> int:
    """How many times a step yields the epoch of its source."""
    return step.epoch_repeats if isinstance(step, Composite) else 1


def _items(stage: Stage[Any], count: int) -> int:
    """How many items the steps of a chain make of this number of samples or shards."""
    for step in Chain(stage):
        count = step.batches_of(count * _repeats(step))
    return count


class Countable:
    """The base of what runs a chain of stages and knows its number of samples: pipes, nodes and
    datasets.
    """

    _stream: Stream[Any]

    def counts(self) -> dict[str, int]:
        """Return what became of the samples of the current epoch, or of the one that just ended.

        ``delivered``, ``filtered``, ``skipped`` and ``dropped`` are samples. If there are any,
        there are also ``skipped_shards``, which could not be opened, ``damaged``, the places in
        shards where members were lost (each may hide several samples, which no count has),
        ``cut``, samples that a step shortened, and ``excluded``, how many of the filtered ones
        ``load_state_dict(exclude=...)`` left out.

        In the middle of an epoch, the counts of steps before a ``shuffle_buffer`` lag: they end
        where a resume would start to read again, at most 2.25 * size samples earlier. At the end of
        the epoch, everything is counted.
        """
        return self._stream.counts()

    def sample_count(self) -> int:
        """Return how many samples an epoch has, of all ranks and workers together.

        It is the sum of the numbers that ``ShardList(index=...)`` or ``samples_per_shard=`` says
        for the shards. Unlike ``len()`` it counts samples, not batches, and samples that
        ``drop_last`` leaves out are among them.

        Raises:
            TypeError: the number is not known, since the shards are not counted, or a step may
                change it; the message says what to do.
        """
        stage = self._stream.stage
        chain = Chain(stage)
        source = chain.root
        counts = source.epoch_order.sample_counts
        if not source.epoch_order.divides_shards:
            why = f"{source.changes_count()}; a pipe that begins with ShardList(index=...) has a sample_count()"
        elif counts is None:
            why = str(why_uncounted(source))
        elif differ := source.epoch_order.epochs_differ():
            why = f"{differ}. To set the length of an epoch: PipeLoader(...).with_epoch(samples=...)"
        elif changes := why_uncounted(stage, repeats=True):
            why = f"{changes}. Before this step, an epoch has {sum(counts):,} samples"
        else:
            return sum(counts) * math.prod(map(_repeats, chain))
        raise TypeError(f"sample_count() is not known: {why}.")


_SAMPLES = ("samples", "references")  # what a chain may give, one for each sample: see ``Stage.gives``
# what the items of a chain may be instead, and the step that makes samples of them
_NO_SAMPLES = {"members": ("members of shards", "group_by_key()"), "references": ("references", "fetch_samples()")}


def length(stage: Stage[Any], *, ranks_are_divided: bool) -> int:
    """How many items an epoch has, for ``len()`` of a pipe or dataset, and of torch's DataLoader
    over it.

    Args:
        stage: the pipeline.
        ranks_are_divided: whether DataLoader divides the epoch over ranks.

    Raises:
        TypeError: the number is not known, or depends on the number of ranks; the message says what
            to do.
    """
    if why := _why_unknown(stage) or _why_uneven(stage, ranks_are_divided):
        raise TypeError(f"len() is not known: {why}")
    chain = Chain(stage)
    counts = chain.root.epoch_order.sample_counts
    if counts is None or chain.items_are not in _SAMPLES:
        return _items(stage, chain.root.which_data().shards or 0)
    return _items(stage, sum(counts))


def _why_unknown(stage: Stage[Any]) -> str | None:
    chain = Chain(stage)
    source = chain.root
    if not source.epoch_order.divides_shards:
        return source.changes_count()
    if chain.items_are in _SAMPLES:
        return source.epoch_order.epochs_differ() or why_uncounted(stage, repeats=True)
    if chain.items_are == "members":
        return "the index counts samples, not members: add group_by_key()"
    return _changes(stage, repeats=True)


def _why_uneven(stage: Stage[Any], ranks_are_divided: bool) -> str | None:
    """Why this process may get another number of items than one process that reads all."""
    context = Chain(stage).root.context
    mend = "use wds_pipes.PipeLoader, whose len() is right on any number of workers and ranks"
    if context.lanes > 1:
        return f"this process gives part {context.lane} of {context.lanes} of the epoch: {mend}"
    if (
        ranks_are_divided
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return f"DataLoader gives each rank whole shards, which may have different numbers of samples: {mend}"
    return None
