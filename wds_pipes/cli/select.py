"""``wds-pipes select``: the keys of samples whose metadata fulfil a condition."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from wds_pipes.cli.conditions import Tables, find_tables
from wds_pipes.cli.options import example, in_one_line, metadata, storage_options, urls
from wds_pipes.io.outputs import target_of, write_small
from wds_pipes.tar.index import list_shards
from wds_pipes.tar.index_formats import make_opener

_AT_ONCE = 8  # tables


@click.command(
    epilog=example(
        "wds-pipes select 'train-*.tar' --where 'clip > 0.28 and width >= 256' -o keys.txt\n"
        "wds-pipes select s3://bucket/train/ --where \"status = 'success'\" --metadata rows.parquet > keys.txt"
    )
)
@urls
@click.option("--where", required=True, metavar="SQL", help="The condition: SQL as it stands after WHERE.")
@metadata
@click.option("-o", "--output", metavar="FILE", help="The file to write.  [default: standard output]")
@storage_options
def select(
    *, urls: tuple[str, ...], where: str, metadata: str | None, output: str | None, storage_options: dict[str, Any]
) -> None:
    """Write the keys of the samples whose row of metadata fulfils a condition, one on each line.

    SampleList and IndexedShards.select take such a file as where="@keys.txt", and wds-pipes filter
    as --keys. Only the tables are read, so keys of rows without a sample are written too; later
    they do not matter.

    DuckDB evaluates the condition (pip install 'wds_pipes[meta]'). Texts, dates and UUIDs in JSON
    lines are text: write day::date. NaN is NULL: it fulfils no comparison.
    """
    with in_one_line():
        shards, _ = list_shards(list(urls), storage_options)
        tables = find_tables(shards, metadata, storage_options)
        opened = Tables(where, tables, make_opener(storage_options))
        with opened, ThreadPoolExecutor(_AT_ONCE) as pool:
            keys = [key for found in pool.map(opened.passing, range(len(tables))) for key in sorted(found)]
        if not keys:
            raise opened.unfulfilled()
        [(most, count)] = Counter(keys).most_common(1)
        if count > 1:
            raise ValueError(
                f"samples of {count} shards have the key {most!r:.200}, so it does not say which is meant: "
                "wds-pipes filter --where judges each shard by its own table"
            )
        broken = next((key for key in keys if not {"\n", "\r"}.isdisjoint(key)), None)
        if broken is not None:
            raise ValueError(f"key {broken!r:.200} has a line break, so it cannot be in a list of keys: rename it")
        content = "".join(f"{key}\n" for key in keys).encode()
        if output is None:
            sys.stdout.buffer.write(content)
        else:
            write_small(target_of(output), content, storage_options)
