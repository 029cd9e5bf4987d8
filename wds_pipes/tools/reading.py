"""The samples of shards with the bytes that they take, and samples by number or key."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, ShardWarning, WdsError, for_commands
from wds_pipes.io.compression import unpacked
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import Urls, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.grouping import GroupedShard, Grouping, Usual, suspect_sample, warn_of
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.index import MissingIndexError, ShardFacts, exists, find_facts, folder_of, list_shards
from wds_pipes.tar.indexing import readable
from wds_pipes.tar.keys import is_metadata, splitter
from wds_pipes.tar.reader import Link, TarReader

if TYPE_CHECKING:
    from wds_pipes.core.stream import Stream
    from wds_pipes.stages import SampleList
    from wds_pipes.tar.located import Located

Sample = dict[str, Any]
CONNECTIONS = 8
_SLOW = "reading the shards from the beginning"
_QUICKER = f"no index: {_SLOW}. An index is quicker: wds-pipes index SHARDS --offsets"


class Member(NamedTuple):
    """A file of a sample.

    Attributes:
        name: its name in the tar.
        field: its field, in lower case.
        data: its bytes; None: they were not read.
        start: the byte of its first header in the (decompressed) tar.
        end: the byte after its padding.
        size: its bytes, without padding.
    """

    name: str
    field: str
    data: bytes | None
    start: int
    end: int
    size: int

    @property
    def offset(self) -> int:
        """The byte where its data starts."""
        return self.end - self.size - (-self.size & 511)


def fields_of(sample: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the fields of a sample, without its metadata."""
    return ((name, value) for name, value in sample.items() if not is_metadata(name))


class Found(NamedTuple):
    """A sample of a shard.

    Attributes:
        key: its key.
        members: its files.
        url: the shard, without credentials.
        number: its number in the shard, from 0 on.
    """

    key: str
    members: list[Member]
    url: str = ""
    number: int = 0

    @property
    def start(self) -> int:
        """The byte of its first header in the (decompressed) tar."""
        return self.members[0].start

    @property
    def end(self) -> int:
        """The byte after its last file."""
        return self.members[-1].end

    def as_dict(self) -> dict[str, Any]:
        """Return the sample for JSON."""
        files = {one.name: {"offset": one.offset, "size": one.size} for one in self.members}
        facts = {"shard": self.url, "number": self.number, "key": self.key}
        return {**facts, "start": self.start, "end": self.end, "members": files}

    def lines(self, *, members: bool) -> Iterator[str]:
        """Return the sample as lines of a table, after its head if it is the first of its shard;
        ``members``: a line for each file.
        """
        if not self.number:
            yield self.url
            yield f"{'DATA' if members else 'START':>14}  {'BYTES':>12}  NAME"
        if members:
            for one in self.members:
                yield f"{one.offset:>14,}  {one.size:>12,}  {one.name}"
        else:
            names = " ".join(one.field for one in self.members)
            yield f"{self.start:>14,}  {self.end - self.start:>12,}  {self.number} {self.key}: {names}"


class Opens(Protocol):
    """Opens a shard; that of the pipelines is ``Opener``."""

    def open(self, url: str, start: int = 0) -> BinaryIO:
        """Return a buffered stream of a shard, of a remote one from byte ``start`` on."""


class ShardWalk:
    """One walk over the samples of a shard.

    Args:
        opener: opens the shard.
        url: the shard.
        key_split: as in ``group_by_key``.
        want: whether the data of the next file is read, by its name; None: it never is.
        concatenated: as in ``load_tar``.
        start: the byte to begin at, where a header starts; of an uncompressed shard.
        on_link: as in ``TarReader``.

    Attributes:
        compression: of the shard: gz, bz2, xz, zst or ``""``.
        outside: how many files belong to no sample.
        bytes: how many bytes of the (decompressed) tar were passed.
        ended: whether the shard was read to its end.
    """

    def __init__(
        self,
        opener: Opens,
        url: str,
        key_split: str = "first-dot",
        want: Callable[[str], bool] | None = None,
        *,
        concatenated: bool = False,
        start: int = 0,
        on_link: Callable[[Link], None] | None = None,
    ) -> None:
        self._opener, self._url, self._split = opener, url, splitter(key_split)
        self._want, self._concatenated, self._start, self._on_link = want, concatenated, start, on_link
        self.compression, self.bytes, self.ended, self.outside = "", 0, False, 0

    def samples(self) -> Iterator[Found]:
        """Yield the samples, in order.

        Raises:
            ShardError: the shard cannot be read, or is damaged.
        """
        # each file is a field of its own, also one whose field comes twice
        numbers = count()

        def split(name: str) -> tuple[str, str] | None:
            parts = self._split(name)
            return parts and (parts[0], str(next(numbers)))

        grouping, usual = Grouping(split, on_repeated_key="ignore"), Usual()
        shown, shard = redact(self._url), GroupedShard(self._url)
        for number, sample in enumerate(grouping.samples(self.members(), shard)):
            self.ended = shard.stop < 0
            found = Found(sample["__key__"], [value for _, value in fields_of(sample)], shown, number)
            names = [one.field for one in found.members]
            if self.ended and (missing := usual.missing(names)):
                warn_of(suspect_sample(self._url, found.key, missing, offset=shard.start), 1)
            usual.add(names)
            yield found
        self.ended = True

    def members(self) -> Generator[tuple[str, str, Member, int]]:
        """Yield the files of the shard, as ``Grouping`` takes them."""
        with self._opener.open(self._url, self._start) as raw:
            if self._start and not is_remote(self._url):  # it is opened at its beginning
                raw.seek(self._start)
            with readable(self._url):
                stream, self.compression = unpacked(raw)
            reader = TarReader(
                stream,
                url=self._url,
                offset=self._start,
                want=self._want or (lambda name: False),
                max_member_bytes=MAX_SIZE,
                concatenated=self._concatenated,
                on_link=self._on_link,
                named=False,
            )
            for url, name, data, start in reader:
                self.bytes = end = reader.offset
                size = reader.skipped[1] if data is None else min(len(data), end - start - BLOCK)
                parts = self._split(name)
                self.outside += parts is None
                yield url, name, Member(name, parts[1].lower() if parts else "", data, start, end, size), start
            self.bytes = reader.offset


def is_stream(url: str) -> bool:
    """Whether a shard is read from a program, and nothing can be beside it."""
    return url == "-" or url.startswith("pipe:")


def facts_beside(
    shards: Sequence[str], storage_options: dict[str, Any] | None, on_problem: Callable[[str, ValueError], None]
) -> list[ShardFacts]:
    """What the ``index.json`` in the directory of each shard says of it.

    Args:
        shards: the shards.
        storage_options: how to reach the storage.
        on_problem: called with the first shard of a directory whose index is damaged or does not
            have all of them, and the error.
    """
    found = dict.fromkeys(shards, ShardFacts())
    folders: dict[str, list[str]] = {}
    for url in found:
        if not is_stream(url):
            folders.setdefault(folder_of(url), []).append(url)
    for folder, inside in folders.items():
        index = f"{folder}index.json"
        if exists(index, storage_options):
            try:
                found.update(zip(inside, find_facts(inside, index, storage_options), strict=True))
            except ValueError as error:
                on_problem(inside[0], error)
    return [found[url] for url in shards]


def not_compared(shard: str, error: ValueError) -> None:
    """Warn that the index beside a shard cannot be used; ``on_problem`` of ``facts_beside``."""
    warnings.warn(f"{for_commands(error).rstrip('.')}. So MD5s are not compared", ShardWarning, stacklevel=4)


def shards_of(urls: Urls, storage_options: dict[str, Any] | None) -> list[str]:
    """Return the shards that URLs or an ``index.json`` name."""
    return list(list_shards(urls, storage_options)[0])


def sizes_of(
    shards: Sequence[str], facts: Sequence[ShardFacts], storage_options: dict[str, Any] | None
) -> list[int | None]:
    """Return what ``size_of`` returns for each shard."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(partial(size_of, storage_options=storage_options), shards, facts))


def size_of(url: str, known: ShardFacts, storage_options: dict[str, Any] | None) -> int | None:
    """Return the bytes of a shard, as an index or the storage says; None: they are not known."""
    if known.size is None and not is_stream(url):
        with suppress(WdsError, OSError):  # reading the shard says why
            return version_of(url, storage_options).size
    return known.size


class Source:
    """The samples of shards, as the pipelines read them: by their index of offsets if all have
    one, else from the beginning. The steps are imported when one is read: they import numpy and
    asyncio, which a walk over a local shard does not need.

    Args:
        urls: the shards.
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.
        fields: the fields to keep; None: all.
        on_repeated_key: as in ``group_by_key``.
    """

    def __init__(
        self,
        urls: Urls,
        storage_options: dict[str, Any] | None,
        key_split: str = "first-dot",
        fields: Sequence[str] | None = None,
        on_repeated_key: str = "raise",
    ) -> None:
        self._urls, self._options = items_of(urls), storage_options or {}
        self._split, self._fields, self._on_repeated_key = key_split, fields, on_repeated_key
        self._stream: Stream[Sample] | None = None  # of ``read``

    @cached_property
    def indexed(self) -> SampleList | None:
        """The samples by their numbers; None: a shard has no index of offsets.

        Raises:
            ShardError: an index cannot be read, or is damaged.
        """
        if "-" in self._urls or self._split != "first-dot":
            return None
        try:
            return self.chosen(None)
        except MissingIndexError:
            return None
        except ShardError as error:
            if error.missing:  # the shard itself, as reading it will say
                return None
            raise

    @cached_property
    def located(self) -> Located:
        """Where the samples are, as the indexes beside the shards say."""
        from wds_pipes.io.ranges import RangeReader
        from wds_pipes.tar.located import Located

        shards, files = shards_of(self._urls, self._options), RangeReader(self._options, CONNECTIONS)
        return Located(shards, None, files, self._options, CONNECTIONS, key_split="first-dot")

    def chosen(self, where: Any) -> SampleList:
        """The samples with these numbers or keys, by the indexes; None: all."""
        from wds_pipes.stages import SampleList

        return SampleList(self._urls, storage_options=self._options, where=where)

    def fetch(self, where: Any) -> Iterator[Sample]:
        """Yield the samples with these numbers or keys, by the indexes."""
        from wds_pipes.core.stream import Stream
        from wds_pipes.stages import FetchSamples

        return iter(Stream(FetchSamples(self.chosen(where), fields=self._fields)))

    def slice(self, start: int, stop: int | None) -> Iterator[Sample]:
        """Yield the samples from number ``start`` on, before ``stop`` (None: to the end)."""
        if (start or stop is not None) and self.indexed is not None:
            self.located.compare_ends()
            chosen = range(self.indexed.count)[start:stop]
            if chosen and self.located.place(start)[1]:
                self.located.check_whole(start - 1)  # raises if it goes on, since keys end at other dots in the index
            return self.fetch(chosen) if chosen else iter(())
        return islice(self.read(), start, stop)

    def read(self) -> Iterator[Sample]:
        """Yield all samples, from the beginning."""
        from wds_pipes.core.stream import Stream
        from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList

        shards = ShardList(shards_of(self._urls, self._options), empty_check=False, storage_options=self._options)
        members = LoadTar(OpenShards(shards))
        self._stream = Stream(
            GroupByKey(members, fields=self._fields, key_split=self._split, on_repeated_key=self._on_repeated_key)
        )
        return iter(self._stream)

    @property
    def without_fields(self) -> int:
        """How many samples ``read`` has left out so far, since they have none of the fields."""
        return 0 if self._stream is None else self._stream.counts()["filtered"]


def get(
    sample: int | str,
    urls: Urls,
    *,
    field: str | None = None,
    key_split: str = "first-dot",
    storage_options: dict[str, Any] | None = None,
    on_scan: Callable[[str], None] = lambda why: None,
) -> Sample:
    """Return the sample with a number or a key, as ``group_by_key`` yields it.

    Args:
        sample: its number, counted over all shards; or its key.
        urls: the shards, or an ``index.json``.
        field: return only this field; None: all.
        key_split: as in ``group_by_key``.
        storage_options: how to reach the storage.
        on_scan: called with why the shards are read from the beginning, if they are.

    Raises:
        ValueError: there is no such sample, or it does not have the field.
        SampleError: the indexes say that several samples have the key.
        ShardError: a shard or an index cannot be read, or is damaged.
    """
    found = _find(sample, Source(urls, storage_options, key_split), key_split, on_scan)
    if field is None:
        return found
    if field.lower() not in found or is_metadata(field.lower()):
        has = ", ".join(name for name, _ in fields_of(found))
        raise ValueError(f"sample {found['__key__']!r} has no field {field!r}; it has {has}")
    return {name: found[name] for name in ("__key__", "__url__", field.lower())}


def _find(sample: int | str, source: Source, key_split: str, on_scan: Callable[[str], None]) -> Sample:
    if source.indexed is not None:
        if isinstance(sample, str):
            try:
                return next(source.fetch([sample]))
            except MissingIndexError:  # an index of another program has offsets, and no keys
                pass
            except ValueError:
                source.located.check_keys()  # else the index does not have it, and the shards may
                raise
        elif 0 <= sample < source.indexed.count:
            return next(source.slice(sample, sample + 1))
        else:
            source.located.compare_ends()
            raise _missing(sample, source.indexed.count)
    on_scan(_QUICKER if key_split == "first-dot" else f"indexes are not used with --key-split {key_split}: {_SLOW}")
    count = 0
    for count, found in enumerate(source.read(), 1):
        if sample in (count - 1, found["__key__"]):
            return found
    raise _missing(sample, count)


def _missing(wanted: int | str, count: int) -> ValueError:
    if isinstance(wanted, int):
        return ValueError(f"there is no sample {wanted:,}: there are {count:,}, from 0 on. If it is a key, pass --key")
    return ValueError(
        f"no sample has the key {wanted!r:.300}, of {plural(count, 'sample')}. wds-pipes ls lists the keys"
    )
