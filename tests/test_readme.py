"""The code of the README runs as printed, each snippet by itself."""

import re
import shutil
from code import InteractiveConsole
from pathlib import Path

import pytest
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
    console = InteractiveConsole({"__name__": "__main__"})
    for line in [*snippets()[number].splitlines(), ""]:
        console.push(line)
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert shown.err == ""


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_training_loop_goes_on_after_it_is_killed():
    """As the README shows it; with workers that are not forked, as from Python 3.14 on."""
    snippet = snippets()[LOOP]
    killed = snippet.replace("step += 1  # train here", "step += 1\n            if step == 70: os._exit(9)")
    Path("killed.py").write_text(killed)
    done = run_script(Path("killed.py").absolute(), "forkserver", str(Path.cwd()))
    assert (done.returncode, done.stdout) == (9, "")
    Path("script.py").write_text(snippet)
    done = run_script(Path("script.py").absolute(), "forkserver", str(Path.cwd()))
    assert (done.returncode, done.stderr) == (0, "")
    [shown] = re.findall(r"(?ms)^```text\n(.*?)^```", README.read_text())
    assert done.stdout == shown


def test_two_lines_install_show_and_test():
    text = README.read_text()
    [block] = re.findall(r"(?ms)^```sh\n(.*?)^```", text)
    install = ".venv/bin/pip install -c .ci/constraints.txt"
    assert block.splitlines() == [
        f"python3 -m venv .venv && {install} -U pip && {install} -e '.[demo]' && .venv/bin/wds-pipes demo",
        f"{install} -e . --group dev && .venv/bin/python -m pytest",
    ]
    assert len(text.splitlines()) <= 130
    for snippet in snippets():
        assert max(map(len, snippet.splitlines())) <= 88
