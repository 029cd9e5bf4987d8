"""Which part of which epoch a chain yields, and where that is decided; and ranges of shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np

from wds_pipes.core.counts import Meters
from wds_pipes.core.order import hash64

if TYPE_CHECKING:
    import numpy.typing as npt

# a range: the number of the shard, its first sample, and the sample after the last; -1: to the end
# of the shard
ShardRange = tuple[int, int, int]
_Count = TypeVar("_Count", int, "npt.NDArray[np.int64]")
_BLOCK = 1 << 12  # ranges that become tuples at a time


class ShardRanges(Sequence[ShardRange]):
    """Ranges of shards, in order. They do not change; a slice shares their memory.

    Args:
        numbers: the numbers of the shards.
        starts: the first sample of each range.
        stops: the sample after the last of each; -1: the range ends with the shard.
    """

    def __init__(self, numbers: npt.NDArray[np.int_], starts: npt.NDArray[np.int_], stops: npt.NDArray[np.int_]):
        self.numbers, self.starts, self.stops = self._columns = numbers, starts, stops

    @classmethod
    def of(cls, ranges: Iterable[ShardRange]) -> ShardRanges:
        """Return these ranges."""
        return ranges if isinstance(ranges, cls) else cls(*np.array([*ranges], np.int64).reshape(-1, 3).T)

    @classmethod
    def of_all(cls, parts: Iterable[ShardRanges]) -> ShardRanges:
        """Return the ranges of several lists."""
        return cls(*map(np.concatenate, zip(*(part._columns for part in parts), strict=True)))

    @classmethod
    def whole(cls, numbers: npt.NDArray[np.int_], samples: Sequence[int] | None) -> ShardRanges:
        """Return whole shards.

        Args:
            numbers: their numbers.
            samples: how many samples each shard of the list has; None: unknown.
        """
        stops: npt.NDArray[Any] = (
            np.broadcast_to(np.int32(-1), len(numbers)) if samples is None else _small(samples)[numbers]
        )
        return cls(_small(numbers), np.broadcast_to(np.int32(0), len(numbers)), stops)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, place: int) -> ShardRange: ...
    @overload
    def __getitem__(self, place: slice | npt.NDArray[Any]) -> ShardRanges: ...
    def __getitem__(self, place: int | slice | npt.NDArray[Any]) -> ShardRange | ShardRanges:
        numbers, starts, stops = (column[place] for column in self._columns)
        if isinstance(place, int):
            return int(numbers), int(starts), int(stops)
        return ShardRanges(numbers, starts, stops)

    def __iter__(self) -> Iterator[ShardRange]:
        for first in range(0, len(self), _BLOCK):
            yield from zip(*(column[first : first + _BLOCK].tolist() for column in self._columns), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardRanges) and all(map(np.array_equal, self._columns, other._columns))

    def __hash__(self) -> int:
        return hash((len(self), *self[:1], *self[-1:]))

    @property
    def samples(self) -> int:
        """How many samples the ranges have together, if the shards are counted."""
        return int(self.stops.sum(dtype=np.int64) - self.starts.sum(dtype=np.int64))

    def without_empty(self) -> ShardRanges:
        """Return the ranges without those of shards that have no samples."""
        return self if self.stops.all() else self[np.flatnonzero(self.stops)]

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """How many samples there are up to the end of each range, of counted shards."""
        return np.cumsum(self.stops - self.starts, dtype=np.int64)

    def samples_after(self, taken: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the samples that come after these numbers of others: the number of the shard of
        each, and its number there. The shards are counted.
        """
        ends = self.ends
        of = np.searchsorted(ends, taken, side="right")
        return self.numbers[of].astype(np.int64), self.stops[of] - (ends[of] - taken)

    def before(self, shard: int, number: int) -> list[int]:
        """Return of each time that a sample comes, how many others come before it."""
        of = np.flatnonzero((self.numbers == shard) & (self.starts <= number) & (number < self.stops))
        taken: list[int] = (self.ends[of] - (self.stops[of] - number)).tolist()
        return taken

    def cut(self, sizes: Iterable[int]) -> Iterator[ShardRanges]:
        """Yield runs of these numbers of samples, one after the other, of counted shards."""
        ends, stop = self.ends, 0
        for size in sizes:
            start, stop = stop, stop + size
            first, last = np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop, "left")
            run = self[first : last + 1 if size else first]
            starts, stops = run.starts.astype(run.stops.dtype), run.stops.copy()
            if size:
                starts[0] = self.stops[first] - (ends[first] - start)
                stops[-1] -= ends[last] - stop
            yield ShardRanges(run.numbers, starts, stops)


def _small(values: Sequence[int] | npt.NDArray[np.int_]) -> npt.NDArray[np.int_]:
    """Return numbers as an array, which takes 4 bytes for each if that is enough."""
    array = np.asarray(values, np.int64)
    return array if array.size and array.max() >= 1 << 31 else array.astype(np.int32)


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

    def place(self, taken: _Count) -> _Count:
        """Return the place that comes after ``taken`` places; also for an array of numbers."""
        turn, inside = divmod(taken, self.size)
        return self.start + (turn * self.of + self.number) * self.size + inside

    def before(self, place: int) -> list[int]:
        """Return how many places come before one; none if it is not in the slice."""
        run, inside = divmod(place - self.start, self.size)
        turn, number = divmod(run, self.of)
        return [turn * self.size + inside] if run >= 0 and number == self.number else []


Tap = Callable[[Any, Iterator[Any]], Iterator[Iterable[Any]]]  # see ``Lane``


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
        occurrences: whether samples say which occurrence they are, since a later step draws random
            numbers for them: see ``wds_pipes.core.occurrences``.
        meters: what the whole chain counts: all lanes that it makes for chains that it runs have
            these, see ``Composite``.
        taps: functions that the items of steps pass through, each with its step of the recipe. It
            takes the running step and its items, and returns what others get, in parts: an
            iterator over iterables, which costs less for each item.
    """

    seed: int
    epoch: int
    number: int = 0
    of: int = 1
    generation: int = 0
    shards: Sequence[tuple[int, int, int]] | None = None
    padding: bool | None = None
    slice: Slice | None = None
    occurrences: bool = False
    meters: Meters = field(default_factory=Meters, compare=False, repr=False)
    taps: tuple[tuple[Any, Tap], ...] = field(default=(), compare=False, repr=False)

    def key(self, *salt: int) -> int:
        """Return the 64-bit key of this lane's random decisions; ``salt`` separates one use from
        another.
        """
        again = (self.generation,) if self.generation else ()
        return hash64(self.seed, self.epoch, self.number, self.of, *again, *salt)


class Copies:
    """The copies of a chain that other processes iterate. There are none: a host whose workers
    iterate copies puts an object of its own class into the ``Context``.

    Attributes:
        times: how often new copies were made that go on from the position of the chain.
    """

    times: int = 0

    def tell(self, epoch: int | None) -> None:
        """The chain is told an epoch, or a state (None)."""

    def hear(self) -> int | None:
        """Return the epoch that the chain was told since this copy was made; None: it was told
        none.
        """
        return None

    def end(self, epoch: int, lanes: int, lacking: bool, empty: bool) -> tuple[bool, bool]:
        """Note that the lane of this process, one of ``lanes``, has ended and yielded nothing: its
        samples lacked the fields that are kept, or it had none, which is not allowed.

        Returns:
            whether no lane yielded anything in this epoch, and samples of at least one lane lacked
            fields; and whether it is known that all lanes were empty.
        """
        return lacking, False


@dataclass(slots=True)
class Context:
    """The iteration context of a whole chain.

    Attributes:
        epoch: the epoch of the next iteration.
        lane: which lane this process yields.
        lanes: of how many.
        copies: the copies of the chain that other processes iterate.
        made_in: the process that made the chain.
    """

    epoch: int = 0
    lane: int = 0
    lanes: int = 1
    copies: Copies = field(default_factory=Copies)
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
