"""Items of a chain by their numbers, for a step that resumes without reading its source again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic

from wds_pipes.core.counts import Lack, Network
from wds_pipes.core.running import Mark, Out, running_copy

if TYPE_CHECKING:
    from wds_pipes.core.stage import Stage


class Numbered(ABC, Generic[Out]):
    """The items that a chain yields after a position, by their numbers from there: 0 is the next
    one. ``Stage.numbered`` returns it.

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
        """Return what ``Stage.opened`` is when an item is the next one."""

    @abstractmethod
    def read(self, numbers: Iterable[int]) -> Iterator[Out]:
        """Yield items, in this order. A bounded number is read ahead."""

    @property
    @abstractmethod
    def network(self) -> Network:
        """What reading them has used of the network in this process."""

    @abstractmethod
    def stall_clock(self) -> Callable[[], float]:
        """Return what ``Stage.stall_clock`` returns."""


class NumberedItems(Numbered[Any]):
    """The items of a step that makes each of one item of its source: see ``Stage.one_of_each``.

    Args:
        step: the step, not running.
        own: its own values in the position.
        before: the items of its source.
    """

    def __init__(self, step: Stage[Any], own: tuple[Any, ...], before: Numbered[Any]) -> None:
        self._step, self._own, self._before, self.count = step, own, before, before.count

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
        step.at, step.source = step._at(None), _Given(self._before.read(numbers))  # type: ignore[assignment]
        step.items = step.run()
        try:
            yield from step.items
        finally:
            step.close()

    @property
    def network(self) -> Network:
        return self._before.network

    def stall_clock(self) -> Callable[[], float]:
        return self._before.stall_clock()


class _Given:
    """What a running step uses of its source, for items without a position."""

    chain: tuple[Stage[Any], ...] = ()
    opened = 0
    lack = Lack()  # what the steps before leave out is not known

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items

    def mark(self) -> Mark:
        return (), None

    def close(self) -> None:
        """Stop reading the items."""
        self.items.close()  # type: ignore[attr-defined]
