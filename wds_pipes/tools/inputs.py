"""Where the samples of shards are, their division into new shards in some order, and reading them.

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

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.core.order import Permutation, hash_text
from wds_pipes.core.words import bytes_shown, plural
from wds_pipes.errors import SampleError
from wds_pipes.io.cache.shard_cache import parse_size
from wds_pipes.io.compression import kind_of_name, unpacked
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import Part, Range, RangeReader
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.index import base_name, folder_of, make_opener
from wds_pipes.tar.listing import exists, list_shards
from wds_pipes.tar.located import Located
from wds_pipes.tar.offsets import KEYS, OFFSETS, beside, stale_keys, write_offsets
from wds_pipes.tar.samples import SampleParser
from wds_pipes.tar.scanning import readable, scan
from wds_pipes.tar.views import KeyRange, split_by_key
from wds_pipes.tools.engines import Facts, Task
from wds_pipes.tools.jobs import Job, Place, Report, check_plan, fingerprint
from wds_pipes.tools.outputs import (
    REQUESTS,
    JobOptions,
    Running,
    StorageOptions,
    check_outputs,
    check_same,
    common_classes,
    complete,
    marks,
    of_first_pass,
    shard_ends,
    shard_job,
    shard_task,
    write_task,
)
from wds_pipes.tools.reading import CONNECTIONS, Sample

# The numbers of samples in some order: those that cannot be computed are listed (int64).
Order = range | Permutation | npt.NDArray[np.int64]

BLOCK_SAMPLES = 1 << 15  # samples whose places are computed at a time


class ReorderOptions(JobOptions, total=False):
    """Options of the functions that write samples in another order, or into other shards.

    Attributes:
        max_samples: the maximum number of samples in a shard; None: 100,000.
        max_bytes: the maximum size of a shard, such as 268435456 or ``"256MB"``; None: 1 GiB.
        shards: write so many shards of equal numbers of samples instead.
        memory: what each process may need besides the program itself, such as ``"64MB"``; by
            default 256 MB.
        md5: compute the MD5 of each shard.
    """

    max_samples: int | None
    max_bytes: int | str | None
    shards: int | None
    memory: int | str
    md5: bool


@dataclass(frozen=True)
class Places:
    """Some places of an order: those from ``start`` on, before ``stop``. A listed order has only
    these.
    """

    order: Order
    start: int
    stop: int

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers of the samples, in blocks."""
        order = self.order
        for start in range(self.start, self.stop, BLOCK_SAMPLES):
            places = np.arange(start, min(start + BLOCK_SAMPLES, self.stop))
            if isinstance(order, range):
                yield order.start + places
            else:
                yield order.numbers_at(places) if isinstance(order, Permutation) else order[places]


def reorder(
    command: str,
    given: str | Sequence[str],
    dest: str,
    options: ReorderOptions,
    orders: Callable[[Inputs, Running, Place, int], Mapping[str, Order]],
    *,
    decided: Mapping[str, Any],
    of_sample: int = 0,
    keys: bool = False,
    one_by_one: bool = False,
    named: Sequence[str] | None = None,
) -> Report:
    """Write the samples of shards in an order.

    Args:
        command: the name of the job.
        given: the URLs of the shards.
        dest: the directory to write to.
        options: see ``ReorderOptions``.
        orders: returns the order of each split by its name, or one without a name. It gets the
            samples, how first passes run, where they write, and how many bytes may be held.
        decided: what decides about the orders, as JSON values; ``"shares"``: those of the splits.
        of_sample: how many bytes of memory an order takes for each sample.
        keys: indexes of keys are needed.
        one_by_one: samples are read one by one, so the shards must not be compressed.
        named: what the shards were named by, if it is not ``given``.

    Raises:
        ValueError: the options do not fit; a shard would replace an input, or be one of the next
            run.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    running, shards = Running(dest, options, ReorderOptions), options.get("shards")
    given = [given] if isinstance(given, str) else given
    most, size = options.get("max_samples"), options.get("max_bytes")
    memory, place = parse_size(options.get("memory", "256MB")), running.place
    if shards is not None and (most or size):
        name = "max-samples" if most else "max-bytes"
        raise ValueError(f"--shards says how many shards there are, so --{name} would be ignored: pass one of the two")
    most, size = most or 100_000, parse_size(size or "1GiB")
    decided = {**decided, **({"md5": True} if options.get("md5") else {})}
    planned = {**decided, "max_samples": most, "max_bytes": size, "shards": shards}
    if not running.overwrite:
        check_plan(place, command, planned)
    with running.beside_outputs() as hidden:
        inputs = open_inputs(given, hidden, running, memory=memory // 8, keys=keys)
        if one_by_one and inputs.compressed:
            raise ValueError(
                f"{redact(min(inputs.compressed))} is compressed, so its samples cannot be read in any order: write "
                "uncompressed shards first, with wds-pipes reshard"
            )
        if (needed := 2 * of_sample * inputs.count) > memory:  # an order takes half of the memory at most
            raise ValueError(
                f"the order of {plural(inputs.count, 'sample')} needs {plural(needed, 'byte')}, more than --memory, "
                f"which is {bytes_shown(memory)}: pass --memory {-(-needed // 10**6)}MB"
            )
        tasks: list[Task] = []
        identity = fingerprint(inputs.marks, decided)
        for split, order in orders(inputs, running, hidden, memory // 2).items():
            prefix = f"{split}/{split}" if split else "shard"
            for number, (start, stop) in enumerate(pairwise([0, *_ends(inputs, order, most, size, shards)])):
                mark, count = fingerprint(identity, split, start, stop), stop - start
                part, says = _part(order, start, stop), plural(count, "sample")
                tasks.append(shard_task(f"{prefix}-{number:06d}.tar", part, mark, says, count))
    if not tasks:
        raise ValueError(
            "there is no sample to write: a data set has none, and with --exhausted stop the mixture ends where one "
            "has no more"
        )
    check_outputs(inputs.urls, [place.at(task.name) for task in tasks], given if named is None else named)
    work, classes = partial(write, inputs, memory // 2, decided), common_classes(inputs.urls, place.storage_options)
    return running.run(shard_job(command, place, work, tasks, planned, classes=classes))


def _ends(inputs: Inputs, order: Order, max_samples: int, max_bytes: int, shards: int | None) -> Iterable[int]:
    """Where the shards of samples in an order end."""
    count = order.count if isinstance(order, Permutation) else len(order)
    if shards is not None:
        if shards > count:
            raise ValueError(f"--shards {shards} is more than there are samples, {count}: write fewer shards")
        return [count * number // shards for number in range(1, shards + 1)]

    def sizes() -> Iterator[npt.NDArray[np.int64]]:
        for numbers in Places(order, 0, count).blocks():
            if isinstance(order, range):
                found = inputs.extents(numbers)
                yield found.stops - found.starts
            else:
                yield inputs.blocks[numbers].astype("i8") * BLOCK

    return shard_ends(sizes(), max_samples, max_bytes)


def _part(order: Order, start: int, stop: int) -> Places:
    if isinstance(order, (range, Permutation)):
        return Places(order, start, stop)
    return Places(order[start:stop], 0, stop - start)


def write(inputs: Inputs, memory: int, options: Mapping[str, Any], task: Task, place: Place) -> Facts:
    """Write a shard, of a split if the options have shares."""
    shares, md5 = options.get("shares"), "md5" in options
    with contextlib.closing(Reader(inputs, memory)) as reader:
        part = task.arguments
        samples = with_own_keys(complete(task.name, reader.read(part.blocks()), part.stop - part.start))
        if shares is not None:
            samples = _of_split(samples, split_by_key(shares)[task.name.partition("/")[0]])
        return write_task(task, place, samples, md5=md5)


def _of_split(samples: Iterable[Sample], split: KeyRange) -> Iterator[Sample]:
    """Yield samples, and check that their keys, which an index says, are those of a split.

    Raises:
        ShardError: the index is of another shard.
    """
    found: list[tuple[str, str]] = []
    for sample in samples:
        found.append((sample["__key__"], sample["__url__"]))
        yield sample
    hashes = np.fromiter((hash_text(key) for key, _ in found), np.uint64, len(found))
    if (wrong := np.flatnonzero(~split.has(hashes))).size:
        key, url = found[wrong[0]]
        raise stale_keys(url, key)


def with_own_keys(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield samples of one shard, and check that each has a key of its own.

    Raises:
        SampleError: two have the same.
    """
    seen: dict[str, str] = {}
    for sample in samples:
        key, url = sample["__key__"], redact(sample["__url__"])
        if key in seen:
            raise SampleError(
                f"two samples of one shard would have the key {key!r}, one of {seen[key]} and one of {url}: leave one "
                "out with wds-pipes dedup, or give them other keys with wds-pipes map",
                key=key,
            )
        seen[key] = url
        yield sample


class Extents(NamedTuple):
    """Where samples are: for each the number of its shard, its first byte, the byte after it, and
    whether it is the last one of its shard. Each is of shape (samples,), and the first three int64.
    """

    shards: npt.NDArray[np.int64]
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
        return Extents(shards, starts, stops, firsts[1:][shards] == numbers + 1)

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
    distinct = list(dict.fromkeys(urls))
    known = None if listed is None else list(dict(zip(urls, listed, strict=True)).values())
    of_urls = dict(zip(distinct, marks(distinct, options, known), strict=True))
    with ThreadPoolExecutor(REQUESTS) as pool:
        there = pool.map(lambda url: all(exists(beside(url, ending), options) for ending in endings), distinct)
        # of a compressed shard there is no index beside it, or one of something else
        missing = [
            url for url, indexed in zip(distinct, there, strict=True) if not indexed or kind_of_name(base_name(url))
        ]
    tasks = [_task(url, of_urls[url]) for url in missing]
    at = of_first_pass(Place(hidden.at("inputs"), options), tasks)
    facts = running.first_pass(Job("index", at, partial(_index, options), tasks))
    made = {task.arguments: at.at(task.name.rpartition("/")[0]) for task in tasks}
    compressed = frozenset(url for url, fact in zip(missing, facts, strict=True) if fact["compressed"])
    inputs = Inputs(urls, made, compressed, of_urls, memory=memory, storage_options=options)
    if not inputs.count:
        raise ValueError(
            f"there are no samples in {plural(len(urls), 'shard')}, of which {redact(urls[0])} is the first"
        )
    return inputs


def _task(url: str, mark: str) -> Task:
    name = f"{hash_text(folder_of(url)):016x}/{base_name(url)}"
    return Task(name, (name + KEYS, name + OFFSETS), url, mark)


def _index(options: StorageOptions, task: Task, place: Place) -> Facts:
    """Write where the samples of a shard begin."""
    found = scan(task.arguments, make_opener(options), threading.Event())
    check_same(task.arguments, task.fingerprint, options)
    name = place.at(task.name)
    write_offsets(name, found.keys, [*found.starts, found.end], place.storage_options)
    return {"compressed": found.compressed}


_CHUNK = 1 << 20  # bytes that are read at once


class _Wanted(NamedTuple):
    """A sample to read: where it is, and its place in the window."""

    range: Range
    last: bool  # of its shard
    place: int


class Reader:
    """Reads samples of shards.

    Args:
        inputs: the samples.
        memory: how many bytes of samples are held at most, if no sample is larger.
        fields: the fields to read; None: all.
    """

    def __init__(self, inputs: Inputs, memory: int, fields: frozenset[str] | None = None) -> None:
        self._inputs, self._window = inputs, memory // 2
        options = inputs.storage_options
        self._files = RangeReader(options, CONNECTIONS, max(memory // 2, CONNECTIONS << 10))
        self._opener = make_opener(options)
        self._unpacked: OrderedDict[str, _Unpacked] = OrderedDict()
        self._opened = set[str]()  # the shards that were read from this disk, or decompressed
        self._parser = SampleParser(fields, "first-dot", inputs.located.stale)

    def read(self, blocks: Iterable[npt.NDArray[np.int64]]) -> Iterator[Sample]:
        """Yield samples in the order of their numbers, which come in blocks.

        Raises:
            ShardError: a shard cannot be read, is damaged, or was changed.
        """
        ahead: deque[list[_Wanted]] = deque()  # windows whose ranges were requested

        def ranges() -> Iterator[Range]:
            for block in blocks:
                for window in self._windows(block):
                    ahead.append(window)
                    yield from (wanted.range for wanted in window)

        parts = self._parts(ranges())
        first = next(parts, None)
        while first is not None:
            window = ahead.popleft()
            held: dict[int, Sample] = {}
            following = 0
            for number, wanted in enumerate(window):
                part = first if not number else next(parts)
                held[wanted.place] = self._parse(wanted, part)
                while following in held:
                    yield held.pop(following)
                    following += 1
            first = next(parts, None)
        for url in self._opened:
            self._inputs.check_same(url)  # else some samples may be those of another shard

    def _windows(self, numbers: npt.NDArray[np.int64]) -> Iterator[list[_Wanted]]:
        """Divide numbers into windows, each in the order of the input."""
        inputs = self._inputs
        shards, starts, stops, last = inputs.extents(numbers)
        ends, begin = np.cumsum(stops - starts), 0
        while begin < len(numbers):
            before = int(ends[begin - 1]) if begin else 0
            stop = max(begin + 1, int(np.searchsorted(ends, before + self._window, "right")))
            order = begin + np.lexsort((starts[begin:stop], shards[begin:stop]))
            yield [
                _Wanted(Range(inputs.urls[shard], start, end), is_last, place)
                for shard, start, end, is_last, place in zip(
                    shards[order].tolist(),
                    starts[order].tolist(),
                    stops[order].tolist(),
                    last[order].tolist(),
                    (order - begin).tolist(),
                    strict=True,
                )
            ]
            begin = stop

    def _parse(self, wanted: _Wanted, part: Part) -> Sample:
        url, start, stop, _ = wanted.range
        if not is_remote(url) or url in self._inputs.compressed:
            self._opened.add(url)
        return self._parser.parse(part, start, stop, url, redact(url), last=wanted.last)

    def _parts(self, ranges: Iterable[Range]) -> Iterator[Part]:
        """Yield the bytes of each range, and the header after it."""
        for compressed, group in groupby(ranges, lambda wanted: wanted.url in self._inputs.compressed):
            if compressed:
                yield from self._read_compressed(group)
            else:
                with self._files.read(wanted._replace(stop=wanted.stop + BLOCK) for wanted in group) as parts:
                    yield from parts

    def _read_compressed(self, ranges: Iterable[Range]) -> Iterator[Part]:
        for url, start, stop, _ in ranges:
            stream = self._unpacked.get(url)
            if stream is None or start < stream.base:
                self._inputs.check_same(url)
                stream = self._unpacked[url] = _Unpacked(self._opener.open(url), url)
                if len(self._unpacked) > CONNECTIONS:
                    self._unpacked.popitem(last=False)[1].close()
            yield stream.read(start, stop + BLOCK)

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        for stream in self._unpacked.values():
            stream.close()


class _Unpacked:
    """The tar in a compressed shard, read forwards.

    Attributes:
        base: the first byte that can still be read.
    """

    def __init__(self, raw: BinaryIO, url: str) -> None:
        self._raw, self._url = raw, url
        self._stream = unpacked(raw)[0]
        self._data, self.base = b"", 0

    def read(self, start: int, stop: int) -> Part:
        """Return the bytes from ``start`` on, before ``stop`` if there are so many."""
        with readable(self._url):
            while self.base + len(self._data) < start:
                self.base += len(self._data)
                self._data = self._stream.read(min(_CHUNK, start - self.base))
                if not self._data:
                    break
            chunks, end = [self._data[start - self.base :]], self.base + len(self._data)
            while end < stop and (chunk := self._stream.read(stop - end)):
                chunks.append(chunk)
                end += len(chunk)
        self._data, self.base = b"".join(chunks), start
        return self._data, self.base

    def close(self) -> None:
        """Close the shard."""
        self._raw.close()
