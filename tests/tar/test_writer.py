"""What TarWriter and ShardWriter write, refuse and leave behind."""

import bz2
import contextlib
import dis
import gc
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
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

from wds_pipes import SampleError, ShardError, ShardList, ShardWarning, ShardWriter, StateError, TarWriter
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


def test_the_same_samples_give_the_same_bytes_and_no_more_than_needed():
    """512 bytes of header a member; golden: a change of one byte changes everybody's shards."""
    data = written(HUNDRED)
    assert len(data) == 215_040
    assert data == written([dict(reversed(sample.items())) for sample in HUNDRED])
    assert hashlib.sha256(data).hexdigest() == GOLDEN


def test_only_metadata_is_left_out():
    """What begins and ends with two underscores; any other name is a field."""
    sample = {"__key__": "a", "__url__": "x.tar", "__local_path__": "/x.tar", "jpg": b"1", "__mask.png": b"2"}
    assert by_reader(written([sample])) == [("a.__mask.png", b"2"), ("a.jpg", b"1")]


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("a", 1),
        ("n" * 96, 1),  # 100 with .txt
        ("n" * 97, 3),
        ("d" * 155 + "/" + "n" * 96, 1),
        ("d" * 156 + "/" + "n" * 96, 3),
        ("ü" * 48, 1),
        ("ü" * 49, 3),
        ("größe/日本", 1),
        ("\udcff\udcfe", 1),
        ("\udcff" * 120, 3),
        ("n" * 3000, 8),
    ],
)
def test_a_pax_header_only_where_the_name_does_not_fit(tmp_path, key, headers):
    """100 bytes, or 155 and 100 around a slash; everybody reads both."""
    path = tmp_path / "x.tar"
    with TarWriter(path) as writer:
        writer.write({"__key__": key, "txt": b""})
        assert writer.size == 512 * headers
    assert by_tarfile(path) == by_reader(path.read_bytes()) == [(f"{key}.txt", b"")]
    assert [sample["__key__"] for sample in by_webdataset(path)] == [key]
    assert [sample["__key__"] for sample in samples([str(path)])] == [key]


def test_values_are_encoded_by_their_field(tmp_path):
    """And webdataset reads the same."""
    image = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    fields = {
        "txt": "größe",
        "count": np.int64(8),
        "json": {"x": [1, None, "ü"]},
        "npy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "png": image,
        "seg.png": Image.fromarray(image[..., 0]),
        "jpg": b"not touched",
        "bin": bytearray(b"xy"),
        "mem": memoryview(b"z"),
    }
    path = tmp_path / "x.tar"
    path.write_bytes(written([{"__key__": "a", "__url__": "left out", **fields}]))
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
        ({"__key__": "a.b", "txt": "x"}, "write it as 'a_b'"),
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
        ({"__key__": "a", "cls": "cat"}, "field 'cls' of sample 'a' cannot be encoded"),
        ({"__key__": "a", "json": {1, 2}}, "field 'json' of sample 'a' cannot be encoded"),
        ({"__key__": "a", "xyz": "text"}, "there is no encoder for 'xyz' and str: pass bytes (text.encode())"),
        ({"__key__": "a", "json": "{1}"}, "this one does not parse (Expecting property name"),
        ({"__key__": "a", "jsonl": "{}\n{1}"}, "this one does not parse"),
        ({"__key__": "a", "jsonl": {"a": 1}}, "it must be a list of objects"),
        ({"__key__": "a", "txt.gz": b"text"}, "its bytes are not compressed as gz, which its name promises"),
        ({"__key__": "a", "txt.xz.gz": lzma.compress(b"")}, "its bytes are not compressed as gz"),
        ({"__key__": "a", "gz": b""}, "its bytes are not compressed as gz"),
        ({"__key__": "a", "txt.gz.gz.gz": "text"}, "packed more than 2 times"),
        ({"__key__": "good", "txt": "x"}, "key 'good' was written to this shard before"),
        ({"__key__": "first", "txt": "x"}, "key 'first' was written to this shard before"),
    ],
)
def test_what_would_not_read_back_is_refused_with_the_mend(sample, message):
    """Nothing of it is written, and the writer goes on."""
    good = [{"__key__": "first", "txt": "1"}, {"__key__": "good", "txt": "2"}]
    file = io.BytesIO()
    with TarWriter(file) as writer:
        for item in good:
            writer.write(item)
        with pytest.raises(SampleError) as caught:
            writer.write(sample)
        assert message in str(caught.value)
        assert caught.value.key == (
            sample.get("__key__") if isinstance(sample.get("__key__"), str) and sample["__key__"] else None
        )
        writer.write({"__key__": "last", "txt": "3"})
        assert writer.samples == 3
    assert file.getvalue() == written([*good, {"__key__": "last", "txt": "3"}])


def test_a_file_appears_when_it_is_complete(tmp_path):
    """And not before; closing again changes nothing."""
    path = tmp_path / "x.tar"
    with TarWriter(path) as writer:
        writer.write(HUNDRED[0])
        assert not path.exists()
        writer.close()
        assert path.exists()
        with pytest.raises(ValueError, match="closed"):
            writer.write(HUNDRED[1])
    writer.close()
    writer.discard()
    assert os.listdir(tmp_path) == ["x.tar"]
    assert path.read_bytes() == written(HUNDRED[:1])


def write_and_fail(writer, items) -> None:
    with writer:
        for item in items:
            writer.write(item)
        raise KeyError


def test_an_exception_in_the_block_leaves_no_file(tmp_path):
    """Neither the unfinished one nor under another name; an older file of that name stays."""
    path = tmp_path / "x.tar"
    for older in (None, b"older"):
        if older:
            path.write_bytes(older)
        with pytest.raises(KeyError):
            write_and_fail(TarWriter(path, overwrite=True), HUNDRED[:1])
        assert os.listdir(tmp_path) == (["x.tar"] if older else [])
    assert path.read_bytes() == b"older"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("https://user:secret@host/x-%d.tar", "nothing is written to 'https://host/x-%d.tar', for"),
        ("ais://bucket/x-%d.tar", "write to a local directory or to a store, such as s3://"),
        ("simplecache::s3://bucket/x-%d.tar", "a chain of protocols"),
        (Path("s3://bucket/x-%d.tar"), "a '/' is missing in 's3://bucket/x-%d.tar', which a pathlib.Path shortens"),
        (Path("https://user:secret@host/x-%d.tar?sig=secret"), "a '/' is missing in 'https://host/x-%d.tar?...'"),
        ("", "this path is empty"),
        ("${NO_SUCH_VARIABLE}/x-%d.tar", "the environment variable NO_SUCH_VARIABLE is not set"),
        ("pipe:cat > secret-%d.tar", "nothing is written to 'pipe:cat ...'"),
        ("x-%d.tar.lz4", "not written as .lz4, which is not read either"),
        ("x-%d.zip", "not written as .zip"),
    ],
)
def test_a_target_that_takes_no_tar_is_refused_at_once(tmp_path, monkeypatch, target, message):
    """Not written under an odd name, or in another format than the name says."""
    monkeypatch.chdir(tmp_path)
    for make in (TarWriter, ShardWriter):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(target)
    assert os.listdir(tmp_path) == []


def test_what_is_neither_a_path_nor_a_stream_is_refused(tmp_path):
    """A local stream of fsspec also has a path, and is a stream."""
    with pytest.raises(ValueError, match=r"sys\.stdout\.buffer"):
        TarWriter("-")
    with pytest.raises(TypeError, match="a path or an open binary stream"):
        TarWriter(fsspec.open(f"{tmp_path}/x.tar", "wb"))
    with fsspec.open(f"{tmp_path}/x.tar", "wb") as stream, TarWriter(stream) as writer:
        writer.write(HUNDRED[0])
    fill(TarWriter(f"file://{tmp_path}/y.tar"), [HUNDRED[0]])
    assert sorted(os.listdir(tmp_path)) == ["x.tar", "y.tar"]
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "y.tar").read_bytes() == written(HUNDRED[:1])


UNPACK = {
    "gz": gzip.decompress,
    "tgz": gzip.decompress,
    "bz2": bz2.decompress,
    "xz": lzma.decompress,
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
    stored = contents(tmp_path / "a")
    assert stored == contents(tmp_path / "b")
    first = stored[f"s-0.tar.{ending}"]
    assert UNPACK[ending](first) == written(HUNDRED[:60])
    assert len(first) < 10_000


def test_of_a_compressed_shard_the_bytes_before_compression_count(tmp_path):
    """So the number of samples in a shard does not depend on the library."""
    for ending in ("tar", "tar.gz"):
        writer = fill(ShardWriter(tmp_path / f"s-%d.{ending}", max_bytes=40_960), HUNDRED)
        counts = list(writer.shards.values())
        assert counts == [19, 19, 19, 19, 19, 5]


def test_a_failed_close_leaves_nothing_open(tmp_path):
    """The folder has gone in the meantime."""
    folder = tmp_path / "gone"
    folder.mkdir()
    writer = TarWriter(folder / "x.tar")
    writer.write(HUNDRED[0])
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        writer.close()


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
        frame.f_trace_opcodes = name in ("wds_pipes.io.locks", "wds_pipes.io.partial")
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
    assert number > 20


def test_a_killed_process_leaves_no_shard_that_looks_whole(tmp_path):
    """Only whole ones have a name that ends in .tar."""
    code = """if True:
        import itertools, sys
        sys.modules["torch"] = None  # it starts faster
        from wds_pipes.tar import ShardWriter
        with ShardWriter(sys.argv[1] + "/s-%03d.tar", max_samples=50) as writer:
            for number in itertools.count():
                writer.write({"__key__": str(number), "txt": "x" * 3000})
                if number == 120:
                    print("now", flush=True)
                    sys.stdin.read()  # in the middle of a shard: between two there is no file of one
    """
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    shards = sorted(tmp_path.glob("*.tar"))
    assert len(shards) >= 2
    assert [len(samples([str(path)])) for path in shards] == [50] * len(shards)
    left = [name for name in os.listdir(tmp_path) if name.endswith(".partial")]
    assert left == [f".s-{len(shards):03d}.tar.partial"]
    fill(ShardWriter(tmp_path / "s-%03d.tar", start=len(shards)), [HUNDRED[0]])
    assert not any(name.endswith(".partial") for name in os.listdir(tmp_path))
    assert (tmp_path / f"s-{len(shards):03d}.tar").read_bytes() == written(HUNDRED[:1])


@pytest.mark.parametrize("pattern", ["s-%02d.tar", "s-{:02d}.tar"])
def test_shards_are_full_and_none_is_empty(tmp_path, pattern):
    """7 samples in shards of 3: 3, 3, 1; and 6: 3, 3. Other signs of the kind in the path stay."""
    for count, expected in ((7, [3, 3, 1]), (6, [3, 3]), (0, [])):
        folder = tmp_path / f"my%20{{x}} {count}%"
        folder.mkdir()
        done = []
        writer = fill(ShardWriter(folder / pattern, max_samples=3, start=5, on_shard=done.append), HUNDRED[:count])
        paths = [str(folder / f"s-{number + 5:02d}.tar") for number in range(len(expected))]
        assert sorted(os.listdir(folder)) == [os.path.basename(path) for path in paths]
        assert writer.shards == dict(zip(paths, expected))
        assert done == paths
        assert writer.samples == count
        if paths:
            assert [sample["__key__"] for sample in samples(paths)] == [sample["__key__"] for sample in HUNDRED[:count]]


@pytest.mark.parametrize("max_bytes", [10_240, 20_480, 25_000, 40_960])
def test_no_shard_is_larger_than_max_bytes(tmp_path, max_bytes):
    """As the file is on the disk, filled up to its record; a sample that is larger by itself has
    a shard of its own.
    """
    with ShardWriter(tmp_path / "s-{}.tar", max_bytes=max_bytes) as writer:
        for number in range(60):
            writer.write({"__key__": str(number), "bin": bytes(number * 97)})
        writer.write({"__key__": "huge", "bin": bytes(100_000)})
        writer.write({"__key__": "after", "bin": b""})
    *sizes, huge, _ = [os.path.getsize(path) for path in writer.shards]
    assert max(sizes) <= max_bytes < huge
    assert list(writer.shards.values())[-2:] == [1, 1]
    assert len(samples(list(writer.shards))) == 62
    assert len(sizes) <= 60 * 97 * 60 // 2 // max_bytes * 2 + 2


def test_samples_in_other_shards_may_have_one_key_and_a_refused_sample_makes_no_shard(tmp_path):
    with ShardWriter(tmp_path / "s-%d.tar", max_samples=1) as writer:
        writer.write({"__key__": "a", "txt": "1"})
        writer.write({"__key__": "a", "txt": "2"})
        with pytest.raises(SampleError):
            writer.write({"__key__": "a.b", "txt": "x"})
    assert [sample["txt"] for sample in samples([f"{tmp_path}/s-{number}.tar" for number in (0, 1)])] == [b"1", b"2"]
    assert sorted(os.listdir(tmp_path)) == ["s-0.tar", "s-1.tar"]


# Errors of the disk


@pytest.mark.parametrize("most", [0, 513, 1_000_000])
def test_a_disk_that_takes_only_a_part_gets_the_rest(tmp_path, monkeypatch, most):
    """writev(2) may write less than it was given."""
    large = [{"__key__": str(number), "bin": bytes([number]) * 200_000} for number in range(12)]
    (tmp_path / "whole.tar").write_bytes(written(large))
    true, calls = os.writev, []

    def writev(fd, blocks):
        calls.append(len(blocks))
        return true(fd, [b"".join(blocks)[:most]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", writev)
        fill(TarWriter(tmp_path / "parts.tar"), large)
    assert calls
    assert (tmp_path / "parts.tar").read_bytes() == (tmp_path / "whole.tar").read_bytes()


FULL = """if True:
    import json, os, resource, signal, sys
    sys.modules["torch"] = None  # it starts faster
    from wds_pipes.tar import ShardWriter
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    seen, raised = [], []
    writer = ShardWriter("s-%d.tar", max_samples=4, index="index.json", on_shard=seen.append)
    for number in range(30):
        try:
            writer.write({"__key__": str(number), "bin": bytes(100 if number < 6 else 40_000)})
        except (OSError, ValueError) as error:
            raised.append(type(error).__name__)
    try:
        writer.close()
    except ValueError as error:
        raised.append(str(error))
    print(json.dumps([writer.shards, writer.samples, seen, raised]))
"""


def test_a_full_disk_leaves_the_complete_shards_and_names_no_other(tmp_path):
    """The writer refuses to go on, also where the error of the disk is caught: samples that it
    had taken are gone.
    """
    done = subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, check=True)
    shards, count, seen, raised = json.loads(done.stdout)
    assert shards == {"s-0.tar": 4}
    assert count == 4
    assert seen == ["s-0.tar"]
    assert [entry["url"] for entry in json.loads((tmp_path / "index.json").read_text())["shardlist"]] == ["s-0.tar"]
    assert sorted(os.listdir(tmp_path)) == ["index.json", "s-0.tar"]
    assert raised[:-1] == ["OSError", *["ValueError"] * 21]  # samples 6 and 7 are collected, and 8 ends the shard
    assert "shard s-1.tar was not written, for an error came before (OSError: " in raised[-1]
    assert "its 4 samples were thrown away" in raised[-1]


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


def test_what_is_there_is_not_replaced_unless_it_is_allowed(tmp_path):
    """A tar, a first shard, a later shard, and one that comes while it is written."""
    older = tmp_path / "s-1.tar"
    older.write_bytes(b"older")
    for make in (lambda: TarWriter(older), lambda: ShardWriter(tmp_path / "s-%d.tar", start=1)):
        with pytest.raises(FileExistsError, match="overwrite=True"):
            make()
    writer = ShardWriter(tmp_path / "s-%d.tar", max_samples=1)
    writer.write(HUNDRED[0])
    for _ in range(2):
        with pytest.raises(FileExistsError, match="pass overwrite=True"):
            writer.write(HUNDRED[1])
    writer.close()
    assert (list(writer.shards), writer.samples) == ([str(tmp_path / "s-0.tar")], 1)
    late = TarWriter(tmp_path / "late.tar")
    late.write(HUNDRED[0])
    (tmp_path / "late.tar").write_bytes(b"older")
    with pytest.raises(FileExistsError):
        late.close()
    assert older.read_bytes() == (tmp_path / "late.tar").read_bytes() == b"older"
    assert sorted(os.listdir(tmp_path)) == ["late.tar", "s-0.tar", "s-1.tar"]
    fill(ShardWriter(tmp_path / "s-%d.tar", max_samples=1, overwrite=True), HUNDRED[:2])
    assert older.read_bytes() == written(HUNDRED[1:2])


def test_two_writers_of_one_shard_exclude_each_other(tmp_path):
    """Else both would write into the same file."""
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write(HUNDRED[0])
        with pytest.raises(BlockingIOError, match="another writer"):
            TarWriter(tmp_path / "x.tar")
    assert len(samples([str(tmp_path / "x.tar")])) == 1


def test_a_writer_that_is_forgotten_leaves_nothing(tmp_path):
    """As one that raised, and it says so."""
    writer = TarWriter(tmp_path / "x.tar")
    writer.write(HUNDRED[0])
    with pytest.warns(ShardWarning, match=r"the writer of .*x.tar was not closed, and threw away 1 sample: use it in"):
        del writer
    shards = ShardWriter(str(tmp_path / "x-%d.tar"), max_samples=2)
    for sample in HUNDRED[:3]:
        shards.write(sample)
    with pytest.warns(ShardWarning, match="x-1.tar was not closed, and threw away 1 sample"):
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


@pytest.mark.parametrize("how", ["raise", "forget", "fail"])
def test_the_upload_of_half_a_shard_is_aborted(how):
    stream = Upload()
    if how == "raise":
        with stream, pytest.raises(KeyError):
            write_and_fail(TarWriter(stream), HUNDRED[:9])
    elif how == "forget":
        with stream, pytest.warns(ShardWarning, match="the writer of a stream was not closed"):
            TarWriter(stream).write(HUNDRED[0])
    else:
        with stream:
            writer = TarWriter(stream)
            writer.write(HUNDRED[0])
            stream.write = None
            with pytest.raises(TypeError):
                writer.write(HUNDRED[1])
            with pytest.raises(ValueError, match="the shard was not written"):
                writer.close()
    assert stream.stored == b""
    with Upload() as stream, TarWriter(stream) as writer:
        writer.write(HUNDRED[0])
    assert stream.stored == written(HUNDRED[:1])


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize(
    ("store", "size", "inside"),
    [("s3", 10, True), ("s3", 6 << 20, False), ("gcs", 10, False), ("gcs", 6 << 20, True)],
)
def test_half_a_shard_gets_no_name_in_a_store(store, size, inside, request):
    """An exception in the block, with and without a block around the stream; a whole shard
    appears, and nothing else is left.
    """
    store = request.getfixturevalue(store)
    url, name = f"{store.url}/half-{size}-{inside}.tar", {"__key__": "b", "bin": b"x"}
    fs, path = fsspec.core.url_to_fs(url, **store.storage_options)
    if store.kind == "gcs":
        # as GCS answers; the emulator does not know it
        store.faults.rules({"match": "^DELETE .*upload_id=", "status": 499})

    def half():
        stream = fs.open(path, "wb", block_size=5 << 20)
        with stream if inside else contextlib.nullcontext(), TarWriter(stream) as writer:
            writer.write({"__key__": "a", "bin": bytes(size)})
            raise KeyError

    with pytest.raises(KeyError):
        half()
    gc.collect()
    fs.invalidate_cache()
    assert not fs.exists(path)
    if store.kind == "s3":
        assert not store.client.list_multipart_uploads(Bucket=path.partition("/")[0]).get("Uploads")
    elif size > 5 << 20:
        assert store.faults.stats("^DELETE .*upload_id=")
    with fs.open(path, "wb", block_size=5 << 20) as stream, TarWriter(stream) as writer:
        writer.write({"__key__": "a", "bin": bytes(size)})
        writer.write(name)
    assert fs.cat(path) == written([{"__key__": "a", "bin": bytes(size)}, name])


@pytest.mark.parametrize("size", [10, 3 << 20], ids=["one request", "parts"])
def test_shards_in_a_store(s3, tmp_path, size, monkeypatch):
    """The same bytes, offsets and index as on a disk, and nothing of an unfinished shard."""
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 5 << 20)
    items = [{"__key__": str(number), "bin": bytes([number]) * size} for number in range(7)]
    folder, options = f"{s3.url}/written-{size}", {"storage_options": s3.storage_options}
    fs, path = fsspec.core.url_to_fs(folder, **s3.storage_options)
    for place, more in ((tmp_path, {}), (folder, options)):
        writer = ShardWriter(f"{place}/s-%d.tar", max_samples=3, offsets=True, index=f"{place}/index.json", **more)
        with pytest.raises(KeyError):
            write_and_fail(writer, items)
    fs.invalidate_cache()
    expected = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    assert len(expected) == 7
    assert {name.rpartition("/")[2]: fs.cat(name) for name in fs.find(path)} == expected
    assert not s3.client.list_multipart_uploads(Bucket=path.partition("/")[0]).get("Uploads")
    with pytest.raises(FileExistsError, match="resume=True"):
        ShardWriter(f"{folder}/s-%d.tar", **options)
    writer = fill(
        ShardWriter(f"{folder}/s-%d.tar", max_samples=3, resume=True, index=f"{folder}/index.json", **options), items
    )
    assert list(writer.shards.values()) == [3, 3, 1]
    read = ShardList(f"{folder}/index.json", **options).open_shards(**options).load_tar().group_by_key()
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


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.parametrize(
    ("done", "ending"), [(0, "tar"), (29, "tar"), (30, "tar"), (31, "tar"), (100, "tar"), (31, "tar.gz")]
)
def test_a_resumed_writer_goes_on_at_the_first_unfinished_shard(tmp_path, done, ending):
    """The files are those of one run, and complete shards are not written again."""
    options = {"max_samples": 30, "offsets": ending == "tar"}
    for folder in ("whole", "resumed"):
        (tmp_path / folder).mkdir()
    whole = fill(
        ShardWriter(tmp_path / "whole" / f"s-%d.{ending}", index=tmp_path / "whole" / "index.json", **options), HUNDRED
    )
    pattern, index = tmp_path / "resumed" / f"s-%d.{ending}", tmp_path / "resumed" / "index.json"
    with pytest.raises(KeyError):
        write_and_fail(ShardWriter(pattern, index=index, **options), HUNDRED[:done])
    for name in os.listdir(tmp_path / "resumed"):
        if not name.startswith("s-") or name.endswith(".idx"):
            os.unlink(tmp_path / "resumed" / name)  # as if killed before it was written
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "resumed").glob(f"*.{ending}")}
    told = []
    writer = fill(ShardWriter(pattern, index=index, resume=True, on_shard=told.append, **options), HUNDRED)
    assert writer.shards == {name.replace("whole", "resumed"): count for name, count in whole.shards.items()}
    assert (writer.samples, told) == (100, list(writer.shards))
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")
    assert before == {name: (tmp_path / "resumed" / name).stat().st_mtime_ns for name in before}


def test_other_samples_are_not_mixed_with_those_of_an_earlier_run(tmp_path):
    """Another key, another order, too few."""
    pattern = tmp_path / "s-%d.tar"
    writer = fill(ShardWriter(pattern, max_samples=3), HUNDRED[:6])
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
    with pytest.raises(ValueError, match="overwrite=True replaces"):
        ShardWriter(pattern, resume=True, overwrite=True)
    assert contents(tmp_path) == before


def test_a_name_is_refused_where_no_reader_takes_it(tmp_path):
    """The reader takes 1 MiB of extended headers."""
    for length, taken in (((1 << 20) - 2000, True), (1 << 20, False), (1 << 21, False)):
        sample = {"__key__": "n" * length, "txt": b"x"}
        if taken:
            assert by_reader(written([sample])) == [("n" * length + ".txt", b"x")]
        else:
            with pytest.raises(SampleError, match="more than 1 MiB of headers") as caught:
                written([sample])
            assert len(str(caught.value)) < 1000
    with pytest.raises(SampleError, match="more than 1 MiB of headers"):
        written([{"__key__": "a", "n" * (1 << 20): b"x"}])


KEYS = st.text(min_size=1, max_size=150).filter(lambda key: split_key(f"{key}.x") == (key, "x") and "\0" not in key)
FIELDS = st.text(min_size=1, max_size=20).filter(
    lambda field: (
        split_key(f"a.{field}") == ("a", field)
        and "\0" not in field
        and not is_metadata(field)
        and field.rpartition(".")[2] not in PACKED
    )
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, st.dictionaries(FIELDS, st.binary(max_size=1200), min_size=1, max_size=3), max_size=4))
def test_whatever_is_accepted_reads_back_the_same(tmp_path_factory, contents):
    """Any keys, fields and bytes: by us and by the standard library."""
    items = [{"__key__": key, **fields} for key, fields in contents.items()]
    data = written(items)
    path = tmp_path_factory.getbasetemp() / "whatever.tar"
    path.write_bytes(data)
    read = [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples([str(path)])]
    assert read == items
    assert by_tarfile(data) == [
        (f"{key}.{field}", fields[field]) for key, fields in contents.items() for field in sorted(fields)
    ]


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(), max_size=20), st.text(st.characters(), max_size=10))
def test_any_name_is_either_refused_or_reads_back(key, field):
    """No other exception, and no name that comes back as another."""
    assume(not is_metadata(field))
    try:
        data = written([{"__key__": key, field: b"x"}])
    except SampleError:
        return
    assert by_reader(data) == [(f"{key}.{field}", b"x")]
    assert split_key(f"{key}.{field}") == (key, field)


@pytest.mark.parametrize("folder", ["/", "//", "/d/", "d//", "/d//"])
@pytest.mark.parametrize("length", [95, 96, 100])
def test_a_long_name_keeps_the_slash_at_its_start(tmp_path, folder, length):
    """tarfile splits it there where its last part has up to 100 bytes, and the slash would be
    lost.
    """
    key = folder + "k" * (length - len("é")) + "é"
    fill(TarWriter(tmp_path / "x.tar"), [{"__key__": key, "txt": b"text"}])
    assert by_tarfile(tmp_path / "x.tar") == [(f"{key}.txt", b"text")]
    assert [sample["__key__"] for sample in samples([str(tmp_path / "x.tar")])] == [key]


def test_a_write_that_raised_has_not_taken_the_sample(tmp_path):
    """Also when resuming: ``on_shard`` fails once, and the write is tried again."""
    few = [{"__key__": str(number), "txt": "x"} for number in range(6)]
    pattern = str(tmp_path / "%d.tar")
    fill(ShardWriter(pattern, max_samples=2), few[:2])
    told = []

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
    found = ShardList(str(tmp_path / "*.tar")).open_shards().load_tar().group_by_key()
    assert [sample["__key__"] for sample in found] == list("012345")
    assert told == [pattern % number for number in (0, 1, 2)]


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
        fill(
            ShardWriter(pattern, max_samples=2, index=index, **options),
            ({"__key__": str(number), "txt": "x"} for number in range(count)),
        )
    found = ShardList(index).open_shards().load_tar().group_by_key()
    assert [sample["__key__"] for sample in found] == list("012345")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pattern": "s.tar"}, ValueError, "one place for the shard's number"),
        ({"pattern": "s-%d-%d.tar"}, ValueError, "one place for the shard's number"),
        ({"pattern": "s-%s.tar"}, ValueError, "one place for the shard's number"),
        ({"max_samples": 2.5}, TypeError, "max_samples must be an int, not 2.5"),
        ({"max_samples": 0}, ValueError, "max_samples must be at least 1, not 0"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1, not 0"),
        ({"max_bytes": "1GB"}, TypeError, "max_bytes must be an int, not '1GB'"),
        ({"start": -1}, ValueError, "start must be at least 0, not -1"),
        ({"on_shard": 3}, TypeError, "on_shard is a function of the path of a shard, not 3"),
    ],
)
def test_wrong_options_are_told_when_it_is_built(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        ShardWriter(**{"pattern": str(tmp_path / "%d.tar"), **options})


@pytest.mark.parametrize("sample", [None, [1], 3])
def test_what_is_no_dict_is_refused(sample, tmp_path):
    with (
        TarWriter(tmp_path / "a.tar") as writer,
        pytest.raises(TypeError, match="a sample is a dict of its fields and its '__key__', not"),
    ):
        writer.write(sample)
