"""The trainings of the demo: each runs in its own process, and may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import click

from wds_pipes.cli.demo.plan import Plan
from wds_pipes.cli.options import Refused

COLUMN = 15  # characters of the first column of the output


@dataclass(frozen=True)
class Step:
    """A training step: its samples and its loss. ``seconds``: when its batch arrived, since the
    start of the loader.
    """

    step: int
    epoch: int
    loss: float
    keys: list[str]
    seconds: float


@dataclass
class Run:
    """The steps of a training process until its end."""

    steps: list[Step] = field(default_factory=list)
    state_bytes: int = 0

    @property
    def samples(self) -> int:
        return sum(len(step.keys) for step in self.steps)

    @property
    def samples_per_second(self) -> float:
        """Measured from the first batch on, without the start of the workers."""
        first, last = self.steps[0], self.steps[-1]
        return (self.samples - len(first.keys)) / (last.seconds - first.seconds)


def run_trainer(plan: Plan, label: str, log: Path, total: int, *, kill_at: int | None = None) -> Run:
    """Train in a separate process, with a progress bar, and return its steps.

    ``kill_at``: the step after which the training process and its workers are killed; None: never.

    Its output comes through a pipe that its workers also hold open. So when the pipe ends, all of
    them have ended.

    Raises:
        click.ClickException: it failed.
    """
    run = Run()
    command = [sys.executable, "-m", "wds_pipes.cli.demo.train"]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as trainer,
    ):
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), trainer.stdin:
                json.dump(asdict(plan), trainer.stdin)
            with (
                log.open("w", buffering=1) as copy,
                click.progressbar(length=total, label=f"{label:{COLUMN - 2}}", show_pos=True) as bar,
            ):
                for step in read_events(trainer.stdout, copy, run):
                    bar.update(step - bar.pos)
                    if step == kill_at:
                        os.killpg(trainer.pid, signal.SIGKILL)
            code = trainer.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)
            raise
        if code != (0 if kill_at is None else -signal.SIGKILL):
            errors.seek(0)
            reason = [line for line in errors.read().splitlines() if line.strip()]
            raise click.ClickException(
                f"the trainer failed with exit code {code}: {reason[-1] if reason else 'it did not say why'}"
            )
    return run


def read_events(output: IO[str], copy: IO[str], run: Run) -> Iterator[int]:
    """Read the output of a trainer into ``run`` and the file ``copy``; yield each step's number."""
    for line in output:
        if not line.endswith("\n"):
            break  # it was killed while it wrote this
        copy.write(line)
        event = json.loads(line)
        if event.pop("event") == "checkpoint":
            run.state_bytes = event["state_bytes"]
            continue
        run.steps.append(Step(**event))
        yield run.steps[-1].step


def choose_kill(steps: Sequence[Step], checkpoint_every: int) -> int:
    """Return the step after which to kill: between two checkpoints, near the middle of the last
    epoch but one.

    Raises:
        click.ClickException: there is no such step.
    """
    epochs = sorted({step.epoch for step in steps})
    inside = [step.step for step in steps if step.epoch == epochs[max(0, len(epochs) - 2)]]
    between = [
        step for step in inside[1:-1] if step > checkpoint_every and step % checkpoint_every == checkpoint_every // 2
    ]
    if not between:
        raise Refused(
            f"{len(steps)} steps are too few to kill the training in mid-epoch, between two checkpoints: "
            "use more --epochs, or a smaller --batch-size or --checkpoint-every"
        )
    middle = inside[len(inside) // 2]
    return min(between, key=lambda step: abs(step - middle))


def difference(whole: Sequence[Step], killed: Sequence[Step], resumed: Sequence[Step]) -> str | None:
    """Describe the first difference of the killed and resumed runs from the uninterrupted one; None
    if there is none.
    """
    expected = {step.step: step for step in whole}
    for name, run in (("killed", killed), ("resumed", resumed)):
        for step in run:
            other = expected.get(step.step)
            if other is None:
                return f"the {name} run did step {step.step}, but the uninterrupted run ended after step {len(whole)}"
            where = f"step {step.step} of the {name} run"
            if step.epoch != other.epoch:
                return f"{where} is in epoch {step.epoch + 1}, not {other.epoch + 1}"
            if step.keys != other.keys:
                place = next(
                    (place for place, (a, b) in enumerate(zip(step.keys, other.keys)) if a != b),
                    min(len(step.keys), len(other.keys)),
                )
                return (
                    f"{where} has other samples, from place {place} of the batch on: "
                    f"{step.keys[place : place + 3]}, not {other.keys[place : place + 3]}"
                )
            if repr(step.loss) != repr(other.loss):  # exact for floats, and NaN is NaN
                return f"{where} has the same samples but the loss {step.loss!r}, not {other.loss!r}"
    missing = expected.keys() - {step.step for step in (*killed, *resumed)}
    if missing:
        return f"step {min(missing)} was done neither before the crash nor after it"
    return None
