"""Every tutorial runs, prints what it shows, and needs only what its first lines install.

After a change of a notebook: ``python tests/support/documents.py tutorials/05_s3_gcs_http.ipynb``,
which runs it and stores what it prints. A cell whose numbers differ from run to run, such as times,
has the tag ``varies``; one whose words do, since it says what limits this machine, ``measures``.
"""

import ast
import importlib.metadata
import json
import re
import sys
import tempfile
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from documents import ROOT, TUTORIALS, Notebooks, cells_of, run_script
from packaging.requirements import Requirement

import wds_pipes as wp
from wds_pipes.codecs.table import encode

FOLDER = ROOT / "tutorials"
# They start processes, which must also work where these are not forked. What 03 and 07 start are
# training programs, which have tests of their own.
WITH_PROCESSES = [path for path in TUTORIALS if path.stem[:2] in ("04", "08", "12", "13")]


without_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is large, so it has a part of CI of its own")


def named(paths):
    return [
        pytest.param(path, id=path.stem, marks=[without_ray] if path.stem == "14_clusters" else []) for path in paths
    ]


def program_of(path):
    """A tutorial as a script. Worker processes that are not forked do not run it again."""
    return "\n\n".join(["__file__ = None", *cells_of(path, "code")])


def printed(outputs, *, varies):
    """What a cell has printed and drawn: text, and the kinds of pictures. With ``varies``, each
    number is a #.
    """
    shown = []
    for output in outputs:
        data = output.get("data", {})
        text = output.get("text", data.get("text/plain", ""))
        text = re.sub(r" *\d[\d.,]*(e[+-]\d+)?", " #", text) if varies else text
        kind = output.get("name", sorted(data))
        if shown and shown[-1][0] == kind:
            shown[-1][1] += text
        elif kind != "stderr":
            shown.append([kind, text])
    return shown


def test_they_are_all_there():
    assert [path.stem[:2] for path in TUTORIALS] == [f"{number:02d}" for number in range(1, len(TUTORIALS) + 1)]
    assert sorted(FOLDER.glob("*.ipynb")) == TUTORIALS


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_notebook_shows_what_its_cells_print(path):
    """Each cell that prints has an output, in one run from the first cell to the last, and nothing
    of the machine or the time is in it.
    """
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        assert cell["execution_count"] == number
        assert cell["outputs"] or not re.search(r"(?m)^print\(", "".join(cell["source"])), "".join(cell["source"])
        assert not re.search(r"(/home|/root|/work|/Users)/|site-packages", json.dumps(cell["outputs"]))


@pytest.mark.slow
@pytest.mark.parametrize("path", named(WITH_PROCESSES))
def test_it_runs_as_a_script_where_processes_are_not_forked(path):
    """From another directory than its own, and under forkserver, Python 3.14's default."""
    with tempfile.TemporaryDirectory() as directory:
        (script := Path(directory, "script", "tutorial.py")).parent.mkdir()
        script.write_text(program_of(path))
        done = run_script(script, "forkserver", directory)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_part_on_slurm_runs_without_ray(tmp_path):
    cells = json.loads((FOLDER / "14_clusters.ipynb").read_text())["cells"]
    end = next(number for number, cell in enumerate(cells) if "## Ray:" in "".join(cell["source"]))
    slurm = ["".join(cell["source"]) for cell in cells[:end] if cell["cell_type"] == "code"]
    (tmp_path / "slurm.py").write_text("\n\n".join(["__file__ = None", *slurm]))
    done = run_script(tmp_path / "slurm.py", "forkserver", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_training_of_03_resumes_where_processes_are_not_forked(tmp_path):
    """The program that it writes, once to the end and once again from the last checkpoint."""
    (chapter,) = (path for path in TUTORIALS if path.stem.startswith("03"))
    (program,) = re.findall(r'(?s)\nTRAINING = """\\\n(.*?)"""', program_of(chapter))
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "shards").mkdir()
    with wp.ShardWriter(str(tmp_path / "shards" / "%06d.tar"), max_samples=40) as writer:
        for number in range(160):
            image = np.full((32, 32, 3), number, np.uint8)
            writer.write({"__key__": f"{number:06d}", "jpg": image, "cls": number % 3})
    runs = [run_script(tmp_path / "train.py", "forkserver", str(tmp_path), "saved.pt", "13") for _ in range(2)]
    assert [(done.returncode, done.stderr) for done in runs] == [(0, "")] * 2
    whole, resumed = ([json.loads(line) for line in done.stdout.splitlines()] for done in runs)
    assert [told["step"] for told in whole] == list(range(1, 14))  # into the second epoch
    assert resumed == whole[10:]


@pytest.mark.slow
def test_the_training_script_runs_where_processes_are_not_forked():
    with tempfile.TemporaryDirectory() as directory:
        with wp.ShardWriter(f"{directory}/%06d.tar", max_samples=8, index=f"{directory}/index.json") as writer:
            for number in range(32):
                writer.write(
                    {"__key__": f"{number:06d}", "jpg": np.full((40, 56, 3), number, np.uint8), "cls": number % 2}
                )
        options = "--classes 2 --epochs 1 --batch-size 8 --workers 1 --shuffle 8 --size 32 --width 4 --log-every 1"
        data = ["--train", f"{directory}/index.json", "--val", f"{directory}/000000.tar", "--out", f"{directory}/out"]
        done = run_script(FOLDER / "train_resnet.py", "forkserver", directory, *data, *options.split())
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [facts["step"] for facts in told if "loss" in facts] == [1, 2, 3, 4]
    assert [facts for facts in told if "accuracy" in facts]


@pytest.fixture(scope="module")
def notebooks():
    runner = Notebooks()
    yield runner
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", named(TUTORIALS))
def test_it_runs(path, notebooks):
    import nbformat

    stored = nbformat.read(path, as_version=4).cells
    for cell, before in zip(notebooks.run(path).cells, stored, strict=True):
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr" or "Warning" not in output.text, output.text
        tags = cell.metadata.get("tags", [])
        now, shown = (printed(each.get("outputs", []), varies="varies" in tags) for each in (cell, before))
        if "measures" in tags:
            now, shown = ([kind for kind, _ in each] for each in (now, shown))
        assert now == shown, f"python tests/support/documents.py tutorials/{path.name}"


def write_mds(jpegs):
    from streaming import MDSWriter

    with MDSWriter(out="mds", columns={"image": "jpeg", "label": "int"}, size_limit=3000) as writer:
        for label, jpeg in enumerate(jpegs):
            writer.write({"image": jpeg, "label": label})


def write_litdata(jpegs):
    from litdata import Jpeg
    from litdata.streaming.cache import Cache

    cache = Cache("optimized", chunk_size=3)
    for label, jpeg in enumerate(jpegs):
        cache[label] = {"image": Jpeg(bytes=jpeg), "label": label}
    cache.done()
    cache.merge()


@pytest.mark.parametrize(("library", "write"), [("streaming", write_mds), ("litdata", write_litdata)])
def test_the_program_of_02_makes_shards_of_what_another_library_wrote(library, write, tmp_path, monkeypatch):
    pytest.importorskip(library, reason=f"{library}, whose data set is read, is not installed")
    monkeypatch.chdir(tmp_path)
    jpegs = [encode("jpg", np.full((6, 8, 3), 20 * number, np.uint8)) for number in range(7)]
    write(jpegs)
    text = "".join(cells_of(FOLDER / "02_folder_to_shards.ipynb", "markdown"))
    [program] = [code for code in re.findall(r"(?s)```python\n(.*?)```", text) if f"from {library} import" in code]
    exec(compile(program, library, "exec"), {"__name__": "__main__"})
    samples = [(sample["__key__"], sample["jpg"], sample["cls"]) for sample in wp.IndexedShards("train-*.tar")]
    assert samples == [(f"{label:09d}", jpeg, str(label).encode()) for label, jpeg in enumerate(jpegs)]


def installed_by(text):
    """The distributions that the first ``pip install`` in a text names, with those of wds_pipes
    itself and of the extras it names.
    """
    command = re.search(r"pip install ([^`\n]*)", text)[1]
    asked = [Requirement(word.strip("'")) for word in command.split()]
    names = {requirement.name for requirement in asked}
    assert "wds_pipes" in names
    extras = next(requirement.extras for requirement in asked if requirement.name == "wds_pipes")
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    for line in (
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ):
        names.add(Requirement(line).name)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


packages_distributions = cache(importlib.metadata.packages_distributions)  # which takes a second


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_it_imports_only_what_it_installs(path):
    head, *_, tail = cells_of(path, "markdown")
    assert "**You learn**" in head
    assert "**You need**" in head
    assert "What to read next" in tail
    allowed = installed_by(head) | {"ipython"}
    owners = packages_distributions()
    source = "\n".join(cells_of(path, "code"))
    programs = [
        (FOLDER / name).read_text() for name in re.findall(r"\"(\w+\.py)\"", source) if (FOLDER / name).exists()
    ]
    programs += re.findall(r'(?s)"""\\\n(.*?)"""', source)  # that it writes
    for node in (node for text in (source, *programs) for node in ast.walk(ast.parse(text))):
        modules = (
            [name.name for name in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for module in {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names):
            found = {re.sub(r"[-_.]+", "-", name).lower() for name in owners.get(module, [module])}
            assert found & allowed, f"{module} is not in what the head says to install: {sorted(allowed)}"
