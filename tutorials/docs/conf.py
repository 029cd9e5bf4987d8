"""How Sphinx builds the documentation: ``python -m sphinx -c tutorials/docs tutorials build/docs``, then open build/docs/docs/index.html."""

import importlib.metadata
import json

import click
from myst_parser.parsers.sphinx_ import MystParser

from wds_pipes import stages
from wds_pipes.cli import main

project = "wds_pipes"
release = version = importlib.metadata.version("wds_pipes")
root_doc = "docs/index"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["**/.ipynb_checkpoints"]

html_theme = "alabaster"
html_theme_options = {"description": "Training data from tar shards, resumed exactly", "page_width": "1100px", "sidebar_width": "230px"}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Checkpoint"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # notebooks may skip a level


class Notebook(MystParser):
    """A notebook as Markdown: its text, and its code as it is."""

    supported = ("notebook",)

    def parse(self, inputstring, document):
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(inputstring)["cells"]]
        super().parse("\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells if source), document)


def shortened(app, what, name, value, *rest):
    """A module without its rules, which are for those who change it. A node has the help of its step, which need not stand here twice."""
    _options, lines = rest
    if what == "module":
        told = lines[: lines.index("Rules:") if "Rules:" in lines else None]
        code = next((number for number, line in enumerate(told) if line.startswith(" ")), None)
        lines[:] = told if code is None else [*told[:code], "::", "", *told[code:]]
    elif name.startswith("wds_pipes.nodes.") and getattr(value, "_kind", None):
        lines[:] = [f"As :class:`wds_pipes.stages.{value.__name__}`, with a node as its source."]


def given(app, what, name, value, *rest):
    """What ``mix()`` gives: it is a class that is used as a function."""
    _options, signature, _returned = rest
    return (signature, "WdsPipe") if name == "wds_pipes.mix" else None


def is_field(app, what, name, value, *rest):
    """Fields of named tuples are described with their class."""
    return True if type(value).__name__ == "_tuplegetter" else None


def lists(app, document, source):
    """All steps in the place of STEPS, and the help of the command line in the place of COMMANDS."""
    helps = []
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"wds-pipes {name}", max_content_width=100)
        helps.append(f"### wds-pipes {name}\n\n```text\n{command.get_help(context)}\n```\n")
    steps = "\n".join(f".. autoclass:: {name}" for name in stages.__all__)
    source[0] = source[0].replace("\nSTEPS\n", f"\n{steps}\n").replace("\nCOMMANDS\n", "\n" + "\n".join(helps))


def setup(app):
    app.add_source_parser(Notebook)
    app.connect("autodoc-process-docstring", shortened)
    app.connect("autodoc-process-signature", given)
    app.connect("autodoc-skip-member", is_field)
    app.connect("source-read", lists)
