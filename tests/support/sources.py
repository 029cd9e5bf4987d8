"""A first stage for tests that need other items than samples of shards, or the number of items
taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.stage import Source


class Given(Source[Any]):
    """Yields ``items`` in their order; ``taken`` counts them over all runs.

    Lane l of n yields every n-th item, from number l.
    """

    @dataclass(slots=True)
    class At:
        number: int = 0

    shared = ("given", "taken")

    order_options = ()

    def __init__(self, items: Sequence[Any], *, seed: int = 0) -> None:
        super().__init__(seed)
        self.given, self.taken = items, [0]

    def run(self) -> Iterator[Any]:
        own = self.given[self.lane.number :: self.lane.of]
        while self.at.number < len(own):
            self.at.number += 1
            self.taken[0] += 1
            yield own[self.at.number - 1]
