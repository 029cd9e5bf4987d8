"""Steps that call a function on each item of their source, in threads if requested.

Rules:
1. Only the function runs in threads. The thread that iterates does all else: it reads the source,
   yields the results in their order, counts and skips errors.
2. It takes items ahead, at most ``AHEAD`` for each thread, and stores with each of them the
   position of the source right after it. So a position is that of the item that was yielded last:
   the same as without threads. An error of the source is raised when its turn comes.
3. It may be interrupted at any moment, by Ctrl-C or a signal handler that raises. So it shares no
   lock with its threads that an interrupt could leave locked: only a queue, and for each call a
   lock that is released once.
4. The threads start when the first item is taken, in the process that iterates. A forked child has
   none of them, and never waits for them. ``close`` and the exit of Python wait until running calls
   have ended; the garbage collector only tells the threads to stop.
5. To wake the thread that iterates for each result would stop the others each time. So a result
   waits for those of the next calls, if they take milliseconds: for at most ``BURST`` for each
   thread, and BURST_SECONDS.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import END, Mark, Out, Stage, functional_name
from wds_pipes.core.tolerant import OnError, Tolerant

NAME = "wds_pipes "  # how the names of the threads begin; the functional name of the step follows
AHEAD = 16
BURST, BURST_SECONDS = 4, 0.01


class Threaded(Tolerant[Out]):
    """The base of steps that can call their function in threads: a subclass calls ``results`` in
    ``run``.
    """

    def __init__(
        self, source: Stage[Any], on_error: OnError | None, max_errors: int | None, threads: int | None
    ) -> None:
        super().__init__(source, on_error, max_errors)
        self.threads = 0 if threads is None else check_count("threads", threads, least=0)
        self._calls: deque[_Call] = deque()  # while running, those whose turn has not come
        # with threads, how many ranges the source had opened after the item whose turn came last
        self._opened: int | None = None
        self._pool: _Pool | None = None

    def results(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over ``function(item)`` for each of ``items``, in their order.

        Args:
            function: it may be called in several threads at once. An error that it raises ends the
                iteration when the turn of the item comes.
            items: those of the source, one for each item of it.
        """
        return self._ahead(function, iter(items)) if self.threads else map(function, items)

    def _ahead(self, function: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
        calls, most, source, before = self._calls, AHEAD * self.threads, self.source, Chain(self.source)
        self.earlier, self._opened = source.mark(), before.opened
        self._pool = pool = _Pool(self.threads, f"{NAME}{functional_name(type(self))}")
        call: _Call | None = None
        failed: Exception | None = None
        ended = False
        try:
            while True:
                pool.check_process()
                taken = 0
                # A result that is there waits for at most two more items: the source may be slow.
                while not ended and len(calls) < most and (taken < 2 or not calls[0].ended):
                    try:
                        item = next(items, END)
                    except Exception as error:
                        failed, ended = error, True
                        break
                    if item is END:
                        ended = True
                        break
                    call = _Call(function, item, (source.mark(), before.opened))
                    del item
                    calls.append(call)
                    pool.begin(call)
                    taken += 1
                if not calls:
                    break
                if not calls[0].ended:  # and there is nothing else to do
                    calls[min(len(calls), BURST * self.threads) - 1].wait_for(BURST_SECONDS)
                call = calls.popleft()
                call.wait()
                self.earlier, self._opened = call.passed
                if call.error is not None:
                    raise call.error
                yield call.result
                call = None  # else its sample would stay in memory while this waits for the next one
            self.earlier = self._opened = None
            if failed is not None:
                raise failed
        finally:
            call = failed = None  # else an error, its traceback and this frame would keep each other
            calls.clear()
            pool.stop()

    @property
    def opened(self) -> int | None:
        return self._opened

    @property
    def held_items(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.join()


class _Call:
    """A call of a function on an item, by one of the threads.

    Attributes:
        passed: the position of the source after the item, and how many ranges it had opened.
        result: what the function returned.
        error: what it raised.
    """

    __slots__ = ("_ended", "_function", "_item", "error", "passed", "result")

    def __init__(self, function: Callable[[Any], Any], item: Any, passed: tuple[Mark, int]) -> None:
        self._function, self._item, self.passed = function, item, passed
        self.result: Any = None
        self.error: BaseException | None = None
        self._ended = threading.Lock()  # one that is released once costs a tenth of an Event
        self._ended.acquire()

    @property
    def ended(self) -> bool:
        return not self._ended.locked()

    def wait(self) -> None:
        """Wait until it has ended; once."""
        self._ended.acquire()

    def wait_for(self, seconds: float) -> None:
        """Wait until it has ended, at most so long; it can be waited for again."""
        if self._ended.acquire(timeout=seconds):
            self._ended.release()

    def run(self) -> None:
        try:
            self.result = self._function(self._item)
        except BaseException as error:
            self.error = error
        finally:
            del self._item
            self._ended.release()


class _Pool:
    """The threads of one running step. They are started when there are calls for them."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name, self._process = count, name, os.getpid()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def begin(self, call: _Call) -> None:
        """Let a thread make a call, after those that were begun before it."""
        if len(self._threads) < self._count:
            # For one that is no daemon, Python would wait at its exit before it calls _stop_all.
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.append(thread)
            _pools[thread] = self
            thread.start()
        self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._stopped:
                call.run()
            del call
        _pools.pop(threading.current_thread(), None)

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, which has no threads of its parent."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the threads of {self._name.removeprefix(NAME)}() are in another process, which started this "
                "iteration: start a new one, with iter(), in the process that iterates"
            )

    def stop(self) -> None:
        """Tell the threads to stop, and not to make the calls that they have not begun."""
        if os.getpid() == self._process:
            self._stopped = True
            for _ in self._threads:
                self._calls.put(None)

    def join(self) -> None:
        """Stop the threads, and wait until the calls that they make have ended.

        A thread of a pool does not wait: if the garbage collector closes a chain in the middle of a
        call, that call may hold a lock for which the others wait.
        """
        self.stop()
        if os.getpid() == self._process and threading.current_thread() not in _pools:
            for thread in self._threads:
                with suppress(RuntimeError):  # an interrupt came before it was started
                    thread.join()


_pools: dict[threading.Thread, _Pool] = {}  # of the threads that have not ended


def _stop_all() -> None:
    """Stop all threads before Python ends: a daemon thread in a library of C++ could then crash the
    process.
    """
    for pool in set(_pools.copy().values()):  # threads that end meanwhile leave _pools
        pool.join()


atexit.register(_stop_all)
