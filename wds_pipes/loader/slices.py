"""Slices of one global order: over a ``SampleList``, the batches of all ranks at a step are
neighbours in the order of the epoch.

Rules:
1. Batch b of an epoch holds places b * B to (b + 1) * B of its order; B is the batch size. Lane l
   of L has the batches l, l + L, l + 2 * L and so on. Batches come in the order of (number of the
   batch in its lane, lane), and rank r of R hosts the lanes r, r + R and so on. So rank r yields
   batch t * R + r at step t, whatever the number of its workers.
2. After t steps, all ranks together have had the first t * R batches. So one place says what is
   left of the epoch. It is repartitioned by the same rule, counted from this place, with any number
   of lanes and any batch size.
3. Epochs have a global order if all steps keep the number and the order of the samples. With
   ``epoch_end="loop"`` or ``mix_lanes``, lanes are independent of each other, and there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from wds_pipes.core.chain import Chain, changes_order
from wds_pipes.core.counts import LEFT_OUT, leave_out
from wds_pipes.core.digest import NOTHING, Digest, add, as_counts, of_counts, to_text
from wds_pipes.core.lane import Lane, Slice
from wds_pipes.core.stage import Source, Stage, is_built_in
from wds_pipes.core.state import damaged, read_count, read_digest
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError
from wds_pipes.loader.lengths import batches_of
from wds_pipes.loader.partition import NOT_BEGUN, LanePiece, LaneStates, OfLane, Portion, Terms
from wds_pipes.loader.ranges import Ranges
from wds_pipes.stages.sample_list import SampleList

_PLACE = "place"  # the entry of a state that says from which place on an epoch is divided
_DIGEST = "digest"  # the entry with the digest of the samples before this place


@dataclass(frozen=True, kw_only=True)
class Slices:
    """A partition of the global order of an epoch, from a place on, into slices.

    Attributes:
        lanes, counts, later, in_order, fit_any_batches: as in ``Ranges``.
        place: the first place that no rank has had.
        stop: the end of the last batch.
        size: how many samples a batch has.
        total: how many samples the epoch has.
        left_out: how many samples before ``place`` ``PipeLoader.skip`` left out.
        pads: whether repeats fill the last batches.
    """

    lanes: int
    counts: dict[str, int]
    place: int
    stop: int
    size: int
    total: int
    pads: bool
    left_out: int = 0

    later: ClassVar = ()
    in_order: ClassVar = True
    fit_any_batches: ClassVar[tuple[str, ...]] = ()
    given: ClassVar = 0

    @classmethod
    def of(
        cls, lanes: int, epoch: int, terms: Terms, place: int = 0, digest: Digest = NOTHING, *, left_out: int = 0
    ) -> Slices:
        """Return the partition of the places from ``place`` on; ``digest`` is of those before, of
        which ``left_out`` samples were left out.
        """
        total, step = terms.chain.root.epoch_order.samples_in(epoch), terms.ranks * terms.size
        stop = total
        if terms.mode != "exact":
            steps = (total - place) // step if terms.mode == "drop" else -(-(total - place) // step)
            stop = place + steps * step
        counts, pads = {"delivered": place} if place else {}, terms.mode == "pad"
        leave_out(counts, left_out)
        counts |= as_counts(digest) if digest else {}
        return cls(
            lanes=lanes,
            counts=counts,
            place=place,
            stop=stop,
            size=terms.size,
            total=total,
            pads=pads,
            left_out=left_out,
        )

    def after_skip(self, batches: int, states: LaneStates, epoch: int, terms: Terms) -> Slices:
        """Return the partition of what is left after the next batches of each rank, of which some
        must be left. The lanes keep their digests, since a rank does not know those of others.
        """
        more = batches * terms.ranks * terms.size
        place, digest = self.next_place(states, terms) + more, of_counts(self.counts)
        return self.of(self.lanes, epoch, terms, place, digest, left_out=self.left_out + more)

    def _slice(self, number: int, stop: int | None = None) -> Slice:
        return Slice(self.size, self.place, self.stop if stop is None else stop, number, self.lanes)

    def lane(self, number: int, source: Source[Any], epoch: int) -> Lane:
        padding = False if self.pads else None
        return Lane(source.seed, epoch, number, self.lanes, padding=padding, slice=self._slice(number))

    def segments(self, number: int, source: Source[Any], epoch: int, ahead: int = 0) -> OfLane:
        return [Portion(self.lane(number, source, epoch))]

    def pieces(self, number: int, source: Source[Any], epoch: int, ahead: int = 0) -> list[LanePiece]:
        lane, own = self.lane(number, source, epoch), self._slice(number, self.total).count
        return [LanePiece(lane, 0, own), LanePiece(lane, own, self._slice(number).count - own, pads=True)]

    def padding(self, number: int, source: Source[Any], epoch: int) -> None:
        """Return None: the segments have the repeats already."""

    def samples(self) -> list[int]:
        return [self._slice(lane, self.total).count for lane in range(self.lanes)]

    def batches(self, terms: Terms) -> list[int] | None:
        if terms.mode == "exact":
            return None
        return [self._slice(lane).count // self.size for lane in range(self.lanes)]

    @property
    def start(self) -> int:
        return self.place

    def as_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {_PLACE: self.place} | ({LEFT_OUT: self.left_out} if self.left_out else {})
        digest = of_counts(self.counts)
        return {**entry, _DIGEST: to_text(digest)} if digest else entry

    @classmethod
    def from_json(cls, lanes: int, entry: dict[str, Any] | None, epoch: int, terms: Terms) -> Slices:
        if entry is None or not {_PLACE} <= entry.keys() <= {_PLACE, _DIGEST, LEFT_OUT}:
            raise damaged(f"its partition is {shown(entry)}")
        most = terms.chain.root.epoch_order.samples_in(epoch)
        place = read_count(entry[_PLACE], "the place at which its partition begins", most=most)
        digest = read_digest(entry[_DIGEST], "the digest of its partition") if _DIGEST in entry else NOTHING
        left_out = read_count(entry.get(LEFT_OUT, 0), "the number of samples that skip() left out", most=place)
        return cls.of(lanes, epoch, terms, place, digest, left_out=left_out)

    def begun(self, states: LaneStates, terms: Terms) -> bool:
        return self.next_place(states, terms) > 0

    def next_place(self, states: LaneStates, terms: Terms) -> int:
        """Return the first place that no rank has had.

        Raises:
            StateError: lanes cannot have had these numbers of batches after one number of steps.
        """
        ranks = 1 if len(states) == self.lanes else terms.ranks  # of how many there are the lanes of one
        taken: dict[int, int] = {number // ranks: lane["delivered"] for number, lane in states.items()}
        steps, turns = sum(taken.values()), len(taken)
        if self.lanes % ranks:
            raise damaged(f"its {self.lanes} lanes are of {ranks} ranks")
        for turn, delivered in taken.items():
            if delivered != max(0, -(-(steps - turn) // turns)):
                raise damaged(f"a lane gave {delivered} of {steps} batches that {turns} lanes gave in turn")
        place = self.place + steps * ranks * self.size
        if place > self.total + self.lanes * self.size:
            raise damaged(f"its lanes gave batches up to place {place:,} of an epoch of {self.total:,} samples")
        return min(place, self.total)

    def going_on(
        self, states: LaneStates, terms: Terms, *, alike: bool, fits: bool
    ) -> tuple[Slices, LaneStates] | None:
        steps = sum(lane["delivered"] for lane in states.values())
        if not (alike and fits) or (len(states) == self.lanes and steps % terms.ranks):
            return None
        batches, samples, makers = self.batches(terms), self.samples(), terms.chain.batching
        for number, lane in states.items():
            most = batches_of(makers, samples[number]) if batches is None else batches[number]
            if lane["delivered"] > most or (lane["ended"] and lane["delivered"] < most):
                raise damaged(f"lane {number} gave {lane['delivered']} of its {most} batches")
            self._check_taken(number, lane, terms)
        return self, states

    def _check_taken(self, number: int, lane: dict[str, Any], terms: Terms) -> None:
        """Raise StateError if the first stage of a lane is not where the batches of the lane end.

        A step of the user's may have its own ``mark``: an earlier position, from which it drops
        what it yielded.
        """
        given, taken = min(lane["delivered"] * self.size, self._slice(number).count), 0
        if lane["position"] is not None:
            taken = terms.chain.root.epoch_order.taken(terms.inner_position(lane["position"])[0])
        earlier = any(type(step).mark is not Stage.mark and not is_built_in(type(step)) for step in terms.chain)
        if not lane["ended"] and (taken > given or (taken < given and not earlier)):
            raise damaged(f"lane {number} gave {given} samples, and the next one is number {taken} of the lane")

    def repartitioned(self, lanes: int, states: LaneStates, epoch: int, terms: Terms) -> tuple[int, Slices]:
        place, digest = self.next_place(states, terms), self.digest(states)
        if len(states) < self.lanes:  # of one rank, which does not know the digests of the others: see ``kept``
            digest = of_counts(self.counts)
        return epoch, self.of(lanes, epoch, terms, place, digest, left_out=self.left_out)

    def kept(self, states: LaneStates) -> dict[str, int]:
        digest = add(of_counts(state["counts"]) for state in states.values())
        return as_counts(digest) if digest and len(states) < self.lanes else {}

    def digest(self, states: LaneStates) -> Digest:
        """Return the digest of all samples that came before the lanes stand at these states."""
        return add(map(of_counts, (self.counts, *(state["counts"] for state in states.values()))))

    def excluding(self, states: LaneStates, epoch: int, then: Terms, now: Terms) -> tuple[Slices, LaneStates]:
        if len(states) < self.lanes and all(state["ended"] for state in states.values()):
            # the ranks may have had other numbers of batches: they would stand at different places
            raise StateError(
                "exclude= after the end of a rank's epoch needs the states of all ranks: collect them, and load "
                "merge_states(states) on each rank."
            )
        _, rest = self.repartitioned(self.lanes, states, epoch, then)
        before, after = (cast(SampleList, terms.chain.root) for terms in (then, now))
        place = after.place_after(before, rest.place, epoch)
        left_out = min(place, rest.left_out)
        rest = self.of(self.lanes, epoch, now, place, of_counts(rest.counts), left_out=left_out)
        first, *others = sorted(states)
        return rest, {first: {**NOT_BEGUN, "counts": self.kept(states)}, **dict.fromkeys(others, NOT_BEGUN)}

    def divided_otherwise(self, states: LaneStates, terms: Terms) -> tuple[Ranges, LaneStates]:
        """Return two lanes: what was given, which has ended, and the rest of the order."""
        place = self.next_place(states, terms)
        counts = {"delivered": place, **as_counts(self.digest(states))}
        done = {**NOT_BEGUN, "ended": True, "counts": counts}
        leave_out(counts, self.left_out)
        return Ranges(2, sizes=(place, self.total - place)), {0: done, 1: NOT_BEGUN}


Partition = Ranges | Slices


def kind_of(stage: Stage[Any], epoch_end: str | None, parts: int) -> tuple[type[Partition], str | None]:
    """Return how the epochs of a chain are divided, and why not into slices of one order, for a
    message, if a step prevents that.
    """
    chain = Chain(stage)
    if not chain.root.epoch_order.is_global or epoch_end == "loop" or parts > 1:
        return Ranges, None
    reasons = (step.changes_count() or changes_order(step) for step in chain)
    why_not = next(filter(None, reasons), None)
    return (Slices, None) if why_not is None else (Ranges, why_not)


def kind_in(entry: dict[str, Any] | None) -> type[Partition]:
    """Return how the epoch of a state with this partition was divided."""
    return Slices if entry is not None and _PLACE in entry else Ranges
