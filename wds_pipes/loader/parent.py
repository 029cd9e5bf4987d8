"""Worker processes and the main process that they work for."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.worker import WorkerInfo

from wds_pipes.loader.interrupts import uninterrupted

_NAME = "wds_pipes-parent"  # of the thread that watches; a forked child has none
_PATIENCE = 5.0  # seconds that workers have for leaving

NOT_GUARDED = 64  # the exit code of a worker that was to start workers while it imported the main script
_UNGUARDED = (
    "A worker imports the main script when it starts, and this script then starts workers again: put what it runs into a function main(), and call that below "
    'if __name__ == "__main__":'
)
_CRASHED = "A native library crashed, of a decoder or of a step of yours: run the script with python -X faulthandler, which prints where"
_WHY = {  # by the name of the signal, the most likely cause first
    "SIGKILL": "Most often the system has killed it for want of memory: use fewer workers, a smaller shuffle_buffer or a smaller prefetch_factor",
    "SIGTERM": "Something outside has ended it while it started, such as a cluster that ends the job: once workers run, they leave SIGTERM to the main process",
    "SIGBUS": "Shared memory may be full: use fewer workers or a smaller prefetch_factor, or allow more in /dev/shm (docker run --shm-size)",
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
            "wds_pipes needs worker processes, and this worker of DataLoader is a thread: all would share one position. Use its worker processes."
        )
    return info


def begin_worker(worker: int) -> None:
    """What a worker process of a loader does first: it leaves Ctrl-C and SIGTERM to the main process, and ends with it.

    A terminal, torchrun or a cluster sends these to all processes of a job, and the main process may want to save its state and go on for a while. How it ends
    its workers instead: ``make_terminate_kill``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_on)
    end_with_parent()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Do nothing at a signal. SIG_IGN would be inherited by commands that a worker runs."""


def make_terminate_kill(workers: Iterable[Any]) -> None:
    """Let ``terminate()``, by which DataLoader and multiprocessing end a worker that hangs, send SIGKILL: workers do not end at SIGTERM."""
    for worker in workers:
        worker._popen.terminate = worker._popen.kill


def end_workers(results: Any) -> None:
    """End the workers of an iterator of DataLoader's: those that do not leave in time, since they wait for a store perhaps, are killed."""
    if results._shutdown:
        return
    with uninterrupted():
        _watch_no_more(results)
        results._workers_done_event.set()
        for queue in results._index_queues:
            queue.put(None)  # so that those that wait for a command look at the event
        end = time.monotonic() + _PATIENCE
        for worker in results._workers:
            worker.join(max(0, end - time.monotonic()))
        for worker in results._workers:
            worker.kill()
        results._shutdown_workers()


def kill_workers(results: Any) -> None:
    """End the workers of an iterator of DataLoader's that was interrupted: it may hold locks of its queues for ever, and nothing here waits for them."""
    if results._shutdown:
        return
    with uninterrupted():
        _watch_no_more(results)
        results._shutdown = True  # DataLoader's own way to end takes those locks
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
                queue._close.cancel()  # else Python would wait for the lock when it ends


def _watch_no_more(results: Any) -> None:
    """Let DataLoader's handler of SIGCHLD raise no error for workers that are killed."""
    if results._worker_pids_set:
        signal_handling._remove_worker_pids(id(results))  # type: ignore[attr-defined]
        results._worker_pids_set = False


def check_guarded() -> None:
    """End this process with a message if it is a worker that still imports the main script, whose code starts workers where it should not.

    That happens with "spawn" and "forkserver" where the script has no ``if __name__ == "__main__":``. An exception would print its traceback for each worker.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(f"wds_pipes: {_UNGUARDED}\n")
        sys.stderr.flush()
        os._exit(NOT_GUARDED)


def why_ended(codes: Iterable[int | None], text: str) -> str:
    """Why workers have ended that should not, and what to do.

    Args:
        codes: the exit codes of all workers, negative for a signal; None for one that runs.
        text: what DataLoader says.
    """
    for name, why in _WHY.items():
        number = getattr(signal, name, None)  # not all systems have all
        if number is not None and (-number in codes or f"killed by signal: {signal.strsignal(number)}" in text):
            return why
    if NOT_GUARDED in codes or f"exit code {NOT_GUARDED}." in text:
        return _UNGUARDED
    return (
        'What it has printed itself says why. With "spawn" and "forkserver" a worker imports the functions of a pipe: define them in a script or a module, or, '
        'on Linux, also for a notebook, pass multiprocessing_context="fork"'
    )


def end_with_parent() -> None:
    """Let this worker process end when the main process is gone, whatever it does at that time.

    DataLoader's workers look for the main process only between commands: one that is blocked in a write to it, because the queue is full, would stay for ever.
    The kernel could send a signal instead (PR_SET_PDEATHSIG), but it does so when the *thread* ends that started the worker.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and not any(thread.name == _NAME for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(parent.pid,), name=_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    """Wait until a process is gone, then end this one at once: what it has open is for nobody, and the kernel frees it."""
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
    main, before = multiprocessing.parent_process(), os.getppid()  # with forkserver, the parent for the system is the server, which stays
    while os.getppid() == before and main is not None and main.is_alive():
        time.sleep(1)
