"""The command line: ``wds-pipes``."""

import click

from wds_pipes.cli import bench, cache, create, index, info
from wds_pipes.cli.demo import command
from wds_pipes.cli.look import commands as look
from wds_pipes.cli.look import state, verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wds_pipes", prog_name="wds-pipes")
def main() -> None:
    """Stream training data from WebDataset tar shards, and resume exactly."""


main.add_command(bench.bench)
main.add_command(cache.cache)
main.add_command(command.demo)
main.add_command(create.create)
main.add_command(index.index)
main.add_command(info.info)
main.add_command(look.ls)
main.add_command(look.head)
main.add_command(look.cat)
main.add_command(look.get)
main.add_command(verify.verify)
main.add_command(state.state)
