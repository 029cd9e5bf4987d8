"""What the commands share: arguments, and errors as one line.

Exit codes: 0: done, and nothing is wrong; 1: the data is damaged, or something was found; 2: the
command was not called rightly, for example with a shard that does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from wds_pipes.errors import ShardError, ShardWarning, StateError, WdsError

F = TypeVar("F", bound=Callable[..., Any])
FOUND, USAGE = 1, 2

urls = click.argument("urls", nargs=-1, required=True)
key_split = click.option(
    "--key-split",
    type=click.Choice(["first-dot", "last-dot"]),
    default="first-dot",
    show_default=True,
    help="As in group_by_key.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


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
    return click.option(
        "--storage-options",
        default="{}",
        callback=_options_from,
        help="As in open_shards, in JSON: '{\"anon\": true}'.",
    )(function)


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn the errors of a command into one line and an exit code, and warnings into one line each.

    If the reader of the output has closed it, as ``| head`` does, the process ends quietly.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ShardWarning)
            warnings.showwarning = lambda message, *rest, **more: click.echo(f"warning: {message}", err=True)
            yield
            sys.stdout.flush()
    except WdsError as error:
        usage = isinstance(error, StateError) or (isinstance(error, ShardError) and error.missing)
        raise (Refused if usage else Damaged)(str(error)) from error
    except (ValueError, TypeError, LookupError, ModuleNotFoundError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise Refused(str(text)) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            # what is still buffered would raise again when the interpreter ends
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
        raise Refused(_words(error)) from error


def _words(error: OSError) -> str:
    """An error of the system, as programs of the shell print it."""
    if not error.filename or not error.strerror:
        return str(error)
    notes = [note.partition(": ")[2] for note in getattr(error, "__notes__", ())]
    return ": ".join([str(error.filename), error.strerror, *filter(None, notes)])


def example(text: str) -> str:
    """Return the end of a command's help, with an example of its use."""
    lines = "\n".join(f"  {line}" for line in text.strip().splitlines())
    return f"\b\nExample:\n{lines}"
