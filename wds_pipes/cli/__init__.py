"""The command line: ``wds-pipes``."""

import signal
from importlib import import_module
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from wds_pipes.cli.options import example, in_one_line
from wds_pipes.core.options import nearest
from wds_pipes.core.words import plain
from wds_pipes.io.urls import hide
from wds_pipes.tools.interrupts import interruptible

# The commands by what they are for: where each is, and what the list of commands says of it. A
# command is imported when it is called, so that this list and TAB take little time.
_SECTIONS = {
    "Make shards": {
        "create": ("writing:create", "Make shards of files, lists and tables in the directory DEST."),
        "convert": ("writing:convert", "Make shards of a data set in another format in the directory DEST."),
        "index": ("look:index", "Write an index of shards: samples, bytes and MD5s, or where each sample begins."),
        "download": ("writing:download", "Copy shards into the directory DEST, which may be in a store."),
    },
    "Look at shards": {
        "info": ("look:info", "Show what is in shards: samples, fields with types and sizes, and where the bytes go."),
        "ls": ("look:ls", "List samples: number, first byte, size and fields of each."),
        "head": ("look:head", "Show the first samples, decoded."),
        "browse": ("browse:browse", "Look at samples in a web browser: images, text, audio, video and arrays."),
        "cat": ("look:cat", "Write samples to standard output, as one tar or as JSON Lines."),
        "get": ("look:get", "Write one sample: the one with a key, or with a number."),
        "select": ("look:select", "Write the keys of the samples whose row of metadata fulfils a condition."),
    },
    "Check and mend": {
        "verify": ("look:verify", "Read shards to their ends and report what is wrong."),
        "repair": ("writing:repair", "Write the whole samples of damaged shards, and list what was lost."),
        "dedup": ("writing:dedup", "Write shards in which each sample comes once."),
    },
    "Write shards anew": {
        "reshard": ("writing:reshard", "Write the samples of shards into shards of another size."),
        "concat": ("writing:concat", "Write the samples of shards, in their order, into one shard."),
        "split": ("writing:split", "Divide the samples of shards, such as into train and val."),
        "shuffle": ("writing:shuffle", "Write the samples of all shards in a random order."),
        "sort": (
            "writing:sort",
            "Write the samples of all shards in the order of their keys, or of a field.",
        ),
        "mix": ("writing:mix", "Mix the samples of several data sets in exact proportions."),
        "filter": ("writing:filter_", "Write some of the samples of shards, or some of their fields."),
        "map": ("writing:map_", "Write the samples that a function returns for those of shards."),
        "join": ("writing:join", "Write samples with the fields that other data sets have for their keys."),
        "export": ("writing:export", "Write shards in another format into the directory DEST."),
    },
    "Train": {
        "demo": ("train:demo", "Kill a training in mid-epoch, resume it, and compare."),
        "doctor": ("train:doctor", "Run a pipeline, or read from a store, and report what limits it."),
        "cache": ("train:cache", "See and clean up the local cache of remote shards."),
        "state": ("train:state", "Show, compare and prove the states in checkpoint files."),
    },
}
_COMMANDS = {name: command for section in _SECTIONS.values() for name, command in section.items()}


class _Sections(click.Group):
    """Lists the commands by what they are for. Ctrl-C ends them with the exit code of the shell,
    130: that of click, 1, says that something was found. Errors are shown without the
    credentials in URLs, and without control characters.
    """

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with in_one_line():  # --help and --version print here
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible(), in_one_line():
                return super().invoke(ctx)
        except click.ClickException as error:
            vars(error).update(message=plain(hide(error.message)))
            raise
        except KeyboardInterrupt:
            click.echo("Aborted!", err=True)
            raise SystemExit(128 + signal.SIGINT) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        return cast(click.Command, getattr(import_module(f"wds_pipes.cli.{module}"), name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and (near := nearest(args[0], _COMMANDS)) is not None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        named = [
            CompletionItem(name, help=says) for name, (_, says) in _COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, says) for name, (_, says) in commands.items()])


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
