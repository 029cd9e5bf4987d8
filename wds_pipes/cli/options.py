"""What the commands share: arguments, and errors as one line.

Exit codes: 0: done, and nothing is wrong; 1: the data is damaged, something was found, or the disk
is full; 2: the command was not called rightly, for example with a shard that does not exist; 130:
it was interrupted by Ctrl-C, and 143: by SIGTERM; 141: the reader of its output has closed it, as
``| head`` does, so what it would have found is not known. Other programs of the shell end with 141
then, too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar, cast

import click
from click.core import ParameterSource

from wds_pipes.core.counts import NothingKeptError
from wds_pipes.core.words import plain, plain_json
from wds_pipes.errors import (
    ShardError,
    ShardWarning,
    StateError,
    WdsError,
    for_commands,
    how_to_repair,
)
from wds_pipes.tools.interrupts import Terminated

F = TypeVar("F", bound=Callable[..., Any])
FOUND, USAGE, CLOSED = 1, 2, 141

urls = click.argument("urls", nargs=-1, required=True)


def check_dest(dest: str) -> str:
    """Return the directory to write to.

    Raises:
        UsageError: it is the name of a file, or names shards, so the directory was left out.
    """
    is_file = "*" in dest or dest.endswith((".tar", ".parquet", ".jsonl", ".tfrecord")) or os.path.lexists(dest)
    if is_file and not os.path.isdir(dest):
        raise click.UsageError(f"DEST, the last argument, is the directory to write to, and {dest!r} is none: name one")
    return dest


def _names_from(context: click.Context, option: click.Parameter, value: str | None) -> list[str] | None:
    if value is None:
        return None
    names = [name.strip().lower().lstrip(".") for name in re.split("[,;]", value)]
    if not all(names):
        raise click.UsageError(f"{option.opts[0]} takes the names of fields, such as jpg,cls, not {value!r}")
    return list(dict.fromkeys(names))


def names_option(name: str, text: str) -> Callable[[F], F]:
    """An option for the names of fields, which the function gets as a list; None: not given."""
    return click.option(name, metavar="NAMES", callback=_names_from, help=text)


def _values_from(context: click.Context, option: Any, values: tuple[str, ...]) -> dict[str, str]:
    named: dict[str, str] = {}
    for value in values:
        field, equals, column = value.partition("=")
        if not equals or not field or not column:
            raise Refused(f"{option.opts[0]} is written as {option.metavar}, such as cls=label, not {value!r}")
        if field in named:
            raise Refused(f"{option.opts[0]} names field {field!r} twice: name it once")
        named[field] = column
    return named


def values_option(text: str) -> Callable[[F], F]:
    """The option --value for columns by their fields, which the function gets as a dict."""
    return click.option("--value", "values", multiple=True, metavar="FIELD=COLUMN", callback=_values_from, help=text)


metadata = click.option(
    "--metadata",
    metavar="PATH",
    help="The table for --where, with the keys in a column 'key', or a directory of tables.  [default: beside each "
    "X.tar, X.parquet or X.jsonl]",
)
renames = click.option(
    "--rename", multiple=True, metavar="OLD=NEW", callback=_values_from, help="Rename a field; repeatable."
)
dest = click.argument("dest", callback=lambda context, argument, value: check_dest(value))
fields = names_option("--fields", "Only these fields, such as jpg,cls.")
key_split = click.option(
    "--key-split",
    type=click.Choice(["first-dot", "last-dot", "folder"]),
    default="first-dot",
    show_default=True,
    help="Which dot of a file name ends the key of its sample; or its first directory is the key.",
)
concatenated = click.option(
    "--concatenated", is_flag=True, help="Shards may be several archives, one after another (cat, tar -A)."
)
engine = click.option(
    "--engine",
    type=click.Choice(["ray"]),
    help="Instead of -j: on RAY_ADDRESS or a new cluster.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
as_json_lines = click.option("--json", "as_json", is_flag=True, help="Print JSON Lines, for programs.")
progress = click.option(
    "--progress/--no-progress",
    default=None,
    # None: a line each minute
    callback=lambda context, option, value: (
        (sys.stderr.isatty() and find_spec("tqdm") is not None) or None if value is None else value
    ),
    help="Show a progress bar; needs tqdm.  [default: on a terminal; elsewhere a line each minute]",
)


def jobs(default: int, text: str) -> Callable[[F], F]:
    """The option ``-j``."""
    return click.option("-j", "--jobs", type=click.IntRange(min=1), default=default, show_default=True, help=text)


class Refused(click.ClickException):
    """An error that is printed as one line: the command cannot do what it was called with."""

    exit_code = USAGE

    def __init__(self, message: str) -> None:
        lines = re.split(r"\n(?=  )", message)  # indented lines are a list, and stay lines
        super().__init__("\n  ".join(" ".join(line.split()) for line in lines))


class Damaged(Refused):
    """An error of the data, or of a task."""

    exit_code = FOUND


def _options_from(context: click.Context, option: click.Parameter, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise Refused(f'--storage-options is not JSON like {{"anon": true}}: {error}') from error
    return found


def storage_options(function: F) -> F:
    """Add ``--storage-options``, which the function gets as a dict."""

    @functools.wraps(function)
    def with_options(**given: Any) -> Any:
        from wds_pipes.io.urls import origins_of, with_origins

        arguments = {
            each.name for each in click.get_current_context().command.params if isinstance(each, click.Argument)
        }
        texts = [
            text
            for name, value in given.items()
            for text in (value if isinstance(value, tuple) else [value])
            if isinstance(text, str) and (name in arguments or "://" in text)
        ]
        return function(**{**given, "storage_options": with_origins(given["storage_options"], origins_of(texts))})

    return click.option(
        "--storage-options",
        default="{}",
        callback=_options_from,
        help="How to reach a store: JSON that fsspec takes for it, such as '{\"anon\": true}'.",
    )(cast("F", with_options))


def size_option(name: str, default: str | None, text: str) -> Callable[[F], F]:
    """An option that is a size such as 64MB, which the function gets as bytes."""
    return click.option(name, default=default, callback=_size_from, show_default=True, help=text)


def _size_from(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    from wds_pipes.io.cache.shard_cache import parse_size

    try:
        return parse_size(value)
    except ValueError as error:
        raise Refused(f"{option.opts[0]}: {error}") from error


def shares(name: str, argument: str, text: str, *, required: bool = False) -> Callable[[F], F]:
    """An option for the names of splits and their shares, which the function gets as a dict."""

    def parse(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, float] | None:
        if value is None:
            return None
        pairs = [part.partition("=") for part in value.split(",")]
        try:
            found = {split.strip(): float(share) for split, _, share in pairs}
        except ValueError:
            raise click.UsageError(f"{name} is written as train=0.9,val=0.1, not {value!r}") from None
        if len(found) != len(pairs):
            raise click.UsageError(f"{name} names a split twice: {value!r}")
        return found

    return click.option(name, argument, metavar="NAME=SHARE,...", callback=parse, required=required, help=text)


@contextlib.contextmanager
def executor_of(engine: str | None) -> Iterator[Any]:
    """What runs the parts of a command that writes no shards; None: the command itself."""
    if engine is None:
        yield None
        return
    from wds_pipes.tools.jobs import check_engine
    from wds_pipes.tools.ray_engine import RayExecutor

    context = click.get_current_context()
    default = context.get_parameter_source("jobs") is ParameterSource.DEFAULT
    check_engine(engine, None if default else context.params["jobs"])

    with RayExecutor(retries=2) as executor:
        yield executor


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn the errors of a command into one line and an exit code, and warnings into one line each.

    If the reader of the output has closed it, the process ends quietly.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ShardWarning)
            warnings.showwarning = _show_once()
            yield
            sys.stdout.flush()
    except WdsError as error:
        usage = isinstance(error, (StateError, NothingKeptError)) or (isinstance(error, ShardError) and error.missing)
        raise (Refused if usage else Damaged)(f"{for_commands(error)}{how_to_repair(error)}") from error
    except (ValueError, TypeError, LookupError, ModuleNotFoundError) as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else for_commands(error)
        raise Refused(text) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            # what is still buffered would raise again when the interpreter ends
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(CLOSED) from None
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (Damaged if full else Refused)(_words(error)) from error


def _terminate(*_: object) -> NoReturn:
    raise Terminated(128 + signal.SIGTERM)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, which schedulers send, discard what is being written, as Ctrl-C does. It waits
    for threads that read.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show_once() -> Callable[..., None]:
    """Return a function that prints warnings: a shard that is read twice warns twice."""
    shown = set[str]()

    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        text = for_commands(message) if isinstance(message, Warning) else message
        if text not in shown:
            shown.add(text)
            echo(" ".join(f"warning: {text}".split()), err=True)

    return show


def _words(error: OSError) -> str:
    """An error of the system, as programs of the shell print it."""
    if not error.filename or not error.strerror:
        return for_commands(error)
    return ": ".join(filter(None, [str(error.filename), error.strerror, getattr(error, "mend", "")]))


def echo(text: str, *, err: bool = False) -> None:
    """Print a line. All text that commands print comes here: names and URLs may have control
    characters, which would change what a terminal shows.
    """
    click.echo(plain(text).replace("\n", "\\n"), err=err)


def echo_json(value: Any) -> None:
    """Print a line of JSON."""
    click.echo(plain_json(json.dumps(value)))


def report(value: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a value as JSON, or lines."""
    if as_json:
        echo_json(value)
        return
    for line in lines:
        echo(line)


def example(text: str) -> str:
    """Return the end of a command's help, with an example of its use."""
    lines = "\n".join(f"  {line}" for line in text.strip().splitlines())
    return f"\b\nExample:\n{lines}"
