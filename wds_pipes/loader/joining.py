"""Join the parts of a batch that come from several lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from wds_pipes.errors import SampleError
from wds_pipes.stages.collating import which_batch


class Joining:
    """How the parts of a batch become one batch.

    Args:
        parts: how many parts a full batch has.
        collate: makes the batch of the list of samples in all parts; None: the parts are batches
            themselves, as ``batch_samples`` makes them, and are joined column by column.
        pin: copy tensors into pinned memory.
        on_device: called with each batch at last; None: nothing.
    """

    def __init__(
        self,
        parts: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        pin: bool = False,
        on_device: Callable[[Any], Any] | None = None,
    ) -> None:
        self.parts, self._collate, self._on_device = parts, collate, on_device
        # As DataLoader does; torch.accelerator is there from torch 2.6 on.
        self._pin = pin and getattr(torch, "accelerator", torch.cuda).is_available()

    def __call__(self, parts: list[Any]) -> Any:
        """Return the batch that parts make.

        Raises:
            SampleError: a column differs in kind, shape or dtype.
        """
        batch = parts[0] if self.parts == 1 else self._joined(parts)
        if self._pin:
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        if self._on_device is None:
            return batch
        try:
            return self._on_device(batch)
        except StopIteration as error:
            raise RuntimeError("on_device raised StopIteration") from error

    def _joined(self, parts: list[Any]) -> Any:
        batch = _join(parts, "the samples")
        if self._collate is not None:
            try:
                batch = self._collate(batch)
            except StopIteration as error:  # it would look like the end of the epoch
                raise RuntimeError("collate raised StopIteration") from error
            except Exception as error:
                error.add_note(which_batch(batch, None))
                raise
        return batch


def _join(parts: list[Any], what: str) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(_kind(part) != _kind(first) for part in parts):
        raise _unlike(parts, what)
    if isinstance(first, dict):
        return {name: _join([part[name] for part in parts], f"field {name!r}") for name in first}
    if isinstance(first, tuple):
        columns = [_join(list(values), f"place {place} of the tuples") for place, values in enumerate(zip(*parts))]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, torch.Tensor):
        return _concatenated(parts)
    return np.concatenate(parts) if isinstance(first, np.ndarray) else [item for part in parts for item in part]


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all tensors as one. numpy copies with one thread, torch with all cores,
    which the workers need.
    """
    try:
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))
    except (TypeError, RuntimeError):  # numpy has no such dtype
        return torch.cat(parts)


def _kind(part: Any) -> str:
    """Return what parts must have in common, as text for a message."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return f"samples of shape {tuple(part.shape[1:])}, {part.dtype}"
    if isinstance(part, dict):
        return f"the fields {', '.join(sorted(map(str, part)))}"
    return f"a {type(part).__name__} of {len(part)} columns" if isinstance(part, tuple) else "a list"


def _unlike(parts: list[Any], what: str) -> SampleError:
    other = next(part for part in parts if _kind(part) != _kind(parts[0]))
    return SampleError(
        f"{what} of several lanes cannot be joined into a batch: {_kind(parts[0])} in one lane, and {_kind(other)} in "
        "another. Bring them to one shape and type with map_samples(), or pass collate=."
    )
