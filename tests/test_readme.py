"""What the README shows runs, in one go, as it is printed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from wds_pipes.cli.demo import write_images

README = Path(__file__).parents[1] / "README.md"


def snippets():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What the snippets read: the shards of the demo, and a folder of photos of many sizes."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "wds-pipes-demo").mkdir()
    write_images(directory / "wds-pipes-demo" / "shards", 3072)
    for number in range(40):
        path = directory / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (200 + number, 300 - number)).save(path)
    return directory


@pytest.fixture(autouse=True)
def here(data, tmp_path, monkeypatch):
    """A working directory with a copy of that."""
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def test_every_snippet_runs():
    assert len(snippets()) >= 7
    names = {"__name__": "__main__"}
    for number, snippet in enumerate(snippets()):
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), names)


def test_the_first_snippet_runs_as_a_script_where_workers_are_not_forked():
    """As from Python 3.14 on, and on other systems."""
    Path("script.py").write_text(snippets()[0])
    start = "import multiprocessing, runpy; multiprocessing.set_start_method('forkserver'); runpy.run_path('script.py', run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_first_lines_install_show_and_test():
    lines = README.read_text().splitlines()
    install = ".venv/bin/pip install -U pip && .venv/bin/pip install torch==2.13.0 -e . --group dev"
    assert lines[1] == f"python3 -m venv .venv && {install} && .venv/bin/wds-pipes demo"
    assert lines[2] == ".venv/bin/python -m pytest"


def test_every_step_is_in_the_table():
    from wds_pipes import stages
    from wds_pipes.stage import functional_name

    table = README.read_text().split("## The steps")[1].split("##")[0]
    for name in stages.__all__:
        assert f"`{name if name == 'ShardList' else functional_name(getattr(stages, name))}(" in table
