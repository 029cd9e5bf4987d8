"""A run of bytes between the two threads: the event loop adds them, the consumer takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wds_pipes.io.remote.fetch import Fetch


class Block:
    """A run of bytes that was requested: ``start`` up to, not including, ``stop`` (None: the end of
    the transfer, wherever that is).

    Attributes:
        got: how many bytes of it have come.
        pieces: those that wait for the consumer.
        done: nothing more will come.
        came: how many bytes have come in all, also those of a server that ignores ranges from
            before ``start``.
        since: from when on more bytes must come, in seconds of the loop's clock.
        new_since: from when on new ones must come, where a request has to be made again.
    """

    def __init__(self, fetch: Fetch, start: int, stop: int | None) -> None:
        self.fetch, self.start, self.stop = fetch, start, stop
        self.got = self.came = 0
        self.pieces: deque[bytes] = deque()
        self.held = 0
        self.done = False
        self.error: Exception | None = None
        self.paused: asyncio.Event | None = None
        self.rested = False  # it was paused, and a server may have lost patience
        self.since = self.new_since = 0.0
        self._counted = self._new_counted = 0  # how many bytes had come then, and how many new ones
        self._dropped = False
        self.task: asyncio.Task[None] | None = None

    # With the lock

    def add(self, piece: bytes) -> None:
        """Keep a piece for the consumer, unless it has given up."""
        if not self._dropped:
            self.pieces.append(piece)
            self._hold(len(piece))

    def take(self) -> bytes:
        """The next piece."""
        piece = self.pieces.popleft()
        self._hold(-len(piece))
        return piece

    def drop(self) -> None:
        """Nobody will take what there is, nor what still comes."""
        self._dropped = True
        self.pieces.clear()
        self._hold(-self.held)

    def _hold(self, more: int) -> None:
        queue = self.fetch.queue
        self.held += more
        queue.held += more
        queue.budget.held += more

    # In the loop

    @property
    def reached(self) -> int:
        """The byte that comes next."""
        return self.start + self.got

    @property
    def new_bytes(self) -> int:
        """How many have come since ``new_since``."""
        return self.got - self._new_counted

    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return self.stop is not None and self.start + self.got >= self.stop

    def begin_time(self, now: float) -> None:
        """From now on there must be progress."""
        self.since, self._counted = now, self.came
        self.new_since, self._new_counted = now, self.got

    def leave_out(self, seconds: float) -> None:
        """In these nothing was to come."""
        self.since += seconds
        self.new_since += seconds

    def count_time(self, now: float, least: float) -> None:
        """So many bytes are progress."""
        if self.new_bytes >= least:
            self.begin_time(now)
        elif self.came - self._counted >= least:
            self.since, self._counted = now, self.came
