"""What editors and type checkers see agrees with what runs, and they find the mistakes in a user's
file.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typing_stubs import stubs

import wds_pipes as wp
from wds_pipes import nodes

FILES = Path(__file__).parent / "typing"
WRONG = {
    number: dict(part.split(": ") for part in line.partition("  # ")[2].split(", "))
    for number, line in enumerate((FILES / "wrong.py").read_text().splitlines(), 1)
    if "# mypy: " in line
}
REVEALED = {
    number: line.partition("  # ")[2]
    for number, line in enumerate((FILES / "right.py").read_text().splitlines(), 1)
    if line.strip().startswith("reveal_type(")
}


def test_editors_see_the_signatures_of_the_steps_and_all_public_names():
    """If this fails, run ``python tests/support/typing_stubs.py``."""
    for path, text in stubs().items():
        assert path.read_text() == text


def test_steps_have_help_and_whole_signatures(urls, capsys):
    pipe = wp.ShardList(urls)
    help(pipe.shuffle_buffer)
    shown = capsys.readouterr().out
    assert "\nshuffle_buffer(size, *, seed=None) -> wds_pipes.datapipes.pipe.WdsPipe method of" in shown
    assert "size: how many samples are held on average" in shown
    for kind in (wp.ShardList, wp.mix, nodes.ShuffleBuffer, nodes.Mix):
        assert "->" not in str(inspect.signature(kind))
    assert list(inspect.signature(wp.ShardList).parameters)[:2] == ["urls", "shuffle"]


@pytest.fixture
def files(tmp_path):
    """A directory with a user's files only: the package is found where it is installed."""
    for name in ("right.py", "wrong.py", "mypy.ini"):
        shutil.copy(FILES / name, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_mypy_strict(files):
    command = [sys.executable, "-P", "-m", "mypy", "--cache-dir=/dev/null", "right.py", "wrong.py"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=files, check=False).stdout
    errors = re.findall(r"^(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", out, re.MULTILINE)
    assert {(file, int(line), code) for file, line, code in errors} == {
        ("wrong", line, codes["mypy"]) for line, codes in WRONG.items()
    }, out
    notes = re.findall(r'^right\.py:(\d+): note: Revealed type is "(.*)"$', out, re.MULTILINE)
    assert {
        int(line): re.sub(r"wds_pipes\.datapipes\.(pipe|signatures)\.", "", kind) for line, kind in notes
    } == REVEALED


@pytest.mark.slow
def test_pyright(files):
    pyright = [sys.executable, "-P", "-m", "pyright"]
    started = subprocess.run(
        [*pyright, "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    if started.returncode:
        pytest.skip(
            f"pyright cannot start here; at its first run it downloads itself by npm: {started.stderr.strip()[-200:]}"
        )
    command = [*pyright, "--pythonpath", sys.executable, "--outputjson", "right.py", "wrong.py"]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=files, check=False).stdout)[
        "generalDiagnostics"
    ]
    told = [(Path(each["file"]).stem, each["range"]["start"]["line"] + 1, each) for each in said]
    errors = {(file, line, each.get("rule")) for file, line, each in told if each["severity"] != "information"}
    assert errors == {("wrong", line, codes["pyright"]) for line, codes in WRONG.items()}
    revealed = {
        line: re.search(r' is "(.*)"$', each["message"])[1]
        for _, line, each in told
        if each["severity"] == "information"
    }
    assert revealed == REVEALED
