"""Postpones signal handlers while code runs that must not be interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_put_off: dict[int, Callable[..., Any]] = {}  # the original handlers, while signals are postponed


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run signal handlers, such as that of Ctrl-C, after the block instead of within it.

    A handler that raises within ``multiprocessing`` can leave a lock held, or a process that no
    object refers to. SIGCHLD is not postponed: DataLoader sets its own handler for it when it
    starts workers. In threads other than the main one no handler runs, so nothing is done there.
    """
    if _put_off or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Callable[..., Any], int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append((_put_off[number], number, frame))

    try:
        for number in signal.valid_signals() - {signal.SIGCHLD}:
            handler = signal.getsignal(number)
            if callable(handler):
                _put_off[number] = handler
                signal.signal(number, later)
        yield
    finally:
        try:
            _put_back()
        finally:
            with ExitStack() as handlers:  # each runs, even if one before it raises
                for handler, caught, frame in reversed(came):
                    # not by raise_signal(): a second wake-up would let asyncio handle it twice
                    handlers.callback(handler, caught, frame)


def _put_back() -> None:
    """Restore the handlers; also called in a child process that was forked within the block."""
    try:
        for number, handler in list(_put_off.items()):
            signal.signal(number, handler)
            del _put_off[number]
    finally:
        if _put_off:  # a restored handler has raised
            _put_back()


os.register_at_fork(after_in_child=_put_back)
