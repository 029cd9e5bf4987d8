"""Which shards a user means, and how a URL is shown."""

import os
from pathlib import Path

import fsspec
import pytest

from wds_pipes.io.urls import expand, local_path, redact


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with some shards."""
    for name in ("a-00.tar", "a-01.tar", "a-02.tgz", "b.tar.gz", "c [1].tar", "d#1.tar", "e?.tar", "f%20g.tar", "h{0,1}.tar", "i j.tar", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "s.tar").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("x-{000..002}.tar", ["x-000.tar", "x-001.tar", "x-002.tar"]),
        ("x-{8..11}.tar", ["x-8.tar", "x-9.tar", "x-10.tar", "x-11.tar"]),
        ("x-{08..10}.tar", ["x-08.tar", "x-09.tar", "x-10.tar"]),
        ("x-{0..6..3}.tar", ["x-0.tar", "x-3.tar", "x-6.tar"]),
        ("x-{2..0}.tar", ["x-2.tar", "x-1.tar", "x-0.tar"]),
        ("x-{a,b}.tar", ["x-a.tar", "x-b.tar"]),
        ("{x,y-{0..1}}.tar", ["x.tar", "y-0.tar", "y-1.tar"]),
        ("{x,y}-{0..1}.tar", ["x-0.tar", "x-1.tar", "y-0.tar", "y-1.tar"]),
        ("s3://b/x-{0..1}.tar?v=1", ["s3://b/x-0.tar?v=1", "s3://b/x-1.tar?v=1"]),
        (["x-{0..1}.tar", "y.tar"], ["x-0.tar", "x-1.tar", "y.tar"]),
        (("x.tar", "x.tar"), ["x.tar", "x.tar"]),
        pytest.param(iter(["x.tar"]), ["x.tar"], id="an iterator"),
        (Path("dir") / "x.tar", [os.path.join("dir", "x.tar")]),
        ([Path("x.tar"), "y.tar"], ["x.tar", "y.tar"]),
        ("x{y}.tar", ["x{y}.tar"]),
        ("C:\\data\\x.tar", ["C:\\data\\x.tar"]),
        ("C:\\data\\x-{0..1}.tar", ["C:\\data\\x-0.tar", "C:\\data\\x-1.tar"]),
        ("a%20b.tar", ["a%20b.tar"]),
        ("a b#c.tar", ["a b#c.tar"]),
        ("https://h/x.tar?sig=*[1]", ["https://h/x.tar?sig=*[1]"]),
        ("-", ["-"]),
    ],
    ids=str,
)
def test_names_need_not_exist_to_be_expanded(tmp_path, monkeypatch, urls, expected):
    monkeypatch.chdir(tmp_path)
    assert expand(urls) == expected


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("a-*.tar", ["a-00.tar", "a-01.tar"]),
        ("a-0?.tar", ["a-00.tar", "a-01.tar"]),
        ("a-0[12].t*", ["a-01.tar", "a-02.tgz"]),
        ("{a,b}*.tar*", ["a-00.tar", "a-01.tar", "b.tar.gz"]),
        (["b*", "a-00.tar"], ["b.tar.gz", "a-00.tar"]),
        (Path("a-*.tar"), ["a-00.tar", "a-01.tar"]),
        ("**/s.tar", ["sub/s.tar"]),
        ("sub", ["sub/s.tar"]),
        # A path that exists is taken as it is, whatever is in its name.
        ("c [1].tar", ["c [1].tar"]),
        ("d#1.tar", ["d#1.tar"]),
        ("e?.tar", ["e?.tar"]),
        ("f%20g.tar", ["f%20g.tar"]),
        ("h{0,1}.tar", ["h{0,1}.tar"]),
        (Path("h{0,1}.tar"), ["h{0,1}.tar"]),
        ("i j.tar", ["i j.tar"]),
    ],
    ids=str,
)
def test_what_is_there(folder, urls, expected):
    assert expand(urls) == expected


def test_a_folder_means_its_shards_sorted(folder):
    """Not its other files and not its folders."""
    assert expand(folder) == sorted(str(folder / name) for name in os.listdir(folder) if ".tar" in name)
    assert expand(f"file://{folder}/a-*.tar") == [str(folder / "a-00.tar"), str(folder / "a-01.tar")]


def test_a_list_in_a_text_file(folder):
    """One a line, expanded like others; empty lines are nothing."""
    (folder / "list.txt").write_text("x-{0..1}.tar\n\na-*.tar\r\n  s3://b/ü.tar  \n", encoding="utf-8")
    assert expand("@list.txt") == ["x-0.tar", "x-1.tar", "a-00.tar", "a-01.tar", "s3://b/ü.tar"]
    assert expand(["@list.txt", "y.tar"])[-1] == "y.tar"


def test_a_pattern_of_remote_shards():
    """Sorted, with their protocol again."""
    files = fsspec.filesystem("memory")
    for name in ("/shards/b.tar", "/shards/a.tar", "/shards/a.txt"):
        files.pipe(name, b"")
    assert [url.replace("memory:///", "memory://") for url in expand("memory://shards/*.tar")] == ["memory://shards/a.tar", "memory://shards/b.tar"]
    assert len(expand("memory://shards/{a,b}.t*")) == 3
    with pytest.raises(ValueError, match=r"no shard matches 'memory://shards/z\*.tar'"):
        expand("memory://shards/z*.tar")


@pytest.mark.parametrize(
    ("urls", "error", "message"),
    [
        ("z*.tar", ValueError, r"no shard matches 'z\*.tar': check the pattern, the directory and the working directory"),
        (["a-*.tar", "z?.tar"], ValueError, "no shard matches"),
        ([], ValueError, "the list of shards is empty: name at least one"),
        ("", ValueError, "a shard needs a name"),
        ([""], ValueError, "a shard needs a name"),
        ("{0..1}}.tar", ValueError, "the braces in .* do not match"),
        ("@empty.txt", ValueError, "the list of shards is empty"),
        ("@missing.txt", ValueError, "missing.txt"),
        ("@loop.txt", ValueError, "names another list"),
        ("empty", ValueError, "no shard matches 'empty'"),
        (b"a.tar", TypeError, "a URL, a path or a list of them"),
        ({"a.tar": 1}, TypeError, "a URL, a path or a list of them"),
        (5, TypeError, "a URL, a path or a list of them"),
        ([5], TypeError, "a shard is named by a string or a path, not 5"),
        ([["a.tar"]], TypeError, "a shard is named by a string or a path"),
        ("https://user:secret@h/x-*{0..1}}.tar", ValueError, "'https://h/x"),
    ],
    ids=str,
)
def test_what_names_nothing_is_told(folder, urls, error, message):
    (folder / "empty.txt").write_text("\n")
    (folder / "loop.txt").write_text("@loop.txt\n")
    (folder / "empty").mkdir()
    with pytest.raises(error, match=message) as caught:
        expand(urls)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/x.tar", "s3://bucket/x.tar"),
        ("https://user:p@ss:word@host/x.tar", "https://host/x.tar"),
        ("https://user@host:8080/x.tar", "https://host:8080/x.tar"),
        ("https://h/x.tar?a=1&token=T&b=2", "https://h/x.tar?a=1&token=...&b=2"),
        ("https://h/x.tar?X-Amz-Signature=S&X-Amz-Credential=C&X-Amz-Date=1", "https://h/x.tar?X-Amz-Signature=...&X-Amz-Credential=...&X-Amz-Date=1"),
        ("https://h/x.tar?X-Amz-Security-Token=S&AWSAccessKeyId=K", "https://h/x.tar?X-Amz-Security-Token=...&AWSAccessKeyId=..."),
        ("https://h/x.tar?sv=1&sig=S", "https://h/x.tar?sv=1&sig=..."),
        ("https://h/x.tar?access_token=T&api_key=K&password=P&pwd=Q&auth=A", "https://h/x.tar?access_token=...&api_key=...&password=...&pwd=...&auth=..."),
        ("simplecache::https://u:p@h/x.tar?token=T", "simplecache::https://h/x.tar?token=..."),
        ("https://h/a@b/x.tar", "https://h/a@b/x.tar"),
        ("https://h/x.tar?part=1#top", "https://h/x.tar?part=1#top"),
        ("pipe:curl -H 'Authorization: T' https://u:p@h/x.tar", "pipe:curl ..."),
        ("dir/a@b:c?token=1.tar", "dir/a@b:c?token=1.tar"),
        ("file:///dir/x.tar?token=1", "file:///dir/x.tar?token=1"),
        ("-", "-"),
    ],
)
def test_secrets_are_not_shown(url, shown):
    assert redact(url) == shown


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("a.tar", "a.tar"),
        ("/a b#c?d%20.tar", "/a b#c?d%20.tar"),
        ("file:///a.tar", "/a.tar"),
        ("local:///a.tar", "/a.tar"),
        ("C:\\a.tar", "C:\\a.tar"),
        ("c:/a.tar", "c:/a.tar"),
        ("a:b.tar", "a:b.tar"),
        ("dir:x/a.tar", "dir:x/a.tar"),
        ("s3://b/a.tar", None),
        ("memory://a.tar", None),
        ("simplecache::s3://b/a.tar", None),
        ("pipe:cat a.tar", None),
    ],
)
def test_what_is_local(url, path):
    assert local_path(url) == path
