"""Fill a block: request its bytes, check each response, and retry after errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.remote.block import Block
from wds_pipes.io.remote.budget import UnreadError
from wds_pipes.io.remote.object import RECORD
from wds_pipes.io.remote.responses import FaultyError, RefusedError, Response, close_response, in_chunks
from wds_pipes.io.remote.verdicts import EARLY_TRIES, judge
from wds_pipes.io.secret import words
from wds_pipes.io.urls import is_signed

if TYPE_CHECKING:
    from wds_pipes.io.remote.fetch import Fetch

_SIGNED = (
    "may not be read: its signature may have expired, so sign it again; a saved state fits URLs that are signed anew"
)
_LEAST_RATE = 1024  # bytes a second that count as progress
_AT_ONCE = 1 << 16  # a response that ends early, as it said, after this many bytes is continued without a wait


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

    async def take(self, response: Response, at: int) -> None:
        """Pass the chunks of a response to the consumer.

        Raises:
            UnreadError: it ends too early, or is too slow.
        """
        try:
            async with asyncio.timeout(None) as limit:
                await self._take(response, at, limit)
        except TimeoutError:
            self._refuse_slow()

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
