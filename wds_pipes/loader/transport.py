"""Batch transport: hands batches from a worker to the main process through shared memory.

Rules:
1. A worker pickles a batch. It copies the large buffers of tensors and arrays, and the pickle
   itself if that is large, into one memory block. Only a small message goes through the connection.
   ``batch_samples``, if it is the last step, stacks arrays in a block from the outset.
2. A block has no name in any file system, so the system frees it when the last process that uses it
   ends, however it ends. Its descriptor crosses once, with the first batch in it.
3. In the main process, tensors and arrays are views of the block. When the last of them is
   gone, the main process marks the block as free, and the worker uses it again.
4. A caller may keep batches. From a number of blocks on, further batches are copied out of theirs,
   so the blocks of a worker are bounded, and a kept field does not keep the rest of its batch.
5. Blocks that are in use when this process forks are never used again: the child may read them.
6. Small buffers stay in the pickle, and so have memory of their own. What is neither a plain tensor
   nor an array is pickled by value, as for a file.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor

_SMALL = 16 << 10  # bytes; a buffer, or a pickle, up to this size goes through the connection
_ALIGNED = 64  # bytes; also the size of the head of a block, whose first byte is its mark
_SLACK = 1.25  # a block is by this factor larger than the batch for which it is made
_TOO_LARGE = 4  # times the size of recent batches: such a block is closed
_IDLE = 64  # a block that was not needed for so many batches is closed
_FREE, _IN_USE, _SPENT = 0, 1, 2  # the marks

# Where a buffer is in a block, in bytes: its beginning and its end; and whether it is read-only.
_Span = tuple[int, int, bool]

# What goes through the connection: a pickle, or of a batch in a block: the number of the block;
# with its first batch, what gives its descriptor; the numbers of blocks that the worker has closed;
# where the buffers are; and the pickle (None: it is the last of the buffers). Plain tuples, because
# to unpickle a class costs more than they do.
Sent = bytes | tuple[int, Any, list[int], list[_Span], bytes | None]


# ----------------------------------------------------------------------------- the worker's side


class Outbox:
    """Packs the batches of a worker."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._gone: list[int] = []  # the numbers of blocks that were closed since the last batch in a block
        self._numbers = itertools.count()
        self._packed = 0  # batches in blocks
        self._recent = 0.0  # bytes of the largest recent batch
        # The block in which arrays of the next batch were made, and where the last of them ends.
        self._begun: _Block | None = None
        self._end = _ALIGNED

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array for the next batch, in the block of that batch if there is room, so that
        ``pack`` need not copy it.

        Nothing but that batch may refer to it. (As torch's ``default_collate``, which in a worker
        stacks tensors in shared memory.)
        """
        size = math.prod(shape) * dtype.itemsize
        if self._begun is None and self._recent and size > _SMALL:
            with contextlib.suppress(OSError):
                self._begun = self._block(int(self._recent))
        start, block = self._end, self._begun
        if block is None or size <= _SMALL or start + size > len(block):
            return np.empty(shape, dtype)
        self._end = _aligned(start + size)
        return np.ndarray(shape, dtype, block.memory, start)

    def pack(self, batch: Any) -> Sent:
        """Return what is sent for a batch, or for an object with a batch in it.

        It is a snapshot: the worker may then change the batch.

        Raises:
            Exception: what pickling raises.
        """
        if not hasattr(os, "memfd_create"):
            return bytes(ForkingPickler.dumps(batch))
        chunks = _Chunks()
        buffers: list[memoryview] = []

        def stays(buffer: pickle.PickleBuffer) -> bool:
            """Whether a buffer stays in the pickle."""
            raw = buffer.raw()
            if raw.nbytes <= _SMALL:
                return True
            buffers.append(raw)
            return False

        Pickler(chunks, protocol=5, buffer_callback=stays).dump(batch)
        length = sum(map(len, chunks.parts))
        if not buffers and length <= _SMALL:
            return b"".join(chunks.parts)
        begun, end = self._begun, self._end
        spans: list[_Span] = []
        made: list[bool] = []  # for each buffer, whether ``empty`` made it in the block
        for buffer in buffers:
            start = -1 if begun is None else begun.place_of(buffer)
            made.append(start >= 0)
            if start < 0:
                start, end = end, _aligned(end + buffer.nbytes)
            spans.append((start, start + buffer.nbytes, buffer.readonly))
        header = b"".join(chunks.parts) if length <= _SMALL else None
        if header is None:
            spans.append((end, end + length, True))
            end += length
        self._packed += 1
        self._recent = max(end, 0.98 * self._recent)
        try:
            block = self._block(end)
        except OSError:  # no memory or no descriptor is left, or the system has no such blocks
            return bytes(ForkingPickler.dumps(batch))
        for (start, stop, _), there, buffer in zip(spans, made, buffers, strict=False):
            if not there or block is not begun:
                block.memory[start:stop] = buffer
        if header is None:
            place = end - length
            for part in chunks.parts:
                block.memory[place : place + len(part)] = part
                place += len(part)
        gone, self._gone = self._gone, []
        return block.number, block.ticket(), gone, spans, header

    def _block(self, size: int) -> _Block:
        """Return a block of at least this size for the next batch, and close free ones that are not
        needed.
        """
        begun, self._begun, self._end = self._begun, None, _ALIGNED
        if begun is not None:
            if size <= len(begun):
                return begun
            begun.memory[0] = _FREE
        found: _Block | None = None
        kept: list[_Block] = []
        spare: list[_Block] = []  # free and too small
        for block in self._blocks:
            mark = block.memory[0]
            if mark == _SPENT or (
                mark == _FREE and (len(block) > _TOO_LARGE * self._recent or self._packed - block.used > _IDLE)
            ):
                self._gone.append(block.number)
                continue
            kept.append(block)
            if mark == _FREE and len(block) < size:
                spare.append(block)
            elif mark == _FREE and found is None:
                found = block
        self._blocks = kept
        if found is None:
            if spare:
                self._gone.append(spare[0].number)
                kept.remove(spare[0])
            found = _Block(next(self._numbers), int(_SLACK * size))
            kept.append(found)
        found.used, found.memory[0] = self._packed, _IN_USE
        return found


class _Block:
    """A memory block of a worker."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.used = number, 0
        self._descriptor: int | None = None
        descriptor = os.memfd_create("wds_pipes")
        try:
            os.ftruncate(descriptor, size)
            self.memory = memoryview(mmap.mmap(descriptor, size))
            self._address = _address(self.memory)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    # ``close`` is kept here: when the process exits, ``os`` may be gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor is not None:  # it was closed before it was sent
            close(self._descriptor)

    def __len__(self) -> int:
        return len(self.memory)

    def place_of(self, buffer: memoryview) -> int:
        """Return where a buffer begins in this block; -1: it is not in it."""
        place = _address(buffer) - self._address
        return place if 0 <= place < len(self) else -1

    def ticket(self) -> Any:
        """Return, once, what gives the main process the descriptor; then None."""
        if self._descriptor is None:
            return None
        descriptor, self._descriptor = self._descriptor, None
        try:
            return DupFd(descriptor)
        finally:
            os.close(descriptor)


def _address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def _aligned(end: int) -> int:
    return -(-end // _ALIGNED) * _ALIGNED


class _Chunks:
    """Collects what a pickler writes, without a copy of large parts."""

    def __init__(self) -> None:
        self.parts: list[bytes | bytearray] = []

    def write(self, part: Any) -> int:
        self.parts.append(part if isinstance(part, (bytes, bytearray)) else bytes(part))
        return len(part)


# ------------------------------------------------------------------------------------- pickling

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


# ----------------------------------------------------------------------- the main process's side


class Inbox:
    """What the main process has of the blocks of a worker.

    Args:
        most: from how many blocks on, batches are copied out of their blocks.
    """

    forks = 0  # how often this process has forked

    def __init__(self, most: int) -> None:
        self.most = most
        self.blocks: dict[int, mmap.mmap] = {}  # by their numbers
        self._in_use: dict[int, _Lent] = {}

    def open(self, sent: Sent) -> Any:
        """Return the batch that was sent."""
        if isinstance(sent, bytes):
            return pickle.loads(sent)
        number, ticket, gone, spans, header = sent
        for old in gone:
            self.blocks.pop(old, None)
        if ticket is not None:
            descriptor = ticket.detach()
            try:
                self.blocks[number] = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        block, copied = self.blocks[number], len(self._in_use) >= self.most
        # All views of the batch refer to this array, and nothing else does.
        array = np.ndarray(len(block), "u1", block)
        self._in_use[number] = lent = _Lent(array, _give_back)
        lent.block, lent.number, lent.in_use, lent.forks = block, number, self._in_use, Inbox.forks
        memory = array.data
        del array
        buffers: list[Any] = []
        for start, stop, readonly in spans:
            view = memory[start:stop]
            whole = bytearray(view) if copied else view
            buffers.append(memoryview(whole).toreadonly() if readonly else whole)
        return pickle.loads(buffers.pop() if header is None else header, buffers=buffers)


def _count_fork() -> None:
    Inbox.forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


class _Lent(weakref.ref[Any]):
    """A block while there are views of it. A ``weakref.finalize`` would take four times as long."""

    __slots__ = ("block", "forks", "in_use", "number")
    block: mmap.mmap
    number: int
    in_use: dict[int, _Lent]
    forks: int


def _give_back(lent: _Lent) -> None:
    """Let the worker use a block again; not if a child process may read it."""
    del lent.in_use[lent.number]
    lent.block[0] = _FREE if lent.forks == Inbox.forks else _SPENT
