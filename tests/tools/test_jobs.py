"""Jobs of tasks: wds_pipes.tools."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from scripts import run_file
from task_work import moody, nothing, write, write_one_shard
from waiting import wait_for

from wds_pipes import StateError
from wds_pipes.tar import TarWriter
from wds_pipes.tools import Job, Place, Task, fingerprint, run, shard_files
from wds_pipes.tools import jobs as running
from wds_pipes.tools.outputs import write_indexes


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(running, "_PAUSE_SECONDS", 0.01)


def shard_job(folder):
    """Two shards, written with write_shard."""
    tasks = [Task(f"{number}.tar", shard_files(f"{number}.tar"), number) for number in range(2)]
    return Job("test", Place(str(folder)), write_one_shard, tasks)


def total(place, facts):
    place.write("total.json", json.dumps(sum(fact["value"] for fact in facts)).encode())


def make(folder, values=range(5), work=write, **options):
    return Job(
        "test",
        folder if isinstance(folder, Place) else Place(str(folder)),
        work,
        [
            Task(f"part-{number}", (f"{number}.a", f"{number}.b"), value, fingerprint(value))
            for number, value in enumerate(values)
        ],
        options,
        total if work is write else None,
        ("total.json",) if work is write else (),
    )


def outputs(folder):
    """The contents of the outputs."""
    names = sorted(name for name in os.listdir(folder) if name[0] != "." and (folder / name).is_file())
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outputs of one process."""
    folder = tmp_path_factory.mktemp("whole")
    report = run(make(folder))
    assert (report.written, report.skipped, report.failed, report.complete) == (
        [f"part-{number}" for number in range(5)],
        [],
        {},
        True,
    )
    assert [fact["pid"] for fact in report.facts.values()] == [os.getpid()] * 5
    return outputs(folder)


def test_processes_and_shares_write_the_same_bytes(tmp_path, whole):
    """Shares in any order; the last one writes what belongs to the whole."""
    report = run(make(tmp_path / "processes"), jobs=2)
    assert report.complete
    assert os.getpid() not in {fact["pid"] for fact in report.facts.values()}
    assert outputs(tmp_path / "processes") == whole
    for order in itertools.permutations(range(3)):
        folder = tmp_path / "".join(map(str, order))
        reports = [run(make(folder), share=(index, 3)) for index in order]
        assert [report.complete for report in reports] == [False, False, True]
        assert sorted(len(report.written) for report in reports) == [1, 2, 2]
        assert outputs(folder) == whole


def test_an_engine_runs_the_tasks(tmp_path, whole):
    """In any order, on another machine; what it leaves out has failed."""

    def threads(call, tasks):
        with ThreadPoolExecutor(3) as pool:
            yield from pool.map(call, reversed(tasks))

    assert run(make(tmp_path / "threads"), engine=threads).complete
    assert outputs(tmp_path / "threads") == whole
    lazy = run(make(tmp_path / "lazy"), engine=lambda call, tasks: map(call, tasks[1:]))
    assert lazy.failed == {"part-0": "the engine returned no outcome for it"}
    assert not lazy.complete
    assert run(make(tmp_path / "lazy")).written == ["part-0"]
    assert outputs(tmp_path / "lazy") == whole


def test_finished_tasks_are_skipped_and_missing_outputs_are_written_again(tmp_path, whole):
    run(make(tmp_path))
    again = run(make(tmp_path))
    assert (again.written, len(again.skipped), again.complete) == ([], 5, True)
    (tmp_path / "2.a").unlink()
    (tmp_path / "total.json").unlink()
    (tmp_path / ".wds-pipes/done/part-4.json").unlink()
    assert run(make(tmp_path), dry_run=True).written == ["part-2", "part-4"]
    assert not (tmp_path / "2.a").exists()
    assert run(make(tmp_path)).written == ["part-2", "part-4"]
    assert outputs(tmp_path) == whole


@pytest.mark.parametrize(
    ("extras", "task"),
    [
        (["../victim/thesis.txt"], None),
        ([], ["x", "", ["{victim}/thesis.txt"]]),
        ([], ["../../../victim/thesis.txt", "", []]),
        (["link/thesis.txt"], None),
    ],
    ids=["extra", "output", "task", "link"],
)
def test_the_plan_of_a_foreign_directory_removes_nothing_outside_of_it(tmp_path, extras, task):
    """Directories come from anywhere, and their plans with them."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.mkdir()
    for file in ("thesis.txt", "thesis.txt.json"):
        (victim / file).write_text("years of work")
    run(make(out, size=1))
    (out / "link").symlink_to(victim)
    plan = out / ".wds-pipes/plan.json"
    known = json.loads(plan.read_text())
    added = json.loads(json.dumps([task]).replace("{victim}", str(victim))) if task else []
    plan.write_text(json.dumps({**known, "extras": extras, "tasks": [*known["tasks"], *added]}))
    if extras == ["link/thesis.txt"]:
        assert run(make(out, size=2), overwrite=True).complete
    else:
        with pytest.raises(StateError, match="not below its directory"):
            run(make(out, size=2), overwrite=True)
    assert len(os.listdir(victim)) == 2


def test_a_receipt_of_a_foreign_directory_has_no_index_written_outside_of_it(tmp_path):
    """It names shards, whose index would replace that of another directory."""
    run(shard_job(tmp_path / "out"))
    for receipt in (tmp_path / "out/.wds-pipes/done").iterdir():
        known = json.loads(receipt.read_text())
        known["facts"]["shard"] = f"../victim/{known['task']}"
        receipt.write_text(json.dumps(known))
    with pytest.raises(ValueError, match="'../victim/index.json' is no name of a file below"):
        run(replace(shard_job(tmp_path / "out"), finish=write_indexes))
    assert not (tmp_path / "victim").exists()


def test_a_progress_bar(tmp_path, capsys):
    """With what was finished before."""
    pytest.importorskip("tqdm")
    run(make(tmp_path), share=(0, 2))
    run(make(tmp_path), progress=True)
    assert "5/5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"size": 3}, "--size was 2, and is now 3"),
        ({}, "--size was 2, and is now not given"),
        ({"size": 2, "values": [0, 1, 7, 3, 4]}, r"the inputs were changed: 1 of 5 tasks .* the first is part-2"),
        ({"size": 2, "values": [0, 1, 2]}, "0 of 3 tasks would be other than before, and 2 would not be there"),
    ],
)
def test_outputs_of_other_options_or_inputs_are_refused_in_words(tmp_path, other, message):
    """And with overwrite replaced, so that nothing of them is left."""
    run(make(tmp_path, size=2))
    before = outputs(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(
            StateError, match=f"the outputs of another job: .*{message}.*pass overwrite=True to replace"
        ):
            run(make(tmp_path, **other), dry_run=dry_run)
    assert outputs(tmp_path) == before
    report = run(make(tmp_path, **other), overwrite=True)
    assert report.complete
    assert run(make(tmp_path, **other)).written == []
    run(make(tmp_path / ".fresh", **other))
    assert outputs(tmp_path) == outputs(tmp_path / ".fresh")
    if "values" in other:
        assert report.written == [f"part-{number}" for number, value in enumerate(other["values"]) if value != number]


def test_files_of_another_program_are_not_replaced(tmp_path, whole):
    (tmp_path / "3.b").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"1 file of the names .* 3.b, and no plan"):
        run(make(tmp_path))
    assert os.listdir(tmp_path) == ["3.b"]
    assert run(make(tmp_path), overwrite=True).complete
    assert outputs(tmp_path) == whole
    (tmp_path / "3.b").write_bytes(b"mine, and longer")
    with pytest.raises(StateError, match=r"3.b in .* has 16 bytes, and was written with 10"):
        run(make(tmp_path))
    assert run(make(tmp_path), overwrite=True).written == ["part-3"]
    assert outputs(tmp_path) == whole


def test_failed_tasks_are_tried_again_and_named(tmp_path):
    """A wrong sample is tried once; the other tasks are not stopped."""
    kinds = [("os", 0), ("os", 2), ("os", 3), ("sample", 9), ("nothing", 9)]
    job = make(tmp_path / "out", kinds, partial(moody, str(tmp_path)))
    told = []
    report = run(job, on_task=lambda outcome: told.append(outcome.name))
    assert report.failed == {
        "part-2": "OSError: the disk is gone",
        "part-3": "sample 'a' is wrong",
        "part-4": "FileNotFoundError: the task did not write 4.a",
    }
    assert report.written == ["part-0", "part-1"]
    assert sorted(told) == [task.name for task in job.tasks]
    calls = (tmp_path / "calls").read_text().split()
    assert [calls.count(f"part-{number}") for number in range(5)] == [1, 3, 3, 1, 3]
    assert run(job).written == ["part-2"]


def test_a_killed_process_is_replaced(tmp_path):
    """Its task is tried again; one that always dies fails by name."""
    job = make(tmp_path / "out", [("kill", 1), ("os", 0), ("kill", 9), ("os", 0)], partial(moody, str(tmp_path)))
    report = run(job, jobs=2, attempts=2)
    assert report.written == ["part-0", "part-1", "part-3"]
    assert list(report.failed) == ["part-2"]
    assert "its process ended with exit code -9" in report.failed["part-2"]


def test_in_a_store(s3, tmp_path):
    """The same, with one object for each receipt."""
    place = Place(f"{s3.url}/tasks", s3.storage_options)
    run(make(tmp_path, range(3)))
    assert run(make(place, range(3)), share=(1, 2)).written == ["part-1"]
    assert run(make(place, range(3))).written == ["part-0", "part-2"]
    assert {name: place.read(name) for name in outputs(tmp_path)} == outputs(tmp_path)
    with pytest.raises(StateError, match="s3://shards/tasks has the outputs of another job"):
        run(make(place, range(2)))
    assert run(make(place, range(2)), overwrite=True).written == []
    assert place.read("2.a") is None
    assert json.loads(place.read("total.json")) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"jobs": 0}, ValueError),
        ({"share": (2, 2)}, ValueError),
        ({"share": (-1, 2)}, ValueError),
        ({"attempts": 0}, ValueError),
        ({"work": lambda task, place: {}, "jobs": 2}, TypeError),
    ],
)
def test_wrong_arguments(tmp_path, options, error):
    job = make(tmp_path / "out", work=options.pop("work", write))
    with pytest.raises(error):
        run(job, **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "tasks",
    [
        *([Task("a", (name,))] for name in ("", "/x", "../x", "a/../../x", ".wds-pipes/plan.json")),
        [Task("a", ("x",)), Task("b", ("x",))],
        [Task("a", ("x",)), Task("a", ("y",))],
    ],
)
def test_wrong_jobs(tmp_path, tasks):
    """Outputs outside of the directory, or of two tasks; two tasks of one name."""
    with pytest.raises(ValueError, match="relative to its directory|two tasks have one"):
        Job("test", Place(str(tmp_path)), write, tasks)


SLOW = """
import os, sys, time
from wds_pipes.tar import TarWriter
from wds_pipes.tools import Job, Place, Task, run

def slow(task, place):
    with TarWriter(place.at(task.outputs[0]), overwrite=True) as writer:
        for number in range(10):
            writer.write({"__key__": str(number), "txt": task.name})
            os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, so that lines of two processes stay lines
            time.sleep(0.02 if task.arguments else 600)
    return {}

if __name__ == "__main__":
    tasks = [Task(f"{number}.tar", (f"{number}.tar",), len(sys.argv) > 2) for number in range(3)]
    try:
        report = run(Job("test", Place(sys.argv[1]), slow, tasks), jobs=2)
    except KeyboardInterrupt:
        sys.exit(130)
    print(report.written)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGKILL"])
def test_an_interrupted_job_leaves_no_processes_and_no_half_files(tmp_path, how):
    """Ctrl-C in a terminal reaches all processes; of a killed one the others notice the end."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = {int(process.stdout.readline()) for _ in range(2)}
    assert len(workers) == 2
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if how == "Ctrl-C" else -signal.SIGKILL)
    assert "Traceback" not in errors
    wait_for(lambda: not any(map(alive, workers)))
    assert os.listdir(tmp_path / "out") == [".wds-pipes"]
    assert not (tmp_path / "out/.wds-pipes/done").exists()
    done = run_file(script, SLOW, tmp_path / "out", "fast")
    assert done.stdout.splitlines()[-1] == "['0.tar', '1.tar', '2.tar']", done.stderr
    assert sorted(outputs(tmp_path / "out")) == ["0.tar", "1.tar", "2.tar"]


class Signalling:
    """Work that sends SIGTERM to its process when it is pickled for another process."""

    pickled = 0

    def __reduce__(self):
        self.pickled += 1
        if self.pickled == 2:  # ``run`` tries it first
            signal.raise_signal(signal.SIGTERM)
        return partial, (nothing,)


def test_sigterm_while_a_process_starts_is_handled_after_that(tmp_path):
    """Or it would get half of what it is to run, and print a traceback."""
    started = []

    def end(*_):
        started.extend(multiprocessing.active_children())
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            run(make(tmp_path, work=Signalling()), jobs=2)
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(started) == 1
    assert not multiprocessing.active_children()


def test_two_runs_at_once_share_the_work_or_wait(tmp_path, whole):
    """Both report the same outputs."""
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: run(make(tmp_path), attempts=20), range(4)))
    assert [report.failed for report in reports] == [{}] * 4
    assert outputs(tmp_path) == whole


def test_of_two_jobs_that_begin_at_once_the_second_is_refused(tmp_path, monkeypatch):
    true = Place.make

    def meanwhile(place, names):
        monkeypatch.setattr(Place, "make", true)
        run(make(tmp_path, size=1))
        true(place, names)

    monkeypatch.setattr(Place, "make", meanwhile)
    with pytest.raises(StateError, match="another job: --size was 1, and is now 2"):
        run(make(tmp_path, size=2))
    assert '"size":1' in (tmp_path / ".wds-pipes/plan.json").read_text()
    assert "total.json" in outputs(tmp_path)


def test_a_job_whose_directory_is_taken_over_says_so(tmp_path):
    """With overwrite, while it writes: it goes on with nothing, and leaves nothing of its own."""
    second = make(tmp_path, values=range(2), size=2)

    def work(task, place):
        facts = write(task, place)
        if task.name == "part-2":
            run(second, overwrite=True)
        return facts

    report = run(make(tmp_path, work=work, size=1))
    assert sorted(report.failed) == ["part-2", "part-3", "part-4"]
    assert "another command writes to" in report.failed["part-2"]
    assert not report.complete
    expected = tmp_path / "expected"
    run(make(expected, values=range(2), size=2))
    assert outputs(tmp_path) == outputs(expected)
    assert run(second).skipped == ["part-0", "part-1"]


def test_a_share_that_writes_the_same_plan_again_takes_nothing_over(tmp_path):
    """As first passes of shares that start at one time may, which overwrite."""
    job, plan = make(tmp_path), tmp_path / ".wds-pipes/plan.json"

    def engine(call, tasks):
        content = plan.read_bytes()
        plan.unlink()
        plan.write_bytes(content)
        os.utime(plan, ns=(1, 1))
        yield from map(call, tasks)

    assert run(job, engine=engine).complete


def test_a_file_that_another_process_writes_is_waited_for(tmp_path):
    """Longer than a task that fails is tried again, and what the other one has finished is kept."""
    held = TarWriter(tmp_path / "0.tar", overwrite=True)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(run, shard_job(tmp_path), attempts=1)
        wait_for((tmp_path / ".wds-pipes/done/1.tar.json").exists)
        run(shard_job(tmp_path), share=(1, 2))
        before = os.stat(tmp_path / "1.tar")
        held.discard()
        assert later.result().complete
    assert os.path.samestat(os.stat(tmp_path / "1.tar"), before)


def test_what_another_run_has_finished_meanwhile_is_kept(tmp_path):
    job = make(tmp_path / "out", values=[("none", 0)] * 3, work=partial(moody, str(tmp_path)))

    def engine(call, tasks):
        run(job)
        yield from map(call, tasks)

    assert run(job, engine=engine).complete
    assert (tmp_path / "calls").read_text().split() == ["part-0", "part-1", "part-2"]


def test_a_full_disk_ends_a_job_at_once(tmp_path):
    report = run(make(tmp_path / "out", values=[("full", 1)] * 3, work=partial(moody, str(tmp_path))))
    assert list(report.failed) == ["part-0"]
    assert "No space left on device" in report.failed["part-0"]
    assert (tmp_path / "calls").read_text().split() == ["part-0"]
    assert not report.complete
