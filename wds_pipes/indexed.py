"""IndexedShards: the samples of tar shards by their numbers and keys, as a map-style dataset."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from torch.utils.data import Dataset

from wds_pipes.core.options import check_count, check_storage_options, checks_options
from wds_pipes.errors import SampleError
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import Range, RangeReader
from wds_pipes.io.urls import Urls, origins_of, redact, with_origins
from wds_pipes.stages.cache_shards import as_cache
from wds_pipes.stages.decode_by_ext import DecodeByExt
from wds_pipes.stages.fields import read_names
from wds_pipes.tar.index import known_version, list_indexed
from wds_pipes.tar.keys import KeySplit, check_key_split
from wds_pipes.tar.located import Located, Selection, Selector, by_numbers, split_by_key
from wds_pipes.tar.samples import AFTER, SampleParser

if TYPE_CHECKING:
    import numpy.typing as npt

    from wds_pipes.codecs.resizing import Fit, Size
    from wds_pipes.io.cache.shard_cache import ShardCache
    from wds_pipes.tar.located import Numbers


class IndexedShards(Dataset[dict[str, Any]]):
    """The samples of tar shards by number and by key: a map-style dataset of torch.

    Each shard ``X.tar`` needs an index of offsets, ``X.tar.idx``, which ``wds-pipes index
    --offsets``, ``index_shards(offsets=True)`` or ``ShardWriter(offsets=True)`` writes, or
    Megatron-Energon. It has 8 bytes for each sample, and the shards stay as they are. Samples are
    the same dicts that ``group_by_key`` yields, in the order of the shards.

    ``data[i]`` is a sample, ``data[-1]`` the last one, ``data[10:20]`` a view of the same kind,
    ``data[[3, 1, 2]]`` a view in this order. A remote sample is read with one request. A DataLoader
    that makes batches calls ``__getitems__``: neighbours are then read together, and remote samples
    with many requests at once.

    An index of another shard is an error, or each sample is a whole one of the shard, with one
    exception: if an index points at the second member of a sample, and the shard is remote, this
    sample lacks its first one when it is read alone. The sample before it is then an error. Only an
    ``index.json`` shows that a shard was written again, with as many samples and a new index of
    offsets: another size is an error, and so is another ETag of a remote shard. Another time of
    modification of a local one is a ShardWarning. Without an ``index.json``, only the names of the
    shards are known, and the numbers are those of other samples.

    Nothing is opened before the first use. A copy in another process, forked or not, opens its own
    files. Threads may share one.

    Args:
        urls: the shards, as ``ShardList`` takes them, also by an ``index.json``; uncompressed.
        index: where the indexes are: True: beside the shards; or a directory, where they have the
            base names of the shards. Or an ``index.json``, which says how many samples each shard
            has: then the indexes, which are beside the shards, are read when they are needed, and
            not all at the first use. An ``index.json`` as ``urls`` does the same.
        fields: the fields to keep, such as ``["jpg", "cls"]``; None: all.
        decode: decode the samples as ``decode_by_ext`` does: True, or what it takes: ``"rgb8"``, a
            dict of functions, or a list of these. None: fields stay bytes.
        size, fit, allow_pickle, max_image_pixels: as in ``decode_by_ext``.
        storage_options: how to reach the storage, as fsspec takes it.
        connections: the maximum number of requests at once.
        cache: a cache that ``open_shards`` fills: a directory, or a ``ShardCache``. Remote shards
            that are stored there are read there, and nothing is added to it.
        key_split: as in ``group_by_key``.

    Raises:
        ValueError, TypeError: when built: nothing matches, or an argument does not fit.
        ShardError: at the first use: a shard has no index, or it is damaged. When a sample is read:
            the shard cannot be read, is damaged, or is another than the one that was indexed.
        IndexError: there is no sample with this number.
        KeyError: from ``by_key``: there is no sample with this key.
        DecodeError: a field cannot be decoded.
    """

    @checks_options
    def __init__(
        self,
        urls: Urls,
        *,
        index: bool | str | os.PathLike[str] = True,
        fields: Iterable[str] | None = None,
        decode: Any = None,
        size: Size | None = None,
        fit: Fit = "cover",
        allow_pickle: bool = False,
        max_image_pixels: int = 1 << 26,
        storage_options: dict[str, Any] | None = None,
        connections: int = 8,
        cache: ShardCache | str | os.PathLike[str] | None = None,
        key_split: KeySplit = "first-dot",
    ) -> None:
        urls = items_of(urls)
        self._listed = list_indexed(urls, index, check_storage_options(storage_options))
        self._options = with_origins(storage_options, origins_of(urls))
        self._fields = None if fields is None else frozenset(name.lower() for name in read_names("fields", fields))
        specs = decode_specs(decode)
        decoding = {"size": size, "fit": fit, "allow_pickle": allow_pickle, "max_image_pixels": max_image_pixels}
        decode_by_ext = DecodeByExt(None, *specs or (), **decoding, on_error="raise")  # type: ignore[arg-type]
        self._decode = None if specs is None else decode_by_ext
        self._cache, self._key_split = as_cache(cache), check_key_split(key_split)
        self._connections = check_count("connections", connections)
        self._numbers: Numbers | None = None  # of a view: which samples; None: all
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def urls(self) -> list[str]:
        """The shards, in order."""
        return list(self._listed.urls)

    def _open(self) -> _Opened:
        if self._opened is None:
            self._opened = _Opened(self)
        return self._opened

    def __len__(self) -> int:
        return self._open().count if self._numbers is None else len(self._numbers)

    def __repr__(self) -> str:
        view = "" if self._numbers is None else f", a view of {len(self._numbers)} samples"
        return f"IndexedShards({len(self.urls)} shards{view})"

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice | Sequence[int] | npt.NDArray[Any]) -> IndexedShards: ...
    def __getitem__(self, number: Any) -> Any:
        """Return a sample, or a view for a slice, a list of numbers or an array of them."""
        try:
            one = operator.index(number)
        except TypeError:
            if isinstance(number, str):
                what = f"a sample has a number here: for the one with key {number!r:.80} write data.by_key(key)"
                raise TypeError(what) from None
            return self._changed(_numbers=by_numbers(number, self.numbers))
        opened = self._opened or self._open()
        return opened.read_one(self._number(one, opened.count if self._numbers is None else len(self._numbers)))

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples, in this order; neighbours are read together."""
        count = len(self)
        return self._open().read([self._number(operator.index(number), count) for number in numbers])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all samples, in order."""
        size = 64
        for start in range(0, len(self), size):
            yield from self.__getitems__(range(start, min(start + size, len(self))))

    def _number(self, number: int, count: int) -> int:
        """Return the number of a sample among all, from that in this view of ``count`` samples."""
        if not -count <= number < count:
            raise IndexError(f"there is no sample {number}: there are {count}")
        number = number if number >= 0 else number + count
        return number if self._numbers is None else int(self._numbers[number])

    @property
    def numbers(self) -> Numbers:
        """The numbers of the samples among all samples of the shards: a range, or an array (int64).

        ``SampleList(urls, where=view.numbers)`` streams the samples of a view.
        """
        return range(self._open().count) if self._numbers is None else self._numbers

    def select(self, where: Selection | None = None, *, exclude: Selection | None = None) -> IndexedShards:
        """Return a view of some samples of this one. The shards are not read.

        Args:
            where: which samples, one of:

                - keys: a list of them, or a text file with a key on each line, ``"@keys.txt"`` or
                  a ``Path``. There must be a sample with one of them; a warning counts the others.
                  ``wds-pipes select`` writes the keys of samples whose metadata fulfil a condition
                - a part of ``split_by_key``
                - numbers in this view: a slice (``slice(None, None, 10)``: every tenth sample), a
                  range, a list or an array; or an array of bools, one for each sample. The view
                  has the order of the numbers, and the order of this view otherwise.
            exclude: which of these samples to leave out, in the same forms.

        Raises:
            ValueError, TypeError: a selection does not fit, or no sample has one of the keys.
            IndexError: there is no sample with one of these numbers.
            ShardError: an index of keys, or a file of keys, is missing or damaged.
            SampleError: several samples have one of the keys.
        """
        chosen = Selector(self._open().located).select(self.numbers, where, exclude)
        return self._changed(_numbers=chosen)

    def _changed(self, **attributes: Any) -> IndexedShards:
        """Return another one over the same shards."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, **attributes)
        return view

    def keys(self) -> Iterator[str]:
        """Yield the keys of the samples, in order. This reads the samples."""
        bare = self._changed(_fields=frozenset(), _decode=None, _opened=None)
        return (sample["__key__"] for sample in bare)

    def by_key(self, key: str) -> dict[str, Any]:
        """Return the sample with a key. The index of keys, ``X.tar.keys``, finds it.

        Raises:
            KeyError: there is no such sample in this view.
            SampleError: several have it.
        """
        if not isinstance(key, str):
            raise TypeError(f"a key is a string, not {key!r:.80}: for a number write data[number]")
        opened = self._open()
        numbers = opened.located.find(key)
        if self._numbers is not None:
            numbers = [number for number in numbers if number in self._numbers]
        found: list[dict[str, Any]] = [sample for sample in opened.read(numbers) if sample["__key__"] == key]
        if len(found) > 1:
            shards = " and ".join(sample["__url__"] for sample in found[:2])
            raise SampleError(
                f"{len(found)} samples have the key {key!r}, in shards {shards}: use their numbers", key=key
            )
        if not found:
            raise KeyError(key)
        return found[0]

    def split(self, shares: Mapping[str, float]) -> dict[str, IndexedShards]:
        """Divide the samples by the hashes of their keys, such as ``{"train": 0.9, "val": 0.1}``.

        A key is in the same part whatever other samples there are, so shards may be added later.
        The index of keys is read; the shards are not.

        Args:
            shares: the names of the parts and their shares, which sum to 1.
        """
        return {name: self.select(part) for name, part in split_by_key(shares).items()}


class _Opened:
    """What an IndexedShards has open in this process."""

    def __init__(self, data: IndexedShards) -> None:
        listed = data._listed
        versions = partial(known_version, listed.urls, listed.facts)
        self._files = RangeReader(data._options, data._connections, cache=data._cache, versions=versions)
        self._urls, facts = list(listed.urls), listed.facts  # a list is faster
        self._sizes = [None if facts is None else facts.size(shard) for shard in range(len(self._urls))]
        self.located = Located(
            listed.urls,
            listed.folder,
            self._files,
            data._options,
            data._connections,
            key_split=data._key_split,
            facts=facts,
        )
        self.located.compare_ends()
        self._starts = self.located.starts
        self.count = self._starts[-1]
        self._local = not any(map(is_remote, self._urls))
        self._shown = {url: redact(url) for url in self._urls}
        self._parser = SampleParser(data._fields, data._key_split, self.located.stale)
        self._decode = None if data._decode is None else data._decode.decoder()

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers among all."""
        order = sorted(range(len(numbers)), key=numbers.__getitem__)  # neighbours are read together
        found: list[Any] = [None] * len(numbers)
        if self._local:
            for place in order:
                found[place] = self.read_one(numbers[place])
            return found
        places = [self._place(numbers[place]) for place in order]
        with self._files.read(wanted for wanted, *_ in places) as parts:
            for place, (wanted, before, start, stop, last), part in zip(order, places, parts, strict=True):
                url = wanted.url
                sample = self._parser.parse(part, start, stop, url, self._shown[url], before=before, last=last)
                found[place] = sample if self._decode is None else self._decode(sample)
        return found

    def read_one(self, number: int) -> Any:
        """Return the sample with a number among all."""
        if not self._local:
            return self.read([number])[0]
        shard = bisect_right(self._starts, number) - 1
        url, place, offsets = self._urls[shard], number - self._starts[shard], self.located.offsets(shard)
        before, start, stop = offsets[place - 1] if place else -1, offsets[place], offsets[place + 1]
        part = self._files.read_one(url, start, stop + AFTER, before=before)
        last = place + 2 == len(offsets)
        sample = self._parser.parse(part, start, stop, url, self._shown[url], before=before, last=last)
        return sample if self._decode is None else self._decode(sample)

    def _place(self, number: int) -> tuple[Range, int, int, int, bool]:
        """Return what to read for a sample; where the one before it begins, -1 if there is none;
        where it begins and ends; and whether it is the last one of its shard.
        """
        shard, place = self.located.place(number)
        offsets = self.located.offsets(shard)
        size = self._sizes[shard]
        start, stop = offsets[place], offsets[place + 1]
        before = offsets[place - 1] if place else -1
        wanted = Range(self._urls[shard], start if place else 0, stop + AFTER, size)
        return wanted, before, start, stop, place + 2 == len(offsets)


def decode_specs(decode: Any) -> tuple[Any, ...] | None:
    """Return what ``decode_by_ext`` is called with for ``decode=``; None: fields stay bytes."""
    if decode is None or decode is False:
        return None
    if decode is True:
        return ()
    return tuple(decode) if isinstance(decode, (list, tuple)) else (decode,)
