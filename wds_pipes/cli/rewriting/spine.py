"""What the commands have in common that write each shard as one of the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from wds_pipes.cli.jobs import (
    Options,
    check_names,
    check_outputs,
    check_same,
    common_classes,
    complete,
    marks,
    names_of,
    shard_job,
    shard_task,
    summary,
    unchanged,
    write_task,
)
from wds_pipes.core.words import plural
from wds_pipes.io.compression import kind_of_name
from wds_pipes.io.tasks.task import Facts, Job, Place, Report, Task, Work, fingerprint
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import base_name, path_of
from wds_pipes.tar.keys import without_dots
from wds_pipes.tar.listing import list_shards
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
    """

    storage_options: Options
    key_split: str
    on_repeated_key: str = "raise"


# Yields the samples to write of a shard: called with its samples, its path or URL, what ``plan``
# was called with for this shard, and the facts that the task reports, of which "left_out" counts
# the samples that are not written on purpose. It is sent to other processes.
Rewrite = Callable[[Iterator[Sample], str, Any, Facts], Iterator[Sample]]


def find_shards(urls: Sequence[str], place: Place, storage_options: Options) -> list[Shard]:
    """Return the shards that URLs name, and the names of those to write: their own, or if two have
    the same, relative to the common directory of all.

    Raises:
        ValueError: nothing matches, a shard is named twice, two would get one name, or one would be
            replaced.
        ShardError: a shard does not exist, or a store cannot be listed.
    """
    found, facts = list_shards(list(urls), storage_options)
    for url in found:
        if url == "-" or url.startswith("pipe:"):
            raise ValueError(f"{redact(url)} has no name for the shard to write: write it to a file first")
    names = list(map(_name, map(base_name, map(path_of, found))))
    if len(set(names)) < len(names):
        names = list(map(_name, names_of(found)))
    check_names(found, names)
    check_outputs(found, map(place.at, names))
    return list(map(Shard, found, names, marks(found, storage_options, facts)))


def plan(
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
    return shard_job(command, place, work, tasks, options, finish=finish, extras=extras, classes=classes)


def plan_rewrite(
    command: str,
    shards: Sequence[Shard],
    place: Place,
    rewrite: Rewrite,
    *,
    reading: Reading,
    options: Mapping[str, Any],
    fields: Sequence[str] | None = None,
    of_shards: Sequence[Any] | None = None,
    finish: Callable[[Place, list[Facts]], None] | None = None,
) -> Job:
    """Make the job in which each shard is read as ``group_by_key`` does, with these fields (None:
    all), and ``rewrite`` says what is written.
    """
    options = {**options, "key_split": reading.key_split}
    work = partial(_write, rewrite, reading, fields)
    return plan(command, shards, place, work, options, of_shards=of_shards, finish=finish)


def _write(rewrite: Rewrite, reading: Reading, fields: Sequence[str] | None, task: Task, place: Place) -> Facts:
    shard, of_shard = task.arguments
    check_same(shard.url, shard.mark, reading.storage_options)
    facts: Facts = {"read": 0, "left_out": 0}
    source = Source([shard.url], reading.storage_options or {}, reading.key_split, fields, reading.on_repeated_key)
    found = _counted(with_writable_keys(source.read(), reading.key_split), facts)
    samples = rewrite(found, shard.url, of_shard, facts)
    samples = complete(task.name, samples, lambda: facts["read"] - facts["left_out"])
    samples = unchanged(samples, {shard.url: shard.mark}, reading.storage_options)
    written = write_task(task, place, samples)
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


def summed(report: Report) -> str:
    """What a job has read and written, in words."""
    facts = report.facts.values()
    read = sum(fact.get("read", 0) for fact in facts)
    empty = sum(not fact["samples"] for fact in facts)
    words = [f"{summary(report)}, of {plural(read, 'sample')}"]
    for name, what in (
        ("skipped", "{} skipped because of errors"),
        ("missing", "{} without a partner"),
    ):
        if count := sum(fact.get(name, 0) for fact in facts):
            words.append(what.format(plural(count, "sample")))
    if errors := [fact["first_error"] for fact in facts if "first_error" in fact]:
        words[-1] += f", the first: {errors[0].rstrip('.')}"
    if empty:
        words.append(f"{plural(empty, 'shard')} without samples")
    if absent := set.intersection(*(set(fact.get("absent", ())) for fact in facts)):
        words.append(f"no sample has the field {', '.join(sorted(absent))}")
    return "; ".join(words)


def _counted(samples: Iterator[Sample], facts: Facts) -> Iterator[Sample]:
    for sample in samples:
        facts["read"] += 1
        yield sample


def _name(name: str) -> str:
    """Return the name of the uncompressed shard that is written for a shard with this name."""
    if kind_of_name(name):
        name = name[: name.rindex(".")]
    return name if name.lower().endswith(".tar") else f"{name}.tar"
