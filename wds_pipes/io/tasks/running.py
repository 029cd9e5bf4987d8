"""Run a job, or a share of it."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from wds_pipes.core.importing import library
from wds_pipes.io.tasks.engines import in_processes, in_this_process
from wds_pipes.io.tasks.journal import Journal, Plan, check_own, facts_of, plan_of, write_receipt
from wds_pipes.io.tasks.task import Engine, Job, Outcome, Place, Report, Task, Work, shown_place

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
    progress: bool = False,
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
        progress: show a progress bar; needs tqdm.

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
    engine = engine or (partial(in_processes, jobs) if jobs > 1 else in_this_process)
    tqdm = library("tqdm", "tqdm", "progress=True").tqdm if progress and not dry_run else None

    journal = Journal(job)
    journal.start(overwrite=overwrite, dry_run=dry_run)
    facts = journal.finished(job.tasks, overwrite=overwrite)
    own = job.tasks[index::shares]
    report = Report(shown_place(job.place), len(job.tasks), skipped=[task.name for task in own if task.name in facts])
    pending = [task for task in own if task.name not in facts]
    if dry_run:
        report.written, report.facts = [task.name for task in pending], _in_order(job, facts)
        return report
    plan, left = plan_of(job), len(facts) < len(job.tasks)
    call = partial(attempt, job.work, job.place, plan)
    bar = None
    if tqdm is not None:
        total, rest = sum(task.size for task in own), sum(task.size for task in pending)
        bar = tqdm(total=total, initial=total - rest, unit=job.unit, unit_scale=job.unit != "task")
    try:
        for number in count():
            pending = _round(engine, call, pending, report, last=number + 1 >= attempts, on_task=on_task, bar=bar)
            if not pending:
                break
            time.sleep(_PAUSE_SECONDS * 2 ** min(number, _MOST_DOUBLED))
    finally:
        if bar is not None:
            bar.close()
    order = {task.name: place for place, task in enumerate(job.tasks)}
    report.written.sort(key=order.__getitem__)
    report.failed = {name: report.failed[name] for name in sorted(report.failed, key=order.__getitem__)}
    facts |= report.facts
    others = [task for task in job.tasks if task.name not in facts and task.name not in report.failed]
    if not report.failed:
        facts |= journal.finished(others, overwrite=overwrite)
    report.facts = _in_order(job, facts)
    if report.complete:
        if job.tasks:
            check_own(job.place, plan, job.tasks[-1])
        written = bool(job.extras) and not left and len(job.place.sizes(job.extras)) == len(job.extras)
        if job.finish is not None and not written:
            job.finish(job.place, list(report.facts.values()))
    return report


def _round(
    engine: Engine,
    call: Callable[[Task], Outcome],
    tasks: Sequence[Task],
    report: Report,
    *,
    last: bool,
    on_task: Callable[[Outcome], None] | None,
    bar: object,
) -> list[Task]:
    """Run tasks once, and return those that are to be tried again. If the disk is full, the rest is
    not run.
    """
    named, again = {task.name: task for task in tasks}, []
    outcomes = engine(call, tasks)
    try:
        for outcome in outcomes:
            task = named.pop(outcome.name)
            if outcome.facts is None and (outcome.busy or (outcome.again and not last)):
                if last:
                    logger.warning("%s is being written by another process, which is waited for.", task.name)
                again.append(task)
                continue
            if outcome.facts is None:
                report.failed[task.name] = outcome.error
            else:
                report.written.append(task.name)
                report.facts[task.name] = outcome.facts
            if on_task is not None:
                on_task(outcome)
            if bar is not None:
                bar.update(task.size)  # type: ignore[attr-defined]
            if outcome.full:
                return []
    finally:
        if (close := getattr(outcomes, "close", None)) is not None:
            close()
    for name in named:
        report.failed[name] = "the engine returned no outcome for it"
    return again


def attempt(work: Work, place: Place, plan: Plan, task: Task) -> Outcome:
    """Run a task, and write its receipt, unless another run has finished it meanwhile, or another
    job, with another plan, has taken over the directory.
    """
    try:
        check_own(place, plan, task)
        if (known := facts_of(task, place)) is not None:
            return Outcome(task.name, known)
        place.make(task.outputs)
        facts = work(task, place)
        check_own(place, plan, task)
        write_receipt(task, place, facts)
    except Exception as error:
        return Outcome.failed(task.name, error)
    return Outcome(task.name, facts)


def _in_order(job: Job, facts: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {task.name: facts[task.name] for task in job.tasks if task.name in facts}
