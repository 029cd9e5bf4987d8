"""The consumer's side of a remote shard: a stream that waits for the event loop."""

from __future__ import annotations

import io
from time import perf_counter
from typing import Any

from wds_pipes.io.remote.fetch import Fetch
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.urls import redact

# a consumer that has used up what there was sleeps until so much has come, or so long
_WORTH, _WORTH_SECONDS = 1 << 20, 0.02


class RemoteShard(io.RawIOBase):
    """The bytes of a remote shard from ``start`` on, as a raw stream that cannot be sought.

    Args:
        queue: the shards that it is read among.
        url: where it is.
        start: the first byte to read.
        size: how many bytes the shard must have; None: as many as it has.
        whole_queue: close the queue with it.
    """

    def __init__(
        self, queue: ReadQueue, url: str, *, start: int = 0, size: int | None = None, whole_queue: bool = False
    ) -> None:
        self._queue, self._budget = queue, queue.budget
        self._whole_queue = whole_queue
        self._rest: memoryview | None = None  # of the piece that is being read
        try:
            self._fetch = Fetch(queue, url, start, size)
        except BaseException:
            super().close()
            raise

    @property
    def size(self) -> int | None:
        """Of the whole shard, in bytes; None: not known (yet)."""
        return self._fetch.object.size

    @property
    def tag(self) -> str | None:
        """Its ETag, or what the store has instead; None: not known (yet)."""
        return self._fetch.object.tag

    @property
    def end_is_vouched_for(self) -> bool:
        """False once it has ended where only its connection did: the store told no length and no
        end mark, so that it may have been cut there.
        """
        return self._fetch.end_is_vouched_for

    def wait(self) -> None:
        """Return when the first bytes are there.

        Raises:
            ShardError: they cannot be had.
        """
        self._check_process()
        self._queue.begin()
        with self._budget.lock:
            while not self._fetch.has_begun:
                self._check_open()
                self._await(1)

    def _check_open(self) -> None:
        if self.closed or not self._queue.open:
            raise ValueError("read of a closed shard")

    def _check_process(self) -> None:
        if not self._budget.is_ours:
            raise RuntimeError(
                f"shard {redact(self._fetch.url)} was opened in another process: iterate in the process that reads"
            )

    def _await(self, worth: int) -> None:
        """Wait for the event loop, with the lock in hand."""
        queue, budget = self._queue, self._budget
        queue.waiting, queue.worth = self._fetch, worth
        if queue.fetches and queue.fetches[0] is not self._fetch:
            budget.call(queue.move_to_front, self._fetch)
        if budget.blocked:
            budget.call(budget.schedule)
        start = perf_counter()
        queue.filled.wait(None if worth == 1 else _WORTH_SECONDS)
        queue.client.stalled += perf_counter() - start
        queue.waiting = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        piece = self._rest or memoryview(self._piece())
        count = min(len(piece), len(into))
        into[:count] = piece[:count]
        self._rest = piece[count:] if count < len(piece) else None
        return count

    def _piece(self) -> bytes:
        """The next piece; empty at the end."""
        budget = self._budget
        self._check_process()
        with budget.lock:
            while True:
                self._check_open()
                piece = self._fetch.take()
                if piece is not None:
                    if piece and budget.blocked:
                        budget.call(budget.schedule)
                    return piece
                self._await(_WORTH)

    def close(self) -> None:
        """Give up what was requested and not read."""
        if not self.closed and self._budget.is_ours:
            self._fetch.give_up()
            if self._whole_queue:
                self._queue.close()
        super().close()
        if self._budget.is_ours:
            with self._budget.lock:
                self._queue.filled.notify_all()  # another thread may wait for bytes
