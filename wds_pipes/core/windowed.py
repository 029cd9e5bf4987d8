"""Stages that arrange a window of samples at a time."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from wds_pipes.core.options import check_count
from wds_pipes.core.reads_again import ReadsAgain
from wds_pipes.core.running import Out
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.errors import StateError


class Sized(NamedTuple):
    """A sample with its length."""

    sample: Any
    length: int


class Windowed(ReadsAgain[Out]):
    """The base of stages that take ``window`` samples at a time, arrange them in groups and yield
    something for each group. Some samples of a window may be left to the next one, which must use
    them.

    A position inside of a window is the position before it, and how many groups were yielded; if
    samples were carried over into it, it is the position before the window they come from, and a
    bit for each sample of that window.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):  # noqa: D106 - see Stage
        yielded: int = 0  # groups of the current window
        carried: str = ""  # which samples of the window before were carried over: bits, as a hexadecimal number
        delivered: int = 0
        dropped: int = 0

    tallies = ("delivered", "dropped")
    scope = "window"

    def __init__(self, source: Stage[Any], length: str | Callable[[Any], int], window: int) -> None:
        super().__init__(source)
        if not isinstance(length, str) and not callable(length):
            raise TypeError(f"length must be the name of a field or a function, not {length!r:.80}")
        self.length, self.window = length, check_count("window", window)

    @abstractmethod
    def sized(self, sample: Any) -> Sized:
        """Return a sample with its length; StateError or SampleError if it is wrong."""

    @abstractmethod
    def arranged(
        self, held: Sequence[Sized], window: Sequence[Sized], *, last: bool
    ) -> tuple[list[list[Sized]], list[Sized]]:
        """Return the groups of a window in their order, and what is left of it to the next one.

        Args:
            held: the samples that were carried over; each is in a group, or dropped.
            window: the samples.
            last: the epoch ends after this window.
        """

    @abstractmethod
    def joined(self, group: Sequence[Sized]) -> Out:
        """Return what is yielded for a group."""

    def had_items(self, at: Any) -> bool:
        return bool(at.yielded or at.carried)

    def problem(self, at: Any) -> str | None:
        if not re.fullmatch("[0-9a-f]*", at.carried) or _bits(at.carried).bit_length() > self.window:
            return f"{at.carried!r:.40} does not say which of {self.window} samples are carried over"
        return None

    def run(self) -> Iterator[Out]:
        at, source = self.at, self.source
        before, again, last = source.mark(), _bits(at.carried), False
        window = islice(source.items, self.window) if again else ()
        held = [self.sized(sample) for number, sample in enumerate(window) if again >> number & 1]
        if len(held) < again.bit_count():
            raise self._unlike()
        while not last:
            begin = source.mark()
            samples = [self.sized(sample) for sample in islice(source.items, self.window)]
            self.check_again()
            last = len(samples) < self.window
            groups, left = self.arranged(held, samples, last=last)
            if len(groups) < at.yielded:
                raise self._unlike()
            if not at.yielded:
                at.dropped += len(held) + len(samples) - sum(map(len, groups)) - len(left)
            self.earlier = before if held else begin
            for number, group in enumerate(groups[at.yielded :], at.yielded + 1):
                joined = self.joined(group)
                at.yielded = number
                at.delivered += len(group)
                yield joined
            carried = set(map(id, left))
            held = [sample for sample in samples if id(sample) in carried]
            bits = sum((id(sample) in carried) << number for number, sample in enumerate(samples))
            at.carried, at.yielded, before = f"{bits:x}" if bits else "", 0, begin
            self.earlier = before if held else None
        self.earlier = None  # for the counts of the whole epoch

    def _unlike(self) -> StateError:
        return StateError(
            f"{functional_name(type(self))}() made fewer groups of the same samples than before the state was saved: "
            "let the steps before it return the same samples each time."
        )


def _bits(carried: str) -> int:
    return int(carried, 16) if carried else 0
