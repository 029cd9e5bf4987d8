"""``wds-pipes download``: copies shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from wds_pipes.cli.jobs import Running, job_options, run_job
from wds_pipes.cli.options import dest, echo, example, storage_options, urls
from wds_pipes.core.words import plural

if TYPE_CHECKING:
    from wds_pipes.io.tasks.task import Job, Report, Task


@click.command(
    epilog=example(
        "wds-pipes download 's3://bucket/train-{000000..000099}.tar' data/ -j 4\n"
        "wds-pipes download https://example.com/train/index.json data/\n"
        "wds-pipes download 'data/*.tar' s3://bucket/copy --task 0 --tasks 8"
    )
)
@urls
@dest
@storage_options
@job_options
def download(*, urls: tuple[str, ...], dest: str, storage_options: dict[str, Any], running: Running) -> None:
    """Copy shards into the directory DEST, which may be in a store.

    What is beside a shard is copied too: indexes of offsets, of keys and of DALI, and tables of
    metadata (X.parquet, X.jsonl, X_stats.json); and classes.json, sizes.json, _info.json and
    __len__ of their directories. An index.json is written of the shards that were copied. Sizes are
    compared, and MD5s if the index.json beside the shards has them; a shard that is changed
    meanwhile is an error.

    Run the same command again after an interruption: a shard that is finished is kept, and one that
    was begun on a local disk continues at its byte, if the store names versions (ETags).
    """
    options = storage_options or None

    def make() -> Job:
        from wds_pipes.cli.converting.copying import plan
        from wds_pipes.io.tasks.task import Place

        return plan(urls, Place(dest, options), options, lambda note: echo(f"note: {note}", err=True))

    run_job(make, running, _planned, _summary)


def _planned(task: Task) -> str:
    return f"{task.name}: {plural(task.size, 'byte')}"


def _summary(report: Report) -> str:
    facts = report.facts.values()
    shards = sum("shard" in fact for fact in facts)
    return f"{plural(shards, 'shard')}, {plural(sum(fact['size'] for fact in facts), 'byte')}"
