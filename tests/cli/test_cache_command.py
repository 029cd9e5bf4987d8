"""``wds-pipes cache``."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from remote_store import Store

from wds_pipes.cli import main
from wds_pipes.io.cache.shard_cache import ShardCache


def run(*arguments):
    return CliRunner().invoke(main, ["cache", *map(str, arguments)])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Three whole shards and one that was left after a part of it."""
    store = Store(tmp_path / "store", rate=20_000_000)
    cache = ShardCache(tmp_path / "cache", max_bytes="1GB")
    for number in range(4):
        url = store.put(f"{number}.tar", b"\x1f\x8b\x08" + os.urandom(9_000_000 if number == 3 else 999_997 + number))
        with cache.open(url, store.fetch(f"{number}.tar")) as stream:
            stream.read(None if number < 3 else 1000)
    monkeypatch.setenv("WDS_PIPES_CACHE_DIR", cache.directory)
    return cache


def test_ls(cache):
    """Each shard with its size, state and URL, those used least recently first; the directory is
    that of the environment.
    """
    lines = run("ls").output.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["1", "1", "1"]
    assert [line.split()[-2:] for line in lines[1:5]] == [
        [state, f"s3://bucket/{number}.tar"] for number, state in enumerate(["complete"] * 3 + ["partial"])
    ]
    assert lines[5].startswith(f"{cache.directory}: 4 shards, 3")


def test_prune(cache):
    """What a stopped download has left goes, and then what was used least recently, until the
    rest fits.
    """
    result = run("prune", "--size", "2.5MB")
    assert result.output.startswith(f"{cache.directory}: removed 2 shards, ")
    assert result.output.endswith("2 shards are left, 2 MB\n")
    assert [line.split()[-1] for line in run("ls").output.splitlines()[1:3]] == [
        "s3://bucket/1.tar",
        "s3://bucket/2.tar",
    ]


def test_clear(cache, tmp_path):
    """All goes but what is open, and files that are not the cache's."""
    own = Path(cache.directory, "notes.json")
    own.write_text("mine")
    with cache.open("s3://bucket/1.tar", None) as stream:
        assert run("clear", "--directory", cache.directory).output.endswith("1 shard is left, 1 MB\n")
        assert len(stream.read()) == 1_000_001
    assert run("clear").output.endswith("0 shards are left, 0 bytes\n")
    assert sorted(os.listdir(cache.directory)) == ["notes.json", "usage"]
    assert own.read_text() == "mine"


def test_nothing_is_written_into_a_directory_that_is_no_cache(tmp_path):
    (tmp_path / "mine.jpg").write_bytes(b"1")
    for command in (["clear"], ["prune", "--size", "1MB"], ["ls"]):
        assert "0 shards" in run(*command, "--directory", tmp_path).output
    assert os.listdir(tmp_path) == ["mine.jpg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ls", "set WDS_PIPES_CACHE_DIR"),
        ("prune --directory missing", "such as --size 200GB, or set WDS_PIPES_CACHE_SIZE"),
        ("prune --directory missing --size much", "'much' is not a size"),
        ("ls --directory missing", "0 shards"),
        ("clear --directory missing", "0 shards"),
    ],
)
def test_what_cannot_be_done(arguments, message, tmp_path, monkeypatch):
    """A sentence; a cache that is not there is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WDS_PIPES_CACHE_DIR", raising=False)
    monkeypatch.delenv("WDS_PIPES_CACHE_SIZE", raising=False)
    result = run(*arguments.split())
    assert message in result.output
    assert result.exit_code == (0 if message == "0 shards" else 2)
    assert not (tmp_path / "missing").exists()
