"""Divide an order of samples into shards, which are the tasks of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_pipes.cli.reshaping.inputs import Inputs, Reader, Sample
from wds_pipes.cli.shards import (
    check_outputs,
    common_classes,
    complete,
    shard_ends,
    shard_job,
    shard_task,
    write_task,
)
from wds_pipes.core.order import Permutation, hash_text
from wds_pipes.core.words import bytes_shown, plural
from wds_pipes.errors import SampleError
from wds_pipes.io.tasks.task import Facts, Job, Place, Task, fingerprint
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.offsets import stale_keys
from wds_pipes.tar.views import KeyRange, split_by_key

# The numbers of samples in some order: those that cannot be computed are listed (int64).
Order = range | Permutation | npt.NDArray[np.int64]

BLOCK_SAMPLES = 1 << 15  # samples whose places are computed at a time


@dataclass(frozen=True)
class Division:
    """How samples are divided into shards.

    Attributes:
        max_samples: the maximum number of samples in a shard.
        max_bytes: the maximum size of a shard.
        shards: how many shards of equal numbers of samples are written instead; None: by the
            limits.
    """

    max_samples: int
    max_bytes: int
    shards: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """What the plan of the job has of it."""
        return {"max_samples": self.max_samples, "max_bytes": self.max_bytes, "shards": self.shards}

    def ends(self, count: int, sizes: Callable[[], Iterator[npt.NDArray[np.int64]]]) -> list[int]:
        """Where the shards of ``count`` samples end; ``sizes`` iterates over the sizes of these.

        Raises:
            ValueError: there are more shards than samples.
        """
        if self.shards is None:
            return list(shard_ends(sizes(), self.max_samples, self.max_bytes))
        if self.shards > count:
            raise ValueError(f"--shards {self.shards} is more than there are samples, {count}: write fewer shards")
        return [count * number // self.shards for number in range(1, self.shards + 1)]


@dataclass(frozen=True)
class Part:
    """Some places of an order: those from ``start`` on, before ``stop``. A listed order has only
    these.
    """

    order: Order
    start: int
    stop: int

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers of the samples, in blocks."""
        for start in range(self.start, self.stop, BLOCK_SAMPLES):
            yield numbers_at(self.order, start, min(start + BLOCK_SAMPLES, self.stop))


def numbers_at(order: Order, start: int, stop: int) -> npt.NDArray[np.int64]:
    """The numbers of the samples at some places of an order."""
    if isinstance(order, Permutation):
        return order.numbers_at(np.arange(start, stop))
    if isinstance(order, range):
        return np.arange(order.start + start, order.start + stop)
    return order[start:stop]


def check_memory(inputs: Inputs, memory: int, of_sample: int) -> None:
    """Refuse an order that takes more than half of the memory, by the bytes for each sample.

    Raises:
        ValueError: it does.
    """
    needed = 2 * of_sample * inputs.count
    if needed > memory:
        raise ValueError(
            f"the order of {plural(inputs.count, 'sample')} needs {plural(needed, 'byte')}, more than --memory, which "
            f"is {bytes_shown(memory)}: pass --memory {-(-needed // 10**6)}MB"
        )


def check_uncompressed(inputs: Inputs) -> None:
    """Refuse compressed shards, of which samples cannot be read one by one.

    Raises:
        ValueError: a shard is compressed.
    """
    if inputs.compressed:
        raise ValueError(
            f"{redact(min(inputs.compressed))} is compressed, so its samples cannot be read in any order: write "
            "uncompressed shards first, with wds-pipes reshard"
        )


def plan(
    command: str,
    inputs: Inputs,
    place: Place,
    orders: Mapping[str, Order],
    *,
    given: Sequence[str],
    division: Division,
    memory: int,
    options: Mapping[str, Any],
) -> Job:
    """Make the job that writes samples in an order.

    Args:
        command: its name.
        inputs: the samples.
        place: the directory of the shards.
        orders: the order of each split by its name, or one without a name.
        given: what names the shards of the samples.
        division: how samples are divided into shards.
        memory: how many bytes each process may hold of them.
        options: what decides about the orders; ``"shares"``: those of the splits; ``"md5"``:
            whether the MD5s of the shards are computed.

    Raises:
        ValueError: a shard would replace an input, or be one of the next run.
    """
    tasks: list[Task] = []
    identity = fingerprint(inputs.marks, dict(options))
    for name, order in orders.items():
        count = order.count if isinstance(order, Permutation) else len(order)
        prefix = f"{name}/{name}" if name else "shard"

        def sizes(order: Order = order, count: int = count) -> Iterator[npt.NDArray[np.int64]]:
            for start in range(0, count, BLOCK_SAMPLES):
                numbers = numbers_at(order, start, min(start + BLOCK_SAMPLES, count))
                if isinstance(order, range):
                    found = inputs.extents(numbers)
                    yield found.stops - found.starts
                else:
                    yield inputs.blocks[numbers].astype("i8") * BLOCK

        for number, (start, stop) in enumerate(pairwise([0, *division.ends(count, sizes)])):
            shard = f"{prefix}-{number:06d}.tar"
            mark = fingerprint(identity, name, start, stop)
            says = plural(stop - start, "sample")
            tasks.append(shard_task(shard, _part(order, start, stop), mark, says))
    if not tasks:
        raise ValueError(
            "there is no sample to write: a data set has none, and with --exhausted stop the mixture ends where one "
            "has no more"
        )
    check_outputs(inputs.urls, [place.at(task.name) for task in tasks], given)
    work, decided = partial(write, inputs, memory, options), {**options, **division.options}
    classes = common_classes(inputs.urls, place.storage_options)
    return shard_job(command, place, work, tasks, decided, classes=classes)


def _part(order: Order, start: int, stop: int) -> Part:
    if isinstance(order, (range, Permutation)):
        return Part(order, start, stop)
    return Part(order[start:stop], 0, stop - start)


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
