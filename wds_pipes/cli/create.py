"""``wds-pipes create``: makes shards of files, lists and tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import click
import numpy as np

from wds_pipes.cli.creating import tables
from wds_pipes.cli.creating.records import (
    Content,
    Files,
    Problems,
    Record,
    of_classes,
    of_directory,
    samples,
)
from wds_pipes.cli.jobs import (
    Running,
    complete,
    content_of_classes,
    runs,
    shard_ends,
    shard_job,
    shard_task,
    split_numbers,
    write_task,
)
from wds_pipes.cli.options import dest, echo, example, shard_limits, shares, values_option
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.tasks.task import Facts, Job, Place, Task, fingerprint
from wds_pipes.tar.encoded import check_name, stored_size
from wds_pipes.tar.writer import whole

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


@click.command(
    epilog=example(
        "wds-pipes create photos/ shards/ --max-bytes 256MB --shuffle 7 -j 4\n"
        "wds-pipes create table.csv s3://bucket/data --key id --file image --value cls=label\n"
        "wds-pipes create photos/ shards/ --task 0 --tasks 8"
    )
)
@click.argument("source")
@dest
@click.option(
    "--from",
    "kind",
    type=click.Choice(_KINDS),
    help="What SOURCE is.  [default: files for a directory; by the extension of a file, else list]",
)
@shard_limits
@click.option(
    "--shuffle", type=int, metavar="SEED", help="Write in a random order, which depends on SEED and the keys."
)
@shares("--split", "split", "Divide by the hashes of the keys, such as train=0.9,val=0.1.")
@click.option(
    "--key-split",
    type=click.Choice(["first-dot", "last-dot"]),
    help="Which dot of a name ends the key; with last-dot, other dots become underscores.  [default: the first, and "
    "names that look otherwise are refused]",
)
@click.option(
    "--follow-symlinks", is_flag=True, help="Also read what is outside of SOURCE, where a symbolic link leads there."
)
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave out these files, such as '*.tmp'; repeatable.")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Pack these files, although they belong to shards; repeatable."
)
@click.option(
    "--key",
    metavar="COLUMN",
    help="The column of the keys of a table; dots in them become underscores.  [default: the number of the row]",
)
@click.option(
    "--file",
    "files",
    multiple=True,
    metavar="[FIELD=]COLUMN",
    help="A column of paths or URLs of files, whose bytes are a field; repeatable.",
)
@values_option("A column of values; repeatable.")
@click.option(
    "--group",
    type=click.IntRange(min=1),
    metavar="N",
    help="N rows are one sample, with the field jsonl, which explode_records makes rows of again.",
)
@click.option(
    "--root", metavar="DIRECTORY", help="Where relative paths in a list or table begin.  [default: where it is]"
)
@runs()
def create(
    *,
    source: str,
    place: Place,
    running: Running,
    kind: str | None,
    max_samples: int,
    max_bytes: int,
    shuffle: int | None,
    split: dict[str, float] | None,
    key_split: str | None,
    follow_symlinks: bool,
    ignore: tuple[str, ...],
    include: tuple[str, ...],
    key: str | None,
    files: tuple[str, ...],
    values: dict[str, str],
    group: int | None,
    root: str | None,
) -> Job:
    """Make shards of files, lists and tables in the directory DEST.

    SOURCE is a directory, a list, a table or - for standard input. DEST is a directory that is
    made, or a URL such as s3://bucket/data. It gets shard-000000.tar and so on, their offsets for
    IndexedShards, and index.json; with --split a directory for each split. Each appears when it is
    complete. Run the same command again after an interruption: what is finished is kept.

    \b
    files    files of one name are a sample: a.jpg and a.json
    classes  directories are classes, as in ImageFolder: field cls, and classes.json
    list     lines with a path and maybe a label: images/a.jpg 3
    csv, tsv, jsonl, parquet
             a row is a sample, as its field json, or what --file and --value say; with
             --value cls=COLUMN, names of classes become numbers, and classes.json lists them. A
             short row takes 1.5 KB in a tar: --group 100 puts a hundred into one field jsonl

    Files and directories whose names begin with a dot are left out, and so are files of shards:
    tars, their indexes, index.json and classes.json.

    Bytes of files are written as they are. To make images smaller, write the shards first, and pass
    them to wds-pipes map with a function that does it.
    """  # noqa: D301
    options = place.storage_options
    if source != "-" and "://" not in source and not os.path.exists(source):
        raise click.UsageError(f"SOURCE {source!r} does not exist")
    kind = kind or _kind(source)
    if source == "-" and kind in _FOLDERS:
        raise click.UsageError(f"standard input is a list or a table, and --from {kind} reads a directory")
    if os.path.exists(source) and os.path.isdir(source) is not (kind in _FOLDERS):
        what, reads = ("a directory", "a file") if os.path.isdir(source) else ("a file", "a directory")
        raise click.UsageError(f"SOURCE {source!r} is {what}, and --from {kind} reads {reads}")
    given = {
        **{"--ignore": ignore, "--include": include, "--follow-symlinks": follow_symlinks, "--key-split": key_split},
        **{"--root": root, "--key": key, "--file": files, "--value": values, "--group": group},
    }
    for option, kinds in _FOR.items():
        if given[option] and kind not in kinds:
            raise click.UsageError(f"{option} is for {', '.join(kinds)}, and SOURCE is {kind}")
    if group and (key or files or values):
        raise click.UsageError("--group is for whole rows of a table, without --key, --file and --value")
    links = "" if follow_symlinks else "pass --follow-symlinks to read what is there, or remove it"
    problems, chosen, classes = Problems(), Files(ignore, include, links), list[str]()
    if kind == "files":
        records = of_directory(source, key_split, chosen, problems, options)
    elif kind == "classes":
        records, classes = of_classes(source, key_split, chosen, problems, options)
    elif kind == "list":
        records, classes = tables.of_list(source, root, key_split, problems, options)
    else:
        pairs = [file.partition("=")[::2] if "=" in file else ("", file) for file in files]
        columns = tables.Columns(key, tuple(pairs), values, root)
        records, classes = tables.of_table(source, kind, columns, problems, options)
        records = tables.grouped(records, group) if group else records
    if note := chosen.note():
        echo(note, err=True)
    return plan(
        records,
        place,
        problems,
        classes=classes,
        shuffle=shuffle,
        shares=split,
        max_samples=max_samples,
        max_bytes=max_bytes,
    )


def _kind(source: str) -> str:
    """What a source is, if the command does not say it."""
    if source == "-":
        raise click.UsageError("standard input may be anything: pass --from list, csv, tsv, jsonl or parquet")
    if TAR_NAME.fullmatch(source.rpartition("/")[2]) and not os.path.isdir(source):
        raise click.UsageError(f"SOURCE {source!r} is a shard: wds-pipes reshard, sort and others write its samples")
    ending = os.path.splitext(source.partition("?")[0])[1].lower()
    if os.path.isdir(source) or (not os.path.exists(source) and (source.endswith("/") or "." not in ending)):
        return "files"
    if ending == ".json":
        raise click.UsageError(f"{source} may be anything: pass --from jsonl if it is an object on each line")
    return _ENDINGS.get(ending, "list")


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
            tasks.append(shard_task(f"{prefix}-{number:06d}.tar", group, _fingerprint(group), says))
    options: dict[str, Any] = {"shuffle": shuffle, "split": dict(shares) if shares else None, "classes": list(classes)}
    options |= {"max_samples": max_samples, "max_bytes": max_bytes}
    names = content_of_classes(classes) if classes else None
    return shard_job("create", place, partial(write, place.storage_options), tasks, options, classes=names)


def write(storage_options: dict[str, Any] | None, task: Task, place: Place) -> Facts:
    """Write a shard."""
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
