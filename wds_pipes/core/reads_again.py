"""Stages that keep an earlier position of their source, and read items again at a resume."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from wds_pipes.core.chain import Chain
from wds_pipes.core.lane import Lane
from wds_pipes.core.running import Mark, Out
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.errors import StateError

_SKIPPED = ("skipped", "skipped_shards", "damaged")


class ReadsAgain(Stage[Out]):
    """The base of stages whose mark has an earlier position of their source, ``earlier``. A resume
    reads the items after it again, up to those that the stage had when the state was saved.

    They must be the same items. If the steps before skip other data than before, such as a shard
    that has gone since, later items would be dropped in place of its own. So a position says how
    much these steps had skipped since ``earlier``, and ``check_again`` compares it.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        skips: int = 0  # how much the steps before this one have skipped since ``earlier``

    source: Stage[Any]
    # while running, how much the steps before will have skipped when all is read again; None: it is
    _again: int | None = None
    _happened = 0  # while running, ``Tolerant.happened`` when it was opened
    _counted: tuple[Mark | None, int] = (None, 0)  # while running, ``earlier``, and how much was skipped up to there

    def had_items(self, at: Any) -> bool:
        """Return whether, at a position, items were yielded that a resume makes again and drops."""
        raise NotImplementedError

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Out]:
        running = cast(ReadsAgain[Out], super().open(lane, mark))
        running._happened = Tolerant.happened
        if mark is not None and self.had_items(running.at):
            running._again = self._skips(mark[1]) + running.at.skips
        else:
            running.at.skips = 0
        return running

    def check_again(self, *, whole: bool = True) -> None:
        """Compare what was skipped, when the items are read again.

        Args:
            whole: all of them are there.

        Raises:
            StateError: they are other items.
        """
        again, self._again = self._again, None
        if again is not None and not (whole and again == self._skips(self.source.mark())):
            raise StateError(
                f"{functional_name(type(self))}() reads samples again that came before the state was saved, and the "
                "steps before it skip other data now than they did then: other samples would be lost. Restore the "
                f"shards, or start the epoch anew.{Chain(self.source).lack.first_skip}"
            )

    @cached_property
    def _before(self) -> Chain:
        """The chain before this stage, for the counts at its positions."""
        return Chain(self.source)

    def _skips(self, mark: Mark | None) -> int:
        """Return how much the steps before had skipped at a position of the source."""
        counts = self._before.counts(mark, 0)
        return sum(counts.get(name, 0) for name in _SKIPPED)

    def mark(self) -> Mark:
        if self._again is None and self._happened != Tolerant.happened:  # else nothing was skipped
            earlier = self.earlier
            if self._counted[0] is not earlier:
                self._counted = earlier, self._skips(earlier)
            self.at.skips = 0 if earlier is None else self._skips(self.source.mark()) - self._counted[1]
        return super().mark()
