"""``wds-pipes demo``."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from waiting import wait_for

from wds_pipes.cli import main
from wds_pipes.testing import make_shards
from wds_pipes.tools.demo import trial
from wds_pipes.tools.demo.trial import CLASSES, choose_kill, difference, write_images

STEPS = [
    {"step": number + 1, "epoch": number // 20, "loss": 1 / (number + 3), "keys": [f"{number:04d}"], "seconds": number}
    for number in range(40)
]
KILLED, RESUMED = STEPS[:25], STEPS[20:]


def demo(*options):
    return CliRunner().invoke(main, ["demo", *map(str, options)])


def processes_in(directory):
    """The processes whose working directory this is, other than this one."""
    return [
        process
        for process in psutil.process_iter(["cwd", "status"])
        if process.info["cwd"] == str(directory.resolve())
        and process.info["status"] != psutil.STATUS_ZOMBIE
        and process.pid != os.getpid()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_killed_and_resumed_is_exact(own, tmp_path, monkeypatch):
    """The demo, smaller, also with other shards: it says EXACT, and no process is left."""
    monkeypatch.chdir(tmp_path)
    make_shards("own", shards=4, samples=50, fields=("png", "txt"))
    given = ["--data", "own/shard-{000000..000003}.tar", "--steps", 33] if own else ["--samples", 480, "--epochs", 2]
    result = demo(*given, "--batch-size", 10 if own else 16, "--checkpoint-every", 4 if own else 10)
    assert result.exit_code == 0, result.output
    assert ("EXACT: 33 steps, 330 samples" if own else "EXACT: 60 steps, 960 samples") in result.output
    assert ("wds-pipes-demo/shards/shapes-{000000..000011}.tar" in result.output) != own
    assert not processes_in(tmp_path)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path):
    """Interrupted while the trainer runs, it takes the trainer and its workers along."""
    command = [sys.executable, "-m", "wds_pipes", "demo", "--out", "out", "--samples", "480", "--epochs", "50"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_for((tmp_path / "out/uninterrupted.pt").exists)
        assert len(processes_in(tmp_path)) >= 4
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert (process.returncode, b"Aborted!" in output) == (130, True)
    wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.slow
def test_a_trainer_that_fails(tmp_path, capfd):
    """What it printed stays, and no shard is trained on half of a batch."""
    [url] = make_shards(tmp_path, shards=1, samples=5, fields={"jpg": lambda rng, number: b"no image"})
    assert "the trainer failed with exit code 1" in demo("--data", url, "--out", tmp_path / "out").output
    assert "DecodeError: field 'jpg' of sample '0000000" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "missing-*.tar"], "no shard matches"),
        (["--data", "file", "--data", "missing.tar"], "shard missing.tar does not exist"),
        (["--data", "file", "--samples", 5], "--samples is how many images are made"),
        (["--out", "file/out"], "Not a directory"),
    ],
)
def test_what_cannot_be_used_is_one_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = demo(*options)
    assert (result.exit_code, len(result.output.splitlines()), message in result.output) == (2, 1, True), result.output


def test_images_are_always_the_same(tmp_path):
    """And every kind of shape can be drawn."""
    one, other = ([Path(shard).read_bytes() for shard in write_images(tmp_path / name, 12 * CLASSES)] for name in "ab")
    assert len(one) == 12
    assert one == other


def test_no_difference():
    """Equal runs differ nowhere, whenever their batches came, and also where a loss is NaN."""
    steps = [{**step, "loss": float("nan")} for step in STEPS]
    assert difference(steps, steps[:25], [{**step, "seconds": 99} for step in steps[20:]]) is None


@pytest.mark.parametrize(
    ("killed", "resumed", "words"),
    [
        (KILLED, [*RESUMED[:-1], {**RESUMED[-1], "loss": STEPS[-1]["loss"] + 1e-15}], "step 40 of the resumed run has"),
        ([{**KILLED[0], "keys": ["0002"]}, *KILLED[1:]], RESUMED, "step 1 of the killed run has the keys ['0002']"),
        (KILLED, [{**RESUMED[0], "epoch": 0}, *RESUMED[1:]], "step 21 of the resumed run has the epoch 0, not 1"),
        (KILLED, RESUMED[6:], "step 26 was done neither before the crash nor after it"),
        (KILLED, [*RESUMED, {**RESUMED[-1], "step": 41}], "step 41 of the resumed run has the epoch 1, not None"),
    ],
)
def test_differences(killed, resumed, words, tmp_path, monkeypatch):
    """Another loss, key, epoch or number of steps is found, also in a step that was done twice."""
    runs = iter([STEPS, killed, resumed])
    monkeypatch.setattr(trial, "run_trainer", lambda *given, **options: next(runs))
    result = demo("--out", tmp_path, "--samples", 12)
    assert result.exit_code == 1
    assert f"DIFFERENT: {words}" in result.output


def test_the_kill_is_between_checkpoints_in_the_last_epoch_but_one():
    """Never at a checkpoint or an epoch's end; too few steps are refused."""
    assert choose_kill(STEPS, 4) == 14
    assert choose_kill([{**step, "epoch": step["step"] // 10} for step in STEPS], 10) == 35
    with pytest.raises(Exception, match="40 steps are too few"):
        choose_kill(STEPS, 30)


def test_version():
    """The command says which version it is."""
    assert CliRunner().invoke(main, ["--version"]).output.startswith("wds-pipes, version ")
