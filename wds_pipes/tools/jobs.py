"""Jobs that write files: independent tasks, on one machine or on many.

Rules of jobs:
1. The outputs of a task are known before it runs. Each appears when it is complete, and running a
   task again gives the same bytes.
2. ``.wds-pipes/plan.json`` in the directory of the outputs says which job it is: the options, and
   for each task its outputs and a fingerprint of what it is made from. It is written before the
   first output. Another plan there is refused, and so are outputs without a plan.
3. When all outputs of a task have their names, its receipt is written: its fingerprint, the sizes
   of the outputs, and what it found. A task is finished if it has a receipt with its fingerprint,
   and its outputs have these sizes. A task that was killed before its receipt is run again.
4. Outputs may be lists of more files that the tasks write into a directory. Another job does not
   begin while anything is there: its plan would not say which of these files are whose.
5. Tasks share nothing but this directory. So each share of them can run anywhere and at any time;
   the one that finds all receipts writes what belongs to the whole, such as ``index.json``.
6. A job may also run twice at once: a task that has a receipt by now is not run, and one whose file
   another process is writing is waited for.

Rules of processes, in which tasks run:
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
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeAlias

from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.words import bytes_shown, plural, shown
from wds_pipes.errors import SampleError, StateError, WdsError, for_commands, how_to_repair, mended
from wds_pipes.io.outputs import asked, read_small, remove, size_of, target_of, write_small
from wds_pipes.io.urls import below, hide, is_below, local_path, redact, words
from wds_pipes.io.versions import Version, version_of
from wds_pipes.tools.progress import Units
from wds_pipes.tools.progress import progress as shown_progress

_PATIENCE_SECONDS = 10.0  # in which a process must have discarded what it was writing
_AGAIN_SECONDS = 0.5  # how long to wait at a time

Facts: TypeAlias = dict[str, Any]
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or a quota used up


def _nothing(count: int) -> None:
    """Take a number of units, and show nothing."""


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
        advance: called by ``work`` with how many units of ``size`` it has done since its last call.
            Without these calls, progress shows when the task ends.
    """

    name: str
    outputs: tuple[str, ...]
    arguments: Any = None
    fingerprint: str = ""
    size: int = 1
    says: str = ""
    advance: Callable[[int], object] = field(default=_nothing, compare=False, repr=False)


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


# Runs tasks anywhere: it is called with a function that can be pickled, and with tasks, and yields
# what the function returns for each task, in any order. Where the process of a task dies, it yields
# an Outcome that says so. If it is closed early, it ends what it has started.
Engine: TypeAlias = "Callable[[Attempt, Sequence[Task]], Iterator[Outcome]]"


@dataclass(frozen=True)
class Place:
    """The directory where a job writes, on a local disk or in a store.

    Args:
        url: its path or URL.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Raises:
        ValueError: nothing can be written there.
    """

    url: str
    storage_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", target_of(self.url).rstrip("/") or "/")

    def __str__(self) -> str:
        """Return the directory without credentials, for messages."""
        return redact(self.url)

    def at(self, name: str) -> str:
        """The path or URL of a file in it.

        Raises:
            ValueError: the name leads out of it.
        """
        return below(self.url, name)

    def make(self, names: Sequence[str]) -> None:
        """Make the directories of files; stores have none."""
        if local_path(self.url) is not None:
            for folder in sorted({os.path.dirname(self.at(name)) for name in names}):
                os.makedirs(folder, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None: it does not exist."""
        return read_small(self.at(name), self.storage_options)

    def write(self, name: str, content: bytes, *, overwrite: bool = True) -> None:
        """Write a small file; it appears when it is complete. FileExistsError: it is there, and
        ``overwrite`` is not set.
        """
        self.make([name])
        write_small(self.at(name), content, self.storage_options, overwrite=overwrite)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        remove(self.at(name), self.storage_options)

    def has_file(self, name: str) -> bool:
        """Whether it may have a file of this name: on a disk one that is no directory, and in no
        directory that is a link to another place.
        """
        root = local_path(self.url)
        if root is None:
            return True
        path = os.path.join(os.path.realpath(root), name)
        folder = os.path.dirname(path)
        return os.path.realpath(folder) == folder and not os.path.isdir(path)

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """The sizes in bytes of those of these files that exist."""
        if local_path(self.url) is not None:
            found = {name: size_of(self.at(name)) for name in names}
            return {name: size for name, size in found.items() if size is not None}
        sizes: dict[str, int] = {}
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            for entry in self._listed(folder):
                if entry["type"] == "file":
                    name = entry["name"].rstrip("/").rpartition("/")[2]
                    sizes[f"{folder}/{name}" if folder else name] = int(entry["size"] or 0)
        return {name: sizes[name] for name in names if name in sizes}

    def has_any(self, folder: str) -> bool:
        """Whether there is anything in a directory."""
        path = local_path(self.at(folder))
        if path is None:
            return bool(self._listed(folder))
        try:
            return bool(os.listdir(path))
        except FileNotFoundError:
            return False

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        """What is in a directory of a store, in one request for a thousand files."""
        url = self.at(folder) if folder else self.url
        return list(asked(url, self.storage_options, lambda fs, path: fs.ls(path, detail=True), "listed") or [])


# What a task does: it writes its outputs to the place, replacing what is there, and returns facts
# that JSON can represent.
Work: TypeAlias = Callable[[Task, Place], Facts]


@dataclass(frozen=True)
class Job:
    """A command that writes files: what is run, and where its outputs are.

    Attributes:
        command: its name in messages and in the plan.
        place: the directory of the outputs. It belongs to one job.
        work: a function of a module (processes import it), called with a task and the place. It
            writes the outputs of the task, each under its name only when it is complete, replaces
            what is there, and returns facts that JSON can represent.
        tasks: the parts; their order decides how they are shared.
        options: what the outputs depend on, as JSON values. They are named where a plan differs.
        finish: called with the place and the facts of all tasks in order when all are finished: it
            writes what belongs to the whole. It may be called again.
        extras: the files that ``finish`` writes. If nothing was left to do and all are there, it is
            not called.
        unit: what the sizes of the tasks count, in the progress bar; ``"B"`` for bytes.
        lists: if the outputs are lists of more files that the tasks write, the directory of these.
            If anything is there, no other job begins, also with ``overwrite``.
    """

    command: str
    place: Place
    work: Work
    tasks: Sequence[Task]
    options: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Place, list[Facts]], None] | None = None
    extras: tuple[str, ...] = ()
    unit: str = "task"
    lists: str = ""

    def __post_init__(self) -> None:
        outputs, tasks = self.outputs, [task.name for task in self.tasks]
        for name in [*outputs, *tasks]:
            if not is_inside(name):
                raise ValueError(f"an output is named relative to its directory, and not {name!r}")
        for what, names in (("output", outputs), ("task", tasks)):
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"two tasks have one {what}, {twice!r}: give each its own")

    @property
    def outputs(self) -> list[str]:
        """The names of all files that are written."""
        return [*(name for task in self.tasks for name in task.outputs), *self.extras]


@dataclass
class Report:
    """What is known after a job, or a share of it, has run.

    Attributes:
        command: the name of the job.
        place: the directory of the outputs, without credentials.
        total: the number of tasks of the job.
        dry_run: whether nothing was written.
        written: the names of the tasks that ran; with ``dry_run``, of those that would.
        skipped: the names of the tasks of this share that were finished before.
        failed: why tasks failed, by their names.
        facts: what the finished tasks of the job found, by their names, in order.
        says: with ``dry_run``, what each task would write, in words.
    """

    command: str
    place: str
    total: int
    dry_run: bool = False
    written: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all tasks of the job are finished, also those of other shares."""
        return len(self.facts) == self.total

    def __str__(self) -> str:
        there = f" ({len(self.skipped):,} of {self.total:,} there already)" if self.skipped else ""
        if self.dry_run:
            lines = [f"would write {name}: {says}" for name, says in self.says.items()]
            return "\n".join([*lines, f"{self.place}: {plural(len(lines), 'task')} to do{there}"])
        if not self.complete:
            return f"written to {self.place}: {len(self.facts):,} of {plural(self.total, 'task')}{there}"
        return f"written to {self.place}: {summary(list(self.facts.values()))}{there}"


class FailedTasksError(WdsError):
    """Tasks of a job have failed; the others are finished.

    Attributes:
        report: what was written, and why tasks failed.
    """

    def __init__(self, report: Report) -> None:
        name, why = next(iter(report.failed.items()))
        super().__init__(
            f"{len(report.failed):,} of {plural(report.total, 'task')} failed, the first is {name}: {why.rstrip('.')}. "
            "What is finished is kept: do the same again when the cause is mended"
        )
        self.report = report


# What the facts of tasks count besides samples and bytes, in words.
_COUNTED = {
    "skipped": "skipped because of errors",
    "missing": "without a partner",
    "without_fields": "left out, which had none of the fields",
    "joined": "joined from pieces",
}


def summary(facts: Sequence[Facts]) -> str:
    """What the tasks of a job have found, in words."""

    def total(name: str) -> int:
        return sum(fact.get(name) or 0 for fact in facts)

    shards = [fact for fact in facts if "shard" in fact]
    words = plural(len(shards), "shard") if shards else plural(len(facts), "file")
    if any(fact.get("samples") is not None for fact in facts):
        words += f", {plural(total('samples'), 'sample')}"
    if any("size" in fact for fact in facts):
        words += f", {bytes_shown(total('size'))}"
    if any("read" in fact for fact in facts):
        words += f", of {plural(total('read'), 'sample')}"
    parts = [words]
    parts += [f"{plural(total(name), 'sample')} {what}" for name, what in _COUNTED.items() if total(name)]
    if first := [fact["first_error"] for fact in facts if "first_error" in fact]:
        parts.append(f"the first error: {first[0].rstrip('.')}")
    if empty := sum(fact["samples"] == 0 for fact in shards):
        parts.append(f"{plural(empty, 'shard')} without samples")
    if facts and (absent := set.intersection(*(set(fact.get("absent", ())) for fact in facts))):
        parts.append(f"no sample has the field {', '.join(sorted(absent))}")
    if any("lost" in fact for fact in facts):
        parts.append(_lost([entry for fact in facts for entry in fact["lost"]]))
    if other := sum("other_md5" in fact for fact in facts):
        parts.append(
            f"{plural(other, 'shard')} with another MD5 than index.json says, so that bytes of fields are changed: "
            "wds-pipes verify names them"
        )
    return "; ".join(parts)


def _lost(entries: Sequence[Mapping[str, Any]]) -> str:
    """What was lost of damaged shards, in words."""
    if not entries:
        return "nothing is lost"
    files = sum("file" in entry for entry in entries)
    places = sum(entry["key"] is None for entry in entries)
    samples = len({(one["shard"], one["key"]) for one in entries if one["key"] is not None and "file" not in one})
    counts = {"sample": samples, "single file": files, "damaged place": places}
    what = ", ".join(plural(count, noun) for noun, count in counts.items() if count)
    if cut := len({one["shard"] for one in entries if one["key"] is None and one["end"] is None}):
        what += f", and what followed in {plural(cut, 'cut shard')}"
    return f"lost: {what}; in {plural(len({one['shard'] for one in entries}), 'shard')}, see lost.jsonl"


def is_inside(name: str) -> bool:
    """Whether a name is that of a file in the directory of a job, besides its journal."""
    return is_below(name) and not name.startswith(".wds-pipes")


def fingerprint(*values: Any) -> str:
    """Return a hash of JSON values, as 32 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode("ascii"), digest_size=16).hexdigest()


logger = logging.getLogger("wds_pipes")

_PAUSE_SECONDS = 1.0  # before failed tasks are tried again; doubled each time
_MOST_DOUBLED = 4


def run(
    job: Job,
    *,
    jobs: int = 1,
    share: tuple[int, int] = (0, 1),
    engine: Engine | None = None,
    attempts: int = 3,
    overwrite: bool = False,
    dry_run: bool = False,
    on_task: Callable[[Outcome], None] | None = None,
    progress: bool | None = False,
) -> Report:
    """Run the tasks of a job that are not finished yet.

    The outputs are the same, byte for byte, however the tasks are run: in one process, in several,
    in shares on several machines, in any order, and after any interruption. A task that fails does
    not stop the others, unless the disk is full.

    Args:
        job: what is run.
        jobs: how many tasks run at a time on this machine, each in a process of its own. 1: in this
            process.
        share: ``(i, n)``: only tasks i, i + n, i + 2 n, ... of the job, for n machines or array
            jobs that run at the same time or not.
        engine: what runs the tasks instead: see ``Engine``.
        attempts: how often a task is tried. What does not depend on the moment (a wrong sample, a
            wrong argument) is tried once. A file that another process is writing is waited for.
        overwrite: replace the outputs of another job, or of another program, in this directory.
            Tasks that are finished from the same inputs are kept.
        dry_run: write nothing, and report what would be written.
        on_task: called with the outcome of each task.
        progress: True: show a progress bar, which needs tqdm; None: a line each minute.

    Returns:
        What was written, skipped and failed.

    Raises:
        FileExistsError: outputs are in the directory, and no plan.
        StateError: the directory has the outputs of another job, or of other inputs; or a file
            there was changed.
        ShardError: the store cannot be read or written.
        ValueError, TypeError: an argument does not fit.
    """
    index, shares = share
    if not 0 <= index < shares:
        raise ValueError(f"share i of n needs 0 <= i < n, not {index} of {shares}: shares are counted from 0")
    if jobs < 1 or attempts < 1:
        raise ValueError(f"jobs and attempts must be at least 1, not {jobs} and {attempts}")
    if jobs > 1 or engine is not None:
        try:
            pickle.dumps(job.work)
        except Exception as error:
            raise TypeError(f"work is a function of a module, which other processes can import: {error}") from error
    _start(job, overwrite=overwrite, dry_run=dry_run)
    facts = _finished(job.place, job.tasks, overwrite=overwrite)
    own = job.tasks[index::shares]
    pending = [task for task in own if task.name not in facts]
    report = Report(job.command, str(job.place), len(job.tasks), dry_run)
    report.skipped = [task.name for task in own if task.name in facts]
    if dry_run:
        report.written, report.facts = [task.name for task in pending], _in_order(job, facts)
        report.says = {task.name: task.says for task in pending}
        return report
    plan, left = plan_of(job), len(facts) < len(job.tasks)
    total, rest = sum(task.size for task in own), sum(task.size for task in pending)
    with shown_progress(total, job.unit, show=progress, done=total - rest) as advance:
        units = Units(advance, {task.name: task.size for task in pending})
        call, engine = Attempt(job.work, job.place, plan, units.add), engine or engine_of(jobs)
        outcomes = _run(engine, call, pending, attempts=attempts, on_task=on_task, units=units)
    for outcome in (outcomes[task.name] for task in pending if task.name in outcomes):
        if outcome.facts is None:
            report.failed[outcome.name] = outcome.error
        else:
            report.written.append(outcome.name)
            facts[outcome.name] = outcome.facts
    if not report.failed:
        others = [task for task in job.tasks if task.name not in facts]
        facts |= _finished(job.place, others, overwrite=overwrite)
    report.facts = _in_order(job, facts)
    if report.complete:
        if job.tasks:
            check_own(job.place, plan, job.tasks[-1])
        written = bool(job.extras) and not left and len(job.place.sizes(job.extras)) == len(job.extras)
        if job.finish is not None and not written:
            job.finish(job.place, list(report.facts.values()))
    return report


def _run(
    engine: Engine,
    call: Attempt,
    tasks: Sequence[Task],
    *,
    attempts: int,
    on_task: Callable[[Outcome], None] | None,
    units: Units,
) -> dict[str, Outcome]:
    """Run tasks until each is done or has failed, and return the outcomes by their names. If the
    disk is full, the rest is not run.
    """
    done: dict[str, Outcome] = {}
    waiting = {task.name: task for task in tasks}
    number = 0
    while waiting:
        number += 1
        again: dict[str, Task] = {}
        with contextlib.closing(_outcomes(engine, call, list(waiting.values()))) as outcomes:
            for outcome in outcomes:
                task = waiting.pop(outcome.name)
                if outcome.facts is None and (outcome.busy or (outcome.again and number < attempts)):
                    if number >= attempts:
                        logger.warning("%s is being written by another process, which is waited for.", task.name)
                    again[task.name] = task
                    units.end(task.name, done=False)
                    continue
                done[task.name] = outcome
                if on_task is not None:
                    on_task(outcome)
                units.end(task.name)
                if outcome.full:
                    return done
        done |= {name: Outcome(name, error="the engine returned no outcome for it") for name in waiting}
        waiting = again
        if again:
            time.sleep(_PAUSE_SECONDS * 2 ** min(number - 1, _MOST_DOUBLED))
    return done


def _outcomes(engine: Engine, call: Attempt, tasks: Sequence[Task]) -> Generator[Outcome]:
    """Yield what an engine yields; if this is closed early, so is the engine."""
    yield from engine(call, tasks)


@dataclass
class Attempt:
    """Runs tasks of a job: what engines call. It can be pickled, without ``on_units``.

    Attributes:
        work: of the job.
        place: of the job.
        plan: of the job.
        on_units: called with the name of a task, and how many of its units were done.
    """

    work: Work
    place: Place
    plan: Plan
    on_units: Callable[[str, int], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "on_units": None}

    def __call__(self, task: Task) -> Outcome:
        """Run a task, and write its receipt, unless another run has finished it meanwhile, or
        another job, with another plan, has taken over the directory. Return what became of it.
        """
        place = self.place
        if self.on_units is not None:
            task = replace(task, advance=partial(self.on_units, task.name))
        try:
            check_own(place, self.plan, task)
            receipt = _receipt_of(task, place)
            if receipt is not None and place.sizes(task.outputs) == receipt.outputs:
                return Outcome(task.name, receipt.facts)
            place.make(task.outputs)
            facts = self.work(task, place)
            check_own(place, self.plan, task)
            write_receipt(task, place, facts)
        except Exception as error:
            return Outcome.failed(task.name, error)
        return Outcome(task.name, facts)


def _in_order(job: Job, facts: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {task.name: facts[task.name] for task in job.tasks if task.name in facts}


FOLDER = ".wds-pipes"
PLAN = f"{FOLDER}/plan.json"
_CONNECTIONS = 16
_MENDS = {
    "mend": "Write to another directory, or pass overwrite=True to replace them.",
    "mend_cli": "Write to another directory, or pass --overwrite to replace them.",
}


def _start(job: Job, *, overwrite: bool, dry_run: bool) -> None:
    """Write the plan, unless it is there.

    Raises:
        FileExistsError: outputs are there, and no plan.
        StateError: another plan is there.
    """
    wanted, known = _plan(job), _read_plan(job.place)
    if known == wanted:
        return
    problem = _problem(job, known, wanted, overwrite=overwrite)
    if problem is not None:
        if _read_plan(job.place) == wanted:  # another share may have written it meanwhile
            return
        raise problem
    if dry_run:
        return
    if known is not None:
        _remove_stale(job, known)
    if overwrite:
        for name in job.extras:  # of all tasks, so it would be wrong until all are finished
            job.place.remove(name)
    try:
        job.place.write(PLAN, _bytes(wanted), overwrite=overwrite)
    except FileExistsError:  # another run has begun meanwhile
        _start(job, overwrite=False, dry_run=False)


def _problem(
    job: Job, known: dict[str, Any] | None, wanted: dict[str, Any], *, overwrite: bool
) -> StateError | FileExistsError | None:
    """Why a job cannot begin where another plan is, or none."""
    if not overwrite:
        if known is not None:
            return _other(job.place, known, wanted)
        if found := sorted(job.place.sizes(job.outputs)):
            what = (
                f"{job.place} has {plural(len(found), 'file')} of the names that would be written, "
                f"such as {found[0]}, and no plan of a job: another program wrote them"
            )
            return mended(FileExistsError, what, **_MENDS)
    folder = job.lists or (known or {}).get("lists", "")
    if folder and job.place.has_any(folder):
        return FileExistsError(
            f"{job.place} has files in {folder}/ that this command did not write: remove that "
            "directory, or write to another one"
        )
    return None


def _remove_stale(job: Job, known: Mapping[str, Any]) -> None:
    """Remove the outputs of an earlier plan that have no place in this one."""
    current = {name for task in job.tasks for name in task.outputs}
    stale = [name for _, _, outputs in known["tasks"] for name in outputs if name not in current]
    names = {task.name for task in job.tasks}
    receipts = [_receipt(name) for name, _, _ in known["tasks"] if name not in names]
    for name in filter(job.place.has_file, [*receipts, *stale, *known["extras"]]):
        job.place.remove(name)


def _finished(place: Place, tasks: Iterable[Task], *, overwrite: bool) -> dict[str, Facts]:
    """The facts of those tasks that are finished.

    Raises:
        StateError: an output was changed after it was written, and ``overwrite`` is not set.
    """
    tasks = list(tasks)
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        receipts = list(pool.map(lambda task: _receipt_of(task, place), tasks))
    valid = [(task, receipt) for task, receipt in zip(tasks, receipts, strict=True) if receipt is not None]
    sizes = place.sizes([name for task, _ in valid for name in task.outputs])
    for _, receipt in valid:
        for name, size in receipt.outputs.items():
            if not overwrite and sizes.get(name, size) != size:
                raise StateError(
                    f"{name} in {place} has {plural(sizes[name], 'byte')}, and was written with {size:,}: another "
                    "program has changed it",
                    mend="Remove it, or pass overwrite=True, and it is written again",
                    mend_cli="Remove it, or pass --overwrite, and it is written again",
                )
    return {task.name: receipt.facts for task, receipt in valid if receipt.outputs.items() <= sizes.items()}


def check_plan(place: Place, command: str, options: Mapping[str, Any]) -> None:
    """Refuse the directory of another command, or of other options, before the tasks are known.

    Raises:
        StateError: it has such a plan.
    """
    known = _read_plan(place)
    if known is not None:
        wanted = {**known, "command": command, "options": json.loads(json.dumps(dict(options)))}
        if known != wanted:
            raise _other(place, known, wanted)


class Plan(NamedTuple):
    """What tells the plan of a job from another one.

    Attributes:
        version: of the file, which is quick to compare. Another share may have written the same
            plan again, so another version alone means nothing.
        content: a hash of what it says.
    """

    version: Version
    content: str


def plan_of(job: Job) -> Plan:
    """The plan of a job that has started."""
    return Plan(_version(job.place), fingerprint(_plan(job)))


def _version(place: Place) -> Version:
    return version_of(place.at(PLAN), place.storage_options)._replace(sure=True)


def check_own(place: Place, plan: Plan, task: Task) -> None:
    """Refuse to go on in a directory that another job has taken over since.

    Args:
        place: the directory.
        plan: that of this job.
        task: a task of it; its outputs that are not those of the other job are removed.

    Raises:
        StateError: the directory has another plan.
    """
    if _version(place) == plan.version:
        return
    known = _read_plan(place)
    if known is not None and fingerprint(known) == plan.content:
        return
    names = {name for _, _, outputs in known["tasks"] for name in outputs} if known is not None else set()
    for name in task.outputs:
        if name not in names:
            place.remove(name)
    raise StateError(
        f"another command writes to {place} now, which was started after this one and replaces what is there"
    )


def unfinished(place: Place) -> tuple[str, int, int] | None:
    """The job of which a directory lacks outputs: its command, how many of its tasks are left, and
    how many there are. None: there is none.

    Raises:
        StateError: its plan is damaged.
        ShardError: the store cannot be read.
    """
    known = _read_plan(place)
    if known is None:
        return None
    receipts = [_receipt(name) for name, *_ in known["tasks"]]
    left = len(receipts) - len(place.sizes(receipts))
    return (known["command"], left, len(receipts)) if left else None


def _other(place: Place, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> StateError:
    return StateError(f"{place} has the outputs of another job: {_difference(known, wanted)}", **_MENDS)


class Receipt(NamedTuple):
    """What is known of a finished task: the sizes of its outputs, and what it has found."""

    outputs: dict[str, int]
    facts: Facts


def _receipt_of(task: Task, place: Place) -> Receipt | None:
    """The receipt of a task, if it is of these inputs and outputs.

    Raises:
        StateError: it is damaged.
    """
    name = _receipt(task.name)
    with _damage(place, name, "remove it, and the tasks are run again"):
        known = _read(place, name)
        if known is None or known["fingerprint"] != task.fingerprint:
            return None
        receipt = Receipt(dict(known["outputs"]), dict(known["facts"]))
        return receipt if receipt.outputs.keys() == set(task.outputs) else None


def write_receipt(task: Task, place: Place, facts: Facts) -> None:
    """Write down that the outputs of a task are complete.

    Raises:
        FileNotFoundError: they are not all there.
    """
    sizes = place.sizes(task.outputs)
    if missing := [name for name in task.outputs if name not in sizes]:
        raise FileNotFoundError(f"the task did not write {missing[0]}")
    content = {"task": task.name, "fingerprint": task.fingerprint, "outputs": sizes, "facts": facts}
    place.write(_receipt(task.name), _bytes(content))


def _receipt(name: str) -> str:
    return f"{FOLDER}/done/{name}.json"


def _plan(job: Job) -> dict[str, Any]:
    plan = {
        "version": 1,
        "command": job.command,
        "options": dict(job.options),
        "extras": list(job.extras),
        "tasks": [[task.name, task.fingerprint, list(task.outputs)] for task in job.tasks],
        **({"lists": job.lists} if job.lists else {}),
    }
    return dict(json.loads(_bytes(plan)))  # as it is read


def _bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=None, separators=(",", ":")) + "\n").encode("ascii")


def _read_plan(place: Place) -> dict[str, Any] | None:
    """The plan in a directory; None: there is none. It may come from anywhere.

    Raises:
        StateError: it is damaged, or names files outside of the directory.
    """
    with _damage(place, PLAN, "write to another directory, or remove it, and replace what was written"):
        plan = _read(place, PLAN)
        if plan is not None:
            names = [*plan["extras"], *(each for name, _, outputs in plan["tasks"] for each in (name, *outputs))]
            for name in names:
                if not is_inside(name):
                    raise ValueError(f"it names {name!r}, which is not below its directory")
            plan["options"] = dict(plan["options"])
        return plan


def _read(place: Place, name: str) -> dict[str, Any] | None:
    data = place.read(name)
    return None if data is None else dict(json.loads(data))


@contextlib.contextmanager
def _damage(place: Place, name: str, mend: str) -> Iterator[None]:
    """Say which file of the journal is damaged."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{place.at(name)} is damaged ({type(error).__name__}: {error}): {mend}") from error


def _said(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)
    if value is None or value == []:
        return "not given"
    return ",".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else shown(value)


def _difference(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What distinguishes two plans, in words."""
    if known["command"] != wanted["command"]:
        return f"it was made by {known['command']!r}, and this is {wanted['command']!r}"
    before, now = known["options"], wanted["options"]
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            what = name if " " in name else f"--{name.replace('_', '-')}"
            return f"{what} was {_said(before, name)}, and is now {_said(now, name)}"
    if known["tasks"] == wanted["tasks"] and (other := {*known["extras"]} ^ {*wanted["extras"]}):
        where = "only then" if other.isdisjoint(wanted["extras"]) else "only now"
        return f"{', '.join(sorted(other))} belongs to its outputs {where}"
    marks = {name: mark for name, mark, _ in known["tasks"]}
    changed = [name for name, mark, _ in wanted["tasks"] if marks.get(name) != mark]
    gone = len(marks) - sum(name in marks for name, _, _ in wanted["tasks"])
    first = f", the first is {changed[0]}" if changed else ""
    return (
        f"the inputs were changed: {len(changed)} of {plural(len(wanted['tasks']), 'task')} would be other than "
        f"before{first}" + (f", and {gone} would not be there" if gone else "")
    )


# Where tasks run


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


def in_processes(jobs: int, call: Attempt, tasks: Sequence[Task]) -> Iterator[Outcome]:
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
                message = worker.receive()
                if isinstance(message, int):
                    if call.on_units is not None:
                        call.on_units(worker.task, message)
                    continue
                yield message
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

    def __init__(self, call: Attempt) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, call))
        self.process.start()
        theirs.close()
        self.task = ""

    def begin(self, task: Task) -> None:
        """Send it a task."""
        self.task = task.name
        with contextlib.suppress(OSError):  # it has died, which ``receive`` reports
            self.connection.send(task)

    def receive(self) -> Outcome | int:
        """What became of its task, since its process may have ended too; or how many units of it
        were done.
        """
        try:
            message: Outcome | int = self.connection.recv()
            return message
        except (EOFError, OSError):
            self.process.join(_PATIENCE_SECONDS)
            error = (
                f"its process ended with exit code {self.process.exitcode}; if the system did that because memory is "
                "short (-9), use fewer jobs (-j)"
            )
            return Outcome(self.task, error=error, again=True)

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


def _serve(connection: Connection[Any, Any], call: Attempt) -> None:
    """Run the tasks that come through the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    call.on_units = _Sender(connection)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(call(task))


class _Sender:
    """Sends how many units of a task were done, at most twice a second."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._task, self._count, self._next = connection, "", 0, 0.0

    def __call__(self, task: str, count: int) -> None:
        self._count = self._count + count if task == self._task else count
        self._task, now = task, time.monotonic()
        if now >= self._next:
            self._connection.send(self._count)
            self._count, self._next = 0, now + _AGAIN_SECONDS


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
