"""The command line: ``wds-pipes``."""

import signal
from typing import Any

import click

from wds_pipes.cli import bench, cache, create, index, info, select
from wds_pipes.cli.converting import convert, download, export
from wds_pipes.cli.demo import command as demo
from wds_pipes.cli.look import commands as look
from wds_pipes.cli.look import state, verify
from wds_pipes.cli.options import example
from wds_pipes.cli.reshaping import commands as reshaping
from wds_pipes.cli.rewriting import commands as rewriting
from wds_pipes.core.interrupts import interruptible
from wds_pipes.core.words import plain
from wds_pipes.io.secret import hide

_SECTIONS = {
    "Make shards": (create.create, convert.convert, index.index, download.download),
    "Look at shards": (info.info, look.ls, look.head, look.cat, look.get, select.select),
    "Check and mend": (verify.verify, rewriting.repair, rewriting.dedup),
    "Write shards anew": (
        reshaping.reshard,
        reshaping.concat,
        reshaping.split,
        reshaping.shuffle,
        reshaping.sort,
        reshaping.mix,
        rewriting.filter_,
        rewriting.map_,
        rewriting.join,
        export.export,
    ),
    "Train": (demo.demo, bench.bench, cache.cache, state.state),
}


class _Sections(click.Group):
    """Lists the commands by what they are for. Ctrl-C ends them with the exit code of the shell,
    130: that of click, 1, says that something was found. Errors are shown without the
    credentials in URLs, and without control characters.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except click.ClickException as error:
            vars(error).update(message=plain(hide(error.message)))
            raise
        except KeyboardInterrupt:
            click.echo("Aborted!", err=True)
            raise SystemExit(128 + signal.SIGINT) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", command.get_short_help_str(100)) for command in commands])


@click.group(
    cls=_Sections,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example(
        "wds-pipes create photos/ shards/ --from classes --shuffle 7\nwds-pipes verify shards/\nwds-pipes create --help"
    ),
)
@click.version_option(package_name="wds_pipes", prog_name="wds-pipes")
def main() -> None:
    """Make, check and change data sets of WebDataset shards, which wds_pipes streams into PyTorch.

    A shard is a tar file. Files in it with the same name up to the first dot are a sample, and the
    rest of the name is the field: a.jpg and a.cls are sample a, with the fields jpg and cls. URLS
    are shards: paths or URLs, with {000..011} or * in quotes, a directory, @list.txt, or an
    index.json.
    """


for section in _SECTIONS.values():
    for command in section:
        main.add_command(command)
