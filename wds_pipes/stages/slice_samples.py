"""SliceSamples: yield the samples from one place of an epoch to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from wds_pipes.core.lane import Lane, LaneFacts
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Out, Stage, functional_name
from wds_pipes.core.state import MOST, damaged, read_count


class SliceSamples(Stage[Out]):
    """Yield a slice of each epoch, as ``itertools.islice`` does (functional name:
    ``slice_samples``).

    A process that reads the whole epoch yields the samples of
    ``itertools.islice(samples, start, stop, step)``. After the last of them nothing more is read:
    files and connections are closed. The samples before it that are left out are read, and counted
    as filtered: put this step before decoding.

    PipeLoader and the workers of a DataLoader divide an epoch into lanes. Then each lane yields its
    share, so that all lanes together yield at most ``stop - start`` samples. For this, the samples
    of L lanes count as taken in turn: place p of lane i is place p * L + i of the epoch. Only
    ``step`` counts the places within the lane. So on the same number of lanes, slices that do not
    overlap have no sample in common, and slices that cover an epoch have all of it:
    ``slice_samples(0, 500)`` and ``slice_samples(500)``, or ``slice_samples(0, step=2)`` and
    ``slice_samples(1, step=2)``. On another number of lanes a slice has other samples. No lane
    makes up for another that has too few samples: the total is smaller if there are fewer shards
    than lanes, unless the samples of the shards are counted. On several ranks, PipeLoader needs
    ``epoch_end="exact"`` or ``"loop"``.

    The slice is taken anew in each epoch. If ``ShardList`` shuffles the shards or resamples them,
    it has other samples in each epoch. Before ``shuffle_buffer``, only samples of the slice are
    read and shuffled; after it, the slice is one of the shuffled order. Put this step after
    ``interleave_shards``.

    Args:
        source: any pipe.
        start: the place of the first sample; the first of the epoch has place 0.
        stop: the place after the last sample; None: the slice goes to the end of the epoch.
        step: yield one of this many samples.

    Raises:
        TypeError, ValueError: when the stage is built, unless these are ints with
            0 <= start < stop and step >= 1.

    Checkpoint: how many samples were read, and how many of them were left out. A resume reads
    nothing again. If an epoch continues on another number of ranks or workers, its lanes are not
    divided: each continues as a whole, so that the epoch has the same samples.
    """

    @dataclass(slots=True)
    class At:
        read: int = 0
        filtered: int = 0

    tallies = ("filtered",)
    order_options: ClassVar[tuple[str, ...]] = ("first", "stop", "step")
    _holds_none = True

    def __init__(self, source: Stage[Out], start: int, stop: int | None = None, step: int = 1) -> None:
        super().__init__(source)
        self.first = check_count("start", start, least=0)
        self.stop = None if stop is None else check_count("stop", stop, least=0)
        if self.stop is not None and self.stop <= self.first:
            raise ValueError(f"stop must be more than start={start}, not {stop}")
        self.step = check_count("step", step)

    def run(self) -> Iterator[Out]:
        at, source, places = self.at, self.source, self._places()
        assert source is not None
        end = _end(places)
        if at.read > end:
            raise damaged(f"lane {self.lane.number} has read {at.read} samples, up to place {end}")
        if at.read == end:
            return
        for sample in source.items:
            at.read += 1
            if at.read - 1 in places:
                yield sample
                if at.read == end:
                    self.earlier = source.mark()
                    source.close()
                    return
            else:
                at.filtered += 1

    @property
    def _ends(self) -> bool | None:  # type: ignore[override]
        return None if self.stop is None else True

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        if self.at.read < _end(self._places()):
            super().start(offset, ahead=ahead)

    def _places(self) -> range:
        """Return the places in this lane whose samples it yields."""
        start, stop = _share(self.first, self.lane), MOST if self.stop is None else _share(self.stop, self.lane)
        return range(start + (self.first - start) % self.step, stop, self.step)

    def changes_count(self) -> str | None:
        known = "SampleList(urls, where=split_by_key(shares)[name])"
        return f"{super().changes_count()} (of {known} it is known, on all ranks)"

    def problem(self, at: Any) -> str | None:
        if at.filtered > at.read or (self.stop is not None and at.read > self.stop):
            return "it cannot have read this number of samples"
        return None

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        return f"{functional_name(cls)} at {read_count(entry.get('read', 0), repr('read')):,}"


def _share(count: int, lane: Lane) -> int:
    """Return how many of the first ``count`` places of an epoch are in this lane, if the lanes take
    turns. It never shrinks when ``count`` grows, so slices that do not overlap do not overlap in
    any lane.
    """
    return (count + lane.of - 1 - lane.number) // lane.of


def _end(places: range) -> int:
    """Return how many samples are read up to the last of these places."""
    return places[-1] + 1 if places else 0
