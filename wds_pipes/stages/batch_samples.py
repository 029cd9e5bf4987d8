"""BatchSamples: collect samples into batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from wds_pipes.core.chain import Chain
from wds_pipes.core.graph import GraphStep
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Stage
from wds_pipes.errors import SampleError
from wds_pipes.stages.collating import Empty, stack_samples, which_batch

_COLLATES = (None, "numpy", "keep", "columns", "list")


class BatchSamples(Stage[Any]):
    """Collect samples into batches (functional name: ``batch_samples``).

    Dict samples become a dict of columns, and tuples a tuple of columns. Any other samples become
    one column. Numbers, arrays and tensors of one shape are stacked into a tensor of shape
    (batch, ...). Python ints become int64, floats float64 and bools bool; numpy numbers keep their
    dtype. A column of strings, bytes, None, dicts or anything else is a list.

    Args:
        source: any pipe.
        size: the number of samples in a batch.
        drop_last: leave out the last batch of an epoch if it is smaller than ``size``. Its samples
            are counted as dropped.
        collate: ``None`` for tensors, ``"numpy"`` for numpy arrays, ``"keep"`` for tensors of
            tensors and numpy arrays of arrays and numbers, ``"columns"`` for columns that are all
            lists, whose values may differ in shape, ``"list"`` for the list of samples as it is, or
            a function that takes this list and returns the batch.

    Raises:
        SampleError: during iteration, if a column cannot be stacked. The message says which column,
            at which sample, and why. What ``collate`` raises is raised as it is, with a note that
            names the samples of the batch.

    Checkpoint: the numbers of delivered and dropped samples. A batch is yielded as soon as it is
    full, so a resume reads nothing again.
    """

    @dataclass(slots=True)
    class At:
        delivered: int = 0
        dropped: int = 0

    tallies = ("delivered", "dropped")
    keeps_count = True
    scope = "item"
    source: Stage[Any]

    def _in_graph(self, *, counted: bool) -> GraphStep:
        step = super()._in_graph(counted=counted)
        return GraphStep.of(step.name, {"size": self.size, "drop_last": self.drop_last}) if counted else step

    def __init__(
        self,
        source: Stage[Any],
        size: int,
        *,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | str | None = None,
    ) -> None:
        super().__init__(source)
        self.size = check_count("size", size)
        self.drop_last = bool(drop_last)
        if not callable(collate) and collate not in _COLLATES:
            raise ValueError(f"collate must be {', '.join(map(repr, _COLLATES))} or a function, not {collate!r}")
        self.collate = collate
        self.empty: Empty = np.empty  # makes the arrays into which those of samples are stacked

    def stacking_into(self, empty: Empty) -> Self:
        """Return a copy of this step that stacks arrays into those that ``empty`` makes."""
        again = copy.copy(self)
        again.empty = empty
        return again

    def run(self) -> Iterator[Any]:
        at, size = self.at, self.size
        batch: list[Any] = []
        for sample in self.source.items:
            batch.append(sample)
            if len(batch) == size:
                collated = self._collate(batch)
                at.delivered += size
                yield collated
                batch, collated = [], None  # the memory may be free now
        if batch and self.drop_last:
            at.dropped += len(batch)
        elif batch:
            collated = self._collate(batch)
            at.delivered += len(batch)
            yield collated

    @property
    def items_per_batch(self) -> int:
        return self.size

    def batches_of(self, count: int) -> int:
        return count // self.size if self.drop_last else -(-count // self.size)

    def _collate(self, batch: list[Any]) -> Any:
        try:
            if callable(self.collate):
                return self.collate(batch)
            if self.collate == "list":
                return batch
            return stack_samples(batch, collate=self.collate, empty=self.empty)
        except Exception as error:
            if callable(self.collate) or (isinstance(error, SampleError) and getattr(error, "key", None) is None):
                error.add_note(which_batch(batch, Chain(self.source).where(self.source.mark(), self.lane)))
            raise
