"""Make an index of shards, in the wids format: their samples, bytes and MD5s.

The samples are counted as ``group_by_key`` groups them.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_pipes.errors import SampleError, ShardError, ShardWarning
from wds_pipes.io.compression import MAGIC_BYTES, decompress, detect, unreadable
from wds_pipes.io.expand import expand
from wds_pipes.io.partial import PartialFile
from wds_pipes.io.urls import Urls, at_home, local_path, plain, redact, with_variables
from wds_pipes.tar.headers import MAX_SIZE
from wds_pipes.tar.keys import KeySplit, splitter
from wds_pipes.tar.members import END, MARK, half_sample
from wds_pipes.tar.offsets import KEYS, OFFSETS, pack_keys, pack_offsets, write_beside
from wds_pipes.tar.reader import TarReader

if TYPE_CHECKING:
    from wds_pipes.io.open import Opener
from wds_pipes.tar.index_formats import Options, ShardFacts, base_name, make_opener

# Making


def index_shards(
    urls: Urls,
    output: str | os.PathLike[str] | None = None,
    *,
    key_split: KeySplit = "first-dot",
    on_repeated_key: str = "raise",
    threads: int = 4,
    storage_options: Options = None,
    on_shard: Callable[[str, ShardFacts], None] | None = None,
    offsets: bool | str | os.PathLike[str] = False,
) -> dict[str, ShardFacts]:
    """Read shards once, return the samples, bytes and MD5 of each, and write them to an index.

    The samples are counted as ``group_by_key`` groups them, before any decoding. The data of the
    members is not kept in memory.

    Args:
        urls: as for ``ShardList``.
        output: the path of the index to write, in the wids format (``index.json``). The file
            appears when it is complete. The URLs of local shards in its directory or below are
            relative to that directory, so that both can be moved. URLs are written without
            credentials. None: no index is written.
        key_split: as in ``group_by_key``.
        on_repeated_key: as in ``group_by_key``.
        threads: the number of shards that are read at a time.
        storage_options: how to reach the storage: a dict of options for fsspec.
        on_shard: called with the URL and the facts of each shard, in order, after it was read.
        offsets: also write where each sample begins, for ``IndexedShards``: to ``X.tar.idx`` and
            ``X.tar.keys`` beside ``X.tar``, or in a directory that is given here. They take 8 and
            12 bytes for each sample. Compressed shards have no offsets.

    Returns:
        The facts of each shard by its URL, in order.

    Raises:
        ShardError: a shard cannot be read, or is damaged.
        SampleError: a sample has a field twice, or a key comes again.
        ValueError: nothing matches, ``output`` is not a local path, or the offsets of remote shards
            are not written to a directory.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    if on_repeated_key not in ("raise", "warn", "ignore"):
        raise ValueError(f"on_repeated_key must be one of 'raise', 'warn', 'ignore', not {on_repeated_key!r}")
    if not callable(key_split) and key_split not in ("first-dot", "last-dot"):
        raise ValueError(f"key_split must be one of 'first-dot', 'last-dot' or a function, not {key_split!r}")
    path = None if output is None else check_output(output)
    shards = list(dict.fromkeys(expand(urls, storage_options)))
    if "-" in shards:
        raise ValueError("standard input cannot be indexed, since it has no name: write it to a file first")
    stop, opener, places = threading.Event(), make_opener(storage_options), _places(shards, offsets)

    def read(url: str) -> ShardFacts:
        facts, found = _read_shard(url, splitter(key_split), on_repeated_key, opener, stop)
        if places:
            _write_offsets(url, places[url], found)
        return facts

    facts: dict[str, ShardFacts] = {}
    pool = ThreadPoolExecutor(min(threads, len(shards)))
    try:
        for url, found in zip(shards, pool.map(read, shards), strict=True):
            facts[url] = found
            if on_shard is not None:
                on_shard(url, found)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    if path is not None:
        write_index(path, facts)
    return facts


def _read_shard(
    url: str,
    split: Callable[[str], tuple[str, str] | None],
    on_repeated_key: str,
    opener: Opener,
    stop: threading.Event,
) -> tuple[ShardFacts, _Samples]:
    shown = redact(url)
    with opener.open(url) as raw:
        hashed = _Hashed(raw, stop)
        stream = io.BufferedReader(hashed, 1 << 20)
        try:
            kind = detect(stream.peek(MAGIC_BYTES)[:MAGIC_BYTES])
            tar: BinaryIO = decompress(stream, kind) if kind else stream
            reader = TarReader(
                tar, url=url, want=lambda name: False, max_member_bytes=MAX_SIZE, doubts=True, named=False
            )
            samples = _find_samples(reader, split, on_repeated_key)
            samples.end = None if kind else reader.offset
            while stream.read(1 << 20):
                pass
        except ModuleNotFoundError as error:
            raise ShardError(f"shard {shown} cannot be read: {error}", url=shown) from error
        except ShardError:
            raise
        except unreadable() as error:
            raise ShardError(
                f"shard {shown} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.", url=shown
            ) from error
    return ShardFacts(len(samples.keys), hashed.size, hashed.md5.hexdigest()), samples


@dataclasses.dataclass
class _Samples:
    """The samples that ``group_by_key`` yields of a shard.

    Attributes:
        keys: the key of each.
        starts: the byte of the first header of each.
        end: where the last one ends; None: the shard is compressed.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    end: int | None = None


def _find_samples(
    members: Iterable[tuple[str, str, Any, int]], split: Callable[[str], tuple[str, str] | None], on_repeated_key: str
) -> _Samples:
    """Return the samples that ``group_by_key`` yields."""
    found = _Samples()
    samples, key, fields, known, seen = 0, "", set[str](), set[str](), set[str]()
    # Doubtful places next to the current sample: offset, kind, and how many fields were known
    # there.
    doubts: list[tuple[int, bytes, int]] = []
    suspects: list[tuple[int, bytes, int]] = []  # the same for the next sample

    def check() -> None:
        for offset, place, before in doubts:
            if (samples > 1 and (len(fields) < len(known) or (place == MARK and len(known) > before))) or (
                samples == 1 and (place == END or not before)
            ):
                raise half_sample(url, key, offset, place)

    for url, name, data, offset in members:
        parts = split(name) if name else None
        if parts is None:
            if not name:
                suspects = [(offset, data, len(known))]
                doubts += suspects if samples else []
            continue
        if parts[0] != key or not samples:
            check()
            key, fields, samples, doubts = parts[0], set(), samples + 1, suspects
            if key in seen and on_repeated_key != "ignore":
                _repeated(key, redact(url), offset, on_repeated_key)
            seen.add(key)
            found.keys.append(key)
            found.starts.append(offset)
        suspects = []
        field = parts[1].lower()
        if field in fields:
            message = (
                f"sample {key!r} of shard {redact(url)} has field {field!r} twice (again at byte "
                f"{offset}, as {name!r}). Rename or remove one."
            )
            raise SampleError(message, url=redact(url), key=key, offset=offset)
        fields.add(field)
        known.add(field)
    check()
    return found


def _places(shards: list[str], offsets: bool | str | os.PathLike[str]) -> dict[str, str]:
    """Return to which path the names of the files of each shard's offsets are added; empty: no
    offsets are written.
    """
    if offsets is False:
        return {}
    if offsets is True:
        places = {url: local_path(url) for url in shards}
        if remote := [url for url, path in places.items() if path is None]:
            raise ValueError(
                f"the offsets of a remote shard such as {redact(remote[0])} are written to a directory, "
                "offsets='DIRECTORY': copy them beside the shards, or pass IndexedShards(index='DIRECTORY')"
            )
        return {url: path for url, path in places.items() if path is not None}
    folder = local_path(at_home(os.fspath(offsets)))
    if folder is None or not os.path.isdir(folder):
        raise ValueError(f"offsets are written to an existing local directory, not to {redact(os.fspath(offsets))!r}")
    named = {os.path.join(folder, base_name(url)): url for url in shards}
    if len(named) < len(shards):
        raise ValueError("two shards have one base name, so that one directory cannot hold the offsets of both")
    return {url: path for path, url in named.items()}


def _write_offsets(url: str, path: str, samples: _Samples) -> None:
    if samples.end is None:
        raise ValueError(f"shard {redact(url)} is compressed, and only uncompressed shards have offsets: unpack it")
    write_beside(path, KEYS, pack_keys(samples.keys))
    write_beside(path, OFFSETS, pack_offsets([*samples.starts, samples.end]))


def _repeated(key: str, shown: str, offset: int, on_repeated_key: str) -> None:
    message = (
        f"key {key!r} comes again in shard {shown} at byte {offset}, apart from its other "
        "members, so that its sample is in pieces. Sort the shard by name, "
        "or pass on_repeated_key='ignore' here and to group_by_key, to take the pieces as samples."
    )
    if on_repeated_key == "raise":
        raise SampleError(message, url=shown, key=key, offset=offset)
    warnings.warn(message, ShardWarning, stacklevel=2)


class _Hashed(io.RawIOBase):
    """A stream that counts the bytes read and computes their MD5.

    When ``stop`` is set, reading raises OSError.
    """

    def __init__(self, raw: BinaryIO, stop: threading.Event) -> None:
        self._raw, self._stop = raw, stop
        self.size, self.md5 = 0, md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._stop.is_set():
            raise OSError("the reading was stopped")
        count = int(self._raw.readinto(buffer))  # type: ignore[attr-defined]
        self.md5.update(memoryview(buffer)[:count])
        self.size += count
        return count


def check_output(output: str | os.PathLike[str]) -> str:
    """The path of an index to write; ValueError if it is not local or has no existing directory."""
    path = local_path(at_home(with_variables(os.fspath(output))))
    if path is None or not path or path.endswith("/"):
        raise ValueError(
            f"an index is written to a local file, not to {redact(os.fspath(output))!r}: write it there and copy it"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"the directory of index {path!r} does not exist: make it first")
    return path


def write_index(path: str, facts: Mapping[str, ShardFacts]) -> None:
    """Write the facts of shards as a wids index; the file appears when it is complete."""
    shardlist = []
    named = {_named_from(path, url): found for url, found in facts.items()}
    if len(named) < len(facts):
        raise ValueError(
            "two shards have one name without the credentials in their URLs, so an index cannot "
            "tell them apart: give them other names"
        )
    for name, (samples, size, digest) in named.items():
        entry = {"url": name, "md5sum": digest, "nsamples": samples, "filesize": size}
        shardlist.append({field: value for field, value in entry.items() if value is not None})
    content = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shardlist}
    partial = PartialFile(path, overwrite=True, wait=True)
    try:
        partial.write((json.dumps(content, indent=1) + "\n").encode("ascii"))
        partial.commit()
    finally:
        partial.discard()


def _named_from(index: str, url: str) -> str:
    """The name of a shard in an index.

    It is relative for a local shard in the directory of the index or below; otherwise it is
    complete.
    """
    path = local_path(url)
    if path is None:
        return plain(url)
    path, folder = os.path.abspath(path), os.path.dirname(os.path.abspath(index))
    inside = path.startswith(os.path.join(folder, ""))
    return (os.path.relpath(path, folder) if inside else path).replace(os.sep, "/")
