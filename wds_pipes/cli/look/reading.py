"""The samples of shards with the bytes that they take, and samples by number or key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

from wds_pipes.core.stream import Stream
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError
from wds_pipes.io.compression import unpacked
from wds_pipes.io.open import Opener
from wds_pipes.io.ranges import RangeReader
from wds_pipes.stages import FetchSamples, GroupByKey, LoadTar, OpenShards, SampleList, ShardList
from wds_pipes.tar.grouping import Grouping
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.keys import is_metadata, splitter
from wds_pipes.tar.listing import list_shards
from wds_pipes.tar.located import Located
from wds_pipes.tar.offsets import MissingIndexError
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.scanning import readable

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


class Found(NamedTuple):
    """A sample of a shard: its key and its files."""

    key: str
    members: list[Member]


class ShardWalk:
    """One walk over the samples of a shard, from its first byte on.

    Args:
        opener: opens the shard.
        url: the shard.
        key_split: as in ``group_by_key``.
        want: whether the data of the next file is read, by its name; None: it never is.

    Attributes:
        compression: of the shard: gz, bz2, xz, zst or ``""``.
        outside: how many files belong to no sample, by their names; at most 1,000 are counted.
        bytes: how many bytes of the (decompressed) tar were passed.
        ended: whether the shard was read to its end.
    """

    def __init__(
        self, opener: Opener, url: str, key_split: str = "first-dot", want: Callable[[str], bool] | None = None
    ) -> None:
        self._opener, self._url, self._split, self._want = opener, url, splitter(key_split), want
        self.compression, self.bytes, self.ended = "", 0, False
        self.outside: list[str] = []

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

        grouping = Grouping(split, on_repeated_key="ignore")
        for sample in grouping.samples(self._members(), self._url):
            self.ended = grouping.stop < 0
            yield Found(sample["__key__"], [value for name, value in sample.items() if not is_metadata(name)])
        self.ended = True

    def _members(self) -> Iterator[tuple[str, str, Member, int]]:
        with self._opener.open(self._url) as raw:
            with readable(self._url):
                stream, self.compression = unpacked(raw)
            want = self._want or (lambda name: False)
            reader = TarReader(stream, url=self._url, want=want, max_member_bytes=MAX_SIZE, named=False)
            for url, name, data, start in reader:
                self.bytes = end = reader.offset
                size = reader.skipped[1] if data is None else min(len(data), end - start - BLOCK)
                parts = self._split(name)
                if parts is None and len(self.outside) < 1000:
                    self.outside.append(name)
                yield url, name, Member(name, parts[1].lower() if parts else "", data, start, end, size), start
            self.bytes = reader.offset


def located_of(urls: Sequence[str], storage_options: dict[str, Any]) -> Located:
    """Return where the samples of shards are, as the indexes beside them say."""
    files = RangeReader(storage_options, CONNECTIONS)
    return Located(shards_of(urls, storage_options), None, files, storage_options, CONNECTIONS, key_split="first-dot")


def shards_of(urls: Sequence[str], storage_options: dict[str, Any]) -> list[str]:
    """Return the shards that URLs or an ``index.json`` name."""
    return list(list_shards(list(urls), storage_options)[0])


class Source:
    """The samples of shards, as the pipelines read them: by their index of offsets if all have
    one, else from the beginning.

    Args:
        urls: the shards.
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.
        fields: the fields to keep; None: all.
        on_repeated_key: as in ``group_by_key``.

    Attributes:
        stream: that of ``read``, whose counts say what was left out; None: it was not called.
    """

    def __init__(
        self,
        urls: Sequence[str],
        storage_options: dict[str, Any],
        key_split: str = "first-dot",
        fields: Sequence[str] | None = None,
        on_repeated_key: str = "raise",
    ) -> None:
        self._urls, self._options, self._split, self._fields = list(urls), storage_options, key_split, fields
        self._on_repeated_key = on_repeated_key
        self.stream: Stream[Sample] | None = None

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

    def chosen(self, where: Any) -> SampleList:
        """The samples with these numbers or keys, by the indexes; None: all."""
        return SampleList(self._urls, storage_options=self._options, where=where)

    def slice(self, start: int, stop: int | None) -> Iterator[Sample]:
        """Yield the samples from number ``start`` on, before ``stop`` (None: to the end)."""
        if (start or stop is not None) and self.indexed is not None:
            located = located_of(self._urls, self._options)
            located.compare_ends()
            chosen = range(self.indexed.count)[start:stop]
            if chosen and located.place(start)[1]:
                located.check_whole(start - 1)  # raises if it goes on, since keys end at other dots in the index
            return iter(Stream(FetchSamples(self.chosen(chosen), fields=self._fields))) if chosen else iter(())
        return islice(self.read(), start, stop)

    def read(self, fields: Sequence[str] | None = None) -> Iterator[Sample]:
        """Yield all samples, from the beginning; with these fields, or those of this source."""
        shards = ShardList(shards_of(self._urls, self._options), empty_check=False, storage_options=self._options)
        wanted = self._fields if fields is None else fields
        grouped = GroupByKey(
            LoadTar(OpenShards(shards)), fields=wanted, key_split=self._split, on_repeated_key=self._on_repeated_key
        )
        self.stream = Stream(grouped)
        return iter(self.stream)

    @property
    def without_fields(self) -> int:
        """How many samples ``read`` has left out so far, since they have none of the fields."""
        return 0 if self.stream is None else self.stream.counts()["filtered"]


def find_sample(
    wanted: int | str, urls: Sequence[str], options: dict[str, Any], key_split: str, say: Callable[[str], None]
) -> Sample:
    """Return the sample with a number or a key.

    Args:
        wanted: the number, counted over all shards; or the key.
        urls: the shards.
        options: how to reach the storage.
        key_split: as in ``group_by_key``.
        say: is called with a line if the shards are read from the beginning.

    Raises:
        ValueError: there is no such sample.
        SampleError: the indexes say that several samples have the key.
        ShardError: a shard or an index cannot be read, or is damaged.
    """
    source = Source(urls, options, key_split)
    if source.indexed is not None:
        if isinstance(wanted, str):
            try:
                return next(iter(Stream(FetchSamples(source.chosen([wanted])))))
            except MissingIndexError:  # an index of another program has offsets, and no keys
                pass
            except ValueError:
                located_of(urls, options).check_keys()  # else the index does not have it, and the shards may
                raise
        elif wanted < source.indexed.count:
            return next(source.slice(wanted, wanted + 1))
        else:
            located_of(urls, options).compare_ends()
            raise ValueError(_missing(wanted, source.indexed.count))
    say(_QUICKER if key_split == "first-dot" else f"indexes are not used with --key-split {key_split}: {_SLOW}")
    count = 0
    for number, sample in enumerate(source.read()):
        if wanted in (number, sample["__key__"]):
            return sample
        count = number + 1
    raise ValueError(_missing(wanted, count))


def _missing(wanted: int | str, count: int) -> str:
    if isinstance(wanted, int):
        return f"there is no sample {wanted:,}: there are {count:,}, from 0 on. If it is a key, pass --key"
    return f"no sample has the key {wanted!r:.300}, of {plural(count, 'sample')}. wds-pipes ls lists the keys"
