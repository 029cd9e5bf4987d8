"""Items of a chain by their numbers, for a step that resumes without reading its source again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic

from wds_pipes.core.counts import Network
from wds_pipes.core.lane import Lane
from wds_pipes.core.running import Mark, Out, running_copy
from wds_pipes.core.stage import Stage


class Numbered(ABC, Generic[Out]):
    """The items that a chain yields after a position, by their numbers from there: 0 is the next
    one. ``Chain.numbered`` returns it.

    Attributes:
        count: how many there are, to the end of the lane.
        bytes_read: how many bytes of shards were read for the items that were yielded.
    """

    count: int
    bytes_read = 0

    @abstractmethod
    def prepare(self, count: int) -> bool:
        """Prepare to read the first ``count`` items; return whether all of them can be read."""

    @abstractmethod
    def mark(self, number: int) -> Mark:
        """Return the position of the chain before an item, without reading shards."""

    @abstractmethod
    def opened(self, number: int) -> int:
        """Return what ``Chain.opened`` is when so many items have come."""

    @abstractmethod
    def read(self, numbers: Iterable[int]) -> Iterator[Out]:
        """Yield items, in this order. A bounded number is read ahead."""

    @property
    @abstractmethod
    def network(self) -> Network:
        """What reading them has used of the network in this process."""


class NumberedItems(Numbered[Any]):
    """The items of a step that makes each of one item of its source.

    Args:
        step: the step, not running.
        own: its own values in the position.
        lane: the lane.
        before: the items of its source.
    """

    def __init__(self, step: Stage[Any], own: tuple[Any, ...], lane: Lane, before: Numbered[Any]) -> None:
        self._step, self._own, self._lane, self._before, self.count = step, own, lane, before, before.count

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self._before.bytes_read

    def prepare(self, count: int) -> bool:
        return self._before.prepare(count)

    def mark(self, number: int) -> Mark:
        return self._own, self._before.mark(number)

    def opened(self, number: int) -> int:
        return self._before.opened(number)

    def read(self, numbers: Iterable[int]) -> Iterator[Any]:
        step = running_copy(self._step)
        step.lane, step.at = self._lane, step._at(None)
        step.source = Given(self._before.read(numbers))
        step.items = step.run()
        try:
            yield from step.items
        finally:
            step.close()

    @property
    def network(self) -> Network:
        return self._before.network


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
