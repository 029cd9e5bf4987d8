"""The event loop's side of a remote shard: which byte ranges of it are requested, and which have
arrived.
"""

from __future__ import annotations

import math
from collections import deque
from math import ceil

from wds_pipes.errors import ShardError
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.remote.block import Block
from wds_pipes.io.remote.budget import UnreadError
from wds_pipes.io.remote.object import RemoteObject, Reported
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.remote.transfer import Transfers
from wds_pipes.io.remote.verdicts import judge
from wds_pipes.io.secret import clean, hide, words
from wds_pipes.io.urls import redact

_LEAST, _MOST = 1 << 20, 16 << 20  # of the byte ranges that are requested, in bytes
_WAITS = 6  # a range takes at least this many times as long as the wait for its response, if it may
_BUSY_SECONDS = 0.005  # after which a process that was busy has taken the bytes that had arrived
_NEARLY = 4 << 20  # when at most this much of a shard has not arrived, the next one is requested


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
            ranges = max(ceil((connections - 1) / (len(self.queue.fetches) - 1)), ceil(size / wanted))
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
