"""Signals that come at a moment at which nothing may be interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_put_off: dict[int, Callable[..., Any]] = {}  # the handlers of signals, while these wait


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let handlers of signals, such as that of Ctrl-C, run after the block instead of within it.

    A handler that raises within ``multiprocessing`` can leave a lock held or a process that nobody knows of. SIGCHLD is not put off: DataLoader sets its own
    handler for that when it starts workers. In other threads than the main one, no handler runs anyway.
    """
    if _put_off or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def later(number: int, frame: object) -> None:
        came.append(number)

    try:
        for number in signal.valid_signals() - {signal.SIGCHLD}:
            handler = signal.getsignal(number)
            if callable(handler):
                _put_off[number] = handler
                signal.signal(number, later)
        yield
    finally:
        _put_back()
        with ExitStack() as handlers:  # each runs, also where one before it raises
            for one in reversed(came):
                handlers.callback(signal.raise_signal, one)


def _put_back() -> None:
    """Set the handlers again; also in a child process, which may be forked within the block."""
    try:
        for number, handler in list(_put_off.items()):
            signal.signal(number, handler)
            del _put_off[number]
    finally:
        if _put_off:  # a handler that is set again has raised
            _put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_put_back)
