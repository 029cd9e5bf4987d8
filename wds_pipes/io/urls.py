"""URLs: expand them to shards, identify their objects, and show them without secrets.

Rules:
1. What is shown (``redact``, ``hide``) contains only parameters that are known to be harmless: an
   unknown parameter may be a secret.
2. What identifies an object (``identify``) omits only parameters that are known to sign a URL: an
   unknown parameter may select the object. The result is hashed, never shown.
3. What is the same for an object and its copy elsewhere (``relative_names``) is its name below the
   common directory of all objects.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus, unquote, unquote_plus

import braceexpand

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+:(//|:)")
# The IPv6 address of a host in a URL: its brackets are not a pattern, and its colons not a chain of
# protocols.
IPV6_HOST = re.compile(r"(?<=[/@])\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%25[^\]/]*)?\](?=[:/?#]|$)")
# Parameters that are shown: they select an object, or a part or form of it.
_HARMLESS = re.compile(
    r"(?i)v(ersion(id)?)?|generation|snapshot|rev(ision)?|id|file(name)?|name|path|part(number)?|page|shard|split|index|epoch|format|provider|alt|download"
)
_HARMLESS_VALUE = re.compile(r"[A-Za-z0-9._,/+ -]{0,80}")
# Names of secrets in options and in parameters after a ";". The second pattern is for directories
# such as /hdnts=.../x.tar; it omits names that may also be columns of a partitioned table.
_SECRET = re.compile(
    r"(?i)(sig|signature|sign|token|credentials?|passw(or)?d|passphrase|pass|pwd|auth(orization)?|secret|key|keyid|accesskeyid|jwt|bearer|hmac|hdn(ts|ea|tl)"
    r"|policy|md5|code|session(id)?|sid|cookies?|connection_string)(__)?$"
)
_SECRET_DIRECTORY = re.compile(
    r"(?i)(sig|signature|token|passw(or)?d|pwd|authorization|secret|apikey|jwt|bearer|hmac|hdn(ts|ea|tl)|policy|sessionid)(__)?$"
)
# Parameters that sign a URL, and differ each time it is signed.
_SIGNING = re.compile(
    r"(?i)x-(amz|goog|oss|obs|cos)-(algorithm|credential|date|expires|signedheaders|signature(-version)?|(access|security)-token|content-sha256)|awsaccesskeyid"
    r"|googleaccessid|ossaccesskeyid|q-(ak|signature|(sign|key)-time|(header|url-param)-list|sign-algorithm)"
    r"|expires|signature|key-pair-id|hdn(ts|ea|tl)|__(token|gda)__|((access|auth|bearer|download|id|sas|secure|security|session)[-_]?)?token|jwt|bearer|hmac"
    r"|authorization|sig|password|passwd|pwd|(client[-_]?)?secret|(x-)?api[-_]?key|jsessionid|phpsessid"
)
_SIGNING_PATH = re.compile(r"(?i)(;|%3b)((access|auth)[-_]?)?token=[^/;]*|(?<=[/;~])hdn(ts|ea|tl)=[^/]*")
# Parameters that sign a URL only if it also has the parameter in the key; otherwise they may select
# the object.
_SIGNING_WITH = {
    "sig": re.compile(r"s[vrpte]|ss|srt|sip|spr|si|sk(oid|tid|t|e|s|v)|s[au]oid|scid|sdd|ses"),  # Azure SAS
    "key-pair-id": re.compile(r"policy|hash-algorithm"),  # CloudFront
    "expires": re.compile(r"md5"),  # nginx's secure_link
}
_USER_IS_A_PLACE = re.compile(r"(?i)(abfss?|wasbs?|az|adl)://")  # container@account
_TARGET = re.compile(r"(?<=with url: )/[^\s'\"<>]*")  # of a request, in messages of urllib3
# A URL in a text; the lookbehind keeps the search linear.
_LINK = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]*)(://[^\s'\"<>]+)")
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation"))
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}|\{\d+\.\.")


def local_path(url: str) -> str | None:
    """The path of a local URL; None for any other URL."""
    if url.startswith("file://"):
        return url.removeprefix("file://")
    if url.startswith("local://"):
        return url.removeprefix("local://")
    return None if _SCHEME.match(url) or url.startswith("pipe:") else url


def at_home(path: str) -> str:
    """A path with ``~`` replaced by the home directory; an existing path is not changed."""
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def links_of(url: str) -> list[str]:
    """The parts of a chained URL, ``a::b://c``; the URL itself if it is not chained."""
    addresses = [found.span() for found in IPV6_HOST.finditer(url)]
    cuts = [
        found.span()
        for found in re.finditer("::", url)
        if not any(start < found.start() < stop for start, stop in addresses)
    ]
    starts, stops = [0, *(stop for _, stop in cuts)], [*(start for start, _ in cuts), len(url)]
    return [url[start:stop] for start, stop in zip(starts, stops, strict=True)]


def redact(url: str) -> str:
    """``url`` for messages and states: without user and password.

    Of the parameters it has only those that are known to be harmless.
    """
    if url.startswith("pipe:"):
        return _command(url)
    return url if local_path(url) is not None else _redact(url)


def _redact(url: str) -> str:
    path, query, fragment = _split(_without_user(url))
    shown = _shown_path(path)
    if query is not None:
        parts = [
            part
            for part, name in _parameters(query)
            if _HARMLESS.fullmatch(name) and _HARMLESS_VALUE.fullmatch(part.partition("=")[2])
        ]
        hidden = ["..."] if len(parts) < len(list(_parameters(query))) else []
        shown += "?" + "&".join(parts + hidden)
    return shown if fragment is None else f"{shown}#..."


def plain(url: str) -> str:
    """``url`` without its secrets, to be written to a file.

    Unlike the result of ``redact`` it has no dots: a user with credentials can open it.
    """
    return redact(url).removesuffix("#...").removesuffix("?...").removesuffix("&...")


def _command(url: str) -> str:
    """The name of the program that a ``pipe:`` URL runs."""
    name = re.match(r"pipe:\s*([\w./+-]+)(?=(\s)|$)", url)
    return "pipe:..." if name is None else name[0] + (" ..." if name[2] else "")


def _without_user(url: str, keep: bool = False) -> str:
    """``url`` without the user and password before its hosts, or without the password if
    ``keep``.
    """
    url = re.sub(r"(://)([^/?#]*)@", lambda found: found[1] + (f"{found[2].partition(':')[0]}@" if keep else ""), url)
    # A password may contain characters that should be encoded: then no port follows the colon.
    odd = re.search(r"://(?=[^/?#@:\[\]]*:(?![0-9]*([/?#]|$)))", url)
    return url[: odd.end()] + url.rpartition("@")[2] if odd and "@" in url[odd.end() :] else url


def _is_web(url: str) -> bool:
    return url.partition("://")[0].rpartition(":")[2].lower() in ("http", "https")


def _split(url: str) -> tuple[str, str | None, str | None]:
    """Path, query and fragment of a URL.

    Only HTTP has fragments; in other stores a name may contain ``#``.
    """
    url, mark, fragment = url.partition("#") if _is_web(url) else (url, "", "")
    path, question, query = url.partition("?")
    return path, query if question else None, fragment if mark else None


def _shown_path(path: str) -> str:
    """A path without the secrets in it."""
    shown, before = [], ""
    for part in re.split(r"([/;~,&#]|%3[Bb])", path):
        name, equals, value = next(
            (part.partition(mark) for mark in ("=", "%3D", "%3d") if mark in part), (part, "", "")
        )
        secret = (
            (_SECRET_DIRECTORY if before in ("", "/") else _SECRET).search(unquote_plus(name))
            if equals and value
            else None
        )
        shown.append(f"{name}{equals}..." if secret else part)
        before = part
    return "".join(shown)


def _parameters(query: str) -> Iterator[tuple[str, str]]:
    """The parameters of a query: the original text of each, and its decoded name."""
    for part in re.split("[&;]", query):
        if part:
            yield part, unquote_plus(part.partition("=")[0]).strip()


@lru_cache(256)  # stages call it for each sample
def identify(url: str) -> str:
    """A text that identifies the object at ``url``, independent of credentials and signatures.

    Hash it, since it may contain secrets.
    """
    if url.startswith("pipe:"):
        return _LINK.sub(lambda found: _identify(found[0]), url)
    return url if local_path(url) is not None else _identify(url)


def _identify(url: str) -> str:
    path, query, _ = _split(_without_user(url, keep=_USER_IS_A_PLACE.match(url) is not None))
    named = _SIGNING_PATH.sub("", path) if _is_web(url) else path
    if query is None:
        return named
    parameters = [(part, name.lower()) for part, name in _parameters(query)]
    names = {name for _, name in parameters}
    if "signature" in names:
        # The signature is that of S3 or GCS, so md5 is an ordinary parameter.
        names.discard("expires")
    signing = [_SIGNING, *(more for mark, more in _SIGNING_WITH.items() if mark in names)]
    kept = [part for part, name in parameters if not any(pattern.fullmatch(name) for pattern in signing)]
    return f"{named}?{'&'.join(kept)}" if kept else named


def relative_names(urls: Sequence[str]) -> list[str]:
    """The names of objects below their common directory, the same in each copy of that directory.

    Hash them, since they may contain secrets. The common directory itself is not part of the names,
    unless it has the name of a split, such as ``train``: ``val/0.tar`` is not a copy of
    ``train/0.tar``. A command is a name as a whole, and so is a URL of a file in another file
    (``zip://0.tar::...``). A query that does not sign the URL is the end of a name.
    """
    split = [_folder_and_name(url) for url in urls]
    folders = {folder: _directories(folder) for folder in dict.fromkeys(folder for folder, _ in split)}
    first, last = min(folders.values()), max(folders.values())
    common = next(
        (number for number, (one, other) in enumerate(zip(first, last, strict=False)) if one != other),
        min(len(first), len(last)),
    )
    if common and first[common - 1].lower() in _SPLITS:
        common -= 1
    below = {folder: "".join(f"{name}/" for name in names[common:]) for folder, names in folders.items()}
    return [below[folder] + name for folder, name in split]


def _folder_and_name(url: str) -> tuple[str | None, str]:
    """A URL up to its last slash, and the rest; None and all of it if it has no directory."""
    path = local_path(url)
    if path is not None:
        folder, slash, name = path.replace(os.sep, "/").rpartition("/")
        return folder + slash, name
    if url.startswith("pipe:") or "://" in url.rpartition("::")[0]:
        return None, identify(url)
    path, question, query = identify(url).partition("?")
    folder, slash, name = path.rpartition("/")
    return folder + slash, (unquote(name) if _is_web(url) else name) + question + query


def _directories(folder: str | None) -> list[str]:
    """The scheme, the host or bucket, and the directories of a URL that ends in a slash.

    For a local path, these are the directories from the root on.
    """
    if folder is None:
        return []
    path = local_path(folder)
    if path is None:
        scheme, _, path = folder.partition("://")
        return [scheme, *(unquote(name) if _is_web(folder) else name for name in path.split("/") if name)]
    with contextlib.suppress(OSError):  # the working directory was removed
        path = os.path.abspath(path)
    return ["", *(name for name in path.replace(os.sep, "/").split("/") if name)]


def hide(text: str, url: str = "", options: Any = None) -> str:
    """A library's message without credentials.

    Removed are those of ``url``, of other URLs in the message, and of ``options``
    (storage_options).
    """
    if url:
        text = text.replace(url, redact(url))
    text = _LINK.sub(lambda found: found[0] if found[1] in ("file", "local") else _redact(found[0]), text)
    secrets = {*_secrets_of_url(url), *secrets_of(options)}
    for secret in sorted({*secrets, *map(_quoted, secrets)}, key=len, reverse=True):
        # A library may show only a part, or encode it.
        text = text.replace(secret, "...")
    return _TARGET.sub(lambda found: _redact(found[0]), text)


def _quoted(secret: str) -> str:
    """A secret as libraries encode it in URLs."""
    return quote_plus(secret, errors="replace")


def words(error: BaseException) -> str:
    """The message of an error; a placeholder if its ``__str__`` fails."""
    try:
        return str(error)
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
    _, query, fragment = _split(url)
    for part, name in _parameters(f"{query or ''}&{fragment or ''}"):
        value = part.partition("=")[2] or part
        if not (_HARMLESS.fullmatch(name) and _HARMLESS_VALUE.fullmatch(value)):
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
    return _SECRET.search(name) is not None


def expand(urls: Urls, storage_options: dict[str, Any] | None = None) -> list[str]:
    """The URLs of all shards that ``urls`` names, in order.

    Args:
        urls: a URL or path, or several. Each may contain braces (``{000..011}``, ``{a,b}``, nested,
            with steps), or ``*``, ``?`` and ``[...]`` (the matches are sorted). A directory means
            the ``*.tar*`` files in it (one in a store ends in ``/``), ``@list.txt`` the lines of a
            local text file. The path of an existing file is not expanded.
        storage_options: options for fsspec, to list patterns in a store.

    Raises:
        ValueError: nothing matches, or the list is empty.
        ShardError: a store cannot be listed.
        TypeError: an item is neither a string nor a path.
    """
    if isinstance(urls, (str, os.PathLike)):
        urls = [urls]
    if not isinstance(urls, Iterable) or isinstance(urls, (bytes, dict)):
        raise TypeError(f"shards are named by a URL, a path or a list of them, not {hide(repr(urls)):.200}")
    found = [shard for url in urls for shard in _expand_one(url, storage_options)]
    if not found:
        raise ValueError("the list of shards is empty: name at least one")
    return found


def _expand_one(item: str | os.PathLike[str], storage_options: dict[str, Any] | None) -> Sequence[str]:
    if not isinstance(item, (str, os.PathLike)):
        raise TypeError(f"a shard is named by a string or a path, not {hide(repr(item)):.200}")
    url = os.fspath(item)
    if not isinstance(url, str) or not url:
        raise ValueError(f"a shard needs a name, not {url!r}")
    if url == "-":
        return [url]
    url = at_home(url)
    if url.startswith("@"):
        if not os.path.isfile(at_home(url[1:])):
            raise ValueError(f"the list of shards {url[1:]!r} does not exist; after '@' comes the path of a text file")
        with open(at_home(url[1:]), encoding="utf-8") as lines:
            names = [line.strip() for line in lines if line.strip()]
        if any(name.startswith("@") for name in names):
            raise ValueError(f"the list {url[1:]!r} names another list: name the shards themselves")
        if any(name.startswith("pipe:") for name in names):
            raise ValueError(f"the list {url[1:]!r} names a command: write it into the program, since it is run there")
        return [shard for name in names for shard in _expand_one(name, storage_options)]
    path = local_path(url)
    if path is not None and os.path.isfile(path):
        return [url]
    if path is not None and os.path.isdir(path):
        return sorted(glob.glob(os.path.join(glob.escape(path), "*.tar*"))) or _no_tars(url, path)
    if isinstance(item, str) and _BRACES.search(url):
        try:
            parts = list(braceexpand.braceexpand(url, escape=False))
        except ValueError as error:
            raise ValueError(
                f"the braces in {redact(url)!r} do not match: write a range as {{000000..000011}}"
            ) from error
        return [shard for part in parts for shard in _expand_glob(part, storage_options)]
    return _expand_glob(url, storage_options)


def _expand_glob(url: str, storage_options: dict[str, Any] | None) -> Sequence[str]:
    path = local_path(url)
    if path is not None:
        if not glob.has_magic(path) or os.path.exists(path):
            return [url]
        return _found(url, sorted(glob.glob(path, recursive=True)))
    # In a URL, "?" starts a query: only the part before it can be a pattern.
    named = IPV6_HOST.sub("", url.partition("?")[0])
    folder = url.endswith("/") and "?" not in url and len(links_of(url)) == 1
    if not ("*" in named or "[" in named or folder) or url.startswith("pipe:"):
        return [url]
    from wds_pipes.io.listing import list_shards

    return list_shards(f"{url}*.tar*" if folder else url, storage_options)


def _no_tars(url: str, path: str) -> list[str]:
    with os.scandir(path) as entries:
        other = next((entry.name for entry in entries if not entry.name.startswith(".")), None)
    holds = (
        "it is empty"
        if other is None
        else (f"it holds other files, such as {other!r}, and shards are tars: write them with ShardWriter")
    )
    raise ValueError(
        f"no shard matches {redact(url)!r}, a directory without *.tar* files: {holds}. The "
        f"working directory is {os.getcwd()}."
    )


def _found(url: str, shards: list[str]) -> list[str]:
    if not shards:
        raise ValueError(
            f"no shard matches {redact(url)!r}: check the pattern, the directory and the working "
            f"directory ({os.getcwd()})"
        )
    return shards
