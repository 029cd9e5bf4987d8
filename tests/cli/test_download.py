"""``wds-pipes download``: copies of shards."""

import json
import os
import random
import time
from functools import partial

import commands
import pytest
from commands import assert_readable, outputs, run_command, stored
from tars import tar

import wds_pipes as wp
from wds_pipes.tools import downloading as copying

run = partial(run_command, "download")
refused = partial(commands.refused, "download", code=(1, 2))
BESIDE = {"shard-000000.parquet": b"P" * 100, "shard-000001_stats.json": b"{}", "classes.json": b"[]\n"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two splits of shards of 1.5 MB with all that may be beside them, a minute old."""
    folder, numbers = tmp_path_factory.mktemp("download"), random.Random(5)
    for number in range(30):
        path = folder / "in" / f"{number:03d}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(numbers.randbytes(150_000))
    run_command("create", folder / "in", folder / "shards", "--max-samples", 10, "--split", "train=0.6,val=0.4")
    for split in ("train", "val"):
        for name, content in BESIDE.items():
            (folder / "shards" / split / name.replace("shard", split)).write_bytes(content)
    old = time.time() - 60
    for path in (folder / "shards").rglob("*"):
        os.utime(path, (old, old))
    return folder / "shards"


def test_all_that_belongs_to_shards_is_copied(shards, tmp_path):
    """Each into its directory; finished ones are kept."""
    told = run(shards / "*/*.tar", tmp_path / "a", "--progress")
    assert "there already" not in told.stdout
    assert "B/s" in told.stderr  # the bar counts bytes
    assert outputs(tmp_path / "a") == outputs(shards)
    assert_readable(tmp_path / "a")
    assert len(wp.IndexedShards(str(tmp_path / "a/train/index.json"))) > 10
    assert not (tmp_path / "a/.wds-pipes/parts").exists()
    (tmp_path / "a/val/val-000000.tar").unlink()
    assert " there already)" in run(shards / "*/*.tar", tmp_path / "a").stdout
    assert outputs(tmp_path / "a") == outputs(shards)
    for index in (1, 0):
        run(shards / "*/*.tar", tmp_path / "b", "--tasks", 2, "--task", index)
    assert outputs(tmp_path / "b") == outputs(shards)


def test_an_index_names_the_shards(shards, tmp_path):
    run(shards / "train/index.json", tmp_path)
    assert outputs(tmp_path) == outputs(shards / "train")


def cut(monkeypatch, after):
    """Let each copy end after so many writes, as if its process were killed."""
    append, counts = copying._append, {}

    def write(fd, data):
        counts[fd] = counts.get(fd, 0) + 1
        if counts[fd] > after:
            raise KeyboardInterrupt
        append(fd, data)

    monkeypatch.setattr(copying, "_append", write)


@pytest.mark.parametrize("changed", [False, True])
def test_a_shard_that_was_begun_continues_at_its_byte(s3, shards, tmp_path, monkeypatch, changed):
    """Unless the store has another version now."""
    shard = (shards / "train/train-000000.tar").read_bytes()
    s3.put("begun/a.tar", shard)
    arguments = [f"{s3.url}/begun/a.tar", tmp_path, "--storage-options", json.dumps(s3.storage_options)]
    with monkeypatch.context() as patched:
        cut(patched, 1)
        told = run(*arguments, code=130).stderr
    assert told == "what is finished is kept: run the same command again to go on\nAborted!\n"
    (part,) = (tmp_path / ".wds-pipes/parts").iterdir()
    have = part.stat().st_size
    assert 0 < have < len(shard)
    assert part.read_bytes() == shard[:have]
    if changed:
        shard = bytes(reversed(shard))
        s3.put("begun/a.tar", shard)
        assert "the inputs were changed" in refused(*arguments)
        arguments.append("--overwrite")
    s3.faults.clear()
    run(*arguments)
    assert outputs(tmp_path) == {"a.tar": shard}
    assert not (tmp_path / ".wds-pipes/parts").exists()
    starts = [
        int(request.range.removeprefix("bytes=").partition("-")[0] or 0) if request.range else 0
        for request in s3.faults.stats("begun/a.tar")
        if request.method == "GET" and request.sent
    ]
    assert min(starts) == (0 if changed else have)


def test_from_a_web_server_to_a_store(web, s3, shards, tmp_path):
    """What is beside the shards too, although the server cannot list them."""
    files = {name: data for name, data in outputs(shards / "train").items() if "000001" not in name}
    for name, content in files.items():
        web.put(f"train/{name}", content)
    run(f"{web.url}/train/train-000000.tar", tmp_path)
    made = outputs(tmp_path)
    assert made.keys() == files.keys()
    assert [entry["url"] for entry in json.loads(made.pop("index.json"))["shardlist"]] == ["train-000000.tar"]
    assert made.items() <= files.items()
    run(tmp_path, f"{s3.url}/copy", "--storage-options", json.dumps(s3.storage_options))
    assert stored(s3, "copy") == outputs(tmp_path)


def copy_of(shards, folder):
    folder.mkdir()
    for name, content in outputs(shards / "train").items():
        (folder / name).write_bytes(content)
    return folder


def test_damaged_shards_are_found_by_their_index(shards, tmp_path):
    """By size before anything is copied, by MD5 after it; nothing gets the name of the shard."""
    source = copy_of(shards, tmp_path / "in")
    content = bytearray((source / "train-000000.tar").read_bytes())
    content[1000] ^= 1
    (source / "train-000000.tar").write_bytes(content)
    message = refused(source, tmp_path / "out", code=1)
    assert "train-000000.tar arrived with the MD5" in message
    assert not (tmp_path / "out/train-000000.tar").exists()
    assert (tmp_path / "out/train-000001.tar").exists()
    (source / "train-000000.tar").write_bytes(content + b"x")
    assert "and its index says" in refused(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_shard_that_changes_meanwhile(shards, tmp_path, monkeypatch):
    source = copy_of(shards, tmp_path / "in")
    append = copying._append

    def write(fd, data):
        append(fd, data)
        (source / "train-000000.tar").write_bytes(b"other")

    monkeypatch.setattr(copying, "_append", write)
    assert "was changed while it was copied" in refused(source / "train-000000.tar", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar"))


def test_an_index_of_other_shards_is_noted(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar([("a.txt", b"x")]))
    (tmp_path / "index.json").write_text('{"b.tar": 3}')
    assert "So MD5s are not compared" in run(tmp_path / "a.tar", tmp_path / "out").stderr
    assert list(outputs(tmp_path / "out")) == ["a.tar"]


def test_shards_are_not_copied_to_themselves(shards, tmp_path):
    source = copy_of(shards, tmp_path / "in")
    before = outputs(source)
    (tmp_path / "link").symlink_to(source)
    for dest in (source, tmp_path / "link"):
        assert "would be written, and is read" in refused(source, dest, "--overwrite", code=2)
    assert outputs(source) == before


PAGE = b"<!DOCTYPE html><html><body>Sign in to go on.</body></html>" * 20


@pytest.mark.parametrize(
    ("content", "message"),
    [(PAGE, "looks like a web page"), (b"a,b\n", "is not a tar"), (b"", "is empty"), (None, "cannot be found")],
)
def test_what_is_no_shard_is_not_copied(content, message, tmp_path):
    if content is not None:
        (tmp_path / "x.tar").write_bytes(content)
    assert message in refused(tmp_path / "x.tar", tmp_path / "out")
    assert not (tmp_path / "out/x.tar").exists()
