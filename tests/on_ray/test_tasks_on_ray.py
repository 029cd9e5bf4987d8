"""Commands and jobs on a Ray cluster: the bytes and findings of one process."""

import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from commands import run_command
from tars import pairs, tar
from task_work import moody, write
from waiting import wait_for

from wds_pipes import SampleError, ShardWarning, WorkerError
from wds_pipes.testing import make_shards
from wds_pipes.tools import Job, Place, Task, fingerprint, on_ray, run
from wds_pipes.tools import jobs as running
from wds_pipes.tools.jobs import plan_of

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(running, "_PAUSE_SECONDS", 0.01)


def contents(folder):
    """All files below a folder."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_create_writes_the_same_bytes():
    for number in range(40):
        for ending in ("jpg", "json"):
            path = Path(f"files/{number % 3}/{number:03d}.{ending}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(f"{number}".encode() * 1000)
    options = ("--max-samples", 6, "--shuffle", 5)
    run_command("create", "files", "one", *options)
    made = run_command("create", "files", "ray", *options, "--engine", "ray", "--json")
    assert len(json.loads(made.stdout)["written"]) == 7
    assert contents("ray") == contents("one")
    again = run_command("create", "files", "ray", *options, "--engine", "ray")
    assert "(7 of 7 there already)" in again.stdout


def test_reshard_and_map_write_the_same_bytes():
    make_shards("data", shards=3, samples=[4, 0, 7])
    Path("only_here.py").write_text('def shout(sample):\n    return {"txt": sample["txt"].upper()}\n')
    for name, *arguments in (("reshard", "data"), ("map", "only_here:shout", "data")):
        options = ("--max-samples", 3) if name == "reshard" else ()
        run_command(name, *arguments, f"{name}-one", *options)
        ray = (name, *arguments, f"{name}-ray", *options, "--engine", "ray")
        for task in (1, 0):  # shares of the tasks, each on the cluster
            run_command(*ray, "--task", task, "--tasks", 2)
        assert contents(f"{name}-ray") == contents(f"{name}-one")
        assert " there already)" in run_command(*ray).stdout


def test_index_writes_the_same_files_and_warnings():
    found = []
    for folder in ("one", "ray"):
        shards = make_shards(folder, shards=3, samples=[4, 2, 5])
        Path(shards[2]).write_bytes(tar([*pairs(3), *pairs(1)]))
        options = ("--on-repeated-key", "warn", "-o", f"{folder}/index.json", "--offsets", "--dali-to", folder)
        indexed = run_command("index", f"{folder}/*.tar", *options, *(("--engine", "ray") if folder == "ray" else ()))
        assert indexed.stderr.count("warning: ") == 1
        assert "comes again" in indexed.stderr or "repeat" in indexed.stderr
        # the index has the times of the files
        found.append({**contents(folder), "index.json": without_times(folder)})
    assert found[0] == found[1]
    Path(shards[0]).write_bytes(Path(shards[0]).read_bytes()[:2000])
    index = ("index", "ray/*.tar", "-o", "ray/index.json")
    damaged = run_command(*index, "--engine", "ray", code=1)
    assert damaged.stderr == run_command(*index, code=1).stderr
    assert damaged.stderr.count("\n") == 1


def without_times(folder):
    shards = json.loads(Path(folder, "index.json").read_text())["shardlist"]
    return [
        {name: value for name, value in shard.items() if name in ("url", "nsamples", "filesize", "md5sum")}
        for shard in shards
    ]


def test_verify_finds_the_same():
    shards = make_shards("data", shards=4, samples=5)
    shutil.copy(shards[0], "data/copy.tar")
    Path(shards[1]).write_bytes(Path(shards[1]).read_bytes()[:2000])
    Path(shards[2]).write_bytes(tar([*pairs(3), *pairs(1)]))
    one = run_command("verify", "data", "--decode", "--json", code=1)
    ray = run_command("verify", "data", "--decode", "--json", "--engine", "ray", code=1)
    assert ray.stdout == one.stdout
    assert {"damage", "sample", "duplicate-key"} <= set(json.loads(ray.stdout)["counts"])


def make(folder, values, work=write):
    parts = [
        Task(f"part-{number}", (f"{number}.a", f"{number}.b"), value, fingerprint(value))
        for number, value in enumerate(values)
    ]
    return Job("test", Place(str(folder)), work, parts)


def test_a_killed_worker_changes_nothing(tmp_path):
    values = [("kill", 1), ("none", 0), ("kill", 1), ("none", 0)]
    assert run(make("one", values)).complete
    report = run(make("ray", values, partial(moody, str(tmp_path))), engine=on_ray)
    assert report.complete
    calls = Path("calls").read_text().split()
    assert sorted(calls) == ["part-0", "part-0", "part-1", "part-2", "part-2", "part-3"]
    outputs = [{n: d for n, d in contents(place).items() if n[0] != "."} for place in ("ray", "one")]
    assert outputs[0] == outputs[1]


def test_a_task_that_fails_is_reported(tmp_path):
    report = run(make("ray", [("kill", 9), ("sample", 9), ("none", 0)], partial(moody, str(tmp_path))), engine=on_ray)
    assert report.written == ["part-2"]
    assert report.failed["part-1"] == "sample 'a' is wrong"
    assert "Ray could not run it to its end" in report.failed["part-0"]
    assert Path("calls").read_text().split().count("part-0") == 3


def dies_once(place):
    if not os.path.exists(place):
        Path(place).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return place


def warns(value):
    import warnings

    warnings.warn(ShardWarning("odd"), stacklevel=2)
    if value == 3:
        raise SampleError("wrong", key="k")
    return value


def test_functions_run_again_where_they_may():
    from wds_pipes.tools.ray_engine import RayExecutor

    with RayExecutor(retries=2) as executor:
        assert executor.width == 2
        assert executor.submit(dies_once, "there").result() == "there"
        with pytest.warns(ShardWarning, match="odd"):
            assert list(executor.map(warns, range(3))) == [0, 1, 2]
        with pytest.warns(ShardWarning, match="odd"), pytest.raises(SampleError, match="wrong") as error:
            executor.submit(warns, 3).result()
        assert error.value.key == "k"
    with RayExecutor() as executor, pytest.raises(WorkerError, match="could not run it"):
        executor.submit(dies_once, "elsewhere").result()


def test_relative_paths_need_the_directory_everywhere(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    from wds_pipes.tools.ray_engine import RayExecutor

    with RayExecutor() as executor:
        gone.rmdir()
        with pytest.raises(FileNotFoundError, match="gone"):
            executor.submit(dies_once, "x").result()


def slow(task, place):
    """Writes until it is ended, and then says so."""
    place.write(f"{task.name}.began", b"")
    try:
        while task.name != "part-0":
            time.sleep(0.01)
    finally:
        place.write(f"{task.name}.ended", b"")
    for output in task.outputs:
        place.write(output, b"")
    return {}


def test_an_engine_that_is_closed_ends_its_tasks(tmp_path):
    job = make("ray", range(4), slow)
    outcomes = on_ray(running.Attempt(job.work, job.place, plan_of(job)), job.tasks)
    assert next(outcomes).name == "part-0"
    wait_for(lambda: Path("ray/part-1.began").exists())
    begun = time.monotonic()
    outcomes.close()
    assert time.monotonic() - begun < 8  # it was not killed
    began, ended = ({p.stem for p in Path("ray").glob(f"*.{what}")} for what in ("began", "ended"))
    assert began == ended
    assert not list(Path("ray").glob("[1-9].*"))
