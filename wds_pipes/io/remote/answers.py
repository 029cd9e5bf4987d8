"""What a store answers: where its bytes begin, how long they are, of which object."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from time import perf_counter, time
from typing import Any

PIECE = 1 << 18  # of stores that are read and not heard
_GATHERED, _GATHER_SECONDS = 1 << 18, 0.006  # how many bytes, and those of how long, are worth to be woken for
_LONGEST_GATHERING = 0.05  # seconds
_IN_RECORDS = 1 << 15  # bytes that TLS may have taken from the kernel and not given yet
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


def asking(start: int, stop: int | None) -> dict[str, str]:
    """The headers that ask for a range of what is stored, and not of a compressed form of it."""
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}", "Accept-Encoding": "identity"}


async def ask_by_http(session: Any, start: int, url: Any, **options: Any) -> Answer:
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
        heard = Heard(response)
        return replace(described(response.status, headers, start), pieces=heard.pieces(), close=response.close, rest=heard.rest)
    except BaseException:
        response.close()
        raise


def described(status: int, headers: Any, start: int) -> Answer:
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


class Heard:
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


async def body_pieces(body: Any) -> AsyncIterator[bytes]:
    """The bytes of a body that is read in pieces."""
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


def refused_by_s3(response: dict[str, Any], reason: str) -> RefusedError:
    """What S3 said in its answer to a request that it refused, as an error."""
    told, error = response.get("ResponseMetadata", {}), response.get("Error", {})
    size = error.get("ActualObjectSize")
    code = error.get("Code")
    words = reason if code is None or str(code) in reason else f"{code}: {reason}"
    after = _after(told.get("HTTPHeaders", {}).get("retry-after"))
    status = 503 if code in _PASSING_CODES else told.get("HTTPStatusCode")
    return RefusedError(status, words, after=after, size=int(size) if size is not None else None)


async def close_answer(answer: Answer) -> None:
    """Give an answer's connection up."""
    done = answer.close()
    if inspect.isawaitable(done):
        await done
