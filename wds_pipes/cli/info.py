"""``wds-pipes info``: what is installed, and what is used for what."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import click


@click.command()
@click.option("--codecs", is_flag=True, help="Show what decodes each image format, and what resizes images.")
def info(*, codecs: bool) -> None:
    """Show what is installed here, and what it is used for."""
    if not codecs:
        raise click.UsageError("pass --codecs")
    from wds_pipes.codecs.images import decoders_in_use

    formats = decoders_in_use()
    width = max(map(len, formats))
    for name, package in formats.items():
        instead = ", or pillow what it cannot" if package != "pillow" else ""
        click.echo(f"{name:{width}}  {package} {_version(package)}{instead}")
    click.echo(f"{'size=':{width}}  torch {_version('torch')} for RGB, pillow {_version('pillow')} for the rest")
    if formats["JPEG"] == "pillow":
        click.echo("JPEG is decoded in less time, to the same pixels, with: pip install 'wds_pipes[images]'")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
