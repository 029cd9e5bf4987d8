"""Read remote shards ahead, through several connections at once.

Rules:
1. A ``Pool`` holds the connections and the bytes of a pipe in one process; it works on fsspec's event loop. A ``Feed`` is a row of shards that are read one
   after another: those of a lane, or one of several shards that are read in turn.
2. Feeds share the pool's connections and bytes alike. A feed with several connections asks for ranges, and for those of the next shard before one has ended;
   a feed with one asks for all the rest of a shard at once, which leaves no pause between requests.
3. A connection is read on only while its feed holds less than its share of the bytes. What the consumer waits for is always read: so nothing hangs for want
   of room, and a feed holds no more than its share and one piece.
4. Every answer is checked: where it begins, how long it is, whether the object is still the same. What breaks off is asked for again from the byte reached.
5. Everything belongs to the loop's thread, except pieces that wait for the consumer: they and their sums are behind the pool's lock.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, NoReturn

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.stores import Answer, FaultyError, RefusedError, Stores, changed, close_answer, judge, one_piece
from wds_pipes.io.urls import hide, redact
from wds_pipes.tar.reader import BLOCK

_LEAST, _MOST = 1 << 20, 16 << 20  # of the ranges that are asked for, in bytes
_NEARLY = 4 << 20  # with so little of a shard left to come, the next one is asked for
_WORTH, _WORTH_SECONDS = 1 << 20, 0.02  # a consumer that has used up what there was sleeps until so much has come, or so long
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 15.0  # seconds before asking again
_EARLY_TRIES = 3  # for a server that never answered: its name may be wrong


@dataclass(frozen=True)
class Reading:
    """How remote shards are read: see ``open_shards``."""

    storage_options: dict[str, Any] = field(default_factory=dict)
    readahead_bytes: int = 64 << 20
    connections: int = 8
    retries: int = 10
    timeout_seconds: float = 120.0

    @property
    def patience(self) -> float:
        """After how many seconds without a byte a request is given up."""
        return max(1.0, self.timeout_seconds / 4)


class UnreadError(OSError):
    """The bytes of a shard do not come."""


class Pool:
    """The connections of a pipe in this process, and what they have read ahead.

    Attributes:
        requests: how many were made.
        retries: how many of these asked again for what had not come.
        bytes_fetched: how many bytes came.
        stalled: seconds in which consumers waited for bytes.
    """

    def __init__(self, reading: Reading) -> None:
        from fsspec.asyn import get_loop

        self.reading = reading
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop = get_loop()
        self.stores = Stores(reading.storage_options, reading.connections, reading.patience)
        self.heard_of: set[str] = set()  # protocols that have answered
        self.feeds: list[Feed] = []
        self.sharing = 1  # how many feeds share the bytes and the connections: those that it is the turn of
        self.lock = threading.RLock()
        self.held = 0
        self.blocked = False  # something waits for the consumer to take some bytes
        self.requests = self.retries = self.bytes_fetched = 0
        self.stalled = 0.0
        _pools.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process made it. In a fork its lock may be held for ever by a thread that is not there."""
        return self.pid == os.getpid()

    @property
    def share(self) -> int:
        """How many bytes a feed may hold."""
        return self.reading.readahead_bytes // self.sharing

    @property
    def connections(self) -> int:
        """How many connections a feed may have."""
        return max(1, self.reading.connections // self.sharing)

    def call(self, what: Any, *args: Any) -> None:
        """Let the loop do something soon."""
        self.loop.call_soon_threadsafe(what, *args)

    def go_on(self) -> None:
        """Ask for what may be asked for, and read on what may be read on."""
        self.sharing = max(1, sum(not feed.ahead for feed in self.feeds))
        with self.lock:
            self.blocked = False
            for feed in self.feeds:
                feed.go_on()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_inherited: list[Pool] = []  # by a fork, which keeps them: their connections, if closed here, would go silent in the process that they belong to
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_pools))


class Feed:
    """Shards that are read one after another.

    The first of ``shards`` is the one that the consumer reads; what comes behind it is read ahead when nothing of it is left to ask for.

    Attributes:
        ahead: the consumer has not come to it yet: it has one connection, and takes none from others.
    """

    def __init__(self, pool: Pool, *, ahead: bool = False) -> None:
        self.pool = pool
        self.ahead = ahead
        self.shards: deque[RemoteShard] = deque()
        self.filled = threading.Condition(pool.lock)
        self.held = 0
        self.waiting: RemoteShard | None = None  # the one whose next bytes the consumer waits for
        self.worth = 1  # for how many of them it is to be woken
        self.usual_size: int | None = None  # of its shards: that of the last one which was told
        self.open = True
        pool.call(self._join)

    def close(self) -> None:
        """Give everything up."""
        if self.open:
            self.open = False
            if self.pool.is_ours and not self.pool.loop.is_closed():
                self.pool.call(self._leave)

    def _join(self) -> None:
        self.pool.feeds.append(self)
        self.pool.go_on()

    def begin(self) -> None:
        """The consumer has come to it."""
        if self.ahead:
            self.ahead = False
            self.pool.call(self.pool.go_on)

    def _leave(self) -> None:
        for shard in tuple(self.shards):
            shard.close()
        self.pool.feeds.remove(self)
        self.pool.go_on()

    def go_on(self) -> None:
        """Rules 2 and 3, in the loop."""
        pool = self.pool
        with pool.lock:  # so that the consumer either sees that something is blocked, or has taken its bytes before
            self._ask(pool.connections)
            for shard in self.shards:
                for block in shard.blocks:
                    if block.paused is not None and self.may_read(block):
                        block.paused.set()
                    elif block.paused is not None:
                        pool.blocked = True

    def _ask(self, connections: int) -> None:
        """Ask for what is next, with so many connections."""
        active, most = sum(shard.active for shard in self.shards), 1 if self.ahead else connections
        for shard in self.shards:
            while shard.left_to_ask:
                waited_for = shard is self.shards[0] and not any(block.pieces or not block.done for block in shard.blocks)
                if active >= most and not waited_for:
                    break
                if self.held >= self.pool.share and shard.blocks and not waited_for:
                    self.pool.blocked = True
                    break
                shard.ask(connections)
                active += 1
            if shard.left_to_ask or shard.failed or (shard is self.shards[0] and not shard.answered):
                return
            if active >= most and shard.nearly_done:
                active -= 1

    def may_read(self, block: _Block) -> bool:
        """Rule 3."""
        pool, first = self.pool, self.shards[0] if self.shards else None
        if self.held < pool.share and pool.held < pool.reading.readahead_bytes:
            return True
        if first is None or block.shard is not first or block.pieces:
            return False
        return block is first.read_now


class _Block:
    """A run of bytes that was asked for: ``start`` up to, not including, ``stop`` (None: the end of the shard, wherever that is)."""

    def __init__(self, shard: RemoteShard, start: int, stop: int | None) -> None:
        self.shard, self.start, self.stop = shard, start, stop
        self.got = 0
        self.pieces: deque[bytes] = deque()
        self.done = False
        self.error: Exception | None = None
        self.paused: asyncio.Event | None = None
        self.rested = False  # it was paused, and a server may have lost patience
        self.task: asyncio.Task[None] | None = None


class RemoteShard(io.RawIOBase):
    """The bytes of a remote shard from ``start`` on, as a raw stream that cannot be sought.

    Args:
        feed: among what it is read.
        url: where it is.
        start: the first byte to read.
        size: how many bytes the shard must have; None: as many as it has.
        whole_feed: close the feed with it.

    Attributes:
        size: of the whole shard, in bytes; None: not known (yet).
    """

    def __init__(self, feed: Feed, url: str, *, start: int = 0, size: int | None = None, whole_feed: bool = False) -> None:
        self._feed, self._pool, self._url, self._start = feed, feed.pool, url, start
        self._store, self._path = feed.pool.stores.find(url)
        self._protocol = url.partition(":")[0]
        self._expected = self.size = size
        self._tags: dict[str, str] = {}
        self.blocks: deque[_Block] = deque()
        self._next = start  # the byte to ask for next
        self.answered = False
        self._rest: memoryview | None = None  # of the piece that is being given
        self.failed = False
        self._given_up = False
        self._whole_feed = whole_feed
        self._pool.call(self._begin)

    # In the loop

    def _begin(self) -> None:
        if not self._given_up:
            self._feed.shards.append(self)
            self._feed.go_on()

    @property
    def tag(self) -> str | None:
        """Its ETag, or what the store has instead; None: not known (yet)."""
        return next(iter(self._tags.values()), None)

    @property
    def left_to_ask(self) -> bool:
        """Whether there is something to ask for that may be asked for now."""
        if self.failed or self._given_up:
            return False
        if self.size is None:  # what comes behind an answer is known when it has come
            return not self.blocks or (self.answered and self.blocks[-1].done)
        return self._next < self.size or not (self.blocks or self.answered)

    @property
    def active(self) -> int:
        """How many connections are used for it."""
        return sum(not block.done for block in self.blocks)

    @property
    def read_now(self) -> _Block | None:
        """The block that the consumer reads; it may stand behind one that it has used up, and had nothing to go on to."""
        return next((block for block in self.blocks if block.pieces or not block.done), None)

    @property
    def nearly_done(self) -> bool:
        """Whether one connection still reads it, and has little left."""
        last = self.blocks[-1] if self.blocks else None
        return self.active == 1 and last is not None and not last.done and last.stop is not None and last.stop - last.start - last.got < _NEARLY

    def ask(self, connections: int) -> None:
        """Ask for the next bytes."""
        stop: int | None = None
        if connections > 1 or not self._store.streams:
            connections = max(2, connections)
            size = self.size or self._feed.usual_size  # so that a small shard too is read through all connections
            part = self._pool.share // connections if size is None else min(self._pool.share, size) // connections + 1
            stop = self._next + min(max(part, _LEAST), _MOST)
            stop = stop if self.size is None else min(stop, self.size)
        block = _Block(self, self._next, stop)
        self._next = stop if stop is not None else self.size or self._next
        with self._pool.lock:
            self.blocks.append(block)
        block.task = self._pool.loop.create_task(self._fetch(block))

    async def _fetch(self, block: _Block) -> None:
        """Get the bytes of a block, whatever it takes."""
        pool, reading = self._pool, self._pool.reading
        tries, reached, since = 0, 0, monotonic()
        while True:
            try:
                await self._read(block)
                return self._finish(block)
            except asyncio.CancelledError:
                raise
            except (ShardError, StateError) as error:
                return self._finish(block, error)
            except Exception as error:
                verdict = judge(error, self._protocol)
                told = isinstance(error, (RefusedError, FaultyError, UnreadError))  # by a server, or by us
                story = str(error) if told else f"{type(error).__name__}: {error}"
                if not verdict.passing:
                    return self._finish(block, self._error(block, f"{verdict.advice} ({story})", error))
                if block.got > reached or block.rested:
                    tries, reached, since, block.rested = 0, block.got, monotonic(), False
                tries += 1
                most = reading.retries if told or self._protocol in pool.heard_of else min(_EARLY_TRIES, reading.retries)
                # From half to the whole of a time that doubles, so that many readers do not come back at once.
                wait = max(verdict.after, min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT) * random.uniform(0.5, 1))
                passed = monotonic() - since
                if tries > most or passed + wait > reading.timeout_seconds:
                    asked = f"asked {tries} times in {passed:.0f} s"
                    asked += f", and told to wait {verdict.after:.0f} s" if verdict.after else ""
                    return self._finish(block, self._error(block, f"cannot be read ({story}; {asked})", error))
                pool.retries += 1
                await asyncio.sleep(wait)

    async def _read(self, block: _Block) -> None:
        """Read the answer to one request."""
        pool, at = self._pool, block.start + block.got
        patience = pool.reading.patience
        pool.requests += 1
        try:
            async with asyncio.timeout(patience):
                answer = await self._store.ask(self._path, at, block.stop, self.size if self.answered else None)
        except RefusedError as refused:
            if refused.status != 416:
                raise
            async with asyncio.timeout(patience):
                answer = await self._nothing(refused, at)
        except TimeoutError:
            raise UnreadError(f"no answer in {patience:.0f} s") from None
        try:
            self._check(answer, at, block)
            await self._take(answer, block, at, patience)
        finally:
            await close_answer(answer)

    async def _nothing(self, refused: RefusedError, at: int) -> Answer:
        """What a store means that has nothing at byte ``at``: the shard ends there, or in the padding before; if not, it is an error."""
        if self.answered and self.size is not None:
            self._changed(at, f"{self.size} bytes", "fewer" if refused.size is None else refused.size)
        size = refused.size if refused.size is not None else at if self.answered or at in (0, self.size) else None
        if size is None:  # as some stores do not tell; they do with what they have
            try:
                answer = await self._store.ask(self._path, max(0, at - BLOCK), at, None)
            except RefusedError as again:
                if again.status != 416:
                    raise
            else:
                size = answer.size
                await close_answer(answer)
        if size is None or size <= at - BLOCK:
            self._too_short(at, size)
        return Answer(at, at, size, self._tags, one_piece(b""))

    def _too_short(self, at: int, size: int | None) -> NoReturn:
        url = redact(self._url)
        has = "fewer" if size is None else f"only {size}"
        raise StateError(f"the state stands at byte {at} of shard {url}, which has {has}: it was changed since.")

    def _changed(self, at: int, before: object, now: object) -> NoReturn:
        url = redact(self._url)
        raise ShardError(
            f"shard {url} was changed while it was read ({before} became {now}), byte {at}. Write shards under new names, and start this epoch again.",
            url=url,
            offset=at,
        )

    def _check(self, answer: Answer, at: int, block: _Block) -> None:
        """Rule 4; from the first answer on it is known what the object is."""
        self._pool.heard_of.add(self._protocol)
        url = redact(self._url)
        if self._expected is not None and answer.size is not None and answer.size != self._expected:
            raise ShardError(f"shard {url} has {answer.size} bytes, and {self._expected} were expected. Make the index again, or restore the shard.", url=url)
        if None not in (answer.size, self.size) and answer.size != self.size:
            self._changed(at, self.size, answer.size)
        if differing := changed(self._tags, answer.tags):
            self._changed(at, *differing)
        first = not self.answered
        self.answered = True
        self.size = self.size if answer.size is None else answer.size
        self._tags |= answer.tags | self._tags
        self._feed.usual_size = self.size or self._feed.usual_size
        if answer.size is not None and answer.size <= at - BLOCK:
            self._too_short(at, answer.size)
        if first and block is self.blocks[-1]:  # where the size was known, others may have been asked for behind it
            if answer.start < at or (answer.start == 0 and at == 0 and answer.stop == answer.size):
                block.stop = answer.size  # a store without ranges, or all there is: one answer gives it all
            elif self.size is not None:
                block.stop = min(self.size, block.stop or self.size)
            elif answer.stop is not None and block.stop is not None:
                block.stop = None if answer.stop < block.stop else block.stop
            self._next = block.stop if block.stop is not None else self._next
        if self.size is not None and block.stop is not None:
            block.stop = min(block.stop, self.size)
        if first:
            with self._feed.filled:
                self._feed.filled.notify()
            self._feed.go_on()
        if answer.start > at or (answer.stop is not None and answer.stop <= at < (block.stop or 0)):
            raise FaultyError(f"an answer holds bytes {answer.start} to {answer.stop}, and those from {at} on were asked for")

    async def _take(self, answer: Answer, block: _Block, at: int, patience: float) -> None:
        """Hand the pieces of an answer to the consumer."""
        if block.stop is not None and block.start + block.got >= block.stop:
            return
        pool, feed = self._pool, self._feed
        skip = at - answer.start
        try:
            async with asyncio.timeout(None) as limit:
                await self._until_it_may_be_read(block, answer, limit, patience)
                async for piece in answer.pieces:
                    pool.bytes_fetched += len(piece)
                    if skip:
                        passed = min(skip, len(piece))
                        skip, piece = skip - passed, piece[passed:]
                    if block.stop is not None:
                        piece = piece[: block.stop - block.start - block.got]
                    block.got += len(piece)
                    if piece:
                        with feed.filled:
                            block.pieces.append(piece)
                            feed.held += len(piece)
                            pool.held += len(piece)
                            if feed.waiting is self and block is self.read_now and sum(map(len, block.pieces)) >= feed.worth:
                                feed.filled.notify()
                    if block.stop is not None and block.start + block.got >= block.stop:
                        break
                    if block is self.blocks[-1] and self.nearly_done:
                        feed.go_on()
                    await self._until_it_may_be_read(block, answer, limit, patience)
        except TimeoutError:
            raise UnreadError(f"no byte came for {patience:.0f} s") from None
        if block.stop is not None and block.start + block.got < block.stop:
            raise UnreadError(f"the answer ended at byte {block.start + block.got} instead of {block.stop}")

    async def _until_it_may_be_read(self, block: _Block, answer: Answer, limit: asyncio.Timeout, patience: float) -> None:
        """Rest where rule 3 says so; then the server has ``patience`` seconds for the next piece."""
        while True:
            with self._pool.lock:  # the consumer either sees that something is blocked, or has taken its bytes before
                if self._feed.may_read(block):
                    break
                self._pool.blocked, block.paused = True, asyncio.Event()
                self._feed.filled.notify()
            limit.reschedule(None)
            answer.rest()
            await block.paused.wait()
            block.paused, block.rested = None, True
        now, end = self._pool.loop.time(), limit.when()
        if end is None or end - now < 0.9 * patience:  # not for every piece, since that takes longer than the piece
            limit.reschedule(now + patience)

    def _finish(self, block: _Block, error: Exception | None = None) -> None:
        with self._feed.filled:
            block.done, block.error = True, error
            self.failed = self.failed or error is not None
            if self.size is None and error is None and block.stop is None:
                self.size = self._next = block.start + block.got  # it had no length, and this was its end
            self._feed.filled.notify()
        self._feed.go_on()

    def _error(self, block: _Block, what: str, cause: Exception) -> Exception:
        url, at = redact(self._url), block.start + block.got
        what = hide(what, self._url)
        if block.got or block.start > self._start:
            error: Exception = UnreadError(f"byte {at} {what}")
        else:
            error = ShardError(f"shard {url} {what}.", url=url, offset=at or None)
        error.__cause__ = cause
        return error

    # By the consumer

    def wait(self) -> None:
        """Return when the first bytes are there.

        Raises:
            ShardError: they cannot be had.
        """
        feed = self._feed
        self._check_process()
        feed.begin()
        with feed.filled:
            while not (self.blocks and (self.blocks[0].pieces or self.blocks[0].done)):
                self._await(1)
            if self.blocks[0].error is not None and not self.blocks[0].pieces:
                raise self.blocks[0].error

    def _check_process(self) -> None:
        if not self._pool.is_ours:
            raise RuntimeError(f"shard {redact(self._url)} was opened in another process: iterate in the process that reads")

    def _await(self, worth: int) -> None:
        """Wait for the loop, with the lock in hand."""
        feed, pool = self._feed, self._pool
        feed.waiting, feed.worth = self, worth
        if pool.blocked:
            pool.call(pool.go_on)
        start = perf_counter()
        feed.filled.wait(None if worth == 1 else _WORTH_SECONDS)
        pool.stalled += perf_counter() - start
        feed.waiting = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        piece = self._rest or self._piece()
        if piece is None:
            return 0
        count = min(len(piece), len(into))
        into[:count] = piece[:count]
        self._rest = piece[count:] if count < len(piece) else None
        return count

    def _piece(self) -> memoryview | None:
        """The next piece; None at the end."""
        feed, pool, blocks = self._feed, self._pool, self.blocks
        self._check_process()
        with feed.filled:
            while True:
                if self.closed or not feed.open:
                    raise ValueError("read of a closed shard")
                if blocks and blocks[0].pieces:
                    piece = blocks[0].pieces.popleft()
                    feed.held -= len(piece)
                    pool.held -= len(piece)
                    if pool.blocked:
                        pool.call(pool.go_on)
                    return memoryview(piece)
                if blocks and blocks[0].done:
                    if blocks[0].error is not None:
                        raise blocks[0].error
                    if len(blocks) == 1 and self.size is not None and blocks[0].start + blocks[0].got >= self.size:
                        return None
                    if len(blocks) > 1:
                        blocks.popleft()
                        continue
                self._await(_WORTH)

    def close(self) -> None:
        """Give up what was asked for and not read."""
        if not self.closed and self._pool.is_ours:
            self._given_up = True
            with self._pool.lock:
                left = sum(len(piece) for block in self.blocks for piece in block.pieces)
                for block in self.blocks:
                    block.pieces.clear()
                self._feed.held -= left
                self._pool.held -= left
            if not self._pool.loop.is_closed():
                self._pool.call(self._stop)
            if self._whole_feed:
                self._feed.close()
        super().close()
        if self._pool.is_ours:
            with self._feed.filled:
                self._feed.filled.notify_all()  # whoever waits for bytes in another thread

    def _stop(self) -> None:
        for block in self.blocks:
            if block.task is not None and not block.done:
                block.task.cancel()
        if self in self._feed.shards:
            self._feed.shards.remove(self)
        self._pool.go_on()
