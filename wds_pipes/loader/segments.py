"""The chain of a lane: it runs the segments of the lane one after another.

A chain is cut in two before a step that makes batches: the first one after which no step holds
anything between items (``Stage.scope`` is ``"item"``). The steps before the cut run
for each segment separately. The steps after it run over all segments as one stream, so that no
batch is cut short where a segment ends. If there is no such step, the cut is at the end of the
chain.

With ``epoch_end="loop"``, the segments of the lane's next epoch of the data follow, without end.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain, Composite, linked
from wds_pipes.core.counts import COUNTED, without_limited
from wds_pipes.core.lane import Lane, LaneFacts, Tap
from wds_pipes.core.occurrences import occurring
from wds_pipes.core.stage import END, Ended, Mark, Out, Reports, Stage
from wds_pipes.core.state import damaged, read_count
from wds_pipes.errors import ShardError
from wds_pipes.loader.partition import OfLane, Portion
from wds_pipes.loader.slices import Partition
from wds_pipes.loader.stats import Meter
from wds_pipes.stages.shuffle_buffer import mark_after

MOST_EMPTY = 10  # epochs of a lane in a row without a sample


class LaneReading(NamedTuple):
    """The lane that a chain reads.

    Attributes:
        partition, number, epoch: the lane.
        resumed: an earlier run may have read ahead in this epoch.
        meter: what measures the chain of each segment.
        after_epoch: called before the lane goes on to its next epoch.
    """

    partition: Partition
    number: int
    epoch: int
    resumed: bool
    meter: Meter
    after_epoch: Callable[[], None]

    @property
    def divided(self) -> int:
        """The last epoch that was repartitioned, in which a lane may have nothing; -1: none was."""
        return len(self.partition.later) if self.partition.start or self.partition.later else -1


class Segments(Composite[Out]):
    """The segments of a lane as one stream; then, to pad an epoch, repeats of its samples without
    end; or the next epochs of the lane, without end.

    Checkpoint: how many epochs the lane has done, which segment, how many of its shard ranges were
    opened, and the position in it; of a run of a remainder, also how many samples were taken.
    """

    @dataclass(slots=True)
    class At(Composite.At):  # noqa: D106 - see Stage
        epoch: int = 0  # since the epoch of the loader
        segment: int = 0
        opened: int = 0
        padded: int = 0
        taken: int = 0  # of a run: how many samples were passed over, or came and were not passed over

    tallies = (*Composite.tallies, "padded")
    keeps_count = True
    scope = "window"
    order_options = ("samples",)

    source: Stage[Out]

    reading: LaneReading  # the lane to run, in a copy that ``with_lane`` made

    def __init__(self, source: Stage[Out], *, scope: str, pads: bool, loops: bool) -> None:
        super().__init__(source)
        self.scope, self.pads, self.loops = scope, pads, loops
        self._segments: OfLane = []
        self._padding: Lane | None = None
        self._inner: Stage[Out] | None = None
        self._opening: list[Reports] = []  # the steps of ``_inner`` that may know how many ranges it has begun
        self._run: _RemainderRun | None = None
        self._resume: Mark | None = None
        self._empty = 0  # how many epochs in a row had no sample
        self._found = False  # whether this one had

    def of_lane(self, reading: LaneReading) -> Segments[Out]:
        """Return a copy of this stage to read a lane."""
        again = copy.copy(self)
        again.reading = reading
        return again

    @property
    def samples(self) -> int | None:
        """How many samples an epoch has; None: shards are partitioned, not samples."""
        counts = self.before.root.epoch_order.sample_counts
        return None if counts is None else sum(counts)

    def changes_count(self) -> str | None:
        chain = self.before
        if self.scope == "item" or not chain.counts_delivered or any(step.changes_count() for step in chain):
            return None  # there is one segment, or a step of the chain says why
        return "a step after batch_samples() holds batches, so that not all of them are full: put batch_samples() last"

    def prepare(self) -> None:
        at, reading = self.at, self.reading
        self._resume = self.parts[0].mark if self.parts else None
        if at.epoch and not self.loops:
            raise damaged(f"lane {self.lane.number} is in another epoch than its loader")
        self._segments, self._found = self._of_epoch(at.epoch), at.epoch > 0
        if self.pads:
            self._padding = reading.partition.padding(reading.number, self.before.root, reading.epoch)

    def _of_epoch(self, ahead: int) -> OfLane:
        partition, number, epoch = self.reading[:3]
        return partition.segments(number, self.before.root, epoch + ahead, ahead)

    def run(self) -> Iterator[Out]:
        at = self.at
        if at.segment > len(self._segments) and self._padding is None:
            raise damaged(
                f"lane {self.lane.number} has finished {at.segment} segments, and it has {len(self._segments)}"
            )
        while at.segment < len(self._segments) or self._padding is not None or self.loops:
            if at.segment >= len(self._segments) and self.loops:
                self._next_epoch()
                continue
            pads, whole, before = at.segment >= len(self._segments), self._resume is None, at.padded
            inner = self._inner or self._open()
            items = inner.items if self._run is None else self._run.counted(inner.items)
            if pads:
                for item in items:
                    at.padded += 1
                    yield item
            elif (first := next(items := self._named(items), END)) is not END:
                self._found = True
                yield first
                yield from items
            self.retire(inner)
            self._inner = self._run = None
            if pads and whole and at.padded == before:
                if self._lack_before.explains(at.done or {}):
                    raise self._lack_before.error(f"lane {self.lane.number} of {self.lane.of}")
                raise ShardError(
                    "there are no samples to fill up the epoch with: use epoch_end='drop', or "
                    f"find out why the shards yield none.{self._lack_before.first_skip}"
                )
            at.segment, at.opened, at.taken = at.segment + 1, 0, 0
            self._resume = None

    def _named(self, items: Iterator[Out]) -> Iterator[Out]:
        """Return the items of a segment. If a step after this one draws random numbers, they say in
        which epoch of the data they come: that step knows only the epoch of the loader.
        """
        return map(occurring, items, repeat(self.at.epoch)) if self.loops and self.lane.occurrences else items

    def _next_epoch(self) -> None:
        """Go on to the next epoch of the data, in which ``max_errors`` counts anew."""
        at = self.at
        self._empty = 0 if self._found or at.epoch <= self.reading.divided else self._empty + 1
        if self._empty and self._lack_before.explains(at.done or {}):
            raise self._lack_before.error(f"lane {self.lane.number} of {self.lane.of}")
        if self._empty >= MOST_EMPTY:
            counted = self.before.root.epoch_order.sample_counts is not None  # then lanes are divided by samples
            few = "samples" if counted else "shards"
            mend = "pass a smaller lanes=" if counted else "let ShardList(index=...) count the samples"
            raise ShardError(
                f"lane {self.lane.number} of {self.lane.of} found no sample in {self._empty} epochs in a row: has the "
                f"list fewer {few} than lanes (then {mend}), has take_samples() or "
                "slice_samples() fewer samples, or do filters and on_error='skip' leave nothing of its shards?"
                f"{self._lack_before.first_skip}"
            )
        self.reading.after_epoch()
        at.epoch, at.segment, at.done, self._found = at.epoch + 1, 0, without_limited(at.done or {}) or None, False
        self._segments = self._of_epoch(at.epoch)

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        if self._inner is None and self.at.segment < len(self._segments):
            self._open().start(ahead=ahead)

    def _open(self) -> Stage[Out]:
        """Open the segment whose turn it is."""
        chain = self.before
        pads = self.at.segment >= len(self._segments)
        portion = self._segments[self.at.segment] if self._padding is None or not pads else Portion(self._padding)
        lane, position = portion.lane, portion.position
        lane = lane if self._padding is None else replace(lane, padding=pads)
        if position is None and self.reading.resumed and not self.at.epoch:
            position = chain.dump(None)  # the beginning, as a state says it: the steps see that they resume
        mark = chain.load(position) if self._resume is None and position is not None else self._resume
        lane = replace(lane, occurrences=self.lane.occurrences, meters=self.lane.meters)
        if (left := portion.passed - self.at.taken) > 0 and (ahead := _passed_over(self.source, lane, mark, left)):
            mark, self.at.taken = ahead, portion.passed
        meter = self.reading.meter
        taps: list[tuple[Stage[Any], Tap]] = [(chain.reading_end, meter.timed)]
        if portion.passed or portion.most is not None:
            self._run = _RemainderRun(portion, self.at.taken)
            holding = next((step for step in reversed(chain.steps) if step.scope != "item"), chain.root)
            taps.insert(0, (holding, self._run.limited))
        self._inner = inner = self.source.open(replace(lane, taps=tuple(taps)), mark)
        running = Chain(inner)
        self._opening = [step for step in reversed(running.placed) if isinstance(step, Reports)]
        if self._run is not None:
            self._run.begin(running)
        meter.watch(inner)
        return inner

    @property
    def inner(self) -> list[Stage[Any]]:
        return [] if self._inner is None else [self._inner]

    @property
    def opened(self) -> int:
        if self._inner is None:
            return 0
        for step in self._opening:  # as ``Chain.opened``, without looking for them at each batch
            if (opened := step.opened) is not None:
                return opened
        return 0

    def mark(self) -> Mark:
        at, inner = self.at, self._inner
        if inner is None:
            return self._own(at), () if self._resume is None else ((self._resume,),)
        at.opened, mark = self.opened, inner.mark()
        if self._run is not None:
            at.taken = self._run.taken(mark)
        return self._own(at), ((mark,),)  # no class, which would cost more than all the rest when it is pickled

    def url_at(self, mark: Mark, partition: Partition, number: int, epoch: int) -> str | None:
        """Return the URL of the shard at a position in a lane of a partition; None: there is none.

        Args:
            mark: that of this stage.
            partition: the partition.
            number: the number of the lane.
            epoch: the epoch of the partition.
        """
        at, parts = self._at(mark[0]), self.parts_of(mark[1])
        segments = partition.segments(number, self.before.root, epoch + at.epoch, at.epoch) if parts else []
        return self._where(at, parts, segments)

    def where_in(self, own: tuple[Any, ...], parts: tuple[Any, ...], lane: Lane) -> str | None:
        return self._where(self._at(own), parts, self._segments)  # of a running copy, where it stands

    def _where(self, at: Any, parts: tuple[Any, ...], segments: Sequence[Portion]) -> str | None:
        if not parts or not segments:
            return None
        return self.before.where(parts[0].mark, segments[min(at.segment, len(segments) - 1)].lane)

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        ahead = read_count(entry.get("epoch", 0), "'epoch' of segments")
        return f"in epoch {lane.epoch + ahead} of the data" if ahead else None


def _passed_over(last: Stage[Any], lane: Lane, mark: Mark | None, count: int) -> Mark | None:
    """Return the position of a chain after the next ``count`` items of its last step that holds
    any, without reading them; None if it is not known.
    """
    if last.scope != "item" or last.source is None or mark is None or isinstance(mark, Ended):
        return mark_after(last, lane, mark, count)
    before = _passed_over(last.source, lane, mark[1], count)
    return before and (mark[0], before)


class _RemainderRun:
    """A run of a remainder, while it is read: it makes the chain of the remainder yield only this.

    Args:
        portion: the run.
        taken: how many samples of the remainder were taken before.

    Raises:
        StateError: the run ends earlier.
    """

    def __init__(self, portion: Portion, taken: int) -> None:
        most = None if portion.most is None else portion.passed + portion.most
        if most is not None and taken > most:
            raise damaged(f"lane {portion.lane.number} has taken {taken} of the {most} samples of a run")
        self._taken, self._came = taken, 0
        self._begin = max(taken, portion.passed)
        self._rest = None if most is None else most - self._begin
        self._lost_before = 0

    def begin(self, chain: Chain) -> None:
        """Note the chain, which was opened with the tap ``limited`` and has not yielded anything
        yet.
        """
        self._chain = chain
        self._lost_before = self._lost(chain.steps[-1].mark())

    def limited(self, _: Stage[Any], items: Iterator[Any]) -> Iterator[Iterable[Any]]:
        """Yield the items of the run as one part, of those of the last step that holds items: a
        tap.
        """
        passed = self._begin - self._taken
        if sum(1 for _ in itertools.islice(items, passed)) < passed:
            raise damaged("a remainder has fewer samples than its lanes divide")
        yield itertools.islice(items, self._rest)

    def counted(self, items: Iterator[Out]) -> Iterator[Out]:
        """Yield items of the chain, and count them."""
        for item in items:
            self._came += 1
            yield item

    def taken(self, mark: Mark) -> int:
        """Return how many samples were taken at a position of the chain, after the last item."""
        return self._begin + self._came + self._lost(mark) - self._lost_before if self._came else self._taken

    def _lost(self, mark: Mark) -> int:
        """Return how many samples steps have left out; a loaded edit may have added such a step."""
        counts = self._chain.counts(mark, 0)
        return sum(counts.get(name, 0) for name in COUNTED if name != "delivered")


def lay_out(stage: Stage[Any], *, scope: str, pads: bool, loops: bool) -> Stage[Any]:
    """Return the chain with a ``Segments`` stage where it is cut in two.

    Args:
        stage: the chain.
        scope: ``"item"`` if all lanes have one order, otherwise ``"window"``.
        pads: whether repeats fill up an epoch.
        loops: whether the next epoch follows.

    Raises:
        TypeError: the chain starts with a stage that PipeLoader cannot divide.
    """
    chain = Chain(stage)
    if not chain.root.divides:
        raise TypeError(
            "PipeLoader needs a pipeline that starts with ShardList, SampleList, or a mix() of such pipelines"
        )
    steps = chain.steps
    batching = [place for place, step in enumerate(steps) if step.items_per_batch is not None]
    cut = next((place for place in batching if all(step.scope == "item" for step in steps[place:])), len(steps))
    return linked(Segments(steps[cut - 1], scope=scope, pads=pads, loops=loops), steps[cut:])


def with_lane(stage: Stage[Any], reading: LaneReading) -> Stage[Any]:
    """Return a copy of a chain that ``lay_out`` made, to read a lane."""
    steps = Chain(stage).steps
    place = steps.index(segments_of(stage))
    return linked(segments_of(stage).of_lane(reading), steps[place + 1 :])


def segments_of(stage: Stage[Any]) -> Segments[Any]:
    """Return the ``Segments`` stage that ``lay_out`` put in."""
    return next(step for step in Chain(stage) if isinstance(step, Segments))
