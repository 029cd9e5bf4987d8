"""What TarWriter and ShardWriter write, refuse and leave behind."""

import bz2
import dis
import errno
import gc
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from tars import by_reader, by_tarfile, by_webdataset, fill, samples

from wds_pipes import (
    CacheError,
    IndexedShards,
    SampleError,
    ShardError,
    ShardList,
    ShardWarning,
    ShardWriter,
    StateError,
    TarWriter,
)
from wds_pipes.codecs.codec import PACKED
from wds_pipes.codecs.table import encode
from wds_pipes.tar import index_shards, split_key
from wds_pipes.tar.keys import is_metadata

GOLDEN = "47a2ed20336a15709acd5e8c3a972f21d5d44cb147ae6c79c979292deadf7554"
HUNDRED = [{"__key__": f"{number:06d}", "txt": f"text {number}", "cls": number % 10} for number in range(100)]


def written(items) -> bytes:
    """The tar of some samples."""
    file = io.BytesIO()
    fill(TarWriter(file), items)
    return file.getvalue()


def keys(urls) -> list[str]:
    """The keys of the samples in shards."""
    return [sample["__key__"] for sample in ShardList(urls).open_shards().load_tar().group_by_key()]


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def write_and_fail(writer, items) -> None:
    with writer:
        for item in items:
            writer.write(item)
        raise KeyError


# What is written


def test_the_same_samples_give_the_same_bytes_and_no_more_than_needed():
    """512 bytes of header a member; golden: a change of one byte changes everybody's shards."""
    data = written(HUNDRED)
    assert len(data) == 215_040
    assert data == written([dict(reversed(sample.items())) for sample in HUNDRED])
    assert hashlib.sha256(data).hexdigest() == GOLDEN


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("n" * 96, 1),  # 100 with .txt
        ("n" * 97, 3),
        ("d" * 155 + "/" + "n" * 96, 1),
        ("d" * 156 + "/" + "n" * 96, 3),
        ("ü" * 48, 1),
        ("ü" * 49, 3),
        ("\udcff\udcfe", 1),
        ("n" * 3000, 8),
        # tarfile splits these at the slash at their start, which would be lost
        ("/" + "k" * 94 + "é", 3),
        ("//" + "k" * 98 + "é", 3),
        ("/d/" + "k" * 99 + "é", 3),
    ],
)
def test_a_pax_header_only_where_the_name_does_not_fit(tmp_path, key, headers):
    """100 bytes, or 155 and 100 around a slash; others read both."""
    path = tmp_path / "x.tar"
    with TarWriter(path) as writer:
        writer.write({"__key__": key, "txt": b""})
        assert writer.size == 512 * headers
    assert by_tarfile(path) == by_reader(path.read_bytes()) == [(f"{key}.txt", b"")]


def test_values_are_encoded_by_their_field(tmp_path):
    """And webdataset reads the same. What begins and ends with two underscores is left out."""
    image = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    fields = {
        "txt": "größe",
        "json": {"x": [1, None, "ü"]},
        "npy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "seg.png": Image.fromarray(image[..., 0]),
        "jpg": b"not touched",
        "bin": bytearray(b"xy"),
        "mem": memoryview(b"z"),
        "__mask.png": b"2",
    }
    path = tmp_path / "x.tar"
    path.write_bytes(written([{"__key__": "a", "__url__": "left out", "__local_path__": "/x", **fields}]))
    (read,) = samples([str(path)])
    assert {name: read[name] for name in fields} == {name: encode(name, value) for name, value in fields.items()}
    assert read.keys() == {"__key__", "__url__", *fields}
    assert by_webdataset(path) == [read]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"txt": "x"}, "needs a '__key__' that is a string, not None; it has: txt"),
        ({"__key__": 7, "txt": "x"}, "needs a '__key__' that is a string, not 7"),
        ({"__key__": "", "txt": "x"}, "needs a '__key__'"),
        ({"__key__": "v1.0/a.b", "txt": "x"}, "write it as 'v1.0/a_b'"),
        ({"__key__": ".a", "txt": "x"}, "write it as '_a'"),
        ({"__key__": "dir/", "txt": "x"}, "must not end with '/'"),
        ({"__key__": "__x__/a", "txt": "x"}, "double underscores are kept for metadata"),
        ({"__key__": "a", "JPG": b"x"}, "write 'jpg'"),
        ({"__key__": "a", "cls": 1, "Cls": 2}, "write 'cls'"),
        ({"__key__": "a", "": b"x"}, "a field must not be empty"),
        ({"__key__": "a", "x/y": b"x"}, "a field must not be empty or hold '/'"),
        ({"__key__": "a", 1: b"x"}, "a field's name is a string"),
        ({"__key__": "a\0b", "txt": "x"}, "names hold no NUL"),
        ({"__key__": "a", "t\0xt": b"x"}, "names hold no NUL"),
        ({"__key__": "\ud800", "txt": "x"}, "nothing that UTF-8 cannot write"),
        ({"__key__": "\udcc3\udca9", "txt": "x"}, "nothing that UTF-8 cannot write"),
        ({"__key__": "a"}, "has no fields"),
        ({"__key__": "a", "__url__": "x"}, "has no fields"),
        ({"__key__": "a", "txt": 5}, "field 'txt' of sample 'a' cannot be encoded: text must be str, not int"),
        ({"__key__": "a", "xyz": "text"}, "there is no encoder for 'xyz' and str: pass bytes (text.encode())"),
        ({"__key__": "a", "json": "{1}"}, "this one does not parse (Expecting property name"),
        ({"__key__": "a", "jsonl": "{}\n{1}"}, "this one does not parse"),
        ({"__key__": "a", "jsonl": {"a": 1}}, "it must be a list of objects"),
        ({"__key__": "a", "txt.gz": b"text"}, "its bytes are not compressed as gz, which its name promises"),
        ({"__key__": "a", "txt.xz.gz": lzma.compress(b"")}, "its bytes are not compressed as gz"),
        ({"__key__": "a", "txt.gz.gz.gz": "text"}, "packed more than 2 times"),
        ({"__key__": "good", "txt": "x"}, "key 'good' was written to this shard before"),
        ({"__key__": "n" * (1 << 20), "txt": "x"}, "needs more than 1 MiB of headers"),
        ({"__key__": "a", "n" * (1 << 20): b"x"}, "needs more than 1 MiB of headers"),
    ],
)
def test_what_would_not_read_back_is_refused_with_the_mend(sample, message):
    """Nothing of it is written, and the writer goes on."""
    good, key, file = {"__key__": "good", "txt": "2"}, sample.get("__key__"), io.BytesIO()
    with TarWriter(file) as writer:
        writer.write(good)
        with pytest.raises(SampleError) as caught:
            writer.write(sample)
        assert message in str(caught.value)
        assert len(str(caught.value)) < 1000
        assert caught.value.key == (key[:1000] if isinstance(key, str) and key else None)
        writer.write({"__key__": "last", "txt": "3"})
        assert writer.samples == 2
    assert file.getvalue() == written([good, {"__key__": "last", "txt": "3"}])


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=150), st.text(max_size=20), st.binary(max_size=1200))
def test_any_name_is_either_refused_or_reads_back(key, field, content):
    """By us and by the standard library; no other exception, and no name that becomes another."""
    assume(not is_metadata(field) and field.rpartition(".")[2] not in PACKED)
    try:
        data = written([{"__key__": key, field: content}])
    except SampleError:
        assert split_key(f"{key}.{field}") != (key, field) or "\0" in key + field or not field
        return
    assert by_reader(data) == by_tarfile(data) == [(f"{key}.{field}", content)]
    assert split_key(f"{key}.{field}") == (key, field)


def test_a_name_of_almost_the_most_headers_reads_back():
    key = "n" * ((1 << 20) - 2000)
    assert by_reader(written([{"__key__": key, "txt": b"x"}])) == [(f"{key}.txt", b"x")]


UNPACK = {
    "gz": gzip.decompress,
    "tgz": gzip.decompress,
    "bz2": bz2.decompress,
    "TXZ": lzma.decompress,
    "zst": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
}


@pytest.mark.parametrize("ending", UNPACK)
def test_a_name_that_promises_compression_gets_it(tmp_path, ending):
    """The tar inside is the same, nothing of the moment or the path gets in, and the index has
    the size and the MD5 of the file.
    """
    for folder in "ab":
        (tmp_path / folder).mkdir()
        index = tmp_path / folder / "index.json"
        writer = fill(ShardWriter(tmp_path / folder / f"s-%d.tar.{ending}", max_samples=60, index=index), HUNDRED)
    assert list(writer.shards.values()) == [60, 40]
    entries = json.loads(index.read_text())["shardlist"]
    facts = index_shards(list(writer.shards)).values()
    assert [(entry["nsamples"], entry["filesize"], entry["md5sum"]) for entry in entries] == list(facts)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert UNPACK[ending]((tmp_path / "a" / f"s-0.tar.{ending}").read_bytes()) == written(HUNDRED[:60])


# Where, and when it appears


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("https://user:secret@host/x-%d.tar", ValueError, "nothing is written to 'https://host/x-%d.tar', for"),
        ("ais://bucket/x-%d.tar", ValueError, "write to a local directory or to a store, such as s3://"),
        ("simplecache::s3://bucket/x-%d.tar", ValueError, "a chain of protocols"),
        (Path("s3://bucket/x-%d.tar"), ValueError, "a '/' is missing in 's3://bucket/x-%d.tar', which a pathlib.Path"),
        (Path("https://user:secret@host/x-%d.tar?sig=secret"), ValueError, "missing in 'https://host/x-%d.tar?...'"),
        ("", ValueError, "this path is empty"),
        ("${NO_SUCH_VARIABLE}/x-%d.tar", ValueError, "the environment variable NO_SUCH_VARIABLE is not set"),
        ("pipe:cat > secret-%d.tar", ValueError, "nothing is written to 'pipe:cat ...'"),
        ("x-%d.tar.lz4", ValueError, "not written as .lz4, which is not read either"),
        ("x-%d.zip", ValueError, "not written as .zip"),
        ("-", ValueError, "sys.stdout.buffer"),
    ],
)
def test_a_target_that_takes_no_tar_is_refused_at_once(tmp_path, monkeypatch, target, error, message):
    """Not written under an odd name, or in another format than the name says."""
    monkeypatch.chdir(tmp_path)
    for make in (TarWriter, ShardWriter):
        with pytest.raises(error, match=re.escape(message)):
            make(target)
    assert os.listdir(tmp_path) == []


def test_a_stream_or_a_url_of_a_file_is_written_to(tmp_path):
    """A local stream of fsspec also has a path, and is a stream; what opens it is none."""
    with pytest.raises(TypeError, match="a path or an open binary stream"):
        TarWriter(fsspec.open(f"{tmp_path}/x.tar", "wb"))
    with fsspec.open(f"{tmp_path}/x.tar", "wb") as stream:
        fill(TarWriter(stream), HUNDRED[:1])
    fill(TarWriter(f"file://{tmp_path}/y.tar"), HUNDRED[:1])
    assert contents(tmp_path) == dict.fromkeys(["x.tar", "y.tar"], written(HUNDRED[:1]))


def test_a_file_appears_when_it_is_complete(tmp_path):
    """An older one of this name stays until then, and if the block raises. What a killed process
    leaves is overwritten, and a second writer excluded.
    """
    path, partial = tmp_path / "x.tar", tmp_path / ".x.tar.partial"
    path.write_bytes(b"older")
    with pytest.raises(KeyError):
        write_and_fail(TarWriter(path, overwrite=True), HUNDRED[:1])
    partial.write_bytes(b"of a process that was killed" * 1000)
    with TarWriter(path, overwrite=True) as writer:
        writer.write(HUNDRED[0])
        assert sorted(os.listdir(tmp_path)) == [".x.tar.partial", "x.tar"]
        with pytest.raises(BlockingIOError, match="another writer"):
            TarWriter(path, overwrite=True)
        assert path.read_bytes() == b"older"
        writer.close()
        with pytest.raises(ValueError, match="closed"):
            writer.write(HUNDRED[1])
    writer.close()
    writer.discard()
    assert contents(tmp_path) == {"x.tar": written(HUNDRED[:1])}


def test_what_is_there_is_not_replaced_unless_it_is_allowed(tmp_path):
    """A tar, a first shard, a later shard, and one that comes while it is written."""
    older = {"late.tar": b"older", "s-0.tar": written(HUNDRED[:1]), "s-1.tar": b"older"}
    (tmp_path / "s-1.tar").write_bytes(b"older")
    writer, late = ShardWriter(tmp_path / "s-%d.tar", max_samples=1), TarWriter(tmp_path / "late.tar")
    for one in (writer, late):
        one.write(HUNDRED[0])
    (tmp_path / "late.tar").write_bytes(b"older")
    for call in (
        lambda: TarWriter(tmp_path / "s-1.tar"),
        lambda: ShardWriter(tmp_path / "s-%d.tar", start=1),
        lambda: writer.write(HUNDRED[1]),
        lambda: writer.write(HUNDRED[1]),
        late.close,
    ):
        with pytest.raises(FileExistsError, match="overwrite=True"):
            call()
    writer.close()
    with pytest.raises(FileExistsError, match="pass start=2 to append"):
        ShardWriter(tmp_path / "s-%d.tar")
    assert (list(writer.shards), writer.samples) == ([str(tmp_path / "s-0.tar")], 1)
    assert contents(tmp_path) == older
    fill(ShardWriter(tmp_path / "s-%d.tar", max_samples=1, overwrite=True), HUNDRED[:2])
    assert contents(tmp_path) == {**older, "s-1.tar": written(HUNDRED[1:2])}


# After these, Python runs the handlers of signals.
HANDLING = {dis.opmap.get(name) for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")} - {None}


def interrupted(number, call):
    """Call a function and raise KeyboardInterrupt, as the handler of a signal may, at the Nth
    moment at which its files on the disk may get a signal: whether there were so many.
    """
    left, before_this = number, {}

    def step(frame, event, _):
        nonlocal left
        if event == "opcode":
            here = frame.f_code.co_code[frame.f_lasti]
            handles = before_this.get(id(frame)) in HANDLING and here != dis.opmap["RETURN_VALUE"]
            before_this[id(frame)] = here
            left -= handles
            if handles and left < 0:
                raise KeyboardInterrupt  # which also ends the tracing
        return step

    def at_call(frame, *_):
        name = frame.f_globals.get("__name__")
        frame.f_trace_opcodes = name in ("wds_pipes.io.locks", "wds_pipes.io.outputs")
        return step if frame.f_trace_opcodes and frame.f_code.co_name not in ("__del__", "_remove_unused") else None

    before = sys.gettrace()
    gc.disable()  # what it removes would be interrupted too
    sys.settrace(at_call)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def test_a_signal_at_any_moment_leaves_no_half_shard(tmp_path):
    """Also when the file is there and the writer does not know it yet."""

    def write():
        with TarWriter(tmp_path / "x.tar", overwrite=True):
            pass

    write()
    number = 0
    while interrupted(number, write):
        assert os.listdir(tmp_path) == ["x.tar"], number
        number += 1
    assert number > 10  # Python 3.13 has fewer such moments than 3.11


def test_a_writer_that_is_forgotten_leaves_nothing(tmp_path):
    """As one that raised, and it says so."""
    shards = ShardWriter(str(tmp_path / "x-%d.tar"), max_samples=2)
    for sample in HUNDRED[:3]:
        shards.write(sample)
    with pytest.warns(ShardWarning, match=r"writer of .*x-1.tar was not closed, and threw away 1 sample: use it in"):
        del shards
    assert os.listdir(tmp_path) == ["x-0.tar"]


def test_a_forked_process_does_not_touch_the_shard_of_its_parent(tmp_path):
    writer = TarWriter(tmp_path / "x.tar")
    writer.write(HUNDRED[0])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            writer.write(HUNDRED[1])
        except ValueError:
            writer.discard()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    writer.write(HUNDRED[2])
    writer.close()
    assert (tmp_path / "x.tar").read_bytes() == written([HUNDRED[0], HUNDRED[2]])


# Shards


@pytest.mark.parametrize("pattern", ["s-%02d.tar", "s-{:02d}.tar"])
@pytest.mark.parametrize(("count", "expected"), [(7, [3, 3, 1]), (6, [3, 3]), (0, [])])
def test_shards_are_full_and_none_is_empty(tmp_path, pattern, count, expected):
    """Other signs of the kind in the path stay."""
    folder, done = tmp_path / "my%20{x} 7%", []
    folder.mkdir()
    writer = fill(ShardWriter(folder / pattern, max_samples=3, start=5, on_shard=done.append), HUNDRED[:count])
    paths = [str(folder / f"s-{number + 5:02d}.tar") for number in range(len(expected))]
    assert writer.shards == dict(zip(paths, expected, strict=True))
    assert sorted(os.listdir(folder)) == list(map(os.path.basename, paths))
    assert (done, writer.samples) == (paths, count)
    assert (keys(paths) if paths else []) == [sample["__key__"] for sample in HUNDRED[:count]]


@pytest.mark.parametrize("max_bytes", [10_240, 25_000, 40_960])
def test_no_shard_is_larger_than_max_bytes(tmp_path, max_bytes):
    """As the file is on the disk, filled up to its record, or would be before compression; a sample
    that is larger by itself has a shard of its own.
    """
    counts = []
    for ending in ("tar", "tar.gz"):
        with ShardWriter(tmp_path / f"s-{{}}.{ending}", max_bytes=max_bytes) as writer:
            for number in range(60):
                writer.write({"__key__": str(number), "bin": bytes(number * 97)})
            writer.write({"__key__": "huge", "bin": bytes(100_000)})
            writer.write({"__key__": "after", "bin": b""})
        counts.append(list(writer.shards.values()))
    *sizes, huge, _ = [os.path.getsize(tmp_path / f"s-{number}.tar") for number in range(len(counts[0]))]
    assert max(sizes) <= max_bytes < huge
    assert counts[0] == counts[1]
    assert (counts[0][-2:], sum(counts[0])) == ([1, 1], 62)
    assert len(sizes) <= 60 * 97 * 60 // 2 // max_bytes * 2 + 2


def test_samples_in_other_shards_may_have_one_key_and_a_refused_sample_makes_no_shard(tmp_path):
    with ShardWriter(tmp_path / "s-%d.tar", max_samples=1) as writer:
        for sample in HUNDRED[:1] * 2:
            writer.write(sample)
        with pytest.raises(SampleError):
            writer.write({"__key__": "a.b", "txt": "x"})
    assert contents(tmp_path) == dict.fromkeys(["s-0.tar", "s-1.tar"], written(HUNDRED[:1]))


@pytest.mark.parametrize(
    ("pattern", "index", "again"),
    [
        ("data/%d.tar", "meta/index.json", "resume"),
        ("./data/%d.tar", "data/index.json", "overwrite"),
        ("{here}/data/%d.tar", "data/index.json", "resume"),
        ("data/%d.tar", "{here}/data/index.json", "overwrite"),
        ("data//%d.tar", "data/index.json", "resume"),
    ],
)
def test_an_index_is_written_again_however_paths_are_spelled(pattern, index, again, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "meta").mkdir()
    pattern, index = pattern.format(here=tmp_path), index.format(here=tmp_path)
    for count, options in ((4, {}), (6, {again: True})):
        fill(ShardWriter(pattern, max_samples=2, index=index, **options), HUNDRED[:count])
    assert keys(index) == [sample["__key__"] for sample in HUNDRED[:6]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pattern": "s.tar"}, ValueError, "one place for the shard's number"),
        ({"pattern": "s-%d-%d.tar"}, ValueError, "one place for the shard's number"),
        ({"pattern": "s-%s.tar"}, ValueError, "one place for the shard's number"),
        ({"max_samples": 2.5}, TypeError, "max_samples must be an int, not 2.5"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1, not 0"),
        ({"start": -1}, ValueError, "start must be at least 0, not -1"),
        ({"on_shard": 3}, TypeError, "on_shard is a function of the path of a shard, not 3"),
        ({"resume": True, "overwrite": True}, ValueError, "overwrite=True replaces"),
    ],
)
def test_wrong_options_are_told_when_it_is_built(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        ShardWriter(**{"pattern": str(tmp_path / "%d.tar"), **options})


def test_what_is_no_dict_is_refused():
    with TarWriter(io.BytesIO()) as writer, pytest.raises(TypeError, match="a sample is a dict of its fields and its"):
        writer.write([1])


# Errors of the disk


@pytest.mark.parametrize("most", [0, 513, 1_000_000])
def test_a_disk_that_takes_only_a_part_gets_the_rest(tmp_path, monkeypatch, most):
    """writev(2) may write less than it was given."""
    large = [{"__key__": str(number), "bin": bytes([number]) * 200_000} for number in range(12)]
    true, calls = os.writev, []

    def writev(fd, blocks):
        calls.append(len(blocks))
        return true(fd, [b"".join(blocks)[:most]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", writev)
        fill(TarWriter(tmp_path / "parts.tar"), large)
    assert calls
    assert (tmp_path / "parts.tar").read_bytes() == written(large)


def test_a_full_disk_leaves_the_complete_shards_and_names_no_other(tmp_path, monkeypatch):
    """The writer refuses to go on, also where the error of the disk is caught: samples that it
    had taken are gone.
    """
    seen, raised, true = [], [], os.write

    def write(fd, data):
        if len(data) > 30_000:
            raise OSError(errno.ENOSPC, "the disk is full")
        return true(fd, data)

    monkeypatch.setattr(os, "write", write)
    writer = ShardWriter(tmp_path / "s-%d.tar", max_samples=4, index=tmp_path / "index.json", on_shard=seen.append)
    for number in range(30):
        try:
            writer.write({"__key__": str(number), "bin": bytes(100 if number < 6 else 40_000)})
        except (OSError, ValueError) as error:
            raised.append(type(error).__name__)
    with pytest.raises(ValueError, match=r"shard .*s-1.tar was not written, for .* \(OSError: .*its 4 samples"):
        writer.close()
    assert (writer.shards, writer.samples, seen) == ({seen[0]: 4}, 4, [str(tmp_path / "s-0.tar")])
    assert [entry["url"] for entry in json.loads((tmp_path / "index.json").read_text())["shardlist"]] == ["s-0.tar"]
    assert sorted(os.listdir(tmp_path)) == ["index.json", "s-0.tar"]
    assert raised == ["OSError", *["ValueError"] * 21]  # samples 6 and 7 are collected, and 8 ends the shard


def test_a_failed_close_leaves_nothing_open(tmp_path):
    """The folder has gone in the meantime."""
    folder = tmp_path / "gone"
    folder.mkdir()
    writer = TarWriter(folder / "x.tar")
    writer.write(HUNDRED[0])
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        writer.close()
    with pytest.raises(FileNotFoundError) as caught:
        TarWriter(folder / "x.tar")
    assert "was to be written: make its directory first" in caught.value.__notes__[0]


@pytest.mark.parametrize("ending", [".keys", ".idx"])
def test_an_index_of_a_shard_that_cannot_be_written_is_written_by_the_next_call(ending, tmp_path):
    """The shard stays."""
    in_the_way = tmp_path / f".s-0.tar{ending}.partial"
    in_the_way.mkdir()
    writer = ShardWriter(tmp_path / "s-%d.tar", offsets=True)
    writer.write(HUNDRED[0])
    with pytest.raises(CacheError, match="no regular file"):
        writer.close()
    in_the_way.rmdir()
    writer.close()
    assert IndexedShards(tmp_path / "s-0.tar").by_key("000000")["cls"] == b"0"


def test_an_index_that_could_not_be_written_is_written_later(tmp_path):
    """Each complete shard is entered, and handed to on_shard once."""
    index, seen = tmp_path / "index.json", []
    writer = ShardWriter(tmp_path / "s-%d.tar", max_samples=1, index=index, on_shard=seen.append)
    writer.write(HUNDRED[0])
    index.mkdir()
    with pytest.raises(IsADirectoryError):
        writer.write(HUNDRED[1])
    assert (len(writer.shards), seen, writer.samples) == (1, [], 1)
    index.rmdir()
    writer.write(HUNDRED[1])
    writer.close()
    assert seen == list(writer.shards) == [str(tmp_path / "s-0.tar"), str(tmp_path / "s-1.tar")]
    assert len(json.loads(index.read_text())["shardlist"]) == writer.samples == 2
    assert sorted(os.listdir(tmp_path)) == ["index.json", "s-0.tar", "s-1.tar"]


# Stores


class Upload(io.BytesIO):
    """A store's stream: the object appears when it is closed; a block takes a part of what it is
    given.
    """

    stored = None

    def write(self, data):
        return super().write(data[:1000])

    def discard(self):
        self.seek(0)
        self.truncate()

    def close(self):
        if not self.closed:
            self.stored = self.getvalue()
        super().close()


@pytest.mark.parametrize("how", ["raise", "forget", "fail", "end"])
def test_the_upload_of_half_a_shard_is_aborted(how):
    with Upload() as stream:
        writer = TarWriter(stream)
        writer.write(HUNDRED[0])
        if how == "raise":
            with pytest.raises(KeyError):
                write_and_fail(writer, HUNDRED[1:9])
        elif how == "forget":
            with pytest.warns(ShardWarning, match="the writer of a stream was not closed"):
                del writer
        elif how == "fail":
            stream.write = None
            with pytest.raises(TypeError):
                writer.write(HUNDRED[1])
            with pytest.raises(ValueError, match="the shard was not written"):
                writer.close()
        else:
            writer.close()
    assert stream.stored == (written(HUNDRED[:1]) if how == "end" else b"")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_half_a_shard_gets_no_name_in_a_store(gcs):
    """An exception in the block aborts the upload of a stream of fsspec; a whole shard appears."""
    fs, path = fsspec.core.url_to_fs(f"{gcs.url}/half.tar", **gcs.storage_options)
    gcs.faults.rules({"match": "^DELETE .*upload_id=", "status": 499})  # as GCS answers; the emulator cannot
    large = {"__key__": "a", "bin": bytes(6 << 20)}
    with pytest.raises(KeyError), fs.open(path, "wb", block_size=5 << 20) as stream:
        write_and_fail(TarWriter(stream), [large])
    fs.invalidate_cache()
    assert not fs.exists(path)
    assert gcs.faults.stats("^DELETE .*upload_id=")
    with fs.open(path, "wb", block_size=5 << 20) as stream:
        fill(TarWriter(stream), [large, HUNDRED[0]])
    assert fs.cat(path) == written([large, HUNDRED[0]])


def test_shards_in_a_store(s3, tmp_path, monkeypatch):
    """The same bytes, offsets and index as on a disk, and nothing of an unfinished shard; some are
    sent in parts.
    """
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 5 << 20)
    items = [{"__key__": str(number), "bin": bytes([number]) * (10 if number < 4 else 3 << 20)} for number in range(7)]
    folder, options = f"{s3.url}/written", {"storage_options": s3.storage_options}
    fs, path = fsspec.core.url_to_fs(folder, **s3.storage_options)
    for place, more in ((tmp_path, {}), (folder, options)):
        writer = ShardWriter(f"{place}/s-%d.tar", max_samples=3, offsets=True, index=f"{place}/index.json", **more)
        with pytest.raises(KeyError):
            write_and_fail(writer, items)
    fs.invalidate_cache()
    expected = contents(tmp_path)
    assert len(expected) == 7
    assert {name.rpartition("/")[2]: fs.cat(name) for name in fs.find(path)} == expected
    assert not s3.client.list_multipart_uploads(Bucket=path.partition("/")[0]).get("Uploads")
    with pytest.raises(FileExistsError, match="resume=True"):
        ShardWriter(f"{folder}/s-%d.tar", **options)
    index = f"{folder}/index.json"
    writer = fill(ShardWriter(f"{folder}/s-%d.tar", max_samples=3, resume=True, index=index, **options), items)
    assert list(writer.shards.values()) == [3, 3, 1]
    read = ShardList(index, **options).open_shards(**options).load_tar().group_by_key()
    assert [(sample["__key__"], sample["bin"]) for sample in read] == [(item["__key__"], item["bin"]) for item in items]


def test_a_store_that_cannot_be_written_to_says_so(s3):
    """A bucket that does not exist: without the key, and nothing is left open."""
    options = s3.storage_options
    writer = TarWriter("s3://nowhere/x.tar", storage_options=options)
    writer.write(HUNDRED[0])
    with pytest.raises(ShardError, match="s3://nowhere/x.tar cannot be written") as caught:
        writer.close()
    assert options["secret"] not in str(caught.value)
    with pytest.raises(ValueError, match="shard s3://nowhere/x.tar was not written"):
        writer.close()


def test_a_store_without_uploads_gets_the_name_at_the_end():
    """There a file is written under another name and moved."""
    fs = fsspec.filesystem("memory")
    with TarWriter("memory://folder/x.tar") as writer:
        writer.write(HUNDRED[0])
        assert not fs.exists("/folder/x.tar")
    assert fs.cat("/folder/x.tar") == written(HUNDRED[:1])
    with pytest.raises(KeyError):
        write_and_fail(TarWriter("memory://folder/y.tar"), HUNDRED[:1])
    assert fs.find("/folder") == ["/folder/x.tar"]
    fs.rm("/folder", recursive=True)


# Going on after an interruption


@pytest.mark.parametrize(("done", "ending"), [(0, "tar"), (29, "tar"), (30, "tar"), (100, "tar"), (31, "tar.gz")])
def test_a_resumed_writer_goes_on_at_the_first_unfinished_shard(tmp_path, done, ending):
    """The files are those of one run, and complete shards are not written again."""
    options, told = {"max_samples": 30, "offsets": ending == "tar"}, []
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    counts = fill(ShardWriter(whole / f"s-%d.{ending}", index=whole / "index.json", **options), HUNDRED).shards
    pattern, index = resumed / f"s-%d.{ending}", resumed / "index.json"
    with pytest.raises(KeyError):
        write_and_fail(ShardWriter(pattern, index=index, **options), HUNDRED[:done])
    for name in os.listdir(resumed):
        if name.endswith((".idx", ".json")):
            os.unlink(resumed / name)  # as if killed before it was written
    before = {path: path.stat().st_mtime_ns for path in resumed.glob(f"*.{ending}")}
    writer = fill(ShardWriter(pattern, index=index, resume=True, on_shard=told.append, **options), HUNDRED)
    assert list(writer.shards.values()) == list(counts.values())
    assert (writer.samples, told) == (100, list(writer.shards))
    assert contents(resumed) == contents(whole)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_other_samples_are_not_mixed_with_those_of_an_earlier_run(tmp_path):
    """Another key, another order, too few."""
    pattern = tmp_path / "s-%d.tar"
    fill(ShardWriter(pattern, max_samples=3), HUNDRED[:6])
    before = contents(tmp_path)
    writer = ShardWriter(pattern, max_samples=3, resume=True)
    writer.write(HUNDRED[0])
    with pytest.raises(
        StateError, match=r"s-0.tar is of another run: its sample 1 has the key '000001', and .* '000002'"
    ):
        writer.write(HUNDRED[2])
    writer.write(HUNDRED[1])
    with pytest.raises(StateError, match=r"it has 3 samples, and 1 of them were not written again"):
        writer.close()
    assert contents(tmp_path) == before


def test_a_write_that_raised_has_not_taken_the_sample(tmp_path):
    """Also when resuming: ``on_shard`` fails once, and the write is tried again."""
    few, pattern, told = HUNDRED[:6], str(tmp_path / "%d.tar"), []
    fill(ShardWriter(pattern, max_samples=2), few[:2])

    def upload(path):
        told.append(path)
        if len(told) == 1:
            raise ConnectionError

    with ShardWriter(pattern, max_samples=2, on_shard=upload, resume=True) as writer:
        for sample in few:
            try:
                writer.write(sample)
            except ConnectionError:
                writer.write(sample)
    assert keys(str(tmp_path / "*.tar")) == [sample["__key__"] for sample in few]
    assert told == [pattern % number for number in (0, 1, 2)]
