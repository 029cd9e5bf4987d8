"""How Sphinx builds the documentation: ``python -m sphinx -c tutorials/docs tutorials build/docs``,
then open build/docs/index.html.

It shows what the tutorials have printed when their notebooks were stored.
"""

import importlib.metadata
import inspect
import json
import posixpath
import re
from pathlib import Path

import click
from docutils import nodes
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.writers.text import TextTranslator

from wds_pipes import stages
from wds_pipes.cli import main
from wds_pipes.codecs.table import TABLE
from wds_pipes.core.stage import functional_name, shown_signature

project = "wds_pipes"
release = version = importlib.metadata.version("wds_pipes")
root_doc = "index"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["**/.ipynb_checkpoints"]
nb_execution_mode = "off"
nb_merge_streams = True

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"wds_pipes {release}"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
copybutton_selector = ", ".join(
    f".highlight-{language} pre" for language in ("python", "ipython3", "sh")
)
text_add_secnumbers = False

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Checkpoint"]
myst_heading_anchors = 3
# what pages say where their source is read, which has names instead of help
IN_A_CLONE = """\
> This page is filled in when [the site is built](../contributing.md#the-site): the names in boxes, and
> words in capitals, stand for their help.
"""
# pages that list pages
GROUPS = ("docs/tutorials", "docs/guides", "docs/reference", "docs/explanation")
OPTIONAL = """\
- [All pages](llms-full.txt): the text of all of them, in one file.
- [Contributing](docs/contributing.md): the tests, and what a step, a codec or a command needs.
- [Changes](docs/changes.md): what each version has."""

suppress_warnings = ["myst.header"]  # notebooks may skip a level


def shortened(app, what, name, value, *rest):
    """Leave out the rules of a module, which are for its developers, and the help of a node,
    which repeats that of its step.
    """
    _options, lines = rest
    if what == "module":
        told = lines[: lines.index("Rules:") if "Rules:" in lines else None]
        code = next(
            (number for number, line in enumerate(told) if line.startswith(" ")), None
        )
        lines[:] = told if code is None else [*told[:code], "::", "", *told[code:]]
    elif name.startswith("wds_pipes.nodes.") and getattr(value, "_kind", None):
        step = (
            "wds_pipes.ShardList"
            if value.__name__ == "ShardList"
            else f"wds_pipes.{functional_name(value)}"
            if value.__name__ in ("Mix", "Join")
            else f"pipe.{functional_name(value)}"
        )
        lines[:] = [f"As :py:obj:`{step}`, with a node as its source."]


def given(app, what, name, value, *rest):
    """The return type of ``mix()`` and ``join()``, which are classes used as functions."""
    _options, signature, _returned = rest
    return (
        (signature, "WdsPipe") if name in ("wds_pipes.mix", "wds_pipes.join") else None
    )


def is_field(app, what, name, value, *rest):
    """Skip the fields of named tuples: the docstring of their class describes them."""
    return True if type(value).__name__ == "_tuplegetter" else None


def step(app, name):
    """The help of a step, as that of a method of a pipe."""
    kind = next(
        kind
        for kind in map(stages.__dict__.get, stages.__all__)
        if functional_name(kind) == name
    )
    signature = shown_signature(kind)
    arguments = signature.replace(parameters=list(signature.parameters.values())[1:])
    text = re.sub(r" \(functional name: ``\w+``\)", "", inspect.getdoc(kind)).replace(
        "\n    source: ", "\n    pipe: "
    )
    text = re.sub(
        r"\nCheckpoint: ((?:.+\n?)+)",
        lambda found: (
            "\nCheckpoint:\n"
            + "\n".join(f"    {line.strip()}" for line in found[1].splitlines())
        ),
        text,
    )
    described = str(GoogleDocstring(text, app.config, app, "class", name, kind))
    return "\n".join(
        [
            ".. py:currentmodule:: None",
            "",
            f".. py:method:: pipe.{name}{arguments}",
            "",
            *(f"   {line}" for line in described.splitlines()),
            "",
        ]
    )


def codecs():
    """The table of codecs."""
    asked = {
        None: "",
        "image": "an image spec, such as `rgb8`",
        "audio": "`audio`",
        "video": "`video`",
        "name": "its name",
    }
    rows = [
        "| extensions | decoded | encoded by TarWriter | media type | needs | if the call names |",
        "|---|---|---|---|---|---|",
    ]
    for row in TABLE:
        names = " ".join(f"`{name}`" for name in row.names)
        encoded = (
            "from bytes only"
            if row.encode is None
            else "yes, not exactly"
            if row.lossy
            else "yes"
        )
        needs = f"`{row.package}`" if row.package else ""
        rows.append(
            f"| {names} | {row.gives} | {encoded} | {row.media_type} | {needs} | {asked[row.asked]} |"
        )
    return "\n".join(rows)


def expanded(app, text):
    """A source with the help of the steps that a line with STEPS names, that of the command line for
    COMMANDS, and the table of codecs for CODECS, and without the line for readers in a clone.
    """
    text = text.replace(IN_A_CLONE, "")
    helps = []
    context = click.Context(main)
    commands = {
        name: main.get_command(context, name) for name in main.list_commands(context)
    }
    for name, group in list(commands.items()):
        commands.update(
            {
                f"{name} {sub}": command
                for sub, command in getattr(group, "commands", {}).items()
            }
        )
    for name, command in sorted(commands.items()):
        context = click.Context(
            command, info_name=f"wds-pipes {name}", max_content_width=100
        )
        helps.append(
            f"## wds-pipes {name}\n\n```text\n{command.get_help(context)}\n```\n"
        )
    text = re.sub(
        r"(?m)^STEPS (.*)$",
        lambda found: "\n" + "\n".join(step(app, name) for name in found[1].split()),
        text,
    )
    text = text.replace("\nCODECS\n", f"\n{codecs()}\n")
    return text.replace("\nCOMMANDS\n", "\n" + "\n".join(helps))


def lists(app, document, source):
    """Expand a page before it is read."""
    source[0] = expanded(app, source[0])


def breaks(app, doctree, document):
    """Let names in tables be broken before a dot, and after a bracket and the like."""
    for literal in (
        literal
        for table in doctree.findall(nodes.table)
        for literal in table.findall(nodes.literal)
    ):
        first, *parts = re.split(r"(?<=[(,=/_])(?=\w)|(?=\.\w)", literal.astext())
        literal.children = []
        literal += [nodes.Text(first)]
        for part in parts:
            literal += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def plain(app, document):
    """The text of a page: its Markdown, the cells of a notebook, or what autodoc has made of it."""
    path = Path(app.env.doc2path(document))
    if path.suffix == ".ipynb":
        cells = [
            (cell["cell_type"], "".join(cell["source"]))
            for cell in json.loads(path.read_text())["cells"]
        ]
        text = "\n\n".join(
            text if kind == "markdown" else f"```python\n{text}\n```"
            for kind, text in cells
        )
    else:
        text = expanded(app, path.read_text())
        if "{eval-rst}" in text:
            doctree = app.env.get_and_resolve_doctree(document, app.builder)
            doctree.walkabout(found := TextTranslator(doctree, app.builder))
            text = found.body
        text = re.sub(r"(?s)```\{(toctree|raw)\}.*?```\n", "", text)
    return f"{text.strip()}\n"


def linked(app, document, text, start):
    """A text of a page whose links to pages are those to their texts, seen from a directory."""

    def link(found):
        page = posixpath.join(posixpath.dirname(document), found[1])
        page = posixpath.normpath(re.sub(r"\.(md|ipynb)$", "", page))
        return (
            f"]({posixpath.relpath(page, start)}.md"
            if page in app.env.found_docs
            else found[0]
        )

    return re.sub(r"\]\(([\w./-]+)(?=[#)])", link, text)


def write_texts(app, exception):
    """Write the site for programs (https://llmstxt.org): ``llms.txt``, whose head is docs/brief and
    whose lists are those of the groups of pages; each page as Markdown beside its HTML; and all of
    them in ``llms-full.txt``.
    """
    if exception or app.builder.name != "html":
        return
    site, pages = Path(app.outdir), [app.config.root_doc]
    for page in pages:  # which grows, in the order of the site
        pages += app.env.toctree_includes.get(page, [])
    texts = {page: plain(app, page) for page in pages}
    for page, text in texts.items():
        (site / f"{page}.md").write_text(
            linked(app, page, text, posixpath.dirname(page) or ".")
        )
    head = linked(app, "docs/brief", texts["docs/brief"], ".").partition("\n")[2]
    parts = ["# wds_pipes", f"> {importlib.metadata.metadata('wds_pipes')['Summary']}."]
    parts.append(re.sub(r"(?m)^## (.*)$", r"**\1**", head.strip()))
    for group in GROUPS:
        title, _, text = linked(app, group, texts[group], ".").partition("\n")
        pages = (
            page.replace("\n  ", " ")
            for page in re.findall(r"(?m)^- \[.*(?:\n  .*)*", text)
        )
        parts.append(f"#{title}\n\n" + "\n".join(pages))
    parts.append(f"## Optional\n\n{OPTIONAL}")
    (site / "llms.txt").write_text("\n\n".join(parts) + "\n")
    (site / "llms-full.txt").write_text("\n\n".join(texts.values()))


def setup(app):
    app.connect("autodoc-process-docstring", shortened)
    app.connect("autodoc-process-signature", given)
    app.connect("autodoc-skip-member", is_field)
    app.connect("source-read", lists)
    app.connect("doctree-resolved", breaks)
    app.connect("build-finished", write_texts)
