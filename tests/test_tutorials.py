"""Every tutorial runs, needs only what its first lines name, and has a notebook with the same cells.

The notebooks are kept without outputs, which would hold times and paths. After a change: ``jupytext --sync tutorials/[0-9]*.py``.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement

FOLDER = Path(__file__).parents[1] / "tutorials"
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
PROGRAMS = [path for path in sorted(FOLDER.glob("*.py")) if path not in SCRIPTS]  # what tutorials run
# They start processes, which is to work where these are not forked, too.
WITH_PROCESSES = [path for path in SCRIPTS if re.search(r"subprocess\.Popen|__file__ = None", path.read_text())]


def named(paths):
    return [pytest.param(path, id=path.stem) for path in paths]


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_they_are_all_there():
    assert [path.stem[:2] for path in SCRIPTS] == [f"{number:02d}" for number in range(1, len(SCRIPTS) + 1)]
    assert [path.stem for path in SCRIPTS] == [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]


@pytest.mark.parametrize("path", named(SCRIPTS))
def test_the_notebook_has_the_cells_of_the_script(path):
    notebook = jupytext.read(path.with_suffix(".ipynb"))
    assert cells(notebook) == cells(jupytext.read(path)), "after a change: jupytext --sync tutorials/[0-9]*.py"
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs"), "jupyter nbconvert --clear-output --inplace"


@pytest.mark.parametrize("path", named(WITH_PROCESSES))
def test_it_runs_as_a_script_where_processes_are_not_forked(path):
    """From another directory than its own, and with all that it starts under forkserver, Python 3.14's default; spawn imports what forkserver does."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "sitecustomize.py").write_text("import multiprocessing\n\nmultiprocessing.set_start_method('forkserver', force=True)\n")
        python_path = os.pathsep.join([directory, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "TMPDIR": directory, "PYTHONPATH": python_path, "MPLBACKEND": "Agg"}
        done = subprocess.run([sys.executable, "-P", path], cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", named(SCRIPTS))
def test_it_runs(path):
    notebook = jupytext.read(path)
    # Not in tmp_path, whose name is too long for the sockets of worker processes.
    with tempfile.TemporaryDirectory() as directory:
        for program in PROGRAMS:
            shutil.copy(program, directory)
        environment = {**os.environ, "TMPDIR": directory, "IPYTHONDIR": f"{directory}/ipython"}
        client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": directory}})
        client.execute(env=environment)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr" or "Warning" not in output.text, output.text


def installed_by(text):
    """The distributions that the first ``pip install`` in a text names, with those of wds_pipes itself and of the extras it names."""
    command = re.search(r"pip install ([^`\n]*)", text)[1]
    asked = [Requirement(word.strip("'")) for word in command.split()]
    names = {requirement.name for requirement in asked}
    assert "wds_pipes" in names
    extras = next(requirement.extras for requirement in asked if requirement.name == "wds_pipes")
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    for line in (*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])):
        names.add(Requirement(line).name)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


@pytest.mark.parametrize("path", named(SCRIPTS))
def test_it_imports_only_what_it_says_to_install(path):
    notebook = jupytext.read(path)
    head = notebook.cells[0].source
    assert "**You learn**" in head
    assert "**You need**" in head
    assert "What to read next" in notebook.cells[-1].source
    allowed = installed_by(head) | {"ipython"}
    owners = importlib.metadata.packages_distributions()
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    programs = [(FOLDER / name).read_text() for name in re.findall(r"\"(\w+\.py)\"", source) if (FOLDER / name).exists()]
    programs += re.findall(r'(?s)"""\\\n(.*?)"""', source)  # that it writes
    for node in (node for text in (source, *programs) for node in ast.walk(ast.parse(text))):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
        for module in {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names):
            found = {re.sub(r"[-_.]+", "-", name).lower() for name in owners.get(module, [module])}
            assert found & allowed, f"{module} is not in what the head says to install: {sorted(allowed)}"
