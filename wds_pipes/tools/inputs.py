"""The samples of shards by their numbers: where they are, and reading them in any order.

Rules of where each sample is:
1. An index of offsets beside a shard is used. Where there is none, a first pass makes one in the
   directory of the outputs, in ``.wds-pipes/inputs``. It stays there for other shares of the tasks
   and for the next run. If shards were changed, the indexes are made again in another directory.
2. The offsets of a compressed shard are those of the tar in it.

Rules of reading samples in any order, with limited memory:
1. Samples are read in windows of limited size. In a window they are read in the order of the
   input, so that neighbours are read together, and then yielded in the wanted order.
2. A compressed shard is read from its beginning: what comes before a sample is passed over.
3. A shard on this disk, or a compressed one, that was changed after it was listed is refused when
   all was read. Of one that is read in ranges from a store, only what does not fit its index is
   noticed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.io.compression import kind_of_name
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import LocalFile, Part, Range, RangeReader
from wds_pipes.io.urls import redact
from wds_pipes.tar.encoded import Encoded
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.index import (
    KEYS,
    OFFSETS,
    base_name,
    beside,
    exists,
    folder_of,
    list_shards,
    make_opener,
    pack_keys,
    pack_offsets,
)
from wds_pipes.tar.indexing import scan
from wds_pipes.tar.located import Located
from wds_pipes.tar.samples import SampleParser
from wds_pipes.tar.stored import Stored, stored_in
from wds_pipes.tools.jobs import Facts, Place, Task
from wds_pipes.tools.outputs import REQUESTS, Running, StorageOptions, changed, check_same, marks_and_sizes
from wds_pipes.tools.reading import CONNECTIONS, Sample, Source

_TOGETHER = 1 << 20  # bytes of samples that are copied at a time; a larger one is read and written
T = TypeVar("T")


class Extents(NamedTuple):
    """Where samples are: for each the number of its shard, its own in the shard, its first byte,
    the byte after it, and whether it is the last one of its shard. Each is of shape (samples,).
    """

    shards: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    last: npt.NDArray[np.bool_]


class Inputs:
    """The samples of shards by their numbers. It can be pickled.

    Args:
        urls: the shards.
        made: the directories of the indexes that the first pass has made, by shard.
        compressed: the shards that are compressed.
        marks: what tells the present content of each shard from another, by shard.
        memory: how many bytes of indexes are held.
        storage_options: how to reach the storage.

    Attributes:
        count: the number of samples.
        marks: what tells the present content of each shard from another.
    """

    def __init__(
        self,
        urls: Sequence[str],
        made: dict[str, str],
        compressed: frozenset[str],
        marks: Mapping[str, str],
        *,
        memory: int,
        storage_options: StorageOptions,
    ) -> None:
        self.urls, self.compressed, self._marks = list(urls), compressed, marks
        self.marks = [marks[url] for url in urls]
        self.storage_options, files = storage_options, RangeReader(storage_options, CONNECTIONS)
        self.located = Located(self.urls, None, files, storage_options, CONNECTIONS, made=made, held_bytes=memory)
        self.count = self.located.starts[-1]

    def check_same(self, url: str) -> None:
        """Raise StateError if a shard was changed after it was listed."""
        check_same(url, self._marks[url], self.storage_options)

    @cached_property
    def blocks(self) -> npt.NDArray[np.uint32]:
        """How many blocks of 512 bytes each sample takes: shape (samples,)."""
        found = np.empty(self.count, np.uint32)
        for shard, (start, stop) in enumerate(pairwise(self.located.starts)):
            found[start:stop] = np.diff(self._offsets(shard)) // BLOCK
        return found

    def extents(self, numbers: npt.NDArray[np.int64]) -> Extents:
        """Return where samples are."""
        firsts = np.array(self.located.starts)
        shards = np.searchsorted(firsts, numbers, side="right") - 1
        places, starts, stops = numbers - firsts[shards], np.empty_like(numbers), np.empty_like(numbers)
        order = np.argsort(shards, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(order) else ():
            offsets = self._offsets(int(shards[group[0]]))
            starts[group], stops[group] = offsets[places[group]], offsets[places[group] + 1]
        return Extents(shards, places, starts, stops, firsts[1:][shards] == numbers + 1)

    def _offsets(self, shard: int) -> npt.NDArray[np.int64]:
        return np.asarray(self.located.offsets(shard)).astype(np.int64)

    def hashes(self) -> npt.NDArray[np.uint64]:
        """The hashes of the keys of all samples, in their order."""
        found = np.empty(self.count, np.uint64)
        for shard, start in enumerate(self.located.starts[:-1]):
            hashes, numbers = self.located.keys(shard)
            found[start + numbers] = hashes
        return found


def open_inputs(given: Sequence[str], hidden: Place, running: Running, *, memory: int, keys: bool = False) -> Inputs:
    """Find the samples of shards.

    Args:
        given: URLs, patterns, or ``index.json``.
        hidden: where the indexes are made. Its storage options are also those of the shards.
        running: how they are made.
        memory: how many bytes of indexes are held.
        keys: indexes of keys are needed too.

    Raises:
        ValueError: nothing matches, or there are no samples; standard input.
        ShardError: a shard or an index cannot be read, or is damaged.
    """
    options = hidden.storage_options
    urls, listed = list_shards(given, options)
    if "-" in urls:
        raise ValueError("standard input can be read only once: write it to a file first, such as with cat > IN.tar")
    endings = (OFFSETS, KEYS) if keys else (OFFSETS,)
    known = marks_and_sizes(urls, options, listed)
    of_urls, sizes = (dict(zip(urls, each, strict=True)) for each in zip(*known, strict=True))
    with ThreadPoolExecutor(REQUESTS) as pool:
        there = pool.map(lambda url: all(exists(beside(url, ending), options) for ending in endings), of_urls)
        # of a compressed shard there is no index beside it, or one of something else
        missing = [
            url for url, indexed in zip(of_urls, there, strict=True) if not indexed or kind_of_name(base_name(url))
        ]
    tasks = [_task(url, endings, of_urls[url], sizes[url]) for url in missing]
    at, facts = running.first_pass(hidden, "inputs", partial(_index, options), tasks)
    made = {task.arguments: at.at(task.name.rpartition("/")[0]) for task in tasks}
    compressed = frozenset(url for url, fact in zip(missing, facts, strict=True) if fact["compressed"])
    inputs = Inputs(urls, made, compressed, of_urls, memory=memory, storage_options=options)
    if not inputs.count:
        raise ValueError(
            f"there are no samples in {plural(len(urls), 'shard')}, of which {redact(urls[0])} is the first"
        )
    return inputs


def _task(url: str, endings: Iterable[str], mark: str, size: int) -> Task:
    name = f"{hash_text(folder_of(url)):016x}/{base_name(url)}"
    return Task(name, tuple(name + ending for ending in endings), url, mark, size)


def _index(options: StorageOptions, task: Task, place: Place) -> Facts:
    """Write where the samples of a shard begin."""
    found = scan(task.arguments, make_opener(options), threading.Event(), md5=False)
    check_same(task.arguments, task.fingerprint, options)
    place.write(task.name + OFFSETS, pack_offsets([*found.starts, found.end]))
    if task.name + KEYS in task.outputs:
        place.write(task.name + KEYS, pack_keys(found.keys))
    return {"compressed": found.compressed}


class _Wanted(NamedTuple):
    """A sample to read: where it is, and its place in the order."""

    shard: int
    number: int  # in its shard
    start: int
    stop: int
    last: bool  # of its shard
    place: int


class Copy(NamedTuple):
    """A sample in the form in which it is written, and the shard that it is from, without
    credentials.
    """

    url: str
    sample: Encoded | Stored


class Reader:
    """Reads samples of shards.

    Args:
        inputs: the samples.
        memory: how many bytes of samples are held at most, if no sample is larger.
        fields: the fields to read; None: all.
    """

    def __init__(self, inputs: Inputs, memory: int, fields: frozenset[str] | None = None) -> None:
        self._inputs, self._window = inputs, memory // 2
        self._files = RangeReader(inputs.storage_options, CONNECTIONS, max(memory // 2, CONNECTIONS << 10))
        self._unpacked: OrderedDict[int, Iterator[tuple[int, Sample]]] = OrderedDict()  # of compressed shards
        self._parser = SampleParser(fields, "first-dot", inputs.located.stale)

    def read(self, blocks: Iterable[npt.NDArray[np.int64]]) -> Iterator[Sample]:
        """Yield samples in the order of their numbers, which come in blocks.

        Raises:
            ShardError: a shard cannot be read, is damaged, or was changed.
        """
        return self._in_order(self._samples(self._wanted(blocks)))

    def copy(self, blocks: Iterable[npt.NDArray[np.int64]]) -> Iterator[Copy]:
        """Yield samples as ``read`` does, in the form in which they are written: a small one that
        has it in its shard is copied.

        Raises:
            ShardError: as for ``read``.
            SampleError: a sample cannot be written as it is.
        """
        return self._in_order(self._copies(self._wanted(blocks)))

    def _in_order(self, found: Iterable[tuple[_Wanted, T]]) -> Iterator[T]:
        inputs, held = self._inputs, dict[int, T]()
        following, shards = 0, set[int]()
        for wanted, sample in found:
            held[wanted.place] = sample
            shards.add(wanted.shard)
            while following in held:
                yield held.pop(following)
                following += 1
        for url in (inputs.urls[shard] for shard in sorted(shards)):
            if not is_remote(url) or url in inputs.compressed:  # it was read from this disk, or decompressed
                inputs.check_same(url)  # else some samples may be those of another shard

    def _wanted(self, blocks: Iterable[npt.NDArray[np.int64]]) -> Iterator[list[_Wanted]]:
        """Divide samples into windows; yield those of a window in the order of the input, as runs
        of neighbours in a shard: of a limited size, or one large sample.
        """
        done = 0
        for numbers in blocks:
            found = self._inputs.extents(numbers)
            ends, begin = np.cumsum(found.stops - found.starts), 0
            while begin < len(numbers):
                before = int(ends[begin - 1]) if begin else 0
                stop = max(begin + 1, int(np.searchsorted(ends, before + self._window, "right")))
                order = begin + np.lexsort((found.starts[begin:stop], found.shards[begin:stop]))
                shards, _, starts, stops, _ = columns = [column[order] for column in found]
                sizes = stops - starts
                ends_run = (shards[1:] != shards[:-1]) | (starts[1:] != stops[:-1]) | (sizes[:-1] > _TOGETHER)
                ends_run |= np.diff(np.cumsum(sizes) // _TOGETHER) > 0
                cuts = [0, *(np.flatnonzero(ends_run) + 1).tolist(), len(order)]
                rows = zip(*(column.tolist() for column in columns), (done + order).tolist(), strict=True)
                wanted = [*map(_Wanted._make, rows)]
                yield from (wanted[cut:end] for cut, end in pairwise(cuts))
                begin = stop
            done += len(numbers)

    def _samples(self, runs: Iterable[list[_Wanted]]) -> Iterator[tuple[_Wanted, Sample]]:
        """Read samples as they are stored, with the header after each; those of compressed shards
        from the beginning of the shard.
        """
        urls = self._inputs.urls
        wanted = chain.from_iterable(runs)
        for compressed, group in groupby(wanted, lambda one: urls[one.shard] in self._inputs.compressed):
            if compressed:
                yield from ((one, self._unpack(one)) for one in group)
                continue
            for (one,), part in self._parts([one] for one in group):
                url = urls[one.shard]
                yield one, self._parser.parse(part, one.start, one.stop, url, redact(url), last=one.last)

    def _parts(self, runs: Iterable[list[_Wanted]]) -> Iterator[tuple[list[_Wanted], Part]]:
        """Read neighbouring samples together, with the header after each run of them."""
        urls, ahead = self._inputs.urls, deque[list[_Wanted]]()  # what was requested

        def ranges() -> Iterator[Range]:
            for run in runs:
                ahead.append(run)
                yield Range(urls[run[0].shard], run[0].start, run[-1].stop + BLOCK)

        with self._files.read(ranges()) as parts:
            for part in parts:
                yield ahead.popleft(), part

    def _copies(self, runs: Iterable[list[_Wanted]]) -> Iterator[tuple[_Wanted, Copy]]:
        """Read samples, the small ones of uncompressed shards many at a time."""

        def is_small(run: list[_Wanted]) -> bool:
            first = run[0]  # the only one if it is large
            return (
                first.stop - first.start <= _TOGETHER and self._inputs.urls[first.shard] not in self._inputs.compressed
            )

        for small, group in groupby(runs, is_small):
            if not small:
                yield from (
                    (one, Copy(sample["__url__"], Encoded(sample, None))) for one, sample in self._samples(group)
                )
                continue
            read, size = list[tuple[list[_Wanted], bytes]](), 0
            for run, (part, base) in self._parts(group):
                start, stop = run[0].start, run[-1].stop + BLOCK
                if isinstance(part, LocalFile):
                    part, base = part.part(start, stop)
                read.append((run, part[start - base : stop - base]))
                size += stop - start
                if size >= _TOGETHER:
                    yield from self._copied(read)
                    read, size = [], 0
            yield from self._copied(read)

    def _copied(self, read: Sequence[tuple[list[_Wanted], bytes]]) -> Iterator[tuple[_Wanted, Copy]]:
        """Yield samples of which the bytes were read, with the header after each run."""
        pieces = [memoryview(data)[: run[-1].stop - run[0].start] for run, data in read]
        shifts = [0, *accumulate(map(len, pieces))]
        begins = {
            one.start - run[0].start + shift for (run, _), shift in zip(read, shifts, strict=False) for one in run
        }
        found = {sample.start: sample for sample in stored_in(b"".join(pieces), begins)}
        for (run, data), shift in zip(read, shifts, strict=False):
            url, base = self._inputs.urls[run[0].shard], run[0].start
            shown = redact(url)
            for one in run:
                sample: Encoded | Stored | None = found.get(one.start - base + shift)
                if sample is not None and sample.size == one.stop - one.start:
                    self._parser.check_after(sample.key, data, one.stop - base, url, one.stop, last=one.last)
                else:
                    parsed = self._parser.parse((data, base), one.start, one.stop, url, shown, last=one.last)
                    sample = Encoded(parsed, None)
                yield one, Copy(shown, sample)

    def _unpack(self, wanted: _Wanted) -> Sample:
        url, options = self._inputs.urls[wanted.shard], self._inputs.storage_options
        if wanted.shard not in self._unpacked:
            self._inputs.check_same(url)
            self._unpacked[wanted.shard] = enumerate(Source([url], options).read())
            if len(self._unpacked) > CONNECTIONS:
                self._unpacked.popitem(last=False)
        for number, sample in self._unpacked[wanted.shard]:
            if number == wanted.number:
                return sample
        raise changed(url)

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        self._unpacked.clear()
