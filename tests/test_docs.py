"""The documentation builds without a warning, and every public name is in it."""

import ast
import functools
import importlib
import itertools
import os
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import warm
from documents import run_script

import wds_pipes
import wds_pipes.datapipes
import wds_pipes.stages
from wds_pipes.codecs.table import TABLE
from wds_pipes.core.stage import functional_name
from wds_pipes.testing import make_shards

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PUBLIC_WITHOUT_LISTS = ("checkpoint", "lightning", "testing")  # modules without __all__ that users import from


def public():
    """Every public name with its object."""
    names = ["wds_pipes", *(f"wds_pipes.{module.name}" for module in pkgutil.iter_modules(wds_pipes.__path__))]
    for module in map(importlib.import_module, names):
        own = [
            name
            for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
        ]
        for name in getattr(
            module, "__all__", own if module.__name__.rpartition(".")[2] in PUBLIC_WITHOUT_LISTS else []
        ):
            yield f"{module.__name__}.{name}", getattr(module, name)


BUILD = """
import sys
from sphinx.cmd.build import main

sys.exit(main(sys.argv[1:]))
"""


def extensions():
    """Those that conf.py lists."""
    (found,) = re.findall(r"(?m)^extensions = (.*)$", (TUTORIALS / "docs" / "conf.py").read_text())
    return ast.literal_eval(found)


def located(name):
    """What a package exports by a name, not a module of the same name; None: there is nothing."""
    first, *parts = name.split(".")
    return functools.reduce(lambda found, part: getattr(found, part, None), parts, sys.modules.get(first))


@pytest.mark.slow
def test_it_builds_without_a_warning_and_has_every_public_name(tmp_path):
    sphinx = pytest.importorskip("sphinx.util.inventory")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    arguments = [
        "-W",
        "--keep-going",
        "-q",
        "-D",
        "nb_execution_mode=off",  # test_tutorials.py runs them
        "-D",  # without the pages of the source code, on which nothing of ours can warn
        f"extensions={','.join(name for name in extensions() if name != 'sphinx.ext.viewcode')}",
        "-d",
        tmp_path / "trees",
        "-c",
        TUTORIALS / "docs",
        TUTORIALS,
        tmp_path / "docs",
    ]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    built = warm.run(BUILD, *arguments, directory=tmp_path, environment=environment)
    assert built.returncode == 0, built.stderr
    with open(tmp_path / "docs" / "objects.inv", "rb") as file:
        inventory = sphinx.InventoryFile.load(file, "", lambda *parts: "/".join(parts))
    described = [name for kind, names in inventory.items() if kind.startswith("py:") for name in names]
    exported = list(public())  # which imports what it names
    known = {id(located(name)) for name in described}
    steps = {functional_name(getattr(wds_pipes.stages, name)): name for name in wds_pipes.stages.__all__}
    for name in (name for name in steps if f"pipe.{name}" in described):
        known.add(id(getattr(wds_pipes.stages, steps[name])))
        known.add(id(getattr(wds_pipes.datapipes, steps[name])))
    # these are described as wds_pipes.ShardList, SampleList, mix and join
    sources = ("ShardList", "SampleList", "Mix", "Join")
    known |= {id(getattr(wds_pipes.stages, name)) for name in sources}
    missing = sorted(name for name, value in exported if id(value) not in known)
    assert not missing, (
        f"not in the reference: add it to a page in tutorials/docs/reference/ (a step to a line STEPS): {missing}"
    )
    assert len(exported) > 60
    pages = {
        page.relative_to(tmp_path / "docs").as_posix(): page.read_text() for page in (tmp_path / "docs").rglob("*.html")
    }
    order = " ".join(re.sub(r"<[^>]*>", "", pages["docs/reference/order.html"]).split())
    assert "pipe.shuffle_buffer(size, *, seed=None)" in order
    assert order.index("pipe.interleave_shards(count)") < order.index("pipe.shuffle_buffer(size")
    assert '"shuffle_buffer() (pipe method)"' in (tmp_path / "docs" / "searchindex.js").read_text()
    table = " ".join(re.sub(r"<[^>]*>", " ", pages["docs/reference/codecs.html"]).split())
    for row in TABLE:
        assert f"{' '.join(row.names)} {row.gives} " in table, "tutorials/docs/conf.py lists the table of codecs"
    assert "Stream training data into PyTorch" in pages["index.html"]
    shown = "".join(text for name, text in pages.items() if name.startswith("docs/"))
    assert "STEPS" not in shown
    assert "CODECS" not in shown
    assert "Rules:" not in shown
    scripts = [script.stem for script in sorted(TUTORIALS.glob("[0-9]*.ipynb"))]
    assert all(f'href="../{name}.html"' in pages["docs/tutorials.html"] for name in scripts)
    for before, after in itertools.pairwise(scripts):
        assert re.search(rf'<link rel="next"[^>]* href="{after}.html"', pages[f"{before}.html"])
        assert re.search(rf'<link rel="prev"[^>]* href="{before}.html"', pages[f"{after}.html"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_the_program_with_tasks_runs(engine, tmp_path):
    page = (TUTORIALS / "docs/reference/writing.md").read_text().partition("## Jobs of your own")[2]
    program, threads = re.findall(r"(?s)```python\n(.*?)```", page)
    if engine == "threads":
        program = program.replace("print(tools.run(job, jobs=4))", threads.replace("\n", "\n    "))
    (tmp_path / "program.py").write_text(program)
    make_shards(str(tmp_path / "shards"), shards=4, samples=3)
    done = run_script(tmp_path / "program.py", "forkserver", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(wds_pipes.IndexedShards(f"{tmp_path}/merged/*.tar")) == 12
