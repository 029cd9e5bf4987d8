"""What tutorials/16_your_trainer.py defines, and the code that it shows as text."""

import ast
import re
from types import SimpleNamespace

from documents import ROOT

CHAPTER = (ROOT / "tutorials" / "16_your_trainer.py").read_text()


def defined(*wanted, **names):
    """Functions and classes that the tutorial defines, where these names are known."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = [node for node in ast.parse(CHAPTER).body if isinstance(node, kinds) and node.name in wanted]
    exec(compile(ast.Module(found, []), "16_your_trainer.py", "exec"), names)
    return SimpleNamespace(**names)


def shown_under(heading, names, chapter=CHAPTER):
    """Run the code under a heading, where these names are known; returns all names."""
    text = re.sub(r"(?m)^# ?", "", chapter)
    [section] = re.findall(rf"(?ms)^## {heading}$(.*?)^## ", text)
    [code] = re.findall(r"(?s)```python\n(.*?)```", section)
    names = {"__name__": "shown", **names}
    exec(compile(code, heading, "exec"), names)
    return names
