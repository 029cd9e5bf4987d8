"""``wds-pipes demo``: compares a training that is killed and resumed with an uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wds_pipes.core.words import plural

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from wds_pipes.cli.train import Plan

SHAPES = ("disc", "ring", "square", "frame", "triangle", "plus", "cross", "rows", "columns", "checks")
MAX_CLASSES = 1000  # for --data, whose number of classes is not known
STEPS_WITH_DATA = 200
COLUMN = 15  # characters


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


@click.command()
@click.option(
    "--data",
    "urls",
    metavar="URL",
    multiple=True,
    help="Train on these shards instead: a path or URL, with {000..011} or * in quotes. Repeatable.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    default="wds-pipes-demo",
    show_default=True,
    help="The directory to write to.",
)
@click.option("--samples", type=click.IntRange(min=1), default=3072, show_default=True, help="How many images to make.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that read and decode."
)
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True)
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
    from wds_pipes.cli.train import Plan

    start = time.perf_counter()
    if not hasattr(os, "killpg"):
        raise click.ClickException(
            "the demo kills processes with SIGKILL, which this system does not have: run it on Linux or macOS"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--out") from error
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

    Path(plan.checkpoint).unlink(missing_ok=True)
    whole = run_trainer(plan, "uninterrupted", out / "uninterrupted.jsonl", expected)
    total = len(whole.steps)
    say("", f"{plural(total, 'step')}, loss {whole.steps[0].loss:.2f} to {whole.steps[-1].loss:.2f}")

    plan = replace(plan, checkpoint=str(out / "interrupted.pt"))
    Path(plan.checkpoint).unlink(missing_ok=True)
    killed = run_trainer(
        plan, "to be killed", out / "killed.jsonl", total, kill_at=choose_kill(whole.steps, checkpoint_every)
    )
    say("", f"killed with SIGKILL after step {killed.steps[-1].step}, in epoch {killed.steps[-1].epoch + 1}")

    resumed = run_trainer(plan, "resumed", out / "resumed.jsonl", total)
    say("", f"went on from the checkpoint of step {resumed.steps[0].step - 1}")

    picture = draw_losses(out / "demo.png", whole.steps, killed.steps, resumed.steps)
    unequal = difference(whole.steps, killed.steps, resumed.steps)
    if unequal is None:
        twice = killed.steps[-1].step - resumed.steps[0].step + 1
        ends = resumed.steps[-1].epoch - resumed.steps[0].epoch
        click.echo(
            f"\nEXACT: {plural(total, 'step')}, {plural(whole.samples, 'sample')}: the same keys "
            "and the same losses, to the last bit"
        )
        say("", f"{plural(twice, 'step')} done again after the crash; {plural(ends, 'epoch end')} passed after it")
    else:
        click.echo(f"\nDIFFERENT: {unequal}")
    say("speed", f"{whole.samples_per_second:,.0f} samples/s with {plural(plan.workers, 'worker')}")
    say("state", f"{plural(killed.state_bytes, 'byte')} as JSON, all workers together")
    say("first batch", f"{resumed.steps[0].seconds:.2f} s after load_state_dict()")
    say("picture", str(picture or "none, since matplotlib is not installed: pip install 'wds_pipes[demo]'"))
    if not urls:
        say("shards", str(out / "shards" / f"shapes-{{000000..{len(shards) - 1:06d}}}.tar"))
    say("took", f"{time.perf_counter() - start:.0f} s")
    if unequal is not None:
        raise SystemExit(1)


def say(what: str, text: str) -> None:
    """Print a fact, in two columns."""
    click.echo(f"{what:{COLUMN}}{text}")


# Data


def write_images(directory: Path, samples: int) -> list[str]:
    """Write images of ten kinds of shapes into at most 12 shards, always the same, and return their
    paths.
    """
    import numpy as np

    from wds_pipes.tar import ShardWriter

    rng = np.random.default_rng(0)
    directory.mkdir(exist_ok=True)
    with ShardWriter(directory / "shapes-%06d.tar", max_samples=-(-samples // 12), overwrite=True) as writer:
        for number in range(samples):
            label = int(rng.integers(len(SHAPES)))
            writer.write({"__key__": f"{number:06d}", "jpg": draw_shape(SHAPES[label], rng), "cls": label})
    return list(writer.shards)


def draw_shape(shape: str, rng: np.random.Generator, size: int = 32) -> Image.Image:
    """Draw a shape with a random colour at a random place on a noisy background."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(rng.integers(0, 160, (size, size, 3), dtype="uint8"))
    pen = ImageDraw.Draw(image)
    colour = tuple(rng.integers(96, 256, 3).tolist())
    radius = int(rng.integers(size // 5, size // 3))
    x, y = rng.integers(radius, size - radius, 2).tolist()
    left, top, right, bottom = box = (x - radius, y - radius, x + radius, y + radius)
    lines = range(-radius, radius + 1, 4)
    match shape:
        case "disc":
            pen.ellipse(box, fill=colour)
        case "ring":
            pen.ellipse(box, outline=colour, width=2)
        case "square":
            pen.rectangle(box, fill=colour)
        case "frame":
            pen.rectangle(box, outline=colour, width=2)
        case "triangle":
            pen.polygon([(x, top), (right, bottom), (left, bottom)], fill=colour)
        case "plus":
            pen.line([(x, top), (x, bottom)], fill=colour, width=3)
            pen.line([(left, y), (right, y)], fill=colour, width=3)
        case "cross":
            pen.line([(left, top), (right, bottom)], fill=colour, width=3)
            pen.line([(right, top), (left, bottom)], fill=colour, width=3)
        case "rows":
            for offset in lines:
                pen.line([(left, y + offset), (right, y + offset)], fill=colour, width=2)
        case "columns":
            for offset in lines:
                pen.line([(x + offset, top), (x + offset, bottom)], fill=colour, width=2)
        case "checks":
            for row in lines:
                for column in lines:
                    if (row + column + 2 * radius) % 8 == 0:
                        pen.rectangle((x + column, y + row, x + column + 3, y + row + 3), fill=colour)
    return image


def inspect_shards(urls: Sequence[str]) -> tuple[list[str], str, str | None]:
    """Return the shards of ``urls``, the image field (with likely alternatives), and the label
    field, if any.

    The fields are those of the first sample.

    Raises:
        click.BadParameter: the shards cannot be read or have no sample, or the sample has no image.
    """
    import wds_pipes as wp
    from wds_pipes.codecs.names import IMAGE
    from wds_pipes.stages import ShardList

    try:
        shards = ShardList(urls).urls
        first = next(iter(wp.ShardList(shards).open_shards().load_tar().group_by_key()), None)
    except Exception as error:  # a storage may raise any error
        raise click.BadParameter(str(error) or repr(error), param_hint="--data") from error
    if first is None:
        raise click.BadParameter(f"there is no sample in {shards[0]}", param_hint="--data")
    names = [name for name in first if not name.startswith("__")]
    common = [name for name in ("jpg", "jpeg", "png", "webp") if name in names]
    images = common + [name for name in names if name.rpartition(".")[2] in IMAGE]
    if not images:
        message = (
            f"sample {first['__key__']!r} of {first['__url__']} has no image (jpg, png, ...); its "
            f"fields are: {', '.join(names)}"
        )
        raise click.BadParameter(message, param_hint="--data")
    label = next((name for name in ("cls", "class", "cls2") if name in names), None)
    return shards, ";".join(dict.fromkeys([images[0], "jpg", "jpeg", "png", "webp"])), label


# Runs


def run_trainer(plan: Plan, label: str, log: Path, total: int, *, kill_at: int | None = None) -> Run:
    """Train in a separate process, with a progress bar, and return its steps.

    ``kill_at``: the step after which the training process and its workers are killed; None: never.

    Its output comes through a pipe that its workers also hold open. So when the pipe ends, all of
    them have ended.

    Raises:
        click.ClickException: it failed.
    """
    run = Run()
    command = [sys.executable, "-m", "wds_pipes.cli.train"]
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
                for line in trainer.stdout:
                    if not line.endswith("\n"):
                        break  # it was killed while it wrote this
                    copy.write(line)
                    event = json.loads(line)
                    if event.pop("event") == "checkpoint":
                        run.state_bytes = event["state_bytes"]
                        continue
                    run.steps.append(Step(**event))
                    bar.update(run.steps[-1].step - bar.pos)
                    if run.steps[-1].step == kill_at:
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
        raise click.ClickException(
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


# Picture


def draw_losses(path: Path, whole: Sequence[Step], killed: Sequence[Step], resumed: Sequence[Step]) -> Path | None:
    """Draw the losses of the three runs, with the crash and the resume.

    Returns:
        the path of the picture; None if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        return None
    crash, resume = killed[-1].step, resumed[0].step - 1
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle("Killed in mid-epoch and resumed from the last checkpoint")
    everything, close = figure.subplots(1, 2, width_ratios=[2, 1])
    for axes, first, last, style in ((everything, 0, len(whole), "-"), (close, resume - 5, crash + 5, ".-")):
        for name, steps, look in (
            ("without interruption", whole, {"color": "0.8", "linewidth": 7}),
            ("until it was killed", killed, {"color": "tab:red", "linewidth": 3.5, "markersize": 16}),
            ("after it was resumed", resumed, {"color": "tab:blue", "linewidth": 1.5, "markersize": 8}),
        ):
            shown = [step for step in steps if first <= step.step <= last]
            axes.plot([step.step for step in shown], [step.loss for step in shown], style, label=name, **look)
        axes.axvline(
            resume, color="tab:blue", linestyle="--", linewidth=1, label=f"checkpoint of step {resume}: resumed here"
        )
        axes.axvline(crash, color="tab:red", linestyle="--", linewidth=1, label=f"killed (SIGKILL) after step {crash}")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    ends = [step.step + 0.5 for step, after in pairwise(whole) if step.epoch != after.epoch]
    for place, end in enumerate(ends):
        everything.axvline(end, color="0.5", linestyle=":", linewidth=1, label=None if place else "end of an epoch")
    everything.set_ylabel("loss")
    everything.set_title("The whole training")
    everything.legend()
    close.set_title("Around the crash")
    figure.savefig(path, dpi=120)
    return path
