"""The command line: ``wds-pipes``."""

import click

from wds_pipes.cli import bench, cache, create, index, info
from wds_pipes.cli.converting import convert, download, export
from wds_pipes.cli.demo import command as demo
from wds_pipes.cli.look import commands as look
from wds_pipes.cli.look import state, verify
from wds_pipes.cli.reshaping import commands as reshaping
from wds_pipes.cli.rewriting import commands as rewriting

_SECTIONS = {
    "Make shards": (create.create, convert.convert, index.index, download.download),
    "Look at shards": (info.info, look.ls, look.head, look.cat, look.get),
    "Check and mend": (verify.verify, rewriting.repair, rewriting.dedup),
    "Write them otherwise": (
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
    """Lists the commands by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", command.get_short_help_str(100)) for command in commands])


@click.group(cls=_Sections, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wds_pipes", prog_name="wds-pipes")
def main() -> None:
    """Stream training data from WebDataset tar shards, and resume exactly."""


for section in _SECTIONS.values():
    for command in section:
        main.add_command(command)
