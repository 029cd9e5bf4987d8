"""URLs: which objects they identify; what is secret in them, in options and in errors, how it is
left out of messages, and which web servers get it.

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
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus, unquote, unquote_plus, urlsplit

import braceexpand

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


Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+:(//|:)")
# Parameters that are shown: they select an object, or a part or form of it.
HARMLESS = re.compile(
    r"(?i)v(ersion(id)?)?|generation|snapshot|rev(ision)?|id|file(name)?|name|path|part(number)?|page|shard|split|index|epoch|format|provider|alt|download"
)
HARMLESS_VALUE = re.compile(r"[A-Za-z0-9._,/+ -]{0,80}")
# Names of secrets in options and in parameters after a ";". The second pattern is for directories
# such as /hdnts=.../x.tar; it omits names that may also be columns of a partitioned table.
SECRET = re.compile(
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
# A URL in a text; the lookbehind keeps the search linear.
LINK = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]*)(://[^\s'\"<>]+)")
_IPV6_HOST = re.compile(r"://(?:[^/]*@)?\[[^\]/]*:")
_QUERY = re.compile(r"\?(?=[A-Za-z][\w.-]*=)")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# The protocols of fsspec that read from the file or store that the next part of a chained URL
# names.
_CHAINED = re.compile(r"async_?wrapper|blockcache|cached|dask|dir|filecache|libarchive|reference|simplecache|tar|zip")
_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation"))


def local_path(url: str) -> str | None:
    """The path of a local URL; None for any other URL."""
    if ":" not in url:  # no scheme; an index has a hundred thousand such names
        return url
    for scheme in ("file://", "local://", "file:"):
        if url.startswith(scheme):
            return url.removeprefix(scheme)
    return None if _SCHEME.match(url) or url.startswith("pipe:") else url


def is_below(name: str) -> bool:
    """Whether a name is a plain one: of something in a directory or below it, wherever that is."""
    return bool(name) and not name.startswith("/") and {".", ".."}.isdisjoint(name.split("/"))


def below(folder: str, name: str) -> str:
    """The path or URL of a file below a directory. Names that were read from data come here: an
    absolute one, and one with ``..``, would be another file of this machine.

    Raises:
        ValueError: the name leads out of the directory.
    """
    if not is_below(name):
        raise ValueError(
            f"{name!r} is no name of a file below {redact(folder)}: names have no '..' and begin with no '/'"
        )
    return os.path.join(folder, name)


def at_home(path: str) -> str:
    """A path with ``~`` replaced by the home directory; an existing path is not changed."""
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def links_of(url: str) -> list[str]:
    """The parts of a chained URL, ``a::b://c``; the URL itself if it is not chained.

    Raises:
        ValueError: a host is an IPv6 address, whose colons would be taken for a chain.
    """
    if _IPV6_HOST.search(url) is not None:
        raise ValueError(f"{redact(url)!r} has an IPv6 address, which is not read: name the host instead")
    return url.split("::")


def split_joined(url: str) -> list[str]:
    """The URLs that ``::`` joins, ``a.tar::b.tar``.

    A chained URL of fsspec, ``simplecache::s3://...`` or ``zip://a.tar::b.zip``, is one of them,
    and so is a command, up to the next command. ``::`` in braces does not join.
    """
    if "::" not in url:
        return [url]
    joined: list[str] = []
    within = False
    for link in links_of(url):
        if within or (joined and joined[-1].startswith("pipe:") and not link.startswith("pipe:")):
            joined[-1] += f"::{link}"
        else:
            joined.append(link)
        within = _CHAINED.fullmatch(link.partition("://")[0]) is not None or joined[-1].count("{") > joined[-1].count(
            "}"
        )
    return joined


def with_variables(url: str) -> str:
    """``url`` with each ``${NAME}`` replaced by this environment variable. A command is not
    changed: its shell does the same.

    Raises:
        ValueError: a variable is not set.
    """
    return url if url.startswith("pipe:") else VARIABLE.sub(_value, url)


def _value(variable: re.Match[str]) -> str:
    value = os.environ.get(variable[1])
    if value is None:
        raise ValueError(
            f"the environment variable {variable[1]} is not set: a URL contains {variable[0]}. "
            "Set it before the program starts, or write the path itself."
        )
    return value


def restored(path: str) -> str:
    """The URL that a ``pathlib.Path`` has shortened to ``s3:/bucket``; any other path unchanged."""
    if ":" not in path:
        return path
    scheme = re.match(r"(?!file:)[a-zA-Z][\w+.-]+:(?=/[^/])", path)
    return path if scheme is None or os.path.isdir(scheme[0]) else f"{scheme[0]}/{path[scheme.end() :]}"


def redact(url: str) -> str:
    """``url`` for messages and states: without user and password.

    Of the parameters it has only those that are known to be harmless.
    """
    if url.startswith("pipe:"):
        return _command(url)
    return url if local_path(url) is not None else redact_anew(url)


def redact_anew(url: str) -> str:
    """``redact`` of a URL that is no path, for texts that are not worth a place in its cache."""
    path, query, fragment = split_url(_without_user(url))
    shown = _shown_path(path)
    if query is not None:
        parts = [
            part
            for part, name in parameters_of(query)
            if HARMLESS.fullmatch(name) and HARMLESS_VALUE.fullmatch(part.partition("=")[2])
        ]
        hidden = ["..."] if len(parts) < len(list(parameters_of(query))) else []
        shown += "?" + "&".join(parts + hidden)
    return shown if fragment is None else f"{shown}#..."


def without_secrets(url: str) -> str:
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


def split_url(url: str) -> tuple[str, str | None, str | None]:
    """Path, query and fragment of a URL.

    Only HTTP has fragments; in other stores a name may contain ``#``, and also ``?`` if no
    ``name=value`` follows.
    """
    if not _is_web(url):
        path, *query = _QUERY.split(url, maxsplit=1)
        return path, query[0] if query else None, None
    url, mark, fragment = url.partition("#")
    path, question, query_of_web = url.partition("?")
    return path, query_of_web if question else None, fragment if mark else None


def _shown_path(path: str) -> str:
    """A path without the secrets in it."""
    shown, before = [], ""
    for part in re.split(r"([/;~,&#]|%3[Bb])", path):
        name, equals, value = next(
            (part.partition(mark) for mark in ("=", "%3D", "%3d") if mark in part), (part, "", "")
        )
        secret = (
            (_SECRET_DIRECTORY if before in ("", "/") else SECRET).search(unquote_plus(name))
            if equals and value
            else None
        )
        shown.append(f"{name}{equals}..." if secret else part)
        before = part
    return "".join(shown)


def parameters_of(query: str) -> Iterator[tuple[str, str]]:
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
        return LINK.sub(lambda found: _identify(found[0]), url)
    return url if local_path(url) is not None else _identify(url)


def _identify(url: str) -> str:
    path, query, _ = split_url(_without_user(url, keep=_USER_IS_A_PLACE.match(url) is not None))
    named = _SIGNING_PATH.sub("", path) if _is_web(url) else path
    if query is None:
        return named
    parameters = [(part, name.lower()) for part, name in parameters_of(query)]
    names = {name for _, name in parameters}
    if "signature" in names:
        # The signature is that of S3 or GCS, so md5 is an ordinary parameter.
        names.discard("expires")
    signing = [_SIGNING, *(more for mark, more in _SIGNING_WITH.items() if mark in names)]
    kept = [part for part, name in parameters if not any(pattern.fullmatch(name) for pattern in signing)]
    return f"{named}?{'&'.join(kept)}" if kept else named


def is_signed(url: str) -> bool:
    """Whether a URL of a web server contains its own permission, which expires."""
    query = split_url(url)[1] if _is_web(url) else None
    return query is not None and any(_SIGNING.fullmatch(name) for _, name in parameters_of(query))


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
