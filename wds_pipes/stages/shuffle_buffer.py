"""ShuffleBuffer: shuffle samples in a window; its position is two numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from wds_pipes.core.lane import LaneFacts
from wds_pipes.core.options import check_count
from wds_pipes.core.order import below
from wds_pipes.core.running import Mark, Out
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import read_count

_JITTER = 2  # the salt of the jitter
_MOST = 1 << 53  # the most samples of an epoch: the numbers, plus the jitter and a block, fit into 64 bits


class ShuffleBuffer(Stage[Out]):
    """Shuffle samples within a moving window (functional name: ``shuffle_buffer``).

    Sample i gets the key ``i + jitter``. The jitter is a function of (seed, epoch, lane, i) and is
    uniform over 0 to 2 * size - 1. Samples leave in the order of their keys. So about ``size``
    samples are held (never more than 2 * size), a sample leaves at most 2 * size - 1 places late,
    and the first samples leave at once: they do not wait until the buffer is full. Which samples
    are held follows from how many have left, so no sample needs to be saved. The displacement has a
    standard deviation of 0.58 * size. Put this step before decoding, where samples are small.

    Args:
        source: any pipe.
        size: how many samples are held on average, at least 1 (which keeps the order as it is).
        seed: an integer to shuffle by, instead of the seed of ``ShardList``.

    Checkpoint: two numbers, and an earlier position of the source. A resume reads at most
    2.25 * size samples again to fill the buffer. Until the epoch ends, ``counts()`` reports the
    steps before this one as they were at that earlier position.
    """

    @dataclass(slots=True)
    class At:
        first: int = 0  # the number of the sample at the saved position of the source; all samples before it have left
        left: int = 0  # how many samples have left

    keeps_count = True
    order_options = ("size", "own_seed")
    counts_items = True

    def __init__(self, source: Stage[Out], size: int, *, seed: int | None = None) -> None:
        super().__init__(source)
        self.size = check_count("size", size)
        if size > 1 << 30:
            raise ValueError(f"size must be at most 2**30, not {size}")
        self.own_seed = None if seed is None else check_count("seed", seed, least=-(1 << 63))
        self.holds = 0  # while running, about how many samples are held
        self._before: Mark | None = None  # while running, the position of the source at sample ``at.first``

    @property
    def held_items(self) -> int:
        return self.holds

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        left, first = (read_count(entry.get(name, 0), repr(name)) for name in ("left", "first"))
        return f"shuffle at {left:,}, read again from its sample {first:,}"

    def problem(self, at: Any) -> str | None:
        window = 2 * self.size
        if at.left > _MOST:
            return f"no epoch has more than {_MOST} samples"
        if not at.first <= at.left <= at.first + window + 2 * max(1, window // 16):
            return f"a buffer that starts at sample {at.first} cannot have yielded this number of samples"
        return None

    def run(self) -> Iterator[Out]:
        at, source, window = self.at, self.source, 2 * self.size
        assert source is not None
        lane = self.lane if self.own_seed is None else replace(self.lane, seed=self.own_seed)
        key = lane.key(_JITTER, self.depth)
        step = max(1, window // 16)  # a position of the source is kept for each step
        block = step * (1 + 2048 // step)  # the order is computed for one block at a time
        held: list[Any] = [None] * window  # sample i is at place i % window: it leaves before sample i + window arrives
        numbers = keys = np.empty(0, np.int64)  # of the waiting samples, in the order in which they leave
        left, resumed = at.first, at.left  # samples that had left before this position are read again and dropped
        self._before = source.mark()
        marks = deque([(at.first, self._before)])
        edge = at.first + step
        for start in count(at.first, block):
            new = np.arange(start, start + block)
            numbers, keys = (
                np.concatenate([numbers, new]),
                np.concatenate([keys, new + below(window, key, start, block)]),
            )
            order = np.argsort(keys, kind="stable")
            numbers, keys = numbers[order], keys[order]
            leaving = int(np.searchsorted(keys, start + block))
            places = iter((numbers[:leaving] % window).tolist())
            turns = iter([*keys[:leaving].tolist(), -1])
            turn = next(turns)
            number = start - 1
            for number, item in zip(range(start, start + block), source.items, strict=False):
                held[number % window] = item
                while turn == number:
                    place = next(places)
                    left += 1
                    if left > resumed:
                        at.left = left
                        yield held[place]
                    held[place] = None
                    turn = next(turns)
                if number + 1 == edge:
                    # Every sample that leaves from here on has a key of at least `edge`, so it
                    # arrived less than `window` samples ago.
                    marks.append((edge, source.mark()))
                    while marks[1][0] <= edge - window + 1:
                        marks.popleft()
                    at.first, self._before = marks[0]
                    edge += step
            if number < start + block - 1:
                break
            numbers, keys = numbers[leaving:], keys[leaving:]
            self.holds = len(numbers)
        rest = numbers[numbers <= number][leaving - len(list(places)) :]
        for place in (rest % window).tolist():
            left += 1
            if left > resumed:
                at.left = left
                yield held[place]
            held[place] = None
        at.first, self._before = left, source.mark()  # for the counts of the whole epoch

    def mark(self) -> Mark:
        return self._own(self.at), self._before or self.source.mark()  # type: ignore[union-attr]
