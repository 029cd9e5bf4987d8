"""What the README shows runs, in one go, as it is printed."""

import re
from pathlib import Path

import pytest

from wds_pipes.testing import make_shards

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle:UserWarning")
def test_every_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in make_shards("data", shards=4, samples=20, fields=("jpg", "cls")):
        Path(path).rename(path.replace("shard-", "train-"))
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(snippets) >= 6
    names: dict[str, object] = {"__name__": "readme"}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), names)


def test_the_first_lines_install_show_and_test():
    lines = README.read_text().splitlines()
    assert lines[1] == "python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 -e '.[dev]' && .venv/bin/wds-pipes demo"
    assert lines[2] == ".venv/bin/python -m pytest"


def test_every_step_is_in_the_table():
    from wds_pipes import stages
    from wds_pipes.stage import functional_name

    table = README.read_text().split("## The steps")[1].split("##")[0]
    for name in stages.__all__:
        assert f"`{name if name == 'ShardList' else functional_name(getattr(stages, name))}(" in table
