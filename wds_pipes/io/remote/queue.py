"""Shards that are read one after another, and which bytes of them are requested next."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from wds_pipes.io.remote.budget import Client

if TYPE_CHECKING:
    from wds_pipes.io.remote.block import Block
    from wds_pipes.io.remote.fetch import Fetch


class ReadQueue:
    """Shards that are read one after another.

    The first of ``fetches`` is the one that the consumer reads, or waits for; what comes after it
    is read ahead when nothing of it is left to request.

    Attributes:
        ahead: the consumer has not come to it yet: it has one connection, and takes none from
            others.
        share: how many bytes it may hold.
        connections: how many it may have.
    """

    def __init__(self, client: Client, *, ahead: bool = False) -> None:
        self.client, self.budget = client, client.budget
        self.ahead = ahead
        self.share, self.connections = client.reading.readahead_bytes, 1
        self.fetches: deque[Fetch] = deque()
        self.filled = threading.Condition(self.budget.lock)
        self.held = 0
        self.waiting: Fetch | None = None  # the one whose next bytes the consumer waits for
        self.worth = 1  # the consumer is woken after so many of them
        self.usual_size: int | None = None  # of its shards: that of the last one which was known
        self.open, self.ended = True, False
        self.budget.call(self._join)

    def close(self) -> None:
        """Give everything up."""
        if self.open:
            self.open = False
            if self.budget.is_ours and not self.budget.loop.is_closed():
                self.budget.call(self._leave)

    def _join(self) -> None:
        self.budget.queues.append(self)
        self.budget.divide()

    def begin(self) -> None:
        """The consumer has come to it."""
        if self.ahead:
            self.ahead = False
            self.budget.call(self.budget.divide)

    def end(self) -> None:
        """Nothing will be added: close it after its last fetch."""
        if self.budget.is_ours and not self.budget.loop.is_closed():
            self.budget.call(self._end)

    def _end(self) -> None:
        self.ended = True
        if not self.fetches:
            self.close()

    def move_to_front(self, fetch: Fetch) -> None:
        """The consumer waits for this one: some step has changed their order."""
        if fetch in self.fetches:
            with self.budget.lock:
                self.fetches.remove(fetch)
                self.fetches.appendleft(fetch)
            self.budget.schedule()

    def _leave(self) -> None:
        for fetch in tuple(self.fetches):
            fetch.give_up()
        self.budget.queues.remove(self)
        with self.budget.lock:
            self.filled.notify_all()  # who waits is to see that it is closed
        self.budget.divide()

    def schedule(self) -> None:
        """Rules 1 and 2 of ``io.remote``, on the event loop."""
        # so that the consumer either sees that something is blocked, or has taken its bytes before
        with self.budget.lock:
            self._request()
            for fetch in self.fetches:
                for block in fetch.blocks:
                    if block.paused is not None and self.may_read(block):
                        block.paused.set()
                    elif block.paused is not None:
                        self.budget.blocked = True

    def _request(self) -> None:
        """Request what is next."""
        active, most = sum(fetch.active for fetch in self.fetches), 1 if self.ahead else self.connections
        for place, fetch in enumerate(self.fetches):
            following = next(islice(self.fetches, place + 1, None), None) if most > 1 else None
            while fetch.can_request:
                waited_for = place == 0 and not any(block.pieces or not block.done for block in fetch.blocks)
                if active >= most and not waited_for:
                    break
                if not self.has_room and fetch.blocks and not waited_for:
                    self.budget.blocked = True
                    break
                # The first bytes of the next shard are requested before the last of this one: until
                # they come, its size is not known, and nothing more of it can be requested.
                early = (
                    following is not None
                    and not following.blocks
                    and fetch.answered
                    and not waited_for
                    and fetch.is_within(most)
                )
                (following if early and following is not None else fetch).request_next()
                active += 1
            if fetch.can_request or fetch.failed or (place == 0 and not fetch.answered):
                return
            if active >= most and fetch.nearly_done:
                active -= 1

    @property
    def has_room(self) -> bool:
        """Whether it may hold more.

        Half of its share is its own, even where other queues still hold more than theirs, from a
        time when there were fewer.
        """
        return self.held < self.share and (
            self.budget.held < self.budget.readahead_bytes or (not self.ahead and self.held < self.share // 2)
        )

    def may_read(self, block: Block) -> bool:
        """Rule 2 of ``io.remote``."""
        if self.has_room:
            return True
        first = self.fetches[0] if self.fetches else None
        return block.fetch is first and not block.pieces and block is first.read_now
