"""``wds-pipes index``: writes an index with the number of samples of each shard."""

from __future__ import annotations

from typing import Any

import click

from wds_pipes.cli.options import as_json as as_json_option
from wds_pipes.cli.options import echo, echo_json, example, executor_of, in_one_line, storage_options
from wds_pipes.cli.options import engine as engine_option
from wds_pipes.cli.options import key_split as key_split_option
from wds_pipes.cli.options import progress as progress_option
from wds_pipes.cli.options import urls as urls_argument
from wds_pipes.core.words import plural
from wds_pipes.io.urls import redact


@click.command(
    epilog=example(
        "wds-pipes index 'shards/*.tar' -o shards/index.json --offsets\n"
        "wds-pipes index s3://bucket/train/ --offsets-to offsets/ -j 16"
    )
)
@urls_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="The index to write, such as index.json beside the shards.",
)
@click.option(
    "--offsets",
    is_flag=True,
    help="Also write where each sample begins, to X.tar.idx and X.tar.keys beside each X.tar, for IndexedShards.",
)
@click.option(
    "--offsets-to",
    type=click.Path(exists=True, file_okay=False),
    help="The same into a directory that exists, also for remote shards.",
)
@click.option("--dali", is_flag=True, help="Also write X.idx beside each X.tar, for DALI's readers.webdataset.")
@click.option("--dali-to", type=click.Path(exists=True, file_okay=False), help="The same into a directory that exists.")
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), default=4, show_default=True, help="How many shards are read at a time."
)
@engine_option
@click.option(
    "--force", is_flag=True, help="Read all shards, also those that have not changed since OUTPUT was written."
)
@as_json_option
@progress_option
@key_split_option
@click.option(
    "--on-repeated-key",
    type=click.Choice(["raise", "warn", "ignore"]),
    default="raise",
    show_default=True,
    help="When the key of a sample comes again later in its shard: stop, print a warning, or go on.",
)
@click.option("--concatenated", is_flag=True, help="Shards may be several archives, one after another (cat, tar -A).")
@storage_options
def index(
    *,
    urls: tuple[str, ...],
    output: str | None,
    offsets: bool,
    offsets_to: str | None,
    dali: bool,
    dali_to: str | None,
    jobs: int,
    engine: str | None,
    force: bool,
    as_json: bool,
    progress: bool,
    key_split: str,
    on_repeated_key: str,
    concatenated: bool,
    storage_options: dict[str, Any],
) -> None:
    """Write an index of shards: the samples, bytes and MD5 of each, or where each sample begins.

    URLS are paths or URLs, with {000..011} or * in quotes. Each shard is read once, to its end. If
    OUTPUT exists, only shards that are new or have changed are read, and others leave it.
    ShardList(urls, index="index.json") and ShardList("index.json") read the index, and so does the
    wids package.
    """
    if output is None and not (offsets or offsets_to or dali or dali_to):
        raise click.UsageError("pass -o index.json, or --offsets for IndexedShards, or both")
    with in_one_line():
        from wds_pipes.tar.indexing import index_shards

        with executor_of(engine) as executor:
            found = index_shards(
                urls,
                output,
                key_split=key_split,
                on_repeated_key=on_repeated_key,
                concatenated=concatenated,
                jobs=jobs,
                storage_options=storage_options or None,
                force=force,
                progress=progress,
                offsets=offsets_to or offsets,
                dali=dali_to or dali,
                executor=executor,
            )
        if as_json:
            of_shards = {redact(url): facts._asdict() for url, facts in found.items()}
            echo_json({"command": "index", "facts": of_shards})
            return
        samples, size = (
            sum(facts.samples or 0 for facts in found.values()),
            sum(facts.size or 0 for facts in found.values()),
        )
        where = redact(output) if output is not None else "offsets" if offsets or offsets_to else "indexes of DALI"
        echo(f"{where}: {plural(len(found), 'shard')}, {plural(samples, 'sample')}, {plural(size, 'byte')}")
