"""Read remote shards ahead, through several connections at once.

Rules:
1. A process has one ``Budget``: the connections and the bytes that all its pipes share, on fsspec's event loop. A ``Pool`` is what one pipe has there: its
   stores, its options and its counts. A ``Feed`` is a row of shards that are read one after another: those of a lane, or one of several shards that are read
   in turn.
2. Feeds share the connections and bytes of the budget alike, and none gets more than its own pipe has requested. A feed with several connections requests
   ranges, and those of the next shard before one has ended; a feed with one requests all the rest of a shard at once, which leaves no pause between requests.
3. A connection is read on only while its feed holds less than its share of the bytes. What the consumer waits for is always read: so nothing hangs for want
   of room, and a feed holds no more than its share and one piece.
4. Every response is checked: where it begins, how long it is, whether the object is still the same. What breaks off is requested again from the byte reached.
5. The blocks of a shard follow each other without a gap, and the next one starts where the last one stops. A block that is done without an error has all bytes
   up to its ``stop``; ``stop`` is None only where nothing tells it before the transfer ends. So a shard that is not at its end always has a block that is
   fetched, an error, or something to request.
6. The fetch of a block ends in its bytes or in an error within ``timeout_seconds`` without progress. Progress is _LEAST_RATE bytes a second on average over
   that time: a byte now and then is none. The time in which the consumer leaves no room does not count.
7. Everything belongs to the loop's thread, except pieces that wait for the consumer: they, their sums and the rows of blocks and shards are used with the
   budget's lock. Pieces enter and leave through ``add``, ``take`` and ``drop`` of their block.
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
from itertools import islice
from math import ceil
from time import perf_counter
from typing import Any, NoReturn

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.remote.answers import Answer, FaultyError, RefusedError, changed, close_answer, one_piece
from wds_pipes.io.remote.stores import Stores
from wds_pipes.io.remote.verdicts import judge
from wds_pipes.io.urls import clean, hide, redact, words

_BLOCK = 512  # of a tar
_LEAST, _MOST = 1 << 20, 16 << 20  # of the ranges that are requested, in bytes
_WAITS = 6  # a range takes at least so many times as long as the wait for its response, if it may
_NEARLY = 4 << 20  # with so little of a shard left to come, the next one is requested
_WORTH, _WORTH_SECONDS = 1 << 20, 0.02  # a consumer that has used up what there was sleeps until so much has come, or so long
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 15.0  # seconds before a request is made again
_EARLY_TRIES = 3  # for a server that never answered: its name may be wrong
_LEAST_RATE = 1024  # bytes a second that count as progress
_AT_ONCE = 1 << 16  # a response that ends early, as it said, after so many bytes is continued without a wait


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


class Budget:
    """The connections and the read-ahead bytes of this process, which all its pipes share.

    Its size is the largest that one of the open pipes has requested.
    """

    def __init__(self) -> None:
        from fsspec.asyn import get_loop

        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop = get_loop()
        self.lock = threading.RLock()
        self.feeds: list[Feed] = []
        self.readahead_bytes = 0
        self.held = 0
        self.blocked = False  # something waits for the consumer to take some bytes

    @property
    def is_ours(self) -> bool:
        """Whether this process made it. In a fork its lock may be held for ever by a thread that is not there."""
        return self.pid == os.getpid()

    def call(self, what: Any, *args: Any) -> None:
        """Let the loop do something soon."""
        self.loop.call_soon_threadsafe(what, *args)

    def share_out(self) -> None:
        """Give each feed its share, and go on. Feeds whose turn has not come share nothing yet."""
        readings = [feed.pool.reading for feed in self.feeds]
        self.readahead_bytes = max((reading.readahead_bytes for reading in readings), default=0)
        connections = max((reading.connections for reading in readings), default=0)
        sharing: dict[Pool | None, int] = {None: 0}
        for feed in self.feeds:
            for who in (None, feed.pool):
                sharing[who] = sharing.get(who, 0) + (not feed.ahead)
        for feed in self.feeds:
            reading, every, own = feed.pool.reading, max(1, sharing[None]), max(1, sharing[feed.pool])
            feed.share = min(self.readahead_bytes // every, reading.readahead_bytes // own)
            feed.connections = max(1, min(connections // every, reading.connections // own))
        self.go_on()

    def go_on(self) -> None:
        """Request what may be requested, and read on what may be read on."""
        with self.lock:
            self.blocked = False
            for feed in self.feeds:
                feed.go_on()


_budgets: dict[int, Budget] = {}  # that of this process, by its number


def budget() -> Budget:
    """That of this process."""
    found = _budgets.get(os.getpid())
    if found is not None and not found.loop.is_closed():
        return found
    if found is not None:
        del _budgets[found.pid]
    return _budgets.setdefault(os.getpid(), Budget())


class Pool:
    """What a pipe has in this process: its stores, and counts of what it used.

    Attributes:
        requests: how many were made.
        retries: how many of these asked again for what had not come.
        bytes_fetched: how many bytes came.
        stalled: seconds in which consumers waited for bytes.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.budget = budget()
        self.stores = Stores(reading.storage_options, reading.connections, reading.patience)
        self.heard_of: set[str] = set()  # protocols that have answered
        self.requests = self.retries = self.bytes_fetched = 0
        self.stalled = 0.0
        self._latency = self._rate = 0.0  # seconds from a request to its response, and bytes a second of a connection
        _pools.add(self)

    def note_latency(self, seconds: float) -> None:
        """A response has come after so long."""
        self._latency = _smooth(self._latency, seconds)

    def note_rate(self, count: int, seconds: float) -> None:
        """A connection has brought so many bytes, without a rest."""
        if count >= _LEAST:
            self._rate = _smooth(self._rate, count / max(seconds, 1e-6))

    @property
    def lost(self) -> int:
        """How many bytes a connection could have brought while it waited for a response."""
        return int(self._latency * self._rate)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_inherited: list[Any] = []  # by a fork, which keeps them: their connections, if closed here, would go silent in the process that they belong to


def _inherit() -> None:
    _inherited.extend((*_pools, *_budgets.values()))
    _budgets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


class Feed:
    """Shards that are read one after another.

    The first of ``shards`` is the one that the consumer reads, or waits for; what comes after it is read ahead when nothing of it is left to request.

    Attributes:
        ahead: the consumer has not come to it yet: it has one connection, and takes none from others.
        share: how many bytes it may hold.
        connections: how many it may have.
    """

    def __init__(self, pool: Pool, *, ahead: bool = False) -> None:
        self.pool, self.budget = pool, pool.budget
        self.ahead = ahead
        self.share, self.connections = pool.reading.readahead_bytes, 1
        self.shards: deque[RemoteShard] = deque()
        self.filled = threading.Condition(self.budget.lock)
        self.held = 0
        self.waiting: RemoteShard | None = None  # the one whose next bytes the consumer waits for
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
        self.budget.feeds.append(self)
        self.budget.share_out()

    def begin(self) -> None:
        """The consumer has come to it."""
        if self.ahead:
            self.ahead = False
            self.budget.call(self.budget.share_out)

    def end(self) -> None:
        """Nothing will be added: close it after its last shard."""
        if self.budget.is_ours and not self.budget.loop.is_closed():
            self.budget.call(self._end)

    def _end(self) -> None:
        self.ended = True
        if not self.shards:
            self.close()

    def put_first(self, shard: RemoteShard) -> None:
        """The consumer waits for this one: some step has changed their order."""
        if shard in self.shards:
            with self.budget.lock:
                self.shards.remove(shard)
                self.shards.appendleft(shard)
            self.budget.go_on()

    def _leave(self) -> None:
        for shard in tuple(self.shards):
            shard.close()
        self.budget.feeds.remove(self)
        self.budget.share_out()

    def go_on(self) -> None:
        """Rules 2 and 3, in the loop."""
        with self.budget.lock:  # so that the consumer either sees that something is blocked, or has taken its bytes before
            self._ask()
            for shard in self.shards:
                for block in shard.blocks:
                    if block.paused is not None and self.may_read(block):
                        block.paused.set()
                    elif block.paused is not None:
                        self.budget.blocked = True

    def _ask(self) -> None:
        """Request what is next."""
        active, most = sum(shard.active for shard in self.shards), 1 if self.ahead else self.connections
        for place, shard in enumerate(self.shards):
            following = next(islice(self.shards, place + 1, None), None) if most > 1 else None
            while shard.left_to_ask:
                waited_for = place == 0 and not any(block.pieces or not block.done for block in shard.blocks)
                if active >= most and not waited_for:
                    break
                if not self.has_room and shard.blocks and not waited_for:
                    self.budget.blocked = True
                    break
                # The first bytes of the next shard are requested before the last of this one: until they come, its size is not known, and nothing more of it
                # can be requested.
                early = following is not None and not following.blocks and shard.answered and not waited_for and shard.is_within(most)
                (following if early and following is not None else shard).ask()
                active += 1
            if shard.left_to_ask or shard.failed or (place == 0 and not shard.answered):
                return
            if active >= most and shard.nearly_done:
                active -= 1

    @property
    def has_room(self) -> bool:
        """Whether it may hold more. Half of its share is its own, even where other feeds still hold more than theirs, from a time when there were fewer."""
        return self.held < self.share and (self.budget.held < self.budget.readahead_bytes or (not self.ahead and self.held < self.share // 2))

    def may_read(self, block: _Block) -> bool:
        """Rule 3."""
        if self.has_room:
            return True
        first = self.shards[0] if self.shards else None
        return block.shard is first and not block.pieces and block is first.read_now


class _Block:
    """A run of bytes that was requested: ``start`` up to, not including, ``stop`` (None: the end of the transfer, wherever that is).

    Attributes:
        got: how many bytes of it have come.
        pieces: those that wait for the consumer.
        done: nothing more will come.
        came: how many bytes have come in all, also those of a server that ignores ranges from before ``start``.
        since: from when on more bytes must come, in seconds of the loop's clock.
        new_since: from when on new ones must come, where a request has to be made again.
    """

    def __init__(self, shard: RemoteShard, start: int, stop: int | None) -> None:
        self.shard, self.start, self.stop = shard, start, stop
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
        feed = self.shard.feed
        self.held += more
        feed.held += more
        feed.budget.held += more

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
        end_is_vouched_for: False once it has ended where only its connection did: the store told no length and no end mark, so that it may have been cut there.
    """

    def __init__(self, feed: Feed, url: str, *, start: int = 0, size: int | None = None, whole_feed: bool = False) -> None:
        self.feed, self._pool, self._budget, self._url, self._start = feed, feed.pool, feed.budget, url, start
        self._protocol = url.partition(":")[0]
        self._expected = self.size = size
        self._size_is_told = False  # by the store
        self._ignores_ranges = False  # the store gives it from its beginning whatever is requested: then all the rest is requested at once
        self._tags: dict[str, str] = {}
        self.end_is_vouched_for = True
        self.blocks: deque[_Block] = deque()
        self.answered = False
        self._rest: memoryview | None = None  # of the piece that is being given
        self.failed = False
        self._given_up = False
        self._whole_feed = whole_feed
        self._store, self._path = feed.pool.stores.find(url)  # last: where it raises, what was built is closed
        self._budget.call(self._begin)

    # In the loop

    def _begin(self) -> None:
        if self._given_up or not self.feed.open:
            self.close()
        else:
            with self._budget.lock:
                self.feed.shards.append(self)
            self.feed.go_on()

    @property
    def tag(self) -> str | None:
        """Its ETag, or what the store has instead; None: not known (yet)."""
        return next(iter(self._tags.values()), None)

    @property
    def left_to_ask(self) -> bool:
        """Whether there is something to request that may be requested now."""
        if self.failed or self._given_up:
            return False
        if not self.blocks:
            return True
        last = self.blocks[-1]
        if self.size is None or last.stop is None:  # what comes after a response is known when it has come
            return last.done
        return last.stop < self.size

    @property
    def active(self) -> int:
        """How many connections are used for it."""
        return sum(not block.done for block in self.blocks)

    @property
    def read_now(self) -> _Block | None:
        """The block that the consumer reads; it may stand after one that it has used up, and had nothing to go on to."""
        return next((block for block in self.blocks if block.pieces or not block.done), None)

    @property
    def nearly_done(self) -> bool:
        """Whether one connection still reads it, and has little left."""
        last = self.blocks[-1] if self.blocks else None
        return self.active == 1 and last is not None and not last.done and last.stop is not None and last.stop - last.reached < _NEARLY

    def is_within(self, connections: int) -> bool:
        """Whether its rest is requested as soon as each connection has been used once more."""
        stop = self.blocks[-1].stop
        return self.size is not None and stop is not None and self.size - stop <= connections * self._range()

    def _range(self) -> int:
        """How many bytes to request at once.

        Small enough that a shard is read through all connections; but where the wait for a response costs much, so many that it is a small part of the time, as
        far as the share and the shards ahead allow: while the last range of a shard comes, those ahead must have enough for all other connections.
        """
        share, connections = self.feed.share, max(2, self.feed.connections)
        size = self.size or self.feed.usual_size
        part = share // connections if size is None else min(share, size) // connections + 1
        if size is not None and len(self.feed.shards) > 1:
            wanted = max(1, min(_WAITS * self._pool.lost, 2 * share // connections))
            parts = max(ceil((connections - 1) / (len(self.feed.shards) - 1)), ceil(size / wanted))
            part = max(part, size // parts + 1)
        return min(max(part, _LEAST), _MOST)

    def ask(self) -> None:
        """Request the next bytes."""
        start = self._start
        if self.blocks:
            assert self.blocks[-1].stop is not None
            start = self.blocks[-1].stop
        stop = self.size
        if not self._ignores_ranges and (self.feed.connections > 1 or not self._store.streams):
            stop = start + self._range() if stop is None else min(start + self._range(), stop)
        block = _Block(self, start, stop)
        self.blocks.append(block)
        block.task = self._budget.loop.create_task(self._fetch(block))
        block.task.add_done_callback(lambda task: self._ended(block, task))

    async def _fetch(self, block: _Block) -> None:
        """Get the bytes of a block, whatever it takes."""
        pool, reading, clock = self._pool, self._pool.reading, self._budget.loop.time
        tries = reached = 0
        block.begin_time(clock())
        while True:
            try:
                before = block.got
                await self._read(block)
                if block.stop is None or block.is_whole():
                    return self._finish(block)
                if block.got - before < _AT_ONCE:
                    raise UnreadError(f"the answer ended at byte {block.reached} instead of {block.stop}")
            except asyncio.CancelledError:
                raise
            except (ShardError, StateError) as error:
                return self._finish(block, error)
            except BaseException as error:  # a SystemExit too, which would end the loop
                verdict = judge(error, self._protocol)
                told = isinstance(error, (RefusedError, FaultyError, UnreadError))  # by a server, or by us
                story = words(error) if told else f"{type(error).__name__}: {words(error)}"
                if not verdict.passing:
                    return self._finish(block, self._error(block, f"{verdict.advice} ({story})", error))
                if block.got > reached or block.rested:
                    tries, reached, block.rested = 0, block.got, False
                tries += 1
                most = reading.retries if told or self._protocol in pool.heard_of else min(_EARLY_TRIES, reading.retries)
                # From half to the whole of a time that doubles, so that many readers do not come back at once.
                wait = max(verdict.after, min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT) * random.uniform(0.5, 1))
                passed = clock() - block.new_since
                if tries > most or passed + wait > reading.timeout_seconds:
                    asked = f"asked {tries} times in {passed:.0f} s"
                    asked += f", and told to wait {verdict.after:.0f} s" if verdict.after else ""
                    return self._finish(block, self._error(block, f"cannot be read ({story}; {asked})", error))
                pool.retries += 1
                await asyncio.sleep(wait)

    async def _read(self, block: _Block) -> None:
        """Read the response to one request."""
        pool, at, clock = self._pool, block.reached, self._budget.loop.time
        patience = pool.reading.patience
        pool.requests += 1
        begin = clock()
        end = min(begin + patience, block.since + pool.reading.timeout_seconds)
        try:
            async with asyncio.timeout_at(end):
                try:
                    answer = await self._store.ask(self._path, at, self._stop_to_ask(block), self.size if self.answered else None)
                except RefusedError as refused:
                    if refused.status != 416:
                        raise
                    answer = await self._nothing(refused, at)
        except TimeoutError:
            raise UnreadError(f"no answer in {clock() - begin:.0f} s") from None
        pool.note_latency(clock() - begin)
        try:
            self._check(answer, at, block)
            await self._take(answer, block, at, patience)
        finally:
            await close_answer(answer)

    def _stop_to_ask(self, block: _Block) -> int | None:
        """Where a request ends. What only an index says of the size is not taken for the end: a shard that is longer shows itself then."""
        at_end = block.stop == self.size and not self._size_is_told
        return None if block.stop is None or block.stop <= block.reached or (at_end and self._store.streams) else block.stop

    async def _nothing(self, refused: RefusedError, at: int) -> Answer:
        """What a store means that has nothing at byte ``at``: the shard ends there, or in the padding before; if not, it is an error."""
        if self.answered and self.size is not None:
            self._changed(at, f"{self.size} bytes", "fewer" if refused.size is None else refused.size)
        size = refused.size if refused.size is not None else at if self.answered or at in (0, self.size) else None
        if size is None:  # as some stores do not tell; they do with what they have
            try:
                answer = await self._store.ask(self._path, max(0, at - _BLOCK), at, None)
            except RefusedError as again:
                if again.status != 416:
                    raise
            else:
                size = answer.size
                await close_answer(answer)
        if size is None or size <= at - _BLOCK:
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

    def _not_as_expected(self, size: object) -> NoReturn:
        url = redact(self._url)
        raise ShardError(f"shard {url} has {size} bytes, and {self._expected} were expected. Make the index again, or restore the shard.", url=url)

    def _check(self, answer: Answer, at: int, block: _Block) -> None:
        """Rule 4; from the first response on it is known what the object is."""
        self._pool.heard_of.add(self._protocol)
        if self._expected is not None and answer.size is not None and answer.size != self._expected:
            self._not_as_expected(answer.size)
        if self._expected is not None and answer.stop is not None and answer.stop > self._expected:
            self._not_as_expected("more")
        if None not in (answer.size, self.size) and answer.size != self.size:
            self._changed(at, self.size, answer.size)
        if differing := changed(self._tags, answer.tags):
            self._changed(at, *differing)
        first = not self.answered
        self.answered = True
        self._ignores_ranges = self._ignores_ranges or answer.start < at
        self.size = self.size if answer.size is None else answer.size
        self._size_is_told = self._size_is_told or answer.size is not None
        self._tags |= answer.tags | self._tags
        self.feed.usual_size = self.size or self.feed.usual_size
        if answer.size is not None and answer.size <= at - _BLOCK:
            self._too_short(at, answer.size)
        with self.feed.filled:
            self._set_stop(answer, at, block, first=first)
            if first:
                self.feed.filled.notify()
        if first:
            self.feed.go_on()
        if answer.start > at or (answer.stop is not None and answer.stop <= at < (block.stop or 0)):
            raise FaultyError(f"an answer holds bytes {answer.start} to {answer.stop}, and those from {at} on were asked for")

    def _set_stop(self, answer: Answer, at: int, block: _Block, *, first: bool) -> None:
        """Where a block ends, by what is known now."""
        if self.size is None:  # then there is no other block; a response that does not tell where it ends is all there is
            block.stop = answer.stop if answer.stop is None or block.stop is None else min(block.stop, answer.stop)
        elif block.stop is None or (first and block is self.blocks[-1] and (answer.start < at or answer.stop is None or answer.stop >= self.size)):
            block.stop = self.size  # a store without ranges, or all there is: one response brings it all
        else:
            block.stop = min(block.stop, self.size)

    async def _take(self, answer: Answer, block: _Block, at: int, patience: float) -> None:
        """Hand the pieces of a response to the consumer."""
        if block.is_whole():
            return
        pool, feed, clock = self._pool, self.feed, self._budget.loop.time
        skip = at - answer.start
        # Where only an index says how long the shard is, the response is read to its end, to see whether it is longer.
        to_its_end = answer.stop is None and not self._size_is_told and block.stop == self.size
        begin, came = clock(), block.came
        try:
            async with asyncio.timeout(None) as limit:
                rests = await self._until_it_may_be_read(block, answer, limit, patience)
                async for piece in answer.pieces:
                    pool.bytes_fetched += len(piece)
                    block.came += len(piece)
                    if skip:
                        passed = min(skip, len(piece))
                        skip, piece = skip - passed, piece[passed:]
                    if block.stop is not None and len(piece) > block.stop - block.reached:
                        if to_its_end:
                            self._not_as_expected("more")
                        piece = piece[: block.stop - block.reached]
                    if piece:
                        block.got += len(piece)
                        with feed.filled:
                            block.add(piece)
                            if feed.waiting is self and block.held >= feed.worth and block is self.read_now:
                                feed.filled.notify()
                    if block.is_whole() and not to_its_end:
                        break
                    if block is self.blocks[-1]:
                        with self._budget.lock:
                            nearly_done = self.nearly_done
                        if nearly_done:
                            feed.go_on()
                    rests += await self._until_it_may_be_read(block, answer, limit, patience)
        except TimeoutError:
            if not block.is_whole():  # else the index is believed
                timeout, slow = self._pool.reading.timeout_seconds, f"no byte came for {patience:.0f} s"
                if block.new_bytes and clock() >= block.since + timeout:
                    slow = f"only {block.new_bytes} bytes came in {timeout:.0f} s"
                raise UnreadError(slow) from None
        if not rests:
            pool.note_rate(block.came - came, clock() - begin)
        if block.stop is None:
            self.end_is_vouched_for = answer.has_end_mark
        elif block.reached < min(block.stop, block.stop if answer.stop is None else answer.stop):
            raise UnreadError(f"the answer ended at byte {block.reached} instead of {block.stop}")

    async def _until_it_may_be_read(self, block: _Block, answer: Answer, limit: asyncio.Timeout, patience: float) -> int:
        """Rest where rule 3 says so, and tell how often; then the server has ``patience`` seconds for the next piece, and rule 6 holds."""
        clock, rests = self._budget.loop.time, 0
        while True:
            with self._budget.lock:  # the consumer either sees that something is blocked, or has taken its bytes before
                if self.feed.may_read(block):
                    break
                self._budget.blocked, block.paused = True, asyncio.Event()
                self.feed.filled.notify()
            rests += 1
            begin = clock()
            limit.reschedule(None)
            answer.rest()
            await block.paused.wait()
            block.paused, block.rested = None, True
            block.leave_out(clock() - begin)
        now, timeout, end = clock(), self._pool.reading.timeout_seconds, limit.when()
        block.count_time(now, _LEAST_RATE * timeout)
        wanted = min(now + patience, block.since + timeout)
        if end is None or not 0 <= wanted - end < 0.1 * patience:  # not for every piece, since that takes longer than the piece
            limit.reschedule(wanted)
        return rests

    def _finish(self, block: _Block, error: Exception | None = None) -> None:
        with self.feed.filled:
            block.done, block.error = True, error
            self.failed = self.failed or error is not None
            if block.stop is None and error is None:
                block.stop = self.size = block.reached  # it had no length, and this was its end
            self.feed.filled.notify()
        self.feed.go_on()

    def _ended(self, block: _Block, task: asyncio.Task[None]) -> None:
        """A task that another has cancelled, or that broke, is an error of its block."""
        cause = None if task.cancelled() else task.exception()
        if not block.done and not self._given_up:
            story = "its request was cancelled" if cause is None else f"{type(cause).__name__}: {words(cause)}"
            try:
                error = self._error(block, f"cannot be read ({story})", cause)
            except Exception:  # it cannot even be told
                error = UnreadError(f"byte {block.reached} cannot be read ({type(cause).__name__})")
            self._finish(block, error)

    def _error(self, block: _Block, what: str, cause: BaseException | None) -> Exception:
        url, at = redact(self._url), block.reached
        options = self._pool.reading.storage_options
        what = hide(what, self._url, options)
        if block.got or block.start > self._start:
            error: Exception = UnreadError(f"byte {at} {what}")
        else:
            error = ShardError(f"shard {url} {what}.", url=url, offset=at or None)
        error.__cause__ = clean(cause, self._url, options)
        return error

    # By the consumer

    def wait(self) -> None:
        """Return when the first bytes are there.

        Raises:
            ShardError: they cannot be had.
        """
        feed = self.feed
        self._check_process()
        feed.begin()
        with feed.filled:
            while not (self.blocks and (self.blocks[0].pieces or self.blocks[0].done)):
                self._check_open()
                self._await(1)
            if self.blocks[0].error is not None and not self.blocks[0].pieces:
                raise self.blocks[0].error

    def _check_open(self) -> None:
        if self.closed or not self.feed.open:
            raise ValueError("read of a closed shard")

    def _check_process(self) -> None:
        if not self._budget.is_ours:
            raise RuntimeError(f"shard {redact(self._url)} was opened in another process: iterate in the process that reads")

    def _await(self, worth: int) -> None:
        """Wait for the loop, with the lock in hand."""
        feed, budget = self.feed, self._budget
        feed.waiting, feed.worth = self, worth
        if feed.shards and feed.shards[0] is not self:
            budget.call(feed.put_first, self)
        if budget.blocked:
            budget.call(budget.go_on)
        start = perf_counter()
        feed.filled.wait(None if worth == 1 else _WORTH_SECONDS)
        self._pool.stalled += perf_counter() - start
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
        feed, budget, blocks = self.feed, self._budget, self.blocks
        self._check_process()
        with feed.filled:
            while True:
                self._check_open()
                if blocks and blocks[0].pieces:
                    piece = blocks[0].take()
                    if budget.blocked:
                        budget.call(budget.go_on)
                    return memoryview(piece)
                if blocks and blocks[0].done:
                    if blocks[0].error is not None:
                        raise blocks[0].error
                    if len(blocks) == 1 and self.size is not None and blocks[0].reached >= self.size:
                        return None
                    if len(blocks) > 1:
                        blocks.popleft()
                        continue
                self._await(_WORTH)

    def close(self) -> None:
        """Give up what was requested and not read."""
        if not self.closed and self._budget.is_ours:
            self._given_up = True
            with self._budget.lock:
                for block in self.blocks:
                    block.drop()
            if not self._budget.loop.is_closed():
                self._budget.call(self._stop)
            if self._whole_feed:
                self.feed.close()
        super().close()
        if self._budget.is_ours:
            with self.feed.filled:
                self.feed.filled.notify_all()  # another thread may wait for bytes

    def _stop(self) -> None:
        for block in self.blocks:
            if block.task is not None and not block.done:
                block.task.cancel()
        if self in self.feed.shards:
            with self._budget.lock:
                self.feed.shards.remove(self)
        if self.feed.ended and not self.feed.shards:
            self.feed.close()
        self._budget.go_on()


def _smooth(before: float, now: float) -> float:
    return now if not before else 0.7 * before + 0.3 * now
