"""UnbatchSamples: batches to samples."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from wds_pipes.core.chain import Chain
from wds_pipes.core.reads_again import FlatMap
from wds_pipes.core.stage import Stage
from wds_pipes.errors import SampleError
from wds_pipes.stages.batch_samples import BatchSamples


class UnbatchSamples(FlatMap[Any]):
    """Take batches apart into samples, as ``batch_samples`` put them together (functional name:
    ``unbatch_samples``).

    A dict of columns gives dicts, a tuple of columns gives tuples, a list gives its items, and a
    tensor or an array its rows. A list of tensors or arrays of one length is an error, unless
    ``batch_samples(collate="list")`` made it: torch's ``default_collate`` makes such lists of
    columns. In a row, what batch_samples makes of Python's numbers is such a
    number again: 0-dimensional values of dtype int64, float64 and bool. Other rows of tensors and
    arrays are views: as long as one is used, the memory of its whole batch is.

    Args:
        source: a pipe of batches.

    Raises:
        SampleError: from the iteration: an item is no batch, its columns differ in length, or it is
            not known whether it has columns or samples.

    Checkpoint: how many samples of the current batch were yielded. A resume makes this batch again.
    """

    def __init__(self, source: Stage[Any]) -> None:
        super().__init__(source)
        batches = (step for step in reversed(Chain(source).steps) if isinstance(step, BatchSamples))
        self._of_samples = getattr(next(batches, None), "collate", None) == "list"

    def expand(self, item: Any) -> Iterable[Any]:
        if isinstance(item, dict):
            return (dict(zip(item, row, strict=True)) for row in _rows(dict(item)))
        if isinstance(item, tuple):
            tuples = _rows(dict(enumerate(item)))
            return (type(item)(*row) for row in tuples) if hasattr(item, "_fields") else tuples
        rows: Iterable[Any] = _column(item, None)
        if isinstance(item, list) and not self._of_samples and _are_columns(item):
            raise SampleError(
                f"unbatch_samples() got a list of {len(item)} tensors or arrays of one length, {len(item[0])}, as "
                "torch's default_collate makes of tuples: it cannot know whether these are columns or samples. If they "
                "are columns, let the step before it return a tuple of them; if they are samples, use "
                "then(lambda batches: next(batches)) in its place."
            )
        return rows


def _are_columns(items: list[Any]) -> bool:
    """Whether the items of a list may be columns: tensors or arrays that have one length."""
    torch = sys.modules.get("torch")
    kinds = (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)
    return all(isinstance(item, kinds) and item.ndim for item in items) and len({len(item) for item in items}) == 1


def _rows(columns: dict[Any, Any]) -> Iterable[tuple[Any, ...]]:
    """The rows of a batch that is a dict or a tuple of columns."""
    values = [_column(column, name) for name, column in columns.items()]
    lengths = {len(column) for column in values}
    if len(lengths) != 1:
        said = (
            ", ".join(f"{name!r} has {len(column)}" for name, column in zip(columns, values, strict=True))
            or "it has no columns"
        )
        raise SampleError(
            f"unbatch_samples() got a batch whose columns are not of one length: {said}. Put "
            "it after batch_samples(), or mend the step that made it."
        )
    return zip(*values, strict=True)


def _column(column: Any, name: Any) -> Any:
    """The values of a column, in something that has a length."""
    if isinstance(column, list):
        return column
    torch = sys.modules.get("torch")
    if isinstance(column, np.ndarray) and column.ndim:
        plain = column.dtype in (np.int64, np.float64, np.bool_)
    elif torch is not None and isinstance(column, torch.Tensor) and column.ndim:
        plain = column.dtype in (torch.int64, torch.float64, torch.bool)
    else:
        where = "got" if name is None else f"got a batch whose column {name!r} is"
        raise SampleError(
            f"unbatch_samples() {where} {type(column).__name__}, not a list, a tensor or an array "
            "with rows: put it after batch_samples()."
        )
    return column.tolist() if plain and column.ndim == 1 else column
