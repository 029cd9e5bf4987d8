"""What all commands that write files have in common: how their tasks run, and what they report."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import click

from wds_pipes.cli.options import (
    Damaged,
    Refused,
    as_json,
    check_engine,
    echo,
    echo_json,
    ended_by_sigterm,
    engine,
    in_one_line,
    progress,
    storage_options,
)
from wds_pipes.cli.shards import summary
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError
from wds_pipes.io.tasks.engines import in_processes, in_this_process
from wds_pipes.io.tasks.on_ray import connect, on_ray
from wds_pipes.io.tasks.running import run
from wds_pipes.io.tasks.task import Engine, Facts, Job, Outcome, Place, Report, Task, fingerprint


class Running(NamedTuple):
    """The options with which tasks run."""

    jobs: int = 1
    engine: str | None = None
    task: int | None = None
    tasks: int | None = None
    overwrite: bool = False
    dry_run: bool = False
    as_json: bool = False
    progress: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """Which tasks to run.

        Raises:
            UsageError: only one of the two options is given, or they do not fit.
        """
        if self.task is None and self.tasks is None:
            return 0, 1
        if self.task is None or self.tasks is None:
            raise click.UsageError("--task and --tasks belong together: --task 0 --tasks 8 is the first of 8 shares")
        if self.task >= self.tasks:
            raise click.UsageError(f"--task counts from 0, so of {self.tasks} the last is --task {self.tasks - 1}")
        return self.task, self.tasks


_OPTIONS = (
    click.option(
        "-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this machine."
    ),
    engine,
    click.option("--task", type=click.IntRange(min=0), help="Do only this share of the work, counted from 0."),
    click.option("--tasks", type=click.IntRange(min=1), help="How many shares the work has, on any machines."),
    click.option("--overwrite", is_flag=True, help="Replace what another command, or other input, has written there."),
    click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing."),
    as_json,
    progress,
)


def runs(summed: Callable[[Report], str] = summary) -> Callable[[Callable[..., Job]], Callable[..., None]]:
    """Make a command of a function that returns a job, which is run and reported. The exit code is
    1 if samples or tasks failed, 2 if it cannot run.

    The command gets the options with which tasks run, and ``--storage-options``. Its argument DEST
    becomes ``place``, which has the storage options; the function also gets ``running``.

    Args:
        summed: what the finished tasks wrote, in words.
    """

    def decorated(function: Callable[..., Job]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*, dest: str, storage_options: dict[str, Any], **given: Any) -> None:
            running = Running(**{name: given.pop(name) for name in Running._fields})
            check_engine(running.engine)
            with in_one_line(), ended_by_sigterm(), _resumable(running):
                share = running.share
                if running.engine and not running.dry_run:
                    connect()  # before anything is written
                job = function(place=Place(dest, storage_options or None), running=running, **given)
                report = run(
                    job,
                    jobs=running.jobs,
                    engine=on_ray if running.engine else None,
                    share=share,
                    overwrite=running.overwrite,
                    dry_run=running.dry_run,
                    on_task=_tell,
                    progress=running.progress,
                )
            with in_one_line():
                _show(job, report, running, summed)
            if report.failed:
                raise Damaged(
                    f"{plural(len(report.failed), 'task')} failed, as shown. Run the command again when the cause is "
                    "mended: what is finished is kept. With other options, also pass --overwrite."
                )

        for option in reversed(_OPTIONS):
            option(command)
        return storage_options(command)

    return decorated


@contextlib.contextmanager
def _resumable(running: Running) -> Iterator[None]:
    """Say after Ctrl-C what becomes of what is finished."""
    try:
        yield
    except KeyboardInterrupt:
        if not running.dry_run:
            click.echo("what is finished is kept: run the same command again to go on", err=True)
        raise


def _show(job: Job, report: Report, running: Running, summed: Callable[[Report], str]) -> None:
    if running.as_json:
        shown = {
            "command": job.command,
            "place": report.place,
            "tasks": report.total,
            "would_write" if running.dry_run else "written": report.written,
            "skipped": report.skipped,
            "failed": report.failed,
            "complete": report.complete,
            "facts": report.facts,
        }
        echo_json(shown)
    elif running.dry_run:
        says = {task.name: task.says for task in job.tasks}
        for name in report.written:
            echo(f"would write {name}: {says[name]}")
        echo(f"{report.place}: {len(report.written)} to write, {len(report.skipped)} there already")
    else:
        done = f"{len(report.written)} written, {len(report.skipped)} there already"
        left = report.total - len(report.facts)
        whole = summed(report) if report.complete else f"{plural(left, 'task')} of {report.total} left"
        echo(f"{report.place}: {done}; {whole}")


def _tell(outcome: Outcome) -> None:
    if outcome.facts is None:
        for line in Refused(f"{outcome.name} failed: {outcome.error}").message.split("\n"):
            echo(line, err=True)


@contextlib.contextmanager
def beside_outputs(place: Place, dry_run: bool) -> Iterator[Place]:
    """The directory of what first passes make: in that of the outputs, or with ``dry_run`` a
    temporary one.
    """
    if not dry_run:
        yield Place(place.at(".wds-pipes"), place.storage_options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Place(temporary, place.storage_options)


def of_first_pass(hidden: Place, tasks: Sequence[Task]) -> Place:
    """The directory of the outputs of a first pass. Its name says what they are made from, so
    commands with other inputs, which may run at the same time, have another one.
    """
    made_from = fingerprint([[task.name, task.fingerprint] for task in tasks])
    return Place(hidden.at(made_from), hidden.storage_options)


def first_pass(job: Job, running: Running) -> list[Facts]:
    """Run the tasks that are not finished yet, and return what all have found.

    Raises:
        ShardError: one has failed.
    """
    if not job.tasks:
        return []
    on_cluster = running.engine is not None and not running.dry_run
    engine = on_ray if on_cluster else partial(in_processes, running.jobs) if running.jobs > 1 else in_this_process
    progress = running.progress and not running.dry_run
    report = run(job, engine=partial(_from_share, engine, running.share), overwrite=True, progress=progress)
    if report.failed:
        first, more = next(iter(report.failed.values())), len(report.failed) - 1
        raise ShardError(f"{first} (and {more} more)" if more else first)
    return list(report.facts.values())


def _from_share(
    engine: Engine, share: tuple[int, int], call: Callable[[Task], Outcome], tasks: Sequence[Task]
) -> Iterator[Outcome]:
    """Run tasks, those of a share first."""
    first = len(tasks) * share[0] // share[1]
    return engine(call, [*tasks[first:], *tasks[:first]])
