"""``wds-pipes state``: where a run stands, from its checkpoint files."""

from __future__ import annotations

import click

from wds_pipes.cli.options import FOUND, as_json_lines, echo, echo_json, example, in_one_line


@click.group(epilog=example("wds-pipes state show checkpoint.pt"))
def state() -> None:
    """Show, compare and merge the states in checkpoint files.

    A file is what torch.save or json has written, with states of wds_pipes anywhere inside; it is
    read with weights_only=True. A directory is one of wds_pipes.checkpoint, of which the newest
    complete checkpoint is taken.
    """


@state.command(epilog=example("wds-pipes state show checkpoint.pt\nwds-pipes state show checkpoints/"))
@click.argument("files", nargs=-1, required=True)
@as_json_lines
def show(*, files: tuple[str, ...], as_json: bool) -> None:
    """Show where a run stands: epoch, batches, ranks, lanes, and the shard and sample of each lane.

    --json prints the states themselves, a line for each.
    """
    with in_one_line():
        from wds_pipes.cli.look.state_files import in_words, read_states

        for file in files:
            for placed in read_states(file):
                if as_json:
                    echo_json({"file": file, "where": placed.where, "state": placed.state})
                else:
                    for line in f"{file}: {in_words(placed)}".split("\n"):
                        echo(line)


@state.command(epilog=example("wds-pipes state diff before.pt after.pt"))
@click.argument("first")
@click.argument("second")
def diff(*, first: str, second: str) -> None:
    """Show in which values two checkpoints differ, a line for each. Exits with 1 if they do."""
    with in_one_line():
        from wds_pipes.cli.look.state_files import differences, read_states

        one, other = read_states(first), read_states(second)
        alone = len(one) == len(other) == 1  # wherever they are in their files
        pair = (one[0].state, other[0].state) if alone else (dict(one), dict(other))
        lines = list(differences(*pair))
        for line in lines:
            echo(line)
        if lines:
            raise SystemExit(FOUND)


@state.command(
    epilog=example("wds-pipes state merge rank-*.pt -o merged.json\nwds-pipes state merge checkpoints/ -o all.pt")
)
@click.argument("files", nargs=-1, required=True)
@click.option(
    "-o", "--output", required=True, help="The file to write: .json, or .pt, .pth and .ckpt as torch.save does."
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
@click.option("--moved", is_flag=True, help="The shards of all ranks are the same, whatever their names are.")
def merge(*, files: tuple[str, ...], output: str, overwrite: bool, moved: bool) -> None:
    """Merge the states of all ranks into one, for any number of ranks.

    PipeLoader loads the result. The states must be of one step.
    """
    with in_one_line():
        from wds_pipes.cli.look.state_files import Placed, in_words, write_state
        from wds_pipes.cli.look.state_files import merge as merge_files

        merged = merge_files(files, moved=moved)
        write_state(merged, output, overwrite=overwrite)
        echo(f"{output}: {in_words(Placed('', merged)).partition(chr(10))[0]}")
