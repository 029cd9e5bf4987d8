"""The code of the README runs as printed, each snippet by itself."""

import shutil
from code import InteractiveConsole
from pathlib import Path

import pytest
from commands import run_command
from documents import ROOT, run_script, snippets, write_data

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    write_data(directory)
    return directory


@pytest.fixture
def here(data, tmp_path, monkeypatch):
    """A working directory with a copy of the data."""
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


LOOP = next(number for number, snippet in enumerate(snippets()) if "run.pt" in snippet)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("number", range(len(snippets())))
def test_each_snippet_runs_when_it_is_pasted_into_python_and_prints(number, capsys):
    """Where an empty line ends a class or a function."""
    run_command("create", "photos", "shards", "--from", "classes", "--shuffle", 7)  # as the README says
    console = InteractiveConsole({"__name__": "__main__"})
    for line in [*snippets()[number].splitlines(), ""]:
        console.push(line)
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert shown.err == ""


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_training_loop_goes_on_after_it_is_killed():
    """With workers that are not forked, as from Python 3.14 on, and on other systems."""
    snippet = snippets()[LOOP]
    Path("killed.py").write_text(snippet.replace('"run.pt")  # a crash', '"run.pt"); os._exit(9)  # a crash'))
    done = run_script(Path("killed.py").absolute(), "forkserver", str(Path.cwd()))
    assert (done.returncode, done.stdout) == (9, "")
    Path("script.py").write_text(snippet)
    done = run_script(Path("script.py").absolute(), "forkserver", str(Path.cwd()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "96 steps in 2 epochs\n"


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_snippet_with_torchdata_prints_no_warning():
    [snippet] = [snippet for snippet in snippets() if "StatefulDataLoader(" in snippet]
    Path("script.py").write_text(snippet)
    done = run_script(Path("script.py").absolute(), "forkserver", str(Path.cwd()))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_lines_install_show_and_test():
    lines = README.read_text().splitlines()
    install = ".venv/bin/pip install -c .ci/constraints.txt"
    demo = f"{install} -U pip && {install} -e '.[demo]' && .venv/bin/wds-pipes demo"
    assert lines[2] == f"python3 -m venv .venv && {demo}"
    assert lines[3] == f"{install} -e . --group dev && .venv/bin/python -m pytest"
    assert len(lines) <= 200


def test_every_step_is_in_the_table():
    from wds_pipes import stages
    from wds_pipes.core.stage import functional_name

    table = README.read_text().split("## The steps")[1].split("##")[0]
    for name in stages.__all__:
        step = name if name in ("ShardList", "SampleList") else functional_name(getattr(stages, name))
        assert f"`{step}(" in table, f"add {step}() to the table in README.md, 'The steps'"
