"""Ties worker processes to the main process: signals, the end of workers, why a worker died."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.worker import WorkerInfo

from wds_pipes.loader.interrupts import uninterrupted

_NAME = "wds_pipes-parent"  # the name of the thread that watches; a forked child has no such thread
_PATIENCE = 5.0  # seconds that workers have to exit

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
_WHY = {  # by the name of the signal; the most likely cause
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


def worker_info() -> WorkerInfo | None:
    """What DataLoader says of the worker process in which this runs; None: it is no worker.

    Raises:
        RuntimeError: the worker is a thread. Threads share the objects of a pipeline, and so its
            position.
    """
    info = get_worker_info()
    if info is not None and getattr(info, "worker_method", None) == "thread":
        raise RuntimeError(
            "wds_pipes needs worker processes, and this worker of DataLoader is a thread: all "
            "would share one position. Use its worker processes."
        )
    return info


def begin_worker() -> None:
    """Set up a worker process of a loader: it ignores Ctrl-C and SIGTERM, and ends when the main
    process ends.

    A terminal, torchrun or a cluster sends these signals to all processes of a job. The main
    process may want to save its state and continue for a while; it ends its workers by SIGKILL, see
    ``make_terminate_kill``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_on)
    end_with_parent()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    Commands that a worker runs would inherit SIG_IGN, but not this.
    """


def make_terminate_kill(workers: Iterable[Any]) -> None:
    """Make ``terminate()`` send SIGKILL, since workers do not end at SIGTERM.

    DataLoader and multiprocessing call ``terminate()`` to end a worker that hangs.
    """
    for worker in workers:
        # A bound method would make a cycle, which keeps pipes open until garbage is collected.
        kill = weakref.WeakMethod(worker._popen.kill)
        worker._popen.terminate = partial(_call, kill)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()


def end_workers(results: Any) -> None:
    """End the workers of an iterator of DataLoader.

    Kill those that do not exit in time, perhaps since they wait for a store.
    """
    if results._shutdown:
        return
    with uninterrupted():
        _watch_no_more(results)
        results._workers_done_event.set()
        for queue in results._index_queues:
            queue.put(None)  # wakes workers that wait for a command: they then look at the event
        end = time.monotonic() + _PATIENCE
        for worker in results._workers:
            worker.join(max(0, end - time.monotonic()))
        for worker in results._workers:
            worker.kill()
        results._shutdown_workers()


def kill_workers(results: Any) -> None:
    """Kill the workers of an interrupted iterator of DataLoader.

    The iterator may hold locks of its queues for ever, so nothing here waits for these locks.
    """
    if results._shutdown:
        return
    with uninterrupted():
        _watch_no_more(results)
        results._shutdown = True  # DataLoader's own shutdown, which would take those locks, then does nothing
        if hasattr(results, "_pin_memory_thread"):
            results._pin_memory_thread_done_event.set()
        for worker in results._workers:
            worker.kill()
        for worker in results._workers:
            worker.join()
        for queue in results._index_queues:
            if queue._notempty.acquire(timeout=1):
                queue._notempty.release()
                queue.close()  # its thread ends
            elif queue._close is not None:
                queue._close.cancel()  # else Python would wait for the lock at its exit


def _watch_no_more(results: Any) -> None:
    """Make DataLoader's handler of SIGCHLD ignore the end of these workers."""
    if results._worker_pids_set:
        signal_handling._remove_worker_pids(id(results))  # type: ignore[attr-defined]
        results._worker_pids_set = False


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


def why_ended(codes: Iterable[int | None], text: str) -> str:
    """Return why workers have died, and what to do.

    Args:
        codes: the exit codes of all workers, negative for a signal; None for one that runs.
        text: the message of DataLoader.
    """
    for name, why in _WHY.items():
        number = getattr(signal, name, None)  # not every system has every signal
        if number is not None and (-number in codes or f"killed by signal: {signal.strsignal(number)}" in text):
            return why
    if NOT_GUARDED in codes or f"exit code {NOT_GUARDED}." in text:
        return _UNGUARDED
    return (
        "The worker's own output says why. "
        'With "spawn" and "forkserver" a worker imports the functions of a pipe: define them '
        "in a script or a module, or, "
        'on Linux, also for a notebook, pass multiprocessing_context="fork"'
    )


def end_with_parent() -> None:
    """Make this worker process end when the main process is gone, whatever the worker is doing
    then.

    DataLoader's workers check for the main process only between commands. A worker that is blocked
    in a write to the main process, because the queue is full, would stay for ever. The kernel could
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
