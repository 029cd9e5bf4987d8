"""Making shards of files, lists and tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Unpack

import numpy as np

from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardWarning
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.tar.encoded import check_name, stored_size
from wds_pipes.tar.writer import whole
from wds_pipes.tools import tables
from wds_pipes.tools.engines import Facts, Task
from wds_pipes.tools.files import Content, Files, Problems, Record, of_classes, of_directory, samples
from wds_pipes.tools.jobs import Job, Place, Report, fingerprint
from wds_pipes.tools.outputs import (
    JobOptions,
    Running,
    StorageOptions,
    complete,
    content_of_classes,
    shard_ends,
    shard_job,
    shard_limits,
    shard_task,
    split_numbers,
    splits_of,
    write_task,
)

_FOLDERS, _TABLES = ("files", "classes"), ("csv", "tsv", "jsonl", "parquet")
_KINDS = (*_FOLDERS, "list", *_TABLES)
# What SOURCE may be with an option, besides those that are for all.
_FOR = {
    **dict.fromkeys(("--ignore", "--include", "--follow-symlinks"), _FOLDERS),
    "--key-split": (*_FOLDERS, "list"),
    "--root": ("list", *_TABLES),
    **dict.fromkeys(("--key", "--file", "--value", "--group"), _TABLES),
}
_ENDINGS = {f".{kind}": kind for kind in _TABLES} | {".ndjson": "jsonl", ".pq": "parquet"}


def create(
    source: str,
    dest: str,
    *,
    kind: str | None = None,
    max_samples: int | None = None,
    max_bytes: int | str | None = None,
    shuffle: int | None = None,
    split: Mapping[str, float] | None = None,
    key_split: str | None = None,
    follow_symlinks: bool = False,
    ignore: Sequence[str] = (),
    include: Sequence[str] = (),
    key: str | None = None,
    files: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
    group: int | None = None,
    root: str | None = None,
    **options: Unpack[JobOptions],
) -> Report:
    """Make shards of files, lists and tables.

    All that is wrong with the input is reported at once, before anything is written.

    Args:
        source: a directory, a list, a table, or ``-`` for standard input.
        dest: the directory to write to. It gets ``shard-000000.tar`` and so on, their offsets, and
            ``index.json``; with ``split``, a directory for each split.
        kind: what ``source`` is: ``"files"``: files of one name are a sample; ``"classes"``: its
            directories are classes; ``"list"``: lines with a path and maybe a label; ``"csv"``,
            ``"tsv"``, ``"jsonl"``, ``"parquet"``: a row is a sample. None: files for a directory;
            by the extension of a file, else a list.
        max_samples: the maximum number of samples in a shard; None: 100,000.
        max_bytes: the maximum size of a shard, such as 268435456 or ``"256MB"``; None: 1 GiB.
        shuffle: the seed of a random order, which depends on the keys and on nothing else; None:
            that of the source.
        split: divide by the hashes of the keys: the names of splits and their shares.
        key_split: which dot of a name ends the key: ``"first-dot"``; ``"last-dot"``, with which
            other dots become underscores; None: the first, and names that look otherwise are
            refused.
        follow_symlinks: also read what is outside of ``source``, where a link leads there.
        ignore: patterns of files to leave out.
        include: patterns of files to pack although they belong to shards.
        key: the column of the keys of a table; None: the number of the row.
        files: columns of paths or URLs of files, ``"COLUMN"`` or ``"FIELD=COLUMN"``.
        values: columns of values, by their fields.
        group: so many rows are one sample, with the field ``jsonl``.
        root: where relative paths in a list or table begin; None: where it is.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or there is no sample.
        SampleError: the input is wrong.
        WdsError: a file or the store cannot be read, or has other outputs.
    """
    given = {
        **{"--ignore": ignore, "--include": include, "--follow-symlinks": follow_symlinks, "--key-split": key_split},
        **{"--root": root, "--key": key, "--file": files, "--value": values, "--group": group},
    }
    running, options_of_store = Running(dest, options), options.get("storage_options")
    most, size = shard_limits(max_samples, max_bytes)
    if split:
        splits_of(split)  # whether they fit
    if source != "-" and "://" not in source and not os.path.exists(source):
        raise ValueError(f"SOURCE {source!r} does not exist")
    kind = kind or _kind(source)
    if source == "-" and kind in _FOLDERS:
        raise ValueError(f"standard input is a list or a table, and --from {kind} reads a directory")
    if os.path.exists(source) and os.path.isdir(source) is not (kind in _FOLDERS):
        what, reads = ("a directory", "a file") if os.path.isdir(source) else ("a file", "a directory")
        raise ValueError(f"SOURCE {source!r} is {what}, and --from {kind} reads {reads}")
    for option, kinds in _FOR.items():
        if given[option] and kind not in kinds:
            raise ValueError(f"{option} is for {', '.join(kinds)}, and SOURCE is {kind}")
    if group and (key or files or values):
        raise ValueError("--group is for whole rows of a table, without --key, --file and --value")
    links = "" if follow_symlinks else "pass --follow-symlinks to read what is there, or remove it"
    problems, chosen, classes = Problems(), Files(ignore, include, links), list[str]()
    if kind == "files":
        records = of_directory(source, key_split, chosen, problems, options_of_store)
    elif kind == "classes":
        records, classes = of_classes(source, key_split, chosen, problems, options_of_store)
    elif kind == "list":
        records, classes = tables.of_list(source, root, key_split, problems, options_of_store)
    else:
        pairs = [file.partition("=")[::2] if "=" in file else ("", file) for file in files]
        columns = tables.Columns(key, tuple(pairs), values or {}, root)
        records, classes = tables.of_table(source, kind, columns, problems, options_of_store)
        records = tables.grouped(records, group) if group else records
    if note := chosen.note():
        warnings.warn(note, ShardWarning, stacklevel=2)
    return running.run(
        write(
            records,
            running.place,
            problems,
            classes=classes,
            shuffle=shuffle,
            shares=split,
            max_samples=most,
            max_bytes=size,
        )
    )


def _kind(source: str) -> str:
    """What a source is, if the command does not say it."""
    if source == "-":
        raise ValueError("standard input may be anything: pass --from list, csv, tsv, jsonl or parquet")
    if TAR_NAME.fullmatch(source.rpartition("/")[2]) and not os.path.isdir(source):
        raise ValueError(f"SOURCE {source!r} is a shard: wds-pipes reshard, sort and others write its samples")
    ending = os.path.splitext(source.partition("?")[0])[1].lower()
    if os.path.isdir(source) or (not os.path.exists(source) and (source.endswith("/") or "." not in ending)):
        return "files"
    if ending == ".json":
        raise ValueError(f"{source} may be anything: pass --from jsonl if it is an object on each line")
    return _ENDINGS.get(ending, "list")


def write(
    records: Sequence[Record],
    place: Place,
    problems: Problems,
    *,
    classes: Sequence[str] = (),
    shuffle: int | None = None,
    shares: Mapping[str, float] | None = None,
    max_samples: int,
    max_bytes: int,
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
        max_bytes: the maximum size of a shard.

    Raises:
        SampleError: there are problems.
        ValueError: there is no sample, or none in a split.
    """
    _check(records, problems)
    if not records:
        raise ValueError("the source has no samples, so there is nothing to write")
    if shuffle is not None:
        records = sorted(records, key=lambda record: (hash64(shuffle, hash_text(record.key)), record.key))
    tasks: list[Task] = []
    parts = _split(records, shares) if shares else {"": records}
    for name, part in parts.items():
        prefix = f"{name}/{name}" if name else "shard"
        sizes = np.fromiter(map(_size, part), np.int64, len(part))
        ends = [0, *shard_ends([sizes], max_samples, max_bytes)]
        for number, (start, stop) in enumerate(pairwise(ends)):
            group = part[start:stop]
            size = whole(int(sizes[start:stop].sum()))
            says = f"{plural(len(group), 'sample')}, {plural(size, 'byte')}"
            tasks.append(shard_task(f"{prefix}-{number:06d}.tar", group, _fingerprint(group), says, len(group)))
    options: dict[str, Any] = {"shuffle": shuffle, "split": dict(shares) if shares else None, "classes": list(classes)}
    options |= {"max_samples": max_samples, "max_bytes": max_bytes}
    names = content_of_classes(classes) if classes else None
    return shard_job("create", place, partial(_write, place.storage_options), tasks, options, classes=names)


def _write(storage_options: StorageOptions, task: Task, place: Place) -> Facts:
    found = samples(task.arguments, storage_options)
    return write_task(task, place, complete(task.name, found, len(task.arguments)))


def _check(records: Sequence[Record], problems: Problems) -> None:
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
    problems.check()


def _split(records: Sequence[Record], shares: Mapping[str, float]) -> dict[str, list[Record]]:
    hashes = np.array([hash_text(record.key) for record in records], np.uint64)
    found = split_numbers(hashes, shares)
    return {name: [records[place] for place in places.tolist()] for name, places in found.items()}


def _size(record: Record) -> int:
    return sum(stored_size(record.key, field, record.size_of(field)) for field in record.fields)


def _fingerprint(records: Sequence[Record]) -> str:
    marks = [[key, [[field, *_mark(value)] for field, value in sorted(fields.items())]] for key, fields in records]
    return fingerprint(marks)


def _mark(value: Content | bytes) -> list[Any]:
    if isinstance(value, Content):
        return [value.size, value.identity]
    return [blake2b(value, digest_size=16).hexdigest()]
