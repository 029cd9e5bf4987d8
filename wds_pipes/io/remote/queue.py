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
    from wds_pipes.io.remote.transfer import Transfers


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
        transfers: how many run.
        free: while the next ranges are requested: the task of a transfer that has just ended, which
            may go on with another one.
        has_paused: whether some of them may be paused.
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
        self.transfers, self.has_paused = 0, False
        self.free: Transfers | None = None
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

    def add(self, fetch: Fetch) -> None:
        """Add a shard, by any thread."""
        self.budget.call(fetch.begin)

    def notify(self, fetch: Fetch) -> None:
        """Wake the consumer, which may wait for this shard; the caller holds the lock."""
        self.filled.notify()

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
            self._put_first()
            self._request()
            self.has_paused = False
            for fetch in self.fetches:
                for block in fetch.blocks:
                    if block.paused is not None and self.may_read(block):
                        block.paused.set()
                    elif block.paused is not None:
                        self.budget.blocked = self.has_paused = True

    def _put_first(self) -> None:
        """Put the shard that the consumer waits for first: a stage may have changed their order."""
        if self.waiting is not None and self.fetches and self.fetches[0] is not self.waiting:
            self._move_to_front(self.waiting)

    def _move_to_front(self, fetch: Fetch) -> None:
        if fetch in self.fetches:
            self.fetches.remove(fetch)
            self.fetches.appendleft(fetch)

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
        if self.has_room or block.fetch.given_up:
            return True
        first = self.fetches[0] if self.fetches else None
        return block.fetch is first and not block.chunks and block is first.read_now


class RangeQueue(ReadQueue):
    """Ranges of bytes that are read one after another, each with one request.

    All that are in the queue are requested as soon as there are connections and room, also while
    the consumer does something else. There may be hundreds, so nothing is done for each of them
    when one begins or ends.
    """

    def __init__(self, client: Client) -> None:
        self._unrequested: deque[Fetch] = deque()
        self._is_called = self._is_waking = False
        super().__init__(client)

    def add(self, *fetches: Fetch) -> None:
        with self.budget.lock:
            self.fetches.extend(fetches)
            self._unrequested.extend(fetches)
            if self.transfers < self.connections and not self._is_called:  # otherwise one that ends requests the next
                self._is_called = True
                self.budget.call(self.schedule)

    def notify(self, fetch: Fetch) -> None:
        if self.waiting is fetch and not self._is_waking:
            # When the event loop has done what it has to do now: both threads would take the
            # interpreter's lock from each other.
            self._is_waking = True
            self.budget.loop.call_soon(self._wake)

    def _wake(self) -> None:
        with self.budget.lock:
            self._is_waking = False
            self.filled.notify()

    def schedule(self) -> None:
        with self.budget.lock:
            self._is_called = False
            if self.has_paused:
                super().schedule()
            else:
                self._put_first()
                self._request()

    def _move_to_front(self, fetch: Fetch) -> None:
        super()._move_to_front(fetch)
        if fetch in self._unrequested:
            self._unrequested.remove(fetch)
            self._unrequested.appendleft(fetch)

    def _request(self) -> None:
        while self._unrequested and self.fetches:
            if not self._unrequested[0].can_request:  # given up
                self._unrequested.popleft()
                continue
            if self._unrequested[0] is not self.fetches[0]:
                if self.transfers >= self.connections:
                    return
                if not self.has_room:
                    self.budget.blocked = True
                    return
            self._unrequested.popleft().request_next()
