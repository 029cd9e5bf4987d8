"""Opening shards: what can be opened, and what is said where it cannot."""

import gzip
import io
import os
import subprocess
import sys
import threading

import pytest
from tars import pairs, put, samples, tar

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.core.stream import Stream
from wds_pipes.io import open_url
from wds_pipes.io.open import CommandOutput
from wds_pipes.stages import LoadTar, OpenShards, ShardList


@pytest.mark.parametrize(
    "name",
    [
        "x.tar",
        "a b.tar",
        "a#b.tar",
        "a?b=c.tar",
        "a%20b.tar",
        "größe.tar",
        "{a}.tar",
        "[a].tar",
        "a:b.tar",
        "\udcff.tar",
    ],
)
def test_local_paths_stay_what_they_are(tmp_path, name):
    """Also as a file:// URL."""
    path = put(tmp_path / name, tar(pairs(2)))
    assert len(samples([path])) == 2
    with open_url(f"file://{path}") as stream:
        assert stream.read() == tar(pairs(2))


def test_storage_options_go_to_the_file_system(tmp_path):
    """Here fsspec's dir file system over the local one."""
    put(tmp_path / "x.tar", b"content")
    with open_url("dir://x.tar", storage_options={"path": str(tmp_path), "target_protocol": "file"}) as stream:
        assert stream.read() == b"content"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("missing.tar", "shard missing.tar does not exist. The working directory is {folder}. Check its name."),
        ("memory://missing/x.tar", "shard memory://missing/x.tar does not exist ("),
        ("folder.tar", "shard folder.tar cannot be opened: IsADirectoryError"),
        ("nosuch://user:secret@x/y.tar", "cannot be opened: ValueError: Protocol not known: nosuch"),
        (
            "pipe:cat secret.tar",
            "shard pipe:cat ... would run a shell command: pass allow_pipe=True to open_shards() or open_url()",
        ),
    ],
)
def test_what_cannot_be_opened(tmp_path, monkeypatch, url, message):
    """A ShardError that says which, why and what to do, without secrets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.tar").mkdir()
    with pytest.raises(ShardError) as caught:
        open_url(url)
    assert message.format(folder=os.getcwd()) in str(caught.value)
    assert "secret" not in str(caught.value) + caught.value.url


def test_a_file_that_may_not_be_read(tmp_path):
    path = put(tmp_path / "x.tar", b"")
    os.chmod(path, 0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ShardError, match="may not be read: check its permissions"):
        open_url(path)


def test_a_missing_package_says_what_to_install(monkeypatch):
    """For a protocol whose package is one of ours to install."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ShardError, match=r"pip install 'wds_pipes\[s3\]'"):
        samples(["s3://bucket/x.tar"])
    with pytest.raises(ShardError, match="pip install"):  # never skipped: it is not the shard's fault
        list(Stream(LoadTar(OpenShards(ShardList("s3://bucket/x.tar"), on_error="skip"))))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_standard_input(compress, monkeypatch):
    """A shard from a pipe, compressed or not; it is told by content."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(compress(tar(pairs(3))))
        process.stdin.close()
        monkeypatch.setattr(sys, "stdin", process.stdout)
        assert [sample["__key__"] for sample in samples(["-"])] == ["0000", "0001", "0002"]


@pytest.mark.parametrize("replaced", [io.StringIO(), None, "closed"], ids=["StringIO", "None", "closed"])
def test_standard_input_without_a_descriptor(replaced, monkeypatch):
    """As in a notebook."""
    if replaced == "closed":
        replaced = open(os.devnull)
        replaced.close()
    monkeypatch.setattr(sys, "stdin", replaced)
    for build in (lambda: open_url("-"), lambda: list(wp.ShardList("-").open_shards().load_tar())):
        with pytest.raises(
            ShardError, match=r"standard input \('-'\) has no file descriptor.*name this file"
        ) as caught:
            build()
        assert caught.value.url == "-"


def test_standard_input_in_a_worker():
    loader = wp.PipeLoader(wp.ShardList("-").open_shards().load_tar().group_by_key(), num_workers=1)
    with pytest.raises(ShardError, match=r"standard input \('-'\) cannot be read in a worker process"):
        list(loader)


def test_variables_and_the_home_directory(monkeypatch, tmp_path):
    put(tmp_path / "x.tar", b"1")
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in ("${DATA}/x.tar", "~/x.tar", f"file:{tmp_path}/x.tar", "file:~/x.tar"):
        with open_url(url) as stream:
            assert stream.read() == b"1"
    with pytest.raises(ValueError, match="NONE is not set"):
        open_url("${NONE}/x.tar")


def test_a_command_that_does_not_end_when_it_is_told_to_is_killed():
    """Closing its output does not wait for it for ever."""
    stream = CommandOutput("pipe:trap '' TERM; echo begun; while :; do sleep 1; done")
    assert stream.read(6) == b"begun\n"
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(60)
    assert stream.closed
