"""How far a command is."""

import pytest

from wds_pipes.tools import progress as module
from wds_pipes.tools.progress import progress


@pytest.fixture
def shown(capsys, monkeypatch):
    """What is printed for three shards, of which one was done before."""
    monkeypatch.setattr(module, "_LINE_SECONDS", 0)

    def of(show):
        with progress(3, "shard", show=show, done=1) as advance:
            for _ in range(2):
                advance(1)
        printed = capsys.readouterr()
        assert not printed.out
        return printed.err

    return of


def test_nothing_is_shown(shown):
    assert shown(False) == ""


def test_lines(shown):
    assert shown(None) == "2 of 3 shards, about 0 min left\n3 of 3 shards, about 0 min left\n"


def test_a_bar(shown):
    pytest.importorskip("tqdm")
    assert "3/3" in shown(True)
