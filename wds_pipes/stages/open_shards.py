"""OpenShards: open the shards at URLs. It yields them as OpenedShard objects."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import Network
from wds_pipes.core.options import check_count, check_storage_options
from wds_pipes.core.stage import END, Mark, Source, Stage
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io import compression
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.urls import hide, redact, with_origins
from wds_pipes.stages.cache_shards import CacheShards, as_cache
from wds_pipes.stages.shard_list import ShardList
from wds_pipes.stages.shard_source import ShardRef, allowed_origins
from wds_pipes.tar.headers import BLOCK

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache


class OpenedShard:
    """A shard that opens when it is read.

    Attributes:
        ref: its URL or path, and what is known of it.
        url: its URL or path, as a str.
        refuse: a function that takes the ShardError of a shard that cannot be opened, and raises or
            counts it, depending on ``open_shards(on_error=...)``.
    """

    def __init__(
        self, ref: ShardRef, opening: Callable[[int, bool], BinaryIO], refuse: Callable[[ShardError], None]
    ) -> None:
        self.ref = ref
        self.url = ref.url
        self.refuse = refuse
        self._opening = opening  # takes the first byte (for remote shards), and whether to wait for it
        self._opened: list[BinaryIO] = []
        self._ahead: int | None = None  # requested from this byte on, without waiting

    def __deepcopy__(self, copies: dict[int, Any]) -> OpenedShard:
        """Return the same shard, which is not open. It opens by the same running step, which cannot
        be copied.
        """
        return OpenedShard(self.ref, self._opening, self.refuse)

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

    def check_same(self) -> None:
        """Raise ShardError if it is a local file that was changed since it was opened."""
        check = getattr(getattr(self._opened[0], "raw", None), "check_same", None) if self._opened else None
        if check is not None:
            check()

    def close(self) -> None:
        """Close its streams. This also happens when the object is deleted."""
        for stream in reversed(self._opened):
            stream.close()

    def __del__(self) -> None:
        self.close()


class OpenShards(Tolerant[OpenedShard]):
    """Open the shards at URLs or paths (functional name: ``open_shards``).

    Local files are read directly. Everything else is read in the background with concurrent
    requests: ``s3://``, ``gs://``, ``http(s)://``, ``hf://``, ``az://``, ``ais://`` (with the
    environment variable AIS_ENDPOINT), and all protocols of fsspec, including chained URLs. One
    shard is read through all connections, and requests for the next one start before it has ended.
    Several shards that are open at once (``interleave_shards``, ``mix``, lanes) are requested
    together and share the connections. ``-`` is standard input, which cannot seek, so a resume
    reads it again up to its position. Shards are opened only in the process that reads them, and a
    local file only when it is read.

    Network failures are retried. A request is made again, from the byte reached, if it is refused
    temporarily (408, 425, 429, 5xx), reset, cut short, silent, or answered with the wrong bytes.
    The delay grows from one attempt to the next, and is never shorter than the server requests. An
    object that changes while it is read is an error: two versions are never mixed. So is a local
    file of which the size, the inode or the time of modification changes until the end of the shard
    is read; samples of both versions may have been yielded before.

    Args:
        source: a pipe of shards: ``ShardList``, or one of torch's own that yields URLs or paths,
            such as ``IterableWrapper(urls)``. After a ``ShardList``, every step before this one
            must yield ``ShardRef`` objects.
        storage_options: how to reach the storage: a dict, as fsspec takes it (``{"anon": True}``,
            ``{"endpoint_url": ...}``); None: the options of ``ShardList``. Headers, cookies and
            passwords in it for http(s) follow redirects only to the same scheme, host and port.
            None of the options are used for a web server that only an index of another server
            names; a warning says so.
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
            Listings and other requests for metadata have 120 seconds, also in ``ShardList``.
        cache: keep remote shards on a local disk: ``wp.ShardCache(directory, max_bytes="200GB")``,
            or a directory, with the limit in WDS_PIPES_CACHE_SIZE; see ``cache_shards``.
        verify: compare a shard with the MD5 in an index, if it has one. If they differ, an error is
            raised at the end of the shard. None: of remote shards only, since this takes about 1.5
            seconds of processor time per GB. A remote shard is compared if it was read from its
            beginning. Of a shard that is divided, the last part is responsible.
        allow_pipe: run the shell commands of ``pipe:`` URLs and read their output. Use this only
            for commands that you wrote.
        on_error: what to do with a shard that cannot be opened: ``"raise"``, or ``"skip"`` it and
            count it; None: as ``ShardList(on_error=...)`` says. Errors that are not the fault of
            one shard are never skipped: too many open files, credentials that are refused (401,
            403), a store that cannot be reached, or still answers with an error of its own (5xx)
            after all retries. If the shard where a state stands is skipped, the next one is read
            from its beginning. A step that reads samples again at a resume, such as
            ``shuffle_buffer``, refuses the state if a shard of these is skipped then, and was not
            before: it would drop other samples in their place.
        max_errors: with ``"skip"``, how many shards may be skipped in an epoch; None: no limit.

    Raises:
        ShardError: during iteration, if a shard does not exist, may not be read, does not arrive,
            or needs a package that is missing.
        TypeError: during iteration, if a step between ``ShardList`` and this one has lost what
            ``ShardList`` knows of a shard.

    Checkpoint: the number of skipped shards. A resume opens only the shard that was being read, and
    requests its bytes from the position on.
    """

    keeps_count = True
    scope = "window"
    _foreseen = True
    error_kind = ShardError

    @dataclass(slots=True)
    class At:
        skipped_shards: int = 0

    counter = "skipped_shards"
    tallies = ("skipped_shards",)

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
        verify: bool | None = None,
        allow_pipe: bool = False,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        check_storage_options(storage_options)
        if not isinstance(timeout_seconds, (int, float)) or timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be a positive number, not {timeout_seconds!r}")
        if storage_options is None:
            storage_options = Chain(source).root.storage_options
        self.reading = reading = Reading(
            with_origins(storage_options, allowed_origins(Chain(source).root)) or {},
            check_count("readahead_bytes", readahead_bytes, least=1 << 20),
            check_count("connections", connections),
            check_count("retries", retries, least=0),
            float(timeout_seconds),
        )
        self.shards_ahead = check_count("shards_ahead", shards_ahead, least=0)
        self.cache = _cache(cache, source)
        self.opener: Opener = Opener(reading, cache=self.cache, verify=verify, allow_pipe=bool(allow_pipe))
        self._queue: ReadQueue | None = None  # while running, the queue through which its remote shards are read
        self._ended = False  # while running, whether nothing more will be read through this queue
        # while running, the shards ahead, each with the position of the source after it
        self._next: deque[tuple[OpenedShard, Mark | None]] = deque()

    def run(self) -> Iterator[OpenedShard]:
        shard: OpenedShard | None = None
        try:
            while True:
                self._look_ahead(1)
                if not self._next:
                    # so that the mark is that of the source, which has passed any URLs that a step
                    # before this one dropped
                    self.earlier = None
                    self._end()
                    return
                shard, self.earlier = self._next.popleft()
                if is_remote(shard.url):
                    self._look_ahead(0 if self.cache is not None else self.shards_ahead)
                    if shard.is_open:
                        self._read_ahead()
                yield shard
        except GeneratorExit:
            if shard is not None:
                shard.close()
            raise
        finally:
            self._give_up()

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        if self.cache is not None or self._next or (ahead and not self.shards_ahead):
            return
        self.earlier = self.source.mark()
        self._look_ahead(1)
        if self._next and is_remote(self._next[0][0].url):
            self._queue = ReadQueue(self.opener.client, self.lane.meters, ahead=ahead)
            shard = self._next[0][0]
            shard.read_ahead(offset or shard.ref.begin or 0)

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
        while len(self._next) < count and (url := next(self.source.items, END)) is not END:
            ref = self._ref(url)
            if self.cache is not None and is_remote(ref.url):
                ref = replace(ref, begin=None)  # only what is read from its beginning is stored
            self._next.append((OpenedShard(ref, partial(self._opening, ref), self.skip), self.source.mark()))

    def _ref(self, item: Any) -> ShardRef:
        """Return what the source yielded as a ShardRef.

        Raises:
            TypeError: it is not a shard, or a step in between has lost what ShardList knows of it.
        """
        first = Chain(self).root
        if isinstance(item, ShardRef):
            if item.stop is not None or first.epoch_order.sample_counts is None:
                return item
        elif not isinstance(item, (str, os.PathLike)):
            raise TypeError(
                f"open_shards() takes URLs and paths, and its source gave {hide(repr(item)):.200}: "
                "put it after ShardList(...) or IterableWrapper(urls)"
            )
        elif not _lists(first):
            return ShardRef(os.fspath(item))
        raise TypeError(
            f"a step between ShardList and open_shards() returned {type(item).__name__} {redact(str(item))!r:.200}, "
            "and lost what ShardList knows of the shard: which of its samples to read, its size and its MD5. Samples "
            "could come twice. Let the step return the ShardRef that it takes, or ref.with_url(url) to change the URL."
        )

    def _opening(self, ref: ShardRef, start: int, wait: bool) -> BinaryIO:
        md5 = ref.md5 if is_remote(ref.url) or ref.stop in (None, ref.of) else None
        open_url = partial(self.opener.open, ref.url, start, size=ref.size, md5=md5, meters=self.lane.meters)
        if self.cache is not None or not is_remote(ref.url):
            return open_url()
        if self._ended:
            return open_url(wait=wait)
        self._queue = self._queue or ReadQueue(self.opener.client, self.lane.meters)
        stream = open_url(queue=self._queue, wait=wait)
        if wait:
            self._read_ahead()
        return stream

    def _read_ahead(self) -> None:
        """Request the shards ahead. They get connections when nothing of the current shard is left
        to request.
        """
        for shard, _ in self._next:
            if is_remote(shard.url) and not shard.is_open:
                shard.read_ahead(shard.ref.begin or 0)

    @property
    def network(self) -> Network:
        return self.opener.used


def _lists(root: Source[Any]) -> bool:
    """Return whether all shards of a chain come from ShardLists, also through a mix."""
    branches = [Chain(branch).root for branch in root.branches.values()]
    return isinstance(root, ShardList) or (bool(branches) and all(map(_lists, branches)))


def _cache(given: ShardCache | str | os.PathLike[str] | None, source: Stage[Any]) -> ShardCache | None:
    """Return the cache that was passed, or that of a ``cache_shards`` before this step."""
    before = next((step for step in Chain(source) if isinstance(step, CacheShards)), None)
    if given is None:
        return None if before is None else before.cache
    if before is not None:
        raise ValueError("there are two caches: pass cache= to open_shards(), or put cache_shards() before it")
    return as_cache(given)
