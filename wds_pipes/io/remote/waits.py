"""How long requests to a store usually wait for bytes, and which of them are made a second time.

A batch that needs many requests waits for the slowest of them. So a request that waits much longer
than usual is made a second time, and the first response is used: hedged requests (Dean and Barroso,
"The Tail at Scale", 2013).
"""

from __future__ import annotations

import math
from collections import deque

_KEPT, _FEWEST = 256, 20  # waits: those that are remembered, and those without which nothing is usual
_REFRESHED = 16  # after so many waits, the usual one is computed again
_USUAL = 0.95  # the share of the waits that are no longer than the usual one
_FACTOR, _SHORTEST = 1.5, 0.05  # times the usual wait, and seconds: what is longer is a stall
_SHARE, _SAVED = 0.05, 10  # second requests for each request, and those that may be saved up


class Waits:
    """The waits of requests to one store.

    Attributes:
        stall: a request without bytes for this many seconds has stalled; infinity: too few waits
            are known.
    """

    def __init__(self) -> None:
        self.stall = math.inf
        self._waits: deque[float] = deque(maxlen=_KEPT)
        self._until_refreshed = _FEWEST
        self._allowed = 0.0

    def note(self, seconds: float) -> None:
        """Record the longest time without bytes of a request that has ended."""
        self._waits.append(seconds)
        self._until_refreshed -= 1
        if not self._until_refreshed:
            self._until_refreshed = _REFRESHED
            usual = sorted(self._waits)[int(_USUAL * len(self._waits))]
            self.stall = max(_FACTOR * usual, _SHORTEST)

    def count_request(self) -> None:
        """Count a request that is made for the first time."""
        self._allowed = min(self._allowed + _SHARE, _SAVED)

    def allow_second(self) -> bool:
        """Whether a second request may be made, which then counts as made. They are at most 5 % of
        the requests.
        """
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True
