"""URLs: which shards a user means, and how to show one without its secrets."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import braceexpand

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+:(//|:)")
_SECRET = re.compile(r"(?i)(sig|signature|token|credential|password|passwd|pwd|auth|secret|key|accesskeyid)$")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")


def local_path(url: str) -> str | None:
    """The path of a URL on this machine; None for a URL of somewhere else."""
    if url.startswith("file://"):
        return url.removeprefix("file://")
    if url.startswith("local://"):
        return url.removeprefix("local://")
    return None if _SCHEME.match(url) or url.startswith("pipe:") else url


def redact(url: str) -> str:
    """``url`` without user, password and secret query values (``...token=x``, ``X-Amz-Signature=x``): for messages, states and fingerprints."""
    if local_path(url) is not None:
        return url
    if url.startswith("pipe:"):
        return f"{url.split(maxsplit=1)[0]} ..." if " " in url else url
    url = re.sub(r"(://)[^/?#]*@", r"\1", url)
    path, question, query = url.partition("?")
    if not question:
        return url
    shown = []
    for part in query.split("&"):
        name, equals, _ = part.partition("=")
        shown.append(f"{name}=..." if equals and _SECRET.search(name) else part)
    return f"{path}?{'&'.join(shown)}"


def hide(text: str, url: str) -> str:
    """A message of some library without the credentials of ``url`` and of all other URLs in it."""
    return _URL.sub(lambda found: redact(found.group()), text.replace(url, redact(url)))  # a library may write the URL otherwise


def expand(urls: Urls, storage_options: dict[str, Any] | None = None) -> list[str]:
    """Every shard that ``urls`` names, in order.

    Args:
        urls: a URL or path, or several. Each may hold braces (``{000..011}``, ``{a,b}``, nested, with steps), or ``*``, ``?`` and ``[...]`` (sorted); a
            local directory means the ``*.tar*`` files in it, ``@list.txt`` the lines of a local text file. A path that exists is taken as it is.
        storage_options: for listing remote globs, as fsspec takes them.

    Raises:
        ValueError: nothing matches, or the list is empty.
        TypeError: something is neither a string nor a path.
    """
    if isinstance(urls, (str, os.PathLike)):
        urls = [urls]
    if not isinstance(urls, Iterable) or isinstance(urls, (bytes, dict)):
        raise TypeError(f"shards are named by a URL, a path or a list of them, not {urls!r}")
    found = [shard for url in urls for shard in _expand_one(url, storage_options)]
    if not found:
        raise ValueError("the list of shards is empty: name at least one")
    return found


def _expand_one(item: str | os.PathLike[str], storage_options: dict[str, Any] | None) -> Sequence[str]:
    if not isinstance(item, (str, os.PathLike)):
        raise TypeError(f"a shard is named by a string or a path, not {item!r}")
    url = os.fspath(item)
    if not isinstance(url, str) or not url:
        raise ValueError(f"a shard needs a name, not {url!r}")
    if url == "-":
        return [url]
    if url.startswith("@"):
        if not os.path.isfile(url[1:]):
            raise ValueError(f"the list of shards {url[1:]!r} does not exist; after '@' comes the path of a text file")
        with open(url[1:], encoding="utf-8") as lines:
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
        return _found(url, sorted(glob.glob(os.path.join(glob.escape(path), "*.tar*"))))
    if isinstance(item, str) and _BRACES.search(url):
        try:
            parts = list(braceexpand.braceexpand(url, escape=False))
        except ValueError as error:
            raise ValueError(f"the braces in {redact(url)!r} do not match") from error
        return [shard for part in parts for shard in _expand_glob(part, storage_options)]
    return _expand_glob(url, storage_options)


def _expand_glob(url: str, storage_options: dict[str, Any] | None) -> Sequence[str]:
    path = local_path(url)
    if path is not None:
        if not glob.has_magic(path) or os.path.exists(path):
            return [url]
        return _found(url, sorted(glob.glob(path, recursive=True)))
    # In a URL "?" starts a query; only what comes before it can be a pattern.
    if not ("*" in url.partition("?")[0] or "[" in url.partition("?")[0]) or url.startswith("pipe:"):
        return [url]
    from wds_pipes.io.stores import file_system

    fs, pattern = file_system(url, storage_options)
    return _found(url, [fs.unstrip_protocol(name) for name in sorted(fs.glob(pattern))])


def _found(url: str, shards: list[str]) -> list[str]:
    if not shards:
        raise ValueError(f"no shard matches {redact(url)!r}: check the pattern, the directory and the working directory ({os.getcwd()})")
    return shards
