"""Worker processes and the main process that they work for."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time

_NAME = "wds_pipes-parent"  # of the thread that watches; a forked child has none


def begin_worker(worker: int) -> None:
    """What a worker process of a loader does first: it leaves Ctrl-C to the main process, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all processes
    end_with_parent()


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
