"""``python tests/bench/peers`` runs. The documentation shows what it writes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "tutorials" / "docs"


def test_the_chart_of_the_first_page_shows_the_figures_of_the_table(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "bench")
    report = importlib.import_module("peers.report")
    assert report.short_chart(json.loads((DOCS / "peers.json").read_text())) == (DOCS / "rates.svg").read_text()


@pytest.mark.slow
def test_a_quick_run_writes_table_and_json(tmp_path):
    """A row of a limit, and one of this package, whose resume is exact."""
    script = Path(__file__).parent / "bench" / "peers"
    rows = ["limit: header walk", "wds_pipes"]
    only = [argument for row in rows for argument in ("--only", row)]
    subprocess.run([sys.executable, script, "--quick", "--out", tmp_path, *only], check=True)
    cells = {row["name"]: row["cells"] for row in json.loads((tmp_path / "peers.json").read_text())["rows"]}
    assert list(cells) == rows
    assert cells["wds_pipes"]["resume"]["outcome"] == "exact"
    assert cells["limit: header walk"]["raw tiny"]["median"] > 0
    assert cells["limit: header walk"]["decoded"] == {"reason": "it does not decode"}
    assert "it does not decode" in (tmp_path / "peers.md").read_text()
