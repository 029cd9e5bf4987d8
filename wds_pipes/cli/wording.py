"""Messages of the package name arguments of Python; the commands have options instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import click

_Words = str | Callable[[re.Match[str]], str]


def _json(found: re.Match[str]) -> str:
    """Options for fsspec, as an argument of the shell."""
    values = {"True": True, "{...}": {"Authorization": "..."}}
    return f"'{json.dumps({found[1]: values.get(found[2], found[2].strip(chr(39)))})}'"


def _repeated(found: re.Match[str]) -> str:
    """Only ``index`` has an option to take pieces as samples."""
    context = click.get_current_context(silent=True)
    return (
        f", or pass {found[2]} to take the pieces as samples"
        if context is not None and context.info_name == "index" and found[2]
        else ""
    )


_OPTIONS: tuple[tuple[re.Pattern[str], _Words], ...] = (
    (re.compile(r" \(overwrite=True\)"), ""),
    (re.compile(r"storage_options=(?=\{)"), "--storage-options "),
    (re.compile(r"\{'(\w+)': (True|'\w+'|\{\.\.\.\})\}"), _json),
    (re.compile(r"\w+='DIRECTORY' \((--[\w-]+ DIRECTORY)\)"), r"\1"),
    (re.compile(r", a function, as in codecs=\{[^}]*\},"), ","),
    (re.compile(r", or pass on_repeated_key='ignore'( here and to group_by_key \(wds-pipes index "
                r"(--on-repeated-key ignore)\),)? to take the pieces as samples"), _repeated),
    (re.compile(r" \(A resume from here on does not see what came before\.\)"), ""),
    (re.compile(r"the fields that fetch_samples\(fields=\[(.*?)\]\) keeps: correct the names, or pass on_error='skip'"),
     r"the fields \1: correct the names"),
    (re.compile(r"of group_by_key\(fields=\.\.\.\)"), "of --fields"),
    (re.compile(r"this epoch gave nothing: (.*) had none of the fields that group_by_key\(fields=\[(.*?)\]\) keeps"),
     r"\1 had none of the fields \2"),
)  # fmt: skip


def for_commands(message: str) -> str:
    """Return a message with the options of commands instead of arguments of Python."""
    for argument, option in _OPTIONS:
        message = argument.sub(option, message)
    return message
