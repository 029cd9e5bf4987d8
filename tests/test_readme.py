"""The code of the README runs as printed, in one session."""

import shutil
from pathlib import Path

import pytest
from documents import ROOT, run_script, snippets, write_data

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    write_data(directory)
    return directory


@pytest.fixture(autouse=True)
def here(data, tmp_path, monkeypatch):
    """A working directory with a copy of the data."""
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_every_snippet_runs():
    assert len(snippets()) >= 7
    names = {"__name__": "__main__"}
    for number, snippet in enumerate(snippets()):
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), names)


@pytest.mark.slow
def test_the_first_snippet_runs_as_a_script_where_workers_are_not_forked():
    """As from Python 3.14 on, and on other systems."""
    Path("script.py").write_text(snippets()[0])
    done = run_script(Path("script.py").absolute(), "forkserver", str(Path.cwd()))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_snippet_with_torchdata_prints_no_warning():
    [snippet] = [snippet for snippet in snippets() if "StatefulDataLoader(pipe" in snippet]
    Path("script.py").write_text(f"import wds_pipes as wp\n{snippet}")
    done = run_script(Path("script.py").absolute(), "forkserver", str(Path.cwd()))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_lines_install_show_and_test():
    lines = README.read_text().splitlines()
    install = ".venv/bin/pip install -U pip && .venv/bin/pip install torch==2.13.0 -e . --group dev"
    assert lines[1] == f"python3 -m venv .venv && {install} && .venv/bin/wds-pipes demo"
    assert lines[2] == ".venv/bin/python -m pytest"


def test_every_step_is_in_the_table():
    from wds_pipes import stages
    from wds_pipes.core.stage import functional_name

    table = README.read_text().split("## The steps")[1].split("##")[0]
    for name in stages.__all__:
        step = name if name in ("ShardList", "SampleList") else functional_name(getattr(stages, name))
        assert f"`{step}(" in table, f"add {step}() to the table in README.md, 'The steps'"
