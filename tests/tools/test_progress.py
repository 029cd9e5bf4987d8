"""How far a command is."""

import json
import os

import pytest
from waiting import wait_for

from wds_pipes import tools
from wds_pipes.testing import make_shards
from wds_pipes.tools import progress as module
from wds_pipes.tools.progress import Units, progress


@pytest.mark.parametrize(("show", "printed"), [(False, ""), (None, "2 of 3 shards, "), (True, "3/3")])
def test_what_is_shown_of_three_shards_of_which_one_was_done_before(show, printed, capfd, monkeypatch):
    """A line comes although nothing more is done."""
    if show:
        pytest.importorskip("tqdm")
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.01)
    shown = []

    def has_line():
        shown.append(capfd.readouterr().err)
        return printed in "".join(shown)

    with progress(3, "shard", show=show, done=1) as advance:
        advance(1)
        if show is None:
            wait_for(has_line)
        advance(1)
    found = capfd.readouterr()
    assert found.out == ""
    assert printed in "".join([*shown, found.err])
    assert show is not False or not found.err


@pytest.mark.parametrize(
    ("unit", "line"),
    [
        ("sample", "2,500 of 10,000 samples, 200 samples/s, about 38 s left"),
        ("B", "2.5 kB of 10 kB, 200 bytes/s, about 38 s left"),
    ],
)
def test_a_line_has_the_rate_and_the_time_that_is_left(unit, line):
    lines = module._Lines(10_000, unit, 500)
    assert " left" not in lines.line(10)
    lines.add(2000)
    assert lines.line(10) == line


def test_units_of_parts_add_up_to_their_sizes():
    """Also where a part has more units than its size says, or is done again."""
    seen = []
    units = Units(seen.append, {"a": 10, "b": 5})
    units.add("a", 4)
    units.reach("a", 7)
    units.add("a", 100)
    units.add("b", 3)
    units.end("b", done=False)
    assert sum(seen) == 10
    units.end("a")
    units.end("b")
    assert (seen[:4], sum(seen)) == ([4, 3, 3, 3], 15)


@pytest.fixture
def seen(monkeypatch):
    """What bars were told: the total, the unit and the counts of each."""
    found = []

    class Bar:
        def __init__(self, total, unit, **_):
            calls = []
            found.append((total, unit, calls))
            self.update = calls.append

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(pytest.importorskip("tqdm"), "tqdm", Bar)
    return found


COMMANDS = {
    "map": lambda shard, out: tools.map("copy:copy", shard, out, progress=True),
    "export": lambda shard, out: tools.export(shard, out, kind="jsonl", progress=True),
    "download": lambda shard, out: tools.download(shard, out, progress=True),
    "repair": lambda shard, out: tools.repair(shard, out, progress=True),
    "verify": lambda shard, out: tools.verify(shard, progress=True),
    "info": lambda shard, out: tools.info(shard, whole=True, progress=True),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_progress_within_one_shard(command, seen, tmp_path):
    [shard] = make_shards(tmp_path / "in", shards=1, samples=40, fields={"bin": lambda rng, _: rng.randbytes(200_000)})
    COMMANDS[command](shard, tmp_path / "out")
    total, unit, calls = seen[-1]
    assert (total, unit, sum(calls)) == (os.path.getsize(shard), "B", total)
    assert len(calls) > 5
    assert max(calls) < total / 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_within_a_task_that_may_run_in_another_process(seen, tmp_path, jobs):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"n": number}) + "\n" for number in range(200)))
    tools.create(tmp_path / "t.jsonl", tmp_path / "out", jobs=jobs, max_samples=100, progress=True)
    total, unit, calls = seen[-1]
    assert (total, unit, sum(calls)) == (200, "sample", 200)
    assert len(calls) > 2
