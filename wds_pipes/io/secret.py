"""What is secret in URLs, options and errors: how it is left out of messages, and which web servers
get it.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote_plus, unquote_plus, urlsplit

import braceexpand

from wds_pipes.io.urls import (
    HARMLESS,
    HARMLESS_VALUE,
    LINK,
    SECRET,
    Urls,
    links_of,
    local_path,
    parameters_of,
    redact,
    redact_anew,
    split_url,
)

_NAMED = re.compile(
    r"""(([\w-]{1,64})["']?\s*[=:]\s*["']?)(?:(?:bearer|basic|token)\s+)?[^\s"'&,;<>]+""", re.IGNORECASE
)
_MOST_WORDS = 500  # characters of an error of a library; a server may have sent more
_TARGET = re.compile(r"(?<=with url: )/[^\s'\"<>]*")  # of a request, in messages of urllib3


def hide(text: str, url: str = "", options: Any = None) -> str:
    """A library's message without credentials.

    Removed are those of ``url``, of other URLs in the message, and of ``options``
    (storage_options).
    """
    if url:
        text = text.replace(url, redact(url))
    text = LINK.sub(_shown_link, text)
    secrets = {*_secrets_of_url(url), *secrets_of(options)}
    encoded = {quote_plus(secret, errors="replace") for secret in secrets}  # as libraries encode them in URLs
    for secret in sorted(secrets | encoded, key=len, reverse=True):  # a library may show only a part
        text = text.replace(secret, "...")
    return _TARGET.sub(lambda found: redact_anew(found[0]), text)


def _shown_link(found: re.Match[str]) -> str:
    """A URL in a message without credentials; what follows it in the sentence stays."""
    link = found[0].rstrip(":,;)")
    return (link if found[1] in ("file", "local") else redact_anew(link)) + found[0][len(link) :]


def hide_named(text: str) -> str:
    """A text of a server without the secrets that it names, as in ``token=...``."""
    return _NAMED.sub(lambda found: f"{found[1]}..." if is_secret(found[2]) else found[0], text)


def words(error: BaseException, message: Callable[[BaseException], str] = str) -> str:
    """The beginning of the message of an error; a placeholder if its ``__str__`` fails.

    Args:
        error: the error.
        message: what returns its message, such as ``for_commands``.
    """
    try:
        text = message(error)
        return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]}..."
    except Exception:
        return "it says nothing"


def clean(error: BaseException | None, url: str = "", options: Any = None, *, depth: int = 10) -> BaseException | None:
    """A copy of ``error`` and its causes that may be shown.

    A copy has the same class and the message after ``hide``, but no other data of the original.
    """
    if error is None or depth == 0:
        return None
    message = hide(words(error), url, options)
    shown: BaseException
    try:
        shown = _stand_in(type(error), message)
    except Exception:  # its class cannot be created without its arguments
        shown = _stand_in(Exception, f"{type(error).__name__}: {message}")
    for note in getattr(error, "__notes__", ()):
        shown.add_note(hide(str(note), url, options))
    context = None if error.__suppress_context__ else error.__context__
    shown.__cause__ = clean(error.__cause__, url, options, depth=depth - 1)
    shown.__context__ = clean(context, url, options, depth=depth - 1)
    shown.__suppress_context__ = error.__suppress_context__
    return shown.with_traceback(error.__traceback__)


def _stand_in(kind: type[BaseException], message: str) -> BaseException:
    """An error of this class, created without calling its ``__init__``."""
    more = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": _message,
        "__repr__": _shown_error,
    }
    made: type[BaseException] = type(kind.__name__, (kind,), more)
    error = made.__new__(made, message)
    error.args = (message,)
    return error


def _message(error: BaseException) -> str:
    return str(error.args[0])


def _shown_error(error: BaseException) -> str:
    return f"{type(error).__name__}({str(error)!r})"


def _secrets_of_url(url: str) -> Iterator[str]:
    if not url or url.startswith("pipe:") or local_path(url) is not None:
        return
    found = re.search(r"://([^/?#]*)@", url)
    values = found[1].split(":") if found else []
    _, query, fragment = split_url(url)
    for part, name in parameters_of(f"{query or ''}&{fragment or ''}"):
        value = part.partition("=")[2] or part
        if not (HARMLESS.fullmatch(name) and HARMLESS_VALUE.fullmatch(value)):
            values += [value, unquote_plus(value)]
    yield from (value for value in values if len(value) >= _LEAST_SECRET)


# Characters. A shorter secret is not searched for in messages: it may occur there with another
# meaning.
_LEAST_SECRET = 6


def secrets_of(options: Any, name: str = "") -> Iterator[str]:
    """The secrets in storage_options, as text."""
    if isinstance(options, dict):
        for option, value in options.items():
            inside = name if is_secret(name) or name in _HOLD_SECRETS else str(option)
            yield from secrets_of(value, inside)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from secrets_of(value, name)
    elif (is_secret(name) or name in _HOLD_SECRETS) and isinstance(options, (str, bytes, int, float)):
        text = options.decode(errors="replace") if isinstance(options, bytes) else str(options)
        for part in {text, text.rpartition(" ")[2]}:  # the token of "Bearer x" may also occur alone
            if len(part) >= _LEAST_SECRET:
                yield part


_HOLD_SECRETS = ("headers", "cookies")


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret."""
    return SECRET.search(name) is not None


# Headers, cookies and passwords go only to the origins (scheme, host and port) of the URLs that the
# program itself has named: an index of shards may come from an untrusted place and name any web
# server. The storage options keep these origins, under this name.
ORIGINS = "__origins__"
_SERVER = re.compile(r"(?i)\bhttps?://[^/?#\s]+")
_WEB = re.compile(r"(?i)https?:")  # with tabs and ends of lines after it, which libraries leave out of a URL
_PORTS = {"http": 80, "https": 443}


def origins_of(urls: Urls) -> list[str] | None:
    """The origins that URLs, paths and lists of them (``@list.txt``) name. None: storage options
    are for all that is read, since the URLs name no store, or an index on this machine.
    """
    items = [urls] if isinstance(urls, (str, os.PathLike)) else urls
    texts: list[str] = [os.path.expandvars(os.fspath(item)) for item in items if isinstance(item, (str, os.PathLike))]
    for text in texts:
        if text.startswith("@"):
            with contextlib.suppress(OSError), open(os.path.expanduser(text[1:]), errors="replace") as lines:
                texts = [*texts, *(line.strip() for line in lines)]
    if not any("://" in text for text in texts) or any("://" not in text and ".json" in text for text in texts):
        return None
    return sorted({_origin(server) for text in texts for found in _SERVER.findall(text) for server in _expanded(found)})


def _expanded(server: str) -> Iterable[str]:
    """The servers that braces in a URL name."""
    with contextlib.suppress(ValueError):
        return list(braceexpand.braceexpand(server, escape=False))
    return [server]


def _origin(url: str) -> str:
    parts = urlsplit(url)
    try:
        return f"{parts.scheme}://{parts.hostname}:{parts.port or _PORTS[parts.scheme]}"
    except ValueError:  # its port is no number
        return url


def with_origins(options: dict[str, Any] | None, origins: list[str] | None) -> dict[str, Any] | None:
    """Storage options that go only to these web servers; None: to all."""
    return options if not options or origins is None else {**options, ORIGINS: origins}


def options_for(url: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """The storage options for a URL; none if they are not for its web server."""
    given = dict(options or {})
    origins = given.pop(ORIGINS, None)
    other = next(
        (link for link in links_of(url) if origins is not None and _WEB.match(link) and _origin(link) not in origins),
        None,
    )
    if other is None:
        return given
    warnings.warn(
        f"storage_options are not sent to {_origin(other)}, which only an index of another server names: they may "
        "hold credentials. If this server needs them, name the shards themselves in the program.",
        UserWarning,
        stacklevel=1,  # one place, so that it is said once
    )
    return {}
