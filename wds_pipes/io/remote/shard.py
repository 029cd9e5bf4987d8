"""The consumer's side of a remote shard: a stream that waits for the event loop."""

from __future__ import annotations

import io
from time import perf_counter
from typing import Any

from wds_pipes.io.remote.budget import Client
from wds_pipes.io.remote.object import RemoteObject
from wds_pipes.io.remote.queue import Fetch, ReadQueue
from wds_pipes.io.urls import redact

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
        except BaseException:
            super().close()
            raise

    @property
    def size(self) -> int | None:
        """The size of the whole shard in bytes; None: not known (yet)."""
        return self._fetch.object.size

    @property
    def tag(self) -> str | None:
        """Its ETag, or another validator of the store; None: not known (yet)."""
        return self._fetch.object.etag

    @property
    def end_is_vouched_for(self) -> bool:
        """False once it has ended where only its connection did: the store reported no length and
        no end mark, so it may have been cut there.
        """
        return self._fetch.end_is_vouched_for

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
        Client.all_stalled += waited
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
                if self.closed or not self._queue.open:
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
