"""OpenShards: open the shards at URLs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_pipes.core.counts import Network
from wds_pipes.core.lane import Lane
from wds_pipes.core.options import check_count
from wds_pipes.core.running import Mark
from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io import compression
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.secret import hide
from wds_pipes.io.urls import redact
from wds_pipes.stages.cache_shards import CacheShards
from wds_pipes.tar.headers import BLOCK

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache


class Shard:
    """A shard that opens when it is read.

    Attributes:
        url: its URL or path.
        refuse: a function that takes the ShardError of a shard that cannot be opened, and raises or
            counts it, depending on ``open_shards(on_error=...)``.
    """

    def __init__(
        self, url: str, opening: Callable[[int, bool], BinaryIO], refuse: Callable[[ShardError], None]
    ) -> None:
        self.url = url
        self.refuse = refuse
        self._opening = opening  # takes the first byte (for remote shards), and whether to wait for it
        self._opened: list[BinaryIO] = []
        self._ahead: int | None = None  # requested from this byte on, without waiting

    @property
    def is_open(self) -> bool:
        """Whether it was requested."""
        return bool(self._opened)

    @property
    def raw(self) -> BinaryIO:
        """Its bytes as they are stored: a buffered binary stream, at the beginning if nothing was
        read yet.
        """
        return self._begin(0)

    def read_ahead(self, start: int = 0) -> None:
        """Request its bytes from ``start`` on, without waiting for them."""
        try:
            self._opened.append(self._opening(start, False))
            self._ahead = start
        except ShardError:
            pass  # it will be raised when the shard is read

    def _begin(self, start: int) -> BinaryIO:
        # this position was of another shard, which a step in between has dropped
        if self._ahead is not None and self._ahead != start:
            self._ahead = None
            self.close()
            self._opened.clear()
        if not self._opened:
            self._opened.append(self._opening(start, True))
        elif self._ahead is not None:
            self._ahead = None
            self._opened[0].raw.wait()  # type: ignore[attr-defined]
        return self._opened[0]

    def tar(self, offset: int = 0, kind: str | None = None) -> tuple[BinaryIO, str]:
        """Return the tar in the shard as a stream at ``offset`` (in decompressed bytes), and its
        compression: gz, bz2, xz, zst or ``""``.

        Args:
            offset: the position of the stream. An uncompressed shard is opened or sought there if
                it can be; any other is read or decompressed up to there.
            kind: the compression, if it is known. If a remote shard is known to be uncompressed,
                nothing is read to find that out.

        Raises:
            ShardError: the shard cannot be opened. Pass the error to ``refuse``, which raises or
                counts it.
            StateError: the shard ends before ``offset``, or has another compression.
        """
        left = offset
        if kind == "" and is_remote(self.url):
            stream, left = self._begin(offset), 0
        else:
            stream = self._begin(0)
            found = compression.detect(stream.peek(compression.MAGIC_BYTES)[: compression.MAGIC_BYTES])  # type: ignore[attr-defined]
            if kind not in (None, found):
                then, now = kind or "not compressed", found or "not compressed"
                raise StateError(
                    f"by the state, shard {redact(self.url)} was read as {then}, and is {now} "
                    "now: it was changed since."
                )
            kind = found
        if kind:
            stream = compression.decompress(stream, kind)
            self._opened.append(stream)
        if left and not kind and stream.seekable():
            left -= min(stream.seek(0, os.SEEK_END), offset)
            if left < BLOCK:
                stream.seek(offset)
        else:
            while left and (got := len(stream.read(min(left, 1 << 20)))):
                left -= got
        if left >= BLOCK:  # only the padding of the last block may be missing
            raise StateError(
                f"the state stands at byte {offset} of shard {redact(self.url)}, which has only "
                f"{offset - left}: it was changed since."
            )
        return stream, kind

    def doubt(self, error: ShardError) -> None:
        """Report damage in the shard: a cache removes its file when it is closed, and a note in
        ``error`` says so.
        """
        forget = getattr(getattr(self._opened[0], "raw", None), "doubt", None) if self._opened else None
        path = forget() if forget is not None else None
        if path is not None:
            error.add_note(
                f"It was read from the cache, file {path}, which is removed when no process reads "
                "it: then the shard is fetched again."
            )

    def close(self) -> None:
        """Close its streams. This also happens when the object is deleted."""
        for stream in reversed(self._opened):
            stream.close()

    def __del__(self) -> None:
        self.close()


class OpenShards(Tolerant[Shard]):
    """Open the shards at URLs or paths (functional name: ``open_shards``).

    Local files are opened directly. Everything else is read in the background with concurrent
    requests: ``s3://``, ``gs://``, ``http(s)://``, ``hf://``, ``az://``, ``ais://`` (with the
    environment variable AIS_ENDPOINT), and all protocols of fsspec, including chained URLs. One
    shard is read through all connections, and requests for the next one start before it has ended.
    Several shards that are open at once (``interleave_shards``, ``mix``, lanes) are requested
    together and share the connections. ``-`` is standard input, which cannot seek, so a resume
    reads it again up to its position. Shards are opened only in the process that reads them, and a
    local file only when its turn comes.

    Network failures are retried. A request is made again, from the byte reached, if it is refused
    temporarily (408, 425, 429, 5xx), reset, cut short, silent, or answered with the wrong bytes.
    The delay grows from one attempt to the next, and is never shorter than the server requests. An
    object that changes while it is read is an error: two versions are never mixed. A shard without
    an end-of-archive mark is also an error, if the server sends neither its length nor the end of
    the response: the shard may have been cut there.

    Args:
        source: a pipe of URLs: ``ShardList``, or one of torch's own, such as
            ``IterableWrapper(urls)``.
        storage_options: how to reach the storage: a dict, as fsspec takes it (``{"anon": True}``,
            ``{"endpoint_url": ...}``); None: the options of ``ShardList``. Headers, cookies and
            passwords in it for http(s) follow redirects only to the same scheme, host and port.
        readahead_bytes: how many bytes of remote shards to hold in memory: the read budget of all
            pipes, lanes and open shards of a process together. If the pipes of a process request
            different numbers, the largest is the budget of all together, and no pipe gets more than
            its own number. A pipe may hold half of its share even while others still hold more than
            theirs, because they were opened earlier and had larger shares. The budget can then be
            exceeded by that half.
        connections: how many requests to make at once, for all pipes of a process together in the
            same way; each open shard has at least one.
        shards_ahead: how many shards after the current one may be requested. Two make the best use
            of a link with long round trips, because ranges can then be longer.
        retries: how often in a row to repeat a request without receiving a byte.
        timeout_seconds: how long to continue without progress. Progress means at least 1 KiB per
            second on average over this time; a byte now and then is not enough. A request that
            receives nothing for a quarter of this time (at least 1 second) is made again. Blocking
            calls of a file system that hang are abandoned; while 64 of them hang, no more are made.
        cache: keep remote shards on a local disk: a directory, or a ``ShardCache``; see
            ``cache_shards``.
        verify: compare a remote shard that was read from its beginning with the MD5 in an index, if
            it has one. If they differ, an error is raised at the end of the shard. This takes about
            1.5 seconds of processor time per GB.
        allow_pipe: run the shell commands of ``pipe:`` URLs and read their output. Use this only
            for commands that you wrote.
        buffer_bytes: the size of the buffer through which each shard is read.
        on_error: what to do with a shard that cannot be opened: ``"raise"``, or ``"skip"`` it and
            count it.
        max_errors: with ``"skip"``, how many shards may be skipped in an epoch; None: no limit.

    Raises:
        ShardError: during iteration, if a shard does not exist, may not be read, does not arrive,
            or needs a package that is missing.

    Checkpoint: the number of skipped shards. A resume opens only the shard that was being read, and
    requests its bytes from the position on.
    """

    keeps_count = True
    error_kind = ShardError

    @dataclass(slots=True)
    class At:
        skipped_shards: int = 0

    counter = "skipped_shards"

    def __init__(
        self,
        source: Stage[Any],
        *,
        storage_options: dict[str, Any] | None = None,
        readahead_bytes: int = 64 << 20,
        connections: int = 8,
        shards_ahead: int = 2,
        retries: int = 10,
        timeout_seconds: float = 120,
        cache: ShardCache | str | os.PathLike[str] | None = None,
        verify: bool = True,
        allow_pipe: bool = False,
        buffer_bytes: int = 1 << 20,
        on_error: OnError = "raise",
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        if storage_options is not None and not isinstance(storage_options, dict):
            raise TypeError(f"storage_options must be a dict, not {type(storage_options).__name__}")
        if not isinstance(timeout_seconds, (int, float)) or timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be a positive number, not {timeout_seconds!r}")
        if storage_options is None:
            storage_options = source.storage_options
        reading = Reading(
            storage_options or {},
            check_count("readahead_bytes", readahead_bytes, least=1 << 20),
            check_count("connections", connections),
            check_count("retries", retries, least=0),
            float(timeout_seconds),
        )
        self.shards_ahead = check_count("shards_ahead", shards_ahead, least=0)
        self.cache = _cache(cache, source)
        buffer_bytes = check_count("buffer_bytes", buffer_bytes, least=512)
        self.opener: Opener = Opener(
            reading, cache=self.cache, verify=bool(verify), allow_pipe=bool(allow_pipe), buffer_bytes=buffer_bytes
        )
        self._queue: ReadQueue | None = None  # while running, the queue through which its remote shards are read
        self._ended = False  # while running, whether nothing more will be read through this queue
        # while running, the shards ahead, each with the position of the source after it
        self._next: deque[tuple[Shard, Mark | None]] = deque()
        # while running, the position of the source after the shard that was yielded last
        self._behind: Mark | None = None

    def open(self, lane: Lane, mark: Mark | None = None) -> OpenShards:
        running = super().open(lane, mark)
        assert isinstance(running, OpenShards)
        running._next = deque()
        return running

    def run(self) -> Iterator[Shard]:
        shard: Shard | None = None
        try:
            while True:
                self._look_ahead(1)
                if not self._next:
                    # so that the mark is that of the source, which has passed any URLs that a step
                    # before this one dropped
                    self._behind = None
                    self._end()
                    return
                shard, self._behind = self._next.popleft()
                if is_remote(shard.url):  # opens when its first byte is known
                    self._look_ahead(0 if self.cache is not None else self.shards_ahead)
                    if shard.is_open:
                        self._read_ahead()
                elif not self._open_now(shard):
                    continue
                yield shard
        except GeneratorExit:
            if shard is not None:
                shard.close()
            raise
        finally:
            self._give_up()

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        assert self.source is not None
        if self.cache is not None or self._next or (ahead and not self.shards_ahead):
            return
        self._behind = self.source.mark()
        self._look_ahead(1)
        if self._next and is_remote(self._next[0][0].url):
            self._queue = ReadQueue(self.opener.client, ahead=ahead)
            self._next[0][0].read_ahead(offset)

    def _end(self) -> None:
        """End the read queue: all shards were yielded. A step after this one, such as a shuffle,
        may still hold some that were not read.
        """
        self._ended = True
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def _give_up(self) -> None:
        """Close the shards that were not yielded."""
        self._ended = True
        for shard, _ in self._next:
            shard.close()
        if self._queue is not None:
            self._queue.close()

    def close(self) -> None:
        super().close()
        self._give_up()  # run() may not have begun

    def _look_ahead(self, count: int) -> None:
        """Take URLs from the source until ``count`` shards are ahead, if there are that many."""
        assert self.source is not None
        while len(self._next) < count and (url := next(self.source.items, None)) is not None:
            if not isinstance(url, (str, os.PathLike)):
                raise TypeError(
                    "open_shards() takes URLs and paths, and its source gave "
                    f"{hide(repr(url)):.200}: put it after ShardList(...) or "
                    "IterableWrapper(urls)"
                )
            name = url if isinstance(url, str) else os.fspath(url)
            self._next.append((Shard(name, partial(self._opening, name), self._refuse), self.source.mark()))

    def _opening(self, url: str, start: int, wait: bool) -> BinaryIO:
        if self.cache is not None or not is_remote(url):
            return self.opener.open(url, start)
        if self._ended:
            return self.opener.open(url, start, wait=wait)
        self._queue = self._queue or ReadQueue(self.opener.client)
        stream = self.opener.open(url, start, self._queue, wait=wait)
        if wait:
            self._read_ahead()
        return stream

    def _read_ahead(self) -> None:
        """Request the shards ahead. They get connections when nothing of the current shard is left
        to request.
        """
        for shard, _ in self._next:
            if is_remote(shard.url) and not shard.is_open:
                shard.read_ahead()

    def _open_now(self, shard: Shard) -> bool:
        try:
            shard.raw  # noqa: B018 - opens it
        except ShardError as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: ShardError) -> None:
        # a missing package is not the fault of the shard, so this is never skipped
        if isinstance(error.__cause__, ImportError):
            raise error
        self.skip(error)

    @property
    def network(self) -> Network:
        return self.opener.used

    def stall_clock(self) -> Callable[[], float]:
        return self.opener.stall_clock()

    def mark(self) -> Mark:
        return self._own(self.at), self._behind or (self.source.mark() if self.source is not None else None)


def _cache(given: ShardCache | str | os.PathLike[str] | None, source: Stage[Any] | None) -> ShardCache | None:
    """Return the cache that was passed, or that of a ``cache_shards`` before this step."""
    while source is not None and not isinstance(source, CacheShards):
        source = source.source
    if given is None:
        return None if source is None else source.cache
    if source is not None:
        raise ValueError("there are two caches: pass cache= to open_shards(), or put cache_shards() before it")
    if isinstance(given, (str, os.PathLike)):
        from wds_pipes.io.cache.shard_cache import ShardCache

        return ShardCache(given)
    return given
