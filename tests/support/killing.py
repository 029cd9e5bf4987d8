"""Kill the worker processes of a PipeLoader."""

import contextlib
import os

import psutil
from waiting import wait_for


def is_dead(process):
    """Whether multiprocessing can reap this child; whether it is gone, if the child of another.

    A worker has threads. It counts as a zombie once its main thread has ended, but only after the
    last of its threads has ended does is_alive() become false.
    """
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return not process.is_running()


def kill(*workers):
    """Kill psutil processes that are workers, and return when they are dead."""
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    wait_for(lambda: all(map(is_dead, workers)))
