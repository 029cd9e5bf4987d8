"""``--engine``: what does not need the engine to be there; tests/on_ray has the rest."""

import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from wds_pipes.cli import main
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards
from wds_pipes.tools import verify

COMMANDS = {
    "create": ["create", "data", "out"],
    "index": ["index", "data/*.tar", "--offsets"],
    "verify": ["verify", "data"],
}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_shards("data", shards=3, samples=4)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_library_is_one_line(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(main, [*COMMANDS[command], "--engine", "ray"])
    assert (result.exit_code in (1, 2), result.stderr.count("\n")) == (True, 1)
    assert "pip install 'wds_pipes[ray]'" in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cluster_that_does_not_answer_is_one_line(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # where nothing listens any more
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    result = CliRunner().invoke(main, [*COMMANDS[command], "--engine", "ray"])
    assert (result.exit_code in (1, 2), result.stderr.count("\n")) == (True, 1)
    assert f"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:{port}" in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_processes_of_this_machine_do_not_go_with_it(command):
    result = CliRunner().invoke(main, [*COMMANDS[command], "--engine", "ray", "-j", "1"])
    assert result.exit_code == 2
    assert "with --engine ray, as many tasks run as the cluster has CPUs" in result.stderr


def test_shards_are_read_by_any_executor(data):
    one = index_shards("data/*.tar", "data/one.json", offsets=True)
    offsets = {path.name: path.read_bytes() for path in Path("data").glob("*.idx")}
    for path in Path("data").glob("*.idx"):
        path.unlink()
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        again = index_shards("data/*.tar", "data/two.json", offsets=True, executor=executor)
        report = verify("data", decode=True, jobs=2, executor=executor)
    assert again == one
    assert {path.name: path.read_bytes() for path in Path("data").glob("*.idx")} == offsets
    assert (report.shards, report.samples, report.findings) == (3, 12, [])
