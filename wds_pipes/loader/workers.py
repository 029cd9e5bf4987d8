"""The worker processes of a PipeLoader, or the lanes in this process if there are none.

Rules:
1. Each worker has one connection to the main process, and nothing is shared between workers. So
   the main process may be interrupted, and a worker killed, at any moment without harm to others.
2. A command goes to the worker of its lane, and lanes stay with their worker. The order of the
   commands, (number of the batch in its lane, lane), depends on the lanes alone, and results are
   returned in this order. So the batches are the same on any number of workers.
3. A worker has at most ``prefetch`` commands that it has not answered. It has answered those of an
   earlier run before it is told to begin lanes: then it reads, and a command of any size cannot
   block both sides.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import heapq
import math
import multiprocessing
import os
import pickle
import re
import select
import shutil
import signal
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

from wds_pipes.core.stage import Stage
from wds_pipes.errors import WorkerError
from wds_pipes.loader.parent import check_guarded, how_ended, uncollected, uninterrupted
from wds_pipes.loader.transport import Inbox
from wds_pipes.loader.worker import GO_ON, Begin, Command, LaneHost, Result, run_worker

_NOT_PICKLED = (
    "Workers that are not forked get the pipe by pickling. Write the functions of its steps "
    "with def, at the top of a module, not as lambda or in a notebook; "
    "or, on Linux, pass multiprocessing_context='fork'."
)
_HUNG = (
    "workers that were forked (pid {pids}) did not run within {seconds:g} seconds: they may wait for a "
    "lock that a thread of this process held at the fork. Start workers before such threads, or pass "
    'multiprocessing_context="forkserver". With PYTHONFAULTHANDLER=1 they print where they wait. ' + GO_ON
)
_LATE = (
    "a worker (pid {pid}) timed out after {seconds:g} seconds, timeout_seconds: no worker died. Reading or a step of "
    "the pipe takes longer than that for a batch: allow more, or find out what the workers wait for. " + GO_ON
)
_LOOK_SECONDS = 1.0  # how often to look whether a worker that sends nothing is alive
_PATIENCE = 5.0  # seconds that workers have to exit, and in which one that broke off is seen to be gone
_START_SECONDS = 30.0  # in which a forked worker runs its first code
_STARTS = 3  # how often workers are started until they do
_MOST_ASKED = 128  # commands to a worker; a connection holds twice as many that are not read
_KEPT = 4  # how many batches of each worker a caller may keep before batches are copied


class _Worker:
    """A worker process, and the only connection to it.

    Attributes:
        process: the process.
        connection: the end of this process.
        asked: how many messages it has still to send: one when it runs, one when it is ready to
            read, and one for each batch.
    """

    def __init__(self, context: BaseContext, most: int, directory: str | None, *arguments: Any) -> None:
        """Start it with the arguments of ``run_worker``.

        Args:
            context: of multiprocessing.
            most: how many blocks a caller may keep.
            directory: where it has its sockets.
            arguments: those of ``run_worker``.
        """
        self._inbox = Inbox(most)
        self.connection, theirs = context.Pipe()
        self._sent = select.poll()  # kept: ``connection.poll`` makes one at each call, which is slow
        self._sent.register(self.connection, select.POLLIN)
        self.asked = 2
        copied = self.connection if forks(context) else None
        with theirs, uncollected():  # so that its end is seen here
            self.process = context.Process(  # type: ignore[attr-defined]
                target=run_worker, args=(theirs, copied, *arguments), daemon=True
            )
            # Else it makes one, which stays if it is killed. One that multiprocessing has in this
            # process may be gone: that of a parent, which has ended, or one that was cleaned away.
            self.process._config["tempdir"] = directory
            self.process.start()
        # Else multiprocessing would end it, by a signal that workers ignore, before the functions
        # that are registered to run at the end, and also when a forked child of this process ends.
        multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]

    def send(self, command: Command) -> None:
        """Send a command."""
        try:
            self.connection.send(command)
        except ConnectionError as error:
            self._raise(error)
        self.asked += not isinstance(command, dict)

    def receive(self, timeout: float) -> Any:
        """Return its next message; WorkerError: it has died, or sends none for ``timeout`` seconds
        (0: wait for ever).
        """
        end = time.monotonic() + (timeout or math.inf)
        try:
            while not self._sent.poll(1e3 * max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
                if self.process.exitcode is not None and not self.connection.poll(0):
                    raise EOFError  # a process that the worker has started holds the connection, too
                if time.monotonic() >= end:
                    raise WorkerError(_LATE.format(pid=self.process.pid, seconds=timeout))
            message = self._inbox.open(self.connection.recv())
        except (
            EOFError,
            ConnectionError,
            FileNotFoundError,
        ) as error:  # the last: it ended with a block that is not open here
            self._raise(error)
        self.asked -= 1
        return message

    def stop(self, *, kill: bool) -> Any:
        """Make the process end, and return it."""
        if kill:
            self.process.kill()
            return self.process
        with contextlib.suppress(OSError):
            self.connection.send(None)
        return self.process

    def _raise(self, error: Exception) -> NoReturn:
        """Raise WorkerError if the worker has died; else the error, of its connection."""
        self.process.join(_PATIENCE)
        if self.process.exitcode is None:
            raise error
        raise WorkerError(f"worker process {self.process.pid} {how_ended(self.process.exitcode)}. {GO_ON}") from error


def forks(context: Any) -> bool:
    """Whether processes of a context of multiprocessing are forked."""
    return bool(context.get_start_method() == "fork")


class Workers:
    """Runs lanes in worker processes, or in this process.

    Args:
        stage: the pipeline, as ``lay_out`` made it.
        count: how many processes; 0: the lanes run in this process.
        persistent: keep the processes from one run to the next.
        prefetch: see rule 3.
        method: how processes start; None: Python's default.
        timeout: how many seconds to wait for a result; 0: for ever.
        on_start: called with its number in each process that starts.
    """

    def __init__(
        self,
        stage: Stage[Any],
        count: int,
        *,
        persistent: bool,
        prefetch: int,
        method: str | None = None,
        timeout: float = 0,
        on_start: Callable[[int], Any] | None = None,
    ) -> None:
        if on_start is not None and not callable(on_start):
            raise TypeError(f"worker_init_fn must be a function of the number of a worker, not {on_start!r:.80}")
        self.count, self.persistent = count, persistent
        self._stage, self._on_start, self._timeout, self._method = stage, on_start, timeout, method
        self._prefetch = min(prefetch, _MOST_ASKED) if count else 1
        multiprocessing.get_context(method)  # raises ValueError
        self._workers: list[_Worker] = []
        self._directory: str | None = None  # for their sockets
        self._host: LaneHost | None = None  # the lanes in this process
        self._places: dict[int, int] = {}  # of each lane of the run, the number of its worker
        self._ended: set[int] = set()  # lanes
        self._turns: list[tuple[int, int]] = []  # a heap of (number of the batch, lane)
        self._asked: deque[int] = deque()  # lanes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": [], "_directory": None, "_host": None}

    @property
    def running(self) -> bool:
        """Whether a run can go on: this process has the workers, or the lanes."""
        return self._host is not None or bool(self._workers)

    def start(self, begins: dict[int, Begin], seed: int) -> None:
        """Begin a run over lanes.

        Args:
            begins: where each lane begins.
            seed: for the global random generators of workers that are started.

        Raises:
            WorkerError: a forked worker hangs before its first code, each time that it is started.
        """
        if not self.persistent or any(worker.process.exitcode is not None for worker in self._workers):
            self.end()
        if self.count and not self._workers:
            self._start_workers(seed)
        elif not self.count:
            self._host = self._host or LaneHost(self._stage)
            self._host.begin(begins)
        self._ended, self._asked = set(), deque()
        self._places = {lane: place % max(1, self.count) for place, lane in enumerate(begins)}
        for number, worker in enumerate(self._workers):
            while worker.asked:
                worker.receive(self._timeout)
            worker.send({lane: begins[lane] for lane, place in self._places.items() if place == number})
        self._turns = [(begin.at.delivered, lane) for lane, begin in begins.items()]
        heapq.heapify(self._turns)
        self._ask()

    def _start_workers(self, seed: int) -> None:
        check_guarded()
        context = multiprocessing.get_context(self._method)
        for _ in range(_STARTS):
            with uninterrupted():
                _with_workers.add(self)
                with contextlib.suppress(OSError):
                    self._directory = tempfile.mkdtemp(prefix="pymp-")
                try:
                    for number in range(self.count):
                        arguments = self._directory, self._stage, (number, self.count, seed), self._on_start
                        self._workers.append(_Worker(context, self._prefetch + _KEPT, *arguments))
                except BaseException as error:
                    self.end(interrupted=True)
                    if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)) and re.search(
                        "pickle|local object", str(error)
                    ):
                        error.add_note(_NOT_PICKLED)
                    raise
            if not forks(context) or not (hung := self._hung()):
                return
            if faulthandler.is_enabled():  # it prints where they wait
                for worker in self._workers:
                    if worker.process.pid in hung:
                        os.kill(worker.process.pid, signal.SIGABRT)
                        worker.process.join(_PATIENCE)
            self.end(interrupted=True)
        raise WorkerError(_HUNG.format(pids=", ".join(map(str, hung)), seconds=_START_SECONDS * _STARTS))

    def _hung(self) -> list[int | None]:
        """Return the forked workers that do not run after a time.

        A fork copies the locks that other threads hold, and nothing releases the copies: the new
        process may wait for one for ever, before its first line of Python. Python to 3.11 has such
        a lock, which threads of gloo and NCCL take (https://github.com/python/cpython/issues/112275).
        Such a worker has read no command, so it can be replaced.
        """
        end = time.monotonic() + _START_SECONDS
        return [
            worker.process.pid
            for worker in self._workers
            if not worker.connection.poll(max(0.0, end - time.monotonic()))  # it has died, or sent its first message
        ]

    def _ask(self) -> None:
        """Send the commands whose turn it is."""
        while self._turns:
            number, lane = self._turns[0]
            place = self._places[lane]
            if lane in self._ended:
                heapq.heappop(self._turns)
                continue
            if (self._workers[place].asked if self.count else len(self._asked)) >= self._prefetch:
                return
            heapq.heapreplace(self._turns, (number + 1, lane))
            if self.count:
                self._workers[place].send(lane)
            self._asked.append(lane)

    def next(self) -> Result:
        """Return the next result of the run, which has lanes that have not ended."""
        lane = self._asked.popleft()
        result: Result
        if self._host is not None:
            result = self._host.next(lane)
        else:
            result = self._workers[self._places[lane]].receive(self._timeout)
        if (at := result[2]) is not None and at[2]:
            self._ended.add(lane)
        self._ask()
        return result

    def end(self, *, interrupted: bool = False) -> None:
        """End the processes, or close the lanes in this process: the next run starts new ones.

        Args:
            interrupted: do not wait for the processes: one of them may hang, or have sent half of a
                message.
        """
        with uninterrupted():
            workers, self._workers = self._workers, []
            processes = [worker.stop(kill=interrupted) for worker in workers]
            workers.clear()  # closes the connections, so that a worker that sends a result ends, too
            end = time.monotonic() + _PATIENCE
            for process in processes:
                process.join(max(0, end - time.monotonic()))
                process.kill()  # perhaps it waits for a store
                process.join()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None
            if self._host is not None:
                self._host.close()

    def __del__(self) -> None:
        if getattr(self, "_workers", None):
            self.end(interrupted=True)  # the garbage collector is not to wait for workers


_with_workers: weakref.WeakSet[Workers] = weakref.WeakSet()  # those whose workers this process has started


def _forget_all() -> None:
    """Drop the processes in a forked child, without ending them: they belong to its parent, which
    alone holds connections to them.
    """
    for workers in list(_with_workers):
        workers._workers.clear()
        workers._directory = None
    _with_workers.clear()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _end_all() -> None:
    for workers in list(_with_workers):
        workers.end()
