"""Pickles a batch so that the large buffers of its tensors and arrays can cross beside the pickle.

What is neither a plain tensor nor an array is pickled by value, as for a file.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

# Tensors of these dtypes are sent as integers of the same size, since numpy has no such dtype.
_AS_INTEGERS = {
    getattr(torch, name): integer
    for integer, names in {
        torch.int16: ["bfloat16"],
        torch.uint8: ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"],
    }.items()
    for name in names
    if hasattr(torch, name)
}

# What torch names to rebuild tensors of some dtypes, complex32 for example, whose storages it
# cannot pickle by value; older versions have no such dtypes.
_REBUILD: Any = getattr(torch._utils, "_rebuild_tensor_v3", object())


class Pickler(pickle.Pickler):
    """Pickles tensors by their buffers, and other objects as between processes."""

    # what modules and users have registered for sending between processes
    dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table

    def reducer_override(self, value: Any) -> Any:
        """Return how an object is pickled; NotImplemented: as its class or ``dispatch_table``
        says.
        """
        # Storages are sent by value: between processes, torch would share them, and for that move
        # them from where a buffer of this pickle may refer to.
        if value is _REBUILD or (isinstance(value, torch.UntypedStorage) and not value.is_cuda):
            raise pickle.PicklingError("storages of torch, and tensors of complex32 and the like, are not sent")
        if isinstance(value, torch.TypedStorage) and not value.is_cuda:
            return value.__reduce_ex__(5)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            return reduce_tensor(value)  # type: ignore[no-untyped-call]  # raises
        if value.device.type != "cpu":
            return NotImplemented
        if type(value) is not torch.Tensor or value.requires_grad or value.layout is not torch.strided:
            return value.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        integer = _AS_INTEGERS.get(value.dtype)
        try:
            array = (value if integer is None else value.view(integer)).numpy()
        except (RuntimeError, TypeError):  # quantised, conjugated, nested and other rare kinds
            return value.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        order = None
        if not array.flags.c_contiguous:
            order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
            array = np.ascontiguousarray(array.transpose(order))
        # The dtype as text: to unpickle a numpy dtype takes longer than all the rest of a tensor.
        found = array.shape, array.dtype.str, pickle.PickleBuffer(array.data)
        if order is None and integer is None:
            return _tensor, found
        return _tensor, (*found, order, None if integer is None else value.dtype)


def _tensor(
    shape: tuple[int, ...], dtype: str, buffer: Any, order: list[int] | None = None, kind: Any = None
) -> torch.Tensor:
    """Return a tensor over a buffer.

    Args:
        shape: of the values.
        dtype: of the values, as numpy writes it.
        buffer: the values, in C order.
        order: what permutes the axes of the tensor to ``shape``; None: they are in this order.
        kind: the dtype of the tensor, if that is another one of the same size.
    """
    tensor = torch.from_numpy(np.ndarray(shape, dtype, buffer))
    if kind is not None:
        tensor = tensor.view(kind)
    return tensor if order is None else tensor.permute([order.index(axis) for axis in range(len(order))])
