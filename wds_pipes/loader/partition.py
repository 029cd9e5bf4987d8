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

import pickle
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from wds_pipes.core.chain import PARTS, POSITION, Chain
from wds_pipes.core.counts import COUNTED, is_public
from wds_pipes.core.lane import Lane

LaneState = dict[str, Any]  # url, delivered, ended, position (None: not begun), counts
LaneStates = dict[int, LaneState]

NOT_BEGUN: LaneState = {"url": None, "delivered": 0, "ended": False, "position": None, "counts": {}}

pack: Callable[[LaneState], bytes] = pickle.dumps
unpack: Callable[[bytes], LaneState] = pickle.loads


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


@lru_cache(maxsize=512)  # a packed state is one object while its lane stands there
def counts_in(lane: bytes) -> dict[str, int]:
    """Return the counts in the packed state of a lane, not to be changed."""
    counts: dict[str, int] = unpack(lane)["counts"]
    return counts


def delivered_in(lane: bytes) -> int:
    """How many samples of a lane were delivered."""
    return counts_in(lane).get("delivered", 0)


def total_counts(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return the sum of counts, without those of single stages and the digest."""
    total = dict.fromkeys(COUNTED, 0)
    for counts in parts:
        for name, count in counts.items():
            if count and is_public(name):  # zeros are skipped for speed: most counts are 0
                total[name] = total.get(name, 0) + count
    return total
