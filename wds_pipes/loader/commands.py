"""Decides which worker makes the next batch, and of which lane."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from torch.utils.data import Sampler

from wds_pipes.loader.protocol import Begin, Command


class Commands(Sampler[Command]):
    """The endless sequence of commands to the workers: rules 2 and 3 of ``pipe_loader``.

    Args:
        workers: how many there are, at least 1.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._run = -1
        self._worker: dict[int, int] = {}  # of each lane that has not ended
        self._begins: dict[int, dict[int, Begin]] = {}  # of each worker that had no command in this run yet
        self._turns: list[tuple[int, int]] = []  # a heap of (number of the batch, lane)

    def start(self, run: int, begins: dict[int, Begin]) -> None:
        """Begin a run over the lanes of ``begins``."""
        self._run = run
        self._worker = {lane: place % self._workers for place, lane in enumerate(begins)}
        self._begins = {
            worker: {lane: begins[lane] for lane, host in self._worker.items() if host == worker}
            for worker in range(self._workers)
        }
        self._turns = [(begin.state["delivered"], lane) for lane, begin in begins.items()]
        heapq.heapify(self._turns)

    def end(self, lane: int) -> None:
        """Remove a lane that has ended from the sequence."""
        self._worker.pop(lane, None)

    def __iter__(self) -> Iterator[Command]:
        for worker in itertools.cycle(range(self._workers)):
            while self._turns and self._turns[0][1] not in self._worker:
                heapq.heappop(self._turns)
            if not self._turns or self._worker[self._turns[0][1]] != worker:
                yield self._run, -1, None
                continue
            number, lane = self._turns[0]
            heapq.heapreplace(self._turns, (number + 1, lane))
            yield self._run, lane, self._begins.pop(worker, None)
