"""Measures where the time of a lane goes, and how long the caller waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import NO_NETWORK, Meters, Network
from wds_pipes.core.stage import Stage

# To read a clock costs as much as a tiny sample. While items come quickly (in less than
# _QUICK_SECONDS), only one of _EVERY items is timed, and its time counts _EVERY times. The first
# _ONE_BY_ONE items, and those after an item that was not quick, are all timed. Waiting for bytes of
# a store concerns few items: the store's reader measures each of these waits separately.
_EVERY, _ONE_BY_ONE, _QUICK_SECONDS = 32, 64, 1e-4


class Spent(NamedTuple):
    """What a lane has used since the report before.

    Attributes:
        busy: seconds in which its worker made batches of the lane.
        reading: seconds of these that were spent up to and including ``group_by_key``.
        bytes_read: bytes of the decompressed tars.
        held: samples in shuffle buffers, and in flight in threads, now.
        process: the id of its process.
        network: what that process has used of the network so far: see ``Chain.network``.
    """

    busy: float = 0.0
    reading: float = 0.0
    bytes_read: int = 0
    held: int = 0
    process: int = 0
    network: Network = NO_NETWORK


class Meter:
    """Measures a lane's chain while it runs.

    Args:
        meters: those of the lane.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self.busy = self.waited = self._parsing = 0.0
        self._bytes_before = 0
        self._reported = Spent()  # the sums of all reports
        self._chain: Chain | None = None

    def watch(self, last: Stage[Any]) -> None:
        """Measure a chain that was just opened with the tap ``timed``."""
        self._bytes_before, self._chain = self._bytes_read, Chain(last)

    def timed(self, _: Stage[Any], items: Iterator[Any]) -> Iterator[Iterable[Any]]:
        """Yield the items of ``Chain.reading_end`` in runs, as a tap. Runs of one item are
        timed.
        """
        clock, end, meters = time.perf_counter, object(), self._meters
        one_by_one = _ONE_BY_ONE
        while True:
            if not one_by_one:
                yield islice(items, _EVERY - 1)
            before, start = meters.stall_seconds, clock()
            item = next(items, end)
            passed = clock() - start - (meters.stall_seconds - before)
            self._parsing += passed if one_by_one else _EVERY * passed
            if item is end:
                return
            yield (item,)
            one_by_one = max(one_by_one - 1, 0) if passed < _QUICK_SECONDS else _ONE_BY_ONE

    @property
    def _bytes_read(self) -> int:
        return self._bytes_before + (self._chain.bytes_so_far if self._chain else 0)

    def spent(self) -> Spent:
        """Return what was used since the last call."""
        before = self._reported
        self._reported = now = Spent(self.busy, min(self.waited + self._parsing, self.busy), self._bytes_read)
        return Spent(
            now.busy - before.busy,
            now.reading - before.reading,
            now.bytes_read - before.bytes_read,
            self._chain.held_items if self._chain else 0,
            os.getpid(),
            self._chain.network if self._chain else NO_NETWORK,
        )


class Tally:
    """What an iteration over a loader yielded, and how long its caller waited.

    ``network`` is the use of the network by each process, as last reported, and ``_network_before``
    the same at the beginning of the iteration.
    """

    def __init__(self, network: dict[int, Network]) -> None:
        self.batches = 0
        # the plan, the position in it, and the number to subtract from its count of samples
        self.stands: tuple[Any, Any, int] = None, None, 0
        self.waited = 0.0
        self.held: dict[int, int] = {}  # samples, of each lane
        self._busy = self._reading = 0.0
        self._bytes_read = 0
        self.network, self._network_before = network, dict(network)
        self._since = self._until = 0.0

    def begin(self) -> None:
        """Note the time at which the iteration begins."""
        self._since = time.perf_counter()

    def add(self, lane: int, spent: Spent) -> None:
        """Add what a lane has used."""
        self._busy += spent.busy
        self._reading += spent.reading
        self._bytes_read += spent.bytes_read
        self.held[lane] = spent.held
        self.network[spent.process] = spent.network

    def used(self) -> Network:
        """Return what the iteration has used of the network."""
        before = self._network_before
        parts = [(total, before.get(process, NO_NETWORK)) for process, total in self.network.items()]
        spent = [sum(total[place] - begun[place] for total, begun in parts) for place in range(len(NO_NETWORK))]
        return Network(*spent)  # type: ignore[arg-type]

    def handed_over(self, asked: float) -> None:
        """Count a batch that the caller requested at the time ``asked`` and gets now."""
        self.batches += 1
        self.waited += time.perf_counter() - asked

    def figures(self, samples: int) -> dict[str, float]:
        """Return the measurements, for an iteration that yielded this number of samples."""
        seconds, busy, network = self.seconds, self._busy, self.used()
        reading = max(0.0, min(self._reading, busy))  # an estimate: only some of the items are timed
        return {
            "batches": float(self.batches),
            "samples": float(samples),
            "batches_per_second": self.batches / seconds,
            "samples_per_second": samples / seconds,
            "bytes_per_second": self._bytes_read / seconds,
            "wait_seconds": self.waited,
            "wait_share": self.waited / seconds,
            "read_share": reading / busy if busy else 0.0,
            "decode_share": 1 - reading / busy if busy else 0.0,
            "stall_share": min(network.stall_seconds, reading) / busy if busy else 0.0,
            **{name: float(value) for name, value in network._asdict().items()},
            "held_samples": float(sum(self.held.values())),
        }

    def end(self) -> None:
        """Note the time at which the iteration ends."""
        self._until = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the iteration has lasted."""
        return max((self._until or time.perf_counter()) - self._since, 1e-9)


# What the workers of a rank spend their time on, and what to compare if that is more on one rank.
SHARES = {
    "stall_share": ("waiting for bytes of a store", "its network and its cache"),
    "read_share": ("reading", "its disk, and the sizes of its shards"),
    "decode_share": ("the steps after reading", "its processor, what else runs there, and its samples"),
}
_UNEVEN, _WAITS = 0.1, 0.05  # shares of the time in which a rank waits: more than the others; and at all


class Limit(NamedTuple):
    """What limits a training, by the stats of its ranks.

    Attributes:
        limit: ``"rank"``, ``"training"`` or ``"data"``, as of ``wds_pipes.tools.Diagnosis``.
        why: the limit, in words.
        change: what to do, in words.
        brings: what that brings, in words.
        step: the rank, if one is the limit.
        stats: those of the rank that waits most.
    """

    limit: str
    why: str
    change: str
    brings: str
    step: str
    stats: Mapping[str, float]


def limit_of_ranks(ranks: Sequence[Mapping[str, float]]) -> Limit:
    """Return what limits a training: one rank, the data of all ranks, or its own loop.

    Args:
        ranks: the stats of each rank, after its first batch.
    """
    slowest = max(ranks, key=lambda one: one["wait_share"])
    others = [one for one in ranks if one is not slowest]
    mean = {name: sum(one[name] for one in others or ranks) / len(others or ranks) for name in ("wait_share", *SHARES)}
    waits, usual = slowest["wait_share"], mean["wait_share"]
    rank = f"rank {slowest.get('rank', ranks.index(slowest)):.0f}"
    if waits - usual > max(_UNEVEN, usual):
        name = max(SHARES, key=lambda name: slowest[name] - mean[name])
        what, compare = SHARES[name]
        why = (
            f"{rank}, which waits for data {waits:.0%} of its time, and the others {usual:.0%}; its workers spend "
            f"{slowest[name]:.0%} of their time on {what}, and theirs {mean[name]:.0%}"
        )
        change = f"look at the host of {rank}, and compare {compare} with those of the others"
        return Limit("rank", why, change, "All ranks wait for it, and make more steps without that", rank, slowest)
    if waits < _WAITS:
        why = f"the training loop: no rank waits for data more than {waits:.0%} of its time"
        return Limit("training", why, "leave the data", "Faster data brings nothing", "", slowest)
    shares = {**slowest, "read_share": slowest["read_share"] - slowest["stall_share"]}
    spent = ", ".join(f"{shares[name]:.0%} on {what}" for name, (what, _) in SHARES.items())
    who = f"all ranks wait for them alike, {rank}" if others else f"{rank} waits for them"
    why = f"the data: {who} {waits:.0%} of its time; its workers spend of theirs {spent}"
    brings = "Faster data makes more steps"
    return Limit("data", why, "measure the steps: wds-pipes doctor MODULE:FUNCTION", brings, "", slowest)


def limit_in_words(why: str, change: str, brings: str) -> list[str]:
    """The sentences that say what a limit is, what to change, and what that brings."""
    return [f"The limit is {why}.", f"{change[0].upper()}{change[1:]}.", f"{brings}."]


def describe_stats(ranks: Mapping[str, float] | Sequence[Mapping[str, float]]) -> str:
    """Return in three sentences what limits a training, as ``wds-pipes doctor --stats`` says it: a
    rank that waits more for data than the others, the data, or the training loop.

    Plain loops log it so, on all ranks at the same step::

        if step % 100 == 0:
            ranks = loader.stats_of_ranks()
            if loader.rank.number == 0:
                print(wds_pipes.describe_stats(ranks))

    Args:
        ranks: what ``PipeLoader.stats_of_ranks`` returned, or ``PipeLoader.stats`` of one loader.
    """
    begun = [stats for stats in ([ranks] if isinstance(ranks, Mapping) else ranks) if "wait_share" in stats]
    if not begun:
        return "no rank has begun an iteration"
    found = limit_of_ranks(begun)
    return " ".join(limit_in_words(found.why, found.change, found.brings))
