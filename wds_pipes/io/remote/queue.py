"""Shards that are read one after another: what is requested next, and how it is fetched.

The classes know each other, as these are the parts of one machine: a ``ReadQueue`` has a ``Fetch``
for each shard, which has a ``Block`` for each byte range, which a ``Transfer`` fills.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from itertools import islice

from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.remote.budget import Client, Sharer, UnreadError
from wds_pipes.io.remote.object import RECORD, RemoteObject, Reported
from wds_pipes.io.remote.responses import FaultyError, RefusedError, Response, close_response, in_chunks
from wds_pipes.io.remote.verdicts import EARLY_TRIES, judge
from wds_pipes.io.secret import clean, hide, words
from wds_pipes.io.urls import is_signed, redact

_LEAST, _MOST = 1 << 20, 16 << 20  # of the byte ranges that are requested, in bytes
_WAITS = 6  # a range takes at least this many times as long as the wait for its response, if it may
_BUSY_SECONDS = 0.005  # after which a process that was busy has taken the bytes that had arrived
_NEARLY = 4 << 20  # when at most this much of a shard has not arrived, the next one is requested
_SIGNED = (
    "may not be read: its signature may have expired, so sign it again; a saved state fits URLs that are signed anew"
)
_LEAST_RATE = 1024  # bytes a second that count as progress
_AT_ONCE = 1 << 16  # a response that ends early, as it said, after this many bytes is continued without a wait


class ReadQueue(Sharer):
    """Shards that are read one after another.

    The first of ``fetches`` is the one that the consumer reads, or waits for. Those after it are
    read ahead when all of the first has been requested.

    Attributes:
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

    def add(self, fetch: Fetch) -> None:
        with self.budget.lock:
            self.fetches.append(fetch)
            self._unrequested.append(fetch)
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


class Fetch:
    """The fetching of a shard's bytes from ``start`` on, or of one range of them. It runs on the
    event loop, except where a comment says otherwise.

    Args:
        queue: the shards that it is read among.
        url: where the shard is.
        start: the first byte to fetch.
        size: how many bytes the shard must have; None: any number.
        stop: the byte after the last one to fetch: it is requested at once; None: the shard's end.
        reported: what the store has reported of the shard, see ``RemoteObject``.

    Attributes:
        object: what is known of the whole shard.
        end_is_vouched_for: False once the shard has ended where only its connection did: see
            ``RemoteShard``.
        start, stop: as above.
        store, path: where it is requested.
        blocks: the byte ranges that were requested and are not used up, in order; guarded by the
            lock.
        rivals: second requests for the rest of a range whose request has stalled: the first of them
            that gets bytes is used.
        has_response: whether the store has responded.
        failed: a block has ended in an error.
        given_up: nothing of it is needed any more.
    """

    def __init__(
        self,
        queue: ReadQueue,
        url: str,
        start: int,
        size: int | None,
        *,
        stop: int | None = None,
        reported: Reported | None = None,
    ) -> None:
        self.queue, self.url, self._client, self._budget = queue, url, queue.client, queue.budget
        self.start, self.stop = start, stop
        self.object = RemoteObject(url, size, reported)
        self.end_is_vouched_for = True
        self.blocks: deque[Block] = deque()
        self.rivals: list[Block] = []
        self.has_response = False
        self.failed = False
        self.given_up = False
        self.store, self.path = queue.client.stores.find(url)  # last: if it raises, nothing was begun
        queue.add(self)

    # By the consumer, with the lock

    @property
    def has_begun(self) -> bool:
        """Whether the first bytes have arrived, or the end.

        Raises:
            ShardError: they cannot be read.
        """
        first = self.blocks[0] if self.blocks else None
        if first is None or not (first.chunks or first.done):
            return False
        if first.error is not None and not first.chunks:
            raise first.error
        return True

    def take(self) -> bytes | None:
        """The next bytes; empty at the end; None if they have not arrived yet.

        Raises:
            ShardError, StateError, UnreadError: they cannot be read.
        """
        blocks = self.blocks
        while blocks:
            first = blocks[0]
            if first.chunks:
                return first.take()
            if first.error is not None:
                raise first.error
            if not first.done:
                return None
            if len(blocks) == 1:
                ends = [end for end in (self.object.size, self.stop) if end is not None]
                return b"" if ends and first.reached >= min(ends) else None
            blocks.popleft()
        return None

    # By any thread

    def give_up(self) -> None:
        """Drop what has arrived, and cancel what was requested."""
        if not self.given_up:
            self.given_up = True
            with self._budget.lock:
                for block in self.blocks:
                    block.drop()
                is_over = self.stop is not None and bool(self.blocks) and self.blocks[-1].done and not self.rivals
                if is_over and self in self.queue.fetches:
                    self.queue.fetches.remove(self)
            if not (is_over and not self._budget.blocked) and not self._budget.loop.is_closed():
                self._budget.call(self._cancel)

    # On the event loop

    def begin(self) -> None:
        """Take its place in the queue."""
        if self.given_up or not self.queue.open:
            self.give_up()
        else:
            with self._budget.lock:
                self.queue.fetches.append(self)
            self.queue.schedule()

    @property
    def can_request(self) -> bool:
        """Whether there is something to request that may be requested now."""
        if self.failed or self.given_up:
            return False
        if not self.blocks or self.stop is not None:
            return not self.blocks
        last = self.blocks[-1]
        if self.object.size is None or last.stop is None:  # what follows a response is known when it has ended
            return last.done
        return last.stop < self.object.size

    @property
    def active(self) -> int:
        """How many connections are used for it."""
        return sum(not block.done for block in self.blocks) + len(self.rivals)

    @property
    def read_now(self) -> Block | None:
        """The block that the consumer reads.

        Blocks before it may be used up: the consumer removes them only when it has read on.
        """
        return next((block for block in self.blocks if block.chunks or not block.done), None)

    @property
    def nearly_done(self) -> bool:
        """Whether a single connection still reads it to its end, and has little left."""
        last = self.blocks[-1] if self.blocks else None
        return (
            self.stop is None
            and self.active == 1
            and last is not None
            and not last.done
            and last.stop is not None
            and last.stop - last.reached < _NEARLY
        )

    def is_within(self, connections: int) -> bool:
        """Whether its rest is requested as soon as each connection has been used once more."""
        stop = self.blocks[-1].stop
        return (
            self.object.size is not None and stop is not None and self.object.size - stop <= connections * self._count()
        )

    def _count(self) -> int:
        """How many bytes to request at once.

        Few enough that a shard is read through all connections. But if the wait for a response
        costs much, so many that the wait is a small fraction of the time, as far as the share and
        the shards ahead allow: while the last range of a shard arrives, those ahead must have
        enough for all other connections.
        """
        share, connections = self.queue.share, max(2, self.queue.connections)
        size = self.object.size or self.queue.usual_size
        count = share // connections if size is None else min(share, size) // connections + 1
        if size is not None and len(self.queue.fetches) > 1:
            wanted = max(1, min(_WAITS * self._client.lost, 2 * share // connections))
            ranges = max(math.ceil((connections - 1) / (len(self.queue.fetches) - 1)), math.ceil(size / wanted))
            count = max(count, size // ranges + 1)
        return min(max(count, _LEAST), _MOST)

    def request_next(self) -> None:
        """Request the next bytes."""
        start = self.start
        if self.blocks:
            assert self.blocks[-1].stop is not None
            start = self.blocks[-1].stop
        stop = self.object.size if self.stop is None else self.stop
        if (
            self.stop is None
            and not self.object.ignores_ranges
            and (self.queue.connections > 1 or not self.store.streams)
        ):
            stop = start + self._count() if stop is None else min(start + self._count(), stop)
        block = Block(self, start, stop)
        self.blocks.append(block)
        self._send(block)
        if self._is_hedged:
            self.store.waits.count_request()
            self._watch()

    def _send(self, block: Block) -> None:
        self.queue.transfers += 1
        if self.queue.free is None:
            Transfers(self._budget.loop, block)
        else:
            self.queue.free.begin(block)
            self.queue.free = None

    # A second request for a range that has stalled

    @property
    def _is_hedged(self) -> bool:
        """Whether a second request helps: those of stores that do not stream wait for a thread."""
        return self.stop is not None and self.store.streams

    def _watch(self, *, again: bool = False) -> None:
        """Make a second request if the last one for the range has stalled, or look again later."""
        waits, timer = self.store.waits, self._budget.timer
        last = self.rivals[-1] if self.rivals else self.blocks[-1]
        if self.given_up or self.failed or last.done or waits.stall == math.inf:
            return
        left = waits.stall if last.quiet_since is None else last.quiet_since + waits.stall - self._budget.loop.time()
        if left > 0:
            timer.call_later(left, self._watch)
        elif not again:  # this process may have been busy, and the bytes have arrived
            timer.call_later(_BUSY_SECONDS, lambda: self._watch(again=True))
        else:
            if waits.allow_second():
                self._client.hedged += 1
                self.rivals.append(Block(self, self.blocks[-1].reached, self.stop))
                self._send(self.rivals[-1])
            timer.call_later(waits.stall, self._watch)

    def prefer(self, block: Block) -> None:
        """Use the first of several requests that has bytes, and cancel the others."""
        with self._budget.lock:  # the consumer may give up at any time, and sees all of this or nothing
            first = self.blocks[-1]
            for other in (first, *self.rivals):
                if other is not block and other.task is not None and not other.done:
                    other.done = True
                    other.task.cancel()
            self.rivals.clear()
            if block is not first:
                first.stop = first.reached
                self.blocks.append(block)
                if self.given_up:
                    block.drop()

    def withdraw(self, block: Block) -> None:
        """A second request has failed: the first one goes on."""
        block.done = True
        self.rivals.remove(block)

    def finish(self, block: Block, error: Exception | None = None) -> None:
        """No more bytes of the block will arrive."""
        if error is not None and block in self.rivals:
            self.withdraw(block)
            return
        if self.rivals:
            self.prefer(block)
        if self._is_hedged and error is None:
            self.store.waits.note(block.longest_wait)
        with self._budget.lock:
            block.done, block.error = True, error
            self.failed = self.failed or error is not None
            if block.stop is None and error is None:
                block.stop = self.object.size = block.reached  # it had no length, and this was its end
            self.queue.notify(self)
        if self.stop is None:  # otherwise when its task is free
            self.queue.schedule()

    def end(self, block: Block, free: Transfers | None, cause: BaseException | None = None) -> None:
        """A transfer has ended: its task is free, or was cancelled from outside, or broke, which is
        an error of its block.
        """
        if not block.done and not self.given_up:
            reason = "its request was cancelled" if cause is None else f"{type(cause).__name__}: {words(cause)}"
            try:
                error = self.error(block, f"cannot be read ({reason})", cause)
            except Exception:  # its message cannot be made
                error = UnreadError(f"byte {block.reached} cannot be read ({type(cause).__name__})")
            self.finish(block, error)
        self.queue.transfers -= 1
        if self.stop is not None:
            self.queue.free = free
            self.queue.schedule()
            self.queue.free = None

    def error(self, block: Block, what: str, cause: BaseException | None) -> Exception:
        """The error that the consumer gets for a block, without credentials.

        It is an UnreadError if the shard could be read up to there.
        """
        url, at = redact(self.url), block.reached
        options = self._client.reading.storage_options
        what = hide(what, self.url, options)
        verdict = None if cause is None else judge(cause, self.url.partition("://")[0])
        if block.got or block.start > self.start:
            error: UnreadError | ShardError = UnreadError(f"byte {at} {what}")
        else:
            missing = verdict is not None and verdict.missing
            hint = (
                ""
                if not missing or TAR_NAME.search(self.url)
                else " If it is a directory, pass it with '/' at its end."
            )
            error = ShardError(f"shard {url} {what}.{hint}", url=url, offset=at or None)
            error.missing = missing
        error.of_data = verdict is None or verdict.of_data
        error.__cause__ = clean(cause, self.url, options)
        return error

    def _cancel(self) -> None:
        for block in (*self.blocks, *self.rivals):
            if block.task is not None and not block.done:
                block.task.cancel()
        if self in self.queue.fetches:
            with self._budget.lock:
                self.queue.fetches.remove(self)
        if self.queue.ended and not self.queue.fetches:
            self.queue.close()
        self._budget.schedule()


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


class Transfers:
    """A task that fills a block, and then others, as long as there are ranges to request: a task
    for each would take longer, and each range would wait for several rounds of the event loop.

    Args:
        loop: the event loop.
        block: the first block.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, block: Block) -> None:
        self._block: Block | None = None
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(self._ended)
        self.begin(block)

    def begin(self, block: Block) -> None:
        """Let the task fill a block, when it has filled those before."""
        self._block, block.task = block, self._task

    async def _run(self) -> None:
        while (block := self._block) is not None:
            await Transfer(block.fetch, block).run()
            self._block = None
            block.fetch.end(block, self)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._block is not None:
            self._block.fetch.end(self._block, None, None if task.cancelled() else task.exception())


class Transfer:
    """Fills a block with the bytes of its byte range, with as many requests as that takes.

    It runs on the event loop.

    Args:
        fetch: the shard that the block belongs to.
        block: what to fill.
    """

    def __init__(self, fetch: Fetch, block: Block) -> None:
        self._fetch, self._block, self._store, self._path = fetch, block, fetch.store, fetch.path
        self._queue, self._client, self._object = fetch.queue, fetch.queue.client, fetch.object
        self._budget, self._reading = fetch.queue.budget, fetch.queue.client.reading
        self._protocol = fetch.url.partition(":")[0]
        self._clock = self._budget.loop.time
        self._rests = 0  # how often the transfer waited for room

    # Retries

    async def run(self) -> None:
        """Request the bytes until all have arrived, or until an error that no retry can mend."""
        block, tries, reached = self._block, 0, 0
        block.begin_time(self._clock())
        while True:
            try:
                before = block.got
                await self._request()
                if block.stop is None or block.is_whole():
                    return self._fetch.finish(block)
                if block.got - before < _AT_ONCE:
                    raise UnreadError(f"the response ended at byte {block.reached} instead of {block.stop}")
            except asyncio.CancelledError:
                raise
            except (ShardError, StateError) as error:
                return self._fetch.finish(block, error)
            except BaseException as error:  # a SystemExit too, which would end the loop
                block.quiet_since = None
                if block in self._fetch.rivals:  # the first request for these bytes still runs
                    return self._fetch.withdraw(block)
                if block.got > reached or block.rested:
                    tries, reached, block.rested = 0, block.got, False
                tries += 1
                wait, final = self._after_error(error, tries)
                if final is not None:
                    return self._fetch.finish(block, final)
                self._client.retries += 1
                await asyncio.sleep(wait)

    def _after_error(self, error: BaseException, tries: int) -> tuple[float, Exception | None]:
        """The seconds to wait before the next request; or the error with which the block ends."""
        block, verdict = self._block, judge(error, self._protocol)
        is_plain = isinstance(error, (RefusedError, FaultyError, UnreadError))  # its message is for users
        reason = words(error) if is_plain else f"{type(error).__name__}: {words(error)}"
        if not verdict.transient:
            signed = verdict.forbidden and is_signed(self._fetch.url)
            return 0.0, self._fetch.error(block, f"{_SIGNED if signed else verdict.advice} ({reason})", error)
        has_responded = is_plain or self._protocol in self._client.responded
        most = self._reading.retries if has_responded else min(EARLY_TRIES, self._reading.retries)
        wait = verdict.pause(tries)
        passed = self._clock() - block.new_since
        if tries <= most and passed + wait <= self._reading.timeout_seconds:
            return wait, None
        effort = f"{plural(tries, 'request')} in {passed:.0f} s"
        effort += f", and the store requested a wait of {verdict.wait_seconds:.0f} s" if verdict.wait_seconds else ""
        return 0.0, self._fetch.error(block, f"cannot be read ({reason}; {effort})", error)

    # One request

    async def _request(self) -> None:
        """Send one request, and read its response."""
        block, shard, clock = self._block, self._object, self._clock
        at = block.reached
        self._client.requests += 1
        begin = block.quiet_since = clock()
        end = min(begin + self._reading.patience, block.since + self._reading.timeout_seconds)
        response: Response | None = None
        try:
            async with asyncio.timeout_at(end) as limit:
                try:
                    response = await self._store.request(
                        self._path, at, self._stop_to_request(), shard.size if self._fetch.has_response else None
                    )
                except RefusedError as refused:
                    if refused.status != 416:
                        raise
                    response = await self._out_of_range(refused, at)
                self._client.note_latency(clock() - begin)
                self._check(response, at)
                await self._take(response, at, limit)
        except TimeoutError:
            if response is None:
                raise UnreadError(f"no response in {clock() - begin:.0f} s") from None
            self._refuse_slow()
        finally:
            if response is not None:
                await close_response(response)

    def _stop_to_request(self) -> int | None:
        """Where a request ends.

        A size that only an index has reported is not used as the end: a longer shard is detected
        then.
        """
        block, shard = self._block, self._object
        at_end = block.stop == shard.size and not shard.size_is_reported
        return (
            None
            if block.stop is None or block.stop <= block.reached or (at_end and self._store.streams)
            else block.stop
        )

    async def _out_of_range(self, refused: RefusedError, at: int) -> Response:
        """An empty response for a store that has no bytes from ``at`` on: the shard ends there, or
        in the padding before.

        Raises:
            ShardError, StateError: it ends before that, or was changed.
        """
        shard, has_response = self._object, self._fetch.has_response
        if has_response and shard.size is not None:
            shard.refuse_change(at, f"{shard.size} bytes", "fewer" if refused.size is None else refused.size)
        size = refused.size
        if size is None and (has_response or at in (0, shard.size)):
            size = at
        if size is None:  # some stores do not report it here, but they do with bytes
            try:
                response = await self._store.request(self._path, max(0, at - RECORD), at, None)
            except RefusedError as again:
                if again.status != 416:
                    raise
            else:
                size = response.size
                await close_response(response)
        if size is None or size <= at - RECORD:
            shard.refuse_end(at, size)
        return Response(at, at, size, shard.validators, in_chunks(b""))

    def _check(self, response: Response, at: int) -> None:
        """Rule 3 of ``io.remote``."""
        fetch, queue = self._fetch, self._queue
        self._client.responded.add(self._protocol)
        self._object.check(response, at)
        queue.usual_size = self._object.size or queue.usual_size
        first = not fetch.has_response
        fetch.has_response = True
        with self._budget.lock:
            self._set_stop(response, at, first=first)
            if first and fetch.stop is None:
                queue.notify(fetch)
        if first and fetch.stop is None:
            queue.schedule()
        if response.start > at or (response.stop is not None and response.stop <= at < (self._block.stop or 0)):
            raise FaultyError(
                f"a response has bytes {response.start} to {response.stop}, but those from {at} on were requested"
            )

    def _set_stop(self, response: Response, at: int, *, first: bool) -> None:
        """Update where the block ends, by what is known now."""
        block, size = self._block, self._object.size
        if size is None:
            # There is no other block. If a response does not report where it ends, no more follows.
            block.stop = (
                response.stop if response.stop is None or block.stop is None else min(block.stop, response.stop)
            )
        elif block.stop is None or (
            first
            and block is self._fetch.blocks[-1]
            and (response.start < at or response.stop is None or response.stop >= size)
        ):
            block.stop = size  # a store without ranges, or one response that has all the rest
        else:
            block.stop = min(block.stop, size)
        if self._fetch.stop is not None and block.stop is not None:
            block.stop = min(block.stop, self._fetch.stop)

    # The bytes of a response

    def _refuse_slow(self) -> None:
        """Raise UnreadError: a response is too slow."""
        block, timeout = self._block, self._reading.timeout_seconds
        if block.is_whole():  # the index is taken as right
            return
        slow = f"no byte came for {self._reading.patience:.0f} s"
        if block.new_bytes and self._clock() >= block.since + timeout:
            slow = f"only {block.new_bytes} bytes came in {timeout:.0f} s"
        raise UnreadError(slow) from None

    async def _take(self, response: Response, at: int, limit: asyncio.Timeout) -> None:
        """Pass the chunks of a response to the consumer, and move the time limit with them."""
        block, clock = self._block, self._clock
        if block.is_whole():
            return
        # If only an index reports how long the shard is, the response is read to its end, to detect
        # a longer shard.
        to_its_end = response.stop is None and not self._object.size_is_reported and block.stop == self._object.size
        begin, came, rests = clock(), block.came, self._rests
        await self._take_chunks(response, at - response.start, limit, to_its_end=to_its_end)
        if self._rests == rests:
            self._client.note_rate(block.came - came, clock() - begin)
        if block.stop is None:
            self._fetch.end_is_vouched_for = response.has_end_mark
        elif block.reached < min(block.stop, block.stop if response.stop is None else response.stop):
            raise UnreadError(f"the response ended at byte {block.reached} instead of {block.stop}")

    async def _take_chunks(self, response: Response, skip: int, limit: asyncio.Timeout, *, to_its_end: bool) -> None:
        """Pass chunks on until the block is whole; the first ``skip`` bytes come before it."""
        block, fetch, queue, lock, client = self._block, self._fetch, self._queue, self._budget.lock, self._client
        clock = self._clock
        await self._until_it_may_be_read(response, limit)
        async for chunk in response.chunks:
            client.bytes_fetched += len(chunk)
            block.end_wait(clock())
            block.came += len(chunk)
            if skip:
                passed = min(skip, len(chunk))
                skip, chunk = skip - passed, chunk[passed:]
            if block.stop is not None and len(chunk) > block.stop - block.reached:
                if to_its_end:
                    self._object.refuse_size("more")
                chunk = chunk[: block.stop - block.reached]
            if chunk:
                if fetch.rivals:
                    fetch.prefer(block)
                block.got += len(chunk)
                with lock:
                    block.add(chunk)
                    if queue.waiting is fetch and block.held >= queue.wake_bytes and block is fetch.read_now:
                        queue.notify(fetch)
            if block.is_whole() and not to_its_end:
                break
            if block is fetch.blocks[-1]:
                with lock:
                    nearly_done = fetch.nearly_done
                if nearly_done:
                    queue.schedule()
            await self._until_it_may_be_read(response, limit)

    async def _until_it_may_be_read(self, response: Response, limit: asyncio.Timeout) -> None:
        """Wait for room where rule 2 says so. Then the server has ``patience`` seconds for the next
        chunk, and rule 5 holds.
        """
        block, clock = self._block, self._clock
        while True:
            # With the lock: the consumer either sees that something is blocked, or took its bytes
            # before.
            with self._budget.lock:
                if self._queue.may_read(block):
                    break
                self._budget.blocked, block.paused = True, asyncio.Event()
                self._queue.has_paused = True
                self._queue.notify(self._fetch)
            self._rests += 1
            begin = clock()
            block.quiet_since = None
            limit.reschedule(None)
            response.rest()
            await block.paused.wait()
            block.quiet_since = clock()
            block.paused, block.rested = None, True
            block.leave_out(clock() - begin)
        now, timeout, end = clock(), self._reading.timeout_seconds, limit.when()
        block.count_time(now, _LEAST_RATE * timeout)
        wanted = min(now + self._reading.patience, block.since + timeout)
        # Not for every chunk, since that takes longer than the chunk.
        if end is None or not 0 <= wanted - end < 0.1 * self._reading.patience:
            limit.reschedule(wanted)
