"""Where the samples of many shards are: their indexes of offsets, read when they are needed.

``Located`` is for shards that all have one. ``ShardOffsets`` is for shards of which some may have
none.
Views say which of the samples are selected. SampleList and IndexedShards take the same selections.

Rules of views:
1. Keys are compared by their hashes, which the indexes of keys have. Where a hash does not belong
   to one sample and one key, the keys in the tars decide. Two samples with one key are an error.
2. The fingerprint is of the numbers. So selections that are written in different ways are one view
   if they select the same samples.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from wds_pipes.core.counts import logger
from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, parts
from wds_pipes.io.compression import is_compressed_name
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.outputs import StorageOptions
from wds_pipes.io.ranges import Part, RangeReader
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.urls import at_home, local_path, redact
from wds_pipes.tar.headers import BLOCK, is_header
from wds_pipes.tar.index import (
    KEYS,
    MEND_OFFSETS,
    OFFSETS,
    Facts,
    MissingIndexError,
    beside,
    path_of,
    stale_keys,
    unpack_keys,
    unpack_offsets,
    unusable,
)
from wds_pipes.tar.keys import KeySplit, split_key
from wds_pipes.tar.samples import AFTER, SampleParser, first_name

if TYPE_CHECKING:
    from wds_pipes.tar.index import Keys

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = range | npt.NDArray[np.int64]

_NAMES = {OFFSETS: "index of offsets", KEYS: "index of keys"}
_PLAIN = "A compressed shard has no index: write it uncompressed, with: wds-pipes reshard SHARDS NEW"
_USUAL_END = 20 * BLOCK  # bytes of zeros after the last sample, at most, unless tar was told otherwise
_MOST_END = 1 << 20  # which are looked at
_STANDARD: tuple[KeySplit, ...] = ("first-dot", "last-dot")
_MOST_BYTES = 64 << 20  # of a remote index of offsets
_CHECKED = 8  # shards whose keys are checked at a time
Found = TypeVar("Found")


class Located:
    """The samples of shards by their numbers, as their indexes of offsets say. Threads may share
    it.

    Args:
        urls: the shards.
        folder: the directory of the indexes; None: they are beside the shards.
        files: reads the sizes of local files.
        storage_options: how to reach the storage.
        connections: how many remote indexes are read at once.
        made: the directories of indexes that the caller has just made, by shard: they are there
            instead, and are not compared with the shard. They may be of what a compressed shard
            contains.
        held_bytes: how many bytes of indexes stay in memory.
        key_split: the rule by which the indexes of keys were made; None: not known.
        facts: what an ``index.json`` says of each shard; None: there is none. Then the indexes of
            offsets say how many samples each shard has, and are all looked at now.

    Raises:
        ShardError: an index cannot be read, or is damaged.
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: str | None,
        files: RangeReader,
        storage_options: dict[str, Any] | None,
        connections: int,
        *,
        made: Mapping[str, str] | None = None,
        held_bytes: int = 128 << 20,
        key_split: KeySplit | None = None,
        facts: Facts | None = None,
    ) -> None:
        self._facts = facts
        self.urls, self._folder, self._files, self._made = urls, folder, files, made or {}
        self._held_bytes, self._key_split = held_bytes, key_split
        self.connections = connections
        self.opener = Opener(Reading(storage_options or {}, readahead_bytes=connections << 20))
        self._locks: dict[int, threading.Lock] = {}  # by process: a forked one may inherit a lock that is held
        # the indexes that were read last, by shard and ending, and the size of each in bytes
        self._held: OrderedDict[tuple[int, str], tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        # how many samples each shard has
        self.counts: Sequence[int] = () if facts is None else facts.samples
        if facts is None and len(urls) > 1 and any(map(is_remote, urls)):
            with ThreadPoolExecutor(min(connections, len(urls))) as pool:
                self.counts = list(pool.map(self._count, range(len(urls))))
        elif facts is None:
            self.counts = list(map(self._count, range(len(urls))))

    @cached_property
    def starts(self) -> array[int]:
        """The number of the first sample of each shard, and of all samples."""
        return array("q", accumulate(self.counts, initial=0))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_locks": {}, "_held": OrderedDict(), "_bytes": 0}

    def index_of(self, shard: int) -> str:
        """Return the URL of the index of offsets of a shard."""
        return self._place_of(self.urls[shard], OFFSETS)

    def _place_of(self, url: str, ending: str) -> str:
        """Return the URL of an index of a shard."""
        return beside(url, ending, self._made.get(url, self._folder))

    @property
    def with_samples(self) -> list[int]:
        """The shards that have samples."""
        return [shard for shard, count in enumerate(self.counts) if count]

    def place(self, number: int) -> tuple[int, int]:
        """Return where a sample is: the number of its shard, and its own in the shard."""
        shard = bisect_right(self.starts, number) - 1
        return shard, number - self.starts[shard]

    def _count(self, shard: int) -> int:
        """Return how many samples a shard has."""
        url = self.index_of(shard)
        if is_remote(url):
            return len(self.offsets(shard)) - 1
        size = self._size(url) or 0
        # what is read raises, or no sample is expected
        return len(self.offsets(shard)) - 1 if size <= 8 or size % 8 else size // 8 - 1

    def _check_count(self, shard: int, count: int) -> None:
        """Compare the number of offsets with that of the keys, if their index is on this disk too:
        if an offset is missing, or one too many, all samples after it have other numbers.
        """
        url = self._place_of(self.urls[shard], KEYS)
        size = None if is_remote(url) else self._size(url)
        if size is not None and size % 12 == 0 and size != 12 * count:
            what = f"the index has {plural(count, 'sample')}, and {redact(url)} has {size // 12}"
            raise self.stale(self.urls[shard], what)

    def _size(self, url: str) -> int | None:
        """Return the size of a file; None: not known."""
        try:
            return self._files.size(url)
        except OSError:  # reading it will say why
            return None

    def compare_ends(self) -> None:
        """Compare local indexes with the ends of their shards. If a shard has other samples now,
        the numbers of all samples after it would be wrong too.

        Raises:
            ShardError: an index is of another shard.
        """
        for shard in range(len(self.urls)):
            if self._facts is not None and self.counts[shard]:
                continue  # its index is compared when it is read; that of a shard without samples never is
            url = self.index_of(shard)
            if is_remote(url):
                continue  # it was read as a whole, and remote shards are not compared
            most = self._most(shard, OFFSETS)
            try:
                size = self._files.size(url) or 0
                end = int.from_bytes(_read_local(url, size - 8, 8), "little") if size >= 8 else 0
            except OSError:  # reading its samples will say why
                continue
            if self._facts is not None or size % 8 or not size or end % BLOCK or (most is not None and size > most):
                self.offsets(shard)  # raises, or compares it
            else:
                self._check_count(shard, size // 8 - 1)
                self._check_end(shard, end)

    def _check_end(self, shard: int, end: int) -> None:
        """Compare the byte where the samples of a shard end, as its index says, with the shard, if
        that is local.
        """
        url = self.urls[shard]
        size = None if is_remote(url) or url in self._made else self._size(url)
        if size is None:
            return
        said = None if self._facts is None else self._facts.size(shard)
        if said not in (None, size):
            what = f"it has {size} bytes, and index.json says {said}"
        elif size < end:
            what = f"it has {size} bytes (it may be cut)"
        elif _read_local(url, end, BLOCK).strip(b"\0"):  # not the end of the archive
            what = "it has more samples"
        elif size - end > _USUAL_END and _begins_archive(_read_local(url, end, _MOST_END)):
            what = "another archive was appended to it"
        else:
            return
        raise self.stale(url, f"{what}, and its samples should end at byte {end}")

    def offsets(self, shard: int) -> Sequence[int]:
        """Return the offsets of a shard.

        When they are read, their number is compared, and the end of a local shard.
        """
        held = self._held.get((shard, OFFSETS))
        return self._load(shard, OFFSETS, self._offsets) if held is None else held[0]

    def _offsets(self, shard: int, data: bytes, index: str) -> Sequence[int]:
        """Return the offsets in an index of a shard, and compare them."""
        found = unpack_offsets(data, index)
        if self.counts and len(found) - 1 != self.counts[shard]:
            what = f"it has {plural(len(found) - 1, 'sample')}, and the shard was counted with {self.counts[shard]}"
            raise unusable(index, what, shard=self.urls[shard])
        self._check_count(shard, len(found) - 1)
        self._check_end(shard, int(found[-1]))
        return found.astype("u8").data  # a number of a memoryview comes faster than one of an array

    def key_of(self, number: int) -> str:
        """Return the key of a sample, from its tar, by the rule of its index of keys; by the first
        rule that is possible, if that is not known.
        """
        rules = _STANDARD if self._key_split is None else (self._key_split,)
        (data, base), start, stop, url, _ = self._read_sample(number)
        name = first_name(data[start - base : stop - base])
        keys = [parts[0] for rule in rules if (parts := split_key(name, rule)) is not None]
        if not keys:
            raise self.stale(url, f"at byte {start} no sample begins")
        if len(keys) == 1:
            return keys[0]
        shard, place = self.place(number)
        hashes, numbers = self.keys(shard)
        indexed = hashes[numbers == place].tolist()
        return next((key for key in keys if hash_text(key) in indexed), keys[0])

    def check_whole(self, number: int) -> None:
        """Raise a ShardError if a sample goes on after its end, by the rule ``"first-dot"``."""
        SampleParser(frozenset(), "first-dot", self.stale).parse(*self._read_sample(number))

    def _read_sample(self, number: int) -> tuple[Part, int, int, str, str]:
        """Return what ``SampleParser.parse`` takes of a sample."""
        shard, place = self.place(number)
        url, offsets = self.urls[shard], self.offsets(shard)
        start, stop = offsets[place], offsets[place + 1]
        return self._files.read_one(url, start, stop + AFTER), start, stop, url, redact(url)

    def keys(self, shard: int) -> Keys:
        """Return the sorted hashes of the keys of a shard, and the numbers of their samples.

        When they are read, the keys of the first and the last sample of a local shard are compared,
        if their rule is known.
        """
        return self._load(shard, KEYS, self._keys)

    def _keys(self, shard: int, data: bytes, index: str) -> Keys:
        """Return the content of an index of keys of a shard, and compare it."""
        count, url = self.counts[shard], self.urls[shard]
        found = unpack_keys(data, count, index)
        if self._key_split is not None and count and not is_remote(url) and os.path.exists(local_path(url) or ""):
            stale = self._stale_keys(shard, found)
            if len(stale) == min(count, 2):
                raise stale[0]
        return found

    def find(self, key: str) -> list[int]:
        """Return the numbers of the samples whose keys have the hash of ``key``."""
        hashed, found = np.uint64(hash_text(key)), []
        for shard in self.with_samples:
            hashes, numbers = self.keys(shard)
            first, last = np.searchsorted(hashes, hashed, "left"), np.searchsorted(hashes, hashed, "right")
            found += [self.starts[shard] + number for number in numbers[first:last].tolist()]
        return found

    def check_keys(self) -> None:
        """Compare the indexes of keys with the first and the last sample of each shard.

        Raises:
            ShardError: an index is of another shard.
        """
        with ThreadPoolExecutor(_CHECKED) as pool:
            for stale in pool.map(lambda shard: self._stale_keys(shard, self.keys(shard)), self.with_samples):
                for error in stale:
                    raise error

    def _stale_keys(self, shard: int, keys: Keys) -> list[ShardError]:
        """Return errors for the first and the last sample of a shard that are not in its index."""
        (hashes, numbers), start, url = keys, self.starts[shard], self.urls[shard]
        ends = {number: self.key_of(start + number) for number in (0, len(numbers) - 1)}
        return [
            stale_keys(url, key, self._folder)
            for number, key in ends.items()
            if hashes[numbers == number][0] != hash_text(key)
        ]

    def _load(self, shard: int, ending: str, read: Callable[[int, bytes, str], Found]) -> Found:
        """Return an index of a shard; ``read`` reads its content, and compares it."""
        held = self._held.get((shard, ending))
        if held is not None:
            return cast(Found, held[0])
        url = self._place_of(self.urls[shard], ending)
        data = self._read(shard, ending, url)
        found = read(shard, data, url)
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if (shard, ending) not in self._held:  # another thread may have read it meanwhile
                self._held[shard, ending] = found, len(data)
                self._bytes += len(data)
            while self._bytes > self._held_bytes and len(self._held) > 1:
                _, (_, size) = self._held.popitem(last=False)
                self._bytes -= size
        return found

    def _most(self, shard: int, ending: str) -> int | None:
        """The maximum size of an index of a shard in bytes; None: not known."""
        if ending == KEYS:
            return 12 * self.counts[shard]
        if self.urls[shard] in self._made:
            return None
        size = self._size(self.urls[shard])
        return _MOST_BYTES if size is None else 8 * (size // BLOCK + 1)  # a server may never end its response

    def _read(self, shard: int, ending: str, url: str) -> bytes:
        """Return the content of an index of a shard, at most so many bytes as it can have."""
        most, shown = self._most(shard, ending), redact(self.urls[shard])
        try:
            with self.opener.open(url) as stream:
                data = stream.read(-1 if most is None else most + 1)
        except ShardError as error:
            if error.missing:
                mend = _PLAIN if is_compressed_name(path_of(self.urls[shard])) else MEND_OFFSETS
                what = f"shard {shown} has no {_NAMES[ending]}: there is no {redact(url)}. {mend}"
                raise MissingIndexError(what, url=shown) from None
            why, mends = parts(error, MEND_OFFSETS)
            what = f"the {_NAMES[ending]} of shard {shown} cannot be read: {why}"
            raise ShardError(what, url=shown, **mends) from error
        if most is not None and len(data) > most:
            raise self.stale(self.urls[shard], f"{redact(url)} has more than {most} bytes, too many for its samples")
        return data

    def stale(self, url: str, what: str) -> ShardError:
        """Return the error for a shard that does not fit its index."""
        what = f"the shard is another than the indexed one: {what}"
        return unusable(self._place_of(url, OFFSETS), what, shard=url)


def _begins_archive(data: bytes) -> bool:
    """Whether the first bytes that are not zeros are the header of a file."""
    start = (len(data) - len(data.lstrip(b"\0"))) // BLOCK * BLOCK
    head = data[start : start + BLOCK]
    return len(head) == BLOCK and is_header(head)


def _read_local(url: str, start: int, size: int) -> bytes:
    """Read some bytes of a local file, which does not stay open."""
    with open(at_home(cast(str, local_path(url))), "rb", buffering=0) as file:
        file.seek(start)
        return file.read(size)


_CONNECTIONS = 8


class ShardOffsets:
    """Where the samples of shards begin. An index is read when it is needed, and only then is it
    known whether there is one.

    It can be pickled; each process reads the indexes that it needs.

    Args:
        urls: the shards.
        facts: what another index says of each: the number of its samples, and its size.
        folder: a directory where the indexes may be, instead of beside the shards; None: none.
        storage_options: how to reach the storage.
    """

    def __init__(self, urls: Sequence[str], facts: Facts, folder: str | None, storage_options: StorageOptions) -> None:
        self._urls = urls
        files, places = RangeReader(storage_options, _CONNECTIONS), dict.fromkeys((folder, None))
        self._places = [Located(urls, place, files, storage_options, _CONNECTIONS, facts=facts) for place in places]
        self._without: set[int] = set()

    def of(self, shard: int) -> Sequence[int] | None:
        """Return where the samples of a shard begin, and the end of the last one; None: it has no
        index.

        Raises:
            ShardError: the index cannot be read, is damaged, or is of other samples.
        """
        url = self._urls[shard]
        if url == "-" or url.startswith("pipe:"):
            return None
        for place in () if shard in self._without else self._places:
            try:
                return place.offsets(shard)
            except MissingIndexError:
                continue
            except ShardError as error:
                # a store may not tell whether what may not be listed is there
                if isinstance(error.__cause__ and error.__cause__.__cause__, PermissionError):
                    continue
                raise
        self._without.add(shard)
        return None

    def key_of(self, shard: int, number: int) -> str:
        """Return the key of a sample of a shard, from its tar; ShardError: it has no index."""
        return self._anywhere(lambda place: place.key_of(place.starts[shard] + number))

    def find(self, key: str) -> list[int]:
        """Return the numbers among all samples of those with a key; ShardError: a shard has no
        index of keys.
        """
        return self._anywhere(lambda place: [number for number in place.find(key) if place.key_of(number) == key])

    def _anywhere(self, look: Callable[[Located], Found]) -> Found:
        """Return what is found with the indexes at the first place that has them."""
        for place in self._places[:-1]:
            try:
                return look(place)
            except MissingIndexError:
                continue
        return look(self._places[-1])

    def read_all(self, shards: Iterable[int]) -> bool:
        """Read the indexes of several shards, and return whether all have one."""
        shards = list(dict.fromkeys(shards))
        if any(is_remote(self._urls[shard]) for shard in shards):
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                return all(offsets is not None for offsets in pool.map(self.of, shards))
        return all(self.of(shard) is not None for shard in shards)

    def index_of(self, shard: int) -> str:
        """Return the URL of the index of a shard, for messages."""
        return self._places[0].index_of(shard)


@dataclass(frozen=True)
class KeyRange:
    """The samples whose keys have hashes in a range: a part that ``split_by_key`` returns.
    ``key in part`` says whether a key is in it.

    Attributes:
        start: the first hash, as a number from 0 to 1.
        stop: the end of the hashes, which is not among them.
    """

    start: float
    stop: float

    def __contains__(self, key: str) -> bool:
        return bool(self.has(np.array([hash_text(key)], np.uint64))[0])

    def has(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return for each hash whether it is in this part: shape (hashes,)."""
        places = (hashes >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return (self.start <= places) & (places < self.stop)


Selection: TypeAlias = "str | os.PathLike[str] | slice | KeyRange | Iterable[int] | Iterable[str] | npt.NDArray[Any]"


def split_by_key(shares: Mapping[str, float]) -> dict[str, KeyRange]:
    """Divide samples by the hashes of their keys, such as ``{"train": 0.9, "val": 0.1}``.

    A key is in the same part whatever other samples there are, so shards may be added later::

        parts = wp.split_by_key({"train": 0.9, "val": 0.1})
        wp.SampleList("train-{000..099}.tar", where=parts["train"])

    ``key in parts["train"]`` is for shards without indexes: a filter, or a loop over keys.

    Args:
        shares: the names of the parts and their shares, which sum to 1. Their order matters.

    Returns:
        The parts by their names, for ``where`` and ``exclude``.

    Raises:
        ValueError: the shares do not sum to 1, or one is not above 0.
        TypeError: the shares have no names.
    """
    if not isinstance(shares, Mapping):
        raise TypeError(f'the shares have names, as {{"train": 0.9, "val": 0.1}}, and these have none: {shares!r:.80}')
    for name, share in shares.items():
        if not isinstance(share, (int, float, np.number)):
            raise TypeError(f"the share of {name!r} must be a number, not {share!r:.80}")
    ends = np.cumsum([float(share) for share in shares.values()]).tolist()
    if not shares or abs(ends[-1] - 1) > 1e-9 or any(not share > 0 for share in shares.values()):
        raise ValueError(f"the shares must be above 0 and sum to 1, not {dict(shares)}")
    ends[-1] = 1.0
    return {name: KeyRange(start, stop) for name, start, stop in zip(shares, [0.0, *ends[:-1]], ends, strict=True)}


@dataclass(frozen=True)
class Selector:
    """Selects samples of shards.

    Args:
        located: the samples.
    """

    located: Located

    def select(self, view: Numbers, where: Selection | None, exclude: Selection | None) -> Numbers:
        """Return a view of a view. Its samples keep their order; those that are selected by numbers
        come in the order of these.

        Args:
            view: the numbers of the samples to select from.
            where: which of them to select; None: all.
            exclude: which of these to leave out again; None: none.

        Raises:
            ValueError, TypeError, IndexError: a selection does not fit.
            ShardError: an index or a file of keys cannot be read.
            SampleError: two samples have the same key, and it is not known which is meant.
        """
        found = view if where is None else self._find(where, view, "where")
        if exclude is not None:
            without = self._find(exclude, view, "exclude")
            if len(without):
                kept = as_array(found)
                found = compact(kept[~among(kept, np.sort(as_array(without)))])
        return found

    def with_keys(self, view: Numbers, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the places in a view of its samples that have one of these keys, sorted.

        Raises:
            ValueError, ShardError, SampleError: as in ``select``.
        """
        found = self._by_keys(keys)
        if isinstance(view, range):
            return np.sort((as_array(of_view(view, found)) - view.start) // view.step)
        return np.flatnonzero(among(view, found))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of these keys that no sample has, in or outside of a view.

        Raises:
            ShardError: an index of keys cannot be read.
        """
        keys = list(keys)
        hashes = hashes_of(keys)
        held = [own[among(own, np.sort(hashes))] for own, _ in self._each(self.located.keys, self.located.with_samples)]
        there = among(hashes, np.unique(np.concatenate([hashes[:0], *held])))
        return [key for key, found in zip(keys, there.tolist(), strict=True) if not found]

    def _find(self, wanted: Any, view: Numbers, option: str) -> Numbers:
        """Return the samples of a view that a selection has."""
        if isinstance(wanted, KeyRange):
            return of_view(view, self._by_hash(wanted))
        if isinstance(wanted, str) and not wanted.startswith("@"):
            raise ValueError(
                f"{option}={wanted!r:.300} is not '@keys.txt', a file of keys. For a condition over metadata, "
                f"wds-pipes select SHARDS --where {wanted!r:.300} -o keys.txt writes the keys"
            )
        if isinstance(wanted, str) and wanted == "@":
            raise ValueError(f"{option}='@' names no file of keys: write '@keys.txt', a file with a key on each line")
        if isinstance(wanted, (str, os.PathLike)):
            text = os.fspath(wanted)
            wanted = read_keys(text[1:] if isinstance(wanted, str) else text, self.located.opener)
        if isinstance(wanted, (slice, range)):
            return by_numbers(wanted, view)
        single = not hasattr(wanted, "__iter__") or getattr(wanted, "ndim", 1) == 0
        if isinstance(wanted, (bytes, Mapping)) or single:
            raise TypeError(f"{option} must be {KINDS}, not {wanted!r:.80}")
        if isinstance(wanted, (set, frozenset)):
            is_of_numbers = all(isinstance(one, (int, np.integer)) for one in wanted)
            is_of_keys = all(isinstance(one, str) for one in wanted)
            wanted = sorted(wanted) if is_of_numbers or is_of_keys else list(wanted)
        elif not hasattr(wanted, "__len__"):
            wanted = list(wanted)
        if len(wanted) > 0 and isinstance(next(iter(wanted)), str):
            return of_view(view, self._by_keys(wanted))
        return by_numbers(wanted, view)

    def _each(self, function: Callable[[int], Found], numbers: Sequence[int]) -> list[Found]:
        """Return the results of a function of each number, of which several run at once."""
        with ThreadPoolExecutor(self.located.connections) as pool:
            return list(pool.map(function, numbers))

    def _by_hash(self, part: KeyRange) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples in a part, sorted."""

        def of_shard(shard: int) -> npt.NDArray[np.int64]:
            hashes, numbers = self.located.keys(shard)
            return np.sort(numbers[part.has(hashes)]).astype(np.int64) + self.located.starts[shard]

        return _joined(self._each(of_shard, self.located.with_samples))

    def _by_keys(self, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples with these keys, sorted; ValueError: there is none."""
        wanted = set(keys)
        if not all(isinstance(key, str) for key in wanted):
            raise TypeError("keys are strings: pass a list of keys, or one of numbers")
        found = self._with_keys(wanted)
        if not len(found):
            which = "the key" if len(wanted) == 1 else f"one of {plural(len(wanted), 'key')}, such as"
            raise ValueError(f"no sample has {which} {min(wanted)!r:.200}. {self._example(wanted)}")
        if len(found) < len(wanted):
            logger.warning("%d of %d keys have no sample", len(wanted) - len(found), len(wanted))
        return found

    def _example(self, wanted: Collection[str]) -> str:
        """Return which key the first sample has, for a message."""
        if not self.located.starts[-1]:
            return "The shards have no samples"
        shown = redact(self.located.urls[self.located.place(0)[0]])
        return example_of(self.located.key_of(0), wanted, f" of shard {shown}")

    def _with_keys(self, wanted: Collection[str]) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples that have one of these distinct keys, sorted."""
        hashes = np.sort(hashes_of(wanted))

        def of_shard(shard: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
            own, numbers = self.located.keys(shard)
            held = among(own, hashes)
            return own[held], numbers[held].astype(np.int64) + self.located.starts[shard]

        parts = self._each(of_shard, self.located.with_samples)
        found = np.concatenate([hashes[:0], *(hashes for hashes, _ in parts)])
        numbers = _joined([numbers for _, numbers in parts])
        order = np.argsort(found, kind="stable")
        found, numbers = found[order], numbers[order]
        doubtful = among(found, np.union1d(repeated(hashes), repeated(found)))
        if doubtful.any():
            decided = np.fromiter(self._by_tars(numbers[doubtful].tolist(), wanted), np.int64)
            numbers = np.concatenate([numbers[~doubtful], decided])
        return np.sort(numbers)

    def _by_tars(self, numbers: Iterable[int], wanted: Collection[str]) -> Iterator[int]:
        """Yield those of some samples that have one of these keys in their tars."""
        seen: dict[str, int] = {}
        for number in numbers:
            key = self.located.key_of(number)
            if key not in wanted:
                continue
            if key in seen:
                first, second = (redact(self.located.urls[self.located.place(one)[0]]) for one in (seen[key], number))
                raise SampleError(
                    f"two samples have the key {key!r}, in shards {first} and {second}: select them by their numbers",
                    url=second,
                    key=key,
                )
            seen[key] = number
            yield number


def hashes_of(keys: Collection[str]) -> npt.NDArray[np.uint64]:
    """Return the hashes of keys, as the indexes of keys have them: shape (keys,)."""
    return np.fromiter(map(hash_text, keys), np.uint64, len(keys))


def example_of(key: str, wanted: Collection[str], where: str = "") -> str:
    """Return which key the first sample has, for a message, and what is different in it: ``tar cf
    shard.tar ./*`` and ``find .`` write ``./`` before names.
    """
    dotted = key.startswith("./")
    differs = any(one.startswith("./") != dotted for one in wanted)
    hint = f": with './', which is a part of {'its key' if dotted else 'the others'}" if differs else ""
    return f"The first sample{where} has the key {key!r:.200}{hint}"


def read_keys(url: str, opener: Opener) -> list[str]:
    """Return the lines of a file of keys.

    Raises:
        ValueError: it has none.
        ShardError: it cannot be read.
    """
    try:
        with opener.open(at_home(url)) as stream:
            text = stream.read().decode("utf-8-sig", "surrogateescape")
    except ShardError as error:
        if not error.missing:
            raise
        shown = redact(url)
        what = f"the list of keys {shown} does not exist: name a file with a key on each line"
        raise ShardError(what, url=shown, missing=True) from error
    keys = [line for line in text.replace("\r\n", "\n").split("\n") if line]
    if not keys:
        raise ValueError(f"the list of keys {redact(url)!r} is empty: it has a key on each line")
    return keys


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


# The numbers of the samples of a view: a range, or an array of 8 bytes a sample. Numbers with equal
# steps are always a range, so every n-th of 10**9 samples takes no memory.

KINDS = "keys, '@keys.txt', a slice, a range, numbers of samples, or a part of split_by_key()"


def numbers_at(view: Numbers, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples at places of a view: int64, in the shape of ``places``."""
    return places * view.step + view.start if isinstance(view, range) else view[places]


def described(view: Numbers, count: int) -> str | None:
    """Return a text that differs for different views of ``count`` samples; None: the view has all
    of them, in order.
    """
    if isinstance(view, range):
        if view == range(count):
            return None
        content = f"{view.start} {view.step} {len(view)}".encode()
    else:
        content = view.astype("<i8", copy=False).tobytes()
    digest = blake2b(f"{count} ".encode() + content, digest_size=8)
    return f"{len(view)} of {count} samples, fingerprint {digest.hexdigest()}"


def by_numbers(wanted: Any, view: Numbers) -> Numbers:
    """Return the samples at places of a view: those of a slice, a range, integers (negative ones
    count from the end), or an array of bools, which says of each sample whether it is selected.

    Raises:
        IndexError: there is no sample at one of these places.
        TypeError: they are not integers, or an array of bools has another length.
    """
    count = len(view)
    if isinstance(wanted, slice):
        return compact(view[wanted])
    if isinstance(wanted, range):
        low, high = sorted((wanted[0], wanted[-1])) if wanted else (0, -1)
        if low < -count or high >= count:
            raise _no_sample(high if high >= count else low, count)
        if low >= 0:
            return compact(
                view[wanted.start : wanted.stop if wanted.stop >= 0 else None : wanted.step] if wanted else range(0)
            )
    given = as_array(wanted) if isinstance(wanted, range) else np.asarray(wanted)
    if given.dtype == bool and given.shape == (count,):
        given = np.flatnonzero(given)
    if given.dtype == bool and given.ndim == 1:
        raise TypeError(f"samples are selected by one bool for each of {count}, and this array has {given.size}")
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(f"samples are selected by {KINDS}, not by {wanted!r:.80}")
    wrong = given[(given < -count) | (given >= count)]
    if wrong.size:
        raise _no_sample(int(wrong[0]), count)
    given = given.astype(np.int64)  # before the sum, for which 8 bits may be too few
    return compact(numbers_at(view, np.where(given < 0, given + count, given)))


def _no_sample(number: int, count: int) -> IndexError:
    return IndexError(f"there is no sample {number}: there are {count}")


def as_array(view: Numbers) -> npt.NDArray[np.int64]:
    """Return the numbers of a view: int64, shape (samples,)."""
    # asarray() of a range would make an object of each number
    return np.arange(view.start, view.stop, view.step) if isinstance(view, range) else view


def compact(view: Numbers) -> Numbers:
    """Return a view as a range if it is one, in one form for equal ones."""
    count = len(view)
    if count < 2:
        first = int(view[0]) if count else 0
        return range(first, first + count)
    first, step = int(view[0]), int(view[1]) - int(view[0])
    if isinstance(view, range) or (
        step and int(view[-1]) == first + (count - 1) * step and (np.diff(view) == step).all()
    ):
        return range(first, first + count * step, step)
    return view


def of_view(view: Numbers, found: npt.NDArray[np.int64]) -> Numbers:
    """Return those of some samples that are in a view, in its order. ``found`` is sorted."""
    if not isinstance(view, range):
        return compact(view[among(view, found)])
    places, rests = np.divmod(found - view.start, view.step)
    places = places[(rests == 0) & (places >= 0) & (places < len(view))]
    return compact(numbers_at(view, np.sort(places)))


def among(values: npt.NDArray[Any], some: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each value whether it is among some sorted ones: shape (values,)."""
    if not some.size:
        return np.zeros(len(values), bool)
    found: npt.NDArray[np.bool_] = some[np.minimum(np.searchsorted(some, values), len(some) - 1)] == values
    return found


def repeated(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return those of sorted values that come more than once."""
    found: npt.NDArray[np.uint64] = values[1:][values[1:] == values[:-1]]
    return found
