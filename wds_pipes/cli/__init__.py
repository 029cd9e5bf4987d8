"""The command line: ``wds-pipes``."""

import click

from wds_pipes.cli import bench, cache, create, index, info
from wds_pipes.cli.demo import command as demo
from wds_pipes.cli.look import commands as look
from wds_pipes.cli.look import state, verify
from wds_pipes.cli.reshaping import commands as reshaping


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wds_pipes", prog_name="wds-pipes")
def main() -> None:
    """Stream training data from WebDataset tar shards, and resume exactly."""


for command in (
    bench.bench,
    cache.cache,
    demo.demo,
    create.create,
    index.index,
    info.info,
    look.ls,
    look.head,
    look.cat,
    look.get,
    verify.verify,
    reshaping.reshard,
    reshaping.concat,
    reshaping.split,
    reshaping.shuffle,
    reshaping.sort,
    reshaping.mix,
    state.state,
):
    main.add_command(command)
