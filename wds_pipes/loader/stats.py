"""Where the time of a lane, and of whoever waits for it, goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple, cast

from wds_pipes.core.counts import NO_NETWORK, Network
from wds_pipes.core.stage import Stage

# Clocks cost as much as a tiny sample. So while pulls are quick, one in so many is timed and stands for all of them. At the beginning, and after one that was
# not quick, they are timed one by one. Waiting for bytes of a store comes at a few pulls only: it is measured apart, each time, where it happens.
_EVERY, _ONE_BY_ONE, _QUICK_SECONDS = 32, 64, 1e-4


class Spent(NamedTuple):
    """What a lane has used since it began in this pass.

    Attributes:
        busy: seconds in which its worker made batches of it.
        reading: seconds of these up to and with ``group_by_key``.
        bytes_read: of the decompressed tars.
        held: samples in shuffle buffers.
        process: the number of its process.
        network: what that has used of the network so far: see ``Stage.network``.
    """

    busy: float = 0.0
    reading: float = 0.0
    bytes_read: int = 0
    held: int = 0
    process: int = 0
    network: Network = NO_NETWORK


class _Runs(chain[Any]):
    """A generator's items in runs: the loop over them is not in Python, so that it costs a tiny sample next to nothing."""

    close: Callable[[], None]  # that of the generator


class Meter:
    """Measures a lane's chain while it runs."""

    def __init__(self) -> None:
        self.busy = self.waited = self._parsing = 0.0
        self._bytes_before = 0
        self._chain: list[Stage[Any]] = []

    def watch(self, chain: Stage[Any]) -> None:
        """Measure a chain that was just opened and has given nothing yet."""
        self._bytes_before = self.spent().bytes_read
        self._chain = []
        step: Stage[Any] | None = chain
        while step is not None:
            self._chain.append(step)
            if step.ends_reading:
                step.items = self._timed(step, step.items)
            # The steps before this one are run for each shard by itself.
            step = None if step.runs_chains else step.source

    def _timed(self, step: Stage[Any], items: Iterator[Any]) -> Iterator[Any]:
        timed = cast(_Runs, _Runs.from_iterable(self._runs(step, items)))
        timed.close = items.close  # type: ignore[attr-defined]
        return timed

    def _runs(self, step: Stage[Any], items: Iterator[Any]) -> Iterator[Iterable[Any]]:
        """``items`` in runs; those of one item are timed."""
        clock, stalled, end = time.perf_counter, step.stall_clock(), object()
        one_by_one = _ONE_BY_ONE
        while True:
            if not one_by_one:
                yield islice(items, _EVERY - 1)
            before, start = stalled(), clock()
            item = next(items, end)
            passed = clock() - start - (stalled() - before)
            self._parsing += passed if one_by_one else _EVERY * passed
            if item is end:
                return
            yield (item,)
            one_by_one = max(one_by_one - 1, 0) if passed < _QUICK_SECONDS else _ONE_BY_ONE

    def spent(self) -> Spent:
        """What was used so far."""
        read = self._chain[0].bytes_so_far if self._chain else 0
        held = sum(step.held_items for step in self._chain)
        network = self._chain[0].network if self._chain else NO_NETWORK
        return Spent(self.busy, min(self.waited + self._parsing, self.busy), self._bytes_before + read, held, os.getpid(), network)


class Tally:
    """What a pass over a loader gave, and how long its caller waited.

    ``network`` is what each process had used of the network when it was last heard of, and ``network_before`` the same when the pass began.
    """

    def __init__(self, network: dict[int, Network]) -> None:
        self.batches = 0
        self.stands: tuple[Any, int] | None = None  # where the pass is, and what is to be taken from the samples that were handed out by then
        self.waited = 0.0
        self.spent: dict[int, Spent] = {}  # by each lane, since its run began
        self._earlier = Spent()  # in the runs of the pass that are over, less what the first run had spent before the pass
        self.network, self._network_before = network, dict(network)
        self._since = self._until = 0.0

    def begin(self) -> None:
        """The pass begins."""
        self._since = time.perf_counter()

    def add(self, lane: int, spent: Spent) -> None:
        """Keep what a lane has used."""
        self.spent[lane] = spent
        self.network[spent.process] = spent.network

    def begin_run(self, going_on: Tally | None = None) -> None:
        """The lanes begin anew, in the next epoch of the data; or they go on from where another pass stopped."""
        if going_on is not None:
            self.spent = dict(going_on.spent)
            before = self._sum(Spent())
            self._earlier = Spent(-before.busy, -before.reading, -before.bytes_read)
        else:
            self._earlier, self.spent = self._sum(self._earlier), {}

    @property
    def total(self) -> Spent:
        """What the pass has used: of all lanes, in all runs; ``held`` now."""
        total = self._sum(self._earlier)
        reading = max(0.0, min(total.reading, total.busy))  # it is measured by samples
        return total._replace(reading=reading, held=sum(lane.held for lane in self.spent.values()))

    def _sum(self, earlier: Spent) -> Spent:
        parts = [earlier, *self.spent.values()]
        return Spent(sum(part.busy for part in parts), sum(part.reading for part in parts), sum(part.bytes_read for part in parts))

    def used(self) -> Network:
        """What the pass has used of the network."""
        before = self._network_before
        parts = [(total, before.get(process, NO_NETWORK)) for process, total in self.network.items()]
        return Network(*(sum(total[place] - begun[place] for total, begun in parts) for place in range(len(NO_NETWORK))))  # type: ignore[arg-type]

    def handed_over(self, asked: float) -> None:
        """A batch that was asked for at a time is handed over now."""
        self.batches += 1
        self.waited += time.perf_counter() - asked

    def end(self) -> None:
        """The pass is over."""
        self._until = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the pass has lasted."""
        return max((self._until or time.perf_counter()) - self._since, 1e-9)
