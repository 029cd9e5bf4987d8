"""The recipes of tutorials/16_your_trainer.py: its classes, and the code that it shows as text."""

import ast
import re

from documents import ROOT

CHAPTER = (ROOT / "tutorials" / "16_your_trainer.py").read_text()


def class_of(name, names):
    """A class or a function that the tutorial defines, where these names are known."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    [found] = [node for node in ast.parse(CHAPTER).body if isinstance(node, kinds) and node.name == name]
    exec(compile(ast.Module([found], []), name, "exec"), names)
    return names[name]


function_of = class_of


def shown_under(heading, names, chapter=CHAPTER):
    """Run the code under a heading, where these names are known; returns all names."""
    text = re.sub(r"(?m)^# ?", "", chapter)
    [section] = re.findall(rf"(?ms)^## {heading}$(.*?)^## ", text)
    [code] = re.findall(r"(?s)```python\n(.*?)```", section)
    names = {"__name__": "shown", **names}
    exec(compile(code, heading, "exec"), names)
    return names
