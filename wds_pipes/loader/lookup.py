"""Which samples a rank gets at a step, and when a sample comes, without reading the shards.

Words:
- The *stream* of a lane is all its samples, in their order: batch n of the lane is the n-th run of
  them. It consists of *pieces*, each a part of one shuffled order: the segments of the lane, then
  its repeats, or the segments of its next epochs.
- The *turn* of a batch of a lane is its number among the batches of the lanes of its rank: these
  come in the order of (number of the batch in its lane, lane).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from wds_pipes.core.lane import Lane, ShardRanges
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Reorders, Stage, functional_name, is_built_in
from wds_pipes.core.state import MOST
from wds_pipes.core.words import plural
from wds_pipes.io.urls import redact
from wds_pipes.loader.lengths import batches_of
from wds_pipes.loader.partition import LaneAt, LanePiece, in_turns
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.segments import Segments
from wds_pipes.stages.shard_source import ShardSource

if TYPE_CHECKING:
    from wds_pipes.stages.shard_source import Numbers


class PlannedSample(NamedTuple):
    """A sample of a batch that a loader will return, or has returned.

    Attributes:
        url: the URL or path of its shard, without credentials.
        number: its number in the shard, from 0 on.
        key: its key; None: it was not requested.
        padding: whether it is a repeat that fills up the epoch.
    """

    url: str
    number: int
    key: str | None = None
    padding: bool = False


class PlannedVisit(NamedTuple):
    """When a loader returns a sample.

    Attributes:
        epoch: in which epoch.
        step: in which batch of its rank, as ``PipeLoader.plan`` counts them.
        rank: on which rank.
        place: the place of the sample in the batch, from 0 on.
    """

    epoch: int
    step: int
    rank: int
    place: int


class _Standing(NamedTuple):
    """Where a lane stands: how many batches and samples it has had, and how many batches there are,
    and samples in them (MOST: there is no end).
    """

    lane: int
    batches: int
    samples: int
    stop: int
    end: int = MOST


def why_unknown(plan: Plan) -> str | None:
    """Return why the order of the samples cannot be known without reading them, and what to do, for
    a message; None if it can.
    """
    batched, (root, *steps) = False, plan.chain.steps
    if not (isinstance(root, ShardSource) and is_built_in(type(root))):
        return f"{functional_name(type(root))}() decides while it runs which samples come"
    for step in steps:
        if batched and isinstance(step, Reorders):
            return f"{functional_name(type(step))}() reorders batches: put it before the step that makes them"
        if not isinstance(step, Segments) and (reason := step.unforeseen()) is not None:
            return reason
        batched = batched or step.items_per_batch is not None
    return plan.uncounted or (root.epoch_order.epochs_differ() if plan.endless else None)


class Lookup:
    """The order of the samples of a loader in one epoch, or in the rest of one.

    Args:
        plan: the plan of the loader.
        at: where the loader stands in this epoch.
        resumed: the lanes of other ranks may stand elsewhere than those of this one would.

    Raises:
        ValueError: the order cannot be known.
    """

    def __init__(self, plan: Plan, at: LoaderPosition, *, resumed: bool) -> None:
        if (reason := why_unknown(plan)) is not None:
            raise ValueError(f"which samples come when is not known without reading them: {reason}")
        self._plan, self._at, self._resumed = plan, at, resumed
        self._partition, self._terms, self._root = at.partition, plan.terms, cast("ShardSource[Any]", plan.source)
        self._reorders = [step for step in plan.chain if isinstance(step, Reorders)]
        self._pieces = lru_cache(64)(self._pieces_of)
        # of how many epochs the numbers of samples may differ from those of all later ones
        grown = self._root.epoch_order.grown
        self._unlike = 1 + max([len(self._partition.later), *(last - at.epoch for last, _ in grown)])

    def samples(self, step: int, rank: int, *, keys: bool) -> list[PlannedSample]:
        """Return the samples of a batch: see ``PipeLoader.plan``."""
        root = self._root
        return [
            PlannedSample(redact(root.urls[shard]), number, root.key_of(shard, number) if keys else None, pads)
            for shard, number, pads in self._batch(step, rank)
        ]

    def visits(self, sample: str | int, ahead: int = 0) -> list[PlannedVisit]:
        """Return when a sample comes: see ``PipeLoader.find``. ``ahead``: in which epoch of the
        data, counted from the one where the partition begins.
        """
        counts = np.array(self._root.samples, np.int64)
        ends = np.cumsum(counts)
        if isinstance(sample, str):
            numbers = self._root.numbers_of(sample)
            if not numbers:
                raise KeyError(f"no sample has the key {sample!r:.200}")
        else:
            total = int(ends[-1])
            numbers = [check_count("the number of a sample", sample, least=0)]
            if numbers[0] >= total:
                raise IndexError(f"there is no sample {numbers[0]}: there are {total}")
        found = list[PlannedVisit]()
        for number in numbers:
            shard = int(np.searchsorted(ends, number, side="right"))
            found += self._visits(shard, number - int(ends[shard] - counts[shard]), ahead)
        return sorted(found)

    # Steps and turns

    def _batch(self, step: int, rank: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the samples of a batch: the shard of each, its number there, and whether it is a
        repeat.

        Raises:
            IndexError: the rank has no such step.
            ValueError: it is not known what a rank got before, or what another one gets.
        """
        standing, first, parts = *self._standing(rank), self._plan.parts
        if step < first:
            raise ValueError(
                f"step {step} is not known: the loader has continued at step {first} from a state of other ranks or "
                "batches, or after skip(), and this says what comes from there on"
            )
        turn, total = (step - first) * parts, _total(standing)
        steps = first + (total // parts if self._plan.drop_last else -(-total // parts))
        if step >= steps:
            raise IndexError(f"there is no step {step}: rank {rank} has {plural(steps, 'step')} in this epoch")
        for place in range(turn, min(turn + parts, total)):
            yield from self._samples(*self._of_batch(*_at_turn(standing, place)))

    def _visits(self, shard: int, number: int, ahead: int) -> Iterator[PlannedVisit]:
        """Yield when a sample comes, for each of its places in the order of the epoch that is not a
        repeat. What is over, or dropped, is left out.
        """
        plan, ranks = self._plan, self._plan.rank.of
        for lane, place in self._places_of(shard, number, ahead):
            standing, first = self._standing(lane % ranks)
            own = standing[lane // ranks]
            batch = own.batches + (place - own.samples) // self._terms.size
            _, start, stop = self._of_batch(own, batch)
            if not (own.batches <= batch < own.stop and place < stop):
                continue
            turn = _turn_of(standing, lane, batch)
            begin = turn - turn % plan.parts
            if plan.drop_last and begin + plan.parts > _total(standing):
                continue
            parts = [self._of_batch(*_at_turn(standing, earlier)) for earlier in range(begin, turn)]  # of other lanes
            inside = sum(last - part for _, part, last in parts) + place - start
            yield PlannedVisit(self._at.epoch + ahead, first + turn // plan.parts, lane % ranks, inside)

    def _standing(self, rank: int) -> tuple[list[_Standing], int]:
        """Return where the lanes of a rank stand, and at which step: at the first one, if all steps
        up to now were those of this loader.
        """
        plan, at, size = self._plan, self._at, self._terms.size
        begin, own = self._begin(rank), self._begin(plan.rank.number)
        numbers = sorted(at.lanes)
        states = [at.lanes[number] for number in numbers]
        samples = [plan.samples_had(number, at.lanes[number]) for number in numbers]
        had = sum(state.delivered for state in states)
        expected = _after(own, had, size)
        regular = all(
            state.delivered == lane.batches and (lane.batches == lane.stop if state.ended else count == lane.samples)
            for state, count, lane in zip(states, samples, expected, strict=True)
        )
        # with independent lanes, ranks may have had different numbers of batches
        together = self._terms.mode not in at.partition.fit_any_batches
        as_here = not at.partition.given and had == min(at.step * plan.parts, _total(own))
        whole, mine = regular and as_here, rank == plan.rank.number
        if whole and (mine or together or not self._resumed):
            return begin, 0
        if mine:
            return [*map(self._resuming, own, states, samples)], at.step
        if not (regular and together):
            raise ValueError(
                f"where the lanes of rank {rank} stand is not known on rank {plan.rank.number}, since a state was "
                f"loaded: build a loader with rank={rank}, world_size={plan.rank.of}, load the state there, and ask it"
            )
        before = in_turns(at.partition.given, plan.rank.of)
        return _after(begin, had + before[rank] - before[plan.rank.number], size), at.step

    def _begin(self, rank: int) -> list[_Standing]:
        """Return where the lanes of a rank begin."""
        lanes = range(rank, self._partition.lanes, self._plan.rank.of)
        batches, samples = self._partition.batches(self._terms), self._partition.samples()
        if self._plan.endless:
            return [_Standing(lane, 0, 0, MOST) for lane in lanes]
        if batches is not None:
            return [_Standing(lane, 0, 0, batches[lane]) for lane in lanes]
        assert samples is not None
        makers = self._plan.chain.batching
        return [_Standing(lane, 0, 0, *_batches_and_kept(makers, samples[lane])) for lane in lanes]

    def _resuming(self, begin: _Standing, state: LaneAt, had: int) -> _Standing:
        """Return where a lane stands after batches of other sizes, which had so many samples."""
        delivered, samples = state.delivered, self._partition.samples()
        if begin.end == MOST or samples is None:  # its batches are all full
            return begin._replace(batches=delivered, samples=had)
        left, kept = (0, 0) if state.ended else _batches_and_kept(self._plan.chain.batching, samples[begin.lane] - had)
        return _Standing(begin.lane, delivered, had, delivered + left, had + kept)

    def _of_batch(self, lane: _Standing, batch: int) -> tuple[int, int, int]:
        """Return the lane of a batch, and which run of its stream the batch is."""
        start = lane.samples + (batch - lane.batches) * self._terms.size
        return lane.lane, start, min(start + self._terms.size, lane.end)

    # Streams of lanes

    def _samples(self, lane: int, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the samples of a run of the stream of a lane, as ``_batch`` does."""
        while start < stop:
            piece, inside = self._piece_at(lane, start)
            count = min(stop - start, piece.size - inside)
            shards, numbers = self._of_piece(piece, inside, inside + count)
            yield from ((*one, piece.pads) for one in zip(shards.tolist(), numbers.tolist(), strict=True))
            start += count

    def _of_piece(self, piece: LanePiece, start: int, stop: int) -> tuple[Numbers, Numbers]:
        """Return the shards of samples ``start`` to ``stop - 1`` of a piece, and their numbers."""
        order = np.arange(start + piece.taken, stop + piece.taken)
        for step in reversed(self._reorders):
            first = int(order.min())
            order = step.leaving(piece.lane, first, int(order.max()) + 1, _whole(piece.lane))[order - first]
        return self._root.samples_after(order, piece.lane)

    def _pieces_of(self, lane: int, ahead: int) -> list[LanePiece]:
        """Return the pieces of a lane in an epoch, ``ahead`` epochs after that of the partition."""
        return self._partition.pieces(lane, self._root, self._at.epoch + ahead, ahead)

    def _piece_at(self, lane: int, place: int) -> tuple[LanePiece, int]:
        """Return in which piece of the stream of a lane a place is, and where."""
        ahead = 0
        if self._plan.endless:
            least, each = self._before(lane, self._unlike), self._size(lane, self._unlike)
            if place >= least and not each:
                raise ValueError(f"lane {lane} of {self._partition.lanes} has no samples: use fewer lanes")
            later = range(self._unlike) if place < least else [self._unlike + (place - least) // each]
            ahead = next(epoch for epoch in later if place < self._before(lane, epoch + 1))
            place -= self._before(lane, ahead)
        for piece in self._pieces(lane, ahead):
            if place < piece.size:
                return piece, place
            place -= piece.size
        repeats = self._partition.padding(lane, self._root, self._at.epoch)
        assert repeats is not None
        size = _whole(repeats)
        return LanePiece(repeats, 0, size, pads=True), place % size

    def _before(self, lane: int, ahead: int) -> int:
        """Return how many samples a lane has in the epochs before one."""
        known = min(ahead, self._unlike)
        later = (ahead - known) * self._size(lane, known) if ahead > known else 0
        return sum(self._size(lane, epoch) for epoch in range(known)) + later

    def _size(self, lane: int, ahead: int) -> int:
        """Return how many samples a lane has in an epoch."""
        return sum(piece.size for piece in self._pieces(lane, ahead))

    def _places_of(self, shard: int, number: int, ahead: int) -> Iterator[tuple[int, int]]:
        """Yield the lanes that have a sample, and its places in their streams."""
        whole = self._partition.lane(0, self._root, self._at.epoch + ahead)
        found = self._root.in_ranges(shard, number, whole)
        for lane in range(whole.of):
            begin = self._before(lane, ahead)
            for piece in self._pieces(lane, ahead):
                for place in self._in_piece(piece.lane, found):
                    if piece.taken <= place < piece.taken + piece.size:
                        yield lane, begin + place - piece.taken
                begin += piece.size

    def _in_piece(self, lane: Lane, found: Iterable[tuple[int, int]]) -> Iterator[int]:
        """Yield the places of samples in the order of a piece."""
        for number, inside in found:
            for place in self._root.before(number, inside, lane):
                for step in self._reorders:
                    place = step.place_of(lane, place, _whole(lane))
                yield place


def _whole(lane: Lane) -> int:
    """Return how many samples the ranges of a lane have."""
    return ShardRanges.of(lane.shards or ()).samples


def _batches_and_kept(steps: list[Stage[Any]], samples: int) -> tuple[int, int]:
    """Return how many batches these steps make of a number of samples, and of how many of them."""
    kept, unit = samples, 1
    for step in steps:
        size, items = step.items_per_batch or 1, -(-kept // unit)
        kept = min(kept, step.batches_of(items) * size * unit)
        unit *= size
    return batches_of(steps, samples), kept


def _taken(lane: _Standing, batch: int) -> int:
    """Return how many batches a lane yields from where it stands, up to this number of it."""
    return max(0, min(batch, lane.stop) - lane.batches)


def _total(standing: list[_Standing]) -> int:
    """Return how many batches lanes yield from where they stand."""
    return sum(_taken(lane, MOST) for lane in standing)


def _turn_of(standing: list[_Standing], lane: int, batch: int) -> int:
    """Return the turn of a batch of a lane, from where the lanes stand."""
    return sum(_taken(one, batch + (one.lane < lane)) for one in standing)


def _at_turn(standing: list[_Standing], turn: int) -> tuple[_Standing, int]:
    """Return the lane and the number of the batch whose turn it is: the inverse of ``_turn_of``."""
    low, high = min(lane.batches for lane in standing), max(lane.batches for lane in standing) + turn
    while low < high:  # the last number whose batches do not all come later
        middle = (low + high + 1) // 2
        if sum(_taken(lane, middle) for lane in standing) <= turn:
            low = middle
        else:
            high = middle - 1
    left = turn - sum(_taken(lane, low) for lane in standing)
    going = [lane for lane in standing if lane.batches <= low < lane.stop]
    return going[left], low


def _after(standing: list[_Standing], turns: int, size: int) -> list[_Standing]:
    """Return where lanes stand that had nothing, after this number of batches of a size."""
    if turns >= _total(standing):
        batches = [lane.stop for lane in standing]
    else:
        last, number = _at_turn(standing, turns)
        batches = [_taken(lane, number + (lane.lane < last.lane)) for lane in standing]
    return [
        lane._replace(batches=count, samples=min(count * size, lane.end))
        for lane, count in zip(standing, batches, strict=True)
    ]
