"""The event loop's side of a remote shard: which ranges are requested, and what becomes of their
responses.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from math import ceil

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.remote.answers import Answer, FaultyError, RefusedError, close_answer, one_piece
from wds_pipes.io.remote.block import Block
from wds_pipes.io.remote.budget import UnreadError
from wds_pipes.io.remote.object import RECORD, RemoteObject
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.remote.verdicts import judge
from wds_pipes.io.secret import clean, hide, words
from wds_pipes.io.urls import redact

_LEAST, _MOST = 1 << 20, 16 << 20  # of the ranges that are requested, in bytes
_WAITS = 6  # a range takes at least so many times as long as the wait for its response, if it may
_NEARLY = 4 << 20  # with so little of a shard left to come, the next one is requested
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 15.0  # seconds before a request is made again
_EARLY_TRIES = 3  # for a server that never answered: its name may be wrong
_LEAST_RATE = 1024  # bytes a second that count as progress
_AT_ONCE = 1 << 16  # a response that ends early, as it said, after so many bytes is continued without a wait


class Fetch:
    """The fetching of a shard's bytes from ``start`` on. All of it runs on the event loop, but for
    what says otherwise.

    Args:
        queue: the shards that it is read among.
        url: where the shard is.
        start: the first byte to fetch.
        size: how many bytes the shard must have; None: as many as it has.

    Attributes:
        object: what is known of the whole shard.
        end_is_vouched_for: False once the shard has ended where only its connection did: see
            ``RemoteShard``.
        blocks: what was requested and not used up yet, in order; with the lock.
        answered: a response has come.
        failed: a block has ended in an error.
    """

    def __init__(self, queue: ReadQueue, url: str, start: int, size: int | None) -> None:
        self.queue, self.url, self._client, self._budget, self._start = queue, url, queue.client, queue.budget, start
        self._protocol = url.partition(":")[0]
        self.object = RemoteObject(url, size)
        self.end_is_vouched_for = True
        self.blocks: deque[Block] = deque()
        self.answered = False
        self.failed = False
        self._given_up = False
        self._store, self._path = queue.client.stores.find(url)  # last: where it raises, nothing was begun
        self._budget.call(self._begin)

    # By the consumer, with the lock

    @property
    def has_begun(self) -> bool:
        """Whether the first bytes are there, or the end.

        Raises:
            ShardError: they cannot be had.
        """
        first = self.blocks[0] if self.blocks else None
        if first is None or not (first.pieces or first.done):
            return False
        if first.error is not None and not first.pieces:
            raise first.error
        return True

    def take(self) -> bytes | None:
        """The next bytes; none at the end; None where they have not come yet.

        Raises:
            ShardError, StateError, UnreadError: they cannot be had.
        """
        blocks = self.blocks
        while blocks:
            first = blocks[0]
            if first.pieces:
                return first.take()
            if first.error is not None:
                raise first.error
            if not first.done:
                return None
            if len(blocks) == 1:
                return b"" if self.object.size is not None and first.reached >= self.object.size else None
            blocks.popleft()
        return None

    # By any thread

    def give_up(self) -> None:
        """Drop what has come and cancel what was requested."""
        if not self._given_up:
            self._given_up = True
            with self._budget.lock:
                for block in self.blocks:
                    block.drop()
            if not self._budget.loop.is_closed():
                self._budget.call(self._stop)

    # On the event loop

    def _begin(self) -> None:
        if self._given_up or not self.queue.open:
            self.give_up()
        else:
            with self._budget.lock:
                self.queue.fetches.append(self)
            self.queue.schedule()

    @property
    def can_request(self) -> bool:
        """Whether there is something to request that may be requested now."""
        if self.failed or self._given_up:
            return False
        if not self.blocks:
            return True
        last = self.blocks[-1]
        if self.object.size is None or last.stop is None:  # what comes after a response is known when it has come
            return last.done
        return last.stop < self.object.size

    @property
    def active(self) -> int:
        """How many connections are used for it."""
        return sum(not block.done for block in self.blocks)

    @property
    def read_now(self) -> Block | None:
        """The block that the consumer reads; it may stand after one that it has used up, and had
        nothing to go on to.
        """
        return next((block for block in self.blocks if block.pieces or not block.done), None)

    @property
    def nearly_done(self) -> bool:
        """Whether one connection still reads it, and has little left."""
        last = self.blocks[-1] if self.blocks else None
        return (
            self.active == 1
            and last is not None
            and not last.done
            and last.stop is not None
            and last.stop - last.reached < _NEARLY
        )

    def is_within(self, connections: int) -> bool:
        """Whether its rest is requested as soon as each connection has been used once more."""
        stop = self.blocks[-1].stop
        return (
            self.object.size is not None and stop is not None and self.object.size - stop <= connections * self._range()
        )

    def _range(self) -> int:
        """How many bytes to request at once.

        Small enough that a shard is read through all connections; but where the wait for a response
        costs much, so many that it is a small part of the time, as far as the share and the shards
        ahead allow: while the last range of a shard comes, those ahead must have enough for all
        other connections.
        """
        share, connections = self.queue.share, max(2, self.queue.connections)
        size = self.object.size or self.queue.usual_size
        part = share // connections if size is None else min(share, size) // connections + 1
        if size is not None and len(self.queue.fetches) > 1:
            wanted = max(1, min(_WAITS * self._client.lost, 2 * share // connections))
            parts = max(ceil((connections - 1) / (len(self.queue.fetches) - 1)), ceil(size / wanted))
            part = max(part, size // parts + 1)
        return min(max(part, _LEAST), _MOST)

    def request_next(self) -> None:
        """Request the next bytes."""
        start = self._start
        if self.blocks:
            assert self.blocks[-1].stop is not None
            start = self.blocks[-1].stop
        stop = self.object.size
        if not self.object.ignores_ranges and (self.queue.connections > 1 or not self._store.streams):
            stop = start + self._range() if stop is None else min(start + self._range(), stop)
        block = Block(self, start, stop)
        self.blocks.append(block)
        block.task = self._budget.loop.create_task(self._fetch(block))
        block.task.add_done_callback(lambda task: self._ended(block, task))

    async def _fetch(self, block: Block) -> None:
        """Get the bytes of a block, whatever it takes."""
        client, reading, clock = self._client, self._client.reading, self._budget.loop.time
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
                most = (
                    reading.retries if told or self._protocol in client.heard_of else min(_EARLY_TRIES, reading.retries)
                )
                # From half to the whole of a time that doubles, so that many readers do not come
                # back at once.
                wait = max(verdict.after, min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT) * random.uniform(0.5, 1))
                passed = clock() - block.new_since
                if tries > most or passed + wait > reading.timeout_seconds:
                    asked = f"asked {tries} times in {passed:.0f} s"
                    asked += f", and told to wait {verdict.after:.0f} s" if verdict.after else ""
                    return self._finish(block, self._error(block, f"cannot be read ({story}; {asked})", error))
                client.retries += 1
                await asyncio.sleep(wait)

    async def _read(self, block: Block) -> None:
        """Read the response to one request."""
        client, at, clock = self._client, block.reached, self._budget.loop.time
        patience = client.reading.patience
        client.requests += 1
        begin = clock()
        end = min(begin + patience, block.since + client.reading.timeout_seconds)
        try:
            async with asyncio.timeout_at(end):
                try:
                    answer = await self._store.ask(
                        self._path, at, self._stop_to_ask(block), self.object.size if self.answered else None
                    )
                except RefusedError as refused:
                    if refused.status != 416:
                        raise
                    answer = await self._nothing(refused, at)
        except TimeoutError:
            raise UnreadError(f"no answer in {clock() - begin:.0f} s") from None
        client.note_latency(clock() - begin)
        try:
            self._check(answer, at, block)
            await self._take(answer, block, at, patience)
        finally:
            await close_answer(answer)

    def _stop_to_ask(self, block: Block) -> int | None:
        """Where a request ends.

        What only an index says of the size is not taken for the end: a shard that is longer shows
        itself then.
        """
        at_end = block.stop == self.object.size and not self.object.size_is_told
        return (
            None
            if block.stop is None or block.stop <= block.reached or (at_end and self._store.streams)
            else block.stop
        )

    async def _nothing(self, refused: RefusedError, at: int) -> Answer:
        """What a store means that has nothing at byte ``at``: the shard ends there, or in the
        padding before; if not, it is an error.
        """
        if self.answered and self.object.size is not None:
            self.object.refuse_change(
                at, f"{self.object.size} bytes", "fewer" if refused.size is None else refused.size
            )
        size = (
            refused.size if refused.size is not None else at if self.answered or at in (0, self.object.size) else None
        )
        if size is None:  # as some stores do not tell; they do with what they have
            try:
                answer = await self._store.ask(self._path, max(0, at - RECORD), at, None)
            except RefusedError as again:
                if again.status != 416:
                    raise
            else:
                size = answer.size
                await close_answer(answer)
        if size is None or size <= at - RECORD:
            self.object.refuse_end(at, size)
        return Answer(at, at, size, self.object.tags, one_piece(b""))

    def _check(self, answer: Answer, at: int, block: Block) -> None:
        """Rule 3 of ``io.remote``."""
        self._client.heard_of.add(self._protocol)
        self.object.check(answer, at)
        self.queue.usual_size = self.object.size or self.queue.usual_size
        first = not self.answered
        self.answered = True
        with self._budget.lock:
            self._set_stop(answer, at, block, first=first)
            if first:
                self.queue.filled.notify()
        if first:
            self.queue.schedule()
        if answer.start > at or (answer.stop is not None and answer.stop <= at < (block.stop or 0)):
            raise FaultyError(
                f"an answer holds bytes {answer.start} to {answer.stop}, and those from {at} on were asked for"
            )

    def _set_stop(self, answer: Answer, at: int, block: Block, *, first: bool) -> None:
        """Where a block ends, by what is known now."""
        # then there is no other block; a response that does not tell where it ends is all there is
        if self.object.size is None:
            block.stop = answer.stop if answer.stop is None or block.stop is None else min(block.stop, answer.stop)
        elif block.stop is None or (
            first
            and block is self.blocks[-1]
            and (answer.start < at or answer.stop is None or answer.stop >= self.object.size)
        ):
            block.stop = self.object.size  # a store without ranges, or all there is: one response brings it all
        else:
            block.stop = min(block.stop, self.object.size)

    async def _take(self, answer: Answer, block: Block, at: int, patience: float) -> None:
        """Hand the pieces of a response to the consumer."""
        if block.is_whole():
            return
        client, queue, clock = self._client, self.queue, self._budget.loop.time
        skip = at - answer.start
        # Where only an index says how long the shard is, the response is read to its end, to see
        # whether it is longer.
        to_its_end = answer.stop is None and not self.object.size_is_told and block.stop == self.object.size
        begin, came = clock(), block.came
        try:
            async with asyncio.timeout(None) as limit:
                rests = await self._until_it_may_be_read(block, answer, limit, patience)
                async for piece in answer.pieces:
                    client.bytes_fetched += len(piece)
                    block.came += len(piece)
                    if skip:
                        passed = min(skip, len(piece))
                        skip, piece = skip - passed, piece[passed:]
                    if block.stop is not None and len(piece) > block.stop - block.reached:
                        if to_its_end:
                            self.object.refuse_size("more")
                        piece = piece[: block.stop - block.reached]
                    if piece:
                        block.got += len(piece)
                        with self._budget.lock:
                            block.add(piece)
                            if queue.waiting is self and block.held >= queue.worth and block is self.read_now:
                                queue.filled.notify()
                    if block.is_whole() and not to_its_end:
                        break
                    if block is self.blocks[-1]:
                        with self._budget.lock:
                            nearly_done = self.nearly_done
                        if nearly_done:
                            queue.schedule()
                    rests += await self._until_it_may_be_read(block, answer, limit, patience)
        except TimeoutError:
            if not block.is_whole():  # else the index is believed
                timeout, slow = self._client.reading.timeout_seconds, f"no byte came for {patience:.0f} s"
                if block.new_bytes and clock() >= block.since + timeout:
                    slow = f"only {block.new_bytes} bytes came in {timeout:.0f} s"
                raise UnreadError(slow) from None
        if not rests:
            client.note_rate(block.came - came, clock() - begin)
        if block.stop is None:
            self.end_is_vouched_for = answer.has_end_mark
        elif block.reached < min(block.stop, block.stop if answer.stop is None else answer.stop):
            raise UnreadError(f"the answer ended at byte {block.reached} instead of {block.stop}")

    async def _until_it_may_be_read(self, block: Block, answer: Answer, limit: asyncio.Timeout, patience: float) -> int:
        """Rest where rule 2 says so, and return how often; then the server has ``patience``
        seconds for the next piece, and rule 5 holds.
        """
        clock, rests = self._budget.loop.time, 0
        while True:
            with self._budget.lock:  # the consumer either sees that something is blocked, or has taken its bytes before
                if self.queue.may_read(block):
                    break
                self._budget.blocked, block.paused = True, asyncio.Event()
                self.queue.filled.notify()
            rests += 1
            begin = clock()
            limit.reschedule(None)
            answer.rest()
            await block.paused.wait()
            block.paused, block.rested = None, True
            block.leave_out(clock() - begin)
        now, timeout, end = clock(), self._client.reading.timeout_seconds, limit.when()
        block.count_time(now, _LEAST_RATE * timeout)
        wanted = min(now + patience, block.since + timeout)
        # not for every piece, since that takes longer than the piece
        if end is None or not 0 <= wanted - end < 0.1 * patience:
            limit.reschedule(wanted)
        return rests

    def _finish(self, block: Block, error: Exception | None = None) -> None:
        with self._budget.lock:
            block.done, block.error = True, error
            self.failed = self.failed or error is not None
            if block.stop is None and error is None:
                block.stop = self.object.size = block.reached  # it had no length, and this was its end
            self.queue.filled.notify()
        self.queue.schedule()

    def _ended(self, block: Block, task: asyncio.Task[None]) -> None:
        """A task that another has cancelled, or that broke, is an error of its block."""
        cause = None if task.cancelled() else task.exception()
        if not block.done and not self._given_up:
            story = "its request was cancelled" if cause is None else f"{type(cause).__name__}: {words(cause)}"
            try:
                error = self._error(block, f"cannot be read ({story})", cause)
            except Exception:  # it cannot even be told
                error = UnreadError(f"byte {block.reached} cannot be read ({type(cause).__name__})")
            self._finish(block, error)

    def _error(self, block: Block, what: str, cause: BaseException | None) -> Exception:
        url, at = redact(self.url), block.reached
        options = self._client.reading.storage_options
        what = hide(what, self.url, options)
        if block.got or block.start > self._start:
            error: Exception = UnreadError(f"byte {at} {what}")
        else:
            error = ShardError(f"shard {url} {what}.", url=url, offset=at or None)
        error.__cause__ = clean(cause, self.url, options)
        return error

    def _stop(self) -> None:
        for block in self.blocks:
            if block.task is not None and not block.done:
                block.task.cancel()
        if self in self.queue.fetches:
            with self._budget.lock:
                self.queue.fetches.remove(self)
        if self.queue.ended and not self.queue.fetches:
            self.queue.close()
        self._budget.schedule()
