"""Repeat: yield the epoch of the source several times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.composite import Composite
from wds_pipes.core.lane import Lane, LaneFacts
from wds_pipes.core.moved import Move
from wds_pipes.core.options import check_count
from wds_pipes.core.running import END, Mark, Out, begin, running_copy
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import read_count, read_position
from wds_pipes.errors import ShardError

_MOST_EMPTY = 10  # repetitions in a row without an item


class Repeat(Composite[Out]):
    """Yield the epoch of the source ``n`` times in each epoch (functional name: ``repeat``).

    Each repetition is another epoch of the source, in another order if its order depends on the
    epoch: epoch e yields the epochs ``e * n`` to ``e * n + n - 1`` of the source. Put steps that
    draw random numbers, such as ``map_samples(fn)`` with ``fn(sample, rng)``, before this step: a
    step after it draws the same for a sample in each repetition. A ``shuffle_buffer`` before it
    ends with each repetition, and one after it mixes two of them. ``max_errors`` of a step before
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
        position: Mark | None = None  # of the source: in a state, it is in the entry of this stage

    whole_lanes = True
    ends_reading = True
    order_options = ("n",)

    source: Stage[Out]
    _recipe: Stage[Out]  # while running, when ``source`` is the chain of the repetition
    _last: tuple[Lane, int, Lane] | None = None  # the lane that was computed last

    def __init__(self, source: Stage[Out], n: int | None = None) -> None:
        super().__init__(source)
        self.n = None if n is None else check_count("n", n)

    def changes_count(self) -> str | None:
        return None if self.n == 1 else "repeat() changes their number"

    @property
    def never_ends(self) -> bool:
        return self.n is None or super().never_ends

    @property
    def epoch_repeats(self) -> int:
        return self.n or 1

    @property
    def batches(self) -> int | None:
        return self.source.batches

    @property
    def held_items(self) -> int:
        return sum(step.held_items for step in self.source.chain)

    @property
    def inner(self) -> list[Stage[Any]]:
        return [self.source]

    def open(self, lane: Lane, mark: Mark | None = None) -> Repeat[Out]:
        running = running_copy(self)
        running.lane, running.at, running._recipe = lane, self._at(mark[0] if mark else None), self.source
        running.source = self.source.open(self._lane(lane, running.at.repetition), running.at.position)
        begin(running, mark)
        return running

    def run(self) -> Iterator[Out]:
        at, empty = self.at, 0
        while self.lane.shards != ():
            if (first := next(self.source.items, END)) is not END:
                empty = -1
                yield first
                yield from self.source.items
            if at.repetition + 1 == self.n:
                return
            empty += 1
            if self.n is None and empty == _MOST_EMPTY:
                raise ShardError(
                    f"repeat() found no item in {empty} repetitions of lane {self.lane.number} of {self.lane.of}: has "
                    "the list fewer shards or samples than lanes, or do filters and on_error='skip' leave nothing?"
                )
            self.retire(self.source)
            at.repetition += 1
            self.source = self._recipe.open(self._lane(self.lane, at.repetition))

    def _lane(self, lane: Lane, repetition: int) -> Lane:
        """Return the lane of the source in a repetition."""
        last = self._last
        if last is None or last[1] != repetition or last[0] != lane:
            epoch = lane.epoch * (self.n or 1) + repetition
            last = self._last = lane, repetition, self.root.lane_in(lane, epoch)
        return last[2]

    def mark(self) -> Mark:
        self.at.position = self.source.mark()
        return self._own(self.at), None

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        at = self._at(mark[0] if mark else None)
        return self.source.where(at.position, self._lane(lane, at.repetition))

    def counts(self, mark: Mark | None, delivered: int) -> dict[str, int]:
        own = mark[0] if mark else None
        return self.counts_with(own, self.source.counts(self._at(own).position, 0), delivered)

    def dump_mark(self, mark: Mark | None) -> list[dict[str, Any]]:
        *before, own = super().dump_mark(mark)
        if (position := own.pop("position", None)) is not None:
            own["position"] = self.source.dump(position)
        return [*before, own]

    def load_mark(self, entries: list[dict[str, Any]]) -> Mark:
        *before, own = entries
        if "position" not in own:
            return super().load_mark(entries)
        mark, _ = super().load_mark([*before, {**own, "position": None}])
        return (*mark[:-1], self.source.load(self._position(own))), None

    def relocate(self, entries: list[dict[str, Any]], move: Move) -> list[dict[str, Any]]:
        *before, own = super().relocate(entries, move)
        if "position" in own:
            own = {**own, "position": self.source.relocate(self._position(own), move)}
        return [*before, own]

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        *before, own = super().uncounted(entries)
        if "position" in own:
            own = {**own, "position": self.source.uncounted(self._position(entries[-1]))}
        return [*before, own]

    def _position(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the position of the source in an entry of a state."""
        return read_position(own["position"], "the source of repeat", len(self.source.dump(None)))

    def problem(self, at: Any) -> str | None:
        return f"it has {self.n} repetitions" if self.n is not None and at.repetition >= self.n else None

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        return f"in repetition {read_count(entry.get('repetition', 0), repr('repetition')) + 1}"
