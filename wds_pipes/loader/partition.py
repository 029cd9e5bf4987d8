"""What the two kinds of partitions of an epoch share.

Lanes are independent of processes, and an epoch is repartitioned when their number changes. There
are two kinds of partitions, with the same methods. The rest of the loader does not tell them apart:
- ``ranges``: a lane has its own ranges of samples of shards. The docstrings are there.
- ``slices``: a lane is a slice of one order of all samples.

Words:
- A *partition* divides an epoch, or the rest of one, into lanes.
- A *segment* is what a lane reads without a break. After a repartition, a lane may consist of
  several segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from wds_pipes.core.chain import PARTS, POSITION, Chain
from wds_pipes.core.counts import COUNTED, is_public, sum_counts
from wds_pipes.core.lane import Lane
from wds_pipes.core.stage import Mark

LaneState = dict[str, Any]  # url, delivered, ended, position (None: not begun), counts
LaneStates = dict[int, LaneState]

NOT_BEGUN: LaneState = {"url": None, "delivered": 0, "ended": False, "position": None, "counts": {}}


class LaneAt(NamedTuple):
    """Where a lane stands. Workers send it with each batch, as a plain tuple; a ``LaneState``, its
    form in a state, is made only for a state.

    Attributes:
        mark: the position of its chain; None: it has not begun.
        delivered: how many batches it has yielded.
        ended: whether it has ended.
        extra: what to add to the counts of its chain, which does not know what ``skip()`` left out,
            or what became of samples after its end; None: nothing.
    """

    mark: Mark | None = None
    delivered: int = 0
    ended: bool = False
    extra: dict[str, int] | None = None

    def counts(self, chain: Chain) -> dict[str, int]:
        """Return what became of its samples; ``chain`` is that of the lane."""
        own = {} if self.mark is None else chain.counts(self.mark, self.delivered)
        return sum_counts((own, self.extra)) if self.extra else own

    def with_counts(self, chain: Chain, counts: dict[str, int]) -> LaneAt:
        """Return the same with these counts."""
        own = self._replace(extra=None).counts(chain)
        more = {name: counts.get(name, 0) - own.get(name, 0) for name in own | counts}
        return self._replace(extra={name: count for name, count in more.items() if count} or None)

    @classmethod
    def of_state(cls, chain: Chain, state: LaneState) -> LaneAt:
        """Return where a lane stands in a state.

        Raises:
            StateError: its chain can never be there.
        """
        position = state["position"]
        mark = None if position is None else chain.load(position)
        return cls(mark, state["delivered"], state["ended"]).with_counts(chain, state["counts"])


BEGINNING = LaneAt()


class Portion(NamedTuple):
    """A segment as a lane reads it.

    Attributes:
        lane: the lane under whose number it is read.
        position: where it begins, as ``Chain.dump`` wrote it; None: at the beginning.
        passed: how many samples from there on belong to another lane.
        most: after how many samples of its own it ends; None: at the end of its shards.
    """

    lane: Lane
    position: list[dict[str, Any]] | None = None
    passed: int = 0
    most: int | None = None


OfLane = list[Portion]


class LanePiece(NamedTuple):
    """What a lane reads of a segment, or repeats of it: ``size`` samples of the order of ``lane``
    from sample ``taken`` of it on. The samples are counted.
    """

    lane: Lane
    taken: int
    size: int
    pads: bool = False


class Terms(NamedTuple):
    """What decides how a loader divides its epochs.

    Attributes:
        chain: the pipeline, with a ``Segments`` stage in it.
        inner: the steps of it that run for each segment separately.
        mode: how an epoch ends: ``"drop"``, ``"pad"``, ``"exact"`` or ``"loop"``.
        size: how many samples a full batch of a lane has.
        ranks: the number of ranks.
        parts: of how many parts, each from another lane, a batch of the loader consists.
    """

    chain: Chain
    inner: Chain
    mode: str
    size: int
    ranks: int
    parts: int

    @property
    def equal_lanes(self) -> bool:
        """Whether lanes must become equal, so that it is known how many samples each has left."""
        keep = all(step.changes_count() is None and step.items_per_batch is None for step in self.inner)
        return keep and self.mode in ("drop", "pad")

    def inner_position(self, position: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the position in the open segment of a lane at a position, without counts."""
        for part in position[0].get(PARTS, []):
            if POSITION in part:
                return self.inner.uncounted(part[POSITION])
        return self.inner.dump(None)


def in_turns(count: int, ranks: int) -> list[int]:
    """Return how many of ``count`` batches each rank has, if the ranks have them in turn."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def went_on(lane: LaneState) -> LaneState:
    """Return the state of a lane as if it had not ended: the samples that were dropped there since
    they made no full batch are left.
    """
    dropped = {"dropped": 0} if lane["counts"].get("dropped") else {}
    return {**lane, "ended": False, "counts": {**lane["counts"], **dropped}} if lane["ended"] else lane


def total_counts(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return the sum of counts, without those of single stages and the digest."""
    total = dict.fromkeys(COUNTED, 0)
    for counts in parts:
        for name, count in counts.items():
            if count and is_public(name):  # zeros are skipped for speed: most counts are 0
                total[name] = total.get(name, 0) + count
    return total
