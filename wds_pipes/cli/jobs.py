"""What all commands that write files have in common: how their tasks run, and what they report."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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
)
from wds_pipes.core.words import plural

if TYPE_CHECKING:
    from wds_pipes.io.tasks.task import Job, Outcome, Report, Task


class Running(NamedTuple):
    """The options of ``job_options``."""

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


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options with which its tasks run; it gets them as ``running``."""

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        running = Running(**{name: options.pop(name) for name in Running._fields})
        command(**options, running=running)

    for option in reversed(_OPTIONS):
        option(wrapped)
    return wrapped


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


@contextlib.contextmanager
def _resumable(running: Running) -> Iterator[None]:
    """Say after Ctrl-C what becomes of what is finished."""
    try:
        yield
    except KeyboardInterrupt:
        if not running.dry_run:
            click.echo("what is finished is kept: run the same command again to go on", err=True)
        raise


def run_job(
    make: Callable[[], Job],
    running: Running,
    planned: Callable[[Task], str],
    summary: Callable[[Report], str],
) -> None:
    """Run a job, and report. The exit code is 1 if samples or tasks failed, 2 if it cannot run.

    Args:
        make: makes the job; its errors are reported.
        running: how to run it.
        planned: what a task would write, for ``--dry-run``.
        summary: what the finished tasks wrote.
    """
    from wds_pipes.io.tasks.on_ray import connect, on_ray
    from wds_pipes.io.tasks.running import run

    check_engine(running.engine)
    share = running.share
    with in_one_line(), ended_by_sigterm(), _resumable(running):
        if running.engine and not running.dry_run:
            connect()  # before anything is written
        job = make()
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
        _show(job, report, running, planned, summary)
    if report.failed:
        raise Damaged(
            f"{plural(len(report.failed), 'task')} failed, as shown. Run the command again when the cause is mended: "
            "what is finished is kept. With other options, also pass --overwrite."
        )


def _show(
    job: Job, report: Report, running: Running, planned: Callable[[Task], str], summary: Callable[[Report], str]
) -> None:

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
        named = {task.name: task for task in job.tasks}
        for name in report.written:
            echo(f"would write {planned(named[name])}")
        echo(f"{report.place}: {len(report.written)} to write, {len(report.skipped)} there already")
    else:
        done = f"{len(report.written)} written, {len(report.skipped)} there already"
        left = report.total - len(report.facts)
        whole = summary(report) if report.complete else f"{plural(left, 'task')} of {report.total} left"
        echo(f"{report.place}: {done}; {whole}")


def _tell(outcome: Outcome) -> None:
    if outcome.facts is None:
        for line in Refused(f"{outcome.name} failed: {outcome.error}").message.split("\n"):
            echo(line, err=True)
