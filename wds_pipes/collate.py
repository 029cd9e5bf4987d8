"""Samples to columns: what batch_samples does by default."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from wds_pipes.errors import SampleError


def stack_samples(batch: list[Any], *, tensors: bool = True) -> Any:
    """A batch of samples: dicts to a dict of columns, tuples to a tuple of columns, anything else to one column.

    Args:
        batch: the samples, at least one, all of one form.
        tensors: stack numbers and arrays into torch tensors; otherwise into numpy arrays.

    Raises:
        SampleError: the samples differ in form, or the values of a column in shape.
    """
    first = batch[0]
    if isinstance(first, dict):
        for sample in batch:
            if not isinstance(sample, dict) or sample.keys() != first.keys():
                raise _uneven(batch, sample)
        return {name: _column([sample[name] for sample in batch], name, batch, tensors) for name in first}
    if isinstance(first, tuple):
        for sample in batch:
            if not isinstance(sample, tuple) or len(sample) != len(first):
                raise _uneven(batch, sample)
        columns = [_column(list(values), place, batch, tensors) for place, values in enumerate(zip(*batch, strict=True))]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return _column(batch, None, batch, tensors)


def _column(values: list[Any], name: str | int | None, batch: list[Any], tensors: bool) -> Any:
    """One column: stacked if all its values can be, else as a list."""
    first = values[0]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        _check(values, name, batch, torch.Tensor)
        stacked = torch.stack(values)
        return stacked if tensors else stacked.numpy()
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        _check(values, name, batch, np.ndarray)
        stacked = np.stack(values)
    elif isinstance(first, (bool, int, float, complex, np.number, np.bool_)):
        if not all(isinstance(value, (bool, int, float, complex, np.number, np.bool_)) for value in values):
            raise _unstackable(
                values, name, batch, next(place for place, value in enumerate(values) if not np.isscalar(value) or isinstance(value, (str, bytes)))
            )
        stacked = np.array(values)
        if stacked.dtype.kind == "O":
            return values
    else:
        return values
    if not tensors:
        return stacked
    import torch as to

    return to.from_numpy(stacked if stacked.dtype.isnative else stacked.astype(stacked.dtype.newbyteorder("=")))


def _check(values: list[Any], name: str | int | None, batch: list[Any], kind: type) -> None:
    """All values must be of one kind, shape and dtype."""
    first = values[0]
    for place, value in enumerate(values):
        if not isinstance(value, kind) or value.shape != first.shape or value.dtype != first.dtype:  # type: ignore[attr-defined]
            raise _unstackable(values, name, batch, place)


def _unstackable(values: list[Any], name: str | int | None, batch: list[Any], place: int) -> SampleError:
    column = "the samples" if name is None else f"field {name!r}" if isinstance(name, str) else f"place {name} of the tuples"
    key, url = _identity(batch[place])
    return SampleError(
        f"{column} cannot be stacked into a batch: {_describe(values[0])} in {_name(batch, 0)}, but {_describe(values[place])} in {_name(batch, place)}. "
        "Bring them to one shape and type with map_samples(), or pass collate=.",
        url=url,
        key=key,
    )


def _uneven(batch: list[Any], sample: Any) -> SampleError:
    place = next(place for place, other in enumerate(batch) if other is sample)
    key, url = _identity(sample)
    return SampleError(
        f"the samples of a batch differ in form: {_form(batch[0])} in {_name(batch, 0)}, but {_form(sample)} in {_name(batch, place)}. Choose the fields with "
        "to_tuple() or group_by_key(fields=...), or pass collate=.",
        url=url,
        key=key,
    )


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"shape {tuple(value.shape)}, {value.dtype}"
    return f"{type(value).__name__} {value!r:.40}"


def _form(sample: Any) -> str:
    if isinstance(sample, dict):
        return f"fields {', '.join(map(str, sample))}"
    return f"{type(sample).__name__} of {len(sample)}" if isinstance(sample, tuple) else type(sample).__name__


def _identity(sample: Any) -> tuple[str | None, str | None]:
    return (sample.get("__key__"), sample.get("__url__")) if isinstance(sample, dict) else (None, None)


def _name(batch: list[Any], place: int) -> str:
    key, _ = _identity(batch[place])
    return f"sample {place} of the batch" if key is None else f"sample {key!r}"
