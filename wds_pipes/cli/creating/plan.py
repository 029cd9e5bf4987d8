"""Divide samples into shards, which are the tasks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from wds_pipes.cli.creating.encoding import Encode, is_image
from wds_pipes.cli.creating.records import Content, Problems, Record, samples
from wds_pipes.cli.shards import (
    CLASSES,
    complete,
    content_of_classes,
    index_names,
    shard_ends,
    shard_facts,
    split_numbers,
    write_indexes,
)
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError
from wds_pipes.io.tasks.task import Facts, Job, Place, Task, fingerprint
from wds_pipes.tar.encoded import check_name, stored_size
from wds_pipes.tar.shard_file import shard_files, write_shard
from wds_pipes.tar.writer import whole


def plan(
    records: Sequence[Record],
    place: Place,
    problems: Problems,
    *,
    classes: Sequence[str] = (),
    shuffle: int | None = None,
    shares: Mapping[str, float] | None = None,
    max_samples: int,
    max_bytes: int,
    encode: Encode | None = None,
) -> Job:
    """Make the job that writes samples.

    Args:
        records: the samples, in order.
        place: the directory of the shards.
        problems: takes what is wrong with the samples.
        classes: the names of the classes, for ``classes.json``.
        shuffle: the seed of a random order, which depends on the keys and on nothing else.
        shares: the names of splits and their shares: see ``split_by_key``.
        max_samples: the maximum number of samples in a shard.
        max_bytes: the maximum size of a shard, with images as they are before ``encode``.
        encode: what becomes of images.

    Raises:
        SampleError: there are problems.
        ValueError: there is no sample, or none in a split.
    """
    _check(records, problems, encode)
    if not records:
        raise ValueError("the source has no samples, so there is nothing to write")
    if shuffle is not None:
        records = sorted(records, key=lambda record: (hash64(shuffle, hash_text(record.key)), record.key))
    tasks: list[Task] = []
    parts = _split(records, shares) if shares else {"": records}
    for name, part in parts.items():
        prefix = f"{name}/{name}" if name else "shard"
        for number, group in enumerate(_shards(part, max_samples, max_bytes)):
            shard = f"{prefix}-{number:06d}.tar"
            tasks.append(Task(shard, shard_files(shard), group, _fingerprint(group, encode)))
    options: dict[str, Any] = {"shuffle": shuffle, "split": dict(shares) if shares else None, "classes": list(classes)}
    if encode is not None:
        options["encode"] = encode.text
    return Job(
        "create",
        place,
        partial(write, place.storage_options, encode),
        tasks,
        {**options, "max_samples": max_samples, "max_bytes": max_bytes},
        partial(finish, tuple(classes)),
        (*index_names([task.name for task in tasks]), *([CLASSES] if classes else [])),
    )


def write(storage_options: dict[str, Any] | None, encode: Encode | None, task: Task, place: Place) -> Facts:
    """Write a shard."""
    found = complete(task.name, samples(task.arguments, storage_options, encode), len(task.arguments))
    facts = write_shard(place.at(task.name), found, storage_options=place.storage_options)
    return shard_facts(task.name, facts)


def finish(classes: Sequence[str], place: Place, facts: list[Facts]) -> None:
    """Write an index of the shards of each split, and the names of the classes."""
    write_indexes(place, facts)
    if classes:
        place.write(CLASSES, content_of_classes(classes))


def planned(task: Task) -> str:
    """What a task would write, in words."""
    size = sum(_size(record) for record in task.arguments)
    return f"{task.name}: {plural(len(task.arguments), 'sample')}, {plural(whole(size), 'byte')}"


def _check(records: Sequence[Record], problems: Problems, encode: Encode | None) -> None:
    seen: set[str] = set()
    for key, fields in records:
        if key in seen:
            problems.add(f"two samples have the key {key!r}: give each its own")
        seen.add(key)
        if not fields:
            problems.add(f"sample {key!r} has no fields, so it would not be in a shard: give it one, or leave it out")
        for field in fields:
            try:
                check_name(key, field)
            except SampleError as error:
                problems.add(str(error))
        images = [] if encode is None else list(filter(is_image, fields))
        if len(images) > 1:
            problems.add(
                f"sample {key!r} has the images {', '.join(images)}, which --encode would make one field: leave all "
                "but one out with --ignore"
            )
    problems.check()


def _split(records: Sequence[Record], shares: Mapping[str, float]) -> dict[str, list[Record]]:
    import numpy as np

    hashes = np.array([hash_text(record.key) for record in records], np.uint64)
    found = split_numbers(hashes, shares)
    return {name: [records[place] for place in places.tolist()] for name, places in found.items()}


def _shards(records: Sequence[Record], max_samples: int, max_bytes: int) -> list[Sequence[Record]]:
    """Divide samples as ShardWriter does."""
    import numpy as np

    sizes = np.fromiter(map(_size, records), np.int64, len(records))
    ends = [0, *shard_ends([sizes], max_samples, max_bytes)]
    return [records[start:stop] for start, stop in pairwise(ends)]


def _size(record: Record) -> int:
    return sum(stored_size(record.key, field, record.size_of(field)) for field in record.fields)


def _fingerprint(records: Sequence[Record], encode: Encode | None) -> str:
    marks = [[key, [[field, *_mark(value)] for field, value in sorted(fields.items())]] for key, fields in records]
    return fingerprint(*([encode.text] if encode is not None else []), marks)


def _mark(value: Content | bytes) -> list[Any]:
    if isinstance(value, Content):
        return [value.size, value.identity]
    return [blake2b(value, digest_size=16).hexdigest()]
