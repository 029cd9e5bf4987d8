"""Find the entry of an index for each shard. Without torch.

A name in an index is relative to the place of the index. It means the shard whose path has the
longest end in common with it, at least the base name. If an entry could mean two shards, or a shard
two entries, that is an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

from wds_pipes.core.words import plural
from wds_pipes.errors import mended
from wds_pipes.io.expand import expand, urls_of
from wds_pipes.io.outputs import info_of, size_of
from wds_pipes.io.packed import Packed
from wds_pipes.io.urls import Urls, at_home, local_path, redact
from wds_pipes.tar.index import (
    MEND,
    Facts,
    Index,
    Options,
    ShardFacts,
    base_name,
    check_named,
    folder_of,
    parts_of_path,
    path_of,
    read_indexes,
)
from wds_pipes.tar.offsets import MEND as MEND_OFFSETS
from wds_pipes.tar.offsets import OFFSETS, beside, unusable

_Parts = tuple[str, ...]

# File names of an index in the directory of its shards.
_BESIDE = ("index.json", "sizes.json")


# Reading


def is_index(url: str) -> bool:
    """Whether a URL in a list of shards names an index: its path ends in ``.json``."""
    return path_of(url).lower().endswith(".json")


def listed_shards(urls: Sequence[str], storage_options: Options = None) -> list[Index]:
    """What each of several index files lists.

    Raises:
        ValueError: an index is damaged, or lists no shards to open.
        ShardError: an index cannot be read.
    """
    indexes = read_indexes(urls, storage_options)
    for index in indexes:
        if not index.shards:
            raise mended(
                ValueError,
                f"index {redact(index.url)} does not list shards",
                mend="name the shards, and pass it as index=",
                mend_cli="name the shards",
            )
        check_named(index.url, index.shards)
    return indexes


def list_shards(urls: Urls, storage_options: Options = None) -> tuple[Packed, Facts | None]:
    """Return the shards that URLs or indexes name, and the facts in the indexes, if these are
    indexes.

    Raises:
        ValueError: nothing matches, or an index is damaged.
        ShardError: a store cannot be listed, or an index cannot be read.
    """
    found = expand(urls, storage_options)
    return joined(listed_shards(found, storage_options)) if any(map(is_index, found)) else (Packed(found), None)


def joined(indexes: Sequence[Index]) -> tuple[Packed, Facts]:
    """The shards of several indexes, and what these say about them."""
    if len(indexes) == 1:
        return indexes[0].shards, indexes[0].facts
    facts = Facts()
    for index in indexes:
        facts.extend(index.facts, index.facts.versions)
    return Packed(chain.from_iterable(index.shards for index in indexes)), facts


class Listed(NamedTuple):
    """The shards of a data set whose samples are read by their offsets.

    Attributes:
        urls: the shards.
        facts: what an ``index.json`` says of each; None: there is none.
        folder: the directory of the indexes of offsets; None: they are beside the shards.
    """

    urls: Packed
    facts: Facts | None
    folder: str | None


def list_indexed(urls: Urls, index: bool | str | os.PathLike[str] = True, storage_options: Options = None) -> Listed:
    """List the shards of URLs or of an ``index.json``, whose indexes of offsets are where ``index``
    says: True: beside the shards; a directory; or beside them, and the path of an ``index.json``,
    which has the numbers of samples.

    Raises:
        TypeError: ``index`` is something else.
        ValueError: nothing matches, or an ``index.json`` is damaged.
        ShardError: a store cannot be listed, or an ``index.json`` cannot be read.
    """
    if index is False or not isinstance(index, (bool, str, os.PathLike)):
        raise TypeError(f"index must be True, a directory or an index.json, not {index!r:.80}")
    shards, facts = list_shards(urls, storage_options)
    if "-" in shards:
        raise ValueError("standard input has no index: write it to a file first")
    where = None if isinstance(index, bool) else at_home(os.fspath(index))
    if where is None or not is_index(where):
        if where is not None and len(names := {path_of(url).rpartition("/")[2] for url in shards}) < len(shards):
            raise ValueError(
                f"the shards have {len(names)} names, such as {min(names)!r:.200}, and are {len(shards)}: a directory "
                "has one index for each name. Write the indexes beside the shards"
            )
        return Listed(shards, facts, where)
    return Listed(shards, find_facts(shards, where, storage_options), None)


def find_facts(urls: Sequence[str], index: Urls | bool, storage_options: Options = None) -> Facts:
    """What an index says about each of ``urls``.

    Args:
        urls: the shards.
        index: paths or URLs of index files, or directories with one; True for the directories of
            the shards.
        storage_options: options for fsspec.

    Raises:
        ValueError: the index is damaged, or there is none; a shard is not in it, or several entries
            may mean the shard.
        ShardError: the index cannot be read.
    """
    if index is not True and (not isinstance(index, (str, os.PathLike, Iterable)) or isinstance(index, (bytes, dict))):
        raise TypeError(f"index must be the path or URL of an index, a list of them, or True, not {index!r:.80}")
    files: list[str] = []
    offsets: dict[str, int] = {}  # the numbers of samples that indexes of offsets say
    if index is True:
        folders: dict[str, list[str]] = {}
        for url in urls:
            folders.setdefault(folder_of(url), []).append(url)
        for folder, shards in folders.items():
            _look_in(folder, shards, storage_options, files, offsets)
    else:
        items = [index] if isinstance(index, (str, os.PathLike)) else index
        for name in (at_home(url) for item in items for url in urls_of(item)):
            if name.endswith("/") or os.path.isdir(local_path(name) or ""):
                _look_in(name.rstrip("/") + "/", urls, storage_options, files, offsets)
            else:
                files += expand(name, storage_options)
    indexes = read_indexes(files, storage_options) if files else []
    listed = (zip(index.shards, index.facts, index.facts.versions, strict=True) for index in indexes)
    by_sizes = ((path_of(url), ShardFacts(samples), "") for url, samples in offsets.items())
    matcher = _Matcher([*offsets, *(index.url for index in indexes)], chain(by_sizes, *listed))
    found, versions = zip(*map(matcher.find, urls), strict=True)
    facts = Facts()
    facts.extend(found, versions)
    return facts


def _look_in(
    folder: str, shards: Sequence[str], storage_options: Options, files: list[str], offsets: dict[str, int]
) -> None:
    """Add the index in a directory: the first kind that exists, in a fixed order. An index of
    offsets is one file per shard, and its size says the number of samples.
    """
    for name in _BESIDE:
        if exists(folder + name, storage_options):
            files.append(folder + name)
            return
    if exists(beside(shards[0], OFFSETS, folder), storage_options):
        each = list(dict.fromkeys(beside(shard, OFFSETS, folder) for shard in shards))
        local = local_path(each[0]) is not None
        sizes = list(map(_size, each)) if local else _sizes_in_store(each, storage_options)
        for url, size in zip(each, sizes, strict=True):
            if size is None:
                shard = redact(url.removesuffix(OFFSETS))
                raise ValueError(f"shard {shard} has no index of offsets: there is no {redact(url)}. {MEND_OFFSETS}")
            if not size or size % 8:
                raise unusable(url, f"it has {size} bytes, not 8 for each sample and 8 more")
            offsets[url] = size // 8 - 1
        return
    shown = redact(folder) or "the working directory"
    raise ValueError(
        f"there is no index in {shown}: none of {', '.join(_BESIDE)}, or {base_name(shards[0])}{OFFSETS} for each "
        f"shard. {MEND}"
    )


def _size(url: str) -> int | None:
    try:
        return os.stat(local_path(url) or url).st_size
    except FileNotFoundError:
        return None


def _sizes_in_store(urls: Sequence[str], storage_options: Options) -> list[int | None]:
    """The sizes of files in one directory of a store: as it lists them, or by one request each."""
    from wds_pipes.io.remote.file_systems import file_system
    from wds_pipes.io.remote.metadata import ask

    names = [file_system(url, storage_options)[1] for url in urls]
    sizes: dict[str, int] = {}
    if len(urls) > 1:
        with contextlib.suppress(Exception):  # not every store lists
            listed = ask(folder_of(urls[0]), storage_options, lambda fs, name: fs.ls(name, detail=True))
            sizes = {entry["name"]: entry["size"] for entry in listed if entry.get("size")}
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda url, name: sizes.get(name) or size_of(url, storage_options), urls, names))


def exists(url: str, storage_options: Options) -> bool:
    """Return whether there is such a file, and it may be read.

    Raises:
        ShardError: the store does not answer, or with an error.
    """
    path = local_path(url)
    if path is not None:
        return os.path.isfile(path)
    found = info_of(url, storage_options, readable=True)
    return found is not None and found.get("type", "file") == "file"


class _Matcher:
    """Finds the entry of an index for a shard, as the docstring of this module says.

    Args:
        indexes: the URLs of the indexes.
        entries: of each shard in them: the name, what is known, and the version.
    """

    def __init__(self, indexes: Sequence[str], entries: Iterable[tuple[str, ShardFacts, str]]) -> None:
        self._where = ", ".join(map(redact, indexes[:2])) + (", ..." if len(indexes) > 2 else "")
        # the entries by the parts of their paths, and these by the base name
        self._entries: dict[_Parts, tuple[str, ShardFacts, str]] = {}
        self._by_base: dict[str, list[_Parts]] = {}
        self._users: dict[_Parts, str] = {}  # the shard that each entry was found for
        for entry in entries:
            name, facts, _ = entry
            parts = tuple(parts_of_path(name))
            if parts not in self._entries:
                self._entries[parts] = entry
                self._by_base.setdefault(base_name(name), []).append(parts)
            elif self._entries[parts][1] != facts:
                raise ValueError(
                    f"index {self._where} says two things of shard {redact(name)}: "
                    f"{self._entries[parts][1]} and {facts}. {MEND}"
                )

    def find(self, url: str) -> tuple[ShardFacts, str]:
        """The facts of a shard, and its version."""
        parts = self._find(url)
        name, facts, version = self._entries[parts]
        user = self._users.setdefault(parts, url)
        if user != url and parts_of_path(user) != parts_of_path(url):
            raise ValueError(
                f"index {self._where} has one entry, {redact(name)}, "
                f"for two shards, {redact(user)} and {redact(url)}. {MEND}"
            )
        return facts, version if name == url else ""  # it may be a copy

    def _find(self, url: str) -> _Parts:
        candidates = (base_name(url), base_name(url) + OFFSETS)
        base = next((name for name in candidates if name in self._by_base), None)
        if base is None:
            names = [redact(name) for name, *_ in self._entries.values()]
            example = f"; it lists {plural(len(names), 'other')}, such as {names[0]}" if names else ", it is empty"
            raise ValueError(
                f"shard {redact(url)} is not in index {self._where}{example}. Pass the index of these shards. {MEND}"
            )
        parts = (*parts_of_path(url)[:-1], base)
        if parts in self._entries:
            return parts
        nearest = self._by_base[base]
        for count in range(2, len(parts) + 1):
            nearer = [other for other in nearest if other[-count:] == parts[-count:]]
            if not nearer:
                break
            nearest = nearer
        if len(nearest) > 1:
            both = " and ".join(redact(self._entries[other][0]) for other in nearest[:2])
            raise ValueError(
                f"index {self._where} has {len(nearest)} entries that may mean shard {redact(url)}: {both}. {MEND}"
            )
        return nearest[0]
