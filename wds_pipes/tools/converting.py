"""Making shards of data sets in other formats: see ``sources`` and ``rows``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Unpack

from wds_pipes.core.options import check_choice
from wds_pipes.core.words import plural
from wds_pipes.io.urls import redact
from wds_pipes.tools import lmdbs, tfrecord
from wds_pipes.tools.creating import of_list, write
from wds_pipes.tools.engines import Facts, Task
from wds_pipes.tools.files import Problems
from wds_pipes.tools.jobs import Place, Report, fingerprint
from wds_pipes.tools.outputs import (
    JobOptions,
    Running,
    StorageOptions,
    complete,
    content_of_classes,
    shard_job,
    shard_limits,
    shard_task,
    write_task,
)
from wds_pipes.tools.rows import Columns, columns_of, sample_of
from wds_pipes.tools.sources import Format, Parquet, Saved, Shard, first_rows, read

FORMATS: dict[str, Format] = {
    "tfrecord": tfrecord,
    "parquet": Parquet(),
    "hf": Saved(),
    "lmdb": lmdbs.Database(),
    "torchrecord": lmdbs.TorchRecord(),
}
_FIRST = 100  # records that decide what the columns are


def convert(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    kind: str,
    max_samples: int | None = None,
    key: str | None = None,
    values: Mapping[str, str] | None = None,
    **options: Unpack[JobOptions],
) -> Report:
    """Make shards of a data set in another format. Bytes, as of images, stay as they are.

    Args:
        source: files, a pattern, a directory or a database.
        dest: the directory to write to.
        kind: the format: ``"tfrecord"``, ``"parquet"``, ``"hf"`` (what
            ``dataset.save_to_disk()`` has written), ``"lmdb"`` or ``"torchrecord"``.
        max_samples: in a shard; None: 10,000. Not for TFRecord, of which each file is a shard.
        key: the column of the keys, in which dots become underscores; None: the number of the
            record, or the key of the LMDB.
        values: the fields that are written, and their columns; None: all columns.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or ``source`` is of another format.
        ModuleNotFoundError: a library is not installed.
        WdsError: a file or the store cannot be read, or has other outputs.
    """
    check_choice("kind", kind, *FORMATS)
    source = os.fspath(source)
    if kind == "tfrecord" and max_samples is not None:
        raise ValueError(
            "a TFRecord file does not say how many records it has, so each becomes one shard: leave --max-samples out, "
            "and divide the shards afterwards"
        )
    running, values = Running(dest, options), values or {}
    most, _ = shard_limits(max_samples, None, usual=10_000)
    storage_options = running.storage_options
    is_list = source.partition("?")[0].lower().endswith((".txt", ".csv")) and not os.path.isdir(source)
    if kind == "torchrecord" and is_list:
        if key or values:
            raise ValueError("a list has a path and a label in each line: leave --key and --value out")
        problems = Problems()
        records, classes = of_list(source, None, None, problems, storage_options)
        return running.run(
            write(records, running.place, problems, classes=classes, max_samples=most, max_bytes=1 << 60)
        )
    reader = FORMATS[kind]
    shards = reader.shards(source, most, storage_options)
    columns = columns_of(first_rows(reader, shards, _FIRST, storage_options), key, values, redact(source))
    decided = {"from": kind, "max_samples": most, "key": key, "values": dict(values), "columns": list(columns[2:])}
    read_classes = getattr(reader, "classes", None)
    labels = {} if read_classes is None else read_classes(shards[0].runs[0], storage_options)
    label = values.get("cls") if values else next(iter(labels)) if len(labels) == 1 else None
    names = content_of_classes(labels[label]) if label in labels else None
    work = partial(_write, kind, columns, storage_options)
    tasks = [_task(shard) for shard in shards]
    return running.run(shard_job("convert", running.place, work, tasks, decided, classes=names))


def _task(shard: Shard) -> Task:
    records = sum(run.records or 0 for run in shard.runs)
    says = plural(records, "sample") if records else "all records of a file"
    marks = [[run.file.size, run.file.identity, str(run.start), run.number, run.records] for run in shard.runs]
    return shard_task(shard.name, shard, fingerprint(marks), says, records or 1)


def _write(kind: str, columns: Columns, storage_options: StorageOptions, task: Task, place: Place) -> Facts:
    reader = FORMATS[kind]
    usual = getattr(reader, "as_sample", None) if columns.key is None and not columns.values else None
    samples: Iterator[dict[str, Any]] = (
        sample_of(row, number, columns) if usual is None else {"__key__": number, **usual(row)}
        for number, row in read(reader, task.arguments, storage_options)
    )
    counts = [run.records for run in task.arguments.runs]
    if None not in counts:  # a TFRecord file does not say how many it has
        samples = complete(task.name, samples, sum(counts))
    return write_task(task, place, samples)
