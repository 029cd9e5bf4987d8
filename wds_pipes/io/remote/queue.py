"""Shards that are read one after another: what is requested next, and how it is fetched.

The classes know each other, as these are the parts of one machine: a ``RemoteShard`` is a stream
that the consumer reads. A ``ReadQueue`` has a ``Fetch`` for each of them, which has a ``Block`` for
each byte range, whose task makes the requests that fill it.
"""

from __future__ import annotations

import asyncio
import io
import math
import threading
from collections import deque
from itertools import islice
from time import perf_counter
from typing import Any

from wds_pipes.core.counts import Meters
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, StateError, sentence
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.remote.budget import Client, UnreadError
from wds_pipes.io.remote.responses import (
    EARLY_TRIES,
    RECORD,
    FaultyError,
    RefusedError,
    RemoteObject,
    Response,
    close_response,
    in_chunks,
    judge,
)
from wds_pipes.io.urls import clean, hide, is_signed, redact, words

_LEAST, _MOST = 1 << 20, 16 << 20  # of the byte ranges that are requested, in bytes
_WAITS = 6  # a range takes at least this many times as long as the wait for its response, if it may
_LOOK_SECONDS = 0.01  # after which a queue of ranges looks again for requests that have stalled
_NEARLY = 4 << 20  # when at most this much of a shard has not arrived, the next one is requested
_SIGNED = "its signature may have expired, so sign it again; a saved state fits URLs that are signed anew"
_LEAST_RATE = 1024  # bytes a second that count as progress
_AT_ONCE = 1 << 16  # a response that ends early, as it said, after this many bytes is continued without a wait

# A consumer that has no bytes left is woken after this many bytes, or after this time in seconds.
_WAKE_BYTES, _WAKE_SECONDS = 1 << 20, 0.02


class RemoteShard(io.RawIOBase):
    """The bytes of a remote shard from ``start`` on, or one range of them, as a raw stream that
    cannot be sought.

    Args:
        queue: the shards that it is read among.
        url: where it is.
        start: the first byte to read.
        size: how many bytes the shard must have; None: any number.
        stop: the byte after the last one to read; None: the shard's end.
        whole_queue: whether to close the queue with it.
        known: what is known of the shard, shared by all that read ranges of it; None: nothing.

    Attributes:
        object: what is known of the whole shard.
    """

    def __init__(
        self,
        queue: ReadQueue,
        url: str,
        *,
        start: int = 0,
        size: int | None = None,
        stop: int | None = None,
        whole_queue: bool = False,
        known: RemoteObject | None = None,
    ) -> None:
        self._queue, self._budget = queue, queue.budget
        self._whole_queue = whole_queue
        self._rest: memoryview | None = None  # of the chunk that is being read
        try:
            self._fetch = Fetch(queue, url, start, size, stop=stop, known=known)
            self.object = self._fetch.object
        except BaseException:
            super().close()
            if whole_queue:
                queue.close()
            raise

    def wait(self) -> None:
        """Wait until the first bytes have arrived.

        Raises:
            ShardError: they cannot be read.
        """
        self._queue.begin()
        if self._rest is None:
            self._rest = memoryview(self.next_chunk(wake_bytes=1))

    def _await(self, wake_bytes: int) -> None:
        """Wait for the event loop until ``wake_bytes`` have arrived; the caller holds the lock."""
        queue, budget = self._queue, self._budget
        queue.waiting, queue.wake_bytes = self._fetch, wake_bytes
        if budget.blocked:
            budget.call(budget.schedule)
        elif not queue.fetches or queue.fetches[0] is not self._fetch:  # see ReadQueue.schedule
            budget.call(queue.schedule)
        start = perf_counter()
        queue.filled.wait(None if wake_bytes == 1 else _WAKE_SECONDS)
        waited = perf_counter() - start
        queue.client.stalled += waited
        queue.meters.stall_seconds += waited
        queue.waiting = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        chunk = self._rest or memoryview(self.next_chunk())
        count = min(len(chunk), len(into))
        into[:count] = chunk[:count]
        self._rest = chunk[count:] if count < len(chunk) else None
        return count

    def next_chunk(self, *, wake_bytes: int = _WAKE_BYTES) -> bytes:
        """The next bytes as they arrived; empty at the end. Not to be mixed with ``read`` or
        ``wait``.
        """
        budget = self._budget
        if not budget.is_ours:
            raise RuntimeError(
                f"shard {redact(self._fetch.url)} was opened in another process: iterate in the process that reads"
            )
        with budget.lock:
            while True:
                if self._fetch.given_up or not self._queue.open:
                    raise ValueError("read of a closed shard")
                chunk = self._fetch.take()
                if chunk is not None:
                    if chunk and budget.blocked:
                        budget.call(budget.schedule)
                    return chunk
                self._await(wake_bytes)

    def close(self) -> None:
        """Give up what was requested and not read. Closing again does nothing."""
        if not self.closed and self._budget.is_ours:
            self._fetch.give_up()
            if self._whole_queue:
                self._queue.close()
        super().close()
        if self._budget.is_ours:
            with self._budget.lock:
                self._queue.filled.notify_all()  # another thread may wait for bytes


class ReadQueue:
    """Shards that are read one after another.

    The first of ``fetches`` is the one that the consumer reads, or waits for. Those after it are
    read ahead when all of the first has been requested.

    Attributes:
        client: the pipe that it belongs to.
        meters: those of the chain that reads it.
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
        running: how many blocks are being filled.
        paused: the blocks that wait for room.
    """

    def __init__(self, client: Client, meters: Meters | None = None, *, ahead: bool = False) -> None:
        self.client, self.budget, self.meters = client, client.budget, meters or Meters()
        self.ahead = ahead
        self.share, self.connections = client.reading.readahead_bytes, 1
        self.fetches: deque[Fetch] = deque()
        self.filled = threading.Condition(self.budget.lock)
        self.held = self.running = 0
        self.waiting: Fetch | None = None
        self.wake_bytes = 1
        self.usual_size: int | None = None
        self.paused: set[Block] = set()
        self.open, self.ended = True, False
        self._is_called = False  # whether ``schedule`` will be called soon
        self.budget.call(self._join)

    def close(self) -> None:
        """Give up all its shards."""
        if self.open:
            self.open = False
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
        self.budget.call(self._end)

    def _end(self) -> None:
        self.ended = True
        if not self.fetches:
            self.close()

    def add(self, fetch: Fetch) -> None:
        """Add a shard, by any thread."""
        with self.budget.lock:
            self.fetches.append(fetch)
            if not self._is_called:
                self._is_called = True
                self.budget.call(self.schedule)

    def notify(self, fetch: Fetch) -> None:
        """Wake the consumer if it waits for this shard; the caller holds the lock."""
        if self.waiting is fetch:
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
            self._is_called = False
            if not self.open:
                return
            if self.waiting is not None and self.fetches and self.fetches[0] is not self.waiting:
                self._move_to_front(self.waiting)  # a stage may have changed their order
            self._request()
            for block in tuple(self.paused):
                if self.may_read(block):
                    block.resume()
                else:
                    self.budget.blocked = True

    def _move_to_front(self, fetch: Fetch) -> None:
        if fetch in self.fetches:
            self.fetches.remove(fetch)
            self.fetches.appendleft(fetch)

    def _request(self) -> None:
        """Request the next byte ranges, as far as connections and room allow."""
        active, most = self.running, 1 if self.ahead else self.connections
        for place, fetch in enumerate(self.fetches):
            following = next(islice(self.fetches, place + 1, None), None) if most > 1 else None
            while fetch.can_request:
                waited_for = place == 0 and fetch.read_now is None
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

    def __init__(self, client: Client, meters: Meters | None = None) -> None:
        self._unrequested: deque[Fetch] = deque()
        self._is_watching = False
        super().__init__(client, meters)

    def add(self, fetch: Fetch) -> None:
        with self.budget.lock:
            self._unrequested.append(fetch)
            super().add(fetch)

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
                if self.running >= self.connections:
                    return
                if not self.has_room:
                    self.budget.blocked = True
                    return
            self._unrequested.popleft().request_next()
            if not self._is_watching:
                self._watch()

    def _watch(self) -> None:
        """Make a second request for each range whose request has stalled, and look again later."""
        self._is_watching = self.running > 0
        if self._is_watching:
            now = self.budget.loop.time()
            with self.budget.lock:
                for fetch in self.fetches:
                    for block in fetch.blocks:
                        block.look(now)
            self.budget.loop.call_later(_LOOK_SECONDS, self._watch)


class Fetch:
    """The fetching of a shard's bytes from ``start`` on, or of one range of them. It runs on the
    event loop, except where a comment says otherwise.

    Args:
        queue: the shards that it is read among.
        url: where the shard is.
        start: the first byte to fetch.
        size: how many bytes the shard must have; None: any number.
        stop: the byte after the last one to fetch: it is requested at once; None: the shard's end.
        known: what is known of the shard, shared by all that read ranges of it; None: nothing.

    Attributes:
        object: what is known of the whole shard.
        start, stop: as above.
        store, path: where it is requested.
        blocks: the byte ranges that were requested and are not used up, in order; guarded by the
            lock.
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
        known: RemoteObject | None = None,
    ) -> None:
        self.queue, self.url, self._budget = queue, url, queue.budget
        self.start, self.stop = start, stop
        self.object = known or RemoteObject(url, size)
        self.blocks: deque[Block] = deque()
        self.has_response = self.failed = self.given_up = False
        self.store, self.path = queue.client.stores.find(url)  # last: if it raises, nothing was begun
        if self._budget.is_ours:  # otherwise reading it says so
            queue.add(self)

    # By the consumer, with the lock

    def take(self) -> bytes | None:
        """The next bytes; empty at the end; None if they have not arrived yet.

        Raises:
            ShardError, StateError, UnreadError: they cannot be read.
        """
        while self.blocks:
            first = self.blocks[0]
            if first.chunks:
                return first.take()
            if first.error is not None:
                raise first.error
            if not first.done:
                return None
            if len(self.blocks) == 1:
                return None if self.can_request else b""
            self.blocks.popleft()
        return None

    # By any thread

    def give_up(self) -> None:
        """Drop what has arrived, and cancel what was requested."""
        if not self.given_up:
            with self._budget.lock:
                self.given_up = True
                for block in self.blocks:
                    block.drop()
                is_over = self.stop is not None and bool(self.blocks) and self.blocks[-1].done
                if is_over and self in self.queue.fetches:
                    self.queue.fetches.remove(self)
            if not is_over or self._budget.blocked:
                self._budget.call(self._cancel)

    # On the event loop

    def _cancel(self) -> None:
        for block in tuple(self.blocks):
            block.cancel()
        with self._budget.lock:
            if self in self.queue.fetches:
                self.queue.fetches.remove(self)
        if self.queue.ended and not self.queue.fetches:
            self.queue.close()
        self._budget.schedule()

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
    def read_now(self) -> Block | None:
        """The block that the consumer reads.

        Blocks before it may be used up: the consumer removes them only when it has read on.
        """
        return next((block for block in self.blocks if block.chunks or not block.done), None)

    @property
    def nearly_done(self) -> bool:
        """Whether a single connection still reads it to its end, and has little left."""
        running = [block for block in self.blocks if not block.done]
        return (
            self.stop is None
            and len(running) == 1
            and running[0] is self.blocks[-1]
            and running[0].stop is not None
            and running[0].stop - running[0].reached < _NEARLY
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
            wanted = max(1, min(_WAITS * self.queue.client.lost, 2 * share // connections))
            ranges = max(math.ceil((connections - 1) / (len(self.queue.fetches) - 1)), math.ceil(size / wanted))
            count = max(count, size // ranges + 1)
        return min(max(count, _LEAST), _MOST)

    def request_next(self) -> None:
        """Request the next bytes."""
        start = self.blocks[-1].stop if self.blocks else self.start
        assert start is not None
        stop = self.object.size if self.stop is None else self.stop
        if (
            self.stop is None
            and not self.object.ignores_ranges
            and (self.queue.connections > 1 or not self.store.streams)
        ):
            stop = start + self._count() if stop is None else min(start + self._count(), stop)
        self.blocks.append(Block(self, start, stop))


class Block:
    """A byte range that is requested: ``start`` up to, not including, ``stop`` (None: the end of
    the response, wherever that is). Its task fills it, with as many requests as that takes.

    Attributes:
        got: how many bytes of it have arrived.
        came: how many bytes have arrived in all, including those before ``start`` of a server that
            ignores ranges.
        chunks: the bytes that wait for the consumer.
        held: how many these are.
        done: whether no more will arrive.
        error: why it ended early.
        rivals: second requests for its rest, made because the first one has stalled: the first of
            all that gets bytes is used.
    """

    def __init__(self, fetch: Fetch, start: int, stop: int | None) -> None:
        self.fetch, self.start, self.stop = fetch, start, stop
        self._queue, self._client, self._object = fetch.queue, fetch.queue.client, fetch.object
        self._budget, self._reading = fetch.queue.budget, fetch.queue.client.reading
        self._protocol = fetch.url.partition(":")[0]
        self._clock = self._budget.loop.time
        self.got = self.came = self.held = 0
        self.chunks: deque[bytes] = deque()
        self.done = False
        self.error: Exception | None = None
        self._paused: asyncio.Event | None = None  # set when its task may continue
        self._pauses = 0  # how many there were: a server may have closed the connection meanwhile
        # Since when there must be progress, in seconds of the loop's clock, and what had come then.
        self._since, self._counted = self._clock(), 0
        # Since when its last request has brought no bytes; None: no request runs, or it is paused.
        self._quiet_since: float | None = None
        self._suspected: float | None = None  # the same, when this was too long at the last look
        self._longest_wait = 0.0  # of its requests, in seconds without bytes
        self.rivals: set[asyncio.Task[BaseException | None]] = set()
        self._winner: asyncio.Task[BaseException | None] | None = None  # the second request that is used
        self._queue.running += 1
        if self._is_hedged:
            fetch.store.waits.count_request()
        self._task = self._budget.loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    # With the lock

    def add(self, chunk: bytes) -> None:
        """Keep a chunk for the consumer, unless it has given up."""
        if not self.fetch.given_up:
            self.chunks.append(chunk)
            self._hold(len(chunk))

    def take(self) -> bytes:
        """The next chunk."""
        chunk = self.chunks.popleft()
        self._hold(-len(chunk))
        return chunk

    def drop(self) -> None:
        """The consumer has given up: drop the chunks."""
        self.chunks.clear()
        self._hold(-self.held)

    def _hold(self, more: int) -> None:
        self.held += more
        self._queue.held += more
        self._budget.held += more

    # On the event loop

    @property
    def reached(self) -> int:
        """The byte that arrives next."""
        return self.start + self.got

    @property
    def is_whole(self) -> bool:
        """Whether all of it has arrived."""
        return self.stop is not None and self.start + self.got >= self.stop

    def cancel(self) -> None:
        """End its requests."""
        for task in (self._task, *self.rivals):
            task.cancel()

    def resume(self) -> None:
        """Let it continue after a pause."""
        self._queue.paused.discard(self)
        if self._paused is not None:
            self._paused.set()
            self._paused = None

    def _finish(self, error: Exception | None = None) -> None:
        """No more bytes of it will arrive."""
        for task in self.rivals:
            task.cancel()
        if self._is_hedged and error is None:
            self.fetch.store.waits.note(self._longest_wait)
        with self._budget.lock:
            self.done, self.error = True, error
            self.fetch.failed = self.fetch.failed or error is not None
            if self.stop is None and error is None:
                self.stop = self.reached  # it had no length, and this was its end
                if self.fetch.stop is None:
                    self._object.reported_size = self.reached
            self._queue.notify(self.fetch)
        self._queue.running -= 1
        self._queue.schedule()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Its task has ended. If it was cancelled from outside, or broke, that is an error."""
        if not self.done:
            cause = None if task.cancelled() else task.exception()
            cause = cause or UnreadError("its request was cancelled")
            self._finish(self._problem(f"cannot be read ({words(cause)})", cause))

    # Retries

    async def _run(self) -> None:
        """Request the bytes until all have arrived, or until an error that no retry can mend."""
        tries, wait, reached, pauses, since = 0, 0.0, 0, 0, self._clock()
        while True:
            before, self._winner = self.got, None
            try:
                await self._first_response(wait)
                if self.stop is None or self.is_whole:
                    return self._finish()
                if self.got - before < _AT_ONCE:
                    raise UnreadError(f"the response ended at byte {self.reached} instead of {self.stop}")
                wait = 0.0
            except asyncio.CancelledError:
                raise
            except (ShardError, StateError) as error:
                return self._finish(error)
            except BaseException as error:  # a SystemExit too, which would end the loop
                self._quiet_since = None
                if self.got > reached or self._pauses > pauses:
                    tries, reached, pauses, since = 0, self.got, self._pauses, self._clock()
                tries += 1
                wait, final = self._after_error(error, tries, min(since, self._since))
                if final is not None:
                    return self._finish(final)
                self._client.retries += 1

    def _after_error(self, error: BaseException, tries: int, since: float) -> tuple[float, Exception | None]:
        """The seconds to wait before the next request; or the error with which the block ends.

        Args:
            error: why the last request has ended.
            tries: how many requests there were without progress.
            since: when the last progress was.
        """
        verdict = judge(error, self._protocol)
        is_plain = isinstance(error, (RefusedError, FaultyError, UnreadError))  # its message is for users
        reason = words(error) if is_plain else f"{type(error).__name__}: {words(error)}"
        if not verdict.transient:
            return 0.0, self._problem(f"{verdict.what} ({reason})", error)
        has_responded = is_plain or self._protocol in self._client.responded
        most = self._reading.retries if has_responded else min(EARLY_TRIES, self._reading.retries)
        wait = verdict.pause(tries)
        passed = self._clock() - since
        if tries <= most and passed + wait <= self._reading.timeout_seconds:
            return wait, None
        effort = f"{plural(tries, 'request')} in {passed:.0f} s"
        effort += f", and the store requested a wait of {verdict.wait_seconds:.0f} s" if verdict.wait_seconds else ""
        return 0.0, self._problem(f"cannot be read ({reason}; {effort})", error)

    def _problem(self, what: str, cause: BaseException) -> Exception:
        """The error that the consumer gets, without credentials. It is an UnreadError if the shard
        could be read up to there.
        """
        url, options = self.fetch.url, self._reading.storage_options
        shown, at, what = redact(url), self.reached, hide(what, url, options)
        verdict = judge(cause, url.partition("://")[0])
        signed = verdict.forbidden and is_signed(url)
        mend, public = (_SIGNED, ("", "")) if signed else (verdict.mend, verdict.public)
        if self.got or self.start > self.fetch.start:
            error: UnreadError | ShardError = UnreadError(sentence(f"byte {at} {what}", mend))
        else:
            hint = " If it is a directory, pass it with '/' at its end."
            hint = hint if verdict.missing and not TAR_NAME.search(url) else ""
            error = ShardError(
                f"{what}.",
                where=f"shard {shown}",
                mend=mend and f"{mend}{public[0]}.{hint}",
                mend_cli=mend and f"{mend}{public[1]}.{hint}",
                url=shown,
                offset=at or None,
                missing=verdict.missing,
            )
        error.of_data = verdict.of_data
        error.__cause__ = clean(cause, url, options)
        return error

    # A second request if the first one has stalled

    @property
    def _is_hedged(self) -> bool:
        """Whether a second request helps: those of stores that do not stream wait for a thread."""
        return self.fetch.stop is not None and self.fetch.store.streams

    def look(self, now: float) -> None:
        """Make a second request if the last one has brought nothing for much longer than usual, at
        the second look: at the first one, this process may have been busy, and the bytes may have
        arrived. A second request that is used is not replaced: if it stalls for too long, the range
        is requested again as after an error.
        """
        quiet, waits = self._quiet_since, self.fetch.store.waits
        if self.done or self._winner is not None or not self._is_hedged or quiet is None or now - quiet <= waits.stall:
            return
        if self._suspected != quiet:
            self._suspected = quiet
        elif waits.allow_second():
            self._client.hedged += 1
            self._quiet_since = now
            rival = self._budget.loop.create_task(self._second_response())
            self.rivals.add(rival)
            rival.add_done_callback(self.rivals.discard)

    async def _first_response(self, wait: float) -> None:
        """Make a request after so many seconds, and read its response, or the one of a second
        request if that has the first bytes.
        """
        try:
            if wait:
                await asyncio.sleep(wait)
            await self._request()
        except asyncio.CancelledError:
            if self._winner is None:
                raise
        if self._winner is not None and (error := await self._winner) is not None:
            raise error

    async def _second_response(self) -> BaseException | None:
        """Make a second request, and read its response; return its error, which is ignored as long
        as the first one may bring the bytes.
        """
        try:
            await self._request()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        return None

    def _prefer_this(self) -> None:
        """Use the request that has the first bytes, and cancel the others."""
        this = asyncio.current_task()
        self._winner = next((rival for rival in self.rivals if rival is this), None)
        for task in (self._task, *self.rivals):
            if task is not this:
                task.cancel()
        self.rivals.clear()

    # One request

    async def _request(self) -> None:
        """Send one request, and read its response."""
        shard, clock, store, path = self._object, self._clock, self.fetch.store, self.fetch.path
        at = self.reached
        self._client.requests += 1
        begin = self._quiet_since = clock()
        end = min(begin + self._reading.patience, self._since + self._reading.timeout_seconds)
        response: Response | None = None
        try:
            async with asyncio.timeout_at(end) as limit:
                try:
                    size = shard.size if self.fetch.has_response else None
                    response = await store.request(path, at, self._stop_to_request(), size)
                except RefusedError as refused:
                    if refused.status != 416:
                        raise
                    response = await self._out_of_range(refused, at)
                self._client.note_latency(clock() - begin)
                self._check(response, at)
                await self._take(response, at, begin, limit)
        except TimeoutError:
            if not limit.expired() and not self.is_whole:  # a library has raised it, for its own reason
                raise
            timeout, came = self._reading.timeout_seconds, self.came - self._counted
            if response is None:
                slow = f"no response in {clock() - begin:.0f} s"
            elif came and clock() >= self._since + timeout:
                slow = f"only {came} bytes came in {timeout:.0f} s"
            else:
                slow = f"no byte came for {self._reading.patience:.0f} s"
            if response is None or not self.is_whole:  # otherwise the index is taken as right
                raise UnreadError(slow) from None
        finally:
            if response is not None:
                await close_response(response)

    def _stop_to_request(self) -> int | None:
        """Where a request ends.

        A size that only an index has reported is not used as the end: a longer shard is detected
        then.
        """
        at_end = self.stop == self._object.size and self._object.reported_size is None
        return (
            None
            if self.stop is None or self.stop <= self.reached or (at_end and self.fetch.store.streams)
            else self.stop
        )

    async def _out_of_range(self, refused: RefusedError, at: int) -> Response:
        """An empty response for a store that has no bytes from ``at`` on: the shard ends there, or
        in the padding before.

        Raises:
            FaultyError: by the size in this same response, there are bytes from ``at`` on.
            ShardError, StateError: it ends before that, or was changed.
        """
        shard, has_response = self._object, self.fetch.has_response
        if refused.size is not None and at < refused.size and shard.size in (None, refused.size):
            raise FaultyError(f"status 416 for the bytes from {at} on of {refused.size}")
        if has_response and shard.size not in (None, refused.size):
            shard.refuse_change(at, f"{shard.size} bytes", "fewer" if refused.size is None else refused.size)
        size = refused.size
        if size is None and (has_response or at in (0, shard.size)):
            size = at
        if size is None:  # some stores do not report it here, but they do with bytes
            try:
                response = await self.fetch.store.request(self.fetch.path, max(0, at - RECORD), at, None)
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
        fetch, queue = self.fetch, self._queue
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
        if response.start > at or (response.stop is not None and response.stop <= at < (self.stop or 0)):
            raise FaultyError(
                f"a response has bytes {response.start} to {response.stop}, but those from {at} on were requested"
            )

    def _set_stop(self, response: Response, at: int, *, first: bool) -> None:
        """Update where the block ends, by what is known now."""
        size = self._object.size
        if size is None:
            # There is no other block. If a response does not report where it ends, no more follows.
            if response.stop is None or self.stop is None:
                self.stop = response.stop
            elif self.fetch.stop is None:
                self.stop = min(self.stop, response.stop)
        elif self.stop is None or (
            first
            and self is self.fetch.blocks[-1]
            and (response.start < at or response.stop is None or response.stop >= size)
        ):
            self.stop = size  # a store without ranges, or one response that has all the rest
        else:
            self.stop = min(self.stop, size)
        if self.fetch.stop is not None and self.stop is not None:
            self.stop = min(self.stop, self.fetch.stop)

    # The bytes of a response

    async def _take(self, response: Response, at: int, requested: float, limit: asyncio.Timeout) -> None:
        """Pass the chunks of a response to the consumer, and move the time limit with them."""
        if self.is_whole:
            return
        # If only an index reports how long the shard is, the response is read to its end, to detect
        # a longer shard.
        to_its_end = response.stop is None and self._object.reported_size is None and self.stop == self._object.size
        begin, came, pauses = self._clock(), self.came, self._pauses
        await self._take_chunks(response, at - response.start, requested, limit, to_its_end=to_its_end)
        if self._pauses == pauses:
            self._client.note_rate(self.came - came, self._clock() - begin)
        if self.stop is None:
            self._object.end_is_vouched_for = response.has_end_mark
        elif self.reached < min(self.stop, self.stop if response.stop is None else response.stop):
            raise UnreadError(f"the response ended at byte {self.reached} instead of {self.stop}")

    async def _take_chunks(
        self, response: Response, skip: int, quiet: float, limit: asyncio.Timeout, *, to_its_end: bool
    ) -> None:
        """Pass chunks on until the block is whole; the first ``skip`` bytes come before it.
        ``quiet``: since when the request has brought no bytes.
        """
        fetch, queue, lock, client, clock = self.fetch, self._queue, self._budget.lock, self._client, self._clock
        quiet = await self._until_it_may_be_read(response, limit, quiet)
        async for chunk in response.chunks:
            client.bytes_fetched += len(chunk)
            self._longest_wait = max(self._longest_wait, clock() - quiet)
            self.came += len(chunk)
            if self.rivals:
                self._prefer_this()
            if skip:
                passed = min(skip, len(chunk))
                skip, chunk = skip - passed, chunk[passed:]
            if self.stop is not None and len(chunk) > self.stop - self.reached:
                if to_its_end:
                    self._object.refuse_size("more")
                chunk = chunk[: self.stop - self.reached]
            if chunk:
                self.got += len(chunk)
                with lock:
                    self.add(chunk)
                    if queue.waiting is fetch and self.held >= queue.wake_bytes and self is fetch.read_now:
                        queue.notify(fetch)
            if self.is_whole and not to_its_end:
                break
            if self is fetch.blocks[-1]:
                with lock:
                    nearly_done = fetch.nearly_done
                if nearly_done:
                    queue.schedule()
            self._quiet_since = clock()
            quiet = await self._until_it_may_be_read(response, limit, self._quiet_since)

    async def _until_it_may_be_read(self, response: Response, limit: asyncio.Timeout, quiet: float) -> float:
        """Wait for room where rule 2 says so. Then the server has ``patience`` seconds for the next
        chunk, and rule 5 holds. Returns ``quiet``, or when the last pause ended.
        """
        clock = self._clock
        while True:
            # With the lock: the consumer either sees that something is blocked, or took its bytes
            # before.
            with self._budget.lock:
                if self._queue.may_read(self):
                    break
                paused = self._paused = self._paused or asyncio.Event()
                self._budget.blocked = True
                self._queue.paused.add(self)
                self._queue.notify(self.fetch)
            self._pauses += 1
            begin = clock()
            self._quiet_since = None
            limit.reschedule(None)
            response.rest()
            await paused.wait()
            quiet = self._quiet_since = clock()
            self._since += quiet - begin
        now, timeout, end = clock(), self._reading.timeout_seconds, limit.when()
        if self.came - self._counted >= _LEAST_RATE * timeout:
            self._since, self._counted = now, self.came
        wanted = min(now + self._reading.patience, self._since + timeout)
        # Not for every chunk, since that takes longer than the chunk.
        if end is None or not 0 <= wanted - end < 0.1 * self._reading.patience:
            limit.reschedule(wanted)
        return quiet
