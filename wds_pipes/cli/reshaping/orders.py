"""The order of samples by their keys or by a field, and of several data sets that are mixed.

Rules of sorting:
1. A first pass writes the values of each input shard to a file, sorted, with the numbers of their
   samples in the shard. The files are merged, so only the values of one shard are in memory.
2. Values are all numbers or all texts. Texts are compared by their code points. Samples with equal
   values keep their order.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.cli.jobs import Running, first_pass, of_first_pass
from wds_pipes.cli.reshaping.plan import Inputs, Places, Reader
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.core.order import hash64
from wds_pipes.errors import SampleError
from wds_pipes.io.outputs import open_output
from wds_pipes.io.tasks.task import Facts, Job, Place, Task, fingerprint
from wds_pipes.io.urls import local_path, redact
from wds_pipes.stages.fields import identity
from wds_pipes.stages.proportions import TURNS, turns, whole_weights
from wds_pipes.tools.reading import Sample

_MOST_OPEN = 64  # files that are merged at a time
_BLOCK = 1 << 13

Line = list[Any]  # a value, and the number of its sample


def sorted_numbers(
    inputs: Inputs, by: str | None, hidden: Place, memory: int, running: Running
) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples in the order of their values.

    Args:
        inputs: the samples.
        by: the field, with ``:`` and a path for a value in it; None: the keys.
        hidden: where the first pass writes.
        memory: how many bytes of samples are held.
        running: how the first pass is run.

    Raises:
        ShardError: a shard cannot be read; a sample has no such value.
        ValueError: some values are numbers, and others are texts.
    """
    tasks = [
        Task(f"{shard:06d}", (f"{shard:06d}",), shard, fingerprint(mark, by)) for shard, mark in enumerate(inputs.marks)
    ]
    place = of_first_pass(Place(hidden.at("order"), hidden.storage_options), tasks)
    facts = first_pass(Job("sort", place, partial(_write_values, inputs, by, memory), tasks), running)
    kinds = {fact["kind"]: number for number, fact in enumerate(facts) if fact["kind"]}
    if len(kinds) > 1:
        (one, first), (other, second) = kinds.items()
        here, there = redact(inputs.urls[first]), redact(inputs.urls[second])
        raise ValueError(
            f"{by} is a {one} in {here} and a {other} in {there}: sort by a field that is the same kind of value in "
            "all samples"
        )
    with tempfile.TemporaryDirectory() as temporary:
        files = [_local(place, task.name, temporary) for task in tasks]
        starts = inputs.located.starts
        lines = _merged(list(zip(files, starts, strict=False)), temporary)
        return np.fromiter((number for _, number in lines), np.int64, inputs.count)


def _local(place: Place, name: str, temporary: str) -> str:
    """The path of a file of the first pass; one in a store is copied to a temporary directory."""
    path = local_path(place.at(name))
    if path is None:
        path = os.path.join(temporary, name)
        with open(path, "wb") as file:
            file.write(place.read(name) or b"")
    return path


def _write_values(inputs: Inputs, by: str | None, memory: int, task: Task, place: Place) -> Facts:
    """Write the sorted values of a shard; return of which kind they are."""
    starts, values = inputs.located.starts, _Values(by)
    reader = Reader(inputs, memory // 4, values.fields)
    part = Places(range(inputs.count), starts[task.arguments], starts[task.arguments + 1])
    with contextlib.closing(reader):
        lines = sorted([values.of(sample), number] for number, sample in enumerate(reader.read(part.blocks())))
        output = open_output(place.at(task.name), overwrite=True, wait=True, storage_options=place.storage_options)
        try:
            for text in _texts(lines):
                output.write(text)
            output.commit()
        finally:
            output.discard()
    return {"kind": values.kind}


class _Values:
    """Finds the value by which a sample is sorted.

    Args:
        by: the field, with ``:`` and a path for a value in it; None: the key.

    Attributes:
        fields: which fields are needed.
        kind: of the values so far: "number", "text", or None.
    """

    def __init__(self, by: str | None) -> None:

        name, _, path = (by or "").partition(":")
        self._by, self._field, self._path = by, name.lower(), path.split(".") if path else []
        self.fields = frozenset([self._field] if by else [])
        self.kind: str | None = None
        decoding = Decoding((), allow_pickle=False, max_image_pixels=1)
        self._decode = decoding.decoder(self._field) if by else None

    def of(self, sample: Sample) -> str | float:
        """Return the value of a sample.

        Raises:
            SampleError: it has none, or of another kind than those before.
        """
        if self._by is None:
            return str(sample["__key__"])
        if self._field not in sample:
            mend = "name another field, or leave the sample out with wds-pipes filter"
            raise self._error(sample, f"has no field {self._field!r}: {mend}")
        try:
            value = sample[self._field] if self._decode is None else self._decode(sample[self._field])
        except Exception as error:
            raise self._error(sample, f"has a field {self._field!r} that cannot be decoded: {error}") from error
        for name in self._path:
            if not isinstance(value, dict) or name not in value:
                raise self._error(sample, f"has no value {self._by!r}: leave it out with wds-pipes filter")
            value = value[name]
        if not isinstance(value, (str, int, float)) or (isinstance(value, float) and math.isnan(value)):
            raise self._error(
                sample,
                f"has a value {self._by!r} that is neither a text nor a number: {value!r:.80}. Name a value in JSON as "
                "FIELD:NAME, such as json:width",
            )
        kind = "text" if isinstance(value, str) else "number"
        if kind != (self.kind or kind):
            raise self._error(sample, f"has a {kind} as {self._by!r}, and samples before it a {self.kind}")
        self.kind = kind
        return value

    @staticmethod
    def _error(sample: Sample, what: str) -> SampleError:
        key, url = named = identity(sample)
        return SampleError(f"{named.name()} {what}", key=key, url=url)


def _merged(files: Sequence[tuple[str, int]], temporary: str) -> Iterator[Line]:
    """Yield the lines of sorted files in order; a number is added to the places in each."""
    files = list(files)
    while len(files) > _MOST_OPEN:
        group, files = files[:_MOST_OPEN], files[_MOST_OPEN:]
        files.append((_spill(_merged(group, temporary), temporary), 0))
    with contextlib.ExitStack() as stack:
        opened = [(stack.enter_context(open(path, "rb")), start) for path, start in files]
        yield from heapq.merge(*(_lines(file, start) for file, start in opened))


def _lines(file: IO[bytes], start: int) -> Iterator[Line]:
    for text in file:
        value, place = json.loads(text)
        yield [value, start + place]


def _spill(lines: Iterable[Line], temporary: str) -> str:
    """Write lines to a temporary file, and return its path."""
    descriptor, path = tempfile.mkstemp(dir=temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(_texts(lines))
    except OSError as error:
        error.filename = path
        raise
    return path


def _texts(lines: Iterable[Line]) -> Iterator[bytes]:
    lines = iter(lines)
    while block := list(islice(lines, _BLOCK)):
        yield b"".join(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n" for line in block)


class Weighted(NamedTuple):
    """A data set: its URLs, and its weight as a whole number."""

    url: str
    weight: int


def is_weighted(text: str) -> bool:
    """Whether this is ``URLS=WEIGHT``."""
    url, equals, weight = text.rpartition("=")
    try:
        float(weight)
    except ValueError:
        return False
    return bool(url and equals)


def read_sources(given: Sequence[str]) -> list[Weighted]:
    """Read data sets with weights.

    Raises:
        ValueError: one is not written as ``URLS=WEIGHT``.
    """
    urls, weights = [], []
    for text in given:
        if not is_weighted(text):
            raise ValueError(f"a data set is written as URLS=WEIGHT, such as 'web/*.tar=0.7', not {text!r:.200}")
        url, _, weight = text.rpartition("=")
        urls.append(url)
        weights.append(float(weight))
    if len(set(urls)) < len(urls):
        raise ValueError("a data set is named twice: name it once, with the sum of its weights")
    whole = whole_weights(urls, weights)
    return [Weighted(url, whole[url]) for url in urls]


def mixed_numbers(firsts: Sequence[int], weights: Sequence[int], exhausted: str) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples of several data sets, mixed.

    Args:
        firsts: the number of the first sample of each data set, and that of all samples.
        weights: one for each.
        exhausted: "stop" where the one that comes next has no more samples; "drop": the others
            continue, and their proportions start anew.
    """
    counts = [stop - start for start, stop in pairwise(firsts)]

    def numbers() -> Iterator[int]:
        drawn, live = [0] * len(counts), list(range(len(counts)))
        while live:
            hashes = [hash64(TURNS, source) for source in live]
            for turn in turns([weights[source] for source in live], hashes, [0] * len(live)):
                source = live[turn]
                if drawn[source] == counts[source]:
                    break
                yield firsts[source] + drawn[source]
                drawn[source] += 1
            live.remove(source)
            if exhausted == "stop":
                return

    return np.fromiter(numbers(), np.int64)
