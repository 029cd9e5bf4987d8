"""Tasks, and where they run: in this process, or in several processes of this machine.

Rules:
1. Processes are spawned, not forked: a fork copies locks of threads that it does not have.
2. Ctrl-C reaches all processes of a terminal; only the first one handles it. It ends the others
   with SIGTERM, on which they discard what they are writing.
3. A process whose parent has died ends itself in the same way.
4. Python handles a signal when the next call of the system ends. One that comes just before a call
   that lasts waits as long. So this process waits for little at a time, and SIGTERM is sent again
   until the process has ended; after the first one it is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

from wds_pipes.core.options import check_choice, check_count
from wds_pipes.errors import SampleError, StateError, WdsError, for_commands, how_to_repair
from wds_pipes.io.secret import hide, words

_PATIENCE_SECONDS = 10.0  # in which a process must have discarded what it was writing
_AGAIN_SECONDS = 0.5  # how long to wait at a time

Facts: TypeAlias = dict[str, Any]
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or a quota used up


@dataclass(frozen=True)
class Task:
    """A part of a job that can be run by itself, also more than once.

    Attributes:
        name: its name in messages, which no other task of the job has.
        outputs: the files that it writes, relative to the directory of the job.
        arguments: what it is made from; it can be pickled.
        fingerprint: a hash of the inputs, such as ``fingerprint(...)`` returns.
        size: how much of the progress bar it is, in the units of the job.
        says: what it writes, in words.
    """

    name: str
    outputs: tuple[str, ...]
    arguments: Any = None
    fingerprint: str = ""
    size: int = 1
    says: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Attributes:
        name: that of the task.
        facts: what ``work`` returned; None: it failed.
        error: why it failed, with the remedy in words of the command line.
        again: whether it makes sense to try again.
        busy: another process writes its outputs.
        full: the disk is full, so other tasks would fail too.
    """

    name: str
    facts: Facts | None = None
    error: str = ""
    again: bool = False
    busy: bool = False
    full: bool = False

    @classmethod
    def failed(cls, name: str, error: Exception) -> Outcome:
        """The outcome of a task that raised."""
        told = words(error, for_commands) + how_to_repair(error)
        told = hide(told if isinstance(error, WdsError) else f"{type(error).__name__}: {told}")
        again = not isinstance(error, (SampleError, StateError, ValueError, TypeError, ImportError, LookupError))
        full = isinstance(error, OSError) and error.errno in FULL
        return cls(name, error=told, again=again and not full, busy=isinstance(error, BlockingIOError), full=full)


Call: TypeAlias = Callable[[Task], Outcome]
# Runs tasks anywhere: it is called with a function that can be pickled, and with tasks, and yields
# what the function returns for each task, in any order. Where the process of a task dies, it yields
# an Outcome that says so. If it is closed early, it ends what it has started.
Engine: TypeAlias = Callable[[Call, Sequence[Task]], Iterator[Outcome]]


def check_engine(engine: object, jobs: int | None) -> None:
    """Refuse an engine that does not exist, and numbers of processes that would be ignored.

    Raises:
        ValueError: they do not fit.
    """
    if engine is not None and not callable(engine):
        check_choice("engine", engine, "ray")
    if jobs is not None:
        check_count("jobs", jobs)
    if engine is not None and jobs is not None:
        raise ValueError(
            "with --engine ray, as many tasks run as the cluster has CPUs, so --jobs would be ignored: pass one of the "
            "two"
        )


def engine_of(jobs: int) -> Engine:
    """What runs so many tasks at a time on this machine; 1: in this process."""
    return partial(in_processes, jobs) if jobs > 1 else map


def in_processes(jobs: int, call: Call, tasks: Sequence[Task]) -> Iterator[Outcome]:
    """Run tasks in processes of this machine, so many at a time, and yield their outcomes as they
    come.
    """
    left = list(reversed(tasks))
    workers: list[_Worker] = []
    try:
        while left or workers:
            while left and len(workers) < jobs:
                with without_interrupts():
                    workers.append(_Worker(call))
                workers[-1].begin(left.pop())
            ready = wait([worker.connection for worker in workers], _AGAIN_SECONDS)
            for worker in [worker for worker in workers if worker.connection in ready]:
                yield worker.outcome()
                if left and worker.process.exitcode is None:
                    worker.begin(left.pop())
                else:
                    workers.remove(worker)
                    worker.end()
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()


class _Worker:
    """A process, and the task that it runs."""

    def __init__(self, call: Call) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, call))
        self.process.start()
        theirs.close()
        self._task = ""

    def begin(self, task: Task) -> None:
        """Send it a task."""
        self._task = task.name
        with contextlib.suppress(OSError):  # it has died, which ``outcome`` reports
            self.connection.send(task)

    def outcome(self) -> Outcome:
        """What became of its task; its process may have ended."""
        try:
            outcome: Outcome = self.connection.recv()
            return outcome
        except (EOFError, OSError):
            self.process.join(_PATIENCE_SECONDS)
            error = (
                f"its process ended with exit code {self.process.exitcode}; if the system did that because memory is "
                "short (-9), use fewer jobs (-j)"
            )
            return Outcome(self._task, error=error, again=True)

    def end(self) -> None:
        """End the process: it does that when its connection is closed, unless it runs a task."""
        self.connection.close()
        for _ in range(int(_PATIENCE_SECONDS / _AGAIN_SECONDS)):
            self.process.join(_AGAIN_SECONDS)
            if not self.process.is_alive():
                break
            self.process.terminate()
        else:
            self.process.kill()
            self.process.join()
        self.process.close()


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C from their first moment on. A SIGTERM that comes meanwhile
    is handled at the end: else a process would read half of what it is to run, and print a
    traceback.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if None in before.values() or threading.current_thread() is not threading.main_thread():  # None: not of Python
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _serve(connection: Connection[Any, Any], call: Call) -> None:
    """Run the tasks that come through the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(call(task))


def _exit(*_: object) -> None:
    # Not SIG_IGN: of a second SIGTERM that comes at this moment, Python would print a traceback.
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.exit(128 + signal.SIGTERM)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_AGAIN_SECONDS)
