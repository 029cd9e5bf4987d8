"""Kill a training in mid-epoch, resume it, and compare.

The training runs in processes of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from wds_pipes.core.words import plural
from wds_pipes.errors import WdsError
from wds_pipes.io.expand import expand
from wds_pipes.tar import ShardWriter
from wds_pipes.tools.outputs import marks
from wds_pipes.tools.progress import progress as shown_progress

CLASSES = 10
STEPS_WITH_DATA = 200
_COLUMN = 15  # characters of the first column of the output

Step = dict[str, Any]  # a line of the trainer: step, epoch, loss, keys, seconds; state_bytes if it has saved
Say = Callable[[str], None]


def demo(
    urls: Sequence[str] = (),
    *,
    out: str | os.PathLike[str] = "wds-pipes-demo",
    samples: int | None = None,
    batch_size: int = 64,
    workers: int = 2,
    epochs: int = 3,
    steps: int | None = None,
    checkpoint_every: int = 10,
    say: Say = print,
    progress: bool | None = False,
) -> str | None:
    """Train a small CNN twice: once without interruption, and once killed with SIGKILL and resumed
    from its last checkpoint. Return the first difference of the sample keys and losses; None: all
    are equal.

    Args:
        urls: the shards; empty: images are generated.
        out: the directory to write to.
        samples: how many images to make; None: 3072. Not with ``urls``.
        batch_size: images in a batch.
        workers: processes that read and decode.
        epochs: how many epochs to train.
        steps: stop after this many; None: all, or 200 with ``urls``.
        checkpoint_every: steps from one checkpoint to the next.
        say: called with each line of results.
        progress: True: show a progress bar, which needs tqdm; None: a line each minute.

    Raises:
        ValueError: nothing matches, the steps are too few, or ``samples`` is passed with ``urls``.
        ShardError: a shard does not exist.
        WdsError: the training failed.
    """
    start, folder = time.perf_counter(), Path(out)
    if urls and samples is not None:
        raise ValueError("--samples is how many images are made, and --data names shards instead: pass one of the two")
    folder.mkdir(parents=True, exist_ok=True)
    samples = samples or 3072
    if urls:
        shards, label = expand(urls, {}), "__key__"
        marks(shards, None)  # whether all of them exist
        steps = expected = steps or STEPS_WITH_DATA
        _say(say, "data", f"{plural(len(shards), 'shard')}: labels are made of the keys")
    else:
        shards, label = write_images(folder / "shards", samples), "cls"
        expected = min(steps or sys.maxsize, epochs * -(-samples // batch_size))
        _say(say, "data", f"{plural(samples, 'JPEG')} of {CLASSES} classes in {plural(len(shards), 'shard')}")
    numbers = {"batch_size": batch_size, "workers": workers, "epochs": epochs, "steps": steps}
    plan = {"urls": shards, "label": label, **numbers, "checkpoint_every": checkpoint_every}
    unequal = _compare(plan, folder, expected, say, progress)
    if not urls:
        _say(say, "shards", str(folder / "shards" / f"shapes-{{000000..{len(shards) - 1:06d}}}.tar"))
    _say(say, "took", f"{time.perf_counter() - start:.0f} s")
    return unequal


def _compare(plan: dict[str, Any], out: Path, expected: int, say: Say, progress: bool | None) -> str | None:
    """Train without interruption, until killed, and resumed; return the first difference."""
    whole_file, file = out / "uninterrupted.pt", out / "interrupted.pt"
    for left in (whole_file, file):
        left.unlink(missing_ok=True)
    whole = run_trainer({**plan, "checkpoint": str(whole_file)}, expected, progress)
    first, last, samples = whole[0], whole[-1], sum(len(step["keys"]) for step in whole)
    _say(say, "uninterrupted", f"{plural(len(whole), 'step')}, loss {first['loss']:.2f} to {last['loss']:.2f}")
    kill_at, plan = choose_kill(whole, plan["checkpoint_every"]), {**plan, "checkpoint": str(file)}
    killed = run_trainer(plan, len(whole), progress, kill_at=kill_at)
    _say(say, "killed", f"with SIGKILL after step {kill_at}, in epoch {killed[-1]['epoch'] + 1}")
    resumed = run_trainer(plan, len(whole), progress)
    saved = resumed[0]["step"] - 1
    again = plural(killed[-1]["step"] - saved, "step")
    _say(say, "resumed", f"went on from the checkpoint of step {saved}: {again} done again")
    unequal = difference(whole, killed, resumed)
    same = (
        f"{plural(len(whole), 'step')}, {plural(samples, 'sample')}: the same keys and the same losses, to the last bit"
    )
    say("")
    say(f"EXACT: {same}" if unequal is None else f"DIFFERENT: {unequal}")
    rate = (samples - len(first["keys"])) / (last["seconds"] - first["seconds"])  # without the start of the workers
    _say(say, "speed", f"{rate:,.0f} samples/s with {plural(plan['workers'], 'worker')}")
    state = max(step.get("state_bytes", 0) for step in killed)
    _say(say, "state", f"{plural(state, 'byte')} as JSON, all workers together")
    _say(say, "first batch", f"{resumed[0]['seconds']:.2f} s after load_state_dict()")
    return unequal


def run_trainer(plan: dict[str, Any], total: int, progress: bool | None, *, kill_at: int | None = None) -> list[Step]:
    """Train in a separate process, and return its steps.

    ``kill_at``: the step after which the training process and its workers are killed; None: never.

    Its output comes through a pipe that its workers also hold open. So when the pipe ends, all of
    them have ended.

    Raises:
        WdsError: it failed.
    """
    steps: list[Step] = []
    command = [sys.executable, "-m", "wds_pipes.tools.demo.train", json.dumps(plan)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as trainer:
        try:
            with shown_progress(total, "step", show=progress) as advance:
                for line in trainer.stdout or ():
                    if not line.endswith("\n"):
                        break  # it was killed while it wrote this
                    steps.append(json.loads(line))
                    advance(1)
                    if steps[-1]["step"] == kill_at:
                        os.killpg(trainer.pid, signal.SIGKILL)
            code = trainer.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)
            raise
    if code != (0 if kill_at is None else -signal.SIGKILL):
        raise WdsError(f"the trainer failed with exit code {code}: what it printed says why")
    return steps


def choose_kill(steps: Sequence[Step], checkpoint_every: int) -> int:
    """Return the step after which to kill: between two checkpoints, in the middle of the last epoch
    but one.

    Raises:
        ValueError: there is no such step.
    """
    epoch = max(0, steps[-1]["epoch"] - 1)
    inside: list[int] = [step["step"] for step in steps if step["epoch"] == epoch][1:-1]
    between = [step for step in inside if step > checkpoint_every and step % checkpoint_every == checkpoint_every // 2]
    if not between:
        raise ValueError(
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


def _say(say: Say, what: str, text: str) -> None:
    """Report a fact, in two columns."""
    say(f"{what:{_COLUMN}}{text}")


def write_images(directory: Path, samples: int) -> list[str]:
    """Write images of ten kinds of shapes into at most 12 shards, always the same, and return their
    paths.
    """
    rng = np.random.default_rng(0)
    directory.mkdir(exist_ok=True)
    with ShardWriter(directory / "shapes-%06d.tar", max_samples=-(-samples // 12), overwrite=True) as writer:
        for number in range(samples):
            label = int(rng.integers(CLASSES))
            writer.write({"__key__": f"{number:06d}", "jpg": draw_shape(label, rng), "cls": label})
    return list(writer.shards)


def draw_shape(label: int, rng: np.random.Generator, size: int = 32) -> Image.Image:
    """Draw a polygon of 3 to 7 sides, filled or not, with a random colour at a random place on a
    noisy background.
    """
    image = Image.fromarray(rng.integers(0, 160, (size, size, 3), dtype="uint8"))
    colour = tuple(rng.integers(96, 256, 3).tolist())
    radius = int(rng.integers(size // 5, size // 3))
    x, y = rng.integers(radius, size - radius, 2).tolist()
    fill = colour if label < CLASSES // 2 else None
    ImageDraw.Draw(image).regular_polygon((x, y, radius), 3 + label % 5, fill=fill, outline=colour)
    return image
