"""Making an index of shards: what it says, who can read it, and what happens where a shard is bad.
Indexing again: only new and changed shards are read, and what is written is as from new.
"""

import gzip
import hashlib
import io
import json
import os
import re
import sys
import threading
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner
from memory import memory_below
from remote import content
from tars import fill, pairs, put, samples, tar

from wds_pipes.cli import main
from wds_pipes.errors import SampleError, ShardError
from wds_pipes.stages import ShardList
from wds_pipes.tar import ShardFacts, ShardWriter, index_shards
from wds_pipes.tar.index import Entry, write_index
from wds_pipes.testing import make_shards


def true_facts(url: str) -> ShardFacts:
    """By the pipeline and the standard library."""
    data = Path(url).read_bytes()
    return ShardFacts(len(samples([url])), len(data), hashlib.md5(data).hexdigest())


def written(path) -> list[dict]:
    content = json.loads(Path(path).read_text())
    assert (content["__kind__"], content["wids_version"]) == ("wids-shard-index-v1", 1)
    return content["shardlist"]


def test_it_says_what_is_there(urls, tmp_path):
    """Samples, bytes and MD5 of each, in order, as returned and as written; told of one by one."""
    told, output = [], tmp_path / "index.json"
    found = index_shards(urls, output, jobs=3, on_shard=lambda url, facts: told.append((url, facts)))
    assert list(found) == urls
    assert found == {url: true_facts(url) for url in urls}
    assert [facts.samples for facts in found.values()] == [3, 0, 5, 2, 4]
    assert told == list(found.items())
    columns = [[entry[name] for name in ("url", "nsamples", "filesize", "md5sum")] for entry in written(output)]
    assert columns == [[os.path.abspath(url), *facts] for url, facts in found.items()]
    assert list(ShardList(urls, index=output).facts) == list(found.values())
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_the_wids_package_reads_it(tmp_path):
    """The package whose form this is."""
    wids = pytest.importorskip("wids")
    urls = make_shards(tmp_path / "data", shards=3, samples=[3, 5, 2])
    index_shards(urls, tmp_path / "data" / "index.json")
    writer = fill(
        ShardWriter(tmp_path / "data" / "more-%d.tar", max_samples=2, index=tmp_path / "data" / "index.json"),
        ({"__key__": f"more-{number}", "txt": str(number)} for number in range(3)),
    )
    dataset = wids.ShardListDataset(
        str(tmp_path / "data" / "index.json"), transformations=[], cache_dir=str(tmp_path / "cache")
    )
    try:
        keys = [dataset[place]["__key__"] for place in range(len(dataset))]
    finally:
        dataset.close()
    assert keys == [sample["__key__"] for sample in samples([*urls, *writer.shards])]


@pytest.mark.parametrize("options", [{}, {"concatenated": True}])
def test_all_stored_bytes_count(options, tmp_path):
    """In the size and the MD5: of compressed shards, and of joined archives."""
    data = tar(pairs(2)) + tar([("b.txt", b"")]) + bytes(6000 * 512) if options else gzip.compress(tar(pairs(3)))
    url = put(tmp_path / "a.tar", data)
    assert index_shards(url, **options)[url] == (3, len(data), hashlib.md5(data).hexdigest())


def test_a_large_member_takes_no_memory(tmp_path):
    """It is read in pieces."""
    url = put(tmp_path / "a.tar", tar([("a.bin", bytes(50_000_000))]))
    with memory_below(10_000_000):
        assert index_shards(url)[url].samples == 1


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/fd/0", "fifo.tar", "zero.tar"])
def test_an_index_that_names_no_files(name, tmp_path):
    """They would be read for ever."""
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "zero.tar").symlink_to("/dev/zero")
    (tmp_path / "index.json").write_text(json.dumps({name: 1}))
    with pytest.raises((ShardError, ValueError), match="may not name '/dev/fd/0'|is a device or a pipe"):
        samples([str(tmp_path / "index.json")])


@pytest.mark.parametrize("content", [b'{"hello": 1}', b"notes\n", b"\x00\x01", b'{"shardlist": "milk"}'])
def test_another_file_is_not_replaced(content, tmp_path):
    urls, path = make_shards(tmp_path, shards=2, samples=3), tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.json is another file than an index: name another one"):
        index_shards(urls, path)
    assert path.read_bytes() == content
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="is another file than an index"):
        index_shards(urls, pipe)
    for replaced in (b"", b" \n", b'{"__kind__": "wids-shard-index-v1", "shardl'):
        path.write_bytes(replaced)
        assert len(index_shards(urls, path)) == 2
        assert len(json.loads(path.read_text())["shardlist"]) == 2


def test_an_error_ends_the_other_readers():
    """They do not read their shards to the end, and a remote one that is missing is an error."""
    block, started = tar([("__meta__/a.x", b"")])[:512], threading.Event()

    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            started.set()
            buffer[:] = block * (len(buffer) // len(block)) if len(buffer) % len(block) == 0 else bytes(len(buffer))
            return len(buffer)

    class EndlessFileSystem(fsspec.AbstractFileSystem):
        protocol = "endless"
        cachable = False

        def info(self, path, **options):
            return {"name": path, "size": None, "type": "file"}

        def _open(self, path, mode="rb", **options):
            if path.endswith("missing.tar"):
                assert started.wait(60)
                raise FileNotFoundError(path)
            return Endless()

    fsspec.register_implementation("endless", EndlessFileSystem, clobber=True)
    with pytest.raises(ShardError, match="missing.tar does not exist"):
        index_shards(["endless://missing.tar", "endless://a.tar"], jobs=2)


def test_secrets_are_not_written(tmp_path):
    """Neither of the user's part nor of the query."""
    one, path = Entry(ShardFacts(1)), str(tmp_path / "i.json")
    write_index(path, {"s3://user:secret@b/x.tar": one, "https://h/y.tar?X-Amz-Signature=secret&v=1": one})
    assert "secret" not in content(tmp_path / "i.json").decode()
    with pytest.raises(ValueError, match="two shards have one name without the credentials"):
        write_index(path, {f"https://h/y.tar?code={code}": one for code in range(2)})


NAMES_OF_FILES = ["a b.tar", "a#1?x=2.tar", "%20.tar", "{a,b}.tar", "a[1].tar", "\N{SNOWMAN}.tar", "\udcff.tar"]


def test_any_file_name_comes_back(tmp_path, monkeypatch):
    """From the index alone, as it was; but no file has a name with a NUL."""
    monkeypatch.chdir(tmp_path)
    for place, name in enumerate(NAMES_OF_FILES):
        put(Path(name), tar(pairs(place + 1)))
    found = index_shards([Path(name) for name in NAMES_OF_FILES], "index.json")
    assert [facts.samples for facts in found.values()] == list(range(1, 8))
    stage = ShardList("index.json")
    assert (list(stage.urls), list(stage.facts)) == (NAMES_OF_FILES, list(found.values()))
    Path("index.json").write_text(json.dumps({"shardlist": [{"url": "a\0b.tar", "nsamples": 3}]}))
    with pytest.raises(ValueError, match="index .*index.json cannot be used: .* is no name of a file"):
        ShardList("index.json")


def test_index_and_shards_can_be_moved_together(tmp_path):
    """Names in it are from its own directory; shards elsewhere are named in full."""
    make_shards(tmp_path / "old" / "train", shards=2, samples=3)
    elsewhere = make_shards(tmp_path / "other", shards=1, samples=4)
    index_shards([tmp_path / "old" / "train", *elsewhere], tmp_path / "old" / "index.json")
    (tmp_path / "old").rename(tmp_path / "new")
    assert list(ShardList(tmp_path / "new" / "index.json").urls) == [
        *(f"{tmp_path}/new/train/shard-00000{number}.tar" for number in range(2)),
        *elsewhere,
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"jobs": 0}, ValueError, "jobs must be at least 1"),
        ({"key_split": "dot"}, ValueError, "key_split must be"),
        ({"on_repeated_key": "skip"}, ValueError, "on_repeated_key must be"),
        ({"output": "s3://b/index.json"}, ValueError, "written to a local file"),
        ({"output": "nowhere/index.json"}, ValueError, "make it first"),
        ({"urls": "-"}, ValueError, "write it to a file"),
        ({"urls": []}, ValueError, "empty"),
        ({"offsets": 1}, TypeError, "offsets= is True, False or a directory, not 1"),
        ({"output": 3}, TypeError, "an index is named by a path, not 3"),
        ({"urls": {"a.tar"}}, TypeError, r"pass sorted\(urls\)"),
        ({"urls": "http://127.0.0.1:9/a.tar", "offsets": True}, ValueError, "offsets='DIRECTORY'"),
        ({"urls": "http://127.0.0.1:9/a.tar", "dali": True}, ValueError, "dali='DIRECTORY'"),
        ({"dali": "none"}, ValueError, "an existing local directory"),
        ({"urls": ["a/x.tar", "b/x.tar"], "offsets": "."}, ValueError, "would have one file"),
        ({"urls": "x", "offsets": True, "dali": True}, ValueError, "an index of offsets, and one of DALI"),
    ],
)
def test_wrong_arguments(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x", "a/x.tar", "b/x.tar"):
        Path(name).parent.mkdir(exist_ok=True)
        put(Path(name), tar(pairs(2)))
    with pytest.raises(error, match=message):
        index_shards(**{"urls": "a.tar", **options})


def test_the_writer_writes_it_as_it_goes(tmp_path):
    """At each complete shard it is right, also when the block raises later."""
    index, seen = tmp_path / "index.json", []

    def write(count):
        with ShardWriter(
            tmp_path / "s-%d.tar", max_samples=2, index=index, on_shard=lambda path: seen.append(len(written(index)))
        ) as writer:
            for number in range(count):
                writer.write({"__key__": str(number), "txt": "x" * number * 1000})
                assert index.exists() == (number >= 2)
            raise KeyError

    with pytest.raises(KeyError):
        write(7)
    assert seen == [1, 2, 3]
    stage = ShardList(index)
    assert list(stage.urls) == [str(tmp_path / f"s-{number}.tar") for number in range(3)]
    assert dict(zip(stage.urls, stage.facts, strict=True)) == index_shards(tmp_path / "s-*.tar")


def test_the_writer_refuses_an_index_that_it_would_ruin(tmp_path):
    put(tmp_path / "index.json", b'{"my": ["own", "file"]}')
    with pytest.raises(ValueError, match="index.json cannot be used"):
        ShardWriter(tmp_path / "s-%d.tar", index=tmp_path / "index.json")
    with pytest.raises(ValueError, match="make it first"):
        ShardWriter(tmp_path / "s-%d.tar", index=tmp_path / "no" / "index.json")
    assert (tmp_path / "index.json").read_bytes() == b'{"my": ["own", "file"]}'


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


OTHER = tar(pairs(3, ("abc", "cls")))  # of the size of the shards below


def shards(directory, count=4):
    urls = [put(directory / f"shard-{number:06d}.tar", tar(pairs(3))) for number in range(count)]
    settle(*urls)
    return urls


def indexes(directory):
    endings = (".json", ".idx", ".keys")
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.name.endswith(endings)}


ALL = {"offsets": True, "dali": True}


def test_only_new_and_changed_shards_are_read(tmp_path, opened):
    """Also where a file that belongs to a shard is missing or was changed."""
    urls, output = shards(tmp_path), tmp_path / "index.json"

    def read(*urls, **options):
        """The shards that were read; the result is as from new."""
        opened.clear()
        found, names = index_shards(urls, output, **{**ALL, **options}), sorted(opened)
        assert found == index_shards(urls)
        assert [entry["url"] for entry in written(output)] == list(map(os.path.basename, urls))
        return [name.removesuffix(".tar") for name in names]

    everything = [f"shard-{number:06d}" for number in range(4)]
    put(Path(urls[3]), tar([("a.txt", bytes(999)), *pairs(2)]))
    read(*urls)
    before = content(f"{urls[3]}.idx")
    put(Path(urls[3]), tar(pairs(3)))
    settle(urls[3])
    assert read(*urls, force=True) == everything
    whole = indexes(tmp_path)
    assert before != content(f"{urls[3]}.idx")
    assert len(before) == len(whole["shard-000003.tar.idx"])
    assert read(*urls) == []
    os.unlink(f"{urls[0]}.idx")
    put(Path(f"{urls[1]}.keys"), b"x" * 36)
    put(tmp_path / "shard-000002.idx", b"v1.2 1\n")
    put(Path(f"{urls[3]}.idx"), before)
    assert read(*urls, dali=False) == [*everything[:2], everything[3]]
    assert read(*urls) == everything  # their indexes of DALI are not known any more
    assert indexes(tmp_path) == whole
    put(Path(urls[1]), tar(pairs(30)))
    put(Path(urls[2]), OTHER)
    settle(urls[1])  # the size is another one
    settle(urls[2], seconds=999_999_999)  # the time is another one, even an older one
    new = put(tmp_path / "x.tar", tar(pairs(2)))
    settle(new)
    assert read(*urls[1:], new) == ["shard-000001", "shard-000002", "x"]
    with ShardWriter(tmp_path / "shard-{:06d}.tar", start=3, index=output, overwrite=True) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    settle(urls[3])
    assert read(*urls[1:], new) == everything[3:]
    assert read(*urls[1:], new, force=True) == [*everything[1:], "x"]
    (tmp_path / "elsewhere").mkdir()
    assert len(read(*urls, offsets=tmp_path / "elsewhere")) == 4, "they are not there"


def test_what_is_in_doubt_is_read(tmp_path, opened):
    """A shard that was written just now, an index of another program, other rules."""
    urls, output = shards(tmp_path), tmp_path / "index.json"

    def read(**options):
        opened.clear()
        index_shards(urls, output, **options)
        return len(opened)

    os.utime(urls[0])
    assert (read(), read()) == (4, 1)
    settle(urls[0])
    read()
    for options in ({"key_split": "last-dot"}, {}, {"key_split": lambda name: (name, "x")}, {}):
        assert read(**options) == 4, options
    listing = json.loads(output.read_text())
    for entry in listing["shardlist"]:
        entry.pop("version")
    for other in (json.dumps(listing), '{"shardlist": []}', '{"shardlist": [1]}', '{"shardlist": [{"url": []}]}'):
        output.write_text(other)
        assert read() == 4, other
    put(Path(urls[0]), tar((name, b"") for name in ("a.x", "b.x", "a.x")))
    assert read(on_repeated_key="ignore")
    with pytest.raises(SampleError, match="on_repeated_key='ignore'"):
        read()


def test_a_run_that_fails_leaves_whole_files(tmp_path, opened):
    """The next one goes on from the index before it. None appears of a damaged shard."""
    urls, output = shards(tmp_path), tmp_path / "index.json"
    index_shards(urls, output, **ALL)
    before, bad = indexes(tmp_path), put(tmp_path / "z.tar", tar(pairs(9))[:3000])
    for place in (output, tmp_path / "new.json"):
        with pytest.raises(ShardError, match="is cut inside") as told:
            index_shards([*urls, bad], place, **ALL, force=True)
        assert told.value.url == bad
    assert indexes(tmp_path) == before
    assert not list(tmp_path.glob(".*"))
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


@pytest.mark.parametrize("remote", ["s3"], indirect=True)
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
    remote.put("d/shard-000001.tar", OTHER)
    remote.faults.clear()
    second = index_shards(far, folder / "index.json", **options)
    reads = [request.path for request in remote.faults.stats(remote.reads) if request.sent]
    assert reads
    assert all("shard-000001.tar" in path for path in reads)
    assert [second[url] == first[url] for url in far] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "data", "message", "code"),
    [
        ("a.tar.gz", gzip.compress(tar(pairs(2))), "is compressed, .* unpack it, for example with gunzip", 2),
        (
            "a.tar",
            tar((name, b"") for name in ("a.x", "b.x", "a.y")),
            "wds-pipes repair SHARD NEW .*--on-repeated-key",
            1,
        ),
        ("a.tar", tar((name, b"") for name in ("a.x", "a.x")), "has field 'x' twice .* Rename or remove one", 1),
        ("a.tar", tar((name, b"") for name in ("a.x", "a.__key__")), "has the reserved field name '__key__'", 1),
    ],
    ids=["compressed", "unsorted", "a field twice", "a reserved name"],
)
def test_what_has_no_offsets_is_said_in_words(name, data, message, code, tmp_path):
    """And the command that helps; nothing is written."""
    put(tmp_path / name, data)
    result = CliRunner().invoke(main, ["index", str(tmp_path / name), "--offsets"])
    assert result.exit_code == code
    assert re.search(message, result.stderr)
    assert os.listdir(tmp_path) == [name]


def test_the_command(tmp_path, monkeypatch, opened):
    shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["index", "*.tar", "-o", "index.json", "--offsets-to", ".", "--dali"]
    for more, count in (([], 4), (["-j", "2"], 0), (["--force"], 4)):
        opened.clear()
        result = CliRunner().invoke(main, [*arguments, *more])
        assert (result.exit_code, result.stderr, len(opened)) == (0, "", count)
        assert result.stdout.startswith("index.json: 4 shards, 12 samples")
    assert os.path.getsize("shard-000000.idx")
    assert os.path.getsize("shard-000000.tar.idx") == 32
    told = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    facts = index_shards("shard-000002.tar")["shard-000002.tar"]
    assert (told["command"], list(told["facts"].values())[2]) == ("index", facts._asdict())
    assert "4/4" in CliRunner().invoke(main, [*arguments, "--progress"]).stderr
    os.mkdir("to")
    result = CliRunner().invoke(main, ["index", "*.tar", "--dali-to", "to"])
    assert result.stdout.startswith("indexes of DALI: 4 shards")
    assert sorted(os.listdir("to")) == [f"shard-{number:06d}.idx" for number in range(4)]
