"""Stages that make several items of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.reads_again import ReadsAgain
from wds_pipes.core.running import END, Out
from wds_pipes.core.stage import functional_name
from wds_pipes.errors import StateError


class FlatMap(ReadsAgain[Out]):
    """The base of stages that make any number of items of each item of their source: a subclass
    writes ``expand``.

    A position inside of an item is the position before that item, and how many items were already
    made of it. So a resume reads the item again, makes its items again and leaves out the first
    ones: no item is lost or comes twice, and the state holds no data.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):  # noqa: D106 - see Stage
        taken: int = 0  # items that were made of the current item

    expands = True
    scope = "window"

    def had_items(self, at: Any) -> bool:
        return bool(at.taken)

    @abstractmethod  # see ``wds_pipes.core.stage.unfinished``
    def expand(self, item: Any) -> Iterable[Out]:
        """Return the items that are made of an item; the same ones each time, since a resume
        makes them again.
        """
        raise NotImplementedError

    def run(self) -> Iterator[Out]:
        source, at = self.source, self.at
        while True:
            before = source.mark()
            item = next(source.items, END)
            if item is END:
                if at.taken:
                    raise self._unlike(0, at.taken)
                return
            self.check_again()
            self.earlier, resumed, number = before, at.taken, 0
            for number, made in enumerate(self.expand(item), 1):
                if number > resumed:
                    at.taken = number
                    yield made
            if number < resumed:
                raise self._unlike(number, resumed)
            at.taken, self.earlier = 0, None

    def _unlike(self, made: int, resumed: int) -> StateError:
        return StateError(
            f"{functional_name(type(self))}() made {made} items of one of which it had made {resumed} before the state "
            "was saved: let it, and the steps before it, return the same items each time."
        )
