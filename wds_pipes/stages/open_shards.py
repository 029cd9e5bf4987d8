"""OpenShards: URLs to open shards."""

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
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io import compression
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.urls import hide, redact
from wds_pipes.stages.cache_shards import CacheShards
from wds_pipes.tar.headers import BLOCK

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache


class Shard:
    """A shard that opens when it is read.

    Attributes:
        url: where it is.
        refuse: takes the ShardError of a shard that cannot be opened, and raises it or counts it, as ``open_shards(on_error=...)`` says.
    """

    def __init__(self, url: str, opening: Callable[[int, bool], BinaryIO], refuse: Callable[[ShardError], None]) -> None:
        self.url = url
        self.refuse = refuse
        self._opening = opening  # the first byte, for remote ones, and whether to wait until there is one
        self._opened: list[BinaryIO] = []
        self._ahead: int | None = None  # asked for from this byte on, and not waited for

    @property
    def is_open(self) -> bool:
        """Whether it was asked for."""
        return bool(self._opened)

    @property
    def raw(self) -> BinaryIO:
        """Its bytes as they are stored: a buffered binary stream, at their beginning if nothing was read."""
        return self._begin(0)

    def read_ahead(self, start: int = 0) -> None:
        """Ask for its bytes from ``start`` on without waiting for them."""
        try:
            self._opened.append(self._opening(start, False))
            self._ahead = start
        except ShardError:
            pass  # it will be raised in its turn

    def _begin(self, start: int) -> BinaryIO:
        if self._ahead is not None and self._ahead != start:  # another shard was thought to be read from there, which a step between has dropped
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
        """The tar in it as a stream that stands at ``offset`` (in decompressed bytes), and its compression: gz, bz2, xz, zst or ``""``.

        Args:
            offset: where to stand. A plain shard is sought if it can be, and asked for from there if it is remote; a compressed one must be decompressed up
                to there.
            kind: the compression, if it is known: of a remote shard that is not compressed, nothing is read to find it.

        Raises:
            ShardError: it cannot be opened; hand it to ``refuse``, which raises it or counts it, as ``open_shards(on_error=...)`` says.
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
                raise StateError(f"by the state, shard {redact(self.url)} was read as {then}, and is {now} now: it was changed since.")
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
        if left >= BLOCK:  # of the last block only padding may be missing
            raise StateError(f"the state stands at byte {offset} of shard {redact(self.url)}, which has only {offset - left}: it was changed since.")
        return stream, kind

    def doubt(self, error: ShardError) -> None:
        """Damage was found in it: a cache forgets it when it is closed, and ``error`` says so."""
        forget = getattr(getattr(self._opened[0], "raw", None), "doubt", None) if self._opened else None
        path = forget() if forget is not None else None
        if path is not None:
            error.add_note(f"It was read from the cache, file {path}, which is removed when nobody reads it: the next time, the shard is fetched again.")

    def close(self) -> None:
        """Close its streams; a shard that is dropped is closed too."""
        for stream in reversed(self._opened):
            stream.close()

    def __del__(self) -> None:
        self.close()


class OpenShards(Tolerant[Shard]):
    """URLs or paths to open shards (functional name: ``open_shards``).

    Local files are opened straight. Everything else is read in the background by concurrent requests: ``s3://``, ``gs://``, ``http(s)://``, ``hf://``,
    ``az://``, ``ais://`` (by the environment variable AIS_ENDPOINT), and whatever fsspec knows, chained URLs too. One shard is read through all connections,
    and the next one before it has ended; several that are open at once (``interleave_shards``, ``mix``, lanes) are asked for together and share them. ``-`` is
    standard input (it cannot be sought, so a resume reads it again up to its position). Nothing is opened before the process that reads, and no local file
    before its turn.

    What a network does is survived: a request that is refused for a while (408, 425, 429, 5xx), reset, cut short, silent or answered with other bytes is made
    again from the byte reached, later each time, and not before the time that a server asks for. An object that changes meanwhile is an error, never a splice.
    So is a shard without an end-of-archive mark from a server that tells neither its length nor where the response ends: it may have been cut there.

    Args:
        source: a pipe of URLs: ``ShardList``, or torch's own, such as ``IterableWrapper(urls)``.
        storage_options: how to reach the storage: a dict, as fsspec takes it (``{"anon": True}``, ``{"endpoint_url": ...}``); None: those of
            ``ShardList``. Their headers, cookies and passwords for http(s) follow redirects only to the same scheme, host and port.
        readahead_bytes: how much of remote shards to hold in memory, for all pipes, lanes and open shards of a process together. Where its pipes request
            different numbers, the largest counts for all of them together, and none gets more than its own. A pipe that is iterated while others still
            hold what they had read ahead may have half of its share on top.
        connections: how many requests at once, for all of them together in the same way; each open shard has at least one.
        shards_ahead: how many shards after the one that is read may be requested. With two, a link of long round trips is used best: ranges can be longer then.
        retries: how often in a row to ask again without a byte of progress.
        timeout_seconds: for how long to go on without progress, which is 1 KiB a second on average over this time: fewer bytes, such as one now and then,
            are none. A request that brings nothing for a quarter of it is made again. Blocking calls of a file system that hang are left behind; while 64 of
            them do, no more are made.
        cache: keep remote shards on a local disk: a directory, or a ``ShardCache``; see ``cache_shards``.
        verify: compare a remote shard that was read from its beginning with the MD5 that an index tells; a wrong one is an error at its end. This takes
            some 1.5 seconds of a processor for each GB.
        allow_pipe: run the shell commands of ``pipe:`` URLs and read their output. Only for commands that you wrote.
        buffer_bytes: how much is handed on at once.
        on_error: for a shard that cannot be opened: ``"raise"``, or ``"skip"`` it and count it.
        max_errors: with ``"skip"``, how many may be skipped in an epoch; None: any number.

    Raises:
        ShardError: from the iteration: a shard does not exist, may not be read, does not come, or needs a package that is missing.

    Checkpoint: the number of skipped shards. A resume opens only the shard that was being read, and asks for its bytes from the position on.
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
        on_error: str = "raise",
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
        self.opener: Opener = Opener(reading, cache=self.cache, verify=bool(verify), allow_pipe=bool(allow_pipe), buffer_bytes=buffer_bytes)
        self._queue: ReadQueue | None = None  # while running, what remote shards are read among
        self._ended = False  # while running, whether nothing more will be read among them
        self._next: deque[tuple[Shard, Mark | None]] = deque()  # while running, the shards ahead, with the positions of the source behind them
        self._behind: Mark | None = None  # while running, the position of the source behind the shard that was given

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
                    self._behind = None  # but for URLs that a step before has dropped there would be one
                    self._end()
                    return
                shard, self._behind = self._next.popleft()
                if is_remote(shard.url):  # opens when it is known from which byte on it is read
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
        """All are given. A step after this one, such as a shuffle, may still hold some that it has not read."""
        self._ended = True
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def _give_up(self) -> None:
        """Close what nobody has taken."""
        self._ended = True
        for shard, _ in self._next:
            shard.close()
        if self._queue is not None:
            self._queue.close()

    def close(self) -> None:
        super().close()
        self._give_up()  # run() may not have begun

    def _look_ahead(self, count: int) -> None:
        """Take so many URLs from the source, if there are as many."""
        assert self.source is not None
        while len(self._next) < count and (url := next(self.source.items, None)) is not None:
            if not isinstance(url, (str, os.PathLike)):
                raise TypeError(
                    f"open_shards() takes URLs and paths, and its source gave {hide(repr(url)):.200}: put it behind ShardList(...) or IterableWrapper(urls)"
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
        """Ask for the shards ahead, which are given connections when the one that is read has none left to ask for."""
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
        if isinstance(error.__cause__, ImportError):  # not the shard's fault, so never skipped
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
    """The cache that is given, or that a ``cache_shards`` before brings."""
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
