"""What all remote reading of a process shares: connections, bytes, and the event loop."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_LEAST_MEASURED = 1 << 20  # bytes: the rate of a connection with fewer is not precise


@dataclass(frozen=True)
class Reading:
    """How remote shards are read: see ``open_shards``."""

    storage_options: dict[str, Any] = field(default_factory=dict)
    readahead_bytes: int = 64 << 20
    connections: int = 8
    retries: int = 10
    timeout_seconds: float = 120.0

    @property
    def patience(self) -> float:
        """A request without a byte for this many seconds is abandoned."""
        return max(1.0, self.timeout_seconds / 4)


class UnreadError(OSError):
    """The bytes of a shard cannot be read."""

    of_data = True  # see ShardError


class Budget:
    """The connections and the read-ahead bytes of this process, which all its pipes share.

    Its size is the largest that one of the open pipes has requested.
    """

    def __init__(self) -> None:
        from fsspec.asyn import get_loop

        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop = get_loop()
        self.lock = threading.RLock()
        self.queues: list[Any] = []  # each a ReadQueue
        self.readahead_bytes = 0
        self.held = 0
        self.blocked = False  # something waits for the consumer to take some bytes

    @property
    def is_ours(self) -> bool:
        """Whether this process created it, and its event loop may still run.

        In a forked process, its lock may be held for ever by a thread that does not exist there.
        """
        return self.pid == os.getpid() and not self.loop.is_closed()

    def call(self, what: Callable[[], None]) -> None:
        """Call ``what`` on the event loop, soon; never if it is not ours."""
        if self.is_ours:
            self.loop.call_soon_threadsafe(what)

    def divide(self) -> None:
        """Set the share of each queue, and schedule.

        Queues that the consumer has not reached are not counted.
        """
        readings = [queue.client.reading for queue in self.queues]
        self.readahead_bytes = max((reading.readahead_bytes for reading in readings), default=0)
        connections = max((reading.connections for reading in readings), default=0)
        sharing = Counter(queue.client for queue in self.queues if not queue.ahead)
        every = max(1, sharing.total())
        for queue in self.queues:
            reading, own = queue.client.reading, max(1, sharing[queue.client])
            queue.share = min(self.readahead_bytes // every, reading.readahead_bytes // own)
            queue.connections = max(1, min(connections // every, reading.connections // own))
        self.schedule()

    def schedule(self) -> None:
        """Request what may be requested, and continue the transfers that may continue."""
        with self.lock:
            self.blocked = False
            for queue in self.queues:
                queue.schedule()


_budgets: dict[int, Budget] = {}  # the budget of this process, by its ID


def budget() -> Budget:
    """The budget of this process."""
    process = os.getpid()
    if process in _budgets and not _budgets[process].is_ours:
        _budgets.pop(process, None)
    return _budgets.get(process) or _budgets.setdefault(process, Budget())


class Client:
    """What a pipe has in this process: its stores, and counts of its use of the network.

    Attributes:
        responded: the protocols whose stores have responded.
        requests: how many requests were made.
        retries: how many of these repeated an earlier one that had failed.
        hedged: how many of these repeated an earlier one that had stalled.
        bytes_fetched: how many bytes arrived.
        stalled: seconds in which consumers waited for bytes.
    """

    def __init__(self, reading: Reading) -> None:
        from wds_pipes.io.remote.stores import Stores  # imports asyncio, which local shards do not need

        self.reading = reading
        self.budget = budget()
        self.stores = Stores(reading.storage_options, reading.connections, reading.patience)
        self.responded: set[str] = set()
        self.requests = self.retries = self.hedged = self.bytes_fetched = 0
        self.stalled = 0.0
        self._latency = self._rate = 0.0  # seconds from a request to its response, and bytes a second of a connection
        _clients.add(self)

    def note_latency(self, seconds: float) -> None:
        """Record the seconds from a request to its response."""
        self._latency = _smooth(self._latency, seconds)

    def note_rate(self, count: int, seconds: float) -> None:
        """Record ``count`` bytes of a connection that was not paused."""
        if count >= _LEAST_MEASURED:
            self._rate = _smooth(self._rate, count / max(seconds, 1e-6))

    @property
    def lost(self) -> int:
        """How many bytes a connection could have transferred while it waited for a response."""
        return int(self._latency * self._rate)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
# By a forked process, which keeps them: closing their connections there would end them in the
# process that they belong to.
_inherited: list[Any] = []


def _inherit() -> None:
    _inherited.extend((*_clients, *_budgets.values()))
    _budgets.clear()


os.register_at_fork(after_in_child=_inherit)


def _smooth(before: float, now: float) -> float:
    return now if not before else 0.7 * before + 0.3 * now
