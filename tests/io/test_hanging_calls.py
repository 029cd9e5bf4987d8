"""File systems whose blocking calls never return, and locks that are never released: an error in
time, a process that ends, and threads that are replaced.
"""

import subprocess
import sys
import threading

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from remote import bare, samples
from scripts import run_code
from waiting import wait_for

import wds_pipes as wp
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.threads import DaemonThreads, HangingCallsError
from wds_pipes.tar import index_shards

SCRIPT = """
import subprocess
import sys
import threading
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from wds_pipes import ShardError
from wds_pipes.core.stream import Stream
from wds_pipes.stages import LoadTar, OpenShards, ShardList

class Hanging(MemoryFileSystem):
    protocol = "hanging"
    def info(self, path, **options):
        threading.Event().wait()

fsspec.register_implementation("hanging", Hanging)
try:
    list(Stream(LoadTar(OpenShards(ShardList("hanging://x.tar"), timeout_seconds=1))))
except ShardError as error:
    print(error)
"""


def test_a_process_ends_though_a_call_hangs():
    assert "no response in 1 s" in run_code(SCRIPT)


class SometimesHanging(LocalFileSystem):
    """Its first calls hang."""

    protocol = "hangs"
    cachable = False
    hangs = 0
    lock, free = threading.Lock(), threading.Event()

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.removeprefix("hangs://"))

    def cat_file(self, path, start=None, end=None, **options):
        with self.lock:
            type(self).hangs -= 1
            hang = self.hangs >= 0
        if hang:
            self.free.wait()
        return super().cat_file(path, start, end, **options)


def test_calls_that_hang_use_no_threads_up(local):
    """More of them than connections; the shard is read by those that come after them."""
    fsspec.register_implementation("hangs", SometimesHanging, clobber=True)
    SometimesHanging.hangs = 3
    found = list(map(bare, samples(f"hangs://{local[0]}", connections=2, timeout_seconds=8)))
    SometimesHanging.free.set()
    assert found == list(map(bare, samples(local[0])))


def test_too_many_calls_hang():
    """No more are made, in words, until they have returned."""
    threads, free = DaemonThreads(2), threading.Event()
    calls = [threads.submit(free.wait) for _ in range(64)]
    for call in calls:
        wait_for(call.running)
        call.cancel()
    with pytest.raises(HangingCallsError, match="64 calls to this store hang"):
        threads.submit(int)
    free.set()
    wait_for(lambda: not threads._lost)
    assert threads.submit(int, "7").result(60) == 7


@pytest.fixture
def hasty(monkeypatch):
    """Requests for metadata have two seconds, not two minutes."""
    monkeypatch.setattr("wds_pipes.io.remote.metadata.READING", Reading(timeout_seconds=2))


@pytest.mark.parametrize("name", ["*.tar", "0.tar"], ids=["pattern", "index"])
@pytest.mark.usefixtures("hasty")
def test_metadata_of_a_server_that_never_responds(name, remote):
    url = remote.put("hangs/0.tar", b"0").replace("0.tar", name)
    remote.faults.rules({"latency": 3600})
    with pytest.raises(wp.ShardError, match="cannot be (read|listed)"):
        wp.ShardList(url, index=True, storage_options=remote.storage_options)


class NeverListing(MemoryFileSystem):
    """A store without an event loop."""

    protocol = "never"
    cachable = False

    def glob(self, path, **options):
        threading.Event().wait()


@pytest.mark.usefixtures("hasty")
def test_metadata_of_a_blocking_store_that_never_responds():
    fsspec.register_implementation("never", NeverListing, clobber=True)
    with pytest.raises(wp.ShardError, match="no response in 2 s"):
        wp.ShardList("never://d/*.tar")


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(3600)
"""


def test_a_lock_that_is_never_released(local, tmp_path, monkeypatch, caplog):
    """By a process that was stopped, for example: it is named."""
    monkeypatch.setattr("wds_pipes.io.locks._LIMIT_SECONDS", 0.5)
    monkeypatch.setattr("wds_pipes.io.locks._SILENT_SECONDS", 0)
    command = [sys.executable, "-c", HOLDER, tmp_path / ".index.json.partial"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(TimeoutError, match=f"process {holder.pid} has it locked.*index.json"):
            index_shards(local[0], tmp_path / "index.json")
        holder.kill()
    assert f"process {holder.pid} has " in caplog.text
    index_shards(local[0], tmp_path / "index.json")
