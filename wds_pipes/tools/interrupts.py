"""Ctrl-C in a command, which ends it with one line at any moment; and SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, NoReturn


class Terminated(SystemExit):
    """SIGTERM ends a command: a function of the user that raises SystemExit is an error instead."""


def end(*_: object) -> NoReturn:
    """Handle Ctrl-C where nothing is to be tidied up: while the commands are imported, where a
    library may make another error of a KeyboardInterrupt, and when a command has ended.
    """
    os.write(2, b"Aborted!\n")
    os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt meanwhile, if it is handled by ``end``. So does any error
    that comes after it: an import that it has broken off may raise another one.
    """
    if signal.getsignal(signal.SIGINT) is not end:
        yield
        return
    came = False

    def interrupt(number: int, frame: Any) -> NoReturn:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, end)
