"""What a cache must not keep, must not touch, and must not wait for."""

import contextlib
import errno
import gzip
import os
import signal
import stat
import threading
from pathlib import Path

import pytest
from remote import content
from remote_store import Store
from serving import Quiet, serving
from test_cache import Gate, digest, noise
from waiting import in_time

import wds_pipes as wp
from wds_pipes.io.cache import files, shard_cache, stream
from wds_pipes.io.cache.files import CacheDirectory
from wds_pipes.testing import make_shards

PAGE = b"<!DOCTYPE html><html><body>Log in</body></html>" * 100


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """The bytes of a shard of 10 samples."""
    [path] = make_shards(
        tmp_path_factory.mktemp("shard"), shards=1, samples=10, fields={"bin": lambda rng, _: rng.randbytes(5000)}
    )
    return content(path)


@pytest.fixture
def cache(tmp_path):
    return wp.ShardCache(tmp_path / "cache", max_bytes="1GB")


@contextlib.contextmanager
def server(answers):
    """A web server that gives these bodies, one after another, the last one again and again; and
    the number of requests as a list.
    """
    asked = []

    class Handler(Quiet):
        def do_GET(self):
            body = answers[min(len(asked), len(answers) - 1)]
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    with serving(Handler) as address:
        yield f"{address}/x.tar", asked


# What is stored


def bodies(shard):
    """Bytes, whether their length is told, and whether they are to be stored."""
    packed = gzip.compress(shard, mtime=0)
    return {
        "a page": (PAGE, True, False),
        "a page without a length": (PAGE, False, False),
        "nothing": (b"", True, False),
        "less than a header": (shard[:100], True, False),
        "a tar": (shard, True, True),
        "a tar without a length": (shard, False, False),
        "gzip": (packed, True, True),
        "an empty tar": (bytes(10240), True, True),
    }


@pytest.mark.parametrize("case", bodies(b""))
def test_only_what_is_vouched_for_is_stored(tmp_path, cache, shard, case):
    """The reader has it in any case; with the right checksum anything is stored."""
    body, sized, stored = bodies(shard)[case]
    store = Store(tmp_path / "store", sized=sized)
    store.put("x.tar", body)
    for _ in range(2):
        with cache.open("s3://b/x.tar", store.fetch("x.tar")) as stream:
            assert stream.read() == body
    assert store.asked("x.tar") == [0] * (1 if stored else 2)
    assert [path.suffix for path in Path(cache.directory).iterdir() if path.suffix] == [
        ".json",
        ".shard",
    ] * stored or stored
    for _ in range(2):
        with cache.open("s3://b/x.tar", store.fetch("x.tar"), md5=digest(body)) as stream:
            assert stream.read() == body
    assert store.asked("x.tar") == [0] * (1 if stored else 3)


@pytest.mark.parametrize("wrong", ["login page", "third header"])
def test_what_makes_no_sense_is_forgotten(cache, shard, wrong):
    """The message names the file of one that was stored."""
    damaged = PAGE if wrong == "login page" else shard[:11264] + b"x" * 512 + shard[11776:]
    with server([damaged, shard]) as (url, asked):
        pipe = wp.ShardList(url).open_shards(cache=cache).load_tar().group_by_key()
        with pytest.raises(wp.ShardError, match="web page" if damaged is PAGE else "header") as caught:
            list(pipe)
        assert damaged is PAGE or str(cache.directory) in "".join(caught.value.__notes__)
        assert [len(list(pipe)) for _ in range(2)] == [10, 10]
        assert len(asked) == 2


# The directory and its files


@pytest.mark.parametrize("path", ["file/cache", "/proc/cache"])
def test_a_directory_that_cannot_be_used_is_not_the_shard(tmp_path, shard, path):
    """It is told as what it is, and never skipped as a bad shard."""
    (tmp_path / "file").touch()
    with server([shard]) as (url, _):
        pipe = (
            wp.ShardList(url)
            .open_shards(cache=wp.ShardCache(tmp_path / path, max_bytes="1GB"), on_error="skip")
            .load_tar(on_error="skip")
            .group_by_key()
        )
        with pytest.raises(wp.CacheError, match="the cache .*cache cannot be used") as caught:
            list(pipe)
    assert caught.value.path == str(tmp_path / path)


@pytest.mark.parametrize("call", ["preadv", "scandir", "remove"])
def test_a_disk_that_fails_is_not_the_shard(cache, shard, monkeypatch, call):
    """Whatever of the cache it is that cannot be read."""

    class Failing:
        def __getattr__(self, name):
            return fail if name == call else getattr(os, name)

    def fail(*_):
        raise OSError(errno.EIO, "the disk fails")

    with server([shard]) as (url, _):
        pipe = (
            wp.ShardList(url)
            .open_shards(cache=cache, on_error="skip")
            .load_tar(on_error="skip")
            .group_by_key(on_error="skip")
        )
        for module in (files, shard_cache, stream):
            monkeypatch.setattr(module, "os", Failing())
        with pytest.raises(wp.CacheError, match="the cache .*cache cannot be used .*the disk fails"):
            list(pipe)


@pytest.mark.parametrize(
    ("planted", "which"),
    [
        ("link", "known"),
        ("link", "part"),
        ("link", "whole"),
        ("link", "usage"),
        ("pipe", "part"),
        ("directory", "whole"),
    ],
)
def test_what_others_have_planted_is_refused(tmp_path, cache, planted, which, store_of_one):
    """No link is followed, and no pipe waited for."""
    os.mkdir(cache.directory)
    entry = CacheDirectory(cache.directory).entry("s3://b/x.tar")
    path = f"{cache.directory}/usage" if which == "usage" else getattr(entry, which)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    if planted == "link":
        os.symlink(victim, path)
    elif planted == "pipe":
        os.mkfifo(path)
    else:
        os.mkdir(path)

    def read():
        with cache.open("s3://b/x.tar", store_of_one.fetch("x.tar")) as stream:
            return stream.read()

    with pytest.raises(wp.CacheError, match="is no regular file: remove it"):
        in_time(read)
    assert victim.read_bytes() == b"precious"
    in_time(CacheDirectory(cache.directory).entries)


@pytest.fixture
def store_of_one(tmp_path):
    store = Store(tmp_path / "store")
    store.put("x.tar", noise(1000))
    return store


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give files away")
def test_files_of_others_are_refused(tmp_path, cache, store_of_one):
    """But for those of the directory's owner, as where files belong to another user by the way a
    file system is mounted.
    """
    with cache.open("s3://b/x.tar", store_of_one.fetch("x.tar")) as stream:
        stream.read()
    whole = CacheDirectory(cache.directory).entry("s3://b/x.tar").whole
    os.chown(whole, 12345, -1)
    with pytest.raises(wp.CacheError, match=r"belongs to another user \(uid 12345\)"):
        cache.open("s3://b/x.tar", store_of_one.fetch("x.tar"))
    os.chown(cache.directory, 12345, -1)
    with cache.open("s3://b/x.tar", store_of_one.fetch("x.tar")) as stream:
        assert stream.read() == noise(1000)
    assert store_of_one.asked("x.tar") == [0]


def test_files_are_for_this_user_alone(cache, store_of_one):
    before = os.umask(0)
    try:
        with cache.open("s3://b/x.tar", store_of_one.fetch("x.tar")) as stream:
            stream.read()
    finally:
        os.umask(before)
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in Path(cache.directory).iterdir()}
    assert modes == {"": 0o600, ".json": 0o600, ".shard": 0o600}
    assert stat.S_IMODE(os.stat(cache.directory).st_mode) == 0o700


# Waiting


def test_closing_does_not_wait_for_the_first_byte(cache):
    """Nothing has come when the consumer is interrupted."""
    gate = Gate(noise(1000), 0)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.open("s3://b/x.tar", gate)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert gate.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "wds_pipes-cache"]
