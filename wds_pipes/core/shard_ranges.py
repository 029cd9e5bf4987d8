"""Ranges of shards in columns: a list of 10**6 shards has as many in each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

# a range: the number of the shard, its first sample, and the sample after the last; -1: to the end
# of the shard
ShardRange = tuple[int, int, int]
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

    def cut(self, sizes: Iterable[int]) -> Iterator[ShardRanges]:
        """Yield runs of these numbers of samples, one after the other, of counted shards."""
        ends, stop = np.cumsum(self.stops - self.starts, dtype=np.int64), 0
        for size in sizes:
            start, stop = stop, stop + size
            first, last = np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop, "left")
            run = self[first : last + 1 if size else first]
            starts, stops = run.starts.astype(run.stops.dtype), run.stops.copy()
            if size:
                starts[0] = self.stops[first] - (ends[first] - start)
                stops[-1] -= ends[last] - stop
            yield ShardRanges(run.numbers, starts, stops)


def joined(parts: Iterable[ShardRanges]) -> ShardRanges:
    """Return the ranges of several lists."""
    return ShardRanges(
        *map(np.concatenate, zip(*((part.numbers, part.starts, part.stops) for part in parts), strict=True))
    )


def _small(values: Sequence[int] | npt.NDArray[np.int_]) -> npt.NDArray[np.int_]:
    """Return numbers as an array, which takes 4 bytes for each if that is enough."""
    array = np.asarray(values, np.int64)
    return array if array.size and array.max() >= 1 << 31 else array.astype(np.int32)
