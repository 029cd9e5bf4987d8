"""URLs that stand for several shards: braces, globs, directories."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import braceexpand

from wds_pipes.io.secret import hide
from wds_pipes.io.urls import IPV6_HOST, Urls, at_home, links_of, local_path, redact

_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}|\{\d+\.\.")


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
            patterns = list(braceexpand.braceexpand(url, escape=False))
        except ValueError as error:
            raise ValueError(
                f"the braces in {redact(url)!r} do not match: write a range as {{000000..000011}}"
            ) from error
        return [shard for pattern in patterns for shard in _expand_glob(pattern, storage_options)]
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
