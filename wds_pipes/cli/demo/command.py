"""The command ``wds-pipes demo``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from wds_pipes.cli.demo.data import SHAPES, inspect_shards, write_images
from wds_pipes.cli.demo.picture import draw_losses
from wds_pipes.cli.demo.plan import Plan
from wds_pipes.cli.demo.runs import COLUMN, Run, choose_kill, difference, run_trainer
from wds_pipes.cli.options import echo, example
from wds_pipes.core.words import plural

MAX_CLASSES = 1000  # for --data, whose number of classes is not known
STEPS_WITH_DATA = 200


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
    *,
    urls: tuple[str, ...],
    out: Path,
    samples: int,
    batch_size: int,
    workers: int,
    epochs: int,
    steps: int | None,
    checkpoint_every: int,
) -> None:
    """Kill a training in mid-epoch, resume it, and compare.

    A small CNN is trained twice on generated images: once without interruption, and once killed
    with SIGKILL and resumed from its last checkpoint. The command prints EXACT if all sample keys
    and losses are equal; otherwise it prints the first difference, and exits with 1.
    """
    start = time.perf_counter()
    prepare(out)
    if urls:
        shards, image, label = inspect_shards(urls)
        steps = expected = steps or STEPS_WITH_DATA
        say(
            "data",
            f"{plural(len(shards), 'shard')}, "
            f"{f'labels in {label!r}' if label else 'no label field: labels are made of the keys'}",
        )
    else:
        shards, image, label = write_images(out / "shards", samples), "jpg", "cls"
        expected = min(steps or sys.maxsize, epochs * -(-samples // batch_size))
        say("data", f"{plural(samples, 'JPEG')} of {len(SHAPES)} classes in {plural(len(shards), 'shard')}")
    plan = Plan(
        urls=shards,
        image=image,
        label=label,
        classes=MAX_CLASSES if urls else len(SHAPES),
        batch_size=batch_size,
        workers=min(workers, len(shards)),
        epochs=epochs,
        steps=steps,
        checkpoint=str(out / "uninterrupted.pt"),
        checkpoint_every=checkpoint_every,
    )
    whole, killed, resumed = train_three_times(plan, out, expected)
    picture = draw_losses(out / "demo.png", whole.steps, killed.steps, resumed.steps)
    unequal = difference(whole.steps, killed.steps, resumed.steps)
    report(unequal, whole, killed, resumed, plan.workers)
    say("picture", str(picture or "none, since matplotlib is not installed: pip install 'wds_pipes[demo]'"))
    if not urls:
        say("shards", str(out / "shards" / f"shapes-{{000000..{len(shards) - 1:06d}}}.tar"))
    say("took", f"{time.perf_counter() - start:.0f} s")
    if unequal is not None:
        raise SystemExit(1)


def prepare(out: Path) -> None:
    """Check that the demo can run here, and create its directory."""
    if not hasattr(os, "killpg"):
        raise click.ClickException(
            "the demo kills processes with SIGKILL, which this system does not have: run it on Linux or macOS"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--out") from error


def train_three_times(plan: Plan, out: Path, expected: int) -> tuple[Run, Run, Run]:
    """Train without interruption, until killed, and resumed; return the three runs."""
    Path(plan.checkpoint).unlink(missing_ok=True)
    whole = run_trainer(plan, "uninterrupted", out / "uninterrupted.jsonl", expected)
    total = len(whole.steps)
    say("", f"{plural(total, 'step')}, loss {whole.steps[0].loss:.2f} to {whole.steps[-1].loss:.2f}")

    plan = replace(plan, checkpoint=str(out / "interrupted.pt"))
    Path(plan.checkpoint).unlink(missing_ok=True)
    kill_at = choose_kill(whole.steps, plan.checkpoint_every)
    killed = run_trainer(plan, "to be killed", out / "killed.jsonl", total, kill_at=kill_at)
    say("", f"killed with SIGKILL after step {killed.steps[-1].step}, in epoch {killed.steps[-1].epoch + 1}")

    resumed = run_trainer(plan, "resumed", out / "resumed.jsonl", total)
    say("", f"went on from the checkpoint of step {resumed.steps[0].step - 1}")
    return whole, killed, resumed


def report(unequal: str | None, whole: Run, killed: Run, resumed: Run, workers: int) -> None:
    """Print whether the runs are equal (``unequal``: their first difference), and their figures."""
    if unequal is None:
        twice = killed.steps[-1].step - resumed.steps[0].step + 1
        ends = resumed.steps[-1].epoch - resumed.steps[0].epoch
        echo("")
        echo(
            f"EXACT: {plural(len(whole.steps), 'step')}, {plural(whole.samples, 'sample')}: the same keys "
            "and the same losses, to the last bit"
        )
        say("", f"{plural(twice, 'step')} done again after the crash; {plural(ends, 'epoch end')} passed after it")
    else:
        echo("")
        echo(f"DIFFERENT: {unequal}")
    say("speed", f"{whole.samples_per_second:,.0f} samples/s with {plural(workers, 'worker')}")
    say("state", f"{plural(killed.state_bytes, 'byte')} as JSON, all workers together")
    say("first batch", f"{resumed.steps[0].seconds:.2f} s after load_state_dict()")


def say(what: str, text: str) -> None:
    """Print a fact, in two columns."""
    echo(f"{what:{COLUMN}}{text}")
