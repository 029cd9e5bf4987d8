"""Indexing again: only new and changed shards are read, and what is written is as from new."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote import content
from tars import fill, pairs, put, tar

from wds_pipes.cli import main
from wds_pipes.errors import SampleError, ShardError
from wds_pipes.stages import ShardList
from wds_pipes.tar import ShardWriter, index_shards

_opened: list[str] | None = None


def _hook(event, arguments):
    if event == "open" and _opened is not None and str(arguments[0]).endswith(".tar") and arguments[1][0] == "r":
        _opened.append(os.path.basename(arguments[0]))


sys.addaudithook(_hook)


@pytest.fixture
def opened():
    """The names of the tars that were opened."""
    global _opened
    _opened = []
    yield _opened
    _opened = None


def settle(*paths, seconds=1_000_000_000):
    """Give files an old time of modification, which is known to differ for another content."""
    for path in paths:
        os.utime(path, (seconds, seconds))


SAME_SIZE = tar(pairs(3, ("abc", "cls")))  # as that of the shards below


def shards(directory, count=4):
    urls = [put(directory / f"shard-{number:06d}.tar", tar(pairs(3))) for number in range(count)]
    settle(*urls)
    return urls


def files(directory, *endings):
    return {
        path.name: path.read_bytes()
        for path in Path(directory).iterdir()
        if path.name.endswith(endings or (".json", ".idx", ".keys"))
    }


ALL = {"offsets": True, "dali": True}


def test_only_new_and_changed_shards_are_read(tmp_path, opened):
    urls = shards(tmp_path)
    output = tmp_path / "index.json"
    first = index_shards(urls, output, **ALL)
    assert sorted(opened) == [os.path.basename(url) for url in urls]
    written = files(tmp_path)
    opened.clear()
    assert index_shards(urls, output, **ALL) == first
    assert opened == []
    assert files(tmp_path) == written

    Path(urls[1]).write_bytes(tar(pairs(30)))
    settle(urls[1])
    assert len(SAME_SIZE) == os.path.getsize(urls[2])
    Path(urls[2]).write_bytes(SAME_SIZE)
    settle(urls[2], seconds=999_999_999)
    new = put(tmp_path / "x.tar", tar(pairs(2)))
    settle(new)
    found = index_shards([*urls[1:], new], output, **ALL)
    assert sorted(opened) == ["shard-000001.tar", "shard-000002.tar", "x.tar"]
    assert [entry["url"] for entry in json.loads(output.read_text())["shardlist"]] == [
        *map(os.path.basename, urls[1:]),
        "x.tar",
    ]
    assert found == index_shards([*urls[1:], new])
    opened.clear()
    index_shards([*urls[1:], new], output, **ALL, force=True)
    assert len(opened) == 4


def test_a_missing_or_changed_file_of_a_shard_is_written_again(tmp_path, opened):
    urls = shards(tmp_path)
    output = tmp_path / "index.json"
    index_shards(urls, output, **ALL)
    written = files(tmp_path)
    os.unlink(f"{urls[0]}.idx")
    Path(f"{urls[1]}.keys").write_bytes(b"x" * 36)
    (tmp_path / "shard-000002.idx").write_bytes(b"v1.2 1\n")
    opened.clear()
    index_shards(urls, output, offsets=True)
    assert sorted(opened) == ["shard-000000.tar", "shard-000001.tar"]
    index_shards(urls, output, **ALL)
    assert files(tmp_path) == written
    opened.clear()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    index_shards(urls, output, offsets=elsewhere)
    assert len(opened) == 4, "they are not there"


def test_what_is_in_doubt_is_read(tmp_path, opened):
    """A shard that was written just now, an index of another program, other rules."""
    urls = shards(tmp_path)
    (tmp_path / "x").mkdir()
    output = tmp_path / "index.json"
    os.utime(urls[0])
    index_shards(urls, output)
    opened.clear()
    index_shards(urls, output)
    assert opened == ["shard-000000.tar"]
    settle(urls[0])
    index_shards(urls, output)
    for options in ({"key_split": "last-dot"}, {}, {"key_split": lambda name: (name, "x")}, {}):
        opened.clear()
        index_shards(urls, output, **options)
        assert len(opened) == 4, options
    repeated = put(tmp_path / "x" / "a.tar", tar((name, b"") for name in ("a.x", "b.x", "a.x")))
    settle(repeated)
    assert index_shards(repeated, tmp_path / "x" / "i.json", on_repeated_key="ignore")[repeated].samples == 3
    with pytest.raises(SampleError, match="on_repeated_key='ignore'"):
        index_shards(repeated, tmp_path / "x" / "i.json")
    listing = json.loads(output.read_text())
    for entry in listing["shardlist"]:
        entry.pop("version")
    for other in (json.dumps(listing), '{"shardlist": []}', '{"shardlist": [1]}', '{"shardlist": [{"url": []}]}'):
        output.write_text(other)
        opened.clear()
        index_shards(urls, output)
        assert len(opened) == 4, other


OPERATIONS = [
    "new",
    "other size",
    "same size",
    "remove",
    "no idx",
    "swap idx",
    "old idx",
    "touch",
    "old index",
    "writer",
]


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_after_any_history_it_is_as_from_new(history):
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # each file is written to the disk
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        directory, fresh = Path(temporary, "data"), Path(temporary, "fresh")
        directory.mkdir()
        clock, old = 1_000_000, {}
        for number in range(2):
            settle(put(directory / f"{number}.tar", tar(pairs(number + 1))), seconds=clock + number)
        for operation, number, with_offsets in [("none", 0, True), *history]:
            clock += 10
            path = directory / f"{number}.tar"
            before = path.stat().st_mtime if path.exists() else clock
            if operation == "new" or not path.exists():
                path.write_bytes(tar(pairs(number + 2)))
            elif operation == "other size":
                path.write_bytes(tar([*pairs(number + 2), ("z.txt", bytes(path.stat().st_size))]))
                clock = before  # even then
            elif operation == "same size":
                one, other = (tar(pairs(number + 2, (field, "cls"))) for field in ("txt", "abc"))
                path.write_bytes(one if content(path) == other else other)
                clock = before - 1 if with_offsets else clock  # also an older one
            elif operation == "remove":
                if len(list(directory.glob("*.tar"))) > 1:
                    path.unlink()
            elif operation == "no idx":
                Path(f"{path}.idx").unlink(missing_ok=True)
            elif operation == "swap idx":
                Path(f"{path}.idx").write_bytes(b"\0" * 8)
            elif operation == "old idx":
                for name, data in old.items():
                    (directory / name).write_bytes(data)
            elif operation == "writer":
                fill(
                    ShardWriter(directory / "{}.tar", start=7, index=directory / "index.json", overwrite=True),
                    [{"__key__": "a", "txt": "x" * number}],
                )
            if path.exists() and operation not in ("no idx", "swap idx", "old idx", "writer", "none"):
                settle(path, seconds=clock)
            old = files(directory, ".idx", ".keys") if with_offsets else old
            urls = sorted(map(str, directory.glob("*.tar")))
            found = index_shards(urls, directory / "index.json", offsets=with_offsets, dali=with_offsets)
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            again = index_shards(urls, fresh / "index.json", offsets=fresh, dali=fresh)
            assert found == again
            assert list(ShardList(directory / "index.json").facts) == list(again.values())
            if with_offsets:
                made = files(directory, ".idx", ".keys")
                assert {name: made[name] for name in files(fresh, ".idx", ".keys")} == files(fresh, ".idx", ".keys")


def test_a_run_that_fails_leaves_whole_files(tmp_path, opened):
    """The next one goes on from the index before it."""
    urls = shards(tmp_path)
    output = tmp_path / "index.json"
    index_shards(urls, output, **ALL)
    before = files(tmp_path)
    bad = put(tmp_path / "z.tar", tar(pairs(9))[:3000])
    with pytest.raises(ShardError, match="is cut inside"):
        index_shards([*urls, bad], output, **ALL, force=True)
    assert files(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    opened.clear()
    index_shards(urls, output, **ALL)
    assert not opened


def test_a_shard_that_is_written_meanwhile_is_an_error(tmp_path):
    urls = shards(tmp_path)

    def split(name):
        os.utime(urls[1])
        return name, "x"

    with pytest.raises(ShardError, match="was written while it was indexed: index it again"):
        index_shards(urls[1], tmp_path / "index.json", key_split=split)
    assert not (tmp_path / "index.json").exists()


def test_a_writer_keeps_what_is_known_of_other_shards(tmp_path, opened):
    urls = shards(tmp_path)
    output = tmp_path / "index.json"
    index_shards(urls, output, **ALL)
    writer = fill(
        ShardWriter(tmp_path / "shard-{:06d}.tar", start=3, index=output, overwrite=True, max_samples=1),
        ({"__key__": key, "txt": "text"} for key in "ab"),
    )
    settle(*writer.shards)
    opened.clear()
    index_shards([*urls, *writer.shards], output, offsets=True)
    assert sorted(opened) == ["shard-000003.tar", "shard-000004.tar"]


def test_shards_in_a_store(remote, tmp_path):
    """Their ETags say what has changed."""
    urls = shards(tmp_path, 3)
    far = [remote.put(f"d/{os.path.basename(url)}", content(url)) for url in urls]
    folder = tmp_path / "indexes"
    folder.mkdir()
    options = {"storage_options": remote.storage_options, "offsets": folder, "dali": folder}
    first = index_shards(far, folder / "index.json", **options)
    assert list(first.values()) == list(index_shards(urls).values())
    remote.faults.clear()
    assert index_shards(far, folder / "index.json", **options) == first
    assert not [request for request in remote.faults.stats(remote.reads) if request.sent]
    remote.put("d/shard-000001.tar", SAME_SIZE)
    remote.faults.clear()
    second = index_shards(far, folder / "index.json", **options)
    reads = [request.path for request in remote.faults.stats(remote.reads) if request.sent]
    assert reads
    assert all("shard-000001.tar" in path for path in reads)
    assert [second[url] == first[url] for url in far] == [True, False, True]


def test_files_beside_remote_shards_are_refused(tmp_path):
    for what in ("offsets", "dali"):
        with pytest.raises(ValueError, match=f"{what}='DIRECTORY'"):
            index_shards("http://127.0.0.1:9/a.tar", **{what: True})
        with pytest.raises(ValueError, match="an existing local directory"):
            index_shards("http://127.0.0.1:9/a.tar", **{what: tmp_path / "none"})
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        put(folder / "x.tar", tar(pairs(2)))
    with pytest.raises(ValueError, match="would have one file"):
        index_shards([folder / "x.tar" for folder in folders], offsets=tmp_path)
    put(tmp_path / "x", tar(pairs(2)))
    with pytest.raises(ValueError, match="an index of offsets, and one of DALI"):
        index_shards(tmp_path / "x", offsets=True, dali=True)


# Progress, and the command


def test_the_command(tmp_path, monkeypatch, opened):
    shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["index", "*.tar", "-o", "index.json", "--offsets-to", ".", "--dali"]
    for more, count in (([], 4), (["-j", "2"], 0), (["--force"], 4)):
        opened.clear()
        result = CliRunner().invoke(main, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("index.json: 4 shards, 12 samples")
        assert not result.stderr
        assert len(opened) == count
    assert os.path.getsize("shard-000000.idx")
    assert os.path.getsize("shard-000000.tar.idx") == 32
    told = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    facts = index_shards("shard-000002.tar")["shard-000002.tar"]
    assert (told["command"], list(told["facts"].values())[2]) == ("index", facts._asdict())
    result = CliRunner().invoke(main, [*arguments, "--progress"])
    assert "4/4" in result.stderr
    os.mkdir("to")
    result = CliRunner().invoke(main, ["index", "*.tar", "--dali-to", "to"])
    assert result.stdout.startswith("indexes of DALI: 4 shards")
    assert sorted(os.listdir("to")) == [f"shard-{number:06d}.idx" for number in range(4)]
