"""A byte range that was requested: the event loop adds its bytes, the consumer takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wds_pipes.io.remote.fetch import Fetch


class Block:
    """A byte range that was requested: ``start`` up to, not including, ``stop`` (None: the end of
    the transfer, wherever that is).

    Attributes:
        got: how many bytes of it have arrived.
        chunks: the bytes that wait for the consumer.
        held: how many these are.
        done: whether no more will arrive.
        error: why it ended early.
        paused: set by the queue when the transfer may continue; None while it is not paused.
        rested: whether it was paused: a server may have closed the connection meanwhile.
        came: how many bytes have arrived in all, including those before ``start`` of a server that
            ignores ranges.
        quiet_since: since when the request that runs has brought no bytes, in seconds of the loop's
            clock; None: no request runs, or it is paused.
        longest_wait: of the requests for it, in seconds without bytes.
        since: from when on more bytes must arrive, in seconds of the loop's clock.
        new_since: from when on new ones must arrive, if a request has to be made again.
        task: the transfer.
    """

    def __init__(self, fetch: Fetch, start: int, stop: int | None) -> None:
        self.fetch, self.start, self.stop = fetch, start, stop
        self.got = self.came = 0
        self.chunks: deque[bytes] = deque()
        self.held = 0
        self.done = False
        self.error: Exception | None = None
        self.paused: asyncio.Event | None = None
        self.rested = False
        self.quiet_since: float | None = None
        self.longest_wait = 0.0
        self.since = self.new_since = 0.0
        self._counted = self._new_counted = 0  # bytes that had arrived at these times: all of them, and new ones
        self._dropped = False
        self.task: asyncio.Task[None] | None = None

    # With the lock

    def add(self, chunk: bytes) -> None:
        """Keep a chunk for the consumer, unless it has given up."""
        if not self._dropped:
            self.chunks.append(chunk)
            self._hold(len(chunk))

    def take(self) -> bytes:
        """The next chunk."""
        chunk = self.chunks.popleft()
        self._hold(-len(chunk))
        return chunk

    def drop(self) -> None:
        """The consumer has given up: drop the chunks, and those that still arrive."""
        self._dropped = True
        self.chunks.clear()
        self._hold(-self.held)

    def _hold(self, more: int) -> None:
        queue = self.fetch.queue
        self.held += more
        queue.held += more
        queue.budget.held += more

    # In the loop

    @property
    def reached(self) -> int:
        """The byte that arrives next."""
        return self.start + self.got

    @property
    def new_bytes(self) -> int:
        """How many new bytes have arrived since ``new_since``."""
        return self.got - self._new_counted

    def is_whole(self) -> bool:
        """Whether all of it has arrived."""
        return self.stop is not None and self.start + self.got >= self.stop

    def end_wait(self, now: float) -> None:
        """Some bytes have arrived."""
        if self.quiet_since is not None:
            self.longest_wait = max(self.longest_wait, now - self.quiet_since)
        self.quiet_since = now

    def begin_time(self, now: float) -> None:
        """From now on there must be progress."""
        self.since, self._counted = now, self.came
        self.new_since, self._new_counted = now, self.got

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds: the transfer was paused."""
        self.since += seconds
        self.new_since += seconds

    def count_time(self, now: float, least: float) -> None:
        """Count from now on again if at least ``least`` bytes have arrived, which is progress."""
        if self.new_bytes >= least:
            self.begin_time(now)
        elif self.came - self._counted >= least:
            self.since, self._counted = now, self.came
