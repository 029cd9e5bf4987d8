"""First passes: jobs of which a command needs the outputs before its own tasks can run.

Rules:
1. They write into the hidden directory of the command's outputs, ``.wds-pipes``. What is there
   serves other shares of the command, and its next run.
2. The name of a pass's directory says what its outputs are made from: see ``of_first_pass``.
3. Shares that run at the same time begin at different tasks, and leave out what another one has
   finished by then.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from wds_pipes.cli.jobs import Running
from wds_pipes.errors import ShardError
from wds_pipes.io.tasks.engines import in_processes, in_this_process
from wds_pipes.io.tasks.on_ray import on_ray
from wds_pipes.io.tasks.running import run
from wds_pipes.io.tasks.task import Engine, Facts, Job, Outcome, Place, Task, fingerprint


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
