"""The partition of an epoch into lanes: which samples each lane yields, in which order, from which
position on.

Lanes are independent of processes, and an epoch is repartitioned when their number changes. There
are two ways, which the rest of the loader does not tell apart:
- ``ranges``: a lane has its own ranges of samples of shards.
- ``slices``: a lane is a slice of one order of all samples.

Words:
- A *partition* (``Partition``) divides an epoch, or the rest of one, into lanes.
- A *segment* is what a lane reads without a break. After a repartition, a lane may consist of
  several segments.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from wds_pipes.core.chain import PARTS, POSITION, Chain
from wds_pipes.core.counts import COUNTED, LIMITED
from wds_pipes.core.lane import Lane
from wds_pipes.core.stage import Source

LaneState = dict[str, Any]  # url, delivered, ended, position (None: not begun), counts
LaneStates = dict[int, LaneState]

NOT_BEGUN: LaneState = {"url": None, "delivered": 0, "ended": False, "position": None, "counts": {}}

pack: Callable[[LaneState], bytes] = pickle.dumps
unpack: Callable[[bytes], LaneState] = pickle.loads

OfLane = list[tuple[Lane, list[dict[str, Any]] | None]]  # each segment with the position where it begins


class Terms(NamedTuple):
    """What decides how a loader divides its epochs.

    Attributes:
        chain: the pipeline, with a ``Segments`` stage in it.
        inner: the steps of it that run for each segment separately.
        mode: how an epoch ends: ``"drop"``, ``"pad"``, ``"exact"`` or ``"loop"``.
        size: how many samples a full batch of a lane has.
        ranks: the number of ranks.
        parts: of how many parts, each from another lane, a batch of the loader consists.
        total: how many samples an epoch has, if they are counted.
    """

    chain: Chain
    inner: Chain
    mode: str
    size: int
    ranks: int
    parts: int
    total: int

    def inner_position(self, position: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the position in the open segment of a lane at a position, without counts."""
        for part in position[0].get(PARTS, []):
            if POSITION in part:
                return self.inner.uncounted(part[POSITION])
        return self.inner.dump(None)


@dataclass(frozen=True)
class Partition(ABC):
    """A partition of an epoch, or of the rest of one, into lanes.

    Attributes:
        lanes: the number of lanes.
        counts: the samples of the epoch that came before, by what became of them.
        later: with ``epoch_end="loop"``: the partitions of the next epochs, as far as these were
            repartitioned, since lanes had begun them.
        start: how much of the epoch was over when it was divided: differs for its partitions, and
            is 0 for the first.
        scope: the ``scope`` of the stage that runs the segments.
        fit_any_batches: the ways to end an epoch with which lanes go on with batches of any size.
        may_be_more: whether lanes of a state beyond those that a loader needs are kept.
    """

    lanes: int
    counts: dict[str, int] = field(default_factory=dict)
    later: tuple[Self, ...] = ()

    scope: ClassVar[str]
    fit_any_batches: ClassVar[Sequence[str]]
    may_be_more: ClassVar[bool]

    @classmethod
    @abstractmethod
    def of(cls, lanes: int, epoch: int, terms: Terms) -> Self:
        """Return the partition at the beginning of an epoch."""

    @abstractmethod
    def lane(self, number: int, source: Source[Any], epoch: int) -> Lane:
        """Return lane ``number``, as the steps that run over all its segments know it."""

    @abstractmethod
    def segments(self, number: int, source: Source[Any], epoch: int, ahead: int = 0) -> OfLane:
        """Return the segments of lane ``number`` in ``epoch``, in the order in which they are read.

        ``ahead`` is by how many epochs ``epoch`` is after that of the partition.
        """

    def padding(self, number: int, source: Source[Any], epoch: int) -> Lane | None:
        """Return what lane ``number`` reads again and again to fill up the epoch; None: its
        segments have the repeats already.
        """
        return None

    @abstractmethod
    def samples(self) -> list[int] | None:
        """Return how many samples each lane has, also of those that make no full batch; None: not
        known.
        """

    @abstractmethod
    def batches(self, terms: Terms) -> list[int] | None:
        """Return how many batches each lane yields; None if their last ones may be smaller."""

    @property
    @abstractmethod
    def start(self) -> int: ...

    @abstractmethod
    def as_json(self) -> dict[str, Any] | None:
        """Return plain JSON types, new at each call; ``from_json`` is the inverse. None: the epoch
        and the number of lanes say all.
        """

    @classmethod
    @abstractmethod
    def from_json(cls, lanes: int, entry: dict[str, Any] | None, epoch: int, terms: Terms) -> Self:
        """Return the partition that ``as_json`` wrote.

        Args:
            lanes: the number of lanes.
            entry: what ``as_json`` returned.
            epoch: the epoch.
            terms: how the epoch is divided; the size of a batch is that of the state.

        Raises:
            StateError: ``entry`` cannot be a partition of this epoch.
        """

    # How an epoch continues. ``states`` are the states of the lanes: of all lanes, or of those of
    # one of ``terms.ranks`` ranks.

    def begun(self, states: LaneStates, terms: Terms) -> bool:
        """Return whether anything of the epoch was given.

        Raises:
            StateError: lanes cannot have got to these positions together.
        """
        begun = any(lane != NOT_BEGUN for lane in states.values())
        return begun or self.start > 0 or bool(self.later)

    @abstractmethod
    def stays(self, states: LaneStates, terms: Terms, *, alike: bool, fits: bool) -> bool:
        """Return whether the lanes go on as they are.

        Args:
            states: see above.
            terms: how the loader that goes on divides epochs.
            alike: whether the loader of the state divided them in the same way.
            fits: whether the lanes are enough, and their number fits the ranks.

        Raises:
            StateError: a lane cannot have got to its position.
        """

    @abstractmethod
    def repartitioned(self, lanes: int, states: LaneStates, epoch: int, terms: Terms) -> tuple[int, Partition]:
        """Divide what is left over ``lanes`` lanes.

        Returns:
            the first epoch of which something is left, and its partition.
        """

    @abstractmethod
    def divided_otherwise(self, states: LaneStates, terms: Terms) -> tuple[Partition, LaneStates]:
        """Return what is left as a partition of the other kind, with the states of its lanes.

        Raises:
            StateError: it has no such form.
        """


def delivered_in(lane: bytes) -> int:
    """How many samples of a lane were delivered."""
    count: int = unpack(lane)["counts"].get("delivered", 0)
    return count


def total_counts(lanes: Iterable[LaneState], before: dict[str, int]) -> dict[str, int]:
    """Return the sum of the counts of lanes and of ``before``, without counts of single stages."""
    total = dict.fromkeys(COUNTED, 0)
    for counts in (before, *(lane["counts"] for lane in lanes)):
        for name, count in counts.items():
            if count and not name.startswith(LIMITED):  # zeros are skipped for speed: most counts are 0
                total[name] = total.get(name, 0) + count
    return total
