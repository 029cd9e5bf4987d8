"""``wds-pipes index``: writes an index with the number of samples of each shard."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from wds_pipes.tar.index_formats import ShardFacts


@click.command()
@click.argument("urls", nargs=-1, required=True)
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
    help="The same into a directory, also for remote shards.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=4, show_default=True, help="How many shards are read at a time."
)
@click.option(
    "--key-split",
    type=click.Choice(["first-dot", "last-dot"]),
    default="first-dot",
    show_default=True,
    help="As in group_by_key.",
)
@click.option(
    "--on-repeated-key",
    type=click.Choice(["raise", "warn", "ignore"]),
    default="raise",
    show_default=True,
    help="As in group_by_key.",
)
def index(
    *,
    urls: tuple[str, ...],
    output: str | None,
    offsets: bool,
    offsets_to: str | None,
    threads: int,
    key_split: str,
    on_repeated_key: str,
) -> None:
    """Write an index of shards: the samples, bytes and MD5 of each, or where each sample begins.

    URLS are paths or URLs, with {000..011} or * in quotes. Each shard is read once, to its end.
    ShardList(urls, index="index.json") and ShardList("index.json") read the index, and so does the
    wids package.
    """
    from wds_pipes.core.words import plural
    from wds_pipes.errors import ShardWarning, WdsError
    from wds_pipes.io.expand import expand
    from wds_pipes.io.urls import redact
    from wds_pipes.tar.indexing import index_shards

    if output is None and not offsets and offsets_to is None:
        raise click.UsageError("pass -o index.json, or --offsets for IndexedShards, or both")
    try:
        shards = expand(urls)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always", ShardWarning)
            warnings.showwarning = lambda message, *args, **options: click.echo(f"warning: {message}", err=True)
            bar = None
            if sys.stderr.isatty():
                bar = stack.enter_context(
                    click.progressbar(length=len(set(shards)), label="shards", show_pos=True, file=sys.stderr)
                )

            def on_shard(url: str, facts: ShardFacts) -> None:
                if bar is not None:
                    bar.update(1)

            found = index_shards(
                shards,
                output,
                key_split=key_split,
                on_repeated_key=on_repeated_key,
                threads=threads,
                on_shard=on_shard,
                offsets=offsets if offsets_to is None else offsets_to,
            )
    except (WdsError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    samples, size = (
        sum(facts.samples or 0 for facts in found.values()),
        sum(facts.size or 0 for facts in found.values()),
    )
    where = "offsets" if output is None else redact(output)
    click.echo(f"{where}: {plural(len(found), 'shard')}, {plural(samples, 'sample')}, {plural(size, 'byte')}")
