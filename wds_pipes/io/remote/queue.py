"""Shards that are read one after another, and what is requested next."""

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

    The first of ``fetches`` is the one that the consumer reads, or waits for. Those after it are
    read ahead when all of the first has been requested.

    Attributes:
        ahead: the consumer has not reached it yet: it has one connection, and takes none from
            others.
        share: how many bytes it may hold.
        connections: how many it may have.
        fetches: the shards, in order.
        filled: notified when the consumer may continue.
        held: how many bytes it holds.
        waiting: the shard whose next bytes the consumer waits for.
        wake_bytes: wake the consumer after this many bytes.
        usual_size: the size of its last shard whose size was known.
    """

    def __init__(self, client: Client, *, ahead: bool = False) -> None:
        self.client, self.budget = client, client.budget
        self.ahead = ahead
        self.share, self.connections = client.reading.readahead_bytes, 1
        self.fetches: deque[Fetch] = deque()
        self.filled = threading.Condition(self.budget.lock)
        self.held = 0
        self.waiting: Fetch | None = None
        self.wake_bytes = 1
        self.usual_size: int | None = None
        self.open, self.ended = True, False
        self.budget.call(self._join)

    def close(self) -> None:
        """Give up all its shards."""
        if self.open:
            self.open = False
            if self.budget.is_ours and not self.budget.loop.is_closed():
                self.budget.call(self._leave)

    def _join(self) -> None:
        self.budget.queues.append(self)
        self.budget.divide()

    def begin(self) -> None:
        """The consumer has reached it."""
        if self.ahead:
            self.ahead = False
            self.budget.call(self.budget.divide)

    def end(self) -> None:
        """No more shards will be added: close it after the last one."""
        if self.budget.is_ours and not self.budget.loop.is_closed():
            self.budget.call(self._end)

    def _end(self) -> None:
        self.ended = True
        if not self.fetches:
            self.close()

    def move_to_front(self, fetch: Fetch) -> None:
        """The consumer waits for this shard: a stage has changed their order."""
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
            self.filled.notify_all()  # a consumer that waits must see that it is closed
        self.budget.divide()

    def schedule(self) -> None:
        """Rules 1 and 2 of ``io.remote``, on the event loop."""
        # With the lock: the consumer either sees that something is blocked, or took its bytes
        # before.
        with self.budget.lock:
            self._request()
            for fetch in self.fetches:
                for block in fetch.blocks:
                    if block.paused is not None and self.may_read(block):
                        block.paused.set()
                    elif block.paused is not None:
                        self.budget.blocked = True

    def _request(self) -> None:
        """Request the next byte ranges, as far as connections and room allow."""
        active, most = sum(fetch.active for fetch in self.fetches), 1 if self.ahead else self.connections
        for place, fetch in enumerate(self.fetches):
            following = next(islice(self.fetches, place + 1, None), None) if most > 1 else None
            while fetch.can_request:
                waited_for = place == 0 and not any(block.chunks or not block.done for block in fetch.blocks)
                if active >= most and not waited_for:
                    break
                if not self.has_room and fetch.blocks and not waited_for:
                    self.budget.blocked = True
                    break
                # The first bytes of the next shard are requested before the last of this one: until
                # they arrive, its size is not known, and no more of it can be requested.
                early = (
                    following is not None
                    and not following.blocks
                    and fetch.has_response
                    and not waited_for
                    and fetch.is_within(most)
                )
                (following if early and following is not None else fetch).request_next()
                active += 1
            if fetch.can_request or fetch.failed or (place == 0 and not fetch.has_response):
                return
            if active >= most and fetch.nearly_done:
                active -= 1

    @property
    def has_room(self) -> bool:
        """Whether it may hold more.

        Half of its share is always available, even if other queues still hold more than theirs,
        from a time when there were fewer queues.
        """
        return self.held < self.share and (
            self.budget.held < self.budget.readahead_bytes or (not self.ahead and self.held < self.share // 2)
        )

    def may_read(self, block: Block) -> bool:
        """Rule 2 of ``io.remote``."""
        if self.has_room:
            return True
        first = self.fetches[0] if self.fetches else None
        return block.fetch is first and not block.chunks and block is first.read_now


class RangeQueue(ReadQueue):
    """Ranges of bytes that are read one after another, each with one request.

    All that are in the queue are requested as soon as there are connections and room, also while
    the consumer does something else.
    """

    def _request(self) -> None:
        active = sum(fetch.active for fetch in self.fetches)
        for place, fetch in enumerate(self.fetches):
            if not fetch.can_request:
                continue
            if place and active >= self.connections:
                return
            if place and not self.has_room:
                self.budget.blocked = True
                return
            fetch.request_next()
            active += 1
