"""Threads for blocking calls that may never return."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_MOST_LOST = 64  # calls that hang, before no more are made


class HangingCallsError(OSError):
    """So many calls hang that no more are made."""


class _Call(Future[Any]):
    """A call that waits for a thread or runs in one. Cancelling it while it runs gives its thread up."""

    def __init__(self, threads: DaemonThreads, function: Callable[[], Any]) -> None:
        super().__init__()
        self._threads, self._function = threads, function
        self.given_up = self.ended = False  # with the lock of the threads

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
    """Threads that do not keep the process from ending, and are replaced when the call in one is given up.

    Those of ``concurrent.futures`` are joined at exit: a process with a call that hangs would never end.

    Args:
        count: how many calls run at once, without those that were given up.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._running = self._lost = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Have a thread call ``function``.

        Raises:
            HangingCallsError: too many calls have been given up and still run.
        """
        call = _Call(self, lambda: function(*args, **options))
        with self._lock:
            if self._lost >= _MOST_LOST:
                raise HangingCallsError(f"{self._lost} calls to this store hang, and no more are made until some return")
            self._calls.append(call)
            self._start()
        return call

    def lose(self, call: _Call) -> None:
        """A running call is not waited for any more: another thread takes the place of its own."""
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
