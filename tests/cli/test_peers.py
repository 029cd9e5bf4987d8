"""``wds-pipes bench --peers``: this package against other loaders and the limits of the machine."""

import importlib.util
import itertools
import json
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import wds_pipes as wp
from wds_pipes.cli import main
from wds_pipes.cli.peers import measuring, processes
from wds_pipes.cli.peers.adapters.base import Adapter, LacksError, adapter_of
from wds_pipes.cli.peers.chart import draw
from wds_pipes.cli.peers.data import Data
from wds_pipes.cli.peers.measuring import access_rate, batch_rate, measure, outcome, rate
from wds_pipes.cli.peers.report import ratios, table
from wds_pipes.cli.peers.rows import LIMITS, MEASUREMENTS, OURS, ROWS, Row
from wds_pipes.cli.peers.running import Environment, Plan, compare

MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def run(*arguments):
    return CliRunner().invoke(main, ["bench", "--peers", *map(str, arguments)])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Few samples, with small pictures: three batches."""
    found = Data(str(tmp_path_factory.mktemp("data")), images=48, tiny=64)
    os.mkdir(os.path.dirname(found.urls("images")[0]))
    for shard, url in enumerate(found.urls("images")):
        with wp.TarWriter(url) as writer:
            for number in range(48):
                picture = np.full((48, 64, 3), number, np.uint8)
                writer.write({"__key__": f"{48 * shard + number:09d}", "jpg": picture, "cls": number})
    found.make()
    return found


def test_a_quick_run_writes_table_json_and_chart(tmp_path, monkeypatch):
    monkeypatch.setattr(Data, "quick", lambda directory: Data(directory, images=2, tiny=64))
    done = run("--quick", "--out", tmp_path, "--only", "limit: reading", "--only", "limit: header walk")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "peers.json").read_text())
    rows = {row["name"]: row["cells"] for row in results["rows"]}
    assert tuple(rows) == ("limit: reading", "limit: header walk")
    for cells in rows.values():
        assert cells.keys() == {*(each.name for each in MEASUREMENTS), "save"}
        for cell in cells.values():
            assert cell["median"] > 0 if "values" in cell else cell["reason"]
    assert [name for name, cell in rows["limit: header walk"].items() if "values" in cell] == [
        "raw images",
        "raw tiny",
        "shuffled tiny",
    ]
    assert rows["limit: header walk"]["decoded"] == {"reason": "it does not decode"}

    page = (tmp_path / "peers.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0][2:] for line in lines[2:4]] == list(rows)
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert results["date"] in page
    assert "it does not decode" in page
    assert table(results) in done.output
    picture = tmp_path / "peers.png"
    assert picture.exists() == MATPLOTLIB
    if MATPLOTLIB:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "(peers.png)" in page


@pytest.mark.slow
def test_processes_are_measured_with_all_their_memory(data, tmp_path):
    """The quickest decoding alone is the limit of this package with its own decoder."""
    limit, own = (row for row in ROWS if row.name in ("limit: decode + resize", "wds_pipes, size=(224, 224)"))
    rows = [replace(row, only="decoded workers") for row in (limit, own)]
    found = compare(rows, data, str(tmp_path / "work"), Plan.quick())
    for row in found["rows"]:
        cell = row["cells"]["decoded workers"]
        assert cell.get("median", 0) > 0, cell
        assert cell["peak_bytes"] is None or cell["peak_bytes"] > 50e6  # of three processes with torch
    assert "| wds_pipes, size=(224, 224) / limit: decode + resize | decoded workers | " in table(found)


@pytest.mark.parametrize("row", [*LIMITS, *OURS], ids=lambda row: row.adapter.replace(":", "-"))
def test_what_an_adapter_measures(data, tmp_path, row):
    """In this process, without workers; of this package, each resume is exact."""
    found, adapter, threads = {}, adapter_of(row.adapter)(data, str(tmp_path)), torch.get_num_threads()
    try:
        for what in ("prepare", *(each.name for each in MEASUREMENTS if not each.name.endswith("workers"))):
            with suppress(LacksError):
                if what == "resume":
                    assert measure(adapter, "save", 0.01)["value"] > 0
                found[what] = measure(adapter, what, 0.01)
    finally:
        torch.set_num_threads(threads)
    assert all(result["value"] >= 0 for result in found.values())
    if row.adapter.startswith("own"):
        assert found["resume"]["outcome"] == "exact"
        assert found.keys() >= {"raw images", "raw tiny", "shuffled tiny", "decoded", "decoded threads"}
    if row.adapter.endswith("Decoding"):
        assert found.keys() == {"prepare", "decoded", "decoded threads"}


def results_of(values):
    """Results with these values of the measurements of rows; the other cells have reasons."""
    every = [each.name for each in MEASUREMENTS]
    return {
        "date": "2026-01-02",
        "machine": {"processor": "a processor", "cores": 2, "python": "3.11.0", "load_before": 0.5},
        "version": "1",
        "data": {kind: {"samples": 10, "bytes": 1000} for kind in ("images", "tiny")},
        "plan": {"rounds": 3, "seconds": 1, "timeout_seconds": 1},
        "rows": [
            {
                "name": name,
                "reads": "tar",
                "versions": {"torch": "2"},
                "cells": {
                    **{each: {"reason": f"no {each}"} for each in (*every, "save")},
                    **{
                        each: {"values": found, "median": sorted(found)[1], "peak_bytes": 10**7 * len(name)}
                        for each, found in cells.items()
                    },
                },
            }
            for name, cells in values.items()
        ],
    }


def test_ratios_are_of_rounds_and_the_table_shows_medians_and_reasons():
    found = results_of(
        {"wds_pipes": {"decoded workers": [100, 300, 200]}, "webdataset": {"decoded workers": [50, 100, 400]}}
    )
    assert ratios(found) == {
        ("wds_pipes", "webdataset", "decoded workers"): 2,
        ("wds_pipes", "webdataset", "peak memory"): 0.9,
    }
    page = table(found)
    assert "| 200 ±50% |" in page
    assert "| 100 ±175% |" in page
    assert "| 90 MB |" in page
    reasons = [line for line in page.splitlines() if line.endswith("no raw tiny")]
    assert len(reasons) == 1  # both rows refer to it
    number = reasons[0].partition(".")[0]
    assert page.count(f"({number})") == 2


def test_the_chart_is_drawn_from_the_json(tmp_path):
    pytest.importorskip("matplotlib")
    rates = {"decoded workers": [100, 300, 200], "raw tiny": [1e5, 2e5, 3e5]}
    found = json.loads(json.dumps(results_of({"wds_pipes": rates, "another": rates, "nothing": {}})))
    draw(found, str(tmp_path / "one.png"))
    found["rows"][0]["cells"]["decoded workers"]["median"] = 300
    draw(found, str(tmp_path / "other.png"))
    one, other = ((tmp_path / f"{name}.png").read_bytes() for name in ("one", "other"))
    assert one.startswith(b"\x89PNG")
    assert one != other


def test_every_row_has_an_adapter():
    assert len({row.name for row in ROWS}) == len(ROWS) >= 19
    for row in ROWS:
        kind = adapter_of(row.adapter)
        assert issubclass(kind, Adapter)
        assert kind is not Adapter


def test_what_is_not_there_is_a_row_with_its_reason(tmp_path):
    rows = (
        Row("missing", "converted:Lmdb", "LMDB", ("a-package-that-is-not-there",)),
        Row("refused", "tars:Webdataset", "tar", ("webdataset",)),
    )
    places = {"refused": Environment(reason="does not install: no compiler")}
    data = Data(str(tmp_path / "data"), images=2, tiny=2, shards=1)
    found = compare(rows, data, str(tmp_path / "work"), Plan.quick(), environments=places)
    missing, refused = (row["cells"] for row in found["rows"])
    assert {cell["reason"] for cell in missing.values()} == {"not installed: pip install a-package-that-is-not-there"}
    # Webdataset has nothing to prepare; each measurement has the reason of the environment
    assert {cell["reason"] for name, cell in refused.items() if name != "access images"} == {
        "does not install: no compiler"
    }
    assert "a-package-that-is-not-there" in table(found)


def test_a_measurement_that_does_not_end_is_killed_with_its_children(tmp_path, monkeypatch):
    script = (
        "import os, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        "print(os.getpid(), child.pid, flush=True); time.sleep(600)"
    )
    looks = []

    def clock():  # the time has passed at the second look at it after the script has written
        if os.path.getsize(tmp_path / "log"):
            looks.append(1)
        return 100.0 if len(looks) > 1 else 0.0

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with open(tmp_path / "log", "wb") as log:
        status, peak = processes.run(
            [sys.executable, "-c", script],
            env=os.environ,
            cwd=str(tmp_path),
            log=log,
            result=str(tmp_path / "result"),
            timeout_seconds=2,
        )
    assert status is None
    assert peak is None or peak > 1e6
    leader, child = map(int, (tmp_path / "log").read_text().split())
    assert leader != child
    assert not list(processes.session(leader))


def test_arguments_that_do_not_fit_are_usage_errors():
    done = run("--only", "webdatasett")
    assert done.exit_code == 2
    assert "there is no row 'webdatasett'; there are: limit: reading; " in done.output
    for arguments, message in (
        ([], "Missing argument 'URLS...'"),
        (["--peers", "a.tar"], "--peers makes its own shards"),
        (["--quick", "a.tar"], "options of --peers"),
        (["--only", "wds_pipes", "a.tar"], "options of --peers"),
    ):
        done = CliRunner().invoke(main, ["bench", *arguments])
        assert done.exit_code == 2
        assert message in done.output


@pytest.mark.parametrize("tick", [1, 50])
def test_rates_count_what_was_taken(monkeypatch, tick):
    """Each look at the clock takes a tick, and a measurement 20: a tick of 50 is a slow machine."""
    clock, passes = itertools.count(0, tick), []
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def one():
        passes.append(0)
        yield from range(100)

    assert rate(one, 20) == 99 / tick  # a look before and one after the 99 samples
    assert len(passes) == (20 if tick == 1 else 1)
    assert batch_rate([([1] * 64, None)] * 4, 2) == 64 / tick
    assert batch_rate([5.0], 2) == 5.0
    read = []
    assert access_rate(read.append, 10, 20) == 256 / tick
    assert set(read) <= set(range(10))
    for nothing in (lambda: rate(lambda: [], 0.01), lambda: batch_rate([([1], None)], 2)):
        with pytest.raises(ValueError, match="there are"):
            nothing()


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_batches_that_are_ready_before_are_not_counted(monkeypatch, ahead):
    """A loader that reads ahead gives its last batches at once."""
    now = [0.0]
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def batches():
        for number in range(32):
            if number < 32 - ahead:
                now[0] += 2.0 * (1 + ahead if number == 0 else 1)
            yield [1] * 64, None

    assert batch_rate(batches(), 2) == 32.0


def test_an_outcome_says_what_a_resume_lost_or_repeated():
    expected = list(range(10, 20))
    assert outcome(range(10), expected, expected) == "exact"
    shuffled = random.Random(1).sample(expected, 10)
    assert outcome(range(10), expected, shuffled) == "other order"
    assert outcome(range(10), expected, expected[2:]) == "lost 2, repeated 0"
    assert outcome(range(10), expected, [8, 9, *expected]) == "lost 0, repeated 2"
    assert outcome(range(10), expected, [9, *expected[1:]]) == "lost 1, repeated 1"
