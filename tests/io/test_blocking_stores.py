"""Stores that give a range only when it is complete: whatever fsspec knows, through its blocking
calls. Calls that never return, and locks that are never released: an error in time, a process that
ends, and threads that are replaced.
"""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from functools import partial
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.tar import TarFileSystem
from remote import bare, content, samples
from scripts import run_code
from waiting import in_time, wait_for

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.threads import DaemonThreads, HangingCallsError
from wds_pipes.tar import index_shards


class SlowFileSystem(MemoryFileSystem):
    """The files of ``memory://``, at ``rate`` bytes a second for each request, after ``latency``
    seconds.
    """

    protocol = "slow"
    rate: ClassVar[float] = float("inf")
    latency: ClassVar[float] = 0.0
    reads: ClassVar[list[tuple[int, int]]] = []
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("slow://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        data = super().cat_file(path, start, end, **options)
        time.sleep(self.latency + len(data) / self.rate)
        self.reads.append((start, len(data)))
        return data


@pytest.fixture
def slow(local, monkeypatch):
    """The file system, with a shard at ``slow://x/0.tar``."""
    kind = type("Slow", (SlowFileSystem,), {"reads": []})
    fsspec.register_implementation("slow", kind, clobber=True)
    fsspec.filesystem("memory").pipe("/x/0.tar", content(local[0]))
    return kind


def finishes(pipe):
    """What a pipe gives, and the error that ends it; a test that would hang fails."""
    found = []

    def read():
        try:
            found.extend(map(bare, pipe))
        except ShardError as error:
            found.append(error)

    in_time(read)
    return found


def test_a_slow_link_is_read_in_pieces_that_come_in_time(slow, local):
    """A range of 1 MiB takes far longer than the time after which a request is given up (a
    quarter of the timeout): it is asked for in pieces.
    """
    slow.rate = 500_000
    assert finishes(samples("slow://x/0.tar", timeout_seconds=4, connections=4)) == list(map(bare, samples(local[0])))
    assert max(count for _, count in slow.reads) < 1 << 19


def test_a_link_that_becomes_slow(slow, local):
    """Pieces that were right before are too long now: they are asked for again in smaller ones."""
    pipe = samples(["slow://x/0.tar"] * 3, timeout_seconds=4, connections=2, readahead_bytes=1 << 20)
    items = iter(pipe)
    found = [bare(next(items)) for _ in range(60)]
    slow.rate = 400_000
    found += finishes(items)
    assert found == list(map(bare, samples(local[0]))) * 3


def test_a_fast_link_is_read_in_long_ranges(slow, local):
    """After the first pieces, whole ranges: each request may cost a long way there and back."""
    fsspec.filesystem("memory").pipe("/x/1.tar", content(local[0]) * 8)
    slow.latency = 0.01
    opened = wp.ShardList(["slow://x/0.tar", "slow://x/1.tar"]).open_shards(connections=2)
    pipe = opened.load_tar(concatenated=True).group_by_key()
    wanted = list(map(bare, samples(local[0])))
    assert list(map(bare, itertools.islice(pipe, 80))) == wanted * 2
    assert max(count for _, count in slow.reads) >= 4 << 20


def longer(read, path, start, end):
    return MemoryFileSystem().cat_file(path)


def shorter(read, path, start, end):
    return read(path, start, min(end, start + 200_000))


def silent(read, path, start, end):
    raise SilentError


def foreign(read, path, start, end):
    raise SystemExit


def cancelled(read, path, start, end):
    raise asyncio.CancelledError


def circular(read, path, start, end):
    first, second = OSError("0"), OSError("1")
    first.__cause__, second.__cause__ = second, first
    raise first


class SilentError(OSError):
    """One that can neither be told nor judged."""

    def __str__(self):
        raise self

    @property
    def status(self):
        raise self


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (longer, "instead of 262144"),
        (shorter, None),
        (silent, "SilentError: it says nothing"),
        (foreign, "SystemExit"),
        (cancelled, "cannot be read"),
        (circular, "OSError: 0"),
    ],
)
def test_whatever_a_file_system_returns_or_raises(slow, local, odd, words):
    """Fewer bytes than the range are continued from there; anything else is an error. The reader
    does not wait for ever, and others are read on: the thread that serves all shards lives.
    """
    read = slow.cat_file
    slow.cat_file = lambda self, path, start=None, end=None, **options: odd(partial(read, self), path, start, end)
    found = finishes(samples("slow://x/0.tar", retries=1, timeout_seconds=4))
    slow.cat_file = read
    wanted = list(map(bare, samples(local[0])))
    if words is None:
        assert found == wanted
    else:
        assert "shard slow://x/0.tar cannot be read" in str(found[0])
        assert words in str(found[0])
    assert finishes(samples("slow://x/0.tar")) == wanted


@pytest.mark.parametrize("kind", [SilentError, StopIteration])
def test_whatever_a_file_system_raises_when_it_is_asked_for_a_file(slow, local, kind):
    """The same."""

    def fails(self, path, **options):
        raise kind

    info, slow.info = slow.info, fails
    (error,) = finishes(samples("slow://x/0.tar", retries=0, timeout_seconds=4))
    slow.info = info
    assert "shard slow://x/0.tar cannot be read" in str(error)
    assert finishes(samples("slow://x/0.tar")) == list(map(bare, samples(local[0])))


@pytest.mark.parametrize("problem", [OSError("gone"), None])
def test_a_store_that_says_nothing_of_a_file(slow, local, problem):
    """In the end, or not even how long it is: the bytes have come, and are those of the shard."""
    asked, info = [], slow.info

    def once(self, path, **options):
        asked.append(path)
        if len(asked) > 2 and problem:
            raise problem
        return info(self, path, **options) if problem else {"name": path, "size": None}

    slow.info = once
    assert finishes(samples("slow://x/0.tar", connections=1)) == list(map(bare, samples(local[0])))


@pytest.mark.parametrize("last", [False, True])
def test_a_file_that_is_written_while_it_is_read(slow, local, last):
    """One of the same size, in the place of the first: its bytes do not follow those of the first
    one, neither in a later request nor in the last one.
    """
    shard = content(local[0])
    read, info = slow.cat_file, slow.info

    def cat_file(self, path, start=None, end=None, **options):
        data = read(self, path, start, end, **options)
        if end >= (len(shard) if last else 0):
            changed.append(start)
        return data

    changed = []
    slow.cat_file = cat_file
    slow.info = lambda self, path, **options: {**info(self, path, **options), "mtime": f"{bool(changed)}"}
    *_, error = finishes(samples("slow://x/0.tar", connections=1))
    assert changed
    assert isinstance(error, ShardError)
    assert "was changed while it was read" in str(error)


@pytest.fixture
def outer(tmp_path, local):
    """A tar of shards."""
    path = tmp_path / "outer.tar"
    with tarfile.open(path, "w") as tar:
        for number, shard in enumerate(local):
            tar.add(shard, f"{number}.tar")
    return path


def test_shards_in_one_tar(outer, local, monkeypatch):
    """fsspec reads all of them through one open file, so one call is made at a time."""
    read, running, most = TarFileSystem.cat_file, [], [0]

    def cat_file(self, path, start=None, end=None, **options):
        running.append(path)
        most[0] = max(most[0], len(running))
        time.sleep(0.002)  # others may run meanwhile
        try:
            return read(self, path, start, end, **options)
        finally:
            running.remove(path)

    monkeypatch.setattr(TarFileSystem, "cat_file", cat_file)
    urls = [f"tar://{number}.tar::file://{outer}" for number in range(len(local))]
    assert finishes(samples(urls, connections=8)) == list(map(bare, samples(local)))
    assert most == [1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_while_a_call_runs(outer, local, monkeypatch):
    """The child does not wait for it."""
    read, runs, goes_on = TarFileSystem.cat_file, threading.Event(), threading.Event()

    def cat_file(self, path, start=None, end=None, **options):
        runs.set()
        assert goes_on.wait(60)
        return read(self, path, start, end, **options)

    monkeypatch.setattr(TarFileSystem, "cat_file", cat_file)
    pipe, wanted, found = samples(f"tar://0.tar::file://{outer}"), list(map(bare, samples(local[0]))), []
    reader = threading.Thread(target=lambda: found.extend(finishes(pipe)), daemon=True)
    reader.start()
    assert runs.wait(60)
    if not (child := os.fork()):
        try:
            signal.alarm(60)
            goes_on.set()
            found = finishes(pipe)
        finally:
            os._exit(found != wanted)
    assert os.waitpid(child, 0)[1] == 0
    goes_on.set()
    reader.join(60)
    assert found == wanted


# Calls that hang


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


def test_calls_that_hang_use_no_threads_up(slow, local):
    """More of them than connections; the shard is read by those that come after them."""
    read, hanging, free = slow.cat_file, [1, 2, 3], threading.Event()

    def cat_file(self, path, start=None, end=None, **options):
        if hanging:
            hanging.pop()
            free.wait()
        return read(self, path, start, end, **options)

    slow.cat_file = cat_file
    found = list(map(bare, samples("slow://x/0.tar", connections=2, timeout_seconds=4)))
    free.set()
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
    """Requests for metadata have a second, not two minutes."""
    monkeypatch.setattr("wds_pipes.io.remote.metadata.READING", Reading(timeout_seconds=1))


@pytest.mark.parametrize("name", ["*.tar", "0.tar"], ids=["pattern", "index"])
@pytest.mark.usefixtures("hasty")
def test_metadata_of_a_server_that_never_responds(name, remote):
    url = remote.put("hangs/0.tar", b"0").replace("0.tar", name)
    remote.faults.rules({"latency": 3600})
    with pytest.raises(wp.ShardError, match="cannot be (read|listed)"):
        wp.ShardList(url, index=True, storage_options=remote.storage_options)


@pytest.mark.usefixtures("hasty")
def test_metadata_of_a_blocking_store_that_never_responds(slow):
    slow.glob = lambda self, path, **options: threading.Event().wait()
    with pytest.raises(wp.ShardError, match="no response in 1 s"):
        wp.ShardList("slow://d/*.tar")


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
