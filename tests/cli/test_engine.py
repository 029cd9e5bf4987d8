"""``--engine``: what does not need the engine to be there; tests/on_ray has the rest."""

import pickle
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import refused, run_command

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
def test_a_library_or_a_cluster_that_is_missing_is_one_line(command, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # where nothing listens any more
    monkeypatch.setenv("RAY_ADDRESS", address)
    silent = SimpleNamespace(is_initialized=lambda: False)
    missing = f"no Ray cluster answers at RAY_ADDRESS={address}"
    for module, message in ((None, "pip install 'wds_pipes[ray]'"), (silent, missing)):
        monkeypatch.setitem(sys.modules, "ray", module)
        result = run_command(*COMMANDS[command], "--engine", "ray", code=(1, 2))
        assert result.stderr.count("\n") == 1
        assert message in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_processes_of_this_machine_do_not_go_with_it(command):
    told = refused(*COMMANDS[command], "--engine", "ray", "-j", "1")
    assert "with --engine ray, as many tasks run as the cluster has CPUs" in told


class Elsewhere(ThreadPoolExecutor):
    """Gives functions the copies of their arguments that another process would get."""

    def submit(self, fn, /, *args, **options):
        fn, args, options = pickle.loads(pickle.dumps((fn, args, options)))
        return super().submit(fn, *args, **options)


def test_shards_are_read_by_any_executor(data):
    one = index_shards("data/*.tar", "data/one.json", offsets=True)
    offsets = {path.name: path.read_bytes() for path in Path("data").glob("*.idx")}
    for path in Path("data").glob("*.idx"):
        path.unlink()
    with Elsewhere(2) as executor:
        again = index_shards("data/*.tar", "data/two.json", offsets=True, executor=executor)
        report = verify("data", decode=True, jobs=2, executor=executor)
    assert again == one
    assert {path.name: path.read_bytes() for path in Path("data").glob("*.idx")} == offsets
    assert (report.shards, report.samples, report.findings) == (3, 12, [])
