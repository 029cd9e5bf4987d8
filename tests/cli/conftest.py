"""Commands try failed tasks again at once."""

import pytest

from wds_pipes.tools import jobs as running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(running, "_PAUSE_SECONDS", 0.01)
