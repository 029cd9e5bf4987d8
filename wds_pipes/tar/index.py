"""Find the entry of an index for each shard. Without torch.

A name in an index is relative to the place of the index. It means the shard whose path has the
longest end in common with it, at least the base name. If an entry could mean two shards, or a shard
two entries, that is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from wds_pipes.core.words import plural
from wds_pipes.io.expand import expand, urls_of
from wds_pipes.io.outputs import info_of, size_of
from wds_pipes.io.urls import Urls, at_home, local_path, redact
from wds_pipes.tar.index_formats import (
    MEND,
    Index,
    Options,
    ShardFacts,
    base_name,
    check_named,
    first_dot,
    folder_of,
    last_dot,
    make_opener,
    parts_of_path,
    path_of,
    read_indexes,
)
from wds_pipes.tar.offsets import MEND as MEND_OFFSETS
from wds_pipes.tar.offsets import OFFSETS, beside, unusable

# File names of an index in the directory of its shards.
_BESIDE = ("index.json", "sizes.json", "_info.json", "info.json")
_LENGTH = "__len__"


# Reading


def is_index(url: str) -> bool:
    """Whether a URL in a list of shards names an index: its path ends in ``.json``."""
    return path_of(url).lower().endswith(".json")


def listed_shards(urls: Sequence[str], storage_options: Options = None) -> list[list[tuple[str, ShardFacts]]]:
    """The shards that each of several index files lists, in order, with the facts of each shard.

    Raises:
        ValueError: an index is damaged, or lists no shards to open.
        ShardError: an index cannot be read.
    """
    found: list[list[tuple[str, ShardFacts]]] = []
    for index in read_indexes(urls, storage_options):
        if not index.shards or index.of_stem:
            raise ValueError(f"index {redact(index.url)} does not list shards: name the shards, and pass it as index=")
        if index.parts > 1:
            raise ValueError(
                f"index {redact(index.url)} lists {index.parts} splits, and one must be chosen: "
                "name its shards, and pass the file as index="
            )
        for url, _ in index.shards:
            check_named(index.url, url)
        found.append(index.shards)
    return found


def list_shards(urls: Urls, storage_options: Options = None) -> tuple[list[str], list[ShardFacts] | None]:
    """Return the shards that URLs or indexes name, and the facts in the indexes, if these are
    indexes.

    Raises:
        ValueError: nothing matches, or an index is damaged.
        ShardError: a store cannot be listed, or an index cannot be read.
    """
    found = expand(urls, storage_options)
    if not any(map(is_index, found)):
        return found, None
    shards = [shard for listed in listed_shards(found, storage_options) for shard in listed]
    return [url for url, _ in shards], [facts for _, facts in shards]


class Listed(NamedTuple):
    """The shards of a data set whose samples are read by their offsets.

    Attributes:
        urls: the shards.
        facts: what an ``index.json`` says of each; None: there is none.
        folder: the directory of the indexes of offsets; None: they are beside the shards.
    """

    urls: list[str]
    facts: list[ShardFacts] | None
    folder: str | None

    @property
    def counts(self) -> list[int] | None:
        """How many samples each shard has; None if this is not known of all."""
        counts = [shard.samples for shard in self.facts or () if shard.samples is not None]
        return counts if self.facts is not None and len(counts) == len(self.facts) else None


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


def find_facts(urls: Sequence[str], index: Urls | bool, storage_options: Options = None) -> list[ShardFacts]:
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
    indices: list[Index] = []
    if index is True:
        folders: dict[str, list[str]] = {}
        for url in urls:
            folders.setdefault(folder_of(url), []).append(url)
        for folder, shards in folders.items():
            _look_in(folder, shards, storage_options, files, indices)
    else:
        items = [index] if isinstance(index, (str, os.PathLike)) else index
        for name in (at_home(url) for item in items for url in urls_of(item)):
            if name.endswith("/") or os.path.isdir(local_path(name) or ""):
                _look_in(name.rstrip("/") + "/", urls, storage_options, files, indices)
            else:
                files += expand(name, storage_options)
    indices += read_indexes(files, storage_options) if files else []
    totals = [found for found in indices if found.total is not None]
    if totals:
        total, distinct = totals[0], len(set(urls))
        if len(indices) > 1 or distinct > 1:
            where = redact(total.url)
            raise ValueError(
                f"index {where} says only that there are {total.total} samples in all, not how "
                f"many each of {distinct} shards has. {MEND}"
            )
        return [ShardFacts(total.total)] * len(urls)
    return _Matcher(indices).of(urls)


def _look_in(
    folder: str, shards: Sequence[str], storage_options: Options, files: list[str], indices: list[Index]
) -> None:
    """Add the index in a directory: the first kind that exists, in a fixed order. It is added to
    ``files`` if it has to be read.

    An index of DALI, or of offsets, is one file per shard.
    """
    for name in _BESIDE:
        if exists(folder + name, storage_options):
            files.append(folder + name)
            return
    if exists(first := beside(shards[0], OFFSETS, folder), storage_options):
        each = list(dict.fromkeys(beside(shard, OFFSETS, folder) for shard in shards))
        if _is_text(first, storage_options):
            files += each
        else:
            indices += _by_sizes(each, storage_options)
        return
    for stem in (first_dot, last_dot):
        if exists(f"{folder}{stem(shards[0])}.idx", storage_options):
            files += dict.fromkeys(f"{folder}{stem(shard)}.idx" for shard in shards)
            return
    if exists(folder + _LENGTH, storage_options):
        files.append(folder + _LENGTH)
        return
    shown = redact(folder) or "the working directory"
    raise ValueError(
        f"there is no index in {shown}: none of {', '.join(_BESIDE)}, {_LENGTH}, or "
        f"{base_name(shards[0])}{OFFSETS} or {first_dot(shards[0])}.idx for each shard. {MEND}"
    )


def _is_text(url: str, storage_options: Options) -> bool:
    """Whether a file is an index of DALI."""
    with make_opener(storage_options, readahead_bytes=1 << 20).open(url) as stream:
        return stream.read(3) == b"v1."


def _by_sizes(urls: Sequence[str], storage_options: Options) -> list[Index]:
    """The numbers of samples that the sizes of indexes of offsets say."""
    local = local_path(urls[0]) is not None
    sizes = list(map(_size, urls)) if local else _sizes_in_store(urls, storage_options)
    found = []
    for url, size in zip(urls, sizes, strict=True):
        if size is None:
            shard = redact(url.removesuffix(OFFSETS))
            raise ValueError(f"shard {shard} has no index of offsets: there is no {redact(url)}. {MEND_OFFSETS}")
        if not size or size % 8:
            raise unusable(url, f"it has {size} bytes, not 8 for each sample and 8 more")
        found.append(Index(url, [(path_of(url), ShardFacts(size // 8 - 1))], of_stem=True))
    return found


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
        try:
            listed = ask(folder_of(urls[0]), storage_options, lambda fs, name: fs.ls(name, detail=True))
        except Exception:  # not every store lists
            listed = []
        sizes = {entry["name"]: entry["size"] for entry in listed if entry.get("size")}

    def found_size(url: str, name: str) -> int | None:
        return sizes.get(name) or size_of(url, storage_options)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(found_size, urls, names))


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
    """Finds the entry of an index for a shard, as the docstring of this module says."""

    def __init__(self, indices: Sequence[Index]) -> None:
        self._where = ", ".join(redact(index.url) for index in indices[:2]) + (", ..." if len(indices) > 2 else "")
        self._entries: list[tuple[str, ShardFacts]] = []
        # The first entry with a base name, and where several have it, all of them.
        self._by_base: dict[str, int] = {}
        self._more: dict[str, list[int]] = {}
        # For a base name of several entries: the entries by each end of their paths.
        self._by_end: dict[str, dict[str, list[int]]] = {}
        known: dict[str, int] = {}
        for index in indices:
            for name, facts in index.shards:
                base, number = base_name(name), len(self._entries)
                first = self._by_base.setdefault(base, number)
                if first != number:  # paths are compared where base names are the same
                    known.setdefault("/".join(parts_of_path(self._entries[first][0])), first)
                    number = known.setdefault("/".join(parts_of_path(name)), number)
                if number == len(self._entries):
                    self._entries.append((name, facts))
                    if first != number:
                        self._more.setdefault(base, [first]).append(number)
                elif self._entries[number][1] != facts:
                    raise ValueError(
                        f"index {self._where} says two things of shard {redact(name)}: "
                        f"{self._entries[number][1]} and {facts}. {MEND}"
                    )

    def of(self, urls: Sequence[str]) -> list[ShardFacts]:
        """The facts of each shard."""
        users: dict[int, str] = {}
        found = []
        for url in urls:
            number = self._find(url)
            user = users.setdefault(number, url)
            if user != url and parts_of_path(user) != parts_of_path(url):
                raise ValueError(
                    f"index {self._where} has one entry, {redact(self._entries[number][0])}, "
                    f"for two shards, {redact(user)} and {redact(url)}. {MEND}"
                )
            name, facts = self._entries[number]
            found.append(facts if name == url else ShardFacts(*facts))  # it may be a copy
        return found

    def _find(self, url: str) -> int:
        base = base_name(url)
        found = self._by_base.get(base)
        for stem in (base_name, last_dot, first_dot) if found is None else ():
            base = f"{stem(url)}.idx"
            found = self._by_base.get(base)
            if found is not None:
                break
        if found is None:
            example = (
                f"; it lists {plural(len(self._entries), 'other')}, such as {redact(self._entries[0][0])}"
                if self._entries
                else ", it is empty"
            )
            raise ValueError(
                f"shard {redact(url)} is not in index {self._where}{example}. Pass the index of these shards. {MEND}"
            )
        group = self._more.get(base)
        if group is None:
            return found
        if base not in self._by_end:
            ends = self._by_end[base] = {}
            for number in group:
                for end in _ends([*parts_of_path(self._entries[number][0])[:-1], base]):
                    ends.setdefault(end, []).append(number)
        group = next(
            self._by_end[base][end] for end in _ends([*parts_of_path(url)[:-1], base]) if end in self._by_end[base]
        )
        if len(group) > 1:
            names = " and ".join(redact(self._entries[number][0]) for number in group[:2])
            raise ValueError(
                f"index {self._where} has {len(group)} entries that may mean shard {redact(url)}: {names}. {MEND}"
            )
        return group[0]


def _ends(parts: list[str]) -> Iterator[str]:
    """All ends of a path, longest first."""
    return ("/".join(parts[start:]) for start in range(len(parts)))
