"""The stages' signatures as type checkers and editors see them on pipes: what stands between the marks in wds_pipes/datapipes.py.

``python tests/typing_stubs.py`` writes it there anew; a test compares.
"""

import ast
import inspect
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

from wds_pipes import datapipes, stages
from wds_pipes.core.stage import Stage, functional_name

PATH = Path(inspect.getsourcefile(datapipes))
SOURCES = ("ShardList", "Mix")  # these are built by their classes; the others are methods


class _Renamed(ast.NodeTransformer):
    """What a stage is annotated with, as it is for pipes."""

    def visit_Name(self, node):
        return ast.Name({"Out": "T_co", "Stage": "IterDataPipe"}.get(node.id, node.id))


def given(kind: type[Stage]) -> str:
    """The type of what a stage gives."""
    [base] = kind.__orig_bases__
    [gives] = typing.get_args(base)
    if isinstance(gives, typing.TypeVar):
        return "T_co"
    return gives.__name__ if isinstance(gives, type) and not typing.get_args(gives) else str(gives).replace("typing.", "")


def parameters(kind: type[Stage], *, method: bool) -> str:
    """The parameters of a stage as they are written; those of a method without the source."""
    [function] = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__))).body
    if method:
        del function.args.args[1]
    return ast.unparse(_Renamed().visit(function.args))


def summary(kind: type[Stage]) -> str:
    """The first sentence of a stage's help."""
    return " ".join(inspect.getdoc(kind).partition("\n\n")[0].split()).partition(" (functional name")[0].partition(": ``")[0].rstrip(".")


def methods() -> str:
    """The methods of ``WdsPipe``."""
    lines = ["if TYPE_CHECKING:", ""]
    for name in stages.__all__:
        if name not in SOURCES:
            kind = getattr(stages, name)
            lines.append(f"    def {functional_name(kind)}({parameters(kind, method=True)}) -> WdsPipe[{given(kind)}]:")
            lines += [f'        """{summary(kind)}."""', ""]
    return "\n".join(lines)


def classes() -> str:
    """The classes of pipes."""
    lines = ["if TYPE_CHECKING:", ""]
    for name in stages.__all__:
        kind = getattr(stages, name)
        lines += [f"    class {name}(WdsPipe[{given(kind)}]):", f'        """{summary(kind)}."""', ""]
        if name in SOURCES:
            lines += [f"        def __init__({parameters(kind, method=False)}) -> None: ...", ""]
    return "\n".join(lines)


def placed(source: str) -> str:
    """The text of datapipes.py with the types as they should be."""
    for what, text, indent in (("methods", methods(), "    "), ("types", classes(), "")):
        before, begin, rest = source.partition(f"{indent}# {what}: begin")
        comment, newline, rest = rest.partition("\n")
        _, end, after = rest.partition(f"{indent}# {what}: end")
        indented = "\n".join(indent + line if line else "" for line in text.splitlines())
        source = before + begin + comment + newline + indented + "\n" + end + after
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "datapipes.py", "--config", "line-length = 160", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    PATH.write_text(placed(PATH.read_text()))
