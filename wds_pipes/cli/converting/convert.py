"""``wds-pipes convert``: makes shards of data sets in other formats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from wds_pipes.cli.converting import lmdbs, tfrecord
from wds_pipes.cli.converting.rows import Columns, columns_of, sample_of
from wds_pipes.cli.converting.source import Format, Parquet, Saved, Shard, first_rows, read
from wds_pipes.cli.create import plan
from wds_pipes.cli.creating.records import Problems
from wds_pipes.cli.creating.tables import of_list
from wds_pipes.cli.jobs import (
    Running,
    complete,
    content_of_classes,
    runs,
    shard_job,
    shard_task,
    write_task,
)
from wds_pipes.cli.options import dest, example, values_option
from wds_pipes.core.words import plural
from wds_pipes.io.tasks.task import Facts, Job, Place, Task, fingerprint
from wds_pipes.io.urls import redact

_FORMATS: dict[str, Format] = {
    "tfrecord": tfrecord,
    "parquet": Parquet(),
    "hf": Saved(),
    "lmdb": lmdbs.Database(),
    "torchrecord": lmdbs.TorchRecord(),
}
_FIRST = 100  # records that decide what the columns are


@click.command(
    epilog=example(
        "wds-pipes convert 'gs://bucket/train-*.tfrecord' shards/ --from tfrecord -j 4\n"
        "wds-pipes convert imagenet.lmdb shards/ --from lmdb --max-samples 5000\n"
        "wds-pipes convert saved/ s3://bucket/data --from hf --value jpg=image --value cls=label"
    )
)
@click.argument("source")
@dest
@click.option("--from", "kind", type=click.Choice(list(_FORMATS)), required=True, help="The format of SOURCE.")
@click.option(
    "--max-samples",
    type=click.IntRange(min=1),
    help="In a shard; not for tfrecord, of which each file is a shard.  [default: 10000]",
)
@click.option(
    "--key",
    metavar="COLUMN",
    help="The column of the keys; dots in them become underscores.  [default: the number of the record; of lmdb its "
    "key]",
)
@values_option("Write only such fields, as in --value jpg=image --value cls=label; repeatable.")
@runs()
def convert(
    *,
    source: str,
    place: Place,
    running: Running,
    kind: str,
    max_samples: int | None,
    key: str | None,
    values: dict[str, str],
) -> Job:
    """Make shards of a data set in another format in the directory DEST.

    Bytes are written as they are: images are never encoded again. A column of bytes is a field
    COLUMN.EXTENSION, by what the bytes are, and the extension alone if there is one such column.
    Arrays and lists of numbers are npy, of the dtype of the column. Text and numbers are one field
    json. --value chooses otherwise; jpg over bytes of a PNG is png. The first 100 records decide
    what the columns are. The names of a ClassLabel become classes.json: of the one that --value
    writes as cls, or of the only one.

    \b
    tfrecord     files, a pattern or a directory of tf.train.Example
    parquet      files, a pattern or a directory
    hf           a directory of dataset.save_to_disk(), with its splits
    lmdb         a database: its keys are keys; those that begin with __ are left out
    torchrecord  a directory of databases of TensorProtos: the picture, and field cls;
                 or the list that they are made of, with lines PATH LABEL

    tfrecord and parquet may be remote, the others are local. Run the same command again after an
    interruption: what is finished is kept.
    """  # noqa: D301
    if kind == "tfrecord" and max_samples is not None:
        raise click.UsageError(
            "a TFRecord file does not say how many records it has, so each becomes one shard: leave --max-samples out, "
            "and divide the shards afterwards"
        )
    most, storage_options = max_samples or 10_000, place.storage_options
    is_list = source.partition("?")[0].lower().endswith((".txt", ".csv")) and not os.path.isdir(source)
    if kind == "torchrecord" and is_list:
        if key or values:
            raise ValueError("a list has a path and a label in each line: leave --key and --value out")
        problems = Problems()
        records, classes = of_list(source, None, None, problems, storage_options)
        return plan(records, place, problems, classes=classes, max_samples=most, max_bytes=1 << 60)
    reader = _FORMATS[kind]
    shards = reader.shards(source, most, storage_options)
    columns = columns_of(first_rows(reader, shards, _FIRST, storage_options), key, values, redact(source))
    tasks = [_task(shard) for shard in shards]
    options = {"from": kind, "max_samples": most, "key": key, "values": values, "columns": list(columns[2:])}
    read_classes = getattr(reader, "classes", None)
    labels = {} if read_classes is None else read_classes(shards[0].runs[0], storage_options)
    label = values.get("cls") if values else next(iter(labels)) if len(labels) == 1 else None
    names = content_of_classes(labels[label]) if label in labels else None
    return shard_job("convert", place, partial(write, kind, columns, storage_options), tasks, options, classes=names)


def _task(shard: Shard) -> Task:
    records = sum(run.records or 0 for run in shard.runs)
    says = plural(records, "sample") if records else "all records of a file"
    marks = [[run.file.size, run.file.identity, str(run.start), run.number, run.records] for run in shard.runs]
    return shard_task(shard.name, shard, fingerprint(marks), says)


def write(kind: str, columns: Columns, storage_options: dict[str, Any] | None, task: Task, place: Place) -> Facts:
    """Write a shard."""
    reader = _FORMATS[kind]
    usual = getattr(reader, "as_sample", None) if columns.key is None and not columns.values else None
    samples: Iterator[dict[str, Any]] = (
        sample_of(row, number, columns) if usual is None else {"__key__": number, **usual(row)}
        for number, row in read(reader, task.arguments, storage_options)
    )
    counts = [run.records for run in task.arguments.runs]
    if None not in counts:  # a TFRecord file does not say how many it has
        samples = complete(task.name, samples, sum(counts))
    return write_task(task, place, samples)
