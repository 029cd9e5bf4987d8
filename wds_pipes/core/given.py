"""Run a single step over items, without the steps before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_pipes.core.lane import Lane
from wds_pipes.core.running import Mark, begin, running_copy
from wds_pipes.core.stage import Stage


class Given(Stage[Any]):
    """Items without a position, as the source of a running step. What the steps before leave out
    is not known.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__()
        self.items = items

    def run(self) -> Iterator[Any]:
        return self.items

    def mark(self) -> Mark:
        return (), None


def run_over(step: Stage[Any], lane: Lane, source: Stage[Any]) -> Stage[Any]:
    """Return a running copy of a step, from its beginning, over a source that runs."""
    running = running_copy(step)
    running.lane, running.at, running.source = lane, step._at(None), source
    begin(running, None)
    return running
