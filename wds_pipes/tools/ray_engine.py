"""Where tasks run: on a Ray cluster.

Rules:
1. The cluster is the one that this process is connected to; else that of ``RAY_ADDRESS``; else one
   is started on this machine, and ends with this process.
2. A function runs in the working directory of the caller, so that relative paths name the same
   files. All machines of the cluster need this directory. Modules are also found where the caller
   finds them, as in a spawned process.
3. What a function raises there is raised here, and its warnings come here.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from typing import Any

from wds_pipes.core.importing import library
from wds_pipes.errors import WorkerError
from wds_pipes.tools.jobs import Outcome, Task

_AT_ONCE = 1000  # tasks that are submitted and have not ended: their arguments are in Ray's store
_AGAIN_SECONDS = 0.5
_PATIENCE_SECONDS = 10.0  # in which a task must have discarded what it was writing


def on_ray(call: Callable[[Task], Outcome], tasks: Sequence[Task]) -> Iterator[Outcome]:
    """Run tasks on a Ray cluster: an engine for ``run(job, engine=on_ray)``; needs ray.

    The cluster is the one that this process is connected to, else that of the environment variable
    ``RAY_ADDRESS``, else one that is started on this machine. Its machines need this package, the
    same working directory, and the same paths or URLs; each task takes one CPU.
    """
    executor, left = RayExecutor(), iter(tasks)
    running: dict[Future[Outcome], Task] = {}
    try:
        while True:
            for task in islice(left, _AT_ONCE - len(running)):
                running[executor.submit(call, task)] = task
            if not running:
                return
            # for little at a time, so that Ctrl-C is noticed at any moment
            for future in wait(running, _AGAIN_SECONDS, FIRST_COMPLETED).done:
                yield _outcome(running.pop(future), future)
    finally:
        executor.shutdown(cancel_futures=True)


def _outcome(task: Task, future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except WorkerError as error:
        return Outcome(task.name, error=str(error), again=True)
    except Exception as error:
        return Outcome.failed(task.name, error)


class RayExecutor(Executor):
    """Runs functions on a Ray cluster, each as a task with one CPU.

    Args:
        retries: how often a function is run again whose process has died.

    Raises:
        WorkerError: from ``result()`` of a future: the process of the function has died.
    """

    def __init__(self, *, retries: int = 0) -> None:
        self._ray = connect()
        self._run = self._ray.remote(num_cpus=1, max_retries=retries)(_run)
        self._folder, self._modules = os.getcwd(), [os.path.abspath(path) for path in sys.path]
        self._futures: set[_Future] = set()

    @property
    def width(self) -> int:
        """How many functions the cluster runs at a time."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Run a function, which can be pickled, and return the future of what it returns."""
        work = self._ray.cloudpickle.dumps((fn, args, options))
        ref = self._run.remote(self._folder, self._modules, work)
        future = _Future(ref)
        self._futures.add(future)
        ref.future().add_done_callback(lambda done: self._end(future, done))
        return future

    def _end(self, future: _Future, done: Future[Any]) -> None:
        self._futures.discard(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            value, error, notes, future.warned = done.result()
        except Exception as problem:
            cause = getattr(problem, "cause", None) or problem
            text = next(filter(None, map(str.strip, str(cause).splitlines())), "")
            value, notes = None, []
            error = WorkerError(f"Ray could not run it to its end ({type(cause).__name__}: {text:.500})")
        if error is None:
            future.set_result(value)
        else:
            error.__notes__ = notes
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for what runs, or end it."""
        futures = list(self._futures)
        refs = [future.ref for future in futures]
        if cancel_futures:
            for future in futures:
                future.cancel()
                self._ray.cancel(future.ref)
        if refs and wait:
            patience = _PATIENCE_SECONDS if cancel_futures else None
            for ref in self._ray.wait(refs, num_returns=len(refs), timeout=patience, fetch_local=False)[1]:
                self._ray.cancel(ref, force=True)

    def __exit__(self, kind: Any, *error: object) -> None:
        self.shutdown(cancel_futures=kind is not None)


class _Future(Future[Any]):
    """What a function will return on the cluster."""

    def __init__(self, ref: Any) -> None:
        super().__init__()
        self.ref = ref
        self.warned: list[Warning | str] = []

    def result(self, timeout: float | None = None) -> Any:
        """Return what it returned, or raise what it raised, after its warnings."""
        try:
            return super().result(timeout)
        finally:
            for warning in self.warned:
                warnings.warn(warning, stacklevel=2)


def connect() -> Any:
    """Return the module of Ray, connected to a cluster."""
    ray = library("ray", "'wds_pipes[ray]'", "Ray")
    if not ray.is_initialized():
        # what tasks print would be mixed with what the command reports
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address := os.environ.get("RAY_ADDRESS"):
            _reach(address)
            ray.init(address=address, **quiet)
        else:
            ray.init(address="local", include_dashboard=False, **quiet)
    return ray


def _reach(address: str) -> None:
    """Raise ConnectionError if nothing listens there: Ray itself tries for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}): is it running, and can this machine reach it? "
            "Without this variable, a cluster is started on this machine"
        ) from error


def _run(folder: str, modules: list[str], work: bytes) -> tuple[Any, Exception | None, list[str], list[Warning | str]]:
    """Run a function on the cluster; return what it returned, or raised with its notes, and its
    warnings.
    """
    value = error = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            os.chdir(folder)  # which all machines of the cluster have
            sys.path += [path for path in modules if path not in sys.path]
            fn, args, options = pickle.loads(work)
            value = fn(*args, **options)
        except Exception as problem:
            error = problem
    return value, error, list(getattr(error, "__notes__", ())), [warning.message for warning in warned]
