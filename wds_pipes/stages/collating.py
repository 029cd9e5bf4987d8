"""Collate samples into columns, as batch_samples does by default."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError
from wds_pipes.stages.fields import identity

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
_FORM = attrgetter("shape", "dtype")
# What is compared before values are stacked. Shapes of tensors are slow, and torch compares them.
_COMPARED = {"array": _FORM, "tensor": attrgetter("dtype")}

Empty = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]


def stack_samples(batch: list[Any], *, collate: str | None = None, empty: Empty = np.empty) -> Any:
    """Return a batch of samples as columns: a dict of columns for dicts, a tuple of columns for
    tuples, one column for anything else.

    Args:
        batch: the samples, at least one, all of one form.
        collate: what to stack into: None: torch tensors; ``"numpy"``: numpy arrays; ``"keep"``:
            tensors of tensors, and arrays of anything else; ``"columns"``: stack nothing, so that
            every column is a list.
        empty: makes an array of a shape and a dtype, into which arrays are stacked.

    Raises:
        SampleError: the samples differ in form, or the values of a column differ in kind, shape or
            dtype.
    """
    first = batch[0]
    if isinstance(first, dict):
        names = list(first)
        for sample in batch:
            if not isinstance(sample, dict) or (list(sample) != names and sample.keys() != first.keys()):
                raise _uneven(batch, sample)
        return {name: _column(list(map(itemgetter(name), batch)), name, batch, collate, empty) for name in first}
    if isinstance(first, tuple):
        for sample in batch:
            if not isinstance(sample, tuple) or len(sample) != len(first):
                raise _uneven(batch, sample)
        columns = [
            _column(list(values), place, batch, collate, empty) for place, values in enumerate(zip(*batch, strict=True))
        ]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return _column(batch, None, batch, collate, empty)


def _column(
    values: list[Any],
    name: str | int | None,
    batch: list[Any],
    collate: str | None,
    empty: Empty,
) -> Any:
    """Return one column: stacked if all values are numbers, arrays or tensors, a list if none is.

    Raises:
        SampleError: only some of them are, or they differ in shape or dtype.
    """
    if collate == "columns":
        return values
    first, kind, types = values[0], _kind(values[0]), set(map(type, values))
    forms = set(map(_COMPARED[kind], values)) if len(types) == 1 and kind in _COMPARED else types
    if len(forms) > 1 and (place := _unlike_first(values, kind)):
        raise _unstackable(values, name, batch, place)
    if kind is None:
        return values
    try:
        if kind == "tensor":
            stacked = _stack_tensors(values, empty)
            return stacked.numpy() if collate == "numpy" else stacked
        if kind == "array":
            stacked = empty((len(values), *first.shape), first.dtype)
            if first.ndim:  # np.stack would take three times as long, since it makes a view of each array
                np.concatenate(values, out=stacked.reshape(len(values) * len(first), *first.shape[1:]))
            else:
                np.stack(values, out=stacked)
        else:
            # Python ints always as int64
            stacked = np.array(values, np.int64 if types == {int} else None)
        if collate is not None:
            return stacked
        return as_tensor(stacked)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        place = _unlike_first(values, kind)
        why = f"{_describe(first)} in {_name(batch, 0)} and the others: {error}" if place is None else None
        raise _unstackable(values, name, batch, place or 0, why) from error


def _stack_tensors(values: list[Any], empty: Empty) -> Any:
    """Return tensors stacked into an array that ``empty`` makes, if numpy has their dtype."""
    import torch

    first = values[0]
    if type(first) is torch.Tensor:
        # not bfloat16, on another device, sparse, or with a gradient
        with contextlib.suppress(TypeError, RuntimeError):
            array = empty((len(values), *first.shape), first.numpy().dtype)
            return torch.stack(values, out=torch.from_numpy(array))
    return torch.stack(values)


def _unlike_first(values: list[Any], kind: str | None) -> int | None:
    """Return the place of the first value that differs from the first one in kind, shape or dtype;
    None: there is none.
    """
    for place, value in enumerate(values):
        if _kind(value) != kind or (kind in _COMPARED and _FORM(value) != _FORM(values[0])):
            return place
    return None


def as_tensor(array: npt.NDArray[Any]) -> Any:
    """Return an array as a tensor, which shares its memory if the order of its bytes is that of the
    machine.
    """
    import torch

    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def _kind(value: Any) -> str | None:
    """Return how ``_column`` treats a value; None: as an entry of a list."""
    if isinstance(value, _NUMBERS):
        return "number"
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind in "biufc" else None
    torch = sys.modules.get("torch")
    return "tensor" if torch is not None and isinstance(value, torch.Tensor) else None


def _unstackable(
    values: list[Any], name: str | int | None, batch: list[Any], place: int, why: str | None = None
) -> SampleError:
    column = (
        "the samples" if name is None else f"field {name!r}" if isinstance(name, str) else f"place {name} of the tuples"
    )
    key, url = identity(batch[place])
    why = why or f"{_describe(values[0])} in {_name(batch, 0)}, but {_describe(values[place])} in {_name(batch, place)}"
    first, other = values[0], values[place]
    if all(getattr(value, "ndim", 0) == 1 for value in (first, other)) and first.dtype == other.dtype:
        mend = (
            "They are of different lengths: fill them up with pad= of pack_samples() or bucket_samples(), or with "
            "map_samples()"
        )
    else:
        mend = "Bring them to one shape and type with map_samples(), images with size= where they are decoded"
    return SampleError(
        f"{column} cannot be stacked into a batch: {why}. {mend}, or pass collate=.",
        url=url,
        key=key,
    )


def _uneven(batch: list[Any], sample: Any) -> SampleError:
    place = next(place for place, other in enumerate(batch) if other is sample)
    key, url = identity(sample)
    return SampleError(
        f"the samples of a batch differ in form: {_form(batch[0])} in {_name(batch, 0)}, but "
        f"{_form(sample)} in {_name(batch, place)}. Choose the fields with "
        "select_fields(), to_tuple() or group_by_key(fields=...), or pass collate= to batch_samples().",
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


def _name(batch: list[Any], place: int) -> str:
    named = identity(batch[place])
    return f"sample {place} of the batch" if named.key is None else named.name()


def which_batch(batch: list[Any], reading: str | None) -> str:
    """Return a note for an error that a batch raised: which samples it has, or, if these have no
    keys, the shard that was read.
    """
    note = f"raised on a batch of {plural(len(batch), 'sample')}"
    if identity(batch[0]).key is not None:
        return f"{note}, from {_name(batch, 0)} to {_name(batch, len(batch) - 1)}"
    return note if reading is None else f"{note}, when shard {reading} was read"
