"""The worker processes of a PipeLoader, or the lanes in this process if there are none."""

from __future__ import annotations

import copy
import heapq
import io
import itertools
import mmap
import multiprocessing
import os
import pickle
import re
import select
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from wds_pipes.core.stage import Stage
from wds_pipes.errors import StateError, WorkerError
from wds_pipes.loader.hand_off import Inbox
from wds_pipes.loader.interrupts import uninterrupted
from wds_pipes.loader.parent import check_guarded, end_workers, kill_workers, make_terminate_kill, why_ended
from wds_pipes.loader.protocol import Begin, Command, Result
from wds_pipes.loader.worker import LaneHost, start_worker

_NOT_PICKLED = (
    "Workers that are not forked get the pipe by pickling. Write the functions of its steps "
    "with def, at the top of a module, not as lambda or in a notebook; "
    "or, on Linux, pass multiprocessing_context='fork'."
)
_HUNG = (
    "workers that were forked (pid {pids}) did not run within {seconds:g} seconds: they may wait for a "
    "lock that a thread of this process held at the fork. Start workers before such threads, or pass "
    'multiprocessing_context="forkserver". state_dict() is still good.'
)
_CUT_MILLISECONDS = 1000  # after so long without the rest of a message, see whether a worker died
_PATIENCE = 5.0  # seconds in which a worker that broke off is seen to be gone
_START_SECONDS = 30.0  # in which a forked worker runs its first code
_STARTS = 3  # how often workers are started until they do
_KEPT = 4  # how many batches of each worker a caller may keep before batches are copied


class Workers:
    """Runs lanes in DataLoader's worker processes, which one stream of commands controls.

    Args:
        stage: the pipeline, as ``lay_out`` made it.
        count: how many processes; 0: the lanes run in this process.
        persistent: keep the processes from one run to the next.
        on_start: called with its number in each process that starts.
        options: options of DataLoader.
    """

    def __init__(
        self,
        stage: Stage[Any],
        count: int,
        *,
        persistent: bool,
        on_start: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        if on_start is not None and not callable(on_start):
            raise TypeError(f"worker_init_fn must be a function of the number of a worker, not {on_start!r:.80}")
        self.count = count
        self.persistent = persistent
        self._host = LaneHost(stage)
        self.commands = Commands(max(1, count))
        self._started = _Started(count)
        self._loader = DataLoader(
            self._host,
            batch_size=None,
            sampler=self.commands,
            num_workers=count,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            worker_init_fn=partial(start_worker, started=self._started, on_start=on_start) if count else None,
            **options,
        )
        self._results: Iterator[Result] | None = None  # also holds the processes
        self._inbox: Inbox | None = None  # of these processes

    def __getstate__(self) -> dict[str, Any]:
        loader = copy.copy(self._loader)
        loader.generator = None  # a generator cannot be passed to a spawned process
        return {**self.__dict__, "_loader": loader, "_results": None, "_inbox": None}

    def start(self, run: int, begins: dict[int, Begin], seed: int) -> Iterator[Result]:
        """Begin a run over lanes.

        Args:
            run: the number of the run.
            begins: where each lane begins.
            seed: for the global random generators of workers that are started.

        Returns:
            the results of the workers: first those of earlier runs that are still in flight, then
            those of this run.

        Raises:
            WorkerError: a forked worker hangs before its first code, each time that it is started.
        """
        self.commands.start(run, begins)
        if not self.persistent or not all(worker.is_alive() for worker in getattr(self._results, "_workers", ())):
            self.end()
        for _ in range(_STARTS):
            if self._results is None:
                self._loader.generator = torch.Generator()  # its own: the global one is for the model
                self._loader.generator.manual_seed(seed)
                if self.count:
                    check_guarded()
                    self._inbox = Inbox((self._loader.prefetch_factor or 0) + _KEPT)
                    self._host.inbox = self._inbox.number
                with uninterrupted():
                    self._results = self._start()
            if not (hung := self._started.missing(self._results)):
                return self._results
            self.end(interrupted=True)
            self.commands.start(run, begins)
        raise WorkerError(_HUNG.format(pids=", ".join(map(str, hung)), seconds=_START_SECONDS * _STARTS))

    def _start(self) -> Iterator[Result]:
        before = multiprocessing.active_children()
        self._started.reset()
        try:
            results = iter(self._loader)
        except BaseException as error:
            for worker in multiprocessing.active_children():
                if worker not in before:
                    worker.kill()
            if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)) and re.search(
                "pickle|local object", str(error)
            ):
                error.add_note(_NOT_PICKLED)
            raise
        make_terminate_kill(getattr(results, "_workers", ()))
        end_at_cut_messages(results)
        return results

    def end(self, *, interrupted: bool = False) -> None:
        """End the processes, or close the lanes in this process: the next run starts new ones.

        Args:
            interrupted: ``next()`` of their results is running, or an exception has left it at any
                point.
        """
        with uninterrupted():
            results: Any = self._results
            self._results = None
            if not hasattr(results, "_workers"):
                self._host.close()
                return
            # A worker that was killed may have held a lock, too.
            if interrupted or not all(worker.is_alive() for worker in results._workers):
                kill_workers(results)
            else:
                end_workers(results)
            # Code that waits for a batch, in another thread or interrupted by the signal handler
            # that runs this, must see that the workers are gone.
            results._workers_status = [True] * len(results._workers)
            self._inbox = None

    def forget(self) -> None:
        """Drop the processes without ending them, in a forked child: they belong to its parent."""
        results: Any = self._results
        self._results = self._inbox = None
        if hasattr(results, "_workers"):
            results._shutdown = True
            for worker in results._workers:
                # multiprocessing would end it when the child ends
                multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if getattr(self, "_results", None) is not None:
            self.end(interrupted=True)  # the garbage collector is not to wait for workers


class Commands(Sampler[Command]):
    """The endless sequence of commands to the workers: rules 2 and 3 of ``pipe_loader``.

    Args:
        workers: how many there are, at least 1.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._run = -1
        self._worker: dict[int, int] = {}  # of each lane that has not ended
        self._begins: dict[int, dict[int, Begin]] = {}  # of each worker that had no command in this run yet
        self._turns: list[tuple[int, int]] = []  # a heap of (number of the batch, lane)

    def start(self, run: int, begins: dict[int, Begin]) -> None:
        """Begin a run over the lanes of ``begins``."""
        self._run = run
        self._worker = {lane: place % self._workers for place, lane in enumerate(begins)}
        self._begins = {
            worker: {lane: begins[lane] for lane, host in self._worker.items() if host == worker}
            for worker in range(self._workers)
        }
        self._turns = [(begin.state["delivered"], lane) for lane, begin in begins.items()]
        heapq.heapify(self._turns)

    def end(self, lane: int) -> None:
        """Remove a lane that has ended from the sequence."""
        self._worker.pop(lane, None)

    def __iter__(self) -> Iterator[Command]:
        for worker in itertools.cycle(range(self._workers)):
            while self._turns and self._turns[0][1] not in self._worker:
                heapq.heappop(self._turns)
            if not self._turns or self._worker[self._turns[0][1]] != worker:
                yield self._run, -1, None
                continue
            number, lane = self._turns[0]
            heapq.heapreplace(self._turns, (number + 1, lane))
            yield self._run, lane, self._begins.pop(worker, None)


class _Started:
    """Which workers run, in memory that they share with this process if they are forked.

    A fork copies the locks that other threads hold, and nothing releases the copies: the new
    process may wait for one for ever, before its first line of Python. Python to 3.11 has such a
    lock, which threads of gloo and NCCL take (https://github.com/python/cpython/issues/112275).
    Such a worker has read no command, so it can be replaced.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._marks: Any = bytearray(count)  # a byte for each worker

    def __reduce__(self) -> tuple[Any, ...]:
        return _Started, (self._count,)

    def reset(self) -> None:
        """Say that no worker runs, before workers are started."""
        if self._count:
            self._marks = mmap.mmap(-1, self._count)

    def mark(self, worker: int) -> None:
        """Say that a worker runs; called in its process."""
        self._marks[worker] = 1

    def missing(self, results: Any) -> list[int]:
        """Wait until all forked workers run, one has ended, or it takes too long; return the
        processes that do not run then.
        """
        workers = [one for one in getattr(results, "_workers", ()) if getattr(one._popen, "method", "") == "fork"]
        end, pause = time.monotonic() + _START_SECONDS, 0.001
        while waiting := [one for one, mark in zip(workers, self._marks[:], strict=False) if not mark]:
            if any(one.exitcode is not None for one in workers):
                return []  # DataLoader will say so
            if time.monotonic() > end:
                return [one.pid for one in waiting]
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return []


def end_at_cut_messages(results: Any) -> None:
    """Make the results of workers raise EOFError if a worker died in the middle of a message.

    DataLoader looks for dead workers only while nothing arrives. It would wait for the rest of the
    message for ever: the other workers have the pipe open too.
    """
    reader: Any = getattr(getattr(results, "_worker_result_queue", None), "_reader", None)
    if not hasattr(reader, "_recv") or not hasattr(select, "poll"):
        return  # there are no workers, or pipes are other ones (Windows)
    workers, pipe = results._workers, reader.fileno()
    readable = select.poll()
    readable.register(pipe, select.POLLIN)

    def receive(size: int) -> io.BytesIO:
        """Do what ``Connection._recv`` does."""
        content = io.BytesIO()
        while left := size - content.tell():
            while not readable.poll(_CUT_MILLISECONDS):
                if any(worker.exitcode for worker in workers):
                    raise EOFError("a worker died in the middle of a message")
            if not (chunk := os.read(pipe, left)):
                raise EOFError
            content.write(chunk)
        return content

    reader._recv = receive


def next_result(results: Any) -> Result:
    """Return the next result of workers.

    ``next()`` of DataLoader's iterators does the same inside a range for torch's profiler, which
    takes 0.02 ms of processor time also where no profiler runs.
    """
    result: Result = getattr(results, "_next_data", results.__next__)()
    return result


def worker_error(error: Exception, results: object) -> Exception:
    """Return an error of DataLoader, about a worker that died or is late, or of a connection to a
    worker that died, as a WorkerError; any other error unchanged.

    Args:
        error: the error.
        results: the results of the workers, if these were started.
    """
    workers = getattr(results, "_workers", ())
    ended = []
    if isinstance(error, (ConnectionError, EOFError)):
        sentinels = wait([worker.sentinel for worker in workers], _PATIENCE)
        ended = [worker for worker in workers if worker.sentinel in sentinels]
    if ended:
        for worker in ended:  # the system closes what it held before it gives the exit code
            worker.join(_PATIENCE)
        ids = ", ".join(str(worker.pid) for worker in ended)
        text = f"DataLoader worker (pid {ids}) ended while it sent a batch"
    elif isinstance(error, RuntimeError) and not isinstance(error, StateError) and "DataLoader" in str(error):
        text = str(error).strip().removesuffix(".")
    else:
        return error
    if text.startswith("DataLoader timed out"):
        why = (
            "no worker died. Reading or a step of the pipe takes longer than that for a batch: "
            "allow more, or find out what the workers wait for"
        )
        told = WorkerError(f"{text}, timeout_seconds: {why}. state_dict() is still good.")
    else:
        why = why_ended({worker.exitcode for worker in workers}, text)
        told = WorkerError(f"{text}. {why}. state_dict() is still good.")
    told.__cause__ = error
    return told


def _as_it_is(result: Result) -> Result:
    return result
