"""What type checkers and editors see: the stages' signatures on pipes, in
wds_pipes/datapipes/signatures.pyi, and the names that wds_pipes and wds_pipes.tools load at their
first use, in the __init__.pyi of each.

``python tests/support/typing_stubs.py`` writes them anew; a test compares.
"""

import ast
import builtins
import inspect
import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import wds_pipes
from wds_pipes import datapipes, stages, tools
from wds_pipes.core.stage import Stage, functional_name

FOLDER = Path(inspect.getsourcefile(datapipes)).parents[1]
# the modules that are attributes of wds_pipes without an import of their own
MODULES = ("checkpoint", "datapipes", "display", "io", "lightning", "nodes", "stages", "tar", "testing", "tools")
SOURCES = ("ShardList", "SampleList", "Mix", "Join")  # these are built by their classes; the others are methods


class _Renamed(ast.NodeTransformer):
    """What a stage is annotated with, as it is for pipes."""

    def visit_Name(self, node):
        return ast.Name({"Out": "T_co", "Stage": "IterDataPipe"}.get(node.id, node.id))


def given(kind: type[Stage]) -> str:
    """The type of a stage's items."""
    if kind is stages.MapSamples:  # its function returns anything; its subclass FilterSamples keeps the type
        return "Any"
    [gives] = next(filter(None, map(typing.get_args, kind.__orig_bases__)))
    if isinstance(gives, typing.TypeVar):
        return "T_co"
    return (
        gives.__name__ if isinstance(gives, type) and not typing.get_args(gives) else str(gives).replace("typing.", "")
    )


def parameters(kind: type[Stage], *, method: bool) -> str:
    """The parameters of a stage as they are written; those of a method without the source."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__))).body
    if method:
        del function.args.args[1]
    return ast.unparse(_Renamed().visit(function.args))


def summary(kind: type[Stage]) -> str:
    """The first sentence of a stage's help."""
    return (
        " ".join(inspect.getdoc(kind).partition("\n\n")[0].split())
        .partition(" (functional name")[0]
        .partition(": ``")[0]
        .rstrip(".")
    )


def overloads(said: str) -> list[str]:
    """The forms of parameters of which one may be a function of two kinds: type checkers infer the
    arguments of a lambda only from one.
    """
    found = re.search(r"(Callable\[\[[^]]*\], \w+\]) \| (Callable\[\[[^]]*\], \w+\])", said)
    return [said] if found is None else [said.replace(found[0], kind) for kind in found.groups()]


def methods() -> str:
    """The methods of ``WdsPipe``."""
    lines = [
        "class Methods(Generic[T_co]):",
        '    """The steps as methods of pipes; at run time ``register_stage`` makes them."""',
        "",
    ]
    for name in stages.__all__:
        if name not in SOURCES:
            kind = getattr(stages, name)
            said = parameters(kind, method=True)
            for form in overloads(said):
                lines += ["    @overload"] if form != said else []
                lines.append(f"    def {functional_name(kind)}({form}) -> WdsPipe[{given(kind)}]:")
                lines += [f'        """{summary(kind)}."""', ""]
    return "\n".join(lines)


def classes() -> str:
    """The classes of pipes."""
    lines = []
    for name in stages.__all__:
        kind = getattr(stages, name)
        lines += [f"class {name}(WdsPipe[{given(kind)}]):", f'    """{summary(kind)}."""', ""]
        if name in SOURCES:
            lines += [f"    def __init__({parameters(kind, method=False)}) -> None: ...", ""]
    return "\n".join(lines)


HEAD = """# Written by tests/support/typing_stubs.py: do not edit.
\"\"\"What editors and type checkers know of the steps; no code imports it.\"\"\"

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, Literal, overload

from typing_extensions import TypeVar

from wds_pipes.codecs.codec import Codec, Decoder, Encoder, Handler
from wds_pipes.codecs.resizing import Crop, Fit, Size
from wds_pipes.core.reads_again import PutBackIterator
from wds_pipes.core.tolerant import OnError
from wds_pipes.datapipes.base import IterDataPipe
from wds_pipes.datapipes.pipe import WdsPipe
from wds_pipes.io.cache.shard_cache import ShardCache
from wds_pipes.io.urls import Urls
from wds_pipes.stages.open_shards import OpenedShard
from wds_pipes.stages.sample_list import SampleRef
from wds_pipes.stages.shard_source import ShardRef
from wds_pipes.tar import TarMember
from wds_pipes.tar.keys import KeySplit
from wds_pipes.tar.located import Selection

T_co = TypeVar("T_co", covariant=True, default=Any)


"""


def names(package, modules=()) -> str:
    """The names that a package loads at their first use, as names of itself."""
    lines = [f"from wds_pipes import {name} as {name}" for name in modules]
    for module, listed in package._NAMES.items():
        for name in listed.split():
            shadows = "  # noqa: A004" if hasattr(builtins, name) else ""
            lines.append(f"from wds_pipes.{module} import {name} as {name}{shadows}")
    return "\n".join(["# Written by tests/support/typing_stubs.py: do not edit.", *lines, ""])


def stubs() -> dict[Path, str]:
    """The text of each file."""
    return {
        FOLDER / "datapipes" / "signatures.pyi": formatted(HEAD + methods() + "\n\n" + classes()),
        FOLDER / "__init__.pyi": names(wds_pipes, MODULES),
        FOLDER / "tools" / "__init__.pyi": names(tools),
    }


def formatted(source: str) -> str:
    """The text as ruff formats it."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--stdin-filename",
        "signatures.pyi",
        "--config",
        "line-length = 120",
        "-",
    ]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
