"""The command browse: the samples of shards as pages in a web browser."""

from __future__ import annotations

import asyncio
import webbrowser
from typing import Any

import click

from wds_pipes.browse.data import DataSet
from wds_pipes.browse.histograms import add_histograms
from wds_pipes.browse.pages import Pages, export
from wds_pipes.cli.options import echo, example, key_split, storage_options
from wds_pipes.core.importing import library
from wds_pipes.core.words import plural
from wds_pipes.tools.interrupts import end


@click.command(epilog=example("wds-pipes browse 'train-*.tar'\nwds-pipes browse s3://bucket/train/index.json --open"))
@click.argument("urls", nargs=-1, required=True)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Where the server listens.  [default: a free one]"
)
@click.option("--open", "opened", is_flag=True, help="Also open the first page in a web browser.")
@click.option(
    "--export", "folder", type=click.Path(file_okay=False), help="Write pages to a directory, without a server."
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="How many samples --export writes, the first ones, in whole pages of 24.",
)
@key_split
@storage_options
def browse(
    *,
    urls: tuple[str, ...],
    port: int,
    opened: bool,
    folder: str | None,
    samples: int,
    **options: Any,
) -> None:
    """Look at samples in a web browser: images, text, audio, video and arrays, shard by shard.

    It prints a URL, and serves the pages on this machine until Ctrl-C. The URL has a random token:
    other users of this machine cannot read the pages without it. On another machine, forward the
    port: ssh -L 8000:127.0.0.1:8000 HOST wds-pipes browse --port 8000 URLS.

    With an index (wds-pipes index --offsets), any sample of a large data set comes at once, also by
    its key. Without one, a shard is read when it is looked at. Of remote shards, what is shown is
    requested. Nothing in a sample can run in the page: text is escaped, images are encoded again,
    and pickles are not read.

    --export writes the pages of the first samples as files, to put beside a data set or to send.

    It needs aiohttp and jinja2: pip install 'wds_pipes[browse]'.
    """
    data, sections = DataSet(urls, **options), [add_histograms]
    data.check()
    if folder is not None:
        written, pages = export(data, folder, samples, sections)
        echo(f"{folder}: {plural(written, 'sample')}, {plural(pages, 'page')}, the first of which is index.html")
        return
    library("aiohttp", "aiohttp", "wds-pipes browse", extra="browse")
    from wds_pipes.browse.server import Server, serve

    def on_ready(url: str) -> None:
        echo(f"{url}  (Ctrl-C ends it)")
        if opened:
            webbrowser.open(url)

    try:
        asyncio.run(serve(Server(Pages(data, sections)), port, on_ready))
    except KeyboardInterrupt:  # Python would wait for threads, such as one that checks a large shard
        end()
