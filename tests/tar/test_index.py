"""Making an index of shards: what it says, who can read it, and what happens where a shard is
bad.
"""

import gzip
import hashlib
import io
import json
import os
import re
import threading
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import memory_below
from tars import fill, pairs, put, samples, tar

from wds_pipes.cli import main
from wds_pipes.errors import SampleError, ShardError
from wds_pipes.stages import ShardList
from wds_pipes.tar import ShardFacts, ShardWriter, index_shards
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
    """Samples, bytes and MD5 of each, in order, as given back and as written; told of one by
    one.
    """
    told = []
    found = index_shards(urls, tmp_path / "index.json", jobs=3, on_shard=lambda url, facts: told.append((url, facts)))
    assert list(found) == urls
    assert found == {url: true_facts(url) for url in urls}
    assert [facts.samples for facts in found.values()] == [3, 0, 5, 2, 4]
    assert told == list(found.items())
    assert [
        (entry["url"], *(entry[name] for name in ("nsamples", "filesize", "md5sum")))
        for entry in written(tmp_path / "index.json")
    ] == [(os.path.abspath(url), *facts) for url, facts in found.items()]
    assert list(ShardList(urls, index=tmp_path / "index.json").facts) == list(found.values())
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


COMPRESS = {
    "plain": bytes,
    "two gz": lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]),
}


@pytest.mark.parametrize("compress", COMPRESS.values(), ids=COMPRESS)
def test_compressed_shards(compress, tmp_path):
    """The samples are those in it, bytes and MD5 those that are stored."""
    url = put(tmp_path / "a.tar", compress(tar(pairs(30))))
    assert index_shards(url) == {url: true_facts(url)}
    assert index_shards(url)[url].samples == 30


NAMES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "d/", "d.e/", "./", "__meta__/", "."]),
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["", ".", ".x", ".X", ".y", ".x.y"]),
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(NAMES, max_size=12),
    st.sampled_from(["first-dot", "last-dot", "folder"]),
    st.sampled_from(["raise", "ignore"]),
)
@pytest.mark.filterwarnings("ignore:.*none makes a sample:wds_pipes.ShardWarning")
def test_it_counts_as_the_pipeline_does(tmp_path, names, key_split, on_repeated_key):
    """Whatever the names; and what the pipeline refuses is refused."""
    url = put(tmp_path / "a.tar", tar((name, b"data" * 300) for name in names))
    options = {"key_split": key_split, "on_repeated_key": on_repeated_key}
    by_pipeline = outcome(lambda: len(samples([url], **options)))
    assert outcome(lambda: index_shards(url, **options)[url].samples) == by_pipeline


def outcome(call):
    """What a call gives, or what its error tells."""
    try:
        return call()
    except SampleError as error:  # without a place: there is no sample
        return (error.url, error.key, error.offset) if error.url else 0


def test_all_bytes_of_joined_archives_count(tmp_path):
    """In the size and the MD5, which are of the whole file."""
    url = put(tmp_path / "a.tar", tar(pairs(2)) + tar([("b.txt", b"")]) + bytes(6000 * 512))
    with pytest.raises(ShardError, match="concatenated=True"):
        index_shards(url)
    facts = index_shards(url, concatenated=True)[url]
    assert facts == (3, os.path.getsize(url), hashlib.md5(Path(url).read_bytes()).hexdigest())


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


def test_a_damaged_shard_is_an_error_and_no_index_appears(tmp_path):
    good = make_shards(tmp_path / "data", shards=3, samples=2)
    bad = put(tmp_path / "bad.tar", tar(pairs(3))[:1400])
    with pytest.raises(ShardError, match="is cut inside") as told:
        index_shards([*good, bad], tmp_path / "index.json")
    assert told.value.url == bad
    assert sorted(os.listdir(tmp_path)) == ["bad.tar", "data"]


def test_an_error_ends_the_other_readers(tmp_path):
    """They do not read their shards to the end."""

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

    block, started = tar([("__meta__/a.x", b"")])[:512], threading.Event()
    fsspec.register_implementation("endless", EndlessFileSystem, clobber=True)
    with pytest.raises(ShardError, match="missing.tar does not exist"):
        index_shards(["endless://missing.tar", "endless://a.tar"], jobs=2)


def test_remote_shards(urls, counted, tmp_path):
    """Each byte is read once, and they are named in full."""
    remote = [f"counted://{url}" for url in urls]
    found = index_shards(remote, tmp_path / "index.json")
    assert list(found.values()) == [true_facts(url) for url in urls]
    assert sum(count for _, count in counted) == sum(os.path.getsize(url) for url in urls)
    assert [entry["url"] for entry in written(tmp_path / "index.json")] == remote


def test_secrets_are_not_written(tmp_path):
    """Neither of the user's part nor of the query."""
    from wds_pipes.tar.index import Entry, write_index

    one = Entry(ShardFacts(1))
    write_index(
        str(tmp_path / "i.json"),
        {"s3://user:secret@b/x.tar": one, "https://h/y.tar?X-Amz-Signature=secret&v=1": one},
    )
    assert "secret" not in (tmp_path / "i.json").read_text()
    with pytest.raises(ValueError, match="two shards have one name without the credentials"):
        write_index(str(tmp_path / "i.json"), {f"https://h/y.tar?code={code}": one for code in range(2)})


NAMES_OF_FILES = ["a b.tar", "a#1?x=2.tar", "%20.tar", "{a,b}.tar", "a[1].tar", "\N{SNOWMAN}.tar", "\udcff.tar"]


def test_any_file_name_comes_back(tmp_path, monkeypatch):
    """From the index alone, as it was."""
    for place, name in enumerate(NAMES_OF_FILES):
        writer = fill(
            ShardWriter(tmp_path / f"{place}-%d.tar"),
            ({"__key__": str(number), "txt": ""} for number in range(place + 1)),
        )
        os.rename(next(iter(writer.shards)), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    found = index_shards([Path(name) for name in NAMES_OF_FILES], "index.json")
    assert [facts.samples for facts in found.values()] == list(range(1, 8))
    stage = ShardList("index.json")
    assert (list(stage.urls), list(stage.facts)) == (NAMES_OF_FILES, list(found.values()))


def test_a_name_with_a_nul_is_an_error_of_its_index(tmp_path):
    """As of any name that no file can have; the system raises another error for each use."""
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": [{"url": "a\0b.tar", "nsamples": 3}]}))
    with pytest.raises(ValueError, match="index .*index.json cannot be used: .* is no name of a file"):
        ShardList(tmp_path / "index.json")


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
        ({"jobs": "2"}, TypeError, "jobs must be an int, not '2'"),
        ({"offsets": 1}, TypeError, "offsets= is True, False or a directory, not 1"),
        ({"output": 3}, TypeError, "an index is named by a path, not 3"),
        ({"urls": {"a.tar"}}, TypeError, r"pass sorted\(urls\)"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        index_shards(**{"urls": "a.tar", **options})


# The writer


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


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.tar", "-o", "i.json"], "Error: shard no.tar does not exist"),
        (["*.tar", "-o", "i.json"], "no shard matches"),
        (["a.tar"], "pass -o index.json, or --offsets"),
        (["*.tar", "-o", "to/b.tar"], "to/b.tar is the name of a shard: name the index, such as index.json"),
        ([], "URLS"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["index", *arguments])
    assert result.exit_code == 2  # as of all commands that are not called rightly
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


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
