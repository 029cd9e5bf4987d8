"""URLs that stand for several shards: braces, globs, directories."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from glob import has_magic
from typing import Any

import braceexpand

from wds_pipes.core.counts import logger
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.once import once
from wds_pipes.io.urls import (
    VARIABLE,
    Urls,
    at_home,
    hide,
    links_of,
    local_path,
    redact,
    restored,
    split_joined,
    split_url,
    with_variables,
)

_LISTED = 6  # so many names have the order of their directory by chance once in 720 times
_BRACES = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}|\{\d+\.\.")
_PATTERN = re.compile(rf"[*?[]|{_BRACES.pattern}")  # braces, or what ``has_magic`` looks for


def expand(urls: Urls, storage_options: dict[str, Any] | None = None) -> list[str]:
    """The URLs of all shards that ``urls`` names, in order.

    Args:
        urls: a URL or path, or several, in a list or joined by ``::``. Each may contain braces
            (``{000..011}``, ``{a,b}``, nested, with steps), or ``*``, ``?`` and ``[...]`` (the
            matches are sorted; ``[?]`` is a ``?`` itself, and in a URL of a web server ``?`` begins
            the query). A directory means the tars in it, ``*.tar``, ``*.tar.gz``, ``*.tgz`` and the
            like (one in a store, or whose own name is such a one, ends in ``/``), ``@list.txt`` the
            lines of a local text file. ``${NAME}`` is an environment variable. The path of an
            existing file is not expanded.
        storage_options: options for fsspec, to list patterns in a store.

    Raises:
        ValueError: nothing matches, the list is empty, or an environment variable is not set.
        ShardError: a store cannot be listed.
        TypeError: an item is neither a string nor a path.
    """
    return [shard for shards in expand_each(urls, storage_options) for shard in shards]


def expand_each(urls: Urls, storage_options: dict[str, Any] | None = None) -> list[list[str]]:
    """The result of ``expand``, with a list for each of the URLs that ``urls`` lists or joins."""
    found = [list(_expand_one(url, storage_options)) for item in items_of(urls) for url in urls_of(item)]
    if not any(found):
        raise ValueError("the list of shards is empty: name at least one")
    return found


def items_of(urls: Urls) -> list[str | os.PathLike[str]]:
    """Return what ``urls`` lists, in order.

    Raises:
        TypeError: it is neither a string, a path nor a list, or has no order.
    """
    if isinstance(urls, (str, os.PathLike)):
        return [urls]
    if isinstance(urls, (set, frozenset)):
        raise TypeError("a set of shards has another order in each process, so ranks would differ: pass sorted(urls)")
    if not isinstance(urls, Iterable) or isinstance(urls, (bytes, dict)):
        raise TypeError(f"shards are named by a URL, a path or a list of them, not {hide(repr(urls)):.200}")
    return list(urls)


def in_sure_order(urls: Urls, *, sort: bool) -> list[str | os.PathLike[str]]:
    """Return what ``urls`` lists, sorted if it has the order in which a file system lists files, as
    ``Path.glob`` and ``os.listdir`` do: that order differs from machine to machine.

    Raises:
        ValueError: it has that order, and may not be sorted.
    """
    items = items_of(urls)
    names = [os.fspath(item) for item in items if isinstance(item, (str, os.PathLike))]
    if names == sorted(names) or not (isinstance(urls, Iterator) or _is_listing(names)):
        return items
    if not sort:
        raise ValueError(
            f"the shards, from {redact(names[0])!r} on, have the order in which the file system lists them, which "
            "differs from machine to machine: pass sorted(urls), or, if this order is meant, a text file with it, as "
            "'@list.txt'"
        )
    logger.warning(
        "the list of shards is sorted, since Path.glob() and os.listdir() give another order on each machine: pass "
        "sorted(urls)."
    )
    return sorted(items, key=os.fspath)


def _is_listing(names: list[str]) -> bool:
    """Whether names of files have the order in which their directory lists them, and not by
    chance.
    """
    folders = {os.path.dirname(name) for name in names}
    folder = local_path(at_home(next(iter(folders)) or os.curdir)) if len(folders) == 1 else None
    if folder is None or len(names) < _LISTED or names == sorted(names, reverse=True) or not os.path.isdir(folder):
        return False
    bases = dict.fromkeys(map(os.path.basename, names))
    return [name for name in os.listdir(folder) if name in bases] == list(bases)


def urls_of(item: str | os.PathLike[str]) -> list[str]:
    """The URLs that an item joins, with environment variables replaced."""
    if not isinstance(item, (str, os.PathLike)):
        raise TypeError(f"a shard is named by a string or a path, not {hide(repr(item)):.200}")
    url = os.fspath(item)
    if not isinstance(url, str) or not url:
        raise ValueError(f"a shard needs a name, not {url!r}")
    whole = restored(url)
    if whole != url:
        raise ValueError(f"a '/' is missing in {redact(whole)!r}, which a pathlib.Path shortens: pass the URL as a str")
    if ("::" not in url and "${" not in url) or _exists(url):
        return [url]
    urls = []
    for part in _joined(url):
        whole = with_variables(part)
        if whole == part:
            urls.append(part)
        else:
            parts = _joined(whole)
            _without_commands(parts, "an environment variable")
            urls += parts
    return urls


def _joined(url: str) -> list[str]:
    parts = split_joined(url)
    if not url:
        raise ValueError("a shard needs a name: the environment variable that a URL consists of is empty")
    if not all(parts):
        raise ValueError(f"'::' joins URLs, and one before or after it is missing in {hide(url)!r}")
    return parts


def _without_commands(urls: list[str], where: str) -> None:
    """Raise ValueError if a command is among ``urls``, which come from ``where``."""
    if any(url.startswith("pipe:") for url in urls):
        raise ValueError(f"{where} names a command: write it into the program, since it is run there")


def _exists(url: str) -> bool:
    path = local_path(at_home(url))
    return path is not None and os.path.exists(path)


def _expand_one(url: str, storage_options: dict[str, Any] | None) -> Sequence[str]:
    if url == "-":
        return [url]
    url = at_home(url)
    if url.startswith("@"):
        return _listed(at_home(url[1:]), storage_options)
    path = local_path(url)
    if path is not None and TAR_NAME.fullmatch(path, path.rfind("/") + 1) and not _PATTERN.search(url):
        return [url]  # a list may have a hundred thousand of them: the system is not asked
    if path is not None and os.path.isfile(path):
        return [url]
    if path is not None and os.path.isdir(path):
        found = sorted(name for name in os.listdir(path) if TAR_NAME.fullmatch(name))
        return [os.path.join(path, name) for name in found] or _no_tars(url)
    if _BRACES.search(url):
        try:
            patterns = list(braceexpand.braceexpand(url, escape=False))
        except ValueError as error:
            raise ValueError(
                f"the braces in {redact(url)!r} do not match: write a range as {{000000..000011}}"
            ) from error
        if not url.startswith("pipe:"):
            _without_commands(patterns, "a URL with braces")
        return [shard for pattern in patterns for shard in _expand_glob(at_home(pattern), storage_options)]
    return _expand_glob(url, storage_options)


def _listed(path: str, storage_options: dict[str, Any] | None) -> list[str]:
    """The shards that the lines of a text file name. The file may come from elsewhere: it names no
    command, and reads no environment variable.
    """
    if not os.path.isfile(path):
        raise ValueError(f"the list of shards {path!r} does not exist; after '@' comes the path of a text file")
    with open(path, encoding="utf-8-sig") as lines:
        names = [line.strip() for line in lines if line.strip()]
    found: list[str] = []
    for url in (url for name in names for url in (_joined(name) if "::" in name and not _exists(name) else [name])):
        if url.startswith("@"):
            raise ValueError(f"the list {path!r} names another list: name the shards themselves")
        _without_commands([url], f"the list {path!r}")
        for shard in _expand_one(url, storage_options):  # braces may have made a variable
            if (variable := VARIABLE.search(shard)) is not None and not _exists(shard):
                raise ValueError(
                    f"the list {path!r} contains {variable[0]}: environment variables are replaced only in URLs "
                    "of the program, since a list may come from elsewhere"
                )
            found.append(shard)
    return found


def _expand_glob(url: str, storage_options: dict[str, Any] | None) -> Sequence[str]:
    path = local_path(url)
    if path is not None:
        if not has_magic(path) or os.path.exists(path):
            return [url]
        found = sorted(glob.glob(path, recursive=True))
        if not found:
            raise ValueError(
                f"no shard matches {redact(url)!r}: check the pattern, the directory and the working "
                f"directory ({os.getcwd()})"
            )
        # a file may be named like a URL, such as "pipe:x.tar"
        return [name if local_path(name) == name else os.path.join(os.curdir, name) for name in found]
    named = split_url(url)[0]  # a query is no pattern
    folder = url.endswith("/") and "?" not in url and len(links_of(url)) == 1
    if not (any(mark in named for mark in "*?[") or folder) or url.startswith("pipe:"):
        return [url]
    from wds_pipes.io.listing import list_matching

    return once("a listing of", url, lambda: list_matching(url, storage_options, folder=folder))


def _no_tars(url: str) -> list[str]:
    raise ValueError(
        f"no shard matches {redact(url)!r}, a directory without tars (*.tar, *.tar.gz, *.tgz, ...): name those in its "
        f"directories as {os.path.join(url, '*', '*.tar')!r}, or write shards with wds-pipes create. The working "
        f"directory is {os.getcwd()}."
    )
