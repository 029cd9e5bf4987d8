"""How to ask a store for the bytes of a shard from one place on, and what its refusals mean.

fsspec's file systems give bytes but not what came with them (the size of the object, its ETag, which bytes were really sent), and only when a range is
complete. So S3, GCS and HTTP are asked through fsspec's own sessions, with the user's storage_options, and answers are checked; other file systems
are asked for ranges as they offer it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from ipaddress import IPv6Address
from time import perf_counter, sleep, time
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from wds_pipes.core.tracebacks import causes
from wds_pipes.io.identity import identify_store
from wds_pipes.io.threads import DaemonThreads
from wds_pipes.io.urls import IPV6_HOST, links_of, words

_CONNECT_SECONDS = 5.0
PIECE = 1 << 18  # of stores that are read and not heard
_LEAST_RANGE, _FIRST_RANGE = 1 << 12, 1 << 18  # of those that give whole ranges
_GATHERED, _GATHER_SECONDS = 1 << 18, 0.006  # how many bytes, and those of how long, are worth to be woken for
_LONGEST_GATHERING = 0.05  # seconds
_IN_RECORDS = 1 << 15  # bytes that TLS may have taken from the kernel and not given yet
_PASSING = {304, 408, 425, 429, *range(500, 600)}  # statuses after which asking again makes sense; 304 answers what was never asked
_PASSING_CODES = {"RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException", "RequestThrottled", "SlowDown"}  # of S3, with 400 too
_GIVING = {200, 203, 206}  # those with bytes of the object
_SAYING = ("x-goog-generation", "etag", "last-modified")  # headers that change when the object does, the surest first
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass
class Answer:
    """What a store answers.

    Attributes:
        start: the object's byte where the answer begins.
        stop: the byte behind its last one; None: unknown.
        size: of the whole object; None: unknown.
        tags: what changes when the object does, such as its ETag, by name, the surest first; see ``changed``.
        pieces: the bytes, as they come.
        has_end_mark: the transfer tells where it ends, by its length or a mark, so that a cut is seen.
        close: gives the connection up.
        rest: is told when nothing will be read for a while.
    """

    start: int
    stop: int | None
    size: int | None
    tags: dict[str, str]
    pieces: AsyncIterator[bytes] = field(default_factory=lambda: one_piece(b""))
    close: Callable[[], Any] = lambda: None
    rest: Callable[[], None] = lambda: None
    has_end_mark: bool = True


def changed(before: dict[str, str], now: dict[str, str]) -> tuple[str, str] | None:
    """The first of the tags of two answers that both have, if they differ: then the object does. What one of them does not have says nothing."""
    both = next((name for name in now if name in before), None)
    return None if both is None or before[both] == now[both] else (before[both], now[both])


class RefusedError(OSError):
    """A store refused a request.

    Attributes:
        status: of HTTP; None: none came.
        after: how many seconds it asks to wait, if it says so.
        size: of the object, if nothing lies where it was asked (416).
    """

    def __init__(self, status: int | None, reason: str, *, after: float | None = None, size: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.after, self.size = status, after, size


class FaultyError(OSError):
    """An answer that cannot be right."""


class Store(Protocol):
    """A file system that can be asked for ranges, from its event loop.

    Attributes:
        streams: whether an answer comes piece by piece, so that the whole rest of a shard can be asked for at once.
    """

    streams: bool

    async def ask(self, path: str, start: int, stop: int | None, size: int | None) -> Answer:
        """The bytes of an object from ``start`` up to, not including, ``stop`` (None: its end); ``size`` is that of the object, if it has been told."""
        ...


class Stores:
    """The stores of a pipe, by URL.

    Args:
        storage_options: as fsspec takes them.
        connections: how many there may be at once.
        patience: after how many seconds without a byte a request is given up.
    """

    def __init__(self, storage_options: dict[str, Any], connections: int, patience: float) -> None:
        self._options, self._connections, self._patience = storage_options, connections, patience
        self._known: dict[str, tuple[Any, Store]] = {}
        self._lock = threading.Lock()
        self._threads: Executor = DaemonThreads(connections)

    def find(self, url: str) -> tuple[Store, str]:
        """The store of a URL, and the path of its object there.

        Raises:
            ImportError: a package for it is missing.
            ValueError: nobody knows the protocol.
        """
        from fsspec.core import get_filesystem_class

        if url.startswith("ais://"):
            url = _ais(url)
        if len(links_of(url)) > 1:
            fs, path = file_system(url, self._options)
            return self._store(fs), path
        protocol = url.partition(":")[0]
        kind = get_filesystem_class(protocol)
        of_url = kind._get_kwargs_from_urls(url)
        key = f"{protocol} {sorted(of_url.items())}"
        with self._lock:
            if key not in self._known:
                fs = self._make(protocol, kind, of_url)
                self._known[key] = fs, self._store(fs)
            fs, store = self._known[key]
        return store, fs._strip_protocol(url)

    def _make(self, protocol: str, kind: Any, of_url: dict[str, Any]) -> Any:
        options = self._options | of_url
        if options.get("token") is None:
            _check_reachable(protocol, options)
        if protocol in ("s3", "s3a"):
            # Retries are ours, and open shards may hold more connections than are asked for.
            given = options.get("config_kwargs") or {}
            pool = {"max_pool_connections": max(1000, self._connections), "retries": {"total_max_attempts": 1}}
            options = options | {"config_kwargs": pool | given}
        elif protocol in ("http", "https"):
            options = _through_client(options)
        # An instance of our own: those that fsspec keeps are shared with code that may close them or rely on their retries.
        return _shared.setdefault(os.getpid(), _Shared()).find(kind, options, identify_store(f"{protocol}://", options))

    def _store(self, fs: Any) -> Store:
        names = [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)
        if "s3" in names and hasattr(fs, "_call_s3"):
            return _S3(fs)
        if "gs" in names and hasattr(fs, "_get_headers"):
            return _Gcs(fs, self._threads)
        if "https" in names and hasattr(fs, "encode_url"):
            return _Http(fs)
        return _Other(fs, self._threads, self._patience)


class _Shared:
    """The file systems that the stores of this process use now: one for all of the same options, since each has connections of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[Any, Any, weakref.ref[Any], str]] = []

    def find(self, kind: Any, options: dict[str, Any], identity: str) -> Any:
        """The file system of a class with these options, which lead to the store ``identity``: the environment may have changed since one was made."""
        with self._lock:
            self._made = [made for made in self._made if made[2]() is not None]
            for of_kind, of_options, found, of_identity in self._made:
                fs = found()
                if fs is not None and of_kind is kind and of_identity == identity and _same(of_options, options):
                    return fs
            fs = kind(**{**options, "skip_instance_cache": True})
            self._made.append((kind, _copied(options), weakref.ref(fs), identity))
            return fs


_shared: dict[int, _Shared] = {}  # by process


def _copied(options: Any) -> Any:
    """Options as they are now: the caller may change them later."""
    return {name: _copied(value) for name, value in options.items()} if isinstance(options, dict) else options


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # of some class of the user's
        return False


def file_system(url: str, storage_options: dict[str, Any] | None) -> tuple[Any, str]:
    """The file system of a URL as fsspec keeps it, and the path there; its requests by HTTP follow ``_client``."""
    from fsspec.core import get_filesystem_class, url_to_fs

    options, links = dict(storage_options or {}), links_of(url)
    for link in links:
        protocol = link.partition("://")[0]
        _check_reachable(protocol, options.get(protocol, {}) if len(links) > 1 else options)
        if protocol in ("http", "https"):
            given = options.get(protocol, {}) if len(links) > 1 else options
            given = _through_client(given)
            options = {**options, protocol: given} if len(links) > 1 else given
    if "::" in url and len(links) == 1:  # fsspec would take it for a chain
        kind = get_filesystem_class(protocol)
        return kind(**(options | kind._get_kwargs_from_urls(url))), kind._strip_protocol(url)
    url = IPV6_HOST.sub(lambda found: f"[{IPv6Address(found[0][1:-1]).exploded}]", url) if len(links) > 1 else url
    return url_to_fs(url, **options)  # type: ignore[no-any-return]


def _check_reachable(protocol: str, options: Mapping[str, Any]) -> None:
    """ConnectionError, soon, where there is no way to Google's storage.

    gcsfs would first look for credentials on a machine of Google's, and then request again and again: that takes up to a minute.
    """
    if protocol not in ("gs", "gcs"):
        return
    from fsspec.config import conf

    options = {**conf.get("gs", {}), **conf.get("gcs", {}), **options}
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    endpoint = endpoint or f"https://storage.{os.environ.get('GOOGLE_CLOUD_UNIVERSE_DOMAIN') or 'googleapis.com'}"
    place = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    if getproxies() or options.get("session_kwargs") or place.hostname is None:  # they may lead there in another way
        return
    error: OSError | None = None
    for wait in (0.0, 0.1, 0.2, 0.4):
        sleep(wait)
        try:
            socket.create_connection((place.hostname, place.port or (80 if place.scheme == "http" else 443)), _CONNECT_SECONDS).close()
        except TimeoutError as late:
            error = late
            break
        except OSError as refused:
            error = refused
        else:
            return
    raise ConnectionError(f"no connection to {place.hostname}: {error}") from None


def missing_package(url: str) -> str:
    """How to install what the protocol of a URL needs."""
    extra = _EXTRAS.get(url.partition(":")[0])
    return "install the package that it names" if extra is None else f"pip install 'wds_pipes[{extra}]'"


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def _ais(url: str) -> str:
    """An object of AIStore as its gateway's REST interface names it."""
    endpoint = os.environ.get("AIS_ENDPOINT")
    if not endpoint:
        raise ValueError("ais:// needs the environment variable AIS_ENDPOINT, such as http://gateway:51080")
    bucket, _, name = url.removeprefix("ais://").partition("/")
    return f"{endpoint.rstrip('/')}/v1/objects/{bucket}/{quote(name)}?provider=ais"


async def _client(**options: Any) -> Any:
    """A session without a limit of its own: each open shard has a connection, however many there are.

    Of the headers, only ``_HARMLESS`` ones follow a redirect to another origin: aiohttp holds back Authorization and cookies, but not those of the session.
    """
    import aiohttp

    if "connector" not in options:
        options["connector"] = aiohttp.TCPConnector(limit=0)
    trace, auth, cookies = aiohttp.TraceConfig(), options.pop("auth", None), options.pop("cookies", None)

    async def begin(session: Any, context: Any, request: Any) -> None:
        # As headers: what a session has itself, it sends to all origins.
        if auth is not None and request.url.user is None and "Authorization" not in request.headers:
            request.headers["Authorization"] = auth.encode()
        if cookies:
            pairs = cookies.items() if isinstance(cookies, Mapping) else cookies
            own = [f"{name}={getattr(value, 'coded_value', value)}" for name, value in pairs]
            request.headers["Cookie"] = "; ".join([*request.headers.getall("Cookie", ()), *own])

    async def redirect(session: Any, context: Any, request: Any) -> None:
        if not _within_origin(request.response):
            for name in [name for name in request.headers if name.lower() not in _HARMLESS]:
                del request.headers[name]

    trace.on_request_start.append(begin)
    trace.on_request_redirect.append(redirect)
    options["trace_configs"] = [*(options.get("trace_configs") or ()), trace]
    return aiohttp.ClientSession(**options)


def _through_client(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an HTTP file system whose requests follow ``_client``. It gets the cookies: aiohttp before 3.14 sends those of a request to all origins."""
    made = {"get_client": _client, **options}
    if made["get_client"] is _client and "cookies" in made:
        given = made.get("client_kwargs") or {}
        made["client_kwargs"] = {**given, "cookies": {**dict(given.get("cookies") or {}), **dict(made.pop("cookies") or {})}}
    return made


_HARMLESS = {"accept", "accept-encoding", "accept-language", "cache-control", "range", "user-agent"}


def _within_origin(response: Any) -> bool:
    """Whether a redirect leads to the same scheme, host and port."""
    from yarl import URL

    try:
        target = response.url.join(URL(response.headers.get("Location") or response.headers.get("URI") or ""))
        return bool(target.origin() == response.url.origin())
    except ValueError:
        return False


class _Http:
    streams = True

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    async def ask(self, path: str, start: int, stop: int | None, size: int | None) -> Answer:
        options = dict(self._fs.kwargs)
        headers = {**options.pop("headers", {}), **_asking(start, stop)}
        session = await self._fs.set_session()
        return await _get(session, start, self._fs.encode_url(path), **{"timeout": _no_limit(), **options}, headers=headers)


class _Gcs:
    streams = True

    def __init__(self, fs: Any, threads: Executor) -> None:
        self._fs, self._threads = fs, threads

    async def ask(self, path: str, start: int, stop: int | None, size: int | None) -> Answer:
        fs = self._fs
        session = await fs._set_session()
        # Signing may fetch a token, which is done with blocking requests.
        headers = await asyncio.get_running_loop().run_in_executor(self._threads, fs._get_headers, _asking(start, stop))
        return await _get(session, start, fs.url(path), params=fs._get_params({}), headers=headers, timeout=_no_limit())


class _S3:
    streams = True

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        fs.retries = 1

    async def ask(self, path: str, start: int, stop: int | None, size: int | None) -> Answer:
        bucket, key, version = self._fs.split_path(path)
        more = {"VersionId": version} if version else {}
        try:
            found = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=_asking(start, stop)["Range"], **more, **self._fs.req_kw)
        except OSError as error:
            response = getattr(error.__cause__, "response", None)
            if not isinstance(response, dict):
                raise
            raise _refused_by_s3(response, str(error)) from error
        body, headers = found["Body"], found["ResponseMetadata"]["HTTPHeaders"]
        raw = getattr(body, "raw_stream", None) or getattr(body, "__wrapped__", None)
        answer = _described(found["ResponseMetadata"]["HTTPStatusCode"], headers, start)
        if not hasattr(getattr(raw, "content", None), "readany"):
            return replace(answer, pieces=_body_pieces(body), close=body.close)
        heard = _Heard(raw)
        return replace(answer, pieces=heard.pieces(), close=body.close, rest=heard.rest)


class _Other:
    """Any file system of fsspec's, asked from threads: with its blocking calls, which all have.

    They give a range when it is complete. So that something comes within ``patience`` on any link, what is asked for is divided into ranges that are as long
    as the link was found to allow.
    """

    streams = False

    def __init__(self, fs: Any, threads: Executor, patience: float) -> None:
        self._fs, self._threads, self._patience = fs, threads, patience
        self._most = _FIRST_RANGE

    async def _call(self, name: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, getattr(self._fs, name), *args)

    async def ask(self, path: str, start: int, stop: int | None, size: int | None) -> Answer:
        tags: dict[str, str] = {}
        if size is None:
            info = await self._call("info", path)
            size = info.get("size")
            if info.get("type") == "directory":
                raise IsADirectoryError(f"{path} is a directory")
            tags = {name: str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified", "last_modified") if info.get(name)}
        if size is None:
            return Answer(0, None, None, tags, self._read_over(path), has_end_mark=False)
        stop = size if stop is None else min(size, stop)
        return Answer(start, max(start, stop), size, tags, self._ranges(path, start, stop))

    async def _ranges(self, path: str, start: int, stop: int) -> AsyncIterator[bytes]:
        while start < stop:
            wanted, begun = min(self._most, stop - start), perf_counter()
            try:
                data = await self._call("cat_file", path, start, start + wanted)
            except asyncio.CancelledError:  # it took too long, or nobody wants it any more
                if perf_counter() - begun > self._patience / 2:
                    self._learn(wanted, perf_counter() - begun)
                raise
            if len(data) > wanted:
                raise FaultyError(f"the store gave {len(data)} bytes from byte {start} on instead of {wanted}")
            self._learn(len(data), perf_counter() - begun)
            async for piece in one_piece(data):
                yield piece
            start += len(data)
            if len(data) < wanted:
                return

    def _learn(self, count: int, seconds: float) -> None:
        """How much to ask for at once, now that so many bytes have taken so long."""
        if seconds > self._patience / 2:
            self._most = max(_LEAST_RANGE, min(self._most, count // 4))
        elif seconds < self._patience / 8:
            self._most = max(self._most, 4 * count)

    async def _read_over(self, path: str) -> AsyncIterator[bytes]:
        """What has no known size can only be read from its beginning."""
        run = asyncio.get_running_loop().run_in_executor
        with await run(self._threads, self._fs.open, path, "rb") as file:
            while piece := await run(self._threads, file.read, PIECE):
                yield piece


def _asking(start: int, stop: int | None) -> dict[str, str]:
    """The headers that ask for a range of what is stored, and not of a compressed form of it."""
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}", "Accept-Encoding": "identity"}


def _no_limit() -> Any:
    """Streams of shards may take long; how long nothing may come is watched by whoever reads."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=30)


async def _get(session: Any, start: int, url: Any, **options: Any) -> Answer:
    """The answer to a request from byte ``start`` on."""
    import aiohttp

    try:
        response = await session.get(url, **options)
    except aiohttp.TooManyRedirects as error:
        status, story = error.history[-1].status, f"{len(error.history)} redirects, one after another, the last one by {error.history[-1].url.host}"
    except (aiohttp.InvalidURL, getattr(aiohttp, "NonHttpUrlClientError", aiohttp.InvalidURL)):
        status, story = 400, "it, or where it redirects to, is no address of a web server"
    else:
        return _heard(response, start)
    raise RefusedError(status, story)  # here, since those errors hold the URL with its secrets


def _heard(response: Any, start: int) -> Answer:
    """An aiohttp response as an answer."""
    try:
        headers = {name.lower(): value for name, value in response.headers.items()}
        if response.status >= 300:
            ranged = _CONTENT_RANGE.match(headers.get("content-range", ""))
            size = int(ranged[3]) if ranged and ranged[3] != "*" else None
            words = f"{response.status} {response.reason}"
            if response.history and response.url.origin() != response.history[0].url.origin():
                words += f", redirected to {response.url.host}:{response.url.port}, to which your headers are not sent"
            raise RefusedError(response.status, words, after=_after(headers.get("retry-after")), size=size)
        heard = _Heard(response)
        return replace(_described(response.status, headers, start), pieces=heard.pieces(), close=response.close, rest=heard.rest)
    except BaseException:
        response.close()
        raise


def _described(status: int, headers: Any, start: int) -> Answer:
    """What status and headers (with lower-case names) say of an answer to a request from byte ``start`` on."""
    if headers.get("content-encoding", "identity") not in ("", "identity", "aws-chunked"):
        raise RefusedError(400, f"it is stored with Content-Encoding {headers['content-encoding']}, in which bytes have no fixed places: store it without")
    if status not in _GIVING:
        raise FaultyError(f"an answer of status {status} holds nothing of it")
    length = headers.get("content-length")
    length = int(length) if length is not None and length.isdigit() else None
    tags = {name: re.sub("^[Ww]/", "", headers[name]) for name in _SAYING if headers.get(name)}  # weak ETags are as good here
    if status != 206:  # the range was ignored
        return Answer(0, length, length, tags, has_end_mark=length is not None or "chunked" in headers.get("transfer-encoding", "").lower())
    ranged = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if not ranged or ranged[1] is None:
        raise FaultyError(f"an answer to a request from byte {start} on does not say which bytes it holds")
    first, stop, size = int(ranged[1]), int(ranged[2]) + 1, None if ranged[3] == "*" else int(ranged[3])
    if size is not None and start >= size:  # some servers say so in this way
        raise RefusedError(416, f"it has {size} bytes", size=size)
    if first != start:
        raise FaultyError(f"an answer begins at byte {first} instead of {start}")
    if length is not None and length != stop - first:
        raise FaultyError(f"an answer says that it holds {stop - first} bytes, and that it is {length} long")
    return Answer(first, stop, size, tags)


class _Heard:
    """The bytes of an aiohttp response, as they come.

    A connection that is slower than this machine would wake it for every few packets, which costs more than the bytes. So the kernel is asked (SO_RCVLOWAT, see
    socket(7)) to gather what comes in some milliseconds, as long as so much is left to come: the next answer on this connection must not be held up.
    """

    def __init__(self, response: Any) -> None:
        self._response, self._left, connection = response, response.content_length, response.connection
        known = self._left is not None and connection is not None and connection.transport is not None
        # Linux looks again when this is lowered.
        self._socket: Any = connection.transport.get_extra_info("socket") if known and sys.platform == "linux" else None
        self._least, self._came = 1, 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            while piece := await self._response.content.readany():
                if self._socket is not None:
                    now, before, self._left = perf_counter(), self._came, self._left - len(piece)
                    rate = len(piece) / max(now - before, 1e-6) if before else 0
                    self._came = now
                    self._gather(int(min(_GATHERED, rate * _GATHER_SECONDS, self._left - _IN_RECORDS)))
                yield piece
        finally:
            self.rest()
            if self._timer is not None:
                self._timer.cancel()

    def rest(self) -> None:
        """Nothing will be read for a while, in which the answer may end."""
        if self._least > 1:
            self._gather(1)

    def _gather(self, count: int) -> None:
        least = 1 << max(1, count).bit_length() - 1
        if least != self._least:
            self._least = least
            with contextlib.suppress(OSError):  # it was closed meanwhile
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            if least > 1 and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_LONGEST_GATHERING, self._look)

    def _look(self) -> None:
        """Let go what was gathered, if the rest does not come as fast as it was thought to."""
        self._timer = None
        if perf_counter() - self._came >= _LONGEST_GATHERING:
            self.rest()
        elif self._least > 1:
            self._timer = asyncio.get_running_loop().call_later(_LONGEST_GATHERING, self._look)


async def _body_pieces(body: Any) -> AsyncIterator[bytes]:
    while piece := await body.read(PIECE):
        yield piece


async def one_piece(data: bytes) -> AsyncIterator[bytes]:
    """Bytes that are there, as pieces."""
    for place in range(0, len(data), PIECE):
        yield data[place : place + PIECE]


def _after(header: str | None) -> float | None:
    """The seconds of a Retry-After header."""
    if not header:
        return None
    try:
        return max(0.0, float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - time())
    except (TypeError, ValueError):
        return None


def _refused_by_s3(response: dict[str, Any], reason: str) -> RefusedError:
    told, error = response.get("ResponseMetadata", {}), response.get("Error", {})
    size = error.get("ActualObjectSize")
    code = error.get("Code")
    words = reason if code is None or str(code) in reason else f"{code}: {reason}"
    after = _after(told.get("HTTPHeaders", {}).get("retry-after"))
    status = 503 if code in _PASSING_CODES else told.get("HTTPStatusCode")
    return RefusedError(status, words, after=after, size=int(size) if size is not None else None)


class Verdict(NamedTuple):
    """What to make of an error: whether asking again may help, and in how many seconds at the earliest; else what to tell the user."""

    passing: bool
    after: float = 0.0
    advice: str = ""


_OWN_FAULT = (ImportError, TypeError, AttributeError, KeyError, NameError, NotImplementedError)


def judge(error: BaseException, protocol: str) -> Verdict:
    """What to make of an error of a store."""
    kind = type(error).__name__
    # aiohttp calls an answer that breaks off, or that it cannot understand, a status of 400.
    if kind == "ClientPayloadError" or isinstance(error, (ConnectionError, TimeoutError)) or _unparseable(error):
        return Verdict(True, advice="cannot be read")
    status = error.status if isinstance(error, RefusedError) else _status(error)
    if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
        return Verdict(False, advice="does not exist: check its name")
    if status in (401, 403) or (status is None and isinstance(error, PermissionError)) or "Credentials" in kind or "Forbidden" in words(error):
        return Verdict(False, advice=f"may not be read: check your credentials{_PUBLIC.get(protocol, '')}")
    if status is not None:
        return Verdict(status in _PASSING, getattr(error, "after", None) or 0.0, "cannot be read")
    if isinstance(error, (IsADirectoryError, NotADirectoryError, ValueError, *_OWN_FAULT)) or "Certificate" in kind or not isinstance(error, Exception):
        return Verdict(False, advice="cannot be read")
    return Verdict(True, advice="cannot be read")


_PUBLIC = {
    "s3": "; for public data pass storage_options={'anon': True}, for buckets whose readers pay {'requester_pays': True}",
    "gs": "; for public data pass storage_options={'token': 'anon'}, for buckets whose readers pay {'requester_pays': True}",
    "gcs": "; for public data pass storage_options={'token': 'anon'}, for buckets whose readers pay {'requester_pays': True}",
    "http": "; headers go into storage_options={'headers': {...}}",
    "https": "; headers go into storage_options={'headers': {...}}",
}


def _unparseable(error: BaseException) -> bool:
    """Whether an error, or what caused it, is an answer that some library could not understand."""
    return any(kind.__name__ in _UNPARSEABLE for each in causes(error) for kind in type(each).__mro__)


_UNPARSEABLE = {"HttpProcessingError", "ResponseParserError", "JSONDecodeError", "ParseError"}  # of aiohttp, botocore, and what reads JSON and XML


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of some library, or in what caused it."""
    for each in causes(error):
        for name in ("status", "status_code", "code"):
            if name == "code" and hasattr(each, "status"):  # of aiohttp's errors it is deprecated
                continue
            value = getattr(each, name, None) or getattr(getattr(each, "response", None), name, None)
            if isinstance(value, (int, str)) and str(value).isdigit() and 300 <= int(value) < 600:
                return int(value)
    return None


async def close_answer(answer: Answer) -> None:
    """Give an answer's connection up."""
    done = answer.close()
    if inspect.isawaitable(done):
        await done
