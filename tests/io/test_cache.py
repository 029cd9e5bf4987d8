"""The cache of remote shards: real files, real processes, real kills."""

import contextlib
import errno
import gc
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_group import CONTEXT
from remote_store import Known, Store
from waiting import wait_for

from wds_pipes import CacheError, ShardError
from wds_pipes.io.cache import files as files_module
from wds_pipes.io.cache import stream as stream_module
from wds_pipes.io.cache.files import CacheDirectory
from wds_pipes.io.cache.shard_cache import ShardCache
from wds_pipes.io.locks import open_locked

MB = 1_000_000


def noise(size, seed=0):
    """Bytes that begin like a compressed shard."""
    return (b"\x1f\x8b\x08" + random.Random(seed).randbytes(size))[:size]


def digest(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", max_bytes="1GB")


def read(cache, store, name, **options):
    with cache.open(f"s3://bucket/{name}", store.fetch(name), **options) as stream:
        return stream.read()


def open_files(store):
    """The files of the test that this process has open, those that were deleted too. Others may
    come and go meanwhile: connections of earlier tests, say.
    """
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    own = f"{os.path.realpath(os.path.dirname(store.root))}/"
    return sorted(path for path in map(os.path.realpath, links) if path.startswith(own))


def kept(cache):
    """The bytes on the disk."""
    total = 0
    if not os.path.isdir(cache.directory):
        return 0
    for name in os.listdir(cache.directory):
        if name != "usage":
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(f"{cache.directory}/{name}").st_size
    return total


def check(cache, contents, *, partial=False):
    """Complete files are right and have their facts; nothing else is there but what a killed
    download left; all is within the limit.
    """
    names = set(os.listdir(cache.directory))
    for name in names - {"usage"}:
        stem, _, kind = name.rpartition(".")
        assert kind in ("json", "shard", "part")
        if kind == "shard":
            with open(f"{cache.directory}/{stem}.json") as file:
                facts = json.load(file)
            data = contents[facts["url"].rpartition("/")[2]]
            assert Path(cache.directory, name).read_bytes() == data
            assert facts["size"] == len(data)
        elif kind == "part":
            assert partial
    assert "downloading" not in {stored.state for stored in CacheDirectory(cache.directory).entries()}
    assert kept(cache) <= cache.max_bytes


def part_size(cache):
    sizes = (
        [path.stat().st_size for path in Path(cache.directory).glob("*.part")] if os.path.isdir(cache.directory) else []
    )
    return sum(sizes)


class Gate:
    """A fetch whose bytes stop at ``place`` until it is opened; ``error`` comes there instead.

    The first answer has the bytes ``first``.
    """

    def __init__(self, data, place, error=None, first=None):
        self.data, self.place, self.error, self.first = data, place, error, first or data
        self.open, self.closed, self.asked = threading.Event(), 0, []

    def __call__(self, offset):
        self.asked.append(offset)
        return self.Stream(self, offset)

    class Stream(io.RawIOBase):
        def __init__(self, gate, offset):
            super().__init__()
            self.gate, self.offset, self.ended, self.object = gate, offset, False, Known(len(gate.data), "tag")
            self.data = gate.data if len(gate.asked) > 1 else gate.first

        def wait(self):
            pass

        def readable(self):
            return True

        def readinto(self, buffer):
            gate = self.gate
            if self.offset >= gate.place:
                if gate.error:
                    raise gate.error
                while not gate.open.wait(0.005) and not self.ended:
                    pass
            end = self.offset + len(buffer)
            data = self.data[self.offset : end if gate.open.is_set() else min(end, gate.place)]
            self.offset += len(data)
            buffer[: len(data)] = data
            return len(data)

        def close(self):
            self.ended = True
            self.gate.closed += not self.closed
            super().close()


def opened(data):
    gate = Gate(data, 0)
    gate.open.set()
    return gate


# Storing and reading


@pytest.mark.parametrize(
    ("size", "options"),
    [(0, {}), (1, {}), (1000, {"tagged": False}), (0, {"sized": False}), (3 * MB, {"sized": False}), (3 * MB, {})],
)
def test_stored_once(tmp_path, cache, size, options):
    """The second time nothing is asked for, even if the store is gone."""
    store = Store(tmp_path / "store", **options)
    data = noise(size)
    store.put("a.tar", data)
    assert read(cache, store, "a.tar", md5=digest(data)) == data
    check(cache, {"a.tar": data})
    os.remove(f"{store.root}/a.tar")
    assert read(cache, store, "a.tar", size=size, md5=digest(data)) == data
    assert read(cache, store, "a.tar", start=size // 2) == data[size // 2 :]
    assert store.asked("a.tar") == [0]


def test_bytes_come_as_they_arrive(cache):
    """The consumer has the first ones while the rest is still at the store, and so has another
    reader.
    """
    gate = Gate(noise(2 * MB), 700_000)
    with cache.open("s3://b/a.tar", gate) as stream, cache.open("s3://b/a.tar", gate) as other:
        assert stream.read(600_000) == gate.data[:600_000]
        assert other.read(600_000) == gate.data[:600_000]
        assert stream.seek(0, os.SEEK_END) == 2 * MB
        assert stream.seek(5) == 5
        gate.open.set()
        assert stream.read() == gate.data[5:]
        assert other.read() == gate.data[600_000:]
    assert gate.asked == [0]


def test_from_a_position(cache):
    """What is not stored is read straight from the store, from the position on, and not stored."""
    gate = opened(noise(MB))
    with cache.open("s3://b/a.tar", gate, start=600_000) as stream:
        assert stream.tell() == 600_000
        assert not stream.seekable()
        assert stream.read() == gate.data[600_000:]
    assert gate.asked == [600_000]
    assert gate.closed
    assert CacheDirectory(cache.directory).entries() == []


def test_closed_early(cache):
    """The download stops at once, its thread is gone, and the next one goes on from there."""
    gate = Gate(noise(9 * MB), 2 * MB)
    stream = cache.open("s3://b/a.tar", gate)
    assert stream.read(MB) == gate.data[:MB]
    wait_for(lambda: part_size(cache) >= 2 * MB)
    stream.close()
    assert not [thread for thread in threading.enumerate() if "wds_pipes-cache" in thread.name]
    assert gate.closed
    (entry,) = CacheDirectory(cache.directory).entries()
    assert (entry.state, entry.url) == ("partial", "s3://b/a.tar")
    gate.open.set()
    with cache.open("s3://b/a.tar", gate) as stream:
        assert stream.read() == gate.data
    assert gate.asked == [0, 2 * MB]


def test_closed_while_others_read(cache):
    """One of them goes on with the download."""
    gate = Gate(noise(9 * MB), 2 * MB)
    stream, other = cache.open("s3://b/a.tar", gate), cache.open("s3://b/a.tar", gate)
    assert other.read(MB) == gate.data[:MB]
    wait_for(lambda: part_size(cache) >= 2 * MB)
    stream.close()
    gate.open.set()
    with other:
        assert other.read() == gate.data[MB:]
    assert gate.asked == [0, 2 * MB]


def read_into(got, cache, gate):
    with cache.open("s3://b/a.tar", gate) as stream:
        while chunk := stream.read(50_000):
            got += chunk


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", [0, 500_000])
def test_errors_arrive_as_they_are(cache, place, late, monkeypatch):
    """From the first byte on, or in the middle after what had come, also to a reader that looks
    only then; the next one goes on.
    """
    if late:
        start = stream_module.Download.start
        monkeypatch.setattr(stream_module.Download, "start", lambda download: (start(download), download.join()))
    gate = Gate(noise(MB), place, ConnectionResetError("reset by the store"))
    got = bytearray()
    with pytest.raises(ConnectionResetError) as caught:
        read_into(got, cache, gate)
    assert caught.value is gate.error
    assert got == gate.data[:place]
    monkeypatch.undo()
    gate.error = None
    gate.open.set()
    with cache.open("s3://b/a.tar", gate) as stream:
        assert stream.read() == gate.data
    assert gate.asked == [0, place]


def test_a_fetch_that_fails_leaves_nothing(cache, store):
    """No file stays for a shard that does not exist."""
    with pytest.raises(FileNotFoundError):
        read(cache, store, "missing.tar")
    assert os.listdir(cache.directory) == []


# Names


def test_equal_base_names(cache):
    """Shards of different URLs never share a file."""
    for stored in (False, True):
        for url in ("s3://a/x.tar", "s3://b/x.tar", "https://h/x.tar", "https://h/x.tar?id=1", "https://h/x.tar?id=2"):
            data = noise(3) + url.encode()
            with cache.open(url, Gate(b"", 0, KeyError()) if stored else opened(data)) as stream:
                assert stream.read() == data


def test_names_have_no_secrets(cache):
    """Signed again, a URL means the same shard; the store makes a difference where it is given."""
    signed = "https://me:{0}@h/x.tar?X-Amz-Credential=c{0}&X-Amz-Date={1}&X-Amz-Expires=9&X-Amz-Signature={0}&part=1"
    first = opened(noise(1000))
    for day in (1, 2):
        with cache.open(signed.format(f"s3cret{day}", day), first) as stream:
            assert stream.read() == noise(1000)
    assert first.asked == [0]
    assert "s3cret" not in "".join(
        path.read_text(errors="replace") + path.name for path in Path(cache.directory).iterdir()
    )
    with cache.open(signed.format(1, 1), opened(b"two"), store="https://other") as stream:
        assert stream.read() == b"two"


# What is wrong


@pytest.mark.parametrize("sized", [True, False])
def test_cut_short_once(tmp_path, cache, sized):
    """It is downloaded again, and the reader notices nothing."""
    store = Store(tmp_path / "store", cuts=1, sized=sized)
    data = noise(MB)
    store.put("a.tar", data)
    assert read(cache, store, "a.tar", size=MB) == data
    assert store.asked("a.tar") == [0, 0]
    check(cache, {"a.tar": data})


@pytest.mark.parametrize(
    ("faults", "options", "words"),
    [
        ({"cuts": 9}, {}, "both times it had 500000 bytes instead of 1000000"),
        ({"flips": 9}, {"md5": digest(noise(MB))}, "both times its MD5 was"),
        ({}, {"size": MB + 1}, "both times it had 1000000 bytes instead of 1000001"),
        ({"sized": False}, {"size": MB - 1}, "both times it had [0-9]+ bytes instead of 999999"),
    ],
)
def test_wrong_twice(tmp_path, cache, faults, options, words):
    """An error that says what was wrong, and nothing is stored."""
    store = Store(tmp_path / "store", **faults)
    store.put("a.tar", noise(MB))
    with pytest.raises(ShardError, match=words) as caught:
        read(cache, store, "a.tar", **options)
    assert caught.value.url == "s3://bucket/a.tar"
    assert store.asked("a.tar") == [0, 0]
    assert set(os.listdir(cache.directory)) <= {"usage"}


def test_a_flipped_bit(cache):
    """Who has read it gets an error, also if he reads on; who has not reads on from the second
    download; and what is stored is right.
    """
    data = noise(3 * MB)
    gate = Gate(data, 2 * MB, first=data[:1_200_000] + bytes([data[1_200_000] ^ 1]) + data[1_200_001:])
    with (
        cache.open("s3://b/a.tar", gate, md5=digest(data)) as stream,
        cache.open("s3://b/a.tar", gate, md5=digest(data)) as other,
    ):
        assert other.readinto(bytearray(500_000)) == 500_000
        assert stream.read(1_500_000) != data[:1_500_000]
        gate.open.set()
        for _ in range(2):
            with pytest.raises(ShardError, match=r"what was read of it, up to byte \d+, is wrong"):
                stream.read()
        assert other.read() == data[500_000:]
    with cache.open("s3://b/a.tar", gate, md5=digest(data)) as stream:
        assert stream.read() == data
    assert gate.asked == [0, 0]


def test_without_verify(tmp_path):
    """The checksum is not looked at."""
    store = Store(tmp_path / "store")
    store.put("a.tar", b"content")
    assert read(ShardCache(tmp_path / "cache", max_bytes=MB, verify=False), store, "a.tar", md5="0" * 32) == b"content"


@pytest.mark.parametrize(
    "damage", ["short", "long", "facts", "no facts", "other size", "other md5", "lost in a crash", "changed in a crash"]
)
def test_a_stored_shard_that_is_wrong(tmp_path, cache, store, damage):
    """It is downloaded again."""
    data = noise(MB)
    store.put("a.tar", data)
    options = {"md5": digest(data)} if damage == "changed in a crash" else {}
    assert read(cache, store, "a.tar", **options) == data
    (path,) = Path(cache.directory).glob("*.shard")
    facts = path.with_suffix(".json")
    if damage in ("short", "long"):
        os.truncate(path, MB + (1 if damage == "long" else -1))
    elif damage == "facts":
        facts.write_text("{")
    elif damage == "no facts":
        facts.unlink()
    elif damage.startswith("other"):
        data = noise(MB - 7, 1)
        store.put("a.tar", data)
        options = {"size": len(data)} if damage == "other size" else {"md5": digest(data)}
    else:
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "boot": "an earlier one"}))
        assert read(cache, store, "a.tar", **options) == data
        assert store.asked("a.tar") == [0]  # as it was intact
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "boot": "an earlier one"}))
        path.write_bytes(noise(MB, 2) if options else b"")
        os.truncate(path, MB)
    assert read(cache, store, "a.tar", **options) == data
    assert store.asked("a.tar") == [0, 0]
    check(cache, {"a.tar": data})


def test_a_checksum_that_is_known_later(cache, store):
    """What was stored without one is checked when there is one, once."""
    data = noise(MB)
    store.put("a.tar", data)
    read(cache, store, "a.tar")
    for _ in range(2):
        assert read(cache, store, "a.tar", md5=digest(data).upper()) == data
    (facts,) = Path(cache.directory).glob("*.json")
    assert json.loads(facts.read_text())["md5"] == digest(data)
    assert store.asked("a.tar") == [0]


@pytest.mark.parametrize("change", ["content", "nothing", "no tag", "boot"])
def test_continued_only_if_it_is_the_same(tmp_path, cache, store, change):
    """The rest of a stopped download is used only if the store says that the object has not
    changed, and the machine has not started again.
    """
    data = noise(9 * MB)
    url = store.put("a.tar", data)
    slow = Store(tmp_path / "store", rate=20 * MB, tagged=change != "no tag")
    with cache.open(url, slow.fetch("a.tar")) as stream:
        stream.read(MB)
    left = part_size(cache)
    assert MB <= left < 9 * MB
    if change == "content":
        data = noise(9 * MB, 1)
        store.put("a.tar", data)
    if change == "boot":
        (facts,) = Path(cache.directory).glob("*.json")
        facts.write_text(facts.read_text().replace(json.loads(facts.read_text())["boot"], "an earlier one"))
    assert read(cache, store, "a.tar") == data
    assert (
        store.asked("a.tar")
        == {"content": [0, left, 0], "nothing": [0, left], "no tag": [0, 0], "boot": [0, 0]}[change]
    )


# Processes


def download(cache, url, fetcher, argument, answers=None):
    with cache.open(url, fetcher(argument)) as stream:
        data = bytearray()
        while chunk := stream.read(100_000):
            data += chunk
    if answers is not None:
        answers.put(digest(data))


@pytest.mark.slow
def test_killed_three_times(tmp_path, cache):
    """Each time the directory is right, another process goes on, and in the end hardly a byte
    has come twice. Readers that wait see nothing of it.
    """
    data = noise(6 * MB)
    store = Store(tmp_path / "store", rate=4 * MB)
    url = store.put("a.tar", data)
    answers = CONTEXT.Queue()

    def start(*more):
        process = CONTEXT.Process(target=download, args=(cache, url, store.fetch, "a.tar", *more))
        process.start()
        return process

    for number in range(3):
        victim = start()
        wait_for(lambda least=number + 1: part_size(cache) > least * MB)
        if number == 2:
            waiting = [start(answers), start(answers)]
            time.sleep(0.1)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        if number < 2:
            check(cache, {}, partial=True)
    assert read(cache, store, "a.tar") == data
    assert {answers.get(timeout=120) for _ in waiting} == {digest(data)}
    for process in waiting:
        process.join()
    answers.close()
    check(cache, {"a.tar": data})
    asked = store.asked("a.tar")
    assert 3 <= len(asked) <= 4  # on a busy machine the last kill may come too late
    assert all(later >= number * MB for number, later in enumerate(asked))


def read_all(cache, store, names, seed, answers):
    random.Random(seed).shuffle(names)
    answers.put([name for name in names * 2 if read(cache, store, name) != Path(store.root, name).read_bytes()])


def test_a_limit_smaller_than_the_data(tmp_path):
    """At any time there is no byte beyond the limit and the open shards, while processes read."""
    contents = {f"{number:02d}.tar": noise(400_000 + number * 1000, number) for number in range(12)}
    store, cache, answers = Store(tmp_path / "store"), ShardCache(tmp_path / "cache", max_bytes=2 * MB), CONTEXT.Queue()
    for name, data in contents.items():
        store.put(name, data)
    arguments = [(cache, store, list(contents), seed, answers) for seed in range(3)]
    processes = [CONTEXT.Process(target=read_all, args=each) for each in arguments]
    for process in processes:
        process.start()
    most = 0
    while answers.qsize() < 3 and any(process.is_alive() for process in processes):
        most = max(most, kept(cache))
    assert [answers.get(timeout=60) for _ in processes] == [[]] * 3
    for process in processes:
        process.join()
    assert MB < most <= cache.max_bytes + len(processes) * 420_000
    check(cache, contents)


def test_what_is_open_stays(tmp_path):
    """Also beyond the limit; when it is closed, it goes.

    Of what is not open, that which was used least recently goes first.
    """
    store = Store(tmp_path / "store")
    names = [f"{number}.tar" for number in range(6)]
    for number, name in enumerate(names):
        store.put(name, noise(MB, number))
    cache = ShardCache(tmp_path / "cache", max_bytes=3 * MB + 100_000)
    streams = {name: cache.open(f"s3://bucket/{name}", store.fetch(name)) for name in names}
    for number, name in enumerate(names):
        assert streams[name].read() == noise(MB, number)
    assert kept(cache) > 6 * MB
    for name in (*names[1:], names[0]):
        streams[name].close()
        time.sleep(0.01)
    assert len(CacheDirectory(cache.directory).entries()) == 3
    check(cache, {name: noise(MB, number) for number, name in enumerate(names)})

    first = CacheDirectory(cache.directory).entries()[0].url.rpartition("/")[2]
    read(cache, store, first)  # now it is the one used last
    missing = next(
        name
        for name in names
        if name not in {entry.url.rpartition("/")[2] for entry in CacheDirectory(cache.directory).entries()}
    )
    read(cache, store, missing)
    assert first in {entry.url.rpartition("/")[2] for entry in CacheDirectory(cache.directory).entries()}


def test_a_download_that_ends_while_the_files_are_counted(tmp_path, monkeypatch):
    """It counts in full: the next shard does not exceed the limit."""
    cache = ShardCache(tmp_path / "cache", max_bytes=300_000)
    first, second = noise(250_000), noise(150_000)
    gate = Gate(first, 100_000)
    stream = cache.open("s3://bucket/0.tar", gate)
    wait_for(lambda: part_size(cache) == 100_000)
    listed = os.scandir

    def entries():
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", listed)
            return CacheDirectory(cache.directory).entries()

    @contextlib.contextmanager
    def until_it_ends(path):
        with listed(path) as items:
            yield items
        gate.open.set()
        wait_for(lambda: [entry.state for entry in entries()] == ["complete"])

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", until_it_ends)
        CacheDirectory(cache.directory).reserve(0, 1)
    with stream:
        assert stream.read() == first
    with cache.open("s3://bucket/1.tar", opened(second)) as stream:
        assert stream.read() == second
    check(cache, {"0.tar": first, "1.tar": second})


FORKS = """
    import os, sys, time
    from remote_store import Store
    from wds_pipes.io.cache.shard_cache import ShardCache

    def say(what):
        os.write(1, f"{what}\\n".encode())  # a line at once: two processes write to one pipe

    cache, store = ShardCache(sys.argv[1], max_bytes=10**9), Store(sys.argv[2], rate=float(sys.argv[3]))
    stream = cache.open("s3://bucket/a.tar", store.fetch("a.tar"))
    stream.read(100_000)
    child = os.fork()
    if child == 0:
        try:
            while stream.read(1 << 20):
                pass
        except ValueError as error:
            say(error)
        stream.close()
        say(len([fd for fd in os.listdir("/proc/self/fd") if "cache" in os.path.realpath(f"/proc/self/fd/{fd}")]))
    say(child or os.getpid())
    time.sleep(60)
"""


def test_a_forked_child_holds_nothing(tmp_path, cache):
    """Neither does it keep a lock when its parent has died, nor does it unlock what the parent
    has open.
    """
    store = Store(tmp_path / "store", rate=4 * MB)
    data = noise(8 * MB)
    store.put("a.tar", data)
    command = [sys.executable, "-c", textwrap.dedent(FORKS), cache.directory, store.root, str(store.rate)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    child = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            lines = [parent.stdout.readline().strip() for _ in range(4)]
            assert "a shard of a cache was opened before a fork: open it in the process that reads it" in lines
            assert "0" in lines
            child = max(int(line) for line in lines if line.isdigit())
            assert CacheDirectory(cache.directory).prune(0) == (0, 0)
            parent.kill()
            parent.wait()
            assert read(cache, Store(store.root), "a.tar") == data
            assert store.asked("a.tar")[1] > 100_000
        finally:
            parent.kill()
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_stopped_process_does_not_stop_others(tmp_path, cache, monkeypatch):
    """After a while they read straight from the store."""
    monkeypatch.setattr(stream_module, "STALL_SECONDS", 0.3)
    store = Store(tmp_path / "store", rate=4 * MB)
    data = noise(8 * MB)
    url = store.put("a.tar", data)
    process = CONTEXT.Process(target=download, args=(cache, url, store.fetch, "a.tar"))
    process.start()
    wait_for(lambda: part_size(cache) > MB)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert read(cache, Store(store.root), "a.tar") == data
        assert store.asked("a.tar")[1] > MB
    finally:
        process.kill()
        process.join()


# A full disk


def refuse_to_write(monkeypatch, number=errno.ENOSPC, place=0):
    """Let writes from a place on fail."""
    pwrite = os.pwrite

    def write(file, chunk, offset):
        if offset >= place:
            raise OSError(number, "no")
        return pwrite(file, chunk, offset)

    monkeypatch.setattr(os, "pwrite", write)


def test_a_full_disk(cache, store, monkeypatch):
    """Shards are read without storing them, with one warning; what was stored is used."""
    for number, name in enumerate("abc"):
        store.put(name, noise(MB, number))
    read(cache, store, "a")
    refuse_to_write(monkeypatch, place=200_000)
    with pytest.warns(RuntimeWarning, match="read without storing them. Free some space, or lower its limit") as warned:
        assert [read(cache, store, name) for name in "bca"] == [noise(MB, number) for number in (1, 2, 0)]
    assert len(warned) == 1
    assert [len(store.asked(name)) for name in "abc"] == [1, 2, 1]
    assert sorted(path.suffix for path in Path(cache.directory).iterdir()) == ["", ".json", ".shard"]


@pytest.mark.parametrize("place", [0, 500_000])
def test_a_checksum_is_compared_on_a_full_disk_too(cache, monkeypatch, place):
    """What is read straight from the store, from its beginning or after what was stored, must be
    what the index says.
    """
    data = noise(3 * MB)
    wrong = data[: 2 * MB] + b"wrong" + data[2 * MB + 5 :]
    refuse_to_write(monkeypatch, place=place)
    monkeypatch.setattr(stream_module, "_full", {cache.directory: 0.0})
    for url, bytes_there in (("s3://b/a.tar", data), ("s3://b/b.tar", wrong)):
        stream_module._full[cache.directory] = 0.0
        gate = Gate(bytes_there, place) if place else opened(bytes_there)
        with cache.open(url, gate, md5=digest(data)) as stream:
            assert stream.read(place // 2) == data[: place // 2]
            gate.open.set()
            if bytes_there is data:
                assert stream.read() == data[place // 2 :]
            else:
                with pytest.raises(OSError, match="its MD5 is .*, and the index says"):
                    stream.read()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_stored_shard_is_read_where_nothing_can_be_written(tmp_path, cache, store, monkeypatch, number):
    """Its MD5 is compared each time then, and no lock stays."""
    data = noise(200_000)
    store.put("a.tar", data)
    read(cache, store, "a.tar")
    before = open_files(store)
    with monkeypatch.context() as patch:
        refuse_to_write(patch, number)
        for _ in range(2):
            assert read(cache, store, "a.tar", md5=digest(data)) == data
    assert store.asked("a.tar") == [0]
    assert open_files(store) == before


def test_what_cannot_be_opened_for_once_stays_unlocked(cache, store, monkeypatch):
    """As where a process has no descriptor left: the next to come downloads the shard."""
    data, looked = noise(200_000), []
    store.put("a.tar", data)
    before = open_files(store)

    def open_sometimes(path, *args, **options):
        if path.endswith(".shard"):
            looked.append(path)
            if len(looked) > 2:  # when it has the lock
                raise OSError(errno.EMFILE, "too many open files")
        return open_locked(path, *args, **options)

    for _ in range(2):
        looked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(files_module, "open_locked", open_sometimes)
            with pytest.raises(CacheError, match="too many open files"):
                read(cache, store, "a.tar")
    assert open_files(store) == before
    assert read(cache, store, "a.tar") == data


# Options, and what stays


def test_nothing_stays_open(cache, store):
    """Threads and descriptors are as before, also where a stream is dropped instead of closed."""
    for number in range(3):
        store.put(f"{number}.tar", noise(300_000, number))
    read(cache, store, "0.tar")
    gc.collect()
    before, descriptors = open_files(store), len(os.listdir("/proc/self/fd"))
    for number in range(30):
        name = f"{number % 3}.tar"
        stream = cache.open(f"s3://bucket/{name}", store.fetch(name), start=number % 2 * 1000)
        stream.read(1000)
        if number % 5:
            stream.close()
        del stream
    gc.collect()
    assert open_files(store) == before
    assert len(os.listdir("/proc/self/fd")) < descriptors + 10  # of any kind
    assert not [thread for thread in threading.enumerate() if "wds_pipes-cache" in thread.name]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"directory": None, "max_bytes": 5}, ValueError, "set WDS_PIPES_CACHE_DIR"),
        ({}, ValueError, "set WDS_PIPES_CACHE_SIZE"),
        *(({"max_bytes": size}, ValueError, "size") for size in ("much", "5 apples", "-5", 0, "5iB", "0")),
        *(({"max_bytes": size}, TypeError, "a size is an int or a string") for size in (5.0, True)),
        ({"max_bytes": 5, "verify": "yes"}, TypeError, "verify must be True or False"),
        ({"directory": 5, "max_bytes": 5}, TypeError, "PathLike"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(monkeypatch, options, error, words):
    monkeypatch.delenv("WDS_PIPES_CACHE_DIR", raising=False)
    monkeypatch.delenv("WDS_PIPES_CACHE_SIZE", raising=False)
    with pytest.raises(error, match=words):
        ShardCache(**{"directory": "x", **options})


@pytest.mark.parametrize(
    ("size", "count"),
    [("200GB", 200 * 10**9), ("50GiB", 50 << 30), ("1.5 tb", 1500 * 10**9), ("77", 77), ("5B", 5), ("2k", 2000)],
)
def test_options_of_the_environment(tmp_path, monkeypatch, size, count):
    """A cache can be pickled; its directory is made when it stores something."""
    monkeypatch.setenv("WDS_PIPES_CACHE_DIR", str(tmp_path / "there"))
    monkeypatch.setenv("WDS_PIPES_CACHE_SIZE", size)
    cache = pickle.loads(pickle.dumps(ShardCache()))
    assert (cache.directory, cache.max_bytes, cache.verify) == (str(tmp_path / "there"), count, True)
    assert not (tmp_path / "there").exists()


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["open", "read", "rest", "seek", "close", "lose", "prune"]),
        st.integers(0, 5),
        st.integers(0, 200_000),
    ),
    max_size=25,
)


@pytest.mark.filterwarnings("ignore:shard .* does not fit into the cache:RuntimeWarning")
@settings(max_examples=30, deadline=None)
@given(steps=STEPS, limit=st.integers(1, 500_000))
def test_any_order(tmp_path_factory, steps, limit):
    """Three streams over six shards with a small limit: the bytes are right, and there is never
    more than the limit and what is open.
    """
    root = tmp_path_factory.mktemp("any")
    store, cache = Store(root / "store"), ShardCache(root / "cache", max_bytes=limit)
    contents = [noise(20_000 + 40_000 * number, number) for number in range(6)]
    for number, data in enumerate(contents):
        store.put(f"{number}.tar", data)
    os.makedirs(cache.directory)
    streams = {}
    try:
        for slot, step, shard, count in steps:
            if step == "open" and slot not in streams:
                streams[slot] = shard, cache.open(f"s3://bucket/{shard}.tar", store.fetch(f"{shard}.tar"))
            elif step == "lose":
                CacheDirectory(cache.directory).prune(count)
            elif slot in streams:
                shard, stream = streams[slot]
                place = stream.tell()
                if step in ("read", "rest"):
                    count = count if step == "read" else None
                    assert stream.read(count) == contents[shard][place:][:count]
                elif step == "seek":
                    assert stream.seek(count) == count
                elif step == "close":
                    streams.pop(slot)[1].close()
            assert kept(cache) <= limit + sum(
                len(contents[shard]) + 400 for shard in {shard for shard, _ in streams.values()}
            )
    finally:
        for _, stream in streams.values():
            stream.close()
    # one that was closed early may have left a part
    check(cache, {f"{number}.tar": data for number, data in enumerate(contents)}, partial=True)
    shutil.rmtree(root)


@pytest.mark.parametrize("again", [True, False])
def test_a_file_that_another_machine_replaces_is_an_error(cache, again):
    """Through a file system that keeps locks within one machine: nothing of it gets the name of a
    complete shard, and nobody waits.
    """
    gate = Gate(noise(3 * MB), 2 * MB)
    with cache.open("s3://bucket/a.tar", gate) as stream:
        assert stream.read(MB) == gate.data[:MB]
        [part] = Path(cache.directory).glob("*.part")
        part.unlink()
        if again:
            part.write_bytes(b"of another machine")
        gate.open.set()
        with pytest.raises(CacheError, match="within one machine only"):
            stream.read()
    assert not list(Path(cache.directory).glob("*.shard"))
