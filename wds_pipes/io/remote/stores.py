"""Request the bytes of a shard from a store, from some byte on, and interpret a refusal.

fsspec's file systems return bytes without what came with them (the size of the object, its ETag,
the range that was really sent), and only when a range is complete. So requests to S3, GCS and HTTP
use fsspec's sessions directly, with the user's storage_options, and their responses are checked.
Of other file systems, byte ranges are requested through fsspec's own interface.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import replace
from time import perf_counter
from typing import Any

from wds_pipes.io.identity import identify_store
from wds_pipes.io.remote.file_systems import (
    aistore_url,
    check_reachable,
    copy_of_options,
    file_system,
    lock_of,
    marks_of,
    protocols_of,
    through_client,
)
from wds_pipes.io.remote.responses import (
    CHUNK_BYTES,
    FaultyError,
    HttpBody,
    Response,
    body_chunks,
    changed,
    in_chunks,
    range_headers,
    refused_by_s3,
    request_by_http,
    response_of,
)
from wds_pipes.io.threads import DaemonThreads
from wds_pipes.io.urls import options_for

# Bytes in a range, for stores that return whole ranges.
_LEAST_RANGE, _FIRST_RANGE = 1 << 12, 1 << 18

_KEPT, _FEWEST = 256, 20  # waits: those that are remembered, and those without which nothing is usual
_REFRESHED = 16  # after so many waits, the usual one is computed again
_USUAL = 0.95  # the share of the waits that are no longer than the usual one
_FACTOR, _SHORTEST = 1.5, 0.05  # times the usual wait, and seconds: what is longer is a stall
_SHARE, _SAVED = 0.05, 10  # second requests for each request, and those that may be saved up


class Waits:
    """How long requests to one store usually wait for bytes, and which of them are made again.

    A batch that needs many requests waits for the slowest of them. So a request that waits much
    longer than usual is made a second time, and the first response is used: hedged requests (Dean
    and Barroso, "The Tail at Scale", 2013).

    Attributes:
        stall: a request without bytes for this many seconds has stalled; infinity: too few waits
            are known.
    """

    def __init__(self) -> None:
        self.stall = math.inf
        self._waits: deque[float] = deque(maxlen=_KEPT)
        self._until_refreshed = _FEWEST
        self._allowed = 0.0

    def note(self, seconds: float) -> None:
        """Record the longest time without bytes of a request that has ended."""
        self._waits.append(seconds)
        self._until_refreshed -= 1
        if not self._until_refreshed:
            self._until_refreshed = _REFRESHED
            usual = sorted(self._waits)[int(_USUAL * len(self._waits))]
            self.stall = max(_FACTOR * usual, _SHORTEST)

    def count_request(self) -> None:
        """Count a request that is made for the first time."""
        self._allowed = min(self._allowed + _SHARE, _SAVED)

    def allow_second(self) -> bool:
        """Whether a second request may be made, which then counts as made. They are at most 5 % of
        the requests.
        """
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True


class Store:
    """A file system that returns ranges; it is called in its event loop.

    Attributes:
        streams: whether a response arrives in chunks, so that one request can be for all the rest
            of a shard.
        waits: how long its requests wait for bytes.
    """

    streams = True

    def __init__(self, fs: Any) -> None:
        self._fs, self.waits = fs, Waits()

    async def request(self, path: str, start: int, stop: int | None, size: int | None) -> Response:
        """Request an object from byte ``start`` up to, not including, ``stop`` (None: its end).

        ``size`` is the size of the object, if the store has reported it.
        """
        raise NotImplementedError


class Stores:
    """The stores of a pipeline, by URL.

    Args:
        storage_options: the options for fsspec.
        connections: the number of connections at once.
        patience: a request without a byte for this many seconds is abandoned.
    """

    def __init__(self, storage_options: dict[str, Any], connections: int, patience: float) -> None:
        self._options, self._connections, self._patience = storage_options, connections, patience
        self._known: dict[str, tuple[Any, Store]] = {}
        self._lock = threading.Lock()
        self._threads: Executor = DaemonThreads(connections)

    def find(self, url: str) -> tuple[Store, str]:
        """The store of a URL, and the path of the object in it.

        Raises:
            ImportError: a package for it is missing.
            ValueError: the protocol is not known.
        """
        from fsspec.core import get_filesystem_class

        options = options_for(url, self._options)
        if url.startswith("ais://"):
            url = aistore_url(url)
        if "::" in url:
            fs, path = file_system(url, options)
            return self._store(fs), path
        protocol = url.partition(":")[0]
        kind = get_filesystem_class(protocol)
        of_url = kind._get_kwargs_from_urls(url)
        key = f"{protocol} {sorted(of_url.items())} {bool(options)}"
        with self._lock:
            if key not in self._known:
                fs = self._make(protocol, kind, options | of_url)
                self._known[key] = fs, self._store(fs)
            fs, store = self._known[key]
        return store, fs._strip_protocol(url)

    def _make(self, protocol: str, kind: Any, options: dict[str, Any]) -> Any:
        from fsspec.config import apply_config

        identity = identify_store(f"{protocol}://", options)
        options = apply_config(kind, options)  # as fsspec does; it may be configured otherwise later
        if options.get("token") is None:
            check_reachable(protocol, options)
        if protocol in ("s3", "s3a"):
            # This package does the retries, and open shards may hold more connections than
            # ``connections``.
            given = options.get("config_kwargs") or {}
            pool = {"max_pool_connections": max(1000, self._connections), "retries": {"total_max_attempts": 1}}
            options = options | {"config_kwargs": pool | given}
        elif protocol in ("http", "https"):
            options = through_client(options)
        # A separate instance: those in fsspec's cache are shared with code that may close them or
        # rely on their retries.
        return _shared_file_system(kind, options, identity)

    def _store(self, fs: Any) -> Store:
        names = protocols_of(fs)
        if "s3" in names and hasattr(fs, "_call_s3"):
            fs.retries = 1
            return _S3(fs)
        if "gs" in names and hasattr(fs, "credentials"):
            return _Gcs(fs, self._threads)
        if "https" in names and hasattr(fs, "encode_url"):
            return _Http(fs)
        return _Other(fs, self._threads, self._patience)


def _shared_file_system(kind: Any, options: dict[str, Any], identity: str) -> Any:
    """The file system of class ``kind`` with these options, for the store ``identity``.

    Equal options share one in this process, since each has its own connections. The identity is
    compared too: the environment may have changed since it was created.
    """
    made = [(fs, known) for of_fs, known in _made if (fs := of_fs()) is not None]
    for fs, known in made:
        if known == (kind, identity, options):
            return fs
    fs = kind(**{**options, "skip_instance_cache": True})
    made.append((fs, (kind, identity, copy_of_options(options))))
    _made[:] = [(weakref.ref(each), known) for each, known in made]
    return fs


_made: list[tuple[weakref.ref[Any], tuple[Any, str, dict[str, Any]]]] = []
os.register_at_fork(after_in_child=_made.clear)


class _Http(Store):
    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        self._options = {"timeout": _no_limit(), **fs.kwargs}
        self._headers = self._options.pop("headers", {})

    async def request(self, path: str, start: int, stop: int | None, size: int | None) -> Response:
        session = await self._fs.set_session()
        options = {**self._options, "headers": {**self._headers, **range_headers(start, stop)}}
        return await request_by_http(session, start, self._fs.encode_url(path), **options)


class _Gcs(Store):
    def __init__(self, fs: Any, threads: Executor) -> None:
        super().__init__(fs)
        self._threads = threads

    async def request(self, path: str, start: int, stop: int | None, size: int | None) -> Response:
        fs = self._fs
        session = await fs._set_session()
        headers = range_headers(start, stop)
        # Signing may fetch a token, with blocking requests.
        await asyncio.get_running_loop().run_in_executor(self._threads, fs.credentials.apply, headers)
        return await request_by_http(
            session, start, fs.url(path), params=fs._get_params({}), headers=headers, timeout=_no_limit()
        )


class _S3(Store):
    async def request(self, path: str, start: int, stop: int | None, size: int | None) -> Response:
        bucket, key, version = self._fs.split_path(path)
        more = {"VersionId": version} if version else {}
        try:
            # The coroutine of call_s3, which only threads without an event loop can call. With the
            # client of get_s3(), the rules of s3fs would stand here again: which of its options a
            # method takes, and what errors mean.
            found = await self._fs._call_s3(
                "get_object",
                Bucket=bucket,
                Key=key,
                Range=range_headers(start, stop)["Range"],
                **more,
                **self._fs.req_kw,
            )
        except OSError as error:
            refusal = getattr(error.__cause__, "response", None)
            if not isinstance(refusal, dict):
                raise
            raise refused_by_s3(refusal, str(error)) from error
        body, headers = found["Body"], found["ResponseMetadata"]["HTTPHeaders"]
        raw = getattr(body, "raw_stream", None) or getattr(body, "__wrapped__", None)
        response = response_of(found["ResponseMetadata"]["HTTPStatusCode"], headers, start)
        if not hasattr(getattr(raw, "content", None), "readany"):
            return replace(response, chunks=body_chunks(body), close=body.close)
        http_body = HttpBody(raw)
        return replace(response, chunks=http_body.chunks(), close=body.close, rest=http_body.rest)


class _Other(Store):
    """Any other file system of fsspec, through its blocking calls, made in threads.

    Such a call returns a range when it is complete. So that some bytes arrive within ``patience``
    on any connection, a request is divided into ranges, whose size follows the measured speed.
    What comes with the bytes is not known, so the object is looked at before the request for its
    last bytes, and after these: it may have been written meanwhile.
    """

    streams = False

    def __init__(self, fs: Any, threads: Executor, patience: float) -> None:
        super().__init__(fs)
        self._threads, self._patience = threads, patience
        self._lock = lock_of(fs)
        # The others read on in what they open, which a new file for each range makes useless.
        self._reading = {"cache_type": "none"} if "hf" in protocols_of(fs) else {}
        self._most = _FIRST_RANGE

    async def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def call() -> Any:
            with self._lock:
                return function(*args, **options)

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def request(self, path: str, start: int, stop: int | None, size: int | None) -> Response:
        marks: dict[str, str] = {}
        if size is None or stop is None or stop >= size:
            info = await self._call(self._fs.info, path)
            if info.get("type") == "directory":
                raise IsADirectoryError(f"{path} is a directory")
            marks, found = marks_of(info), info.get("size")
            size = size if found is None else found
        if size is None:
            return Response(0, None, None, marks, self._read_over(path), has_end_mark=False)
        last = size if stop is None else min(size, stop)
        return Response(
            start, max(start, last), size, marks, self._ranges(path, start, last, marks if last == size else {})
        )

    async def _ranges(self, path: str, start: int, stop: int, marks: dict[str, str]) -> AsyncGenerator[bytes, None]:
        """Read a range. If it ends with the object, this must then still have ``marks``."""
        while start < stop:
            wanted = min(self._most, stop - start)
            begun = perf_counter()
            try:
                data = await self._call(self._fs.cat_file, path, start, start + wanted, **self._reading)
            except asyncio.CancelledError:  # it took too long, or the reader has stopped
                if perf_counter() - begun > self._patience / 2:
                    self._learn(wanted, perf_counter() - begun)
                raise
            count, seconds = len(data), perf_counter() - begun
            if count > wanted:
                raise FaultyError(f"the store returned {count} bytes from byte {start} on instead of {wanted}")
            self._learn(count, seconds)
            if marks and start + count == stop and await self._is_another(path, marks):
                raise FaultyError(f"it was changed before its last {count} bytes were read")
            async for chunk in in_chunks(data):
                yield chunk
            start += count
            if count < wanted:
                return

    async def _is_another(self, path: str, marks: dict[str, str]) -> bool:
        """Whether an object has changed since it had these marks, as far as the store says it."""
        try:
            info = await self._call(self._fs.info, path)
        except Exception:  # its bytes have come
            return False
        return changed(marks, marks_of(info)) is not None

    def _learn(self, count: int, seconds: float) -> None:
        """Adapt the size of the ranges: ``count`` bytes have taken ``seconds``."""
        if seconds > self._patience / 2:
            self._most = max(_LEAST_RANGE, min(self._most, count // 4))
        elif seconds < self._patience / 8:
            self._most = max(self._most, 4 * count)

    async def _read_over(self, path: str) -> AsyncGenerator[bytes, None]:
        """Read an object of unknown size, which is possible only from its beginning."""
        with await self._call(self._fs.open, path, "rb") as file:
            while chunk := await self._call(file.read, CHUNK_BYTES):
                yield chunk


def _no_limit() -> Any:
    """No limit on the total time of a request: the reader limits the time without bytes."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=30)
