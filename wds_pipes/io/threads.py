"""Threads for blocking calls that may never return."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_LOST = 64  # abandoned calls that still run: beyond this many, new calls are refused


class HangingCallsError(OSError):
    """Too many calls hang: new ones are refused until some return."""


class _Call(Future[Any]):
    """A call that waits for a thread or runs in one.

    Cancelling a running call abandons its thread.
    """

    def __init__(self, threads: DaemonThreads, function: Callable[[], Any]) -> None:
        super().__init__()
        self._threads, self._function = threads, function
        self.given_up = self.ended = False  # guarded by the lock of the threads

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if not cancelled:
            self._threads.lose(self)
        return cancelled

    def run(self) -> None:
        """Make the call."""
        if self.set_running_or_notify_cancel():
            try:
                result = self._function()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(result)


class DaemonThreads(Executor):
    """Threads that do not keep the process alive. A thread whose call is abandoned is replaced.

    The threads of ``concurrent.futures`` are joined at exit: with one call that hangs, the process
    would never end.

    Args:
        count: how many calls run at once, not counting abandoned ones.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._running = self._lost = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Call ``function`` in a thread.

        Raises:
            HangingCallsError: too many abandoned calls still run.
        """
        call = _Call(self, lambda: function(*args, **options))
        with self._lock:
            if self._lost >= _MOST_LOST:
                raise HangingCallsError(
                    f"{self._lost} calls to this store hang, and no more are made until some return"
                )
            self._calls.append(call)
            self._start()
        return call

    def lose(self, call: _Call) -> None:
        """Abandon a running call: another thread takes the place of its thread."""
        with self._lock:
            if not call.given_up and not call.ended:
                call.given_up = True
                self._lost += 1
                self._running -= 1
                self._start()

    def _start(self) -> None:
        if self._calls and self._running < self._count:
            self._running += 1
            threading.Thread(target=self._work, name="wds_pipes", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running -= 1
                    return
                call = self._calls.popleft()
            call.run()
            with self._lock:
                call.ended = True
                if call.given_up:
                    self._lost -= 1
                    return
            del call


class OverdueError(TimeoutError):
    """A call has not returned in its time."""


def in_time(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function returns.

    Raises:
        OverdueError: it has not returned, and its thread is abandoned.
    """
    call: Future[T] = DaemonThreads(1).submit(function)
    wait([call], seconds)
    if not call.done():
        raise OverdueError(f"no response in {seconds:.0f} s")
    return call.result()
