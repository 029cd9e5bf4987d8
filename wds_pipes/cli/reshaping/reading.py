"""Read samples in any order, with limited memory.

Rules:
1. Samples are read in windows of limited size. In a window they are read in the order of the
   input, so that neighbours are read together, and then yielded in the wanted order.
2. A compressed shard is read from its beginning: what comes before a sample is passed over.
3. A shard on this disk, or a compressed one, that was changed after it was listed is refused when
   all was read. Of one that is read in ranges from a store, only what does not fit its index is
   noticed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.cli.reshaping.inputs import CONNECTIONS, Inputs
from wds_pipes.io.compression import unpacked
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import Part, Range, RangeReader
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.index_formats import make_opener
from wds_pipes.tar.samples import SampleParser
from wds_pipes.tar.scanning import readable

Sample = dict[str, Any]
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
        sample = self._parser.parse(part, start, stop, url, redact(url))
        if wanted.last:
            self._parser.check_last(part, stop, url)
        return sample

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
