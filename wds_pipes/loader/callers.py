"""Which loader of torchdata, torch or Accelerate calls: what it does not pass on can be seen on the
call stack only.

Nothing here imports torchdata or Accelerate.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from wds_pipes.errors import StateError


def forget_old_state() -> None:
    """Clear the cached state of the torchdata ``Loader`` that begins an epoch now, if there is one.

    If a loaded state has no items left, the Loader (0.11) keeps the state that it had read before
    it noticed this, and would return it throughout the next epoch.
    """
    nodes = sys.modules.get("torchdata.nodes.loader")
    loader = None if nodes is None else _caller(nodes.LoaderIterator.reset)
    if loader is not None:
        loader._cached_state_dict = None


def refuse_lost_state(what: str) -> None:
    """Raise an error if a StatefulDataLoader iterates that cannot see the state of a sampler.

    Its batch sampler has no state. A resume would iterate the batch sampler again, in the first
    epoch.

    Args:
        what: the sampler, for the message.

    Raises:
        StateError: as above.
    """
    module = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    loader = None if module is None else _caller(module._StatefulBaseDataLoaderIter._next_index)
    if loader is None or any(hasattr(part, "state_dict") for part in (loader._index_sampler, loader._sampler_iter)):
        return
    raise StateError(
        f"StatefulDataLoader does not see the state of {what} in a {type(loader._index_sampler).__name__} that has no "
        "state itself: a resume would start again with the first epoch. Pass sampler=, batch_size= and drop_last=, or "
        "as batch_sampler= a torchdata.stateful_dataloader.sampler.BatchSampler."
    )


def refuse_accelerate() -> None:
    """Raise an error, or warn, if a loader of Hugging Face Accelerate iterates over a pipe in a
    DataLoader.

    Raises:
        TypeError: it reads on rank 0 for all ranks (``dispatch_batches``), and torch gives a pipe
            on rank 0 only the samples of rank 0.
    """
    module = sys.modules.get("accelerate.data_loader")
    if module is None:
        return
    instead = "pass pipe.as_dataset() in its place, or do not prepare() the data and use wds_pipes.PipeLoader"
    dispatcher = _caller(module.DataLoaderDispatcher.__iter__)
    if dispatcher is not None and dispatcher.state.num_processes > 1:
        raise TypeError(
            "Accelerate reads on rank 0 for all ranks here (dispatch_batches), and torch's DataLoader divides a pipe "
            f"over the ranks, so most samples would never be read: {instead}."
        )
    if dispatcher is not None or _caller(module.DataLoaderShard.__iter__) is not None:
        warnings.warn(
            "Accelerate and the Trainer of transformers do not see set_epoch() of a pipe, so a resume repeats the "
            f"first epoch: {instead}.",
            stacklevel=2,
        )


def starts_workers() -> bool:
    """Whether a DataLoader, or a StatefulDataLoader, starts worker processes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname.endswith("MultiProcessingDataLoaderIter.__init__"):
            return True
        frame = frame.f_back
    return False


def keeps_workers() -> bool:
    """Whether a DataLoader begins an epoch with workers that it kept from an earlier one."""
    kind = _MultiProcessingDataLoaderIter
    return _caller(kind._reset) is not None and _caller(kind.__init__) is None


def makes_iterator() -> bool:
    """Whether a DataLoader makes an iterator; making one may reset it."""
    making, resetting = _BaseDataLoaderIter.__init__.__code__, _BaseDataLoaderIter._reset.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in (making, resetting):
        frame = frame.f_back
    return frame is not None and frame.f_code is making


def asks_for_length() -> DataLoader[Any] | None:
    """Return the DataLoader whose ``len()`` is that of a pipe or dataset which calls this, if there
    is one: other code on the way may need the length for something else.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__len__":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__len__":
        if isinstance(asking := frame.f_locals.get("self"), DataLoader):
            return asking
        frame = frame.f_back
    return None


def _caller(method: Callable[..., Any]) -> Any:
    """Return the ``self`` of the innermost call of a method on the stack; None: there is none.

    The locals of other frames are not read: this would keep alive what is in them.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is method.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
