"""Create the file systems of fsspec with the user's options; what is special to some of them."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import sleep
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies
from weakref import WeakKeyDictionary

from wds_pipes.io.identity import OF_CONTENT
from wds_pipes.io.urls import links_of, options_for

_CONNECT_SECONDS = 5.0

# gcsfs logs the errors that it raises, with a traceback, and Python prints what no program handles.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())


def copy_of_options(options: Any) -> Any:
    """A copy of options: the caller may change its own later."""
    return {name: copy_of_options(value) for name, value in options.items()} if isinstance(options, dict) else options


def _guarded(protocol: str, options: dict[str, Any]) -> dict[str, Any]:
    return through_client(options) if protocol in ("http", "https") else options


def file_system(
    url: str,
    storage_options: dict[str, Any] | None,
    adapt: Callable[[str, dict[str, Any]], dict[str, Any]] = _guarded,
) -> tuple[Any, str]:
    """The file system of a URL, from fsspec's cache of instances, and the path in it.

    Args:
        url: the URL.
        storage_options: the options for fsspec.
        adapt: returns the options to use for a protocol. HTTP requests must go through
            ``_guarded_client``.
    """
    from fsspec.core import url_to_fs

    options = options_for(url, storage_options)
    if url.startswith("ais://"):
        url = aistore_url(url)
    links = links_of(url)
    for link in links:
        protocol = link.partition("://")[0]
        given = options.get(protocol, {}) if len(links) > 1 else options
        check_reachable(protocol, given)
        given = adapt(protocol, given)
        options = {**options, protocol: given} if len(links) > 1 else given
    return url_to_fs(url, **options)  # type: ignore[no-any-return]


def check_reachable(protocol: str, options: Mapping[str, Any]) -> None:
    """Raise ConnectionError early if Google's storage cannot be reached.

    gcsfs would first look for credentials at the metadata server of a Google machine, and then
    retry: that takes up to a minute.
    """
    if protocol not in ("gs", "gcs"):
        return
    from fsspec.config import conf

    options = {**conf.get("gs", {}), **conf.get("gcs", {}), **options}
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    endpoint = endpoint or f"https://storage.{os.environ.get('GOOGLE_CLOUD_UNIVERSE_DOMAIN') or 'googleapis.com'}"
    place = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    if getproxies() or options.get("session_kwargs") or place.hostname is None:
        # These may reach it in another way.
        return
    address = place.hostname, place.port or (80 if place.scheme == "http" else 443)
    for wait in (0.1, 0.2, 0.4, None):
        try:
            socket.create_connection(address, _CONNECT_SECONDS).close()
            return
        except OSError as error:
            if wait is None or isinstance(error, TimeoutError):
                raise ConnectionError(f"no connection to {place.hostname}: {error}") from None
        sleep(wait)


def protocols_of(fs: Any) -> list[str]:
    """The protocols of a file system."""
    return [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)


def lock_of(fs: Any) -> AbstractContextManager[Any]:
    """What the calls of a file system hold: a lock if they must run one at a time.

    fsspec reads all members of a tar through one open file, whose place is that of the last call,
    and all files of an FTP server through one connection.
    """
    single = None
    while fs is not None:
        single = fs if _SINGLE & {*protocols_of(fs)} else single
        fs = getattr(fs, "fs", None) or getattr(getattr(fs, "fo", None), "fs", None)  # which it reads through
    return nullcontext() if single is None else _locks.setdefault(single, threading.Lock())


_SINGLE = {"tar", "libarchive", "ftp"}
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_locks.clear)  # a thread of the parent may hold one


# What file systems call the value that changes with a file, the surest first.
_MARKS = (*OF_CONTENT, "mtime", "modificationTime", "modify", "LastModified", "last_modified", "modified")


def marks_of(info: Mapping[str, Any]) -> dict[str, str]:
    """The values that change with a file, by name, in what a file system says of it."""
    return {name: str(info[name]) for name in _MARKS if info.get(name)}


def missing_package(url: str) -> str:
    """How to install the package that the protocol of a URL needs."""
    extra = _EXTRAS.get(url.partition(":")[0])
    return "install the package that it names" if extra is None else f"pip install 'wds_pipes[{extra}]'"


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def aistore_url(url: str) -> str:
    """The URL of an AIStore object in the REST interface of the gateway."""
    endpoint = os.environ.get("AIS_ENDPOINT")
    if not endpoint:
        raise ValueError("ais:// needs the environment variable AIS_ENDPOINT, such as http://gateway:51080")
    bucket, _, name = url.removeprefix("ais://").partition("/")
    return f"{endpoint.rstrip('/')}/v1/objects/{bucket}/{quote(name)}?provider=ais"


async def _client(**options: Any) -> Any:
    """An aiohttp session without a limit of connections: each open shard has one."""
    import aiohttp

    if "connector" not in options:
        options["connector"] = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(**options)


async def _guarded_client(**options: Any) -> Any:
    """A ``_client`` that sends only ``_HARMLESS`` headers to another origin after a redirect.
    aiohttp itself withholds Authorization and cookies, except those of the session.
    """
    import aiohttp

    trace, auth, cookies = aiohttp.TraceConfig(), options.pop("auth", None), options.pop("cookies", None)

    async def begin(session: Any, context: Any, request: Any) -> None:
        # Add these as headers of the request: what belongs to the session is sent to all origins.
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
    return await _client(**options)


def through_client(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an HTTP file system whose requests go through ``_guarded_client``; through
    ``_client`` if there is nothing to guard, since aiohttp takes a sixth less time then.

    Cookies are passed to that client: aiohttp before 3.14 sends the cookies of a request to all
    origins.
    """
    from fsspec import get_filesystem_class
    from fsspec.config import apply_config

    made = apply_config(get_filesystem_class("http"), dict(options))
    if "get_client" not in made:
        session = dict(made.get("client_kwargs") or {})
        if made.get("cookies"):
            session["cookies"] = {**dict(session.get("cookies") or {}), **dict(made["cookies"])}
            made["cookies"] = None  # without it, fsspec would take the cookies of its configuration
        has_secrets = made.get("headers") or any(session.get(name) for name in ("headers", "auth", "cookies"))
        made |= {"client_kwargs": session, "get_client": _guarded_client if has_secrets else _client}
    return made  # type: ignore[no-any-return]


_HARMLESS = {"accept", "accept-encoding", "accept-language", "cache-control", "range", "user-agent"}


def _within_origin(response: Any) -> bool:
    """Whether a redirect has the same scheme, host and port as its request."""
    from yarl import URL

    try:
        target = response.url.join(URL(response.headers.get("Location") or response.headers.get("URI") or ""))
        return bool(target.origin() == response.url.origin())
    except ValueError:
        return False
