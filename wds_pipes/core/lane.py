"""Which part of which epoch a chain gives, and who decides that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from wds_pipes.core.order import mix


@dataclass(frozen=True, slots=True)
class Lane:
    """Which part of which epoch a running chain gives: lane ``number`` of ``of``.

    ``generation`` counts how often the epoch was dealt again, and ``shards`` are the pieces of shards to read, where they are not those of the plain deal
    (None): see ``wds_pipes.loader.lanes``. ``padding`` tells whether samples are repeats that fill up an epoch (None: samples do not say so).
    """

    seed: int
    epoch: int
    number: int = 0
    of: int = 1
    generation: int = 0
    shards: tuple[tuple[int, int, int], ...] | None = None
    padding: bool | None = None

    def key(self, *salt: int) -> int:
        """The 64-bit key of this lane's random decisions; ``salt`` tells one use from another."""
        again = (self.generation,) if self.generation else ()
        return mix(self.seed, self.epoch, self.number, self.of, *again, *salt)


@dataclass(slots=True)
class Host:
    """What whoever iterates decides for a whole chain: the epoch of the next pass, and which lane of how many this process gives."""

    epoch: int = 0
    lane: int = 0
    lanes: int = 1
    tell_end: Callable[[int, bool], bool] | None = None  # see dataset.LaneEnds
    pid: int | None = None  # of the main process, and the epoch that it last gave to DataLoader's workers
    hosted: int | None = None


class LaneFacts(NamedTuple):
    """What a state says of a lane, for describing it.

    Attributes:
        number: of the lane.
        of: how many lanes there are.
        url: the shard where it stands; None: none.
        shards: how many shards the pipeline has; None: not known.
        divided: it is a lane of a PipeLoader, which divides shards too.
    """

    number: int
    of: int
    url: str | None
    shards: int | None
    divided: bool
