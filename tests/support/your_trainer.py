"""What the tutorial 16_your_trainer defines, and the code that tutorials show as text."""

import ast
import re
from types import SimpleNamespace

from documents import TUTORIALS, cells_of


def defined(*wanted, **names):
    """Functions and classes that the tutorial 16 defines, where these names are known."""
    [path] = [path for path in TUTORIALS if path.stem.startswith("16")]
    kinds = (ast.ClassDef, ast.FunctionDef)
    tree = ast.parse("\n".join(cells_of(path, "code")))
    found = [node for node in tree.body if isinstance(node, kinds) and node.name in wanted]
    exec(compile(ast.Module(found, []), path.name, "exec"), names)
    return SimpleNamespace(**names)


def shown_under(heading, names, tutorial="16"):
    """Run the code under a heading, where these names are known; returns all names."""
    [path] = [path for path in TUTORIALS if path.stem.startswith(tutorial)]
    text = "\n".join(cells_of(path, "markdown"))
    [section] = re.findall(rf"(?ms)^## {heading}$(.*?)^## ", text)
    [code] = re.findall(r"(?s)```python\n(.*?)```", section)
    names = {"__name__": "shown", **names}
    exec(compile(code, heading, "exec"), names)
    return names
