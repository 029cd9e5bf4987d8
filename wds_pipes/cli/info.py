"""``wds-pipes info``: what is in shards, or what is installed and used for what."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from wds_pipes.cli.options import as_json, echo, echo_json, example, in_one_line, key_split, storage_options


@click.command(
    epilog=example("wds-pipes info 'train-{000000..000011}.tar'\nwds-pipes info --all --json s3://bucket/train/")
)
@click.argument("urls", nargs=-1)
@click.option("--all", "whole", is_flag=True, help="Read all shards to their ends, without which some are looked into.")
@as_json
@click.option("--codecs", is_flag=True, help="Show what decodes each image format, and what resizes images.")
@key_split
@storage_options
def info(
    *, urls: tuple[str, ...], whole: bool, as_json: bool, codecs: bool, key_split: str, storage_options: Any
) -> None:
    """Show what is in shards: samples, fields with types and sizes, and where the bytes go.

    URLS are paths or URLs of shards, with {000..011} or * in quotes, or an index.json. Without
    --all, at most 256 samples of each of 8 shards are read, and samples are estimated unless an
    index (wds-pipes index) counts them. With --codecs, URLS are left out.
    """
    with in_one_line():
        if codecs:
            if urls:
                raise ValueError("--codecs is about what is installed: leave out URLS")
            _show_codecs()
            return
        if not urls:
            raise ValueError("name shards, such as 'train-*.tar', or pass --codecs")
        from wds_pipes.cli.look.summary import Summary

        summary = Summary(urls, storage_options, key_split, whole=whole)
        if as_json:
            echo_json(summary.as_dict())
        for line in () if as_json else summary.lines():
            echo(line)


def _show_codecs() -> None:
    from wds_pipes.codecs.images import decoders_in_use

    formats = decoders_in_use()
    width = max(map(len, formats))
    for name, package in formats.items():
        instead = ", or pillow what it cannot" if package != "pillow" else ""
        echo(f"{name:{width}}  {package} {_version(package)}{instead}")
    echo(f"{'size=':{width}}  torch {_version('torch')} for RGB, pillow {_version('pillow')} for the rest")
    if formats["JPEG"] == "pillow":
        echo("JPEG is decoded in less time, to the same pixels, with: pip install 'wds_pipes[images]'")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
