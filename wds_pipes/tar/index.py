"""The index of shards: how many samples, bytes and which MD5 each has. Without torch.

Rules:
1. The form is told by content: wids ``index.json``, ``sizes.json`` and ``__len__`` (open_clip), ``_info.json`` (timm), DALI's ``.idx``. What is written is
   the form of wids. It is JSON or plain numbers, never pickle, and at most ``MAX_INDEX_BYTES`` are read.
2. A name in an index is relative to the place of the index. It means the shard with which it has most of the path in common, the base name at least;
   what could mean two shards, or two names that could be meant by one shard, are an error.
3. An index may come from anywhere. The shards that it lists lie in its own store or in one of ``_STORES``. Only an index on this machine may name files of
   this machine, and none may name a command, standard input or a chain of file systems (``a::b://``).
4. A shard is counted as ``group_by_key`` groups it.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from wds_pipes.errors import SampleError, ShardError, ShardWarning
from wds_pipes.io.compression import MAGIC_BYTES, decompress, detect, unreadable
from wds_pipes.io.partial import PartialFile
from wds_pipes.io.urls import Urls, at_home, expand, links_of, local_path, plain, redact
from wds_pipes.tar.keys import KeySplit, splitter
from wds_pipes.tar.reader import END, MARK, MAX_SIZE, TarReader, half_sample

if TYPE_CHECKING:
    from wds_pipes.io.open import Opener

MAX_INDEX_BYTES = 64 << 20  # enough for 400 000 shards
_BESIDE = ("index.json", "sizes.json", "_info.json", "info.json")  # the names of an index beside its shards
_LENGTH = "__len__"
_READERS, _READAHEAD_BYTES = 16, 2 << 20  # so many index files are read at a time, and so much ahead of each
_STORES = ("http", "https", "s3", "s3a", "gs", "gcs")  # that any index may name
_STORES_OF_LOCAL = (*_STORES, "hf", "az", "abfs", "abfss", "ais")  # that an index on this machine may name: ``wds-pipes index`` may have written it
_MEND = "Make one with: wds-pipes index SHARDS -o index.json"

Options = dict[str, Any] | None


class ShardFacts(NamedTuple):
    """What is known of a shard; None for what is not.

    Attributes:
        samples: how many samples it has.
        size: how many bytes it has as it is stored.
        md5: the MD5 of these bytes, 32 hexadecimal digits in lower case.
    """

    samples: int | None = None
    size: int | None = None
    md5: str | None = None


class _Index(NamedTuple):
    """What an index file says: of each shard it names, or (``shards`` is empty) the ``total`` of samples. ``parts``: of how many data sets."""

    url: str
    shards: list[tuple[str, ShardFacts]]
    total: int | None = None
    parts: int = 1
    of_stem: bool = False  # the name is that of the shard but for the extension, ``.idx``


# Reading


def is_index(url: str) -> bool:
    """Whether a URL in a list of shards names an index by its ending, ``.json``."""
    return _path(url).lower().endswith(".json")


def listed_shards(urls: Sequence[str], storage_options: Options = None) -> list[tuple[str, ShardFacts]]:
    """The shards that index files list, in order, with what they say of each.

    Raises:
        ValueError: one is damaged, or names no shards to open.
        ShardError: one cannot be read.
    """
    found: list[tuple[str, ShardFacts]] = []
    for index in _read_all(urls, storage_options):
        if not index.shards or index.of_stem:
            raise ValueError(f"index {redact(index.url)} does not list shards: name the shards, and pass it as index=")
        if index.parts > 1:
            raise ValueError(
                f"index {redact(index.url)} lists {index.parts} splits, of which one is to be chosen: name its shards, and pass the file as index="
            )
        for url, _ in index.shards:
            _check_named(index.url, url)
        found += index.shards
    return found


def find_facts(urls: Sequence[str], index: Urls | bool, storage_options: Options = None) -> list[ShardFacts]:
    """What an index says of each of ``urls``.

    Args:
        urls: the shards.
        index: paths or URLs of index files, or directories with one; True for the directories of the shards.
        storage_options: as fsspec takes them.

    Raises:
        ValueError: the index is damaged, or there is none; a shard is not in it, or it cannot be told which of its names is meant.
        ShardError: the index cannot be read.
    """
    if index is not True and (not isinstance(index, (str, os.PathLike, Iterable)) or isinstance(index, (bytes, dict))):
        raise TypeError(f"index must be the path or URL of an index, a list of them, or True, not {index!r:.80}")
    files: list[str] = []
    if index is True:
        folders: dict[str, list[str]] = {}
        for url in urls:
            folders.setdefault(_folder(url), []).append(url)
        for folder, shards in folders.items():
            files += _look_in(folder, shards, storage_options)
    else:
        for item in [index] if isinstance(index, (str, os.PathLike)) else index:
            name = os.fspath(item) if isinstance(item, os.PathLike) else item
            name = at_home(name) if isinstance(name, str) else name
            if isinstance(name, str) and (name.endswith("/") or os.path.isdir(local_path(name) or "")):
                files += _look_in(name.rstrip("/") + "/", urls, storage_options)
            else:
                files += expand(item, storage_options)
    indices = _read_all(files, storage_options)
    totals = [found for found in indices if found.total is not None]
    if totals:
        total, distinct = totals[0], len(set(urls))
        if len(indices) > 1 or distinct > 1:
            where = redact(total.url)
            raise ValueError(f"index {where} says only that there are {total.total} samples in all, not how many each of {distinct} shards has. {_MEND}")
        return [ShardFacts(total.total)] * len(urls)
    return _Matcher(indices).of(urls)


def _look_in(folder: str, shards: Sequence[str], storage_options: Options) -> list[str]:
    """The index files in a directory or beside a shard: the first that is there, in a fixed order; DALI's are one for each shard."""
    for name in _BESIDE:
        if _exists(folder + name, storage_options):
            return [folder + name]
    for stem in (_first_dot, _last_dot):
        if _exists(f"{folder}{stem(shards[0])}.idx", storage_options):
            return list(dict.fromkeys(f"{folder}{stem(shard)}.idx" for shard in shards))
    if _exists(folder + _LENGTH, storage_options):
        return [folder + _LENGTH]
    shown = redact(folder) or "the working directory"
    raise ValueError(f"there is no index in {shown}: none of {', '.join(_BESIDE)}, {_LENGTH}, or {_first_dot(shards[0])}.idx for each shard. {_MEND}")


def _exists(url: str, storage_options: Options) -> bool:
    path = local_path(url)
    if path is not None:
        return os.path.isfile(path)
    from wds_pipes.io.remote.file_systems import file_system

    fs, name = file_system(url, storage_options)
    return bool(fs.isfile(name))


def _read_all(urls: Sequence[str], storage_options: Options) -> list[_Index]:
    at_once = max(1, min(len(urls), _READERS))
    opener = _opener(storage_options, readahead_bytes=at_once * _READAHEAD_BYTES, connections=2 * at_once)
    if len(urls) == 1:
        return [_read(urls[0], opener)]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda url: _read(url, opener), urls))


def _opener(storage_options: Options, **reading: int) -> Opener:
    from wds_pipes.io.open import Opener  # imports asyncio, which writing shards does without
    from wds_pipes.io.remote.shard import Reading

    return Opener(Reading(storage_options or {}, **reading))


def _read(url: str, opener: Opener) -> _Index:
    shown = redact(url)
    try:
        with opener.open(url) as stream:
            data = stream.read(64)
            if not data.startswith(b"v1."):  # of DALI's only the first line matters
                data += stream.read(MAX_INDEX_BYTES + 1 - len(data))
    except ShardError as error:
        raise ShardError(str(error).replace("shard ", "index ", 1), url=shown) from error
    except OSError as error:
        raise ShardError(f"index {shown} cannot be read ({type(error).__name__}: {error}). Check that it is a file, and can be reached.", url=shown) from error
    try:
        return _parse(url, data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"index {shown} cannot be used: {error}. {_MEND}") from error


def _parse(url: str, data: bytes) -> _Index:
    """An index by its content; ValueError in words that follow a colon."""
    dali = re.match(rb"v1\.\d+ (\d{1,18})(\s|$)", data)
    if dali:
        return _Index(url, [(_path(url), ShardFacts(int(dali[1])))], of_stem=True)
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(f"it has more than {MAX_INDEX_BYTES} bytes, so it is no index, or should be cut into several")
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is neither JSON nor an index of DALI ({error}); its first bytes are {data[:24]!r}") from error
    if isinstance(content, int) and not isinstance(content, bool):
        return _Index(url, [], total=_count("its number", content))
    if isinstance(content, dict) and ("wids_version" in content or "shardlist" in content):
        return _Index(url, list(_wids(url, content)))
    if isinstance(content, dict) and isinstance(content.get("splits"), dict):
        return _Index(url, list(_timm(url, content["splits"])), parts=len(content["splits"]))
    if isinstance(content, dict) and content and not any(isinstance(value, (dict, list)) for value in content.values()):
        return _Index(url, [(_join(url, name), ShardFacts(_count(f"the number for {name!r}", value))) for name, value in content.items()])
    raise ValueError("its content is of no form that is known here (wids index.json, sizes.json, __len__, timm's _info.json, DALI's .idx)")


def _wids(url: str, content: dict[str, Any]) -> Iterator[tuple[str, ShardFacts]]:
    if content.get("wids_version", 1) != 1:
        raise ValueError(f"its wids_version is {content['wids_version']!r:.40}, and 1 is known here")
    for place, part in enumerate([content, *_list("datasets", content.get("datasets", []))]):
        if not isinstance(part, dict) or (place and "source_url" in part):
            raise ValueError("one of its datasets is another index: name each index by itself, as a list")
        base = part.get("base") if place else None
        folder = url if base is None else _join(url, f"{base}/index.json")
        for entry in _list("shardlist", part.get("shardlist", None if place or "datasets" not in content else [])):
            if not isinstance(entry, dict) or not isinstance(entry.get("url"), str) or not entry["url"]:
                raise ValueError(f"an entry of its shardlist has no url: {entry!r:.80}")
            name = entry["url"]
            size, digest = entry.get("filesize"), entry.get("md5sum") or None
            if digest is not None and not (isinstance(digest, str) and re.fullmatch(r"[0-9a-fA-F]{32}", digest)):
                raise ValueError(f"md5sum of {name!r} is {digest!r:.80}, not 32 hexadecimal digits")
            samples = _count(f"nsamples of {name!r}", entry.get("nsamples"))
            yield _join(folder, name), ShardFacts(samples, None if size is None else _count(f"filesize of {name!r}", size), digest and digest.lower())


def _timm(url: str, splits: dict[str, Any]) -> Iterator[tuple[str, ShardFacts]]:
    for split, part in splits.items():
        part = part if isinstance(part, dict) else {}
        names, counts = _list("filenames", part.get("filenames")), _list("shard_lengths", part.get("shard_lengths"))
        if len(names) != len(counts) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"split {split!r:.80} has {len(names)} filenames and {len(counts)} shard_lengths, or a filename that is none")
        for name, count in zip(names, counts, strict=True):
            yield _join(url, name), ShardFacts(_count(f"the length of {name!r}", count))


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"its {what} is {value!r:.80}, not a list")
    return value


def _count(what: str, value: Any) -> int:
    """A number that is not negative, also as decimal digits."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{what} is {value!r:.80}, not a number of 0 or more")
    return value


class _Matcher:
    """Which entry of an index means a shard: rule 2."""

    def __init__(self, indices: Sequence[_Index]) -> None:
        self._where = ", ".join(redact(index.url) for index in indices[:2]) + (", ..." if len(indices) > 2 else "")
        self._entries: list[tuple[str, ShardFacts]] = []
        self._by_base: dict[str, list[int]] = {}
        self._by_end: dict[str, dict[str, list[int]]] = {}  # for a base name that several have, by each end of their paths
        known: dict[str, int] = {}
        for index in indices:
            for name, facts in index.shards:
                number = known.setdefault("/".join(_parts(name)), len(self._entries))
                if number == len(self._entries):
                    self._entries.append((name, facts))
                    self._by_base.setdefault(_base(name), []).append(number)
                elif self._entries[number][1] != facts:
                    raise ValueError(f"index {self._where} says two things of shard {redact(name)}: {self._entries[number][1]} and {facts}. {_MEND}")

    def of(self, urls: Sequence[str]) -> list[ShardFacts]:
        """The facts of each shard."""
        users: dict[int, str] = {}
        found = []
        for url in urls:
            number = self._find(url)
            user = users.setdefault(number, url)
            if user != url and _parts(user) != _parts(url):
                raise ValueError(
                    f"index {self._where} has one entry, {redact(self._entries[number][0])}, for two shards, {redact(user)} and {redact(url)}. {_MEND}"
                )
            found.append(self._entries[number][1])
        return found

    def _find(self, url: str) -> int:
        for base in (_base(url), *(f"{stem}.idx" for stem in (_base(url), _last_dot(url), _first_dot(url)))):
            group = self._by_base.get(base)
            if group is not None:
                break
        else:
            example = f"; it lists {len(self._entries)} others, such as {redact(self._entries[0][0])}" if self._entries else ", it is empty"
            raise ValueError(f"shard {redact(url)} is not in index {self._where}{example}. Pass the index of these shards. {_MEND}")
        if len(group) > 1:
            if base not in self._by_end:
                ends = self._by_end[base] = {}
                for number in group:
                    for end in _ends([*_parts(self._entries[number][0])[:-1], base]):
                        ends.setdefault(end, []).append(number)
            group = next(self._by_end[base][end] for end in _ends([*_parts(url)[:-1], base]) if end in self._by_end[base])
        if len(group) > 1:
            names = " and ".join(redact(self._entries[number][0]) for number in group[:2])
            raise ValueError(f"index {self._where} has {len(group)} entries that may mean shard {redact(url)}: {names}. {_MEND}")
        return group[0]


# Names


def _path(url: str) -> str:
    """A URL without its query; a path as it is."""
    return url if local_path(url) is not None else url.partition("?")[0]


def _folder(url: str) -> str:
    """The directory of a URL, with the slash at its end."""
    path = _path(url)
    return path[: len(path) - len(_base(url))]


def _parts(url: str) -> list[str]:
    """The host and the names in the path of a URL, for comparing."""
    path = local_path(url)
    text = path.replace(os.sep, "/") if path is not None else _path(redact(url)).partition("://")[2]
    return [part for part in posixpath.normpath(text).split("/") if part]


def _ends(parts: list[str]) -> Iterator[str]:
    """All ends of a path, the longest first."""
    return ("/".join(parts[start:]) for start in range(len(parts)))


def _base(url: str) -> str:
    return re.split(r"[/\\]" if os.sep == "\\" else "/", _path(url))[-1]


def _first_dot(url: str) -> str:
    return _base(url).partition(".")[0]


def _last_dot(url: str) -> str:
    return os.path.splitext(_base(url))[0]


def _join(index: str, name: str) -> str:
    """The URL that a name in an index means."""
    if local_path(index) is not None:
        if local_path(name) != name or os.path.isabs(name):
            return name
        joined = _folder(index) + name
        return posixpath.normpath(joined) if name.startswith(("./", "../")) else joined
    if local_path(name) is None:
        return name
    if local_path(name) != name:
        raise ValueError(f"it lies elsewhere, and may not name the file {name!r:.80} of this machine")
    scheme, _, path = _path(index).partition("://")
    host, _, folder = path.rpartition("/")[0].partition("/")
    return f"{scheme}://{host}{posixpath.normpath(posixpath.join('/', folder, name))}"


def _check_named(index: str, url: str) -> None:
    """Rule 3.

    Raises:
        ValueError: an index may not name this shard.
    """
    if url.startswith("pipe:"):
        raise ValueError(f"index {redact(index)} names a command: only the program itself may")
    local = local_path(index) is not None
    if local and url != "-" and local_path(url) is not None:
        return
    protocol, _, rest = url.partition("://")
    allowed = _STORES_OF_LOCAL if local else (*_STORES, index.partition("://")[0])
    if not rest or len(links_of(f"://{rest}")) > 1 or protocol not in allowed:
        raise ValueError(
            f"index {redact(index)} may not name {redact(url)!r:.200}: an index names shards beside it, or by {', '.join(f'{name}://' for name in allowed)}. "
            "Name the shards themselves, and pass the file as index=."
        )


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
) -> dict[str, ShardFacts]:
    """Read shards once, and tell the samples, bytes and MD5 of each; write that as an index.

    A shard has as many samples as ``group_by_key`` makes of it, whatever the decoding makes of them. The data of no member is kept in memory.

    Args:
        urls: as ``ShardList`` takes them.
        output: the path of the index to write, in the form of wids (``index.json``); it appears when it is complete. Shards in its directory or below are
            named from there, so that both can be moved; URLs are written without credentials. None: none is written.
        key_split: as in ``group_by_key``.
        on_repeated_key: as in ``group_by_key``.
        threads: how many shards are read at a time.
        storage_options: how to reach the storage: a dict, as fsspec takes it.
        on_shard: called with the URL and the facts of each shard, in order, when it has been read.

    Returns:
        The facts of each shard by its URL, in order.

    Raises:
        ShardError: a shard cannot be read, or is damaged.
        SampleError: a sample has a field twice, or a key comes again.
        ValueError: nothing matches, or ``output`` is no local path.
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
    stop, opener = threading.Event(), _opener(storage_options)

    def read(url: str) -> ShardFacts:
        return _read_shard(url, splitter(key_split), on_repeated_key, opener, stop)

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


def _read_shard(url: str, split: Callable[[str], tuple[str, str] | None], on_repeated_key: str, opener: Opener, stop: threading.Event) -> ShardFacts:
    shown = redact(url)
    with opener.open(url) as raw:
        hashed = _Hashed(raw, stop)
        stream = io.BufferedReader(hashed, 1 << 20)
        try:
            kind = detect(stream.peek(MAGIC_BYTES)[:MAGIC_BYTES])
            tar: BinaryIO = decompress(stream, kind) if kind else stream
            reader = TarReader(tar, url=url, want=lambda name: False, max_member_bytes=MAX_SIZE, doubts=True, named=False)
            samples = _count_samples(reader, split, on_repeated_key)
            while stream.read(1 << 20):
                pass
        except ModuleNotFoundError as error:
            raise ShardError(f"shard {shown} cannot be read: {error}", url=shown) from error
        except unreadable() as error:
            raise ShardError(f"shard {shown} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.", url=shown) from error
    return ShardFacts(samples, hashed.size, hashed.md5.hexdigest())


def _count_samples(members: Iterable[tuple[str, str, Any, int]], split: Callable[[str], tuple[str, str] | None], on_repeated_key: str) -> int:
    """How many samples ``group_by_key`` gives."""
    samples, key, fields, known, seen = 0, "", set[str](), set[str](), set[str]()
    doubts: list[tuple[int, bytes, int]] = []  # beside the sample that is read: where, what, and how many fields were known
    suspects: list[tuple[int, bytes, int]] = []  # beside the next one

    def check() -> None:
        for offset, place, before in doubts:
            if (samples > 1 and (len(fields) < len(known) or (place == MARK and len(known) > before))) or (samples == 1 and (place == END or not before)):
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
        suspects = []
        field = parts[1].lower()
        if field in fields:
            message = f"sample {key!r} of shard {redact(url)} has field {field!r} twice (again at byte {offset}, as {name!r}). Rename or remove one."
            raise SampleError(message, url=redact(url), key=key, offset=offset)
        fields.add(field)
        known.add(field)
    check()
    return samples


def _repeated(key: str, shown: str, offset: int, on_repeated_key: str) -> None:
    message = (
        f"key {key!r} comes again in shard {shown} at byte {offset}, apart from its other members, so that its sample is in pieces. Sort the shard by name, "
        "or pass on_repeated_key='ignore' here and to group_by_key, to take the pieces as samples."
    )
    if on_repeated_key == "raise":
        raise SampleError(message, url=shown, key=key, offset=offset)
    warnings.warn(message, ShardWarning, stacklevel=2)


class _Hashed(io.RawIOBase):
    """A stream that is read on from its beginning, with the number of its bytes and their MD5 so far. ``stop`` ends it with an error."""

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
    """The local path of an index to write; ValueError if it is none, or its directory is missing."""
    path = local_path(at_home(os.fspath(output)))
    if path is None or not path or path.endswith("/"):
        raise ValueError(f"an index is written to a local file, not to {redact(os.fspath(output))!r}: write it there and copy it")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"the directory of index {path!r} does not exist: make it first")
    return path


def write_index(path: str, facts: Mapping[str, ShardFacts]) -> None:
    """Write what is known of shards, by their URLs, as an index of wids; the file has its name only when it is complete."""
    shardlist = []
    named = {_named_from(path, url): found for url, found in facts.items()}
    if len(named) < len(facts):
        raise ValueError("two shards have one name without the credentials in their URLs, so an index cannot tell them apart: give them other names")
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
    """How an index names a shard: from its own directory where the shard lies there or below, else in full."""
    path = local_path(url)
    if path is None:
        return plain(url)
    path, folder = os.path.abspath(path), os.path.dirname(os.path.abspath(index))
    inside = path.startswith(os.path.join(folder, ""))
    return (os.path.relpath(path, folder) if inside else path).replace(os.sep, "/")
