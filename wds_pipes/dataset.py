"""WdsDataset: what DataLoader and StatefulDataLoader can see the state of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from wds_pipes.stage import Position, Stage, State, Stream, check_count

MAX_WORKERS = 1024


class WdsDataset(IterableDataset[Any]):
    """A pipeline as a plain IterableDataset with a state, for torch's DataLoader and torchdata's StatefulDataLoader.

    With ``num_workers=n`` worker i gives lane i of n: each its own shards, so there should be at least n of them. Each iteration is the next epoch, with
    persistent and fresh workers and under every start method; ``set_epoch(n)`` chooses one. A state fits the same number of workers.

    Raises:
        StateError: from ``load_state_dict``: the state does not fit this pipeline or this number of workers.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        super().__init__()
        self._stream = _WorkerStream(stage)

    def __iter__(self) -> Iterator[Any]:
        stream = self._stream
        stream.settle()
        if stream.waits and get_worker_info() is not None:
            # This worker's lane had ended when the state was taken, but not those of the others: it waits for the next epoch.
            stream.waits = False
            return iter(())
        stream.over = stream.waits = False
        if stream.position.ended:
            stream.at = None  # a state of the coming iteration, taken before its first item, is not one of a lane that has ended
        return iter(stream)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be ``epoch``, in all workers; a loaded state of that epoch still continues where it was."""
        check_count("epoch", epoch, least=0)
        self._stream.set_epoch(epoch)
        self._stream.epochs.fill_(epoch)

    def state_dict(self) -> State:
        """The position in this process, as a small dict of plain JSON types, new at each call."""
        stream = self._stream
        stream.settle()
        return {**stream.state_dict(), "ended": stream.over or stream.position.ended}

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration in this process continue from ``state``."""
        stream = self._stream
        stream.settle()
        stream.load_state_dict(state)
        stream.over = stream.waits = state.get("ended") is True
        stream.epochs[stream.stage.host.lane] = stream.position.epoch


class _WorkerStream(Stream[Any]):
    """A stream that gives the lane of its worker process, and keeps the coming epoch where fresh workers find it: in shared memory, one number a worker."""

    def __init__(self, stage: Stage[Any]) -> None:
        super().__init__(stage)
        self.over = False  # the loaded state was taken when this lane had ended, and no other iteration has begun since
        self.waits = False  # so the next iteration has nothing for it
        self.epochs = torch.full((MAX_WORKERS,), stage.host.epoch, dtype=torch.int64)
        self.epochs.share_memory_()  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Take the lane and the epoch of this process."""
        host, worker = self.stage.host, get_worker_info()
        host.lane, host.lanes = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if host.lanes > MAX_WORKERS:
            raise ValueError(f"at most {MAX_WORKERS} workers are possible, not {host.lanes}")
        if self.at is None:
            host.epoch = int(self.epochs[host.lane])

    def begin(self) -> Position:
        host = self.stage.host
        if not self._resume:
            host.epoch = int(self.epochs[host.lane])
        position = super().begin()
        self.epochs[host.lane] = host.epoch
        return position
