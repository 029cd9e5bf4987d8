"""Make an index of shards, in the wids format: their samples, bytes and MD5s; and where each
sample begins.

The samples are counted as ``group_by_key`` groups them.

Rules:
1. A shard is read if anything about it is in doubt. It is not read if its entry in the existing
   index has its size and its version, the samples were found by the same rules, and the other
   files to write are there with the MD5s that the entry has.
2. Each file appears when it is complete, and the index at the end, when all others are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from typing import TYPE_CHECKING

from wds_pipes.core.importing import library
from wds_pipes.errors import ShardError
from wds_pipes.io.expand import expand
from wds_pipes.io.urls import Urls, at_home, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.dali import pack_dali
from wds_pipes.tar.index_file import Entry, check_output, name_in, read_index, write_index
from wds_pipes.tar.index_formats import Options, ShardFacts, base_name, dali_name, make_opener
from wds_pipes.tar.keys import KeySplit
from wds_pipes.tar.offsets import KEYS, OFFSETS, pack_keys, pack_offsets, write_beside
from wds_pipes.tar.scanning import Rules, Scanned, scan

if TYPE_CHECKING:
    from wds_pipes.io.open import Opener

Choice = bool | str | os.PathLike[str]


def index_shards(
    urls: Urls,
    output: str | os.PathLike[str] | None = None,
    *,
    key_split: KeySplit = "first-dot",
    on_repeated_key: str = "raise",
    jobs: int = 4,
    storage_options: Options = None,
    on_shard: Callable[[str, ShardFacts], None] | None = None,
    offsets: Choice = False,
    dali: Choice = False,
    force: bool = False,
    progress: bool = False,
) -> dict[str, ShardFacts]:
    """Read shards once, return the samples, bytes and MD5 of each, and write them to an index.

    The samples are counted as ``group_by_key`` groups them, before any decoding. The data of the
    members is not kept in memory.

    If ``output`` exists, only new and changed shards are read. A shard has changed if its size, or
    the time of its last modification, is another; in a store, its ETag. If that cannot be known,
    or a file that belongs to the shard is missing or was changed, the shard is read. Shards that
    are not in ``urls`` leave the index.

    Args:
        urls: as for ``ShardList``.
        output: the path of the index to write, in the wids format (``index.json``). The file
            appears when it is complete. The URLs of local shards in its directory or below are
            relative to that directory, so that both can be moved. URLs are written without
            credentials. None: no index is written, and all shards are read.
        key_split: as in ``group_by_key``.
        on_repeated_key: as in ``group_by_key``.
        jobs: the number of shards that are read at a time.
        storage_options: how to reach the storage: a dict of options for fsspec.
        on_shard: called with the URL and the facts of each shard, in order, after it was read or
            found unchanged.
        offsets: also write where each sample begins, for ``IndexedShards``: to ``X.tar.idx`` and
            ``X.tar.keys`` beside ``X.tar``, or in a directory that is given here. They take 8 and
            12 bytes for each sample. Compressed shards have no offsets.
        dali: also write an index for DALI's ``fn.readers.webdataset(index_paths=...)``: to
            ``X.idx`` beside ``X.tar``, or in a directory that is given here.
        force: read all shards, also unchanged ones.
        progress: show a progress bar; needs tqdm.

    Returns:
        The facts of each shard by its URL, in order.

    Raises:
        ShardError: a shard cannot be read, is damaged, was written meanwhile, or can have no index
            of DALI.
        SampleError: a sample has a field twice, or a key comes again.
        ValueError: nothing matches, ``output`` is not a local path, the offsets of remote shards
            are not written to a directory, or a shard is compressed, which has no offsets.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, not {jobs}")
    if on_repeated_key not in ("raise", "warn", "ignore"):
        raise ValueError(f"on_repeated_key must be one of 'raise', 'warn', 'ignore', not {on_repeated_key!r}")
    if not callable(key_split) and key_split not in ("first-dot", "last-dot"):
        raise ValueError(f"key_split must be one of 'first-dot', 'last-dot' or a function, not {key_split!r}")
    path = None if output is None else check_output(output)
    shards = list(dict.fromkeys(expand(urls, storage_options)))
    if "-" in shards:
        raise ValueError("standard input cannot be indexed, since it has no name: write it to a file first")
    tqdm = library("tqdm", "tqdm", "progress=True").tqdm if progress else None
    rules = {"key_split": "function" if callable(key_split) else key_split, "on_repeated_key": on_repeated_key}
    places, dali_places = _places(shards, "offsets", offsets, base_name), _places(shards, "dali", dali, dali_name)
    if both := {place + OFFSETS for place in places.values()} & set(dali_places.values()):
        raise ValueError(f"{min(both)} would be an index of offsets, and one of DALI: write one to another directory")
    indexer = _Indexer(Rules(key_split, on_repeated_key), places, dali_places, storage_options)
    known = {} if path is None or force else _known(path, rules)
    entries: dict[str, Entry] = {}
    pool = ThreadPoolExecutor(min(jobs, len(shards)))
    bar = None if tqdm is None else tqdm(total=len(shards), unit="shard")
    try:
        before = (None if path is None else known.get(name_in(path, url)) for url in shards)
        for url, entry in zip(shards, pool.map(indexer.index, shards, before), strict=True):
            entries[url] = entry
            if bar is not None:
                bar.set_postfix_str(f"{indexer.read} read", refresh=False)
                bar.update()
            if on_shard is not None:
                on_shard(url, entry.facts)
    finally:
        indexer.stop.set()
        pool.shutdown(cancel_futures=True)
        if bar is not None:
            bar.close()
    if path is not None:
        write_index(path, entries, rules)
    return {url: entry.facts for url, entry in entries.items()}


class _Indexer:
    """Indexes shards, in several threads.

    Args:
        rules: how samples are found.
        offsets: to which path the endings of the files with a shard's offsets are added; empty: no
            offsets are written.
        dali: the paths of the indexes of DALI.
        storage_options: how to reach the storage.
    """

    def __init__(self, rules: Rules, offsets: dict[str, str], dali: dict[str, str], storage_options: Options) -> None:
        self._rules, self._offsets, self._dali, self._options = rules, offsets, dali, storage_options
        self._opener: Opener = make_opener(storage_options)
        self.stop = threading.Event()
        self.read = 0  # shards that were read

    def index(self, url: str, known: Entry | None) -> Entry:
        """Return what there is to know of a shard, and write its files.

        Args:
            url: the shard.
            known: the entry of an earlier run.
        """
        size, mark, sure = version_of(url, self._options)
        if known is not None and sure and self._is_unchanged(url, size, mark, known):
            return known
        found = scan(url, self._rules, self._opener, self.stop, components=url in self._dali)
        # an object in a store is read as one version of it
        if local_path(url) is not None and version_of(url, self._options)[:2] != (size, mark):
            shown = redact(url)
            raise ShardError(
                f"shard {shown} was written while it was indexed: index it again when no program writes it.", url=shown
            )
        offsets, dali = self._write(url, found)
        self.read += 1
        return Entry(found.facts, mark if sure else None, offsets, dali)

    def _is_unchanged(self, url: str, size: int | None, mark: str | None, known: Entry) -> bool:
        """Whether a shard and its files are those of an earlier run."""
        return (
            (size, mark) == (known.facts.size, known.version)
            and (url not in self._offsets or _digest(self._offsets[url], KEYS, OFFSETS) == (known.offsets or ""))
            and (url not in self._dali or _digest(self._dali[url], "") == (known.dali or ""))
        )

    def _write(self, url: str, found: Scanned) -> tuple[str | None, str | None]:
        """Write the files of a shard; return the MD5s of its offsets and its index of DALI."""
        if found.compressed and (url in self._offsets or url in self._dali):
            raise ValueError(
                f"shard {redact(url)} is compressed, and only uncompressed shards have offsets: unpack it, for example "
                "with gunzip, bunzip2, unxz or unzstd, and index the .tar"
            )
        offsets = dali = None
        if url in self._offsets:
            keys, starts = pack_keys(found.keys), pack_offsets([*found.starts, found.end])
            write_beside(self._offsets[url], KEYS, keys)
            write_beside(self._offsets[url], OFFSETS, starts)
            offsets = md5(keys + starts, usedforsecurity=False).hexdigest()
        if url in self._dali:
            content = pack_dali(found.components, url)
            write_beside(self._dali[url], "", content)
            dali = md5(content, usedforsecurity=False).hexdigest()
        return offsets, dali


def _known(path: str, rules: dict[str, str]) -> dict[str, Entry]:
    """Return the entries of an existing index; none if its samples were found in another way."""
    entries, earlier = read_index(path)
    same = earlier["key_split"] == rules["key_split"] != "function"
    return entries if same and earlier["on_repeated_key"] in ("raise", rules["on_repeated_key"]) else {}


def _digest(path: str, *endings: str) -> str | None:
    """Return the MD5 of files; None: one of them cannot be read."""
    digest = md5(usedforsecurity=False)
    try:
        for ending in endings:
            with open(path + ending, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def _places(shards: list[str], what: str, choice: Choice, name: Callable[[str], str]) -> dict[str, str]:
    """Return the path of a file that belongs to each shard; empty: there are no such files.

    Args:
        shards: the shards.
        what: the name of the option.
        choice: its value: whether there are such files, or the directory where they are.
        name: the function from a shard to the name of the file.
    """
    if choice is False:
        return {}
    if choice is True:
        paths = {url: local_path(url) for url in shards}
        if remote := [url for url, path in paths.items() if path is None]:
            use = "pass it to DALI as index_paths" if what == "dali" else "pass IndexedShards(index='DIRECTORY')"
            raise ValueError(
                f"what belongs to a remote shard such as {redact(remote[0])} is written to a directory, "
                f"{what}='DIRECTORY': copy it beside the shard, or {use}"
            )
        places = {
            url: os.path.join(os.path.dirname(path), name(url)) for url, path in paths.items() if path is not None
        }
    else:
        folder = local_path(at_home(os.fspath(choice)))
        if folder is None or not os.path.isdir(folder):
            raise ValueError(
                f"{what}= names an existing local directory to write to, not {redact(os.fspath(choice))!r}"
            )
        places = {url: os.path.join(folder, name(url)) for url in shards}
    named: dict[str, str] = {}
    for url, place in places.items():
        other = named.setdefault(place, url)
        if other != url:
            raise ValueError(
                f"shards {redact(other)} and {redact(url)} would have one file, {place}: name them otherwise, or "
                "index them one after the other, into two directories"
            )
    return places
