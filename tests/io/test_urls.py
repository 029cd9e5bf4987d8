"""Which shards a user means, and how a URL is shown."""

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.io.expand import expand
from wds_pipes.io.urls import hide, identify, local_path, redact, split_joined


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with some shards."""
    for name in (
        "a-00.tar",
        "a-01.tar",
        "a-02.tgz",
        "b.tar.gz",
        "c [1].tar",
        "d#1.tar",
        "e?.tar",
        "f%20g.tar",
        "h{0,1}.tar",
        "i j.tar",
        "${DATA}.tar",
        "pipe:m.tar",
        "notes.txt",
    ):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "packed").mkdir()
    for name in (
        "a.tar.gz",
        "b.tgz",
        "c.tbz2",
        "d.txz",
        "e.tzst",
        ".f.tgz.partial",
        ".g.tgz",
        "notes.tgz.md5",
        "a.tar.idx",
        "a.tar.keys",
    ):
        (tmp_path / "packed" / name).write_bytes(b"")
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
        (Path("dir/x-{0..1}.tar"), ["dir/x-0.tar", "dir/x-1.tar"]),
        ("file:/a/x-{0..1}.tar", ["file:/a/x-0.tar", "file:/a/x-1.tar"]),
        ("/a/{0..1}.tar::/b/{08..09}.tar", ["/a/0.tar", "/a/1.tar", "/b/08.tar", "/b/09.tar"]),
        (["a.tar::b.tar", Path("c.tar::d.tar")], ["a.tar", "b.tar", "c.tar", "d.tar"]),
        ("train::val::s3://b/x.tar::-", ["train", "val", "s3://b/x.tar", "-"]),
        (
            "pipe:ssh h 'cat {a::b,c}' -::pipe:cat x::s3://y",
            ["pipe:ssh h 'cat a::b' -", "pipe:ssh h 'cat c' -", "pipe:cat x::s3://y"],
        ),
        # chained URLs of fsspec
        ("simplecache::s3://b/{0..1}.tar", ["simplecache::s3://b/0.tar", "simplecache::s3://b/1.tar"]),
        (
            "simplecache::s3://b/x.tar::filecache::a.tar::c.tar",
            ["simplecache::s3://b/x.tar", "filecache::a.tar", "c.tar"],
        ),
        (
            "tar://x.tar::zip://y.tar::simplecache::s3://b/z.zip::c.tar",
            ["tar://x.tar::zip://y.tar::simplecache::s3://b/z.zip", "c.tar"],
        ),
        ("{simplecache::s3://b/x,y}.tar::z.tar", ["simplecache::s3://b/x.tar", "y.tar", "z.tar"]),
        # environment variables
        ("${DATA}/x-{0..1}.tar", ["/data/x-0.tar", "/data/x-1.tar"]),
        (Path("${DATA}/$DATA/${X y}.tar"), ["/data/$DATA/${X y}.tar"]),
        ("${TWO}::${DATA}.tar", ["/a/0.tar", "/a/1.tar", "s3://b/c.tar", "/data.tar"]),
        ("pipe:cat ${NONE}", ["pipe:cat ${NONE}"]),
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
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("TWO", "/a/{0..1}.tar::s3://b/c.tar")
    assert expand(urls) == expected


def test_which_protocols_of_fsspec_read_from_another():
    """All of the installed version, so that ``::`` after them does not join."""
    for protocol in known_implementations:
        try:
            kind = fsspec.get_filesystem_class(protocol)
        except ImportError:
            continue
        chained = split_joined(f"{protocol}://x::y.tar") == [f"{protocol}://x::y.tar"]
        inits = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
        options = {name for init in inits for name in inspect.signature(init).parameters}
        assert chained == bool({"fo", "target_protocol"} & options), protocol


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
        ("packed", [f"packed/{name}" for name in ("a.tar.gz", "b.tgz", "c.tbz2", "d.txz", "e.tzst")]),
        # A path that exists is taken as it is, whatever is in its name.
        ("c [1].tar", ["c [1].tar"]),
        ("d#1.tar", ["d#1.tar"]),
        ("e?.tar", ["e?.tar"]),
        ("f%20g.tar", ["f%20g.tar"]),
        ("h{0,1}.tar", ["h{0,1}.tar"]),
        (Path("h{0,1}.tar"), ["h{0,1}.tar"]),
        ("i j.tar", ["i j.tar"]),
        ("k::l.tar", ["k", "l.tar"]),
        ("${DATA}.tar", ["${DATA}.tar"]),
        ("pipe*", ["./pipe:m.tar"]),
    ],
    ids=str,
)
def test_what_is_there(folder, urls, expected):
    assert expand(urls) == expected


def test_a_folder_means_its_shards_sorted(folder):
    """Not its other files and not its folders."""
    assert expand(folder) == sorted(
        str(folder / name) for name in os.listdir(folder) if name.endswith((".tar", ".tgz", ".tar.gz"))
    )
    assert expand(f"file://{folder}/a-*.tar") == [str(folder / "a-00.tar"), str(folder / "a-01.tar")]


def test_a_list_in_a_text_file(folder):
    """One a line, expanded like others; empty lines and a BOM are nothing."""
    (folder / "list.txt").write_text("\ufeffx-{0..1}.tar\n\na-*.tar\r\n  s3://b/ü.tar  \n", encoding="utf-8")
    assert expand("@list.txt") == ["x-0.tar", "x-1.tar", "a-00.tar", "a-01.tar", "s3://b/ü.tar"]
    assert expand(["@list.txt", "y.tar"])[-1] == "y.tar"


def test_a_pattern_of_remote_shards():
    """Sorted, with their protocol again."""
    files = fsspec.filesystem("memory")
    for name in ("/shards/b.tar", "/shards/a.tar", "/shards/a.txt"):
        files.pipe(name, b"")
    assert [url.replace("memory:///", "memory://") for url in expand("memory://shards/*.tar")] == [
        "memory://shards/a.tar",
        "memory://shards/b.tar",
    ]
    assert len(expand("memory://shards/{a,b}.t*")) == 3
    with pytest.raises(ValueError, match=r"no shard matches 'memory://shards/z\*.tar'"):
        expand("memory://shards/z*.tar")


def test_the_keys_of_a_dict_have_an_order():
    assert expand({"b.tar": 1, "a.tar": 2}.keys()) == ["b.tar", "a.tar"]


@pytest.mark.parametrize(
    ("urls", "error", "message"),
    [
        (
            "z*.tar",
            ValueError,
            r"no shard matches 'z\*.tar': check the pattern, the directory and the working directory",
        ),
        (["a-*.tar", "z?.tar"], ValueError, "no shard matches"),
        ([], ValueError, "the list of shards is empty: name at least one"),
        ({"a.tar"}, TypeError, r"a set of shards has another order in each process, .* pass sorted\(urls\)"),
        ("", ValueError, "a shard needs a name"),
        ([""], ValueError, "a shard needs a name"),
        ("{0..1}}.tar", ValueError, "the braces in .* do not match"),
        ("{000..001.tar", ValueError, "the braces in .* do not match"),
        ("@empty.txt", ValueError, "the list of shards is empty"),
        ("@missing.txt", ValueError, "missing.txt"),
        ("@loop.txt", ValueError, "names another list"),
        (
            Path("https://user:secret@h/x.tar?sig=secret"),
            ValueError,
            r"a '/' is missing in 'https://h/x.tar\?...', which a pathlib.Path shortens: pass the URL as a str",
        ),
        ("a.tar::", ValueError, "'::' joins URLs, and one before or after it is missing in 'a.tar::'"),
        ("::https://u:secret@h/x.tar", ValueError, "missing in '::https://h/x.tar'"),
        ("${NONE}/a.tar", ValueError, r"the environment variable NONE is not set: a URL contains \$\{NONE\}"),
        ("${COMMAND}", ValueError, "an environment variable names a command"),
        ("a.tar::${COMMANDS}", ValueError, "an environment variable names a command"),
        ("${HALF}pe:secret,b}", ValueError, "names a command"),
        ("@commands.txt", ValueError, "the list 'commands.txt' names a command"),
        ("@braces.txt", ValueError, "names a command"),
        ("@variable.txt", ValueError, r"the list 'variable.txt' contains \$\{DATA\}"),
        ("@built.txt", ValueError, r"the list 'built.txt' contains \$\{DATA\}"),
        ("${EMPTY}", ValueError, "the environment variable that a URL consists of is empty"),
        ("empty", ValueError, r"no shard matches 'empty', a directory without tars .*: name those in its directories"),
        ("http://[::1]:80/a.tar", ValueError, r"'http://\[::1\]:80/a.tar' has an IPv6 address"),
        ("http://me:secret@[fe80::1]/x-*.tar", ValueError, "has an IPv6 address"),
        (b"a.tar", TypeError, "a URL, a path or a list of them"),
        ({"a.tar": 1}, TypeError, "a URL, a path or a list of them"),
        (5, TypeError, "a URL, a path or a list of them"),
        ([5], TypeError, "a shard is named by a string or a path, not 5"),
        ([["a.tar"]], TypeError, "a shard is named by a string or a path"),
        ("https://user:secret@h/x-*{0..1}}.tar", ValueError, "'https://h/x"),
    ],
    ids=str,
)
def test_what_names_nothing_is_told(folder, monkeypatch, urls, error, message):
    for name, value in {"COMMAND": "pipe:secret", "COMMANDS": "a.tar::pipe:secret", "HALF": "{pi", "EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NONE", raising=False)
    (folder / "empty.txt").write_text("\n")
    (folder / "commands.txt").write_text("a.tar::pipe:secret\n")
    (folder / "braces.txt").write_text("pi{pe:secret,x}\n")
    (folder / "variable.txt").write_text("${DATA}/x.tar\n")
    (folder / "built.txt").write_text("https://h/{$,x}{{DATA},y}/x.tar\n")
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
        ("https://user:pa/ss@host/x.tar", "https://host/x.tar"),
        ("https://user:pa?s#s@host/x.tar", "https://host/x.tar"),
        ("abfs://container@account.dfs.core.windows.net/x.tar", "abfs://account.dfs.core.windows.net/x.tar"),
        ("https://h/x.tar?part=1&token=T&id=a/2", "https://h/x.tar?part=1&id=a/2&..."),
        ("https://h/x.tar?X-Amz-Signature=S&X-Amz-Credential=C&X-Amz-Date=1", "https://h/x.tar?..."),
        ("https://h/x.tar?versionId=1&sv=1&sig=S", "https://h/x.tar?versionId=1&..."),
        ("https://h/x.tar?secret-without-a-name", "https://h/x.tar?..."),
        ("https://h/x.tar?part=a:secret&file=u@secret", "https://h/x.tar?..."),
        ("https://h/x.tar?part=1;token=T", "https://h/x.tar?part=1&..."),
        ("https://h/x.tar?%74oken=T", "https://h/x.tar?..."),
        ("https://h/x.tar#token=T", "https://h/x.tar#..."),
        ("https://h/x.tar;token=T;v=1", "https://h/x.tar;token=...;v=1"),
        ("https://h/a%3B%74oken=T/x.tar", "https://h/a%3B%74oken=.../x.tar"),
        ("https://h/hdnts=exp=1~acl=/*~hmac=S/x.tar", "https://h/hdnts=...~acl=/*~hmac=.../x.tar"),
        ("s3://b/key=1/code=2/x#1;a=b.tar", "s3://b/key=1/code=2/x#1;a=b.tar"),
        ("simplecache::https://u:p@h/x.tar?token=T", "simplecache::https://h/x.tar?..."),
        ("https://h/a@b/x.tar", "https://h/a@b/x.tar"),
        ("https://h/x.tar?part=1#top", "https://h/x.tar?part=1#..."),
        ("pipe:curl -H 'Authorization: T' https://u:p@h/x.tar", "pipe:curl ..."),
        ("pipe:TOKEN=T curl https://h/x.tar", "pipe:..."),
        ("dir/a@b:c?token=1.tar", "dir/a@b:c?token=1.tar"),
        ("file:///dir/x.tar?token=1", "file:///dir/x.tar?token=1"),
        ("-", "-"),
    ],
)
def test_secrets_are_not_shown(url, shown):
    assert redact(url) == shown
    assert hide(f"cannot read <{url}>: odd", url) == f"cannot read <{shown}>: odd"


SECRETS = [
    "jwt",
    "pass",
    "bearer",
    "hmac",
    "hdnts",
    "hdnea",
    "md5",
    "code",
    "sessionid",
    "Policy",
    "token",
    "auth",
    "api_key",
    "sig",
    "X-Amz-Signature",
    "AWSAccessKeyId",
    "anything",
]


@pytest.mark.parametrize("name", SECRETS)
def test_no_parameter_is_shown_that_is_not_known_to_be_harmless(name):
    """Neither in a URL nor in the message of a library that shows a part of it."""
    url = f"https://h/x.tar?part=1&{name}=SECRET%2Fx"
    assert redact(url) == "https://h/x.tar?part=1&..."
    assert "SECRET" not in hide(f"GET /x.tar?part=1&{name}=SECRET%2Fx, or {name} SECRET/x", url)


def test_secrets_of_options_are_hidden_in_messages():
    options = {
        "key": "aws-key",
        "client_kwargs": {"headers": {"Authorization": "Bearer b-token", "X-Other": b"x-other"}},
        "password": 12345678,
        "size": 12345679,
    }
    text = "aws-key, Bearer b-token, b-token, x-other, 12345678, 12345679"
    assert hide(text, options=options) == "..., ..., ..., ..., ..., 12345679"


def signed(url, n):
    """Ways in which a URL can be signed, with other values for each ``n``."""
    return {
        "S3 v4": f"{url}&X-Amz-Algorithm=A{n}&X-Amz-Credential=C{n}&X-Amz-Date={n}&X-Amz-Expires={n}&X-Amz-SignedHeaders=host&X-Amz-Signature=S{n}",  # noqa: E501
        "S3 v4 with a role": f"{url}&X-Amz-Security-Token=T{n}&X-Amz-Signature=S{n}",
        "S3 v2": f"{url}&AWSAccessKeyId=K{n}&Signature=S{n}&Expires={n}",
        "OSS": f"{url}&OSSAccessKeyId=K{n}&Signature=S{n}&Expires={n}",
        "OSS v4": f"{url}&x-oss-date={n}&x-oss-expires={n}&x-oss-signature-version=OSS4&x-oss-credential=C{n}&x-oss-signature=S{n}",  # noqa: E501
        "COS": f"{url}&q-sign-algorithm=sha1&q-ak={n}&q-sign-time={n}&q-key-time={n}&q-header-list=&q-url-param-list=&q-signature=S{n}",  # noqa: E501
        "GCS v4": f"{url}&X-Goog-Algorithm=A&X-Goog-Credential=C{n}&X-Goog-Date={n}&X-Goog-Expires={n}&X-Goog-SignedHeaders=host&X-Goog-Signature=S{n}",  # noqa: E501
        "GCS v2": f"{url}&GoogleAccessId=G{n}&Signature=S{n}&Expires={n}",
        "Azure": f"{url}&sv={n}&ss=b&srt=o&sp=r{n}&st={n}&se={n}&spr=https&sr=b&skoid=o{n}&sktid=t&skt={n}&ske={n}&sks=b&skv={n}&sig=S%2F{n}",  # noqa: E501
        "CloudFront": f"{url}&Policy=P{n}&Signature=S{n}&Key-Pair-Id=K{n}&Expires={n}",
        "Akamai": f"{url}&hdnts=exp={n}~acl=/*~hmac=h{n}",
        "Akamai's path": url.replace("/d/", f"/hdnea=exp={n}~acl=a~hmac=h{n}/d/"),
        "nginx": f"{url}&md5=m{n}&expires={n}",
        "token": f"{url}&access_token=T{n}",
        "path": url.replace("x.tar", f"x.tar;token=T{n}"),
        "fragment": f"{url}#token=T{n}",
        "user": url.replace("://", f"://user:p{n}@"),
    }


def test_a_url_that_is_signed_again_is_the_same():
    """And without a signature too, but for the directory of Akamai's path."""
    url = "https://h/d/x.tar?id=5"
    for (way, one), other in zip(signed(url, 1).items(), signed(url, 22).values(), strict=True):
        assert identify(one) == identify(other), way
        assert identify(one) == (url if way != "Akamai's path" else "https://h//d/x.tar?id=5"), way


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(
            (f"https://h/x.tar?{name}=1", f"https://h/x.tar?{name}=2")
            for name in [
                "id",
                "key",
                "versionId",
                "generation",
                "path",
                "file",
                "code",
                "md5",
                "se",
                "sp",
                "st",
                "sv",
                "policy",
                "page_token",
            ]
        ),
        ("https://h/x.tar?a", "https://h/x.tar?b"),
        ("https://h/x.tar?md5=1&Expires=5&Signature=s", "https://h/x.tar?md5=2&Expires=5&Signature=s"),
        ("https://h/token=1/x.tar", "https://h/token=2/x.tar"),
        ("s3://b/x;token=1.tar", "s3://b/x;token=2.tar"),
        ("s3://b/x#1.tar", "s3://b/x#2.tar"),
        ("abfs://one@account/x.tar", "abfs://other@account/x.tar"),
        ("pipe:cat a.tar", "pipe:cat b.tar"),
        ("a.tar?token=1", "a.tar?token=2"),
    ],
)
def test_what_selects_an_object_tells_it_from_others(one, other):
    assert identify(one) != identify(other)


def test_long_texts_are_looked_through_in_linear_time():
    """Whatever they are made of; with time in proportion to the square, each of these would take
    minutes.
    """
    code = """
        from wds_pipes.io.urls import hide
        for part in ("a", "a.", "a://", "://", "a;", "a=", "https://u:", "a@", "http::", "?a&", "%3b", " a://b"):
            hide(part * (150_000 // len(part)))
            text = "https://" + part * (50_000 // len(part))
            hide(text, text)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=100, check=True)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("a.tar", "a.tar"),
        ("/a b#c?d%20.tar", "/a b#c?d%20.tar"),
        ("file:///a.tar", "/a.tar"),
        ("file:/a.tar", "/a.tar"),
        ("file:a.tar", "a.tar"),
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


def test_the_home_directory(tmp_path, monkeypatch):
    """Where a shell would replace it; but a file of this name is taken as it is."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    with wp.ShardWriter("~/x-%06d.tar", max_samples=2, index="~/index.json") as writer:
        for key in "abc":
            writer.write({"__key__": key, "txt": key})
    names = [str(tmp_path / "home" / f"x-00000{number}.tar") for number in range(2)]
    (tmp_path / "home" / "list.txt").write_text("~/x-000001.tar\n")
    for urls in ("~/*.tar", Path("~/x-*.tar"), "~/x-{000000..000001}.tar", "~", "~/index.json"):
        assert expand(urls) == (names if not str(urls).endswith("json") else [str(tmp_path / "home" / "index.json")])
    assert expand("@~/list.txt") == names[1:]
    for index in ("~/index.json", "~/"):
        assert list(wp.ShardList("~/x-*.tar", index=index)._stream.stage.samples) == [2, 1]
    loader = wp.PipeLoader(wp.ShardList("~/*.tar").open_shards().load_tar().group_by_key(), batch_size=1)
    next(iter(loader))
    assert checkpoint.save("~/run", loader).parent == tmp_path / "home" / "run"
    assert checkpoint.load("~/run", loader) is not None
    Path("~").mkdir()
    assert expand("~/y.tar") == [str(tmp_path / "home" / "y.tar")]
    Path("~/y.tar").write_bytes(b"")
    assert expand("~/y.tar") == ["~/y.tar"]
