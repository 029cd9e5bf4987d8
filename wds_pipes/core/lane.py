"""Which part of which epoch a chain yields, and where that is decided."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wds_pipes.core.order import hash64


@dataclass(frozen=True, slots=True)
class Slice:
    """A lane's part of one global order of samples: the lanes take runs of its places in turn.

    Attributes:
        size: how many places a run has, which is a batch of a lane.
        start: the first place of all lanes.
        stop: the place after the last. Places from the number of samples on repeat the epoch from
            its beginning.
        number: the number of the lane.
        of: the number of lanes.
    """

    size: int
    start: int
    stop: int
    number: int
    of: int

    @property
    def count(self) -> int:
        """How many places it has."""
        runs, rest = divmod(max(0, self.stop - self.start), self.size)
        whole = (runs - self.number + self.of - 1) // self.of if self.number < runs else 0
        return whole * self.size + (rest if runs % self.of == self.number else 0)

    def place(self, taken: int) -> int:
        """Return the place that comes after ``taken`` places."""
        turn, inside = divmod(taken, self.size)
        return self.start + (turn * self.of + self.number) * self.size + inside


@dataclass(frozen=True, slots=True)
class Lane:
    """Which part of which epoch a running chain yields: lane ``number`` of ``of``.

    Attributes:
        generation: how often the epoch was repartitioned.
        shards: the shard ranges to read, each as (shard, start, stop); None: those of the plain
            partition. See ``wds_pipes.loader.ranges``.
        padding: whether the samples are repeats that fill up an epoch; None: samples do not say
            whether they are.
        slice: its part of the global order of a ``SampleList``, if the lanes divide that.
    """

    seed: int
    epoch: int
    number: int = 0
    of: int = 1
    generation: int = 0
    shards: Sequence[tuple[int, int, int]] | None = None
    padding: bool | None = None
    slice: Slice | None = None

    def key(self, *salt: int) -> int:
        """Return the 64-bit key of this lane's random decisions; ``salt`` separates one use from
        another.
        """
        again = (self.generation,) if self.generation else ()
        return hash64(self.seed, self.epoch, self.number, self.of, *again, *salt)


@dataclass(slots=True)
class Passed:
    """What workers of torch's DataLoader have of a pipe that it iterates: a copy, made when they
    start. See ``wds_pipes.datapipes.pipe``.

    Attributes:
        by: the main process; None: no DataLoader has iterated the pipe.
        epoch: the epoch that was last passed to workers; None: the pipe was told another one since.
        times: how often the next epoch was passed to new workers.
        starts: how many processes the main process had started when DataLoader made an iterator;
            None: no further call for this iterator is expected.
        news: what the main process was told since, for workers that are kept: a
            ``wds_pipes.dataset.WorkerNews``.
    """

    by: int | None = None
    epoch: int | None = None
    times: int = 0
    starts: int | None = None
    news: Any = None

    def tell(self, epoch: int | None) -> None:
        """The pipe is told an epoch, or a state (None)."""
        self.epoch = None
        if self.news is not None:
            self.news.tell(epoch)


@dataclass(slots=True)
class Context:
    """The iteration context of a whole chain.

    Attributes:
        epoch: the epoch of the next iteration.
        lane: which lane this process yields.
        lanes: of how many.
        tell_end: what hears that a lane has ended: see ``dataset.LaneEnds``.
        passed: what workers of a DataLoader have.
        made_in: the process that made the chain.
    """

    epoch: int = 0
    lane: int = 0
    lanes: int = 1
    tell_end: Callable[[int, bool, bool], tuple[bool, bool]] | None = None
    passed: Passed = field(default_factory=Passed)
    made_in: int = field(default_factory=os.getpid)

    def lane_in(self, seed: int, epoch: int) -> Lane:
        """Return the lane of this process in an epoch."""
        return Lane(seed, epoch, self.lane, self.lanes)


class LaneFacts(NamedTuple):
    """What a state says of a lane, for a description of the lane.

    Attributes:
        number: the number of the lane.
        of: how many lanes there are.
        url: the shard at the position of the lane; None: there is none.
        shards: how many shards the pipeline has; None: unknown.
        divided: the lane is one of a PipeLoader, which also divides shards.
        epoch: the epoch of the state.
    """

    number: int
    of: int
    url: str | None
    shards: int | None
    divided: bool
    epoch: int = 0
