"""Responses of a store: where their bytes begin, how many they are, and of which object; and its
errors: whether a retry makes sense, and what the message says.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import re
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import perf_counter, time
from typing import Any, NamedTuple, NoReturn

from wds_pipes.errors import ShardError, StateError, causes
from wds_pipes.io.urls import hide_named, redact, words

RECORD = 512  # bytes: if a tar ends before a multiple of this, only padding is missing
CHUNK_BYTES = 1 << 18  # of streams that are read with read(n)
# Wake this process for this many bytes, or for those of this time (seconds) if they are fewer.
_GATHERED, _GATHER_SECONDS = 1 << 18, 0.006
_LONGEST_GATHERING = 0.05  # seconds
_IN_RECORDS = 1 << 15  # bytes that TLS may have taken from the kernel and not returned yet
# Error codes of S3 after which a request is retried, even with status 400.
_TRANSIENT_CODES = {
    "RequestTimeout",
    "RequestTimeoutException",
    "Throttling",
    "ThrottlingException",
    "RequestThrottled",
    "SlowDown",
}
# Error codes of S3 for credentials, sometimes with status 400.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "TokenRefreshRequired"}
_WITH_BYTES = {200, 203, 206}  # statuses of responses with bytes of the object
# Headers that change with the object (the validators of RFC 9110), the surest first.
_VALIDATORS = ("x-goog-generation", "etag", "last-modified")
_WEAK = re.compile("^[Ww]/")  # at the beginning of an ETag
# Of the body of a refusal: how long to wait for it in seconds, how many bytes to read, and how many
# characters to show.
_LONGEST_REASON, _MOST_REASON, _REASON = 1.0, 2000, 200
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass
class Response:
    """A response of a store.

    Attributes:
        start: the first byte of the response, counted in the object.
        stop: the byte after its last one; None: unknown.
        size: the size of the whole object in bytes; None: unknown.
        validators: values that change with the object, such as its ETag, by name, the surest
            first; see ``changed``.
        chunks: the bytes, as they arrive.
        has_end_mark: whether the transfer declares its end, by its length or a mark, so that a cut
            is detected.
        close: closes the connection.
        rest: called when nothing will be read for a while.
    """

    start: int
    stop: int | None
    size: int | None
    validators: dict[str, str]
    chunks: AsyncGenerator[bytes, None] = field(default_factory=lambda: in_chunks(b""))
    close: Callable[[], Any] = lambda: None
    rest: Callable[[], None] = lambda: None
    has_end_mark: bool = True


def changed(before: dict[str, str], now: dict[str, str]) -> tuple[str, str] | None:
    """The two values of the first common validator of two responses, if they differ; otherwise
    None.

    If they differ, the object has changed. A validator that only one of them has is ignored.
    """
    both = next((name for name in now if name in before), None)
    return None if both is None or before[both] == now[both] else (before[both], now[both])


class RemoteObject:
    """What is known of a remote shard as a whole: every response must be of the same object. All
    that read ranges of it share it.

    Args:
        url: where it is.
        expected: how many bytes it must have; None: any number.

    Attributes:
        expected: as above.
        reported_size: its size in bytes that the store has reported; None: not known (yet).
        validators: values that change with the object, such as its ETag, by name.
        end_is_vouched_for: False once it has ended where only its connection did: the store
            reported no length and no end mark, so it may have been cut there.
        ignores_ranges: whether the store always sends it from its beginning: then all the rest is
            requested at once.
    """

    def __init__(self, url: str, expected: int | None = None) -> None:
        self._url, self.expected = url, expected
        self.reported_size: int | None = None
        self.validators: dict[str, str] = {}
        self.ignores_ranges, self.end_is_vouched_for = False, True

    @property
    def size(self) -> int | None:
        """Its size in bytes, reported or expected; None: not known (yet)."""
        return self.expected if self.reported_size is None else self.reported_size

    @property
    def etag(self) -> str | None:
        """Its ETag, or another validator of the store; None: not known (yet)."""
        return next(iter(self.validators.values()), None)

    def check(self, response: Response, at: int) -> None:
        """Check the response to a request for the bytes from ``at`` on, and keep what it reports
        about the object.

        Raises:
            ShardError: it is of another object, or the object has not the expected size.
            StateError: the object ends before ``at``.
        """
        size = response.size
        if self.expected is not None and size is not None and size != self.expected:
            self.refuse_size(size)
        if self.expected is not None and response.stop is not None and response.stop > self.expected:
            self.refuse_size("more")
        if None not in (size, self.reported_size) and size != self.reported_size:
            self.refuse_change(at, self.reported_size, size)
        if differing := changed(self.validators, response.validators):
            self.refuse_change(at, *differing)
        self.ignores_ranges = self.ignores_ranges or response.start < at
        self.validators |= response.validators | self.validators
        if size is not None:
            self.reported_size = size
            if size <= at - RECORD:
                self.refuse_end(at, size)

    def refuse_end(self, at: int, size: int | None) -> NoReturn:
        """Raise StateError: the object ends before ``at``."""
        has = "fewer" if size is None else f"only {size}"
        raise StateError(
            f"the state stands at byte {at} of shard {redact(self._url)}, which has {has}: it was changed since."
        )

    def refuse_change(self, at: int, before: object, now: object) -> NoReturn:
        """Raise ShardError: the object became another one."""
        url = redact(self._url)
        raise ShardError(
            f"shard {url} was changed while it was read ({before} became {now}), byte {at}. "
            "Write shards under new names, and start this epoch again.",
            url=url,
            offset=at,
        )

    def refuse_size(self, size: object) -> NoReturn:
        """Raise ShardError: the object has another size than was expected."""
        url = redact(self._url)
        raise ShardError(
            f"shard {url} has {size} bytes, and {self.expected} were expected. Make the index "
            "again, or restore the shard.",
            url=url,
        )


class RefusedError(OSError):
    """A store refused a request.

    Attributes:
        status: the HTTP status; None: there is none.
        wait_seconds: how long the store requests to wait (Retry-After), or None.
        size: the size of the object, if the requested range is outside of the object (416).
    """

    def __new__(cls, status: int | str | None, reason: str = "", **_: Any) -> RefusedError:
        # a copy for users is made of a message alone, see secret.clean
        return super().__new__(_KINDS.get(status, cls), reason)

    def __init__(
        self, status: int | None, reason: str, *, wait_seconds: float | None = None, size: int | None = None
    ) -> None:
        super().__init__(reason)
        self.status, self.wait_seconds, self.size = status, wait_seconds, size


class MissingError(RefusedError, FileNotFoundError):
    """There is no such object."""


class ForbiddenError(RefusedError, PermissionError):
    """The object may not be read."""


_KINDS: dict[int | str | None, type[RefusedError]] = {404: MissingError, 401: ForbiddenError, 403: ForbiddenError}


class FaultyError(OSError):
    """A response that cannot be right."""


def range_headers(start: int, stop: int | None) -> dict[str, str]:
    """The headers that request a range of the stored bytes, and not of a compressed form of
    them.
    """
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}", "Accept-Encoding": "identity"}


async def request_by_http(session: Any, start: int, url: Any, **options: Any) -> Response:
    """Send a request for the bytes from ``start`` on; return the response."""
    import aiohttp

    try:
        # A body that is compressed on the way is refused by its header, also if no library here
        # unpacks it.
        http_response = await session.get(url, auto_decompress=False, **options)
    except aiohttp.TooManyRedirects as error:
        status = error.history[-1].status
        reason = f"{len(error.history)} redirects, one after another, the last one by {error.history[-1].url.host}"
    except (aiohttp.InvalidURL, getattr(aiohttp, "NonHttpUrlClientError", aiohttp.InvalidURL)):
        status, reason = 400, "it, or where it redirects to, is no address of a web server"
    else:
        return await _from_http(http_response, start)
    # Outside of the handlers: those errors contain the URL with its secrets.
    raise RefusedError(status, reason)


async def _from_http(found: Any, start: int) -> Response:
    """The response of aiohttp ``found`` as a ``Response``."""
    try:
        headers = found.headers  # their names may be in any case
        if found.status >= 300:
            ranged = _CONTENT_RANGE.match(headers.get("content-range", ""))
            size = int(ranged[3]) if ranged and ranged[3] != "*" else None
            reason = f"{found.status} {found.reason}"
            if found.history and found.url.origin() != found.history[0].url.origin():
                reason += f", redirected to {found.url.host}:{found.url.port}, to which your headers are not sent"
            reason += await _said(found)
            raise RefusedError(found.status, reason, wait_seconds=_retry_after(headers.get("retry-after")), size=size)
        body = HttpBody(found)
        response = response_of(found.status, headers, start)
        response.chunks, response.close, response.rest = body.chunks(), body.close, body.rest
        return response
    except BaseException:
        found.close()
        raise


async def _said(found: Any) -> str:
    """What the body of a refusal says, for the end of a message; empty if it is not for users."""
    with contextlib.suppress(Exception):  # it may break off, or stall
        async with asyncio.timeout(_LONGEST_REASON):
            text = (await found.content.read(_MOST_REASON)).decode("utf-8", "replace")
        if found.content_type != "text/html" and "\ufffd" not in text[:-4]:
            return f": {reason_in(text)}" if text.strip() else ""
    return ""


def reason_in(body: str) -> str:
    """The first words of a response, without secrets."""
    message = re.search(r"<Message>([^<]+)", body)
    code = re.search(r"<Code>([^<]+)", body)
    text = f"{code[1]}: {message[1]}" if code and message else re.sub(r"<(\w*)[^>]*>", r" \1: ", body)
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return hide_named(text)[:_REASON]


def response_of(status: int, headers: Any, start: int) -> Response:
    """The response to a request from byte ``start`` on, by its status and headers, still without
    its bytes.

    The names of the headers are in lower case, or may be in any case.
    """
    if headers.get("content-encoding", "identity") not in ("", "identity", "aws-chunked"):
        raise RefusedError(
            400,
            f"it is stored with Content-Encoding {headers['content-encoding']}, in which bytes "
            "have no fixed places: store it without",
        )
    if status not in _WITH_BYTES:
        raise FaultyError(f"a response of status {status} has none of its bytes")
    length = headers.get("content-length")
    length = int(length) if length is not None and length.isdigit() else None
    # Weak ETags are good enough here.
    validators = {name: _WEAK.sub("", value) for name in _VALIDATORS if (value := headers.get(name))}
    if status != 206:  # the server ignored the range
        return Response(
            0,
            length,
            length,
            validators,
            has_end_mark=length is not None or "chunked" in headers.get("transfer-encoding", "").lower(),
        )
    ranged = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if not ranged or ranged[1] is None:
        raise FaultyError(f"a response to a request from byte {start} on does not say which bytes it has")
    first, stop, size = int(ranged[1]), int(ranged[2]) + 1, None if ranged[3] == "*" else int(ranged[3])
    if size is not None and start >= size:  # some servers refuse such a range in this way
        raise RefusedError(416, f"it has {size} bytes", size=size)
    if first != start:
        raise FaultyError(f"a response begins at byte {first} instead of {start}")
    if length is not None and length != stop - first:
        raise FaultyError(
            f"a response has a Content-Range of {stop - first} bytes, and a Content-Length of {length} bytes"
        )
    return Response(first, stop, size, validators)


class HttpBody:
    """The bytes of an aiohttp response, as they arrive.

    A slow connection would wake this process for every few packets, which costs more time than the
    bytes themselves. So the option SO_RCVLOWAT (see socket(7)) makes the kernel collect the bytes
    of some milliseconds before it wakes the process. This stops near the end of the response, so
    that the next response on this connection is not delayed.
    """

    def __init__(self, response: Any) -> None:
        self._response, self._left, connection = response, response.content_length, response.connection
        known = self._left is not None and connection is not None and connection.transport is not None
        # Linux wakes a waiting reader when this value is lowered.
        self._socket: Any = connection.transport.get_extra_info("socket") if known and sys.platform == "linux" else None
        self._least, self._came = 1, 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            while chunk := await self._response.content.readany():
                if self._socket is not None:
                    now, before, self._left = perf_counter(), self._came, self._left - len(chunk)
                    rate = len(chunk) / max(now - before, 1e-6) if before else 0
                    self._came = now
                    self._gather(int(min(_GATHERED, rate * _GATHER_SECONDS, self._left - _IN_RECORDS)))
                yield chunk
        finally:
            self.rest()
            if self._timer is not None:
                self._timer.cancel()

    def rest(self) -> None:
        """Stop collecting: nothing will be read for a while, and the response may end meanwhile."""
        if self._least > 1:
            self._gather(1)

    def close(self) -> None:
        """Close the connection, if the response has not ended."""
        if not self._response.closed:
            self._response.close()

    def _gather(self, count: int) -> None:
        least = 1 << max(1, count).bit_length() - 1
        if least != self._least:
            self._least = least
            with contextlib.suppress(OSError):  # the socket was closed meanwhile
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            if least > 1 and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_LONGEST_GATHERING, self._look)

    def _look(self) -> None:
        """Release what was collected, if the bytes come more slowly than expected."""
        self._timer = None
        if perf_counter() - self._came >= _LONGEST_GATHERING:
            self.rest()
        elif self._least > 1:
            self._timer = asyncio.get_running_loop().call_later(_LONGEST_GATHERING, self._look)


async def body_chunks(body: Any) -> AsyncGenerator[bytes, None]:
    """The bytes of a body with ``read(n)``, in chunks."""
    while chunk := await body.read(CHUNK_BYTES):
        yield chunk


async def in_chunks(data: bytes) -> AsyncGenerator[bytes, None]:
    """Bytes that have arrived already, in chunks."""
    for place in range(0, len(data), CHUNK_BYTES):
        yield data[place : place + CHUNK_BYTES]


def _retry_after(header: str | None) -> float | None:
    """The seconds of a Retry-After header."""
    if not header:
        return None
    try:
        return max(
            0.0, float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - time()
        )
    except (TypeError, ValueError):
        return None


def refused_by_s3(found: dict[str, Any], message: str) -> RefusedError:
    """The error for a request that S3 refused, from botocore's response ``found``."""
    metadata, error = found.get("ResponseMetadata", {}), found.get("Error", {})
    size = error.get("ActualObjectSize")
    code = error.get("Code")
    reason = message if code is None or str(code) in message else f"{code}: {message}"
    wait_seconds = _retry_after(metadata.get("HTTPHeaders", {}).get("retry-after"))
    status = 503 if code in _TRANSIENT_CODES else 401 if code in _EXPIRED else metadata.get("HTTPStatusCode")
    return RefusedError(status, reason, wait_seconds=wait_seconds, size=int(size) if size is not None else None)


async def close_response(response: Response) -> None:
    """Close the connection of a response."""
    await response.chunks.aclose()
    done = response.close()
    if inspect.isawaitable(done):
        await done


# Statuses after which a retry makes sense. 304 is one: it responds to a condition that was never
# sent.
_TRANSIENT = {304, 408, 425, 429, *range(500, 600)}
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 15.0  # seconds before a request is made again
EARLY_TRIES = 3  # for a server that never responded: its name may be wrong


class Verdict(NamedTuple):
    """How to handle an error.

    Attributes:
        transient: whether a retry may help.
        wait_seconds: how long to wait before a retry, at least.
        what: the words for the message if there is no further retry.
        mend: what to do then.
        public: what readers of public data can do, in words of Python and of the command line.
    """

    transient: bool
    wait_seconds: float = 0.0
    what: str = "cannot be read"
    mend: str = ""
    public: tuple[str, str] = ("", "")
    missing: bool = False  # the object does not exist
    forbidden: bool = False  # it may not be read, or it does not exist and its directory may not be listed
    of_data: bool = True  # it may be the fault of this object; otherwise that of the store, the network or a program
    has_response: bool = False  # the store has responded, with an error

    def pause(self, tries: int) -> float:
        """The seconds to wait after so many tries: from half to the whole of a time that doubles.
        So many readers do not come back at once.
        """
        usual = min(_FIRST_WAIT * (1 << min(tries, 32)) / 2, _LONGEST_WAIT)
        return max(self.wait_seconds, usual * random.uniform(0.5, 1))


_OWN_FAULT = (ImportError, TypeError, AttributeError, KeyError, NameError, NotImplementedError)


def judge(error: BaseException, protocol: str) -> Verdict:
    """How to handle an error of a store."""
    error = actual(error)
    kind = type(error).__name__
    # aiohttp reports status 400 for a response that breaks off or that it cannot parse.
    if (
        kind == "ClientPayloadError"
        or isinstance(error, (ConnectionError, TimeoutError))
        or _is_one_of(error, _UNPARSEABLE)
    ):
        return Verdict(True, of_data=not _is_one_of(error, _NO_CONNECTION))
    status = error.status if isinstance(error, RefusedError) else _status(error)
    if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
        return Verdict(False, what="does not exist", mend="check its name", missing=True)
    if (
        status in (401, 403)
        or (status is None and isinstance(error, PermissionError))
        or "Credentials" in kind
        or "Forbidden" in words(error)
    ):
        public, mend = _PUBLIC.get(protocol, ("", "")), "check your credentials"
        return Verdict(False, 0.0, "may not be read", mend, public, forbidden=True, of_data=False)
    if status is not None:
        wait_seconds = getattr(error, "wait_seconds", None) or 0.0
        transient = status in _TRANSIENT
        return Verdict(transient, wait_seconds, of_data=not transient, has_response=True)
    if (
        isinstance(error, (IsADirectoryError, NotADirectoryError, ValueError, *_OWN_FAULT))
        or "Certificate" in kind
        or not isinstance(error, Exception)
    ):
        return Verdict(False, of_data=isinstance(error, (IsADirectoryError, NotADirectoryError)))
    return Verdict(True, of_data=not _is_one_of(error, _NO_CONNECTION))


def actual(error: BaseException) -> BaseException:
    """The error of a request that fsspec's file system for HTTP has made a FileNotFoundError: it
    does so with all of them.
    """
    cause = error.__cause__
    of_request = isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and cause is not None and of_request else error


_GCS = (
    "; for public data pass storage_options={'token': 'anon'}, for buckets whose readers pay {'requester_pays': True}",
    """; for public data pass --storage-options '{"token": "anon"}', for buckets whose readers pay """
    """'{"requester_pays": true}'""",
)
_WEB = (
    "; headers go into storage_options={'headers': {...}}",
    """; headers go into --storage-options '{"headers": {"Authorization": "..."}}'""",
)
_PUBLIC = {
    "s3": (
        "; for public data pass storage_options={'anon': True}, for buckets whose readers pay {'requester_pays': True}",
        """; for public data pass --storage-options '{"anon": true}', for buckets whose readers pay """
        """'{"requester_pays": true}'""",
    ),
    "gs": _GCS,
    "gcs": _GCS,
    "http": _WEB,
    "https": _WEB,
}


def _is_one_of(error: BaseException, names: set[str]) -> bool:
    """Whether an error, or one of its causes, is of a class with one of these names."""
    return any(kind.__name__ in names for each in causes(error) for kind in type(each).__mro__)


# A library could not parse a response: of aiohttp, botocore, and parsers of JSON and XML.
_UNPARSEABLE = {"HttpProcessingError", "ResponseParserError", "JSONDecodeError", "ParseError"}
# There is no connection to the store: of Python, aiohttp and botocore.
_NO_CONNECTION = {"ConnectionRefusedError", "gaierror", "ClientConnectorError", "EndpointConnectionError"}


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of a library, or in one of its causes."""
    for each in causes(error):
        with contextlib.suppress(Exception):  # what it has as an attribute may be code that fails
            refusal = getattr(each, "response", None)
            if isinstance(refusal, dict):  # of botocore
                return refused_by_s3(refusal, "").status
            # ``code`` is deprecated in aiohttp's errors, which have a status
            names = ("status", "status_code", *(() if hasattr(each, "status") else ("code",)))
            for value in (getattr(holder, name, None) for name in names for holder in (each, refusal)):
                if isinstance(value, (int, str)) and str(value).isdigit() and 300 <= int(value) < 600:
                    return int(value)
    return None
