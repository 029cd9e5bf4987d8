"""The command ``wds-pipes demo``: it trains in processes of their own, of which it kills one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from wds_pipes.cli.options import FOUND, Damaged, Refused, echo, example, in_one_line
from wds_pipes.core.words import plural

STEPS_WITH_DATA = 200
_COLUMN = 15  # characters of the first column of the output

Step = dict[str, Any]  # a line of the trainer: step, epoch, loss, keys, seconds; state_bytes if it has saved


@click.command(epilog=example("wds-pipes demo\nwds-pipes demo --data 'train-{000..011}.tar' --steps 100"))
@click.option(
    "--data",
    "urls",
    metavar="URL",
    multiple=True,
    help="Train on these shards instead: a path or URL, with {000..011} or * in quotes; repeatable.",
)
@click.option(
    "-o",
    "--output",
    "--out",
    "out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    default="wds-pipes-demo",
    show_default=True,
    help="The directory to write to.",
)
@click.option("--samples", type=click.IntRange(min=1), default=3072, show_default=True, help="How many images to make.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Images in a batch.")
@click.option(
    "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that read and decode."
)
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True, help="How many epochs to train.")
@click.option(
    "--steps", type=click.IntRange(min=1), help=f"Stop after this many.  [default: all; {STEPS_WITH_DATA} with --data]"
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=2),
    default=10,
    show_default=True,
    help="Steps from one checkpoint to the next.",
)
def demo(
    *, urls: tuple[str, ...], out: Path, samples: int, batch_size: int, epochs: int, steps: int | None, **chosen: int
) -> None:
    """Kill a training in mid-epoch, resume it, and compare.

    A small CNN is trained twice on generated images: once without interruption, and once killed
    with SIGKILL and resumed from its last checkpoint. The command prints EXACT if all sample keys
    and losses are equal; otherwise it prints the first difference, and exits with 1.
    """
    start = time.perf_counter()
    with in_one_line():
        from wds_pipes.cli.demo.data import CLASSES, write_images
        from wds_pipes.io.expand import expand

        out.mkdir(parents=True, exist_ok=True)
        if urls:
            shards, label = expand(urls, {}), "__key__"
            steps = expected = steps or STEPS_WITH_DATA
            _say("data", f"{plural(len(shards), 'shard')}: labels are made of the keys")
        else:
            shards, label = write_images(out / "shards", samples), "cls"
            expected = min(steps or sys.maxsize, epochs * -(-samples // batch_size))
            _say("data", f"{plural(samples, 'JPEG')} of {CLASSES} classes in {plural(len(shards), 'shard')}")
        plan = {"urls": shards, "label": label, "batch_size": batch_size, "epochs": epochs, "steps": steps, **chosen}
        unequal = _compare(plan, out, expected)
    if not urls:
        _say("shards", str(out / "shards" / f"shapes-{{000000..{len(shards) - 1:06d}}}.tar"))
    _say("took", f"{time.perf_counter() - start:.0f} s")
    if unequal is not None:
        raise SystemExit(FOUND)


def _compare(plan: dict[str, Any], out: Path, expected: int) -> str | None:
    """Train without interruption, until killed, and resumed; return the first difference."""
    whole_file, file = out / "uninterrupted.pt", out / "interrupted.pt"
    for left in (whole_file, file):
        left.unlink(missing_ok=True)
    whole = run_trainer({**plan, "checkpoint": str(whole_file)}, "uninterrupted", expected)
    first, last, samples = whole[0], whole[-1], sum(len(step["keys"]) for step in whole)
    _say("", f"{plural(len(whole), 'step')}, loss {first['loss']:.2f} to {last['loss']:.2f}")
    kill_at, plan = choose_kill(whole, plan["checkpoint_every"]), {**plan, "checkpoint": str(file)}
    killed = run_trainer(plan, "to be killed", len(whole), kill_at=kill_at)
    _say("", f"killed with SIGKILL after step {kill_at}, in epoch {killed[-1]['epoch'] + 1}")
    resumed = run_trainer(plan, "resumed", len(whole))
    saved = resumed[0]["step"] - 1
    _say("", f"went on from the checkpoint of step {saved}: {plural(killed[-1]['step'] - saved, 'step')} done again")
    unequal = difference(whole, killed, resumed)
    echo("")
    if unequal is None:
        same = "the same keys and the same losses, to the last bit"
        echo(f"EXACT: {plural(len(whole), 'step')}, {plural(samples, 'sample')}: {same}")
    else:
        echo(f"DIFFERENT: {unequal}")
    rate = (samples - len(first["keys"])) / (last["seconds"] - first["seconds"])  # without the start of the workers
    _say("speed", f"{rate:,.0f} samples/s with {plural(plan['workers'], 'worker')}")
    state = max(step.get("state_bytes", 0) for step in killed)
    _say("state", f"{plural(state, 'byte')} as JSON, all workers together")
    _say("first batch", f"{resumed[0]['seconds']:.2f} s after load_state_dict()")
    return unequal


def run_trainer(plan: dict[str, Any], label: str, total: int, *, kill_at: int | None = None) -> list[Step]:
    """Train in a separate process, with a progress bar, and return its steps.

    ``kill_at``: the step after which the training process and its workers are killed; None: never.

    Its output comes through a pipe that its workers also hold open. So when the pipe ends, all of
    them have ended.

    Raises:
        Damaged: it failed.
    """
    steps: list[Step] = []
    command = [sys.executable, "-m", "wds_pipes.cli.demo.train", json.dumps(plan)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as trainer:
        try:
            with click.progressbar(length=total, label=f"{label:{_COLUMN - 2}}", show_pos=True) as bar:
                for line in trainer.stdout or ():
                    if not line.endswith("\n"):
                        break  # it was killed while it wrote this
                    steps.append(json.loads(line))
                    bar.update(steps[-1]["step"] - bar.pos)
                    if steps[-1]["step"] == kill_at:
                        os.killpg(trainer.pid, signal.SIGKILL)
            code = trainer.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)
            raise
    if code != (0 if kill_at is None else -signal.SIGKILL):
        raise Damaged(f"the trainer failed with exit code {code}: what it printed says why")
    return steps


def choose_kill(steps: Sequence[Step], checkpoint_every: int) -> int:
    """Return the step after which to kill: between two checkpoints, in the middle of the last epoch
    but one.

    Raises:
        Refused: there is no such step.
    """
    epoch = max(0, steps[-1]["epoch"] - 1)
    inside: list[int] = [step["step"] for step in steps if step["epoch"] == epoch][1:-1]
    between = [step for step in inside if step > checkpoint_every and step % checkpoint_every == checkpoint_every // 2]
    if not between:
        raise Refused(
            f"{len(steps)} steps are too few to kill the training in mid-epoch, between two checkpoints: "
            "use more --epochs, or a smaller --batch-size or --checkpoint-every"
        )
    return between[len(between) // 2]


def difference(whole: Sequence[Step], killed: Sequence[Step], resumed: Sequence[Step]) -> str | None:
    """Describe the first difference of the killed and resumed runs from the uninterrupted one; None
    if there is none.
    """
    expected = {step["step"]: step for step in whole}
    for name, run in (("killed", killed), ("resumed", resumed)):
        for step in run:
            other = expected.get(step["step"], {})
            for what in ("epoch", "keys", "loss"):
                found, wanted = repr(step[what]), repr(other.get(what))
                if found != wanted:  # as text: exact for floats, and NaN is NaN
                    return f"step {step['step']} of the {name} run has the {what} {found}, not {wanted}"
    missing = expected.keys() - {step["step"] for step in (*killed, *resumed)}
    return f"step {min(missing)} was done neither before the crash nor after it" if missing else None


def _say(what: str, text: str) -> None:
    """Print a fact, in two columns."""
    echo(f"{what:{_COLUMN}}{text}")
