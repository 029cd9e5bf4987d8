"""Ties worker processes to the main process: signals, the end of workers, why a worker died."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

_NAME = "wds_pipes-parent"  # the name of the thread that watches; a forked child has no such thread

_OWN_OUTPUT = (
    "The worker's own output says why. "
    'With "spawn" and "forkserver" a worker imports the functions of a pipe: define them '
    "in a script or a module, or, "
    'on Linux, also for a notebook, pass multiprocessing_context="fork"'
)
NOT_GUARDED = 64  # the exit code of a worker whose import of the main script would start workers
_UNGUARDED = (
    "A worker imports the main script when it starts, and this script then starts workers "
    "again: put what it runs into a function main(), and call that below "
    'if __name__ == "__main__":'
)
_CRASHED = (
    "A native library crashed, of a decoder or of a step of yours: run the script with python -X "
    "faulthandler, which prints where"
)
_WHY: dict[str | None, str] = {  # by the name of the signal; the most likely cause
    "SIGKILL": "Most often the system has killed it because memory ran out: use fewer workers, a smaller "
    "shuffle_buffer or a smaller prefetch_factor",
    "SIGTERM": "Another process has ended it while it started, for example a cluster that ends the job: "
    "once workers run, they ignore SIGTERM",
    "SIGBUS": "Shared memory may be full: use fewer workers or a smaller prefetch_factor, or allow more "
    "in /dev/shm (docker run --shm-size)",
    "SIGSEGV": _CRASHED,
    "SIGABRT": _CRASHED,
    "SIGILL": _CRASHED,
    "SIGFPE": _CRASHED,
}


def worker_info() -> Any:
    """What DataLoader says of the worker process in which this runs; None: it is no worker.

    Raises:
        RuntimeError: the worker is a thread, or something else than a process. Threads share the
            objects of a pipeline, and so its position.
    """
    info = get_worker_info()
    method = getattr(info, "worker_method", None)  # None: of a torch that has processes only
    if method not in (None, "multiprocessing"):
        raise RuntimeError(
            f"wds_pipes needs worker processes, and this worker of DataLoader is a {method}: all "
            "would share one position. Use its worker processes, or PipeLoader."
        )
    return info


def begin_worker() -> None:
    """Set up a worker process of a loader: it ignores Ctrl-C and SIGTERM, and ends when the main
    process ends. It collects garbage, but not what a fork has copied: see ``uncollected``.

    A terminal, torchrun or a cluster sends these signals to all processes of a job. The main
    process may want to save its state and continue for a while; it ends its workers itself.
    """
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_on)
    end_with_parent()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    Commands that a worker runs would inherit SIG_IGN, but not this.
    """


def check_guarded() -> None:
    """Exit with a message if this process is a worker that is still importing the main script.

    Then the script, when it is imported, starts workers itself. That happens with "spawn" and
    "forkserver" if the script has no ``if __name__ == "__main__":``. An exception would print its
    traceback once for each worker.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(f"wds_pipes: {_UNGUARDED}\n")
        sys.stderr.flush()
        os._exit(NOT_GUARDED)


def how_ended(code: int) -> str:
    """Return how a worker with this exit code has ended, the most likely cause, and what to do."""
    if code == NOT_GUARDED:
        return f"ended. {_UNGUARDED}"
    name = next((known.name for known in signal.Signals if known == -code), None)
    how = f"ended with exit code {code}" if name is None else f"was killed by {name}"
    return f"{how}. {_WHY.get(name, _OWN_OUTPUT)}"


def end_with_parent() -> None:
    """Make this worker process end when the main process is gone, whatever the worker is doing
    then.

    Workers notice that the main process is gone only between commands. One that waits for a store,
    or in a write to a full connection whose other end a fork holds, would stay. The kernel could
    send a signal instead (PR_SET_PDEATHSIG), but it sends this signal when the *thread* that
    started the worker ends.
    """
    parent = multiprocessing.parent_process()
    if (
        parent is not None
        and parent.pid is not None
        and not any(thread.name == _NAME for thread in threading.enumerate())
    ):
        threading.Thread(target=_watch, args=(parent.pid,), name=_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    """Wait until a process is gone, then exit at once, without cleaning up: the kernel frees what
    is open.
    """
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # not on this system
        _poll()
    else:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()  # a zombie counts as gone
    os._exit(1)


def _poll() -> None:
    """Return when the main process is gone."""
    # With forkserver, getppid() is the server, which stays: hence is_alive(), too.
    main, before = multiprocessing.parent_process(), os.getppid()
    while os.getppid() == before and main is not None and main.is_alive():
        time.sleep(1)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage within the block, in which workers are forked.

    A fork copies the garbage of this process, but not its threads. What is freed in the worker may
    wait for such a thread for ever, such as a decoder of video or a connection of a database.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_put_off: dict[int, Callable[..., Any]] = {}  # the original handlers, while signals are postponed


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run signal handlers, such as that of Ctrl-C, after the block instead of within it.

    A handler that raises within ``multiprocessing`` can leave a lock held, or a process that no
    object refers to. In threads other than the main one no handler runs, so nothing is done there.
    """
    if _put_off or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Callable[..., Any], int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append((_put_off[number], number, frame))

    try:
        for number in signal.valid_signals():
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
