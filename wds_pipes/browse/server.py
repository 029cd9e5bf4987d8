"""The pages over HTTP, on this machine only.

Rules:
1. The server listens on 127.0.0.1. Every URL begins with a random token; without it, everything is
   403. The token is in the links and not in a cookie, which other servers of this machine would
   get. Pages send no ``Referer``.
2. ``Host`` must name this machine, so that no other site can reach the server by a name of its own
   that it resolves to 127.0.0.1 (DNS rebinding).
3. Only GET. A field is sent as a download without a type, but for audio and video, which have fixed
   types.
4. A page is made in a thread, and has a deadline. When it passes, or the browser has closed the
   connection, the page stops at its next step; a thread that waits for a store until then is
   replaced. So no page waits for another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from aiohttp import web

from wds_pipes.browse.data import SECONDS, Budget
from wds_pipes.browse.fields import MEDIA
from wds_pipes.browse.pages import Pages, static_files
from wds_pipes.errors import WdsError, for_commands
from wds_pipes.io.compression import unreadable
from wds_pipes.io.threads import DaemonThreads
from wds_pipes.tools.reading import Member

T = TypeVar("T")
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_TYPES = {"css": "text/css", "js": "text/javascript"}
_CHUNK = 1 << 20  # bytes that are sent at once
_PAGES = 8  # that are made at once
_GRACE = 10.0  # seconds for the last step of a page
_CHECKED = 600.0  # seconds of a page for which a shard is checked, which reads it to its end
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'self'; "
    "script-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server:
    """Serves the pages of a data set.

    Args:
        pages: the pages.
        token: what every URL begins with; None: a random one.

    Attributes:
        app: the application of aiohttp.
        token: the token.
    """

    def __init__(self, pages: Pages, token: str | None = None) -> None:
        self.pages, self.token = pages, token or secrets.token_urlsafe(18)
        self._renderers, self._readers = DaemonThreads(_PAGES), DaemonThreads(4)  # the readers send media
        self._static = static_files()
        self.app = web.Application(middlewares=[self._guard])
        self.app.on_response_prepare.append(_add_headers)
        for path, handler in (
            ("/{token}/", self._index),
            ("/{token}/go", self._go),
            (r"/{token}/{kind:raw|media}-{shard:\d{1,15}}-{number:\d{1,15}}-{field:\d{1,15}}", self._field),
            ("/{token}/{name}", self._page),
        ):
            self.app.router.add_get(path, handler)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if _HOST.fullmatch(request.headers.get("Host", "")) is None:
            return web.Response(status=403, text="The name of the host is not that of this server.\n")
        token = request.path.strip("/").partition("/")[0]
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return web.Response(status=403, text="The URL lacks the token that wds-pipes browse has printed.\n")
        try:
            return await handler(request)
        except LookupError as error:
            return self._error(str(error.args[0] if error.args else error), 404)
        except TimeoutError as error:
            return self._error(str(error), 504)
        except (WdsError, OSError, ImportError) as error:
            missing = getattr(error, "missing", False) or isinstance(error, FileNotFoundError)
            return self._error(for_commands(error), 404 if missing else 200)

    def _error(self, message: str, status: int) -> web.Response:
        return web.Response(text=self.pages.error(message), content_type="text/html", status=status)

    async def _render(self, function: Callable[[Budget], T], seconds: float = SECONDS) -> T:
        """Call a function in a thread; ``seconds``: in which it begins its steps.

        Raises:
            TimeoutError: it has not ended.
        """
        budget = Budget(seconds)
        try:
            return await self._run(self._renderers, partial(function, budget), seconds + _GRACE)
        finally:
            budget.end()

    async def _run(self, where: DaemonThreads, function: Callable[[], T], seconds: float = SECONDS + _GRACE) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(where, function)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"It has not come in {seconds:.0f} s. Load this page again.") from error

    async def _index(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"/{self.token}/shards-1.html")

    async def _page(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name in self._static:
            return web.Response(body=self._static[name], content_type=_TYPES[name.rpartition(".")[2]])
        options, seconds = dict(request.query), _CHECKED if request.query.get("verify") == "1" else SECONDS
        text = await self._render(lambda budget: self.pages.page(name, options, budget), seconds)
        return web.Response(text=text, content_type="text/html")

    async def _go(self, request: web.Request) -> web.StreamResponse:
        wanted, key = (request.query.get(name, "").strip() for name in ("sample", "key"))
        shard = request.query.get("shard", "")
        looked_at = int(shard) if re.fullmatch(r"\d{1,15}", shard, re.ASCII) else None
        data = self.pages.data
        find = partial(data.find_key, key, looked_at) if key else partial(data.find, wanted, looked_at)
        place = await self._render(find)
        raise web.HTTPFound(f"/{self.token}/sample-{place[0]}-{place[1]}.html")

    async def _field(self, request: web.Request) -> web.StreamResponse:
        """Send a field, or a range of its bytes."""
        shard, number, field = (int(request.match_info[name]) for name in ("shard", "number", "field"))
        with contextlib.ExitStack() as stack:
            look = self.pages.data.look(shard, number, 1, whole=False)
            view = await self._run(self._readers, lambda: stack.enter_context(look))
            if not view.found or field >= len(view.found[0].members):
                raise LookupError("there is no such field")
            member = view.found[0].members[field]
            part = _range(request, member.size)
            if part is None:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{member.size}"})
            headers = {**self._type_of(request, member), "Accept-Ranges": "bytes"}
            if "Range" in request.headers:
                headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{member.size}"
            response = web.StreamResponse(status=206 if "Range" in request.headers else 200, headers=headers)
            response.content_length = len(part)
            await response.prepare(request)
            for at in part[::_CHUNK] if request.method == "GET" else ():
                read = partial(view.bytes_at, member.offset + at, min(_CHUNK, part.stop - at))
                try:
                    if data := await self._run(self._readers, read):
                        await response.write(data)
                except unreadable():  # of the shard, or the browser has closed the connection
                    data = b""
                if not data:  # too late for a page that says so: without a close, the browser waits for the rest
                    request.protocol.force_close()
                    break
        return response

    def _type_of(self, request: web.Request, member: Member) -> dict[str, str]:
        """Return the headers that say what a field is."""
        if request.match_info["kind"] == "raw":
            name = "-".join(request.match_info[part] for part in ("shard", "number", "field"))
            disposition = f'attachment; filename="sample-{name}"'
            return {"Content-Type": "application/octet-stream", "Content-Disposition": disposition}
        kind = MEDIA.get(member.field.rpartition(".")[2])
        if kind is None:
            raise LookupError("the field is neither audio nor video")
        return {"Content-Type": kind}


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _range(request: web.Request, size: int) -> range | None:
    """Return the bytes that a request wants; None: there are none of them."""
    try:
        part = range(size)[request.http_range]
    except ValueError:
        return None
    return part if part or "Range" not in request.headers else None


async def serve(server: Server, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until the task is cancelled.

    Args:
        server: the server.
        port: where it listens; 0: a free one.
        on_ready: called with the URL of the first page.

    Raises:
        ValueError: the port is in use.
    """
    runner = web.AppRunner(server.app, access_log=None, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise ValueError(f"port {port} cannot be used ({why}): name another one, or none for a free one") from error
        on_ready(f"http://127.0.0.1:{runner.addresses[0][1]}/{server.token}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
