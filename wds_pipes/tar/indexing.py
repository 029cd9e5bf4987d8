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

import contextlib
import dataclasses
import hashlib
import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_pipes.core.importing import library
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.errors import ShardError, mended
from wds_pipes.io.compression import unpacked, unreadable
from wds_pipes.io.expand import expand
from wds_pipes.io.outputs import StorageOptions, write_small
from wds_pipes.io.urls import Urls, at_home, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.grouping import GroupedShard, Grouping, Member
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.index import (
    KEYS,
    OFFSETS,
    Component,
    Entry,
    ShardFacts,
    base_name,
    check_is_index,
    check_output,
    dali_name,
    make_opener,
    name_in,
    pack_dali,
    read_entries,
    write_index,
    write_offsets,
)
from wds_pipes.tar.keys import KeySplit, check_key_split
from wds_pipes.tar.reader import TarReader

if TYPE_CHECKING:
    from wds_pipes.io.open import Opener

_CHUNK, _FEW = 1 << 20, 1 << 15  # bytes read at once, and where files are passed over


@dataclasses.dataclass
class Scanned:
    """What was found in a shard.

    Attributes:
        facts: the number of samples, the size, the MD5.
        keys: the key of each sample.
        starts: the byte of the first header of each.
        end: where the last one ends, in the decompressed tar.
        compressed: whether the shard is compressed.
        components: all its files, if they were requested.
        outside: how many files belong to no sample.
    """

    facts: ShardFacts = dataclasses.field(default_factory=ShardFacts)
    keys: list[str] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    end: int = 0
    compressed: bool = False
    components: list[Component] = dataclasses.field(default_factory=list)
    outside: int = 0


def scan(
    url: str,
    opener: Opener,
    stop: threading.Event,
    *,
    key_split: KeySplit = "first-dot",
    on_repeated_key: str = "raise",
    concatenated: bool = False,
    components: bool = False,
    md5: bool = True,
) -> Scanned:
    """Read a shard from its beginning to its end.

    Args:
        url: the shard.
        opener: opens it.
        stop: when it is set, reading ends with an error.
        key_split: as in ``index_shards``.
        on_repeated_key: as in ``index_shards``.
        concatenated: as in ``index_shards``.
        components: also list all its files.
        md5: compute the MD5.

    Raises:
        ShardError: it cannot be read, or is damaged.
        SampleError: a sample has a field twice, or one whose name is kept for metadata, or a key
            comes again.
    """
    with opener.open(url) as raw:
        hashed = Hashed(raw, stop, md5=md5)
        stream = io.BufferedReader(hashed, _CHUNK if md5 else _FEW)
        with readable(url):
            tar, kind = unpacked(stream)
            reader = TarReader(
                tar,
                url=url,
                want=lambda name: False,
                max_member_bytes=MAX_SIZE,
                concatenated=concatenated,
                named=False,
            )
            found = Scanned()
            grouping = Grouping(key_split, on_repeated_key=on_repeated_key)
            members = _noted(reader, found.components) if components else reader
            shard = GroupedShard(url)
            for sample in grouping.samples(members, shard):
                found.keys.append(sample["__key__"])
                found.starts.append(shard.start)
            found.end, found.compressed, found.outside = reader.offset, bool(kind), shard.outside
            if (warning := grouping.why_none(shard)) is not None:
                warnings.warn(warning, stacklevel=2)
            while stream.read(_CHUNK):
                pass
    found.facts = ShardFacts(len(found.keys), hashed.size, hashed.hexdigest())
    return found


@contextlib.contextmanager
def readable(url: str) -> Iterator[None]:
    """Raise ShardError for what unpacking a shard raises, or a package that it needs."""
    shown = redact(url)
    try:
        yield
    except ModuleNotFoundError as error:
        raise ShardError(f"shard {shown} cannot be read: {error}", url=shown) from error
    except ShardError:
        raise
    except unreadable() as error:
        raise ShardError(
            f"shard {shown} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.", url=shown
        ) from error


def _noted(reader: TarReader, components: list[Component]) -> Iterator[Member]:
    """Yield the members of a tar, without their data, and add them to the components of a shard."""
    for member in reader:
        header, size, plain = reader.skipped
        if member[1]:
            components.append(Component(member[1], header + BLOCK, size, plain))
        yield member


class Hashed(io.RawIOBase):
    """A stream that counts the bytes read and, unless ``md5`` is False, computes their MD5; without
    it, parts of a file may be passed over.

    When ``stop`` is set, reading raises OSError.
    """

    def __init__(self, raw: BinaryIO, stop: threading.Event, *, md5: bool = True) -> None:
        self._raw, self._stop = raw, stop
        self.size, self.md5 = 0, hashlib.md5(usedforsecurity=False) if md5 else None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.md5 is None and self._raw.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.size = self._raw.seek(offset, whence)
        return self.size

    def readinto(self, buffer: Any) -> int:
        if self._stop.is_set():
            raise OSError("the reading was stopped")
        count = int(self._raw.readinto(buffer))  # type: ignore[attr-defined]
        if self.md5 is not None:
            self.md5.update(memoryview(buffer)[:count])
        self.size += count
        return count

    def hexdigest(self) -> str | None:
        """The MD5 of what was read; None: it was not computed."""
        return None if self.md5 is None else self.md5.hexdigest()


Choice = bool | str | os.PathLike[str]


def index_shards(
    urls: Urls,
    output: str | os.PathLike[str] | None = None,
    *,
    key_split: KeySplit = "first-dot",
    on_repeated_key: str = "raise",
    concatenated: bool = False,
    jobs: int = 4,
    storage_options: StorageOptions = None,
    on_shard: Callable[[str, ShardFacts], None] | None = None,
    offsets: Choice = False,
    dali: Choice = False,
    force: bool = False,
    progress: bool = False,
    executor: Executor | None = None,
    md5: bool = True,
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
        concatenated: as in ``load_tar``.
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
        executor: what reads the shards, in other processes or on other machines; None: ``jobs``
            threads of this process.
        md5: False: without ``output``, compute no MD5s, and pass over the data of large files.

    Returns:
        The facts of each shard by its URL, in order.

    Raises:
        ShardError: a shard cannot be read, is damaged, was written meanwhile, or can have no index
            of DALI.
        SampleError: a sample has a field twice, or a key comes again.
        TypeError: an argument is of another type.
        ValueError: nothing matches, ``output`` is not a local path or an existing file that is no
            index, the offsets of remote shards are not written to a directory, or a shard is
            compressed, which has no offsets.
    """
    check_choice("on_repeated_key", on_repeated_key, "raise", "warn", "ignore")
    jobs = check_count("jobs", jobs)
    how = {"key_split": check_key_split(key_split), "on_repeated_key": on_repeated_key, "concatenated": concatenated}
    path = None if output is None else check_output(output)
    if path is not None:
        check_is_index(path)
    how["md5"] = md5 or path is not None
    shards = list(dict.fromkeys(expand(urls, storage_options)))
    if "-" in shards:
        raise ValueError("standard input cannot be indexed, since it has no name: write it to a file first")
    places, dali_places = _places(shards, "offsets", offsets, base_name), _places(shards, "dali", dali, dali_name)
    if both := {place + OFFSETS for place in places.values()} & set(dali_places.values()):
        raise ValueError(f"{min(both)} would be an index of offsets, and one of DALI: write one to another directory")
    rules = {"key_split": "function" if callable(key_split) else key_split, "on_repeated_key": on_repeated_key}
    known = {} if path is None or force else _known(path, rules)
    tasks = [
        (url, known.get(name_in(path, url)) if known and path else None, places.get(url), dali_places.get(url))
        for url in shards
    ]
    entries = _run(_Indexer(how, storage_options), tasks, jobs, on_shard, executor, progress=progress)
    if path is not None:
        write_index(path, entries, rules)
    return {url: entry.facts for url, entry in entries.items()}


def _run(
    indexer: _Indexer,
    tasks: list[Any],
    jobs: int,
    on_shard: Callable[[str, ShardFacts], None] | None,
    executor: Executor | None,
    *,
    progress: bool,
) -> dict[str, Entry]:
    """Index shards; ``tasks``: what ``_Indexer.index`` takes of each. The other arguments are those
    of ``index_shards``.
    """
    bar = library("tqdm", "tqdm", "progress=True").tqdm(total=len(tasks), unit="shard") if progress else None
    entries, read = dict[str, Entry](), 0
    pool = executor or ThreadPoolExecutor(min(jobs, len(tasks)))
    try:
        for (url, *_), (entry, was_read) in zip(tasks, pool.map(indexer.index, *zip(*tasks, strict=True)), strict=True):
            entries[url], read = entry, read + was_read
            if bar is not None:
                bar.set_postfix_str(f"{read} read", refresh=False)
                bar.update()
            if on_shard is not None:
                on_shard(url, entry.facts)
    finally:
        indexer.stop.set()
        if executor is None:
            pool.shutdown(cancel_futures=True)
        if bar is not None:
            bar.close()
    return entries


class _Indexer:
    """Indexes shards, in several threads or processes.

    Args:
        rules: how samples are found, as ``scan`` takes it.
        storage_options: how to reach the storage.
    """

    def __init__(self, rules: dict[str, Any], storage_options: StorageOptions) -> None:
        self._rules, self._options = rules, storage_options
        self._opener: Opener = make_opener(storage_options)
        self.stop = threading.Event()

    def __reduce__(self) -> Any:
        return _Indexer, (self._rules, self._options)

    def index(self, url: str, known: Entry | None, offsets: str | None, dali: str | None) -> tuple[Entry, bool]:
        """Return what there is to know of a shard, and whether it was read; write its files.

        Args:
            url: the shard.
            known: the entry of an earlier run.
            offsets: to which path the endings of the files with its offsets are added; None: no
                offsets are written.
            dali: the path of its index of DALI; None: it is not written.
        """
        size, mark, sure = version_of(url, self._options)
        if known is not None and sure and (size, mark) == (known.facts.size, known.version):
            same_offsets = offsets is None or _digest(offsets, KEYS, OFFSETS) == (known.offsets or "")
            if same_offsets and (dali is None or _digest(dali, "") == (known.dali or "")):
                return known, False
        found = scan(url, self._opener, self.stop, components=dali is not None, **self._rules)
        # an object in a store is read as one version of it
        if local_path(url) is not None and version_of(url, self._options)[:2] != (size, mark):
            shown = redact(url)
            raise ShardError(
                f"shard {shown} was written while it was indexed: index it again when no program writes it.", url=shown
            )
        if found.compressed and (offsets is not None or dali is not None):
            raise ValueError(
                f"shard {redact(url)} is compressed, and only uncompressed shards have offsets: unpack it, for example "
                "with gunzip, bunzip2, unxz or unzstd, and index the .tar"
            )
        entry = Entry(found.facts, mark if sure else None)
        if offsets is not None:
            write_offsets(offsets, found.keys, [*found.starts, found.end])
            entry = entry._replace(offsets=_digest(offsets, KEYS, OFFSETS))
        if dali is not None:
            write_small(dali, pack_dali(found.components, url))
            entry = entry._replace(dali=_digest(dali, ""))
        return entry, True


def _known(path: str, rules: dict[str, str]) -> dict[str, Entry]:
    """Return the entries of an existing index, by their names; none if it is missing or damaged, or
    its samples were found in another way.
    """
    try:
        entries, earlier = read_entries(path)
    except (ValueError, ShardError):
        return {}
    same = earlier["key_split"] == rules["key_split"] != "function"
    if not same or earlier["on_repeated_key"] not in ("raise", rules["on_repeated_key"]):
        return {}
    return {name: entry for name, (_, _, entry) in entries.items() if None not in entry.facts}


def _digest(path: str, *endings: str) -> str | None:
    """Return the MD5 of files; None: one of them cannot be read."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        for ending in endings:
            digest.update(Path(path + ending).read_bytes())
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
            use = f"and copy it beside the shard, or {use}"
            raise mended(
                ValueError,
                f"what belongs to a remote shard such as {redact(remote[0])} is written to a directory",
                mend=f"pass {what}='DIRECTORY', {use}",
                mend_cli=f"pass --{what}-to DIRECTORY, {use}",
            )
        places = {
            url: os.path.join(os.path.dirname(path), name(url)) for url, path in paths.items() if path is not None
        }
    else:
        if not isinstance(choice, (str, os.PathLike)):
            raise TypeError(f"{what}= is True, False or a directory, not {choice!r:.80}")
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
