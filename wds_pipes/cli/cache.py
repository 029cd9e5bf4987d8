"""``wds-pipes cache``: see and clean up the local cache of remote shards."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from wds_pipes.cli.options import echo, example, in_one_line
from wds_pipes.core.words import bytes_shown, plural

if TYPE_CHECKING:
    from wds_pipes.io.cache.files import CacheDirectory

_directory = click.option(
    "--directory", type=click.Path(file_okay=False), help="The cache; without it, WDS_PIPES_CACHE_DIR."
)


@click.group(epilog=example("wds-pipes cache ls\nwds-pipes cache prune --size 200GB"))
def cache() -> None:
    """See and clean up the local cache of remote shards."""


@cache.command("ls")
@_directory
def list_shards(directory: str | None) -> None:
    """List the shards, those used least recently first."""
    with in_one_line():
        files = _open(directory)
        entries = files.entries()
        if entries:
            echo(f"{'SIZE':>10}  {'LAST USED':<19}  {'STATE':<11}  SHARD")
        for entry in entries:
            used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.used))
            echo(f"{bytes_shown(entry.bytes):>10}  {used}  {entry.state:<11}  {entry.url or entry.path}")
        echo(f"{files.path}: {plural(len(entries), 'shard')}, {bytes_shown(sum(entry.bytes for entry in entries))}")


@cache.command(epilog=example("wds-pipes cache prune --size 200GB"))
@_directory
@click.option("--size", help="How much to keep, such as 200GB; without it, WDS_PIPES_CACHE_SIZE.")
def prune(directory: str | None, size: str | None) -> None:
    """Remove the files of interrupted downloads, and the least recently used shards until the rest
    fits. Files in use are kept.
    """
    from wds_pipes.io.cache.shard_cache import cache_limit

    if size is None and not os.environ.get("WDS_PIPES_CACHE_SIZE"):
        raise click.UsageError("say how much to keep, such as --size 200GB, or set WDS_PIPES_CACHE_SIZE")
    with in_one_line():
        _prune(_open(directory), cache_limit(size))


@cache.command()
@_directory
def clear(directory: str | None) -> None:
    """Remove all files that are not in use."""
    with in_one_line():
        _prune(_open(directory), 0)


def _open(directory: str | None) -> CacheDirectory:
    from wds_pipes.io.cache.files import CacheDirectory
    from wds_pipes.io.cache.shard_cache import cache_path

    return CacheDirectory(cache_path(directory))


def _prune(files: CacheDirectory, limit: int) -> None:
    count, freed = files.prune(limit)
    left = files.entries()
    kept = (
        f"{plural(len(left), 'shard')} {'is' if len(left) == 1 else 'are'} left, "
        f"{bytes_shown(sum(entry.bytes for entry in left))}"
    )
    echo(f"{files.path}: removed {plural(count, 'shard')}, {bytes_shown(freed)}; {kept}")
