"""One global order: over a ``SampleList``, the batches of all ranks at a step are neighbours in the
order of the epoch.

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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.chain import Chain, changes_order
from wds_pipes.core.lane import Lane, Stripe
from wds_pipes.core.stage import Source, Stage
from wds_pipes.core.state import SavedLane, damaged, read_count
from wds_pipes.core.words import shown
from wds_pipes.loader.partition import Partition, Segment

_EMPTY = Stripe(1, 0, 0)
_PLACE = "place"  # the entry of a state that says from which place on an epoch is divided


@dataclass(frozen=True)
class InOrder(Partition):
    """A partition of the global order of an epoch from a place on.

    Attributes:
        stripe: how the lanes divide the order, up to the end of the last batch.
        total: how many samples the epoch has.
        pads: whether repeats fill the last batches.
        full: whether all ranks yield the same number of batches, all of them full.
    """

    stripe: Stripe = _EMPTY
    total: int = 0
    pads: bool = False
    full: bool = False

    @classmethod
    def from_place(cls, place: int, lanes: int, total: int, *, ranks: int, batch_size: int, mode: str) -> InOrder:
        """Return the partition of the places from ``place`` on.

        Args:
            place: the first place that no rank has had.
            lanes: the number of lanes.
            total: how many samples the epoch has.
            ranks: the number of ranks.
            batch_size: how many samples a batch of a rank has.
            mode: how the epoch ends: ``"drop"``, ``"pad"`` or ``"exact"``.
        """
        size, stop = ranks * batch_size, total
        if mode != "exact":
            steps = (total - place) // size if mode == "drop" else -(-(total - place) // size)
            stop = place + steps * size
        return cls(
            lanes,
            counts={"delivered": place} if place else {},
            stripe=Stripe(batch_size, place, stop),
            total=total,
            pads=mode == "pad",
            full=mode != "exact",
        )

    def segments(self, number: int, source: Source[Any]) -> list[Segment]:
        return [Segment(number, 0)]

    def lane(self, segment: Segment, source: Source[Any], seed: int, epoch: int) -> Lane:
        padding = False if self.pads else None
        return Lane(seed, epoch, segment.number, self.lanes, padding=padding, stripe=self.stripe)

    def samples(self) -> list[int]:
        """Return how many samples each lane has, also of those that make no full batch."""
        whole = Stripe(self.stripe.size, self.stripe.start, self.total)
        return [whole.count(lane, self.lanes) for lane in range(self.lanes)]

    def batches(self) -> list[int] | None:
        """Return how many batches each lane yields; None if the last one may be smaller."""
        stripe = self.stripe
        return [stripe.count(lane, self.lanes) // stripe.size for lane in range(self.lanes)] if self.full else None

    @property
    def start(self) -> int:
        return self.stripe.start

    def as_json(self) -> dict[str, Any]:
        return {_PLACE: self.stripe.start}


def why_in_lanes(stage: Stage[Any]) -> str | None:
    """Return why the epochs of a chain over a ``SampleList`` have no global order, for a message;
    None if they have one.
    """
    reasons = (step.changes_count() or changes_order(step) for step in Chain(stage))
    return next(filter(None, reasons), None)


def is_in_order(partition: dict[str, Any] | None) -> bool:
    """Return whether a state with this partition was taken in an epoch with a global order."""
    return partition is not None and _PLACE in partition


def place_in(
    partition: dict[str, Any], lanes: Iterable[tuple[int, SavedLane]], count: int, *, ranks: int, size: int, total: int
) -> int:
    """Return the first place that no rank has had, by a state.

    Args:
        partition: the partition in the state.
        lanes: the numbers of the lanes in the state, and the lanes.
        count: the number of all lanes.
        ranks: of how many ranks the state holds one; 1: it holds all lanes.
        size: how many samples a batch of a rank had.
        total: how many samples the epoch has.

    Raises:
        StateError: lanes cannot have had these numbers of batches after one number of steps.
    """
    if partition.keys() != {_PLACE} or size < 1:
        raise damaged(f"its partition is {shown(partition)}, of batches of {size} samples")
    place = read_count(partition[_PLACE], "the place at which its partition begins", most=total)
    taken = {number // ranks: lane.delivered for number, lane in lanes}
    steps, turns = sum(taken.values()), len(taken)
    if count % ranks:
        raise damaged(f"its {count} lanes are of {ranks} ranks")
    for turn, delivered in taken.items():
        if delivered != max(0, -(-(steps - turn) // turns)):
            raise damaged(f"a lane gave {delivered} of {steps} batches that {turns} lanes gave in turn")
    place += steps * ranks * size
    if place > total + count * size:
        raise damaged(f"its lanes gave batches up to place {place:,} of an epoch of {total:,} samples")
    return min(place, total)
