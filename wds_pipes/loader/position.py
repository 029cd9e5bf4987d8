"""The position of a PipeLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from wds_pipes.loader.partition import Partition
from wds_pipes.loader.protocol import LaneState, Result, unpack
from wds_pipes.loader.stats import Tally


class LoaderPosition(NamedTuple):
    """The position of a loader: one immutable value, replaced in a single assignment.

    So a signal handler or another thread never sees half of a position.
    """

    epoch: int
    partition: Partition
    lanes: dict[int, bytes]  # the states of this rank's lanes, packed
    step: int = 0
    given: int = 0  # batches since the last cut of with_epoch
    samples: int = 0  # samples since then, if with_epoch counts samples

    @property
    def ended(self) -> bool:
        """Whether all lanes of this rank have ended."""
        return all(unpack(lane)["ended"] for lane in self.lanes.values())

    @property
    def begins(self) -> bool:
        """Whether this is the beginning of the epoch: no rank has had anything of it."""
        return not self.step and not self.ended and not any(self.partition.counts.values())

    def counted_from(self, other: LoaderPosition | None) -> LoaderPosition:
        """Return this position with the numbers since the last cut of ``other``; None: the cut is
        here.
        """
        return (
            self._replace(given=0, samples=0)
            if other is None
            else self._replace(given=other.given, samples=other.samples)
        )

    @property
    def states(self) -> dict[int, LaneState]:
        """The states of the lanes, new at each call."""
        return {number: unpack(lane) for number, lane in self.lanes.items()}


class Paused(NamedTuple):
    """Where with_epoch() cut an iteration, and what was in flight at that time."""

    at: LoaderPosition
    run: int
    results: Iterator[Result]
    ahead: deque[Result]
    waiting: set[int]
    ended: dict[int, bytes]
    tally: Tally
