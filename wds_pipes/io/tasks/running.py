"""Run a job, or a share of it, and write down what is finished.

The plan and the receipts of a job: see the rules of this package.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from wds_pipes.core.importing import library
from wds_pipes.core.words import plural, shown
from wds_pipes.errors import StateError
from wds_pipes.io.tasks.engines import in_processes, in_this_process
from wds_pipes.io.tasks.task import (
    Engine,
    Facts,
    Job,
    Outcome,
    Place,
    Report,
    Task,
    Work,
    fingerprint,
    is_inside,
    shown_place,
)
from wds_pipes.io.versions import Version, version_of

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

    _start(job, overwrite=overwrite, dry_run=dry_run)
    facts = _finished(job.place, job.tasks, overwrite=overwrite)
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
        facts |= _finished(job.place, others, overwrite=overwrite)
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
        receipt = _receipt_of(task, place)
        if receipt is not None and place.sizes(task.outputs) == receipt["outputs"]:
            return Outcome(task.name, dict(receipt["facts"]))
        place.make(task.outputs)
        facts = work(task, place)
        check_own(place, plan, task)
        write_receipt(task, place, facts)
    except Exception as error:
        return Outcome.failed(task.name, error)
    return Outcome(task.name, facts)


def _in_order(job: Job, facts: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {task.name: facts[task.name] for task in job.tasks if task.name in facts}


FOLDER = ".wds-pipes"
PLAN = f"{FOLDER}/plan.json"
_CONNECTIONS = 16
_MEND = "Write to another directory, or pass --overwrite (overwrite=True) to replace them."


def _start(job: Job, *, overwrite: bool, dry_run: bool) -> None:
    """Write the plan, unless it is there.

    Raises:
        FileExistsError: outputs are there, and no plan.
        StateError: another plan is there.
    """
    wanted = _plan(job)
    known = _read(job.place, PLAN)
    if known == wanted:
        return
    claimed = [*job.extras, *(name for task in job.tasks for name in task.outputs)]
    if known is None and not overwrite and (found := sorted(job.place.sizes(claimed))):
        known = _read(job.place, PLAN)  # another share may have written it meanwhile
        if known is None:
            raise FileExistsError(
                f"{shown_place(job.place)} has {plural(len(found), 'file')} of the names that would be written, "
                f"such as {found[0]}, and no plan of a job: another program wrote them. {_MEND}"
            )
        if known == wanted:
            return
    if known is not None and not overwrite:
        raise _other(job.place, known, wanted)
    folder = job.lists or (known or {}).get("lists", "")
    if folder and job.place.has_any(folder):
        if _read(job.place, PLAN) == wanted:  # another share may have written it meanwhile
            return
        raise FileExistsError(
            f"{shown_place(job.place)} has files in {folder}/ that this command did not write: remove that "
            "directory, or write to another one"
        )
    if dry_run:
        return
    if known is not None:
        _remove_stale(job, known)
    if overwrite:
        for name in job.extras:  # of all tasks, so it would be wrong until all are finished
            job.place.remove(name)
    job.place.make(claimed)
    try:
        job.place.write(PLAN, _bytes(wanted), overwrite=overwrite)
    except FileExistsError:  # another run has begun meanwhile
        _start(job, overwrite=False, dry_run=False)


def _remove_stale(job: Job, known: Mapping[str, Any]) -> None:
    """Remove the outputs of an earlier plan that have no place in this one."""
    current = {name for task in job.tasks for name in task.outputs}
    stale = [name for _, _, outputs in known["tasks"] for name in outputs if name not in current]
    names = {task.name for task in job.tasks}
    receipts = [_receipt(name) for name, _, _ in known["tasks"] if name not in names]
    for name in filter(job.place.has_file, [*receipts, *stale, *known.get("extras", ())]):
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
    facts = {}
    for task, receipt in valid:
        found = {name: sizes.get(name) for name in task.outputs}
        if found == receipt["outputs"]:
            facts[task.name] = receipt["facts"]
        elif not overwrite:
            for name, size in found.items():
                if size not in (None, receipt["outputs"][name]):
                    raise StateError(
                        f"{name} in {shown_place(place)} has {plural(size or 0, 'byte')}, and was written with "
                        f"{receipt['outputs'][name]:,}: another program has changed it. Remove it, or pass "
                        "--overwrite (overwrite=True), and it is written again"
                    )
    return facts


def check_plan(place: Place, command: str, options: Mapping[str, Any]) -> None:
    """Refuse the directory of another command, or of other options, before the tasks are known.

    Raises:
        StateError: it has such a plan.
    """
    known = _read(place, PLAN)
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
    known = _read(place, PLAN)
    if known is not None and fingerprint(known) == plan.content:
        return
    names = {name for _, _, outputs in known["tasks"] for name in outputs} if known is not None else set()
    for name in task.outputs:
        if name not in names:
            place.remove(name)
    raise StateError(
        f"another command writes to {shown_place(place)} now, which was started with --overwrite (overwrite=True) "
        "after this one"
    )


def unfinished(place: Place) -> tuple[str, int, int] | None:
    """The job of which a directory lacks outputs: its command, how many of its tasks are left, and
    how many there are. None: there is none.

    Raises:
        StateError: its plan is damaged.
        ShardError: the store cannot be read.
    """
    known = _read(place, PLAN)
    if known is None:
        return None
    receipts = [_receipt(name) for name, *_ in known["tasks"]]
    left = len(receipts) - len(place.sizes(receipts))
    return (known["command"], left, len(receipts)) if left else None


def _other(place: Place, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> StateError:
    return StateError(f"{shown_place(place)} has the outputs of another job: {_difference(known, wanted)}. {_MEND}")


def _receipt_of(task: Task, place: Place) -> dict[str, Any] | None:
    """The receipt of a task, if it is of these inputs and outputs."""
    receipt = _read(place, _receipt(task.name))
    if receipt is None or receipt.get("fingerprint") != task.fingerprint:
        return None
    return receipt if set(receipt["outputs"]) == set(task.outputs) else None


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


def _read(place: Place, name: str) -> dict[str, Any] | None:
    """The content of a file of the journal; None: it does not exist.

    Raises:
        StateError: it is damaged.
    """
    data = place.read(name)
    if data is None:
        return None
    try:
        content = json.loads(data)
        kind = "tasks" if name == PLAN else "outputs"
        if content["version" if name == PLAN else "facts"] is None or not isinstance(content[kind], (list, dict)):
            raise ValueError("it has another form")
        for one in _names(content) if name == PLAN else content[kind]:
            if not is_inside(one):
                raise ValueError(f"it names {one!r}, which is not below its directory")
        return dict(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{place.at(name)} is damaged ({type(error).__name__}: {error}): remove it, and the tasks are run again"
            if name != PLAN
            else f"{place.at(name)} is damaged ({type(error).__name__}: {error}): write to another directory, or "
            "remove it and pass --overwrite (overwrite=True)"
        ) from error


def _names(plan: Mapping[str, Any]) -> Iterator[str]:
    """What a plan names: its tasks and their outputs, and what belongs to all of them."""
    yield from plan.get("extras", ())
    for name, _, outputs in plan["tasks"]:
        yield from (name, *outputs)


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
            return f"{name} was {_said(before, name)}, and is now {_said(now, name)}"
    if known["tasks"] == wanted["tasks"] and (other := {*known.get("extras", ())} ^ {*wanted["extras"]}):
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
