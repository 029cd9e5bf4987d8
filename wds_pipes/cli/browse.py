"""The command browse: the samples of shards as pages in a web browser."""

from __future__ import annotations

import asyncio
import webbrowser
from typing import Any

import click

from wds_pipes.browse.data import DataSet
from wds_pipes.browse.histograms import add_histograms
from wds_pipes.browse.pages import Pages, Section, export
from wds_pipes.cli.options import echo, example, key_split, storage_options
from wds_pipes.core.importing import library
from wds_pipes.core.interrupts import end
from wds_pipes.core.words import plural


@click.command(
    epilog=example(
        "wds-pipes browse 'train-*.tar'\nwds-pipes browse s3://bucket/train/index.json --open\n"
        "wds-pipes browse --order train:make_loader --state checkpoint.pt"
    )
)
@click.argument("urls", nargs=-1)
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
    help="How many samples --export writes, the first ones.",
)
@click.option("--order", "named", metavar="MODULE:FUNCTION", help="Also show the next batches of this training.")
@click.option("--state", "file", metavar="FILE", help="The checkpoint from which it goes on.")
@click.option("--other-state", metavar="FILE", help="Another checkpoint, to show beside that of --state.")
@click.option("--world-size", type=click.IntRange(min=1), help="How many ranks --order has.")
@key_split
@storage_options
def browse(
    *,
    urls: tuple[str, ...],
    port: int,
    opened: bool,
    folder: str | None,
    samples: int,
    named: str | None,
    file: str | None,
    other_state: str | None,
    world_size: int | None,
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
    --order shows which batches each rank of a training gets next, and where it stands: a function
    that returns its PipeLoader, whose shards are shown if there are no URLS. With --state it goes
    on from a checkpoint; without --order, by the steps that this names. --other-state stands beside
    it. Nothing of the training is written.

    It needs aiohttp and jinja2: pip install 'wds_pipes[browse]'.
    """
    if other_state is not None and file is None:
        raise click.UsageError("--other-state goes with --state")
    states = [state for state in (file, other_state) if state is not None]
    data, sections = _data(urls, named, states, world_size, options)
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


def _data(
    urls: tuple[str, ...], named: str | None, states: list[str], world_size: int | None, options: dict[str, Any]
) -> tuple[DataSet, list[Section]]:
    """Return the data set, and what adds pages."""
    if named is None and (world_size is not None or not urls):
        raise click.UsageError("--world-size goes with --order" if urls else "Missing argument 'URLS...'.")
    if named is None and not states:
        return DataSet(urls, **options), [add_histograms]
    from wds_pipes.browse.training import training_of  # which needs torch, and that takes seconds

    data, add_training = training_of(urls, named=named, world_size=world_size, states=states, **options)
    return data, [add_histograms, add_training]
