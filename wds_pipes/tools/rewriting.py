"""Rewriting shards one by one: each becomes one of the same name in another directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from wds_pipes.io.compression import kind_of_name
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import base_name, path_of
from wds_pipes.tar.keys import without_dots
from wds_pipes.tar.listing import list_shards
from wds_pipes.tools.engines import Facts, Task
from wds_pipes.tools.jobs import Job, Place, Work, fingerprint
from wds_pipes.tools.outputs import (
    StorageOptions,
    check_names,
    check_outputs,
    check_same,
    common_classes,
    complete,
    marks,
    names_of,
    shard_job,
    shard_task,
    unchanged,
    write_task,
)
from wds_pipes.tools.reading import Sample, Source


class Shard(NamedTuple):
    """A shard to rewrite.

    Attributes:
        url: its path or URL.
        name: the name of the shard that is written.
        mark: what distinguishes its content from another one.
    """

    url: str
    name: str
    mark: str


class Reading(NamedTuple):
    """How shards are read; it is sent to other processes.

    Attributes:
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.
        on_repeated_key: as in ``group_by_key``.
        fields: the fields that are read; None: all.
    """

    storage_options: StorageOptions
    key_split: str = "first-dot"
    on_repeated_key: str = "raise"
    fields: Sequence[str] | None = None


# Yields the samples to write of a shard: called with its samples, its path or URL, what ``rewrite``
# was called with for this shard, and the facts that the task reports, of which "left_out" counts
# the samples that are not written on purpose. It is sent to other processes.
Change = Callable[[Iterator[Sample], str, Any, Facts], Iterator[Sample]]


def find_shards(urls: str | Sequence[str], place: Place) -> list[Shard]:
    """Return the shards that URLs name, and the names of those to write: their own, or if two have
    the same, relative to the common directory of all.

    Raises:
        ValueError: nothing matches, a shard is named twice, two would get one name, or one would be
            replaced.
        ShardError: a shard does not exist, or a store cannot be listed.
    """
    found, facts = list_shards(urls, place.storage_options)
    for url in found:
        if url == "-" or url.startswith("pipe:"):
            raise ValueError(f"{redact(url)} has no name for the shard to write: write it to a file first")
    names = list(map(_name, map(base_name, map(path_of, found))))
    if len(set(names)) < len(names):
        names = list(map(_name, names_of(found)))
    check_names(found, names)
    check_outputs(found, map(place.at, names))
    return list(map(Shard, found, names, marks(found, place.storage_options, facts)))


def rewrite(
    command: str,
    shards: Sequence[Shard],
    place: Place,
    work: Work,
    options: Mapping[str, Any],
    *,
    of_shards: Sequence[Any] | None = None,
    finish: Callable[[Place, list[Facts]], None] | None = None,
    extras: Sequence[str] = (),
) -> Job:
    """Make the job that rewrites shards.

    Args:
        command: its name.
        shards: the shards.
        place: where they are written.
        work: writes one. The arguments of its task are the shard and its part of ``of_shards``.
        options: what the outputs depend on, as JSON values.
        of_shards: more that the output of each shard depends on, as JSON values.
        finish: writes what belongs to the whole; None: the indexes.
        extras: the files that ``finish`` writes beside the indexes.
    """
    of_shards = [None] * len(shards) if of_shards is None else of_shards
    tasks = [
        shard_task(shard.name, (shard, of), fingerprint(shard.mark, of, dict(options)), f"of {redact(shard.url)}")
        for shard, of in zip(shards, of_shards, strict=True)
    ]
    classes = common_classes([shard.url for shard in shards], place.storage_options)
    return shard_job(command, place, work, tasks, options, finish=finish, extras=extras, classes=classes, unit="shard")


def changed_by(change: Change, reading: Reading) -> Work:
    """The work of a task that reads a shard as ``group_by_key`` does, and writes what ``change``
    makes of its samples.
    """
    return partial(_write_changed, change, reading)


def _write_changed(change: Change, reading: Reading, task: Task, place: Place) -> Facts:
    shard, of_shard = task.arguments
    options, key_split = reading.storage_options, reading.key_split
    check_same(shard.url, shard.mark, options)
    facts: Facts = {"read": 0, "left_out": 0}
    source = Source([shard.url], options or {}, key_split, reading.fields, reading.on_repeated_key)

    def read() -> Iterator[Sample]:
        for sample in with_writable_keys(source.read(), key_split):
            facts["read"] += 1
            yield sample

    samples = change(read(), shard.url, of_shard, facts)
    samples = complete(task.name, samples, lambda: facts["read"] - facts["left_out"])
    written = write_task(task, place, unchanged(samples, {shard.url: shard.mark}, options))
    facts["read"] += source.without_fields
    facts["left_out"] += source.without_fields
    return {**written, **facts}


def with_writable_keys(samples: Iterator[Sample], key_split: str) -> Iterator[Sample]:
    """Yield samples with keys that can be written: only with ``first-dot`` a key has no dots, which
    become underscores.
    """
    for sample in samples:
        if key_split != "first-dot":
            sample["__key__"] = without_dots(sample["__key__"])
        yield sample


def _name(name: str) -> str:
    """Return the name of the uncompressed shard that is written for a shard with this name."""
    if kind_of_name(name):
        name = name[: name.rindex(".")]
    return name if name.lower().endswith(".tar") else f"{name}.tar"
