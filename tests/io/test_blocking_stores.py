"""Stores that give a range only when it is complete: whatever fsspec knows, through its blocking
calls.
"""

import asyncio
import itertools
import multiprocessing
import tarfile
import threading
import time
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.tar import TarFileSystem
from remote import bare, content, samples

import wds_pipes as wp
from wds_pipes import ShardError


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
    """What a pipe gives; a test that would hang fails."""
    found = []

    def read():
        try:
            found.extend(map(bare, pipe))
        except ShardError as error:
            found.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found


@pytest.mark.parametrize("connections", [1, 4])
def test_a_slow_link_is_read_in_pieces_that_come_in_time(slow, local, connections):
    """A range of 1 MiB takes far longer than the time after which a request is given up (a
    quarter of the timeout): it is asked for in pieces.
    """
    slow.rate = 500_000
    assert finishes(samples("slow://x/0.tar", timeout_seconds=4, connections=connections)) == list(
        map(bare, samples(local[0]))
    )
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


def test_an_answer_that_is_longer_than_the_range(slow):
    """As of a store that ignores ranges: its bytes are not those that were asked for."""

    def cat_file(self, path, start=None, end=None, **options):
        return MemoryFileSystem.cat_file(self, path)

    slow.cat_file = cat_file
    (error,) = finishes(samples("slow://x/0.tar", retries=1))
    assert "2" in str(error)
    assert "instead of 262144" in str(error)


def test_an_answer_that_is_shorter_than_the_range(slow, local):
    """It is asked for on from there."""

    def cat_file(self, path, start=None, end=None, **options):
        return MemoryFileSystem.cat_file(self, path, start, min(end, start + 200_000))

    slow.cat_file = cat_file
    assert finishes(samples("slow://x/0.tar")) == list(map(bare, samples(local[0])))


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


def test_a_fork_while_a_call_runs(outer, local, monkeypatch):
    """The child does not wait for it."""
    read, runs, goes_on = TarFileSystem.cat_file, threading.Event(), threading.Event()

    def cat_file(self, path, start=None, end=None, **options):
        runs.set()
        assert goes_on.wait(60)
        return read(self, path, start, end, **options)

    monkeypatch.setattr(TarFileSystem, "cat_file", cat_file)
    pipe = samples(f"tar://0.tar::file://{outer}")
    found = []
    reader = threading.Thread(target=lambda: found.extend(finishes(pipe)), daemon=True)
    reader.start()
    assert runs.wait(60)
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def child():
        goes_on.set()
        results.put(finishes(pipe))

    process = context.Process(target=child)
    process.start()
    assert results.get(timeout=60) == list(map(bare, samples(local[0])))
    process.join()
    goes_on.set()
    reader.join(60)
    assert found == list(map(bare, samples(local[0])))


@pytest.mark.parametrize("problem", [OSError("gone"), None])
def test_a_store_that_says_nothing_in_the_end(slow, local, problem):
    """The bytes have come, and are those of the shard."""
    asked, info = [], slow.info

    def once(self, path, **options):
        asked.append(path)
        if len(asked) > 2 and problem:
            raise problem
        return info(self, path, **options) if len(asked) <= 2 else {"name": path, "size": None}

    slow.info = once
    assert finishes(samples("slow://x/0.tar", connections=1)) == list(map(bare, samples(local[0])))


class SilentError(OSError):
    """One that cannot be told."""

    def __str__(self):
        raise self


class StrangeError(OSError):
    """One that cannot be judged."""

    @property
    def status(self):
        raise SilentError


class ForeignError(BaseException):
    """One that is no Exception."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("info", SilentError),
        ("cat_file", StrangeError),
        ("cat_file", ForeignError),
        ("cat_file", SystemExit),
        ("info", StopIteration),
        ("cat_file", asyncio.CancelledError),
    ],
)
def test_whatever_a_file_system_raises_is_an_error(slow, local, kind, name):
    """The reader does not wait for ever, and others are read on: the thread that serves all
    shards lives.
    """

    def fails(self, *args, **options):
        raise kind

    kept = getattr(slow, name)
    setattr(slow, name, fails)
    (error,) = finishes(samples("slow://x/0.tar", retries=0, timeout_seconds=4))
    assert "shard slow://x/0.tar cannot be read" in str(error)
    setattr(slow, name, kept)
    assert finishes(samples("slow://x/0.tar")) == list(map(bare, samples(local[0])))


def test_an_error_that_leads_back_to_itself(slow):
    """As some versions of some libraries raise them: who follows the causes must end."""

    def fail(self, path, *arguments, **options):
        first, second = OSError("0"), OSError("1")
        first.__cause__, second.__cause__ = second, first
        raise first

    slow.cat_file = slow.info = slow._open = fail
    (error,) = finishes(samples("slow://x/0.tar", retries=1))
    assert isinstance(error, ShardError)
    assert "cannot be read (OSError: 0" in str(error)
