import contextlib
import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner, Result
from waiting import wait_for

from wds_pipes.cli import main
from wds_pipes.cli.demo import command
from wds_pipes.cli.demo.data import SHAPES, inspect_shards, write_images
from wds_pipes.cli.demo.picture import draw_losses
from wds_pipes.cli.demo.plan import Plan
from wds_pipes.cli.demo.runs import Run, Step, choose_kill, difference, read_events
from wds_pipes.cli.demo.train import train
from wds_pipes.testing import make_shards

STEPS = [
    Step(
        step=number + 1,
        epoch=number // 20,
        loss=1 / (number + 3),
        keys=[f"{number:04d}", f"{number + 1:04d}"],
        seconds=number,
    )
    for number in range(40)
]
KILLED, RESUMED = STEPS[:25], STEPS[20:]


def demo(*options: object) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, options)])


def processes_in(directory: Path) -> list[psutil.Process]:
    """The processes whose working directory this is, other than this one."""
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        if (
            process.info["cwd"] == str(directory.resolve())
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and process.pid != os.getpid()
        ):
            found.append(process)
    return found


@pytest.mark.slow
def test_killed_and_resumed_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo, smaller: it says EXACT and the facts, its files are there, and no process is
    left.
    """
    monkeypatch.chdir(tmp_path)
    result = demo("--samples", 480, "--batch-size", 16, "--epochs", 2)
    assert result.exit_code == 0, result.output
    assert "EXACT: 60 steps, 960 samples" in result.output
    assert "in epoch 1" in result.output
    assert "went on from the checkpoint of step 10" in result.output
    assert "1 epoch end passed" in result.output
    for fact in (
        "wds-pipes-demo/shards/shapes-{000000..000011}.tar",
        "samples/s with 2 workers",
        "bytes as JSON",
        "s after load_state_dict()",
    ):
        assert fact in result.output
    assert (tmp_path / "wds-pipes-demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "wds-pipes-demo" / "killed.jsonl").read_text().splitlines()) >= 15
    assert not processes_in(tmp_path)


def train_here(plan: Plan, label: str, log: Path, total: int, *, kill_at: int | None = None) -> Run:
    """What ``run_trainer`` returns, trained in this process, which takes a tenth of the time. A run
    that is to be killed ends after that step.
    """
    random, threads, said = torch.get_rng_state(), torch.get_num_threads(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            train(replace(plan, workers=0, steps=kill_at or plan.steps))
    finally:
        torch.set_rng_state(random)
        torch.set_num_threads(threads)
    run = Run()
    with log.open("w") as copy:
        list(read_events(io.StringIO(said.getvalue()), copy, run))
    return run


def test_own_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--data takes a pattern, finds image and label, and stops after --steps."""
    monkeypatch.setattr(command, "run_trainer", train_here)
    make_shards(tmp_path / "own", shards=4, samples=50, fields=("jpg", "cls"))
    result = demo(
        "--data",
        tmp_path / "own" / "shard-{000000..000003}.tar",
        "--out",
        tmp_path,
        "--batch-size",
        10,
        "--steps",
        33,
        "--checkpoint-every",
        4,
    )
    assert result.exit_code == 0, result.output
    assert "4 shards, labels in 'cls'" in result.output
    assert "EXACT: 33 steps, 330 samples" in result.output


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """Interrupted while the trainer runs, it ends with 130, and takes the trainer and its workers
    along.
    """
    command = [sys.executable, "-m", "wds_pipes", "demo", "--out", "out", "--samples", "480"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        log = tmp_path / "out" / "uninterrupted.jsonl"
        wait_for(lambda: log.exists() and log.stat().st_size > 0)
        assert len(processes_in(tmp_path)) >= 4
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Aborted!" in output
    wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.slow
def test_trainer_that_fails(tmp_path: Path) -> None:
    """An image that cannot be decoded is named in a sentence."""
    urls = make_shards(
        tmp_path / "own",
        shards=1,
        samples=5,
        fields={"jpg": lambda rng, number: b"no image", "cls": lambda rng, number: 0},
    )
    result = demo("--data", urls[0], "--out", tmp_path)
    assert result.exit_code == 1
    assert "Error: the trainer failed" in result.output
    assert "DecodeError: field 'jpg' of sample '0000000" in result.output


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    """Shards that are missing, empty, no tars or without images give a sentence, not a
    traceback.
    """
    make_shards(tmp_path / "text", shards=1, samples=3, fields=("txt", "cls"))
    make_shards(tmp_path / "empty", shards=1, samples=0)
    (tmp_path / "no.tar").write_text("this is no tar" * 100)
    for data, words in (
        ("text", "has no image (jpg, png, ...); its fields are: cls, txt"),
        ("empty", "there is no sample in"),
        ("no.tar", "it is not a tar"),
        ("missing.tar", "does not exist"),
        ("missing-*.tar", "no shard matches"),
        ("@missing", "does not exist"),
    ):
        result = demo(
            "--data", f"@{tmp_path / data[1:]}" if data.startswith("@") else tmp_path / data, "--out", tmp_path / "out"
        )
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
        assert "Traceback" not in result.output


def test_out_that_cannot_be_made(tmp_path: Path) -> None:
    """A path below a file is refused in a sentence."""
    (tmp_path / "file").touch()
    result = demo("--out", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "Invalid value for --out" in result.output


def test_fields_are_found(tmp_path: Path) -> None:
    """The usual image fields come before others; without a label there is none."""
    blank = {name: lambda rng, number: b"x" for name in ("class", "depth.tif", "png", "seg.png", "txt")}
    urls = make_shards(tmp_path / "a", shards=2, samples=1, fields=blank)
    assert inspect_shards([str(tmp_path / "a")]) == (urls, "png;jpg;jpeg;webp", "class")
    urls = make_shards(tmp_path / "b", shards=1, samples=1, fields={name: blank[name] for name in ("seg.png", "txt")})
    assert inspect_shards(urls) == (urls, "seg.png;jpg;jpeg;png;webp", None)


def test_images_are_always_the_same(tmp_path: Path) -> None:
    """Two calls write the same bytes, and every kind of shape can be drawn."""
    one, other = (
        [Path(shard).read_bytes() for shard in write_images(tmp_path / name, 12 * len(SHAPES))] for name in "ab"
    )
    assert len(one) == 12
    assert one == other


def test_no_difference() -> None:
    """Equal runs differ nowhere, whenever their batches came."""
    assert difference(STEPS, KILLED, [replace(step, seconds=99) for step in RESUMED]) is None
    diverged = [replace(step, loss=float("nan")) for step in STEPS]
    assert difference(diverged, diverged[:25], [replace(step, loss=float("nan")) for step in diverged[20:]]) is None


@pytest.mark.parametrize(
    ("killed", "resumed", "words"),
    [
        (
            KILLED,
            [*RESUMED[:-1], replace(RESUMED[-1], loss=RESUMED[-1].loss + 1e-15)],
            "step 40 of the resumed run has the same samples but the loss",
        ),
        (
            [replace(KILLED[0], keys=["0000", "0002"]), *KILLED[1:]],
            RESUMED,
            "step 1 of the killed run has other samples, from place 1 of the batch on: ['0002']",
        ),
        (
            KILLED,
            [replace(RESUMED[0], keys=["0020"]), *RESUMED[1:]],
            "step 21 of the resumed run has other samples, from place 1 of the batch on: [], not",
        ),
        (KILLED, [replace(RESUMED[0], epoch=0), *RESUMED[1:]], "step 21 of the resumed run is in epoch 1, not 2"),
        (KILLED, RESUMED[6:], "step 26 was done neither before the crash nor after it"),
        (KILLED, RESUMED[:-1], "step 40 was done neither before the crash nor after it"),
        (
            KILLED,
            [*RESUMED, replace(RESUMED[-1], step=41)],
            "the resumed run did step 41, but the uninterrupted run ended after step 40",
        ),
    ],
)
def test_differences(killed: list[Step], resumed: list[Step], words: str) -> None:
    """Another loss, key, epoch or number of steps is found, also in a step that was done twice."""
    assert words in str(difference(STEPS, killed, resumed))


def test_difference_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says what differs and fails."""
    runs = iter([STEPS, KILLED, [replace(RESUMED[0], loss=9.0), *RESUMED[1:]]])
    monkeypatch.setattr(command, "run_trainer", lambda *args, **options: Run(next(runs)))
    result = demo("--out", tmp_path, "--samples", 12)
    assert result.exit_code == 1
    assert "DIFFERENT: step 21 of the resumed run has the same samples but the loss 9.0, not" in result.output
    assert "EXACT" not in result.output


def test_kill_is_between_checkpoints_in_the_last_epoch_but_one() -> None:
    """The step after which the training is killed: never at a checkpoint or an epoch's end; too
    few steps are refused.
    """
    assert choose_kill(STEPS, 4) == 10
    assert choose_kill([replace(step, epoch=step.step // 10) for step in STEPS], 10) == 35
    with pytest.raises(Exception, match="40 steps are too few"):
        choose_kill(STEPS, 30)


def test_no_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib there is no picture and no error."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw_losses(tmp_path / "demo.png", STEPS, KILLED, RESUMED) is None


def test_version() -> None:
    """The command says which version it is."""
    result = CliRunner().invoke(main, ["--version"])
    assert result.output.startswith("wds-pipes, version ")
