"""Many ranges of objects with one request: GetBatch of AIStore.

Its response is a tar with a member for each range, in the order of the request. A range that cannot
be read has an empty member, below ``__404__/``.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from wds_pipes.io.remote.block import WholeBlock
from wds_pipes.io.remote.budget import Client, UnreadError
from wds_pipes.io.remote.file_systems import aistore_object
from wds_pipes.io.remote.responses import RefusedError, Response, close_response
from wds_pipes.io.remote.stores import AIStore
from wds_pipes.io.remote.transfer import Transfer
from wds_pipes.io.remote.verdicts import judge

if TYPE_CHECKING:
    from wds_pipes.io.remote.fetch import Fetch
    from wds_pipes.io.remote.queue import RangeQueue

# Ranges of a batch: the gateway's work for one with fewer costs more than it saves.
FEWEST, _MOST = 16, 128
_MOST_EXTENDED = 1 << 20  # bytes of an extended header, which has a long name
_MOST_AFTER = 1 << 16  # bytes after the last member that are read, so that the connection can be used again
_LONG_NAME, _NEXT_ATTRIBUTES, _ALL_ATTRIBUTES = b"L", b"x", b"g"  # types of extended headers, of GNU and of POSIX


class _Run(Protocol):
    start: int
    stop: int


Run = TypeVar("Run", bound=_Run)


def batches(runs: Iterable[Run], most_bytes: int) -> Iterator[list[Run]]:
    """Divide consecutive ranges into those that one request may have, with at most ``most_bytes``
    bytes, or one range.
    """
    batch, size = list[Run](), 0
    for run in runs:
        if len(batch) == _MOST or (batch and size + run.stop - run.start > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(run)
        size += run.stop - run.start
    yield batch


class UnusableError(Exception):
    """The gateway has no GetBatch of byte ranges, or another one."""


class Batch:
    """Ranges that one request reads. It runs on the event loop, except where a comment says
    otherwise.

    Args:
        queue: where the ranges are read.

    Attributes:
        fetches: the ranges, in order.

    Rules:
    1. The name, the order and the length of each member are compared with what was requested. At
       the first one that differs, the batch ends.
    2. The consumer gets the bytes of a range when all have arrived, so a range is never put
       together from two responses: the object may have changed between them.
    3. A range that the batch does not bring, whatever the reason, is requested alone. So an error
       is that of an ordinary request.
    """

    def __init__(self, queue: RangeQueue) -> None:
        self.fetches: list[Fetch] = []
        self._queue, self._client, self._budget = queue, queue.client, queue.budget
        self._patience = queue.client.reading.patience
        self._task: asyncio.Task[None] | None = None

    # By the consumer

    def add_to_queue(self) -> None:
        """Let the queue request the ranges."""
        self._queue.add(*self.fetches)

    # On the event loop

    def request(self) -> bool:
        """Request the ranges. Return False if the gateway takes no more batches."""
        store = self.fetches[0].store
        if not isinstance(store, AIStore) or not store.takes_batches:
            return False
        with self._budget.lock:
            self.fetches = [fetch for fetch in self.fetches if not fetch.given_up]
            for fetch in self.fetches:
                assert fetch.stop is not None
                fetch.blocks.append(WholeBlock(fetch, fetch.start, fetch.stop))
        if self.fetches:
            self._queue.transfers += 1
            self._task = self._budget.loop.create_task(self._run(store))
            self._task.add_done_callback(self._ended)
        return True

    def give_up(self, fetch: Fetch) -> None:
        """Nothing of a range is needed any more."""
        if self._task is not None and not any(self._is_needed(each) for each in self.fetches):
            self._task.cancel()
        for block in fetch.blocks:
            if block.paused is not None:
                block.paused.set()

    def _is_needed(self, fetch: Fetch) -> bool:
        return fetch.batch is self and not fetch.given_up and not fetch.blocks[-1].done

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._queue.transfers -= 1
        self._request_alone([fetch for fetch in self.fetches if self._is_needed(fetch)])
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs it

    def _request_alone(self, fetches: list[Fetch]) -> None:
        """Rule 3."""
        with self._budget.lock:
            for fetch in fetches:
                fetch.blocks.pop().drop()
                fetch.batch = None
        self._queue.request_again(fetches)
        self._queue.schedule()

    async def _run(self, store: AIStore) -> None:
        self._client.requests += 1
        try:
            ranges = [(fetch.url, fetch.start, fetch.blocks[-1].stop - fetch.start) for fetch in self.fetches]  # type: ignore[operator]
            async with asyncio.timeout(self._patience):
                response = await store.request_batch(ranges)
            self._client.responded.add("ais")
            try:
                await self._take(response)
            finally:
                await close_response(response)
        except asyncio.CancelledError:
            raise
        except UnusableError:
            store.takes_batches = False
        except BaseException as error:  # a SystemExit too, which would end the loop
            status = error.status if isinstance(error, RefusedError) else None
            if status == 501 or not judge(error, "ais").transient:
                store.takes_batches = False
            # A server may have closed a connection that was not read for a while.
            store.note_batch(failed=not any(block.rested for fetch in self.fetches for block in fetch.blocks))
        else:
            store.note_batch(failed=False)

    async def _take(self, response: Response) -> None:
        """Divide the response into the ranges.

        Raises:
            UnreadError: it ends too early, or is too slow.
            UnusableError: it is no response to this request.
        """
        members, clock = Members(response.chunks, self._client), self._budget.loop.time
        for fetch in self.fetches:
            block = fetch.blocks[-1]
            assert block.stop is not None
            length, (bucket, name) = block.stop - block.start, aistore_object(fetch.url)
            async with asyncio.timeout(self._patience):
                found = await members.find(f"{bucket}/{name}", length)
            if not found:
                if self._is_needed(fetch):
                    self._request_alone([fetch])
                continue
            block.begin_time(clock())
            data = Response(block.start, block.stop, None, {}, members, rest=response.rest)
            await Transfer(fetch, block).take(data, block.start)
            with self._budget.lock:
                block.done = True
                self._queue.notify(fetch)
        async with asyncio.timeout(self._patience):
            await members.end()


class Members(AsyncIterator[bytes]):
    """The members of a tar whose chunks arrive. It iterates over the bytes of a member that
    ``find`` has found.
    """

    def __init__(self, chunks: AsyncIterator[bytes], client: Client) -> None:
        self._chunks, self._client = chunks, client
        self._chunk, self._at = b"", 0  # that is read, and how much of it was
        self._left = self._padding = 0  # bytes of the member, and those after it
        self._is_first = True

    async def find(self, name: str, length: int) -> bool:
        """Read the header of the next member, which must have this name and length. Return False if
        it says that there are no such bytes.

        Raises:
            UnusableError: it is another one, or there is none at all.
            UnreadError: it has fewer bytes, or there are no more members.
        """
        await self._read(self._padding)
        try:
            head = await self._header()
        except (tarfile.HeaderError, ValueError):
            raise UnusableError("no tar") from None
        if head is None and self._is_first:  # so does a gateway without byte ranges respond
            raise UnusableError("a tar without members")
        if head is None:
            raise UnreadError("the tar has too few members")
        found, size = head
        self._is_first, self._padding = False, -size % tarfile.BLOCKSIZE
        if found == f"__404__/{name}" and size == 0:
            return False
        if found != name or size > length:  # without byte ranges, it is the whole object
            raise UnusableError("another member")
        if size < length:
            raise UnreadError("a member is too short")
        self._left = length
        return True

    async def _header(self) -> tuple[str, int] | None:
        """Read a header, with its extended headers; return the name and the size. None: the tar
        ends.
        """
        name: str | None = None
        while True:
            block = await self._read(tarfile.BLOCKSIZE)
            if not any(block):
                return None
            head = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if head.type not in (_LONG_NAME, _NEXT_ATTRIBUTES, _ALL_ATTRIBUTES):
                if not head.isreg():
                    raise ValueError("not a file")
                return head.name if name is None else name, head.size
            if head.size > _MOST_EXTENDED:
                raise ValueError("a long header")
            data = (await self._read(head.size + -head.size % tarfile.BLOCKSIZE))[: head.size]
            if head.type == _LONG_NAME:
                name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif head.type == _NEXT_ATTRIBUTES:
                name = _attributes(data).get("path", name)

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        while self._at == len(self._chunk):
            chunk = await anext(self._chunks, None)
            if chunk is None:
                raise UnreadError("the response ended inside a member")
            self._chunk, self._at = chunk, 0
        piece = self._chunk[self._at : self._at + self._left]
        self._at += len(piece)
        self._left -= len(piece)
        return piece

    async def _read(self, count: int) -> bytes:
        """Read bytes that belong to no range."""
        self._client.bytes_fetched += count
        self._left = count
        return b"".join([piece async for piece in self])

    async def end(self) -> None:
        """Read what follows the last member."""
        count = len(self._chunk) - self._at
        async for chunk in self._chunks:
            count += len(chunk)
            if count > _MOST_AFTER:
                break
        self._client.bytes_fetched += count


def _attributes(data: bytes) -> dict[str, str]:
    """The records of an extended header of POSIX: ``LENGTH NAME=VALUE`` and a line feed.

    Raises:
        ValueError: it has others.
    """
    found = {}
    while data:
        length, _, record = data.partition(b" ")
        count = int(length) - len(length) - 1
        name, _, value = record[: count - 1].partition(b"=")
        if count < 1 or record[count - 1 : count] != b"\n":
            raise ValueError("a broken record")
        found[name.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        data = record[count:]
    return found
