"""Repeat: yield the epoch of the source several times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.chain import ChainPart, Composite
from wds_pipes.core.lane import Lane, LaneFacts
from wds_pipes.core.occurrences import occurring
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import END, Mark, Out, Stage
from wds_pipes.core.state import read_count
from wds_pipes.errors import ShardError
from wds_pipes.stages.shard_list import Last

_MOST_EMPTY = 10  # repetitions in a row without an item


class Repeat(Composite[Out]):
    """Yield the epoch of the source ``n`` times in each epoch (functional name: ``repeat``).

    Each repetition is another epoch of the source, in another order if its order depends on the
    epoch: epoch e yields the epochs ``e * n`` to ``e * n + n - 1`` of the source. Steps that draw
    random numbers, such as ``map_samples(fn)`` with ``fn(sample, rng)``, may be before this step or
    after it: they draw others for a sample in each repetition. A ``shuffle_buffer`` before it ends
    with each repetition, and one after it mixes two of them. ``max_errors`` of a step before
    it counts in each repetition anew; PipeLoader applies it to the whole epoch.

    The workers of a DataLoader and PipeLoader divide an epoch into lanes. In PipeLoader, each lane
    repeats its own shards. On several ranks, PipeLoader needs ``epoch_end="exact"`` or ``"loop"``.
    To train in PipeLoader without end, leave this step out: ``epoch_end="loop"`` repeats the epochs
    already.

    Args:
        source: any pipe.
        n: how many times, at least 1. None: without end, from epoch e on; each ``iter()`` begins at
            the next epoch. PipeLoader refuses this.

    Raises:
        TypeError, ValueError: when the stage is built, if ``n`` is not an int or less than 1.
        ShardError: during iteration, without end: ten repetitions in a row had no items.

    Checkpoint: the number of the repetition, and the position of the source in it. A resume reads
    again what the source reads again. If an epoch continues on another number of ranks or workers,
    its lanes are not divided: each continues as a whole.
    """

    @dataclass(slots=True)
    class At(Composite.At):
        repetition: int = 0

    order_options = ("n",)
    source: Stage[Out]
    _running: Stage[Out]  # while running, the chain of the repetition

    def __init__(self, source: Stage[Out], n: int | None = None) -> None:
        super().__init__(source)
        self.n = None if n is None else check_count("n", n)
        self.epoch_repeats = self.n or 1
        self._last = Last[tuple[Stage[Any], Lane, int, Lane]]()

    def changes_count(self) -> str | None:
        return None if self.n == 1 else "repeat() changes their number"

    @property
    def _ends(self) -> bool | None:  # type: ignore[override]
        return False if self.n is None else None

    @property
    def inner(self) -> list[Stage[Any]]:
        return [self._running]

    def prepare(self) -> None:
        mark = self.parts[0].mark if self.parts else None
        self._running = self.source.open(self._lane(self.lane, self.at.repetition), mark)

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        self._running.start(offset, ahead=ahead)

    def run(self) -> Iterator[Out]:
        at, empty = self.at, 0
        while self.lane.shards is None or len(self.lane.shards):
            items = self._running.items
            if self.lane.occurrences:
                items = (occurring(item, at.repetition) for item in items)
            if (first := next(items, END)) is not END:
                empty = -1
                yield first
                yield from items
            if at.repetition + 1 == self.n:
                return
            empty += 1
            if self.n is None and empty == _MOST_EMPTY:
                raise ShardError(
                    f"repeat() found no item in {empty} repetitions of lane {self.lane.number} of {self.lane.of}: has "
                    "the list fewer shards or samples than lanes, or do filters and on_error='skip' leave nothing?"
                )
            self.retire(self._running)
            at.repetition += 1
            self._running = self.source.open(self._lane(self.lane, at.repetition))

    def _lane(self, lane: Lane, repetition: int) -> Lane:
        """Return the lane of the source in a repetition."""
        root, last = self.before.root, self._last.found
        # an equal lane may be of another chain, which counts for itself
        if last is None or last[0] is not root or last[1] is not lane or last[2] != repetition:
            epoch = lane.epoch * (self.n or 1) + repetition
            last = self._last.found = root, lane, repetition, root.epoch_order.lane_in(lane, epoch)
        return last[3]

    def mark(self) -> Mark:
        return self._own(self.at), (ChainPart(self._running.mark()),)

    def where_in(self, own: tuple[Any, ...], parts: tuple[ChainPart, ...], lane: Lane) -> str | None:
        lane = self._lane(lane, self._at(own).repetition)
        return self.before.where(parts[0].mark if parts else None, lane)

    def problem(self, at: Any) -> str | None:
        return f"it has {self.n} repetitions" if self.n is not None and at.repetition >= self.n else None

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        return f"in repetition {read_count(entry.get('repetition', 0), repr('repetition')) + 1}"
