"""ShuffleBuffer: another order, with a position of three numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from wds_pipes.ordering import below
from wds_pipes.stage import Mark, Out, Stage, check_count

_JITTER = 2  # the salt of the jitter


class ShuffleBuffer(Stage[Out]):
    """Shuffle samples within a moving window (functional name: ``shuffle_buffer``).

    Sample i gets the key ``i + jitter``, where jitter is a function of (seed, epoch, lane, i), evenly spread over 0 to 2 * size - 1, and samples leave in the
    order of their keys. So about ``size`` samples are held (never more than 2 * size), a sample leaves at most 2 * size - 1 places late, and the first
    ones leave at once instead of after the buffer is full. What is held is a function of how many samples were taken in, which is why no sample needs to be
    saved. The displacement has a standard deviation of 0.58 * size. Put it before decoding, where samples are small.

    Args:
        source: any pipe.
        size: how many samples are held on average, at least 1.
        seed: an integer to shuffle by instead of the seed of ``ShardList``.

    Checkpoint: three numbers, and an earlier position of the source: a resume reads at most 2.25 * size + 1 samples again to fill the buffer.
    """

    @dataclass(slots=True)
    class At:
        first: int = 0  # the number of the sample that the source's position stands at
        turn: int = -1  # the key whose samples leave now
        given: int = 0  # how many of them have left

    order_options = ("size", "own_seed")

    def __init__(self, source: Stage[Out], size: int, *, seed: int | None = None) -> None:
        super().__init__(source)
        self.size = check_count("size", size)
        if size > 1 << 30:
            raise ValueError(f"size must be at most 2**30, not {size}")
        self.own_seed = None if seed is None else check_count("seed", seed, least=-(1 << 63))
        self._marks: deque[tuple[int, Mark]] = deque()

    def run(self) -> Iterator[Out]:
        at, source, window = self.at, self.source, 2 * self.size
        assert source is not None
        lane = self.lane if self.own_seed is None else replace(self.lane, seed=self.own_seed)
        key = lane.key(_JITTER, self.depth)
        step = max(1, window // 8)
        # Bucket k % window holds the samples with key k: at most `window` keys are waiting at a time.
        buckets: list[list[Out]] = [[] for _ in range(window)]
        marks = self._marks = deque()
        number, resumed = at.first, at.turn
        full = True
        while full:
            start = number
            marks.append((number, source.mark()))
            places = np.arange(number, number + step) + below(window, key, number, step)
            for place, slot, item in zip(places.tolist(), (places % window).tolist(), source.items, strict=False):
                if place >= resumed:
                    buckets[slot].append(item)
                if number >= resumed:
                    ready = buckets[number % window]
                    if ready:
                        given = at.given if number == resumed else 0
                        at.turn = number
                        for at.given, item in enumerate(ready[given:], given + 1):
                            yield item
                        ready.clear()
                number += 1
            full = number == start + step
        for turn in range(max(number, resumed), number + window):
            ready = buckets[turn % window]
            given = at.given if turn == resumed else 0
            at.turn = turn
            for at.given, item in enumerate(ready[given:], given + 1):
                yield item
            ready.clear()

    def mark(self) -> Mark:
        at, marks, source = self.at, self._marks, self.source
        assert source is not None
        # What waits, or leaves in this turn, came in at most `window - 1` samples before it.
        oldest = at.turn - 2 * self.size + 1
        while len(marks) > 1 and marks[1][0] <= oldest:
            marks.popleft()
        if not marks:
            return (at.first, at.turn, at.given), source.mark()
        first, before = marks[0]
        return (first, at.turn, at.given), before
