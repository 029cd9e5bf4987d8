"""The indexes of shards. ``index.json``: its formats, how it is written, and what it says of
shards; and the indexes beside each shard.

Rules of ``index.json``:
1. The format is detected by content: wids ``index.json``, ``sizes.json`` (open_clip). It is
   JSON, never pickle, and at most ``MAX_INDEX_BYTES`` are read.
2. An index may come from an untrusted place. The shards that it lists have the protocol of its own
   URL or one of ``_STORES`` (for a local index: ``_STORES_OF_LOCAL``). Only a local index may name
   local files, and no index may name an open descriptor, a command, standard input or a chain of
   file systems (``a::b://``).
3. An index that is written here is in the format of wids. Beside what wids knows, an entry says
   whether it is still right: ``version``, that of the shard when it was read, and ``idx_md5sum``
   and ``dali_md5sum``, the MD5s of the indexes that were written with it.
4. A name in an index is relative to the place of the index. It means the shard whose path has the
   longest end in common with it, at least the base name. If an entry could mean two shards, or a
   shard two entries, that is an error.
The indexes beside a shard say where each of its samples begins, and which key it has.
``X.tar.idx`` beside ``X.tar`` holds n + 1 unsigned 64-bit little-endian integers: the byte of the
first header of each sample, and the end of the last one. Megatron-Energon has the same file.
``X.tar.keys`` finds a sample by its key: n hashes (unsigned, 64 bits, sorted), then the number of
the sample of each (unsigned, 32 bits), both little-endian. Different keys may have one hash, so the
key in the tar decides.

Rules of the indexes beside a shard:
1. Only uncompressed shards have offsets.
2. A shard may have been written again after its index. So nothing here is trusted: sizes are
   checked before memory is allocated, offsets before they are used, and what stands at an offset
   is checked when it is read. The header after a sample must be of another sample, and the sample
   before it must be whole and end where it begins, which takes reading the headers of that one. A
   sample of a remote shard that is read by itself is not compared with the one before it, which
   would double the bytes: there, an offset of a second member shows only when both are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, mended
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.expand import expand, urls_of
from wds_pipes.io.once import once
from wds_pipes.io.outputs import StorageOptions, info_of, read_small, remove, size_of, target_of, write_small
from wds_pipes.io.packed import Packed, PackedInts, SharedBytes
from wds_pipes.io.urls import Urls, at_home, identify, links_of, local_path, redact, with_variables, without_secrets
from wds_pipes.tar.headers import BLOCK

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from wds_pipes.io.open import Opener

    Keys = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]  # of a shard: sorted hashes, numbers of samples

MAX_INDEX_BYTES = 1 << 30  # enough for 6 million shards
_MOST_AT_ONCE = 64 << 20  # bytes that are parsed at once, which take ten to twenty times that
_BLOCK = 1 << 20  # bytes of an index that are read at a time
_SHARDLIST = re.compile(rb'"shardlist"\s*:\s*\[')
_COMMA = re.compile(rb"\s*,")
_MOST_ENDS = 8  # places in a block where an entry may end
_AT_A_TIME = 1 << 12  # shards
_NO_MD5 = "0" * 32
_FIELDS = ("url", "nsamples", "filesize", "md5sum", "version")
_READAHEAD_BYTES = 2 << 20
_MD5 = re.compile(r"[0-9a-fA-F]{32}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
_STORES = ("http", "https", "s3", "s3a", "gs", "gcs")  # any index may name these
# A local index may name these too: ``wds-pipes index`` may have written it.
_STORES_OF_LOCAL = (*_STORES, "hf", "az", "abfs", "abfss", "ais")
MEND = "Make one with: wds-pipes index SHARDS -o index.json"


class ShardFacts(NamedTuple):
    """What is known about a shard; None for what is not.

    Attributes:
        samples: the number of its samples.
        size: its size in bytes, as it is stored (maybe compressed).
        md5: the MD5 of these bytes, 32 hexadecimal digits in lower case.
    """

    samples: int | None = None
    size: int | None = None
    md5: str | None = None


class Facts:
    """What is known about many shards, in columns: 33 bytes for each, and its version.

    Attributes:
        samples: the number of samples of each shard.
        versions: the time of modification of each shard, or its ETag in a store, as ``version_of``
            returned it; empty if it is not known, or the shard may be a copy.
    """

    def __init__(self) -> None:
        self.samples, self._sizes, self._md5s = PackedInts(), PackedInts(), SharedBytes()
        self._has_md5 = bytearray()  # 1 or 0 of each shard
        self.versions = Packed()

    def add(
        self,
        samples: Sequence[int],
        sizes: Sequence[int | None],
        md5s: Sequence[str | None],
        versions: Sequence[Any],
    ) -> None:
        """Add shards at the end, before one is requested. What is no text is no version."""
        self.samples.add(samples)
        self._sizes.add([-1 if size is None else size for size in sizes])
        self._has_md5.extend(map(bool, md5s))
        self._md5s.data += bytes.fromhex("".join([md5 or _NO_MD5 for md5 in md5s]))
        if set(map(type, versions)) != {str} or "\0" in "".join(versions):
            versions = [text if isinstance(text, str) and "\0" not in text else "" for text in versions]
        self.versions.add(versions)

    def extend(self, facts: Iterable[ShardFacts], versions: Sequence[str]) -> None:
        """Add shards at the end, whose numbers of samples are known."""
        samples, sizes, md5s = zip(*facts, strict=True)
        self.add(samples, sizes, md5s, versions)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> ShardFacts:
        md5 = self._md5s.data[16 * number : 16 * number + 16].hex() if self._has_md5[number] else None
        return ShardFacts(self.samples[number], self.size(number), md5)

    def __iter__(self) -> Iterator[ShardFacts]:
        return map(self.__getitem__, range(len(self)))

    def size(self, number: int) -> int | None:
        """Return the size of a shard."""
        size = self._sizes[number]
        return None if size < 0 else size

    def md5s(self) -> Iterator[bytes] | None:
        """Yield the MD5s of the shards as text, many at a time, with a NUL between them; None: one
        is not known.
        """
        data, step = self._md5s.data, 16 * _AT_A_TIME
        if not all(self._has_md5):
            return None
        return (data[at : at + step].hex("\0", 16).encode() for at in range(0, len(data), step))

    def sizes(self) -> Iterator[bytes] | None:
        """Yield the sizes of the shards and their numbers of samples as text, like ``md5s``."""
        if min(self._sizes, default=0) < 0:
            return None
        texts = map(b"%d %d".__mod__, zip(self._sizes, self.samples, strict=True))
        return iter(lambda: b"\0".join(islice(texts, _AT_A_TIME)), b"")


class Index(NamedTuple):
    """The content of an index file.

    Attributes:
        url: where the index is.
        shards: the URLs of the shards that it lists.
        facts: what it says about each.
        rules: how the samples were found: ``key_split`` and ``on_repeated_key``.
        written: of each shard, the version and the MD5s that ``write_index`` wrote for it; None:
            they are not kept.
    """

    url: str
    shards: Packed
    facts: Facts
    rules: dict[str, str]
    written: list[tuple[Any, Any, Any]] | None


def read_indexes(urls: Sequence[str], storage_options: StorageOptions) -> list[Index]:
    """Read several index files, in order. Of those in a store, one rank reads for all."""
    opener = make_opener(storage_options, readahead_bytes=_READAHEAD_BYTES, connections=2)
    return [once("index", url, partial(_read, url, opener)) for url in urls]


def known_version(urls: Packed, facts: Facts | None, url: str) -> str | None:
    """Return the version of one of some shards that an index knows; None: it is not known.

    Args:
        urls: the shards.
        facts: what the index says of each; None: there is no index.
        url: the shard.
    """
    number = None if facts is None else urls.number_of(url)
    return None if facts is None or number is None else facts.versions[number] or None


def make_opener(storage_options: StorageOptions, **reading: int) -> Opener:
    """An opener of index files and shards; ``reading``: options of ``Reading``."""
    from wds_pipes.io.open import Opener  # imports asyncio, which writing shards does not need
    from wds_pipes.io.remote.budget import Reading

    return Opener(Reading(storage_options or {}, **reading))


def _read(url: str, opener: Opener, written: list[tuple[Any, Any, Any]] | None = None) -> Index:
    shown, index = redact(url), Index(url, Packed(), Facts(), dict(_RULES), written)
    try:
        with opener.open(url) as stream:
            _parse(index, stream)
    except ShardError as error:
        where = error.where and f"index {shown}"
        mend, mend_cli, missing = error.mend, error.mend_cli, error.missing
        raise ShardError(error.what, where=where, mend=mend, mend_cli=mend_cli, url=shown, missing=missing) from error
    except OSError as error:
        raise ShardError(
            f"index {shown} cannot be read ({type(error).__name__}: {error}). Check that it is a "
            "file, and can be reached.",
            url=shown,
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"index {shown} cannot be used: {error}. {MEND}") from error
    return index


def _parse(index: Index, stream: BinaryIO) -> None:
    """Parse an index by its content. The message of a ValueError continues a sentence.

    The entries of a long ``shardlist`` are parsed while it is read, which takes a tenth of the
    memory. At the end, what is left of it is an index too.
    """
    data = stream.read(_BLOCK)
    head, before, size = b"", None, len(data)
    if opening := _SHARDLIST.search(data):
        with contextlib.suppress(ValueError, RecursionError):
            before = json.loads(data[: opening.end()] + b"]}")
            head, data = data[: opening.end()], data[opening.end() :]
    while more := stream.read(_BLOCK):
        data, size = data + more, size + len(more)
        if before is not None:
            entries, data = _whole_entries(data)
            if entries:
                _add_wids(index, before, entries)
            else:
                before = None  # it is written in another way than usual: all that is left is parsed at once
        if size > MAX_INDEX_BYTES or len(data) > _MOST_AT_ONCE:
            most = min(MAX_INDEX_BYTES, _MOST_AT_ONCE + size - len(data))
            raise ValueError(f"it has more than {most} bytes, so it is no index, or should be cut into several")
    try:
        content = json.loads(head + data)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error}); its first bytes are {(head + data)[:24]!r}") from error
    if isinstance(content, dict) and ("wids_version" in content or "shardlist" in content):
        _add_wids(index, content, content.get("shardlist"))
        index.rules.update({name: content[name] for name in _RULES if name in content})
    elif isinstance(content, dict) and content and not any(isinstance(each, (dict, list)) for each in content.values()):
        names, none = list(content), [None] * len(content)
        samples = list(content.values())
        _check_counts("the number for {!r}", names, samples)
        index.shards.add(_joined(index.url, names)[0])
        index.facts.add(samples, none, none, none)
    else:
        raise ValueError("its content is in no known format (wids index.json, sizes.json)")


def _whole_entries(data: bytes) -> tuple[list[Any], bytes]:
    """Return the entries at the beginning of a list, and the rest; none if that is not found out
    soon.
    """
    from wds_pipes.codecs.text import decode_json  # uses orjson, which takes half of the time

    end = len(data)
    for _ in range(_MOST_ENDS):
        end = data.rfind(b"}", 0, end)
        if end >= 0 and (comma := _COMMA.match(data, end + 1)):
            with contextlib.suppress(ValueError, RecursionError):  # this one ends something in an entry
                return decode_json(b"[%b]" % data[: end + 1], exact=False), data[comma.end() :]
    return [], data


def _add_wids(index: Index, content: dict[str, Any], entries: Any) -> None:
    """Add entries of the ``shardlist`` of an index."""
    if content.get("wids_version", 1) != 1:
        raise ValueError(f"its wids_version is {content['wids_version']!r:.40}, and 1 is known here")
    if not isinstance(entries, list):
        raise ValueError(f"its shardlist is {entries!r:.80}, not a list")
    if not entries:
        return
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str) or not entry["url"]:
            raise ValueError(f"an entry of its shardlist has no url: {entry!r:.80}")
    names, samples, sizes, md5s, versions = ([entry.get(field) for entry in entries] for field in _FIELDS)
    if index.written is not None:
        index.written.extend(
            (entry.get("version"), entry.get("idx_md5sum"), entry.get("dali_md5sum")) for entry in entries
        )
    _check_counts("nsamples of {!r}", names, samples)
    _check_counts(
        "filesize of {!r}", names, [0 if size is None else size for size in sizes] if None in sizes else sizes
    )
    # all at once take a fifth of the time
    if set(map(type, md5s)) != {str} or set(map(len, md5s)) != {32} or not _HEXADECIMAL.fullmatch("".join(md5s)):
        for name, md5 in zip(names, md5s, strict=True):
            if md5 and not (isinstance(md5, str) and _MD5.fullmatch(md5)):
                raise ValueError(f"md5sum of {name!r} is {md5!r:.80}, not 32 hexadecimal digits")
    urls, beside = _joined(index.url, names)
    if content.get("place") != place_of(index.url):  # the shards beside the index may be copies
        versions = ["" if near else version for near, version in zip(beside, versions, strict=True)]
    index.shards.add(urls)
    index.facts.add(samples, sizes, md5s, versions)


def _check_counts(what: str, names: Sequence[str], values: Sequence[Any]) -> None:
    """Check that numbers are not negative."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) >= 1 << 62:
        for name, value in zip(names, values, strict=True):
            if type(value) is not int or not 0 <= value < 1 << 62:
                raise ValueError(f"{what.format(name)} is {value!r:.80}, not a number of 0 or more")


# Names

# In names with a NUL before and after each. A regular expression takes ten times as long.
_UNUSUAL = (":", "\0/", "\0.")
_NOT_NORMAL = ("//", "/.", "/\0", "\0\0")  # what ``posixpath.normpath`` may change


def path_of(url: str) -> str:
    """A URL without its query; a local path unchanged."""
    return url if local_path(url) is not None else url.partition("?")[0]


def folder_of(url: str) -> str:
    """The directory of a URL, with its final slash."""
    path = path_of(url)
    return path[: len(path) - len(base_name(url))]


def place_of(index: str) -> str:
    """16 hexadecimal digits for the directory of an index."""
    path = local_path(index)
    folder = identify(folder_of(index)) if path is None else os.path.realpath(os.path.dirname(at_home(path)))
    return blake2b(os.fsencode(folder), digest_size=8).hexdigest()


def parts_of_path(url: str) -> list[str]:
    """The host and the names in the path of a URL, for comparison."""
    path = local_path(url)
    text = path_of(redact(url)).partition("://")[2] if path is None else path
    return [part for part in posixpath.normpath(text).split("/") if part]


def base_name(url: str) -> str:
    """The last part of the path of a URL."""
    return path_of(url).rpartition("/")[2]


def first_dot(url: str) -> str:
    """The base name up to its first dot, if that is not its beginning."""
    name = base_name(url)
    return name[:1] + name[1:].partition(".")[0]


def dali_name(url: str) -> str:
    """The name of the index of DALI of a shard: its base name up to the first dot, and ``.idx``."""
    return first_dot(url) + ".idx"


def _joined(index: str, names: Sequence[str]) -> tuple[list[str], Iterable[bool]]:
    """The URLs for names in an index, and whether each is relative to it."""
    text = "\0".join(("", *names, ""))
    odd = _UNUSUAL if local_path(index) is not None else (*_UNUSUAL, *_NOT_NORMAL)
    if text.isascii() and text.count("\0") == len(names) + 1 and not any(each in text for each in odd):
        folder = _join(index, "x")[:-1]
        return [folder + name for name in names], repeat(True, len(names))
    beside = [not name.startswith("/") and local_path(name) is not None for name in names]
    return [_join(index, name) for name in names], beside


def _join(index: str, name: str) -> str:
    """The URL for a name in an index; ValueError: no file can have this name."""
    os.fsencode(name)
    if "\0" in name:
        raise ValueError(f"{name!r:.80} is no name of a file: it contains a NUL")
    if local_path(index) is not None:
        if local_path(name) != name or os.path.isabs(name):
            return name
        joined = folder_of(index) + name
        return posixpath.normpath(joined) if name.startswith(("./", "../")) else joined
    if local_path(name) is None:
        return name
    if local_path(name) != name:
        raise ValueError(f"it lies elsewhere, and may not name the file {name!r:.80} of this machine")
    scheme, _, path = path_of(index).partition("://")
    host, _, folder = path.rpartition("/")[0].partition("/")
    return f"{scheme}://{host}{posixpath.normpath(posixpath.join('/', folder, name))}"


def check_named(index: str, urls: Packed) -> None:
    """Check rule 2.

    Raises:
        ValueError: an index may not name one of these shards.
    """
    local = local_path(index) is not None
    allowed = _STORES_OF_LOCAL if local else (*_STORES, index.partition("://")[0])
    # the directory decides, but for the short ones that may be above those that are refused
    for url in urls[:1] if urls.plain and len(urls.folder) > len("/dev/fd/") else urls:
        if url.startswith("pipe:"):
            raise ValueError(f"index {redact(index)} names a command: only the program itself may")
        path = local_path(url)
        if local and url != "-" and path is not None and not path.startswith(("/dev/fd/", "/proc/")):
            continue
        protocol, _, rest = url.partition("://")
        if not rest or len(links_of(f"://{rest}")) > 1 or protocol not in allowed:
            what = (
                f"index {redact(index)} may not name {redact(url)!r:.200}: an index names shards "
                f"beside it, or by {', '.join(f'{name}://' for name in allowed)}"
            )
            raise mended(
                ValueError,
                what,
                mend="Name the shards themselves, and pass the file as index=.",
                mend_cli="Name the shards themselves.",
            )


# Writing

_KIND = b"wids-shard-index-v1"
# How the samples were found, if it is another rule than the usual one: see ``index_shards``.
_RULES = {"key_split": "first-dot", "on_repeated_key": "raise"}


class Entry(NamedTuple):
    """What is known of a shard.

    Attributes:
        facts: its samples, size and MD5.
        version: that of the shard when it was read, as ``version_of`` returns it.
        offsets: the MD5 of its indexes of offsets and keys.
        dali: the MD5 of its index of DALI.
    """

    facts: ShardFacts
    version: str | None = None
    offsets: str | None = None
    dali: str | None = None


def check_output(output: str | os.PathLike[str], *, remote: bool = False) -> str:
    """The path of an index to write, with ``remote`` also its URL; ValueError if it is another one,
    or has no existing directory.
    """
    if not isinstance(output, (str, os.PathLike)):
        raise TypeError(f"an index is named by a path, not {output!r:.80}")
    if TAR_NAME.fullmatch(os.path.basename(os.fspath(output))):
        raise ValueError(f"{redact(os.fspath(output))} is the name of a shard: name the index, such as index.json")
    if remote and local_path(target := target_of(output)) is None:
        return target
    path = local_path(at_home(with_variables(os.fspath(output))))
    if path is None or not path or path.endswith("/"):
        raise ValueError(
            f"an index is written to a local file, not to {redact(os.fspath(output))!r}: write it there and copy it"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"the directory of index {path!r} does not exist: make it first")
    return path


def check_is_index(path: str) -> None:
    """Refuse to replace a file that is no index, also no damaged one.

    Raises:
        ValueError: it is another file.
    """
    if not os.path.lexists(path):
        return
    content = b"a directory, a pipe or a device"
    if os.path.isfile(path):
        with open(path, "rb") as file:
            content = file.read(_MOST_AT_ONCE)
    try:
        known = _KIND in content or isinstance(json.loads(content)["shardlist"], list)
    except (ValueError, LookupError, TypeError, RecursionError):
        known = False
    if content.strip() and not known:
        raise ValueError(f"{path} is another file than an index: name another one to write, or remove it first")


def write_index(
    path: str,
    entries: Mapping[str, Entry],
    rules: Mapping[str, str] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Write an index of shards by their URLs; the file appears when it is complete."""
    shardlist = []
    named = {name_in(path, url): entry for url, entry in entries.items()}
    if len(named) < len(entries):
        raise ValueError(
            "two shards have one name without the credentials in their URLs, so an index cannot "
            "tell them apart: give them other names"
        )
    for name, ((samples, size, digest), version, offsets, dali) in named.items():
        entry = {
            "url": name,
            "md5sum": digest,
            "nsamples": samples,
            "filesize": size,
            "version": version,
            "idx_md5sum": offsets,
            "dali_md5sum": dali,
        }
        shardlist.append({field: value for field, value in entry.items() if value is not None})
    unusual = {name: rule for name, rule in (rules or {}).items() if rule != _RULES[name]}
    if any("version" in entry for entry in shardlist):  # of the shards at this place, not of copies
        unusual["place"] = place_of(path)
    content = {"__kind__": _KIND.decode(), "wids_version": 1, **unusual, "shardlist": shardlist}
    write_small(path, (json.dumps(content, indent=1) + "\n").encode("ascii"), storage_options)


def read_entries(
    path: str, storage_options: StorageOptions = None
) -> tuple[dict[str, tuple[str, str, Entry]], dict[str, str]]:
    """Read an index that will be written again.

    Returns:
        Of each shard, by its name in the index: its URL, its version unless it may be a copy, and
        what was written of it; and how the samples were found.

    Raises:
        ValueError: it is damaged, or in another format.
        ShardError: it cannot be read.
    """
    index = _read(path, make_opener(storage_options), [])
    written = index.written or [(None, None, None)] * len(index.shards)
    entries = {}
    for url, facts, present, of_shard in zip(index.shards, index.facts, index.facts.versions, written, strict=True):
        entries[name_in(path, url)] = url, present, Entry(facts, *of_shard)
    return entries, index.rules


def name_in(index: str, url: str) -> str:
    """The name of a shard in an index.

    It is relative for a shard in the directory of the index or below; otherwise it is complete.
    """
    path = local_path(url)
    if path is None:
        folder = without_secrets(index).rpartition("/")[0] + "/"
        return without_secrets(url).removeprefix(folder) if local_path(index) is None else without_secrets(url)
    path, folder = os.path.abspath(path), os.path.dirname(os.path.abspath(index))
    inside = path.startswith(os.path.join(folder, ""))
    return os.path.relpath(path, folder) if inside else path


_Parts = tuple[str, ...]

# File names of an index in the directory of its shards.
_BESIDE = ("index.json", "sizes.json")


# Reading


def is_index(url: str) -> bool:
    """Whether a URL in a list of shards names an index: its path ends in ``.json``."""
    name = url.lower()  # most names are those of shards, and need only this
    return ".json" in name and path_of(name).endswith(".json")


def listed_shards(urls: Sequence[str], storage_options: StorageOptions = None) -> list[Index]:
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


def list_shards(urls: Urls, storage_options: StorageOptions = None) -> tuple[Packed, Facts | None]:
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


def list_indexed(
    urls: Urls, index: bool | str | os.PathLike[str] = True, storage_options: StorageOptions = None
) -> Listed:
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


def find_facts(urls: Sequence[str], index: Urls | bool, storage_options: StorageOptions = None) -> Facts:
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
    folder: str, shards: Sequence[str], storage_options: StorageOptions, files: list[str], offsets: dict[str, int]
) -> None:
    """Add the index in a directory: the first kind that exists, in a fixed order. An index of
    offsets is one file per shard, and its size says the number of samples.
    """
    for name in _BESIDE:
        if _exists_for_all(folder + name, storage_options):
            files.append(folder + name)
            return
    if _exists_for_all(beside(shards[0], OFFSETS, folder), storage_options):
        each = list(dict.fromkeys(beside(shard, OFFSETS, folder) for shard in shards))
        local = local_path(each[0]) is not None
        names = f"the sizes of {_digest(each)}, from"
        sizes = (
            list(map(_size, each)) if local else once(names, each[0], lambda: _sizes_in_store(each, storage_options))
        )
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


def _exists_for_all(url: str, storage_options: StorageOptions) -> bool:
    """Return whether something exists; one rank requests it for all."""
    return once("the existence of", url, lambda: exists(url, storage_options))


def _digest(texts: Iterable[str]) -> str:
    return blake2b("\0".join(texts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _size(url: str) -> int | None:
    try:
        return os.stat(local_path(url) or url).st_size
    except FileNotFoundError:
        return None


def _sizes_in_store(urls: Sequence[str], storage_options: StorageOptions) -> list[int | None]:
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


def exists(url: str, storage_options: StorageOptions) -> bool:
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


# The indexes beside a shard. Functions import numpy, which reading and writing tars does not need.

OFFSETS, KEYS = ".idx", ".keys"  # what the names of these files add to that of the shard
MEND_OFFSETS = "Make it with: wds-pipes index SHARDS --offsets"


class MissingIndexError(ShardError):
    """A shard has no index of offsets or of keys."""


def beside(url: str, ending: str, folder: str | None = None) -> str:
    """Return the URL of the file of a shard that ends in ``OFFSETS`` or ``KEYS``: beside the shard,
    or in a folder, under the base name of the shard.
    """
    path = path_of(url)
    if folder is not None:
        path = os.path.join(folder, path.rpartition("/")[2])
    return path + ending


def pack_offsets(offsets: Sequence[int]) -> bytes:
    """Return the content of an index of offsets."""
    import numpy as np

    return np.array(offsets, "<u8").tobytes()


def pack_keys(keys: Collection[str]) -> bytes:
    """Return the content of an index of keys: those of the samples, in their order."""
    import numpy as np

    hashes = np.fromiter(map(hash_text, keys), "<u8", len(keys))
    order = np.argsort(hashes, kind="stable")
    return bytes(hashes[order].tobytes() + order.astype("<u4").tobytes())


def unpack_offsets(data: bytes, url: str) -> npt.NDArray[np.uint64]:
    """Return the offsets in an index: uint64, shape (samples + 1,). ``url``: where it is, for
    messages.

    Raises:
        MissingIndexError: it is an index of DALI.
        ShardError: it is damaged.
    """
    import numpy as np

    if data.startswith(b"v1."):  # not a multiple of 512
        raise MissingIndexError(str(unusable(url, "it is of DALI, which has other offsets")), url=redact(url))
    if not data or len(data) % 8:
        raise unusable(url, f"it has {len(data)} bytes, not 8 for each sample and 8 more, so it is damaged")
    offsets = np.frombuffer(data, "<u8")
    if (offsets % BLOCK).any() or (offsets[1:] <= offsets[:-1]).any() or offsets[-1] >> np.uint64(62):
        raise unusable(url, f"its numbers are not offsets of samples, which rise in steps of {BLOCK} bytes")
    return offsets


def unpack_keys(data: bytes, samples: int, url: str) -> Keys:
    """Return the hashes in an index of keys and the numbers of their samples, each of shape
    (samples,).

    Raises:
        ShardError: it is damaged, or of another number of samples.
    """
    import numpy as np

    if len(data) != 12 * samples:
        raise unusable(url, f"it has {len(data)} bytes, not 12 for each of {samples} samples")
    hashes, numbers = np.frombuffer(data, "<u8", samples), np.frombuffer(data, "<u4", samples, 8 * samples)
    if (hashes[1:] < hashes[:-1]).any() or (np.sort(numbers) != np.arange(samples)).any():
        raise unusable(url, "its hashes are not sorted, or a sample is not there once")
    return hashes, numbers


def unusable(url: str, what: str, *, shard: str | None = None) -> ShardError:
    """Return the error for an index that cannot be used."""
    of = "" if shard is None else f" of shard {redact(shard)}"
    return ShardError(
        f"index {redact(url)}{of} cannot be used: {what.rstrip('.')}. {MEND_OFFSETS}", url=redact(shard or url)
    )


def stale_offset(url: str, offset: int) -> ShardError:
    """Return the error for a shard of which no sample starts where its index of offsets says."""
    shown = redact(url)
    return ShardError(
        f"shard {shown}, byte {offset}: by the index of offsets a sample starts there, and none does: the shard is "
        f"another than the indexed one. {MEND_OFFSETS}",
        url=shown,
        offset=offset,
    )


def stale_keys(url: str, key: str, folder: str | None = None) -> ShardError:
    """Return the error for a shard with a sample whose key its index of keys, beside it or in a
    folder, does not have.
    """
    what = f"the shard is another than the indexed one: it has a sample {key!r}, which the index does not have there"
    return unusable(beside(url, KEYS, folder), what, shard=url)


def write_offsets(
    path: str, keys: Collection[str], offsets: Sequence[int], storage_options: dict[str, Any] | None = None
) -> None:
    """Write the indexes of keys and of offsets of a shard; each appears when it is complete."""
    write_small(path + KEYS, pack_keys(keys), storage_options)
    write_small(path + OFFSETS, pack_offsets(offsets), storage_options)


def remove_beside(path: str, storage_options: dict[str, Any] | None = None, *, besides: Container[str] = ()) -> None:
    """Remove the files of a shard that is about to be replaced, besides those with some endings."""
    for ending in (OFFSETS, KEYS):
        if ending not in besides:
            remove(path + ending, storage_options)
    dali = folder_of(path) + dali_name(path)
    with contextlib.suppress(IsADirectoryError):
        if read_small(dali, storage_options, most=3) == b"v1.":
            remove(dali, storage_options)


# The index of DALI, a text, ``X.idx`` for ``X.tar``, version 1.2. The first line is
# ``v1.2 SAMPLES``. Each other line is a sample: for each of its files the extension, the byte where
# the data begins, the size, and the name, all separated by blanks. The samples are those of DALI:
# other than in ``group_by_key``, a file without a dot in its name is a sample too, and so are those
# under ``__name__/``.
#
# DALI's own program, wds2idx, writes the same bytes, with two exceptions. Its offsets of long GNU
# names are wrong where it calls GNU tar. Files of v7 tars are missing where it does not.

_BLANK = re.compile(r"[ \t\n\v\f\r]")  # where DALI ends a word


class Component(NamedTuple):
    """A file of a shard: its name, where its data begins, and the size; ``plain``: these bytes are
    the file.
    """

    name: str
    start: int
    size: int
    plain: bool = True


def pack_dali(components: Sequence[Component], url: str) -> bytes:
    """Return an index of DALI with the files of a shard.

    Raises:
        ShardError: DALI cannot open such a shard: a name contains a blank or ends in a dot, a
            member is sparse, or there are no samples.
    """
    shown, lines, key = redact(url), list[list[str]](), ""
    for name, start, size, is_plain in components:
        dot = name.find(".", name.rfind("/") + 1)  # as DALI does, also where there is none
        stem, extension = name[:dot], name[dot + 1 :]
        if not stem or stem[-1] == "/":
            continue
        if not is_plain or not extension or _BLANK.search(name):
            what = (
                "is sparse or contiguous"
                if not is_plain
                else "has no extension after its dot"
                if not extension
                else "has a blank in its name"
            )
            raise ShardError(
                f"shard {shown} can have no index of DALI: member {name!r} at byte {start - BLOCK} {what}, and an "
                "index of DALI has no place for that. Write the shard again, with another name, or without --dali",
                url=shown,
                offset=start - BLOCK,
            )
        if not lines or stem != key:
            lines.append([])
            key = stem
        lines[-1].append(f"{extension} {start} {size} {name}")
    if not lines:
        raise ShardError(f"shard {shown} can have no index of DALI: it has no samples, which DALI refuses", url=shown)
    text = "".join(f"{line}\n" for line in (f"v1.2 {len(lines)}", *map(" ".join, lines)))
    return text.encode("utf-8", "surrogateescape")
