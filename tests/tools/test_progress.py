"""How far a command is."""

import pytest

from wds_pipes.tools import progress as module
from wds_pipes.tools.progress import progress

LINES = "2 of 3 shards, about 0 min left\n3 of 3 shards, about 0 min left\n"


@pytest.mark.parametrize(("show", "printed"), [(False, ""), (None, LINES), (True, "3/3")])
def test_what_is_shown_of_three_shards_of_which_one_was_done_before(show, printed, capsys, monkeypatch):
    if show:
        pytest.importorskip("tqdm")
    monkeypatch.setattr(module, "_LINE_SECONDS", 0)
    with progress(3, "shard", show=show, done=1) as advance:
        for _ in range(2):
            advance(1)
    found = capsys.readouterr()
    assert found.out == ""
    assert printed in found.err if show else printed == found.err
