"""Every kind of damage is told by an error or a warning, and no damage hangs, takes memory without
bound, or makes up a sample. Half a sample is never returned as a whole one.

``tests/proofs/fuzz_tar.py`` and ``half_samples.py`` try many more kinds of damage at random.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import tarfile
import time
import warnings
from glob import glob

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import memory_below
from pipelines import after, loaded
from scripts import run_proof
from tars import (
    END,
    Reads,
    Renewed,
    by_reader,
    filled,
    group,
    header,
    load,
    padded,
    pairs,
    pax,
    put,
    samples,
    tar,
)

import wds_pipes as wp
from wds_pipes import SampleError, ShardError, ShardWarning, tools
from wds_pipes.core.stream import Stream
from wds_pipes.stages import GroupByKey
from wds_pipes.tar import TarReader, index_shards
from wds_pipes.tar.headers import MAX_HEADER_BYTES, is_header
from wds_pipes.testing import check_resume

COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TWO = [("a.txt", b"x" * 700), ("b.txt", b"y" * 300)]  # a: header 0, data 512; b: header 1536, data 2048; end 2560
WHOLE = tar(TWO)
FIRST = [("a.txt", b"x" * 700)]
HTML = b"<!DOCTYPE html><html><body>403 Forbidden</body></html>"


def flip(data: bytes, *places: int) -> bytes:
    changed = bytearray(data)
    for place in places:
        changed[place] ^= 1
    return bytes(changed)


# what, the bytes, a part of the message, the offset
BROKEN = {
    "zero bytes": (b"", "is empty (0 bytes)", 0),
    "web page": (HTML, "looks like a web page", 0),
    "long web page": (HTML * 50, "looks like a web page", 0),
    "xml error": (
        b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>',
        "looks like a web page or an error response",
        0,
    ),
    "lz4": (b"\4\x22\x4d\x18" + bytes(100), "it looks compressed with lz4, which is not read", 0),
    "lzma": (lzma.compress(WHOLE, lzma.FORMAT_ALONE), "it looks compressed with lzma, which is not read", 0),
    "zip": (b"PK\3\4" + bytes(2000), "looks like a zip file", 0),
    "json": (json.dumps({"error": "denied"}).encode(), "looks like a text file", 0),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "looks like a text file", 0),
    "noise": (bytes(range(1, 256)) * 9, "is not a tar", 0),
    "cut in the first header": (WHOLE[:300], "is cut inside a header: 300 of 512 bytes are there", 0),
    "cut in a header": (WHOLE[: 1536 + 300], "is cut inside a header: 300 of 512 bytes are there", 1536),
    "cut in the first byte of a header": (WHOLE[: 1536 + 1], "is cut inside a header: 1 of 512", 1536),
    "cut in data": (WHOLE[: 2048 + 299], "is cut inside member 'b.txt' of 300 bytes", 1536),
    "cut before data": (WHOLE[:2048], "is cut inside member 'b.txt' of 300 bytes", 1536),
    "wrong checksum": (flip(WHOLE, 1536 + 2), "the checksum does not fit", 1536),
    "wrong checksum digit": (flip(WHOLE, 1536 + 150), "the checksum does not fit", 1536),
    "wrong first checksum": (flip(WHOLE, 2), "is not a tar", 0),
    "oversize": (
        tar([*FIRST, ("big.bin", b"z" * 1001)]),
        "has a member 'big.bin' of 1001 bytes, more than max_member_bytes=1000",
        1536,
    ),
    "oversize by base 256": (
        header(b"big.bin", at_124=b"\x80" + (1 << 50).to_bytes(11, "big")) + END,
        "more than max_member_bytes=1000",
        0,
    ),
    "oversize by pax": (
        pax((b"size", b"9999999")) + header(b"big.bin", 7) + END,
        "of 9999999 bytes, more than max_member_bytes=1000",
        0,
    ),
    "oversize when sparse": (
        pax((b"GNU.sparse.size", b"123456"), (b"GNU.sparse.map", b"0,1")) + header(b"s", 1) + padded(b"x") + END,
        "of 123456 bytes, of which 1 are stored, more than",
        0,
    ),
    "absurd size": (header(b"big.bin", at_124=b"\x80" + b"\xff" * 11) + END, "unreadable size", 0),
    "negative size": (header(b"a.txt", at_124=b"\xff" * 12) + END, "unreadable size", 0),
    "size with a minus": (header(b"a.txt", at_124=b"-0000000001\0") + END, "unreadable size", 0),
    "size in letters": (header(b"a.txt", at_124=b"abc\0        ") + END, "unreadable size", 0),
    "size beyond octal": (header(b"a.txt", at_124=b"00000000009\0") + END, "unreadable size", 0),
    "absurd extended header": (
        header(b"x", MAX_HEADER_BYTES + 1, kind=b"x") + END,
        f"extended headers of {MAX_HEADER_BYTES + 1} bytes",
        0,
    ),
    "absurd long name": (header(b"x", 1 << 30, kind=b"L") + END, "extended headers of", 0),
    "long name longer than its size": (
        header(b"x", 60, kind=b"L") + padded(b"n" * 120 + b".txt\0") + header(b"a.txt", 1) + padded(b"x") + END,
        "a long name that is longer than its size",
        0,
    ),
    "absurdly many extended headers": (
        pax((b"comment", b"c" * 60_000)) * 20 + tar(TWO),
        "extended headers of",
        17 * 60_928,
    ),
    "extended header cut": (pax((b"path", b"a.txt"))[:600], "is cut inside an extended header", 0),
    "extended header without a member": (pax((b"path", b"a.txt")), "is cut after an extended header", 1024),
    "extended header before the end": (pax((b"path", b"a.txt")) + END, "ends after an extended header", 1024),
    "pax length wrong": (
        header(b"x", 12, kind=b"x") + padded(b"99 path=a.b\n") + END,
        "a pax header that cannot be read",
        0,
    ),
    "pax length not a number": (
        header(b"x", 12, kind=b"x") + padded(b"xx path=a.b\n") + END,
        "a pax header that cannot be read",
        0,
    ),
    "pax length zero": (
        header(b"x", 12, kind=b"x") + padded(b"00 path=a.b\n") + END,
        "a pax header that cannot be read",
        0,
    ),
    "pax record without =": (
        header(b"x", 12, kind=b"x") + padded(b"12 path.a.b\n") + END,
        "a pax header that cannot be read",
        0,
    ),
    "pax record without newline": (
        header(b"x", 12, kind=b"x") + padded(b"12 path=a.bc") + END,
        "a pax header that cannot be read",
        0,
    ),
    "pax size not a number": (pax((b"size", b"1e9")) + header(b"a.txt") + END, "a pax header with size=", 1024),
    "pax size negative": (pax((b"size", b"-1")) + header(b"a.txt") + END, "a pax header with size=", 1024),
    "pax size absurd": (pax((b"size", b"9" * 30)) + header(b"a.txt") + END, "a pax header with size=", 1024),
    "sparse map not numbers": (
        pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"0,x")) + header(b"a", 1) + padded(b"x") + END,
        "a sparse map that cannot be read",
        0,
    ),
    "sparse map odd": (
        pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"0,1,2")) + header(b"a", 1) + padded(b"x") + END,
        "a sparse map that cannot be read",
        0,
    ),
    "sparse map too far": (
        pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"9,1")) + header(b"a", 1) + padded(b"x") + END,
        "whose map does not fit",
        1024,
    ),
    "sparse map too much": (
        pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"0,2")) + header(b"a", 1) + padded(b"x") + END,
        "whose map does not fit",
        1024,
    ),
    **{
        f"inline sparse map {text!r}": (
            pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"9"))
            + header(b"a", 512)
            + padded(text)
            + END,
            "whose map does not fit",
            1024,
        )
        for text in (
            b"",
            b"x\n",
            b"2\n0\n1\n",
            b"-1\n0\n1\n",
            b"1\n-1\n1\n",
            b"9" * 40 + b"\n",
            b"9" * 500,
            b"1\n0\n9\n",
        )
    },
    "sparse format unknown": (
        pax((b"GNU.sparse.major", b"7"), (b"GNU.sparse.realsize", b"9")) + header(b"a", 1) + padded(b"x") + END,
        "a sparse map that cannot be read",
        0,
    ),
    "pax length without a space": (
        header(b"x", 9, kind=b"x") + padded(b"8 a=bcd\n\n") + END,
        "a pax header that cannot be read",
        0,
    ),
    "pax length that goes back": (
        header(b"x", 14, kind=b"x") + padded(b"8 a=bcd\n1 a=b\n") + END,
        "a pax header that cannot be read",
        0,
    ),
    "cut in padding": (WHOLE[: 2048 + 300], "is cut inside member 'b.txt' of 300 bytes", 1536),
    "cut in the last byte of padding": (WHOLE[:2559], "is cut inside member 'b.txt' of 300 bytes", 1536),
    "old sparse map without end": (
        header(b"a", kind=b"S", at_482=b"\1") + b"\1" * (MAX_HEADER_BYTES * 2),
        "a sparse map of more than",
        0,
    ),
    "from another volume": (
        header(b"a.txt", 100, kind=b"M") + padded(b"x" * 100) + tar(TWO),
        "goes on with 'a.txt', which begins in another volume (tar -M)",
        0,
    ),
    "old sparse map cut": (header(b"a", kind=b"S", at_482=b"\1") + b"\1" * 700, "is cut inside a sparse map", 0),
}
MENDS = (
    "rite or fetch it again",
    "compress it with gzip",
    "Pack the files again",
    "check ",
    "aise that limit",
    "rite the shard again",
)
CUTS = {name for name in BROKEN if name.startswith(("cut", "zero bytes", "extended header", "old sparse map cut"))}


FIELDS = {"cls": b"1", "jpg": b"image" * 50, "txt": b"caption"}
RECORD = 10240


def shard(count: int, fields=FIELDS, start: int = 0) -> bytes:
    """Samples of 3,072 bytes each."""
    return tar(
        [(f"{number:03d}.{name}", data) for number in range(start, start + count) for name, data in fields.items()]
    )


def zeroed(data: bytes, start: int, stop: int) -> bytes:
    return data[:start] + bytes(stop - start) + data[stop:]


def read(path: str, *, on_error="raise", **options):
    """The samples, and what was reported: the error, the warnings, the counts of damage."""
    stream = Stream(group([path], {"on_error": on_error, **options}, on_error=on_error, on_repeated_key="warn"))
    found, reported = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for sample in stream:
                del sample["__url__"]
                found.append(sample)
        except (ShardError, SampleError) as error:
            reported.append(str(error))
    reported += [str(warning.message) for warning in caught]
    return found, reported + [name for name in ("damaged", "skipped") if stream.counts().get(name)]


def keys(found) -> list[str]:
    return [sample["__key__"] for sample in found]


# One place


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_told_and_says_where(tmp_path, name):
    """As an error that names the shard, the byte and what to do. If it is a cut, ``"warn"`` warns
    with the same words; the cut sample is never returned, nor the one before the gap. With
    ``"skip"`` it is counted, and the next shard is read as if nothing had been.
    """
    data, message, offset = BROKEN[name]
    path, good = put(tmp_path / "x.tar", data), put(tmp_path / "y.tar", WHOLE)
    with pytest.raises(ShardError) as caught:
        samples([path], {"max_member_bytes": 1000})
    text = str(caught.value)
    assert text.startswith(f"shard {path}, byte {offset}: it ")
    assert message in text
    assert any(mend in text for mend in MENDS), text
    assert (caught.value.url, caught.value.offset) == (path, offset)
    with pytest.warns(ShardWarning, match="is") if name in CUTS else pytest.raises(ShardError) as caught:
        assert samples([path], {"max_member_bytes": 1000, "on_truncated": "warn"}) == []
    assert name not in CUTS or [message in str(warning.message) for warning in caught] == [True]
    stream = Stream(group([path, good], {"max_member_bytes": 1000, "on_error": "skip"}))
    found = keys(stream)
    assert found[-2:] == ["a", "b"]
    assert stream.counts()["damaged"] >= 1
    assert stream.counts()["skipped"] + len(found) - 2 <= 2


ENDS = {
    "no mark": (WHOLE[:2560], "is cut: it has no end-of-archive mark"),
    "a few zeros": (WHOLE[: 2560 + 100], "is cut: it has no end-of-archive mark"),
    "one block of zeros": (WHOLE[: 2560 + 512], "is cut inside the zeros at its end"),
    "half a block of zeros": (WHOLE[:3600], "is cut inside the zeros at its end"),
    "garbage": (WHOLE + b"garbage", "has data after its end-of-archive mark, at byte 10240"),
    "garbage for padding": (WHOLE[:3584] + b"garbage" * 200, "data after its end-of-archive mark, at byte 3584"),
    "another archive": (WHOLE + tar([("c.txt", b"")]), "has data after its end-of-archive mark, at byte 10240"),
    "an archive after many zeros": (
        WHOLE + bytes(1 << 20) + tar([("c.txt", b"")]),
        "data after its end-of-archive mark, at byte 1058",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_that_is_none(tmp_path, name):
    """Without its mark a shard is cut: all its samples come but the last one, which may be half.
    What follows the mark is damage, which ``concatenated`` may explain.
    """
    data, message = ENDS[name]
    path, cut = put(tmp_path / "x.tar", data), "is cut" in message
    with pytest.raises(ShardError, match=message) as caught:
        samples([path])
    assert caught.value.offset == 2560
    assert ("load_tar(concatenated=True)" in str(caught.value)) != cut
    stream = Stream(group([path], {"on_error": "skip"}))
    assert keys(stream)[:1] == ["a"]
    assert stream.counts()["damaged"] == 1
    assert stream.counts()["skipped"] == 1 + ("archive" in name)
    if cut:
        assert by_reader(data, on_truncated="ignore") == [*TWO, ("", None)]
        assert keys(samples([path], {"on_truncated": "ignore"})) == ["a"]
        with pytest.warns(ShardWarning, match=message) as caught:
            assert keys(samples([path], {"on_truncated": "warn"})) == ["a"]
        assert len(caught) == 1


@pytest.mark.parametrize(
    "data",
    [WHOLE, WHOLE[:3584], WHOLE + bytes(512), WHOLE + bytes(1 << 24), bytes(1024), bytes(10240)],
    ids=["whole", "two blocks", "a block more", "16 MiB more", "empty", "empty record"],
)
def test_an_end_may_have_any_number_of_zeros(data):
    assert by_reader(data) == (TWO if data.strip(b"\0") else [])


@pytest.mark.parametrize("passed_over", [300, 200_000], ids=["read past", "sought past"])
def test_a_cut_is_seen_in_data_that_is_not_wanted(passed_over):
    """With fields= the data of others is passed over, which must not hide that it ends too
    early.
    """
    members = [("a.cls", b"1"), ("a.txt", b"y" * passed_over)]
    for left in (0, 1, 299):
        with pytest.raises(ShardError, match=f"is cut inside member 'a.txt' of {passed_over} bytes") as caught:
            by_reader(tar(members)[: 1536 + left], want=lambda name: name == "a.cls")
        assert caught.value.offset == 1024


@pytest.mark.parametrize("kind", COMPRESS)
def test_damage_in_compressed_data_is_told(tmp_path, kind):
    """Cut, changed, also before the place of a resume: the members before come, and only whole.
    Bytes after its end are a warning, since the tar has ended; an error if another archive may
    follow.
    """
    members = [(f"{number:03d}.bin", bytes((number * place) % 251 for place in range(9000))) for number in range(60)]
    data, path = COMPRESS[kind](tar(members)), str(tmp_path / "x.tar")
    put(tmp_path / "x.tar", data + bytes(1000))
    stream = Stream(load([path]))
    after(stream, 59)
    middle = len(data) // 2
    changed = data[:middle] + bytes(byte ^ 255 for byte in data[middle : middle + 60]) + data[middle + 60 :]
    for rest in (b"garbage" * 9, data[2:40]):
        found, [warning] = read(put(tmp_path / "x.tar", data + rest))
        assert len(found) == 60
        assert "has ended, and bytes follow its end" in warning
        assert "has damaged compressed data" in read(path, concatenated=True)[1][0]
        cut = COMPRESS[kind](tar(members, end=False)) + rest
        assert "has damaged compressed data" in read(put(tmp_path / "x.tar", cut))[1][0]
    for damaged in (changed, data[: len(data) // 3], data[:-20]):
        put(tmp_path / "x.tar", damaged)
        with pytest.raises(ShardError, match=r"damaged|checksum|cut|cannot be read on") as caught:
            samples([path])
        assert (caught.value.url, caught.value.offset % 512) == (path, 0)
        found, reported = read(path, on_error="skip", on_truncated="ignore")
        assert [sample["bin"] for sample in found] == [data for _, data in members[: len(found)]]
        assert reported or damaged in (data[: len(data) // 3], data[:-20])
    put(tmp_path / "x.tar", changed)
    with pytest.raises(ShardError):
        list(loaded(Stream(load([path])), stream.state_dict()))


def test_an_error_names_no_secret():
    """Not from the reader, and not from decompressing."""
    for data in (HTML, gzip.compress(WHOLE)[:50]):
        with pytest.raises(ShardError) as caught:
            list(TarReader(io.BytesIO(data), url="https://user:secret@host/x.tar?token=secret&part=1"))
        assert "secret" not in str(caught.value) + caught.value.url
        assert "part=1" in str(caught.value)


# Going on after it


@pytest.mark.parametrize(
    ("damaged", "left", "skipped"),
    [
        (b"0002.a", ["0000", "0003", "0004"], 2),  # 0001 may have lost a member too
        (b"0001.b", ["0000", "0002", "0003", "0004"], 1),  # its first member before, its last after
    ],
)
def test_reading_goes_on_at_the_next_valid_header(damaged, left, skipped, tmp_path):
    """One damaged header costs its member and the samples beside it, and is counted once."""
    data = tar(pairs(5, fields=("a", "b", "c")))
    [place] = [place for place in range(0, len(data), 512) if data[place : place + 6] == damaged]
    stream = Stream(group([put(tmp_path / "x.tar", flip(data, place + 1))], {"on_error": "skip"}))
    assert keys(stream) == left
    counts = {"delivered": len(left), "filtered": 0, "skipped": skipped, "dropped": 0, "damaged": 1}
    assert stream.counts() == counts


@pytest.mark.parametrize("cut", [1, 150, 511])
def test_a_cut_header_after_a_file_that_may_have_another_name(cut):
    """Reading on after damage passes over such a file, and what follows need not be a header."""
    data = tar([("a.txt", b"x"), ("b" * 96 + ".txt", b"y")], end=False) + WHOLE[:cut]
    errors = []
    assert not any(member.name for member in TarReader(io.BytesIO(flip(data, 2)), on_error=errors.append))
    assert [error.offset for error in errors] == [0, len(data) - cut]


def test_damage_after_damage_is_read_once():
    """A damaged header is no reason to read what follows again, wherever its size leads to."""
    count = 500
    data = b"".join(flip(header(b"%d.txt" % number, 1 << 20), 1) + header(b"x.cls") for number in range(count))
    errors, stream = [], Reads(data + END)
    members = list(TarReader(stream, on_error=errors.append))
    assert len(errors) == sum(member.name == "x.cls" for member in members) == count
    assert stream.count <= len(data) + 2 * len(END)


def test_the_size_in_a_damaged_header_is_not_trusted():
    """It may be what is damaged: the members that it would pass over are sound."""
    members = [("b.txt", b"b"), ("c.txt", b"c"), ("d.txt", b"d")]
    data = filled(flip(header(b"a.txt", 2048) + tar(members), 1))
    assert by_reader(data, on_error=lambda error: None) == [("", None), *members]


def test_an_oversize_member_is_passed_over_and_not_read():
    """Reading goes on after it, however large it is. There is no damage: a question mark in the
    next name is one.
    """
    data = tar([("a?.bin", b"a" * 10), ("b?.bin", b"b" * 300_000), ("c?.bin", b"c" * 10), ("d.bin", b"d")])
    stream, errors = Reads(data), []
    members = list(TarReader(stream, max_member_bytes=1000, on_error=errors.append))
    assert [member.name for member in members] == ["a?.bin", "", "c?.bin", "d.bin"]
    assert 0 <= min(stream.sizes) <= max(stream.sizes) <= 1000
    assert len(errors) == 1


def test_many_pax_records_are_read_in_linear_time():
    """A header of the greatest size, full of the smallest records."""
    content = b"6 a=b\n" * (MAX_HEADER_BYTES // 6)
    data = filled(header(b"x", len(content), kind=b"x") + padded(content) + tar(TWO))
    start = time.process_time()
    assert len(by_reader(data)) == 2
    assert time.process_time() - start < 5


MIB = 1 << 20


@pytest.mark.parametrize(
    ("records", "content", "given"),
    [
        ([(b"GNU.sparse.size", b"%d" % (12 * MIB)), (b"GNU.sparse.map", b"0,1")], b"x", 12 * MIB),
        (
            [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"%d" % (12 * MIB))],
            padded(b"1\n5\n1\n") + b"x",
            12 * MIB,
        ),
        ([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"9")], b"9999999\n" + b"0\n" * 1_500_000, None),
        ([(b"GNU.sparse.size", b"%d" % (17 * MIB)), (b"GNU.sparse.map", b"0,1")], b"x", None),
    ],
    ids=["holes", "holes in pax 1.0", "a large map", "too large"],
)
def test_a_sparse_member_takes_no_more_memory_than_a_member_may(records, content, given):
    """Its stored and its real size count together; the map is read up to 1 MiB."""
    data = io.BytesIO(pax(*records) + header(b"a.bin", len(content)) + padded(content) + END)
    refused = pytest.raises(ShardError, match="map does not fit|more than max_member_bytes")
    with memory_below(18 * MIB), contextlib.nullcontext() if given else refused:
        (member,) = TarReader(data, max_member_bytes=16 * MIB)
        assert len(member.data) == given
        assert member.data.count(b"x") == 1


# Half samples


@pytest.mark.parametrize(("on_error", "on_truncated"), [("raise", "raise"), ("skip", "raise"), ("raise", "ignore")])
def test_every_cut(tmp_path, on_error, on_truncated):
    """At each block, and beside it: whole samples only; what is missing is an error, or counted."""
    data = shard(5)
    for cut in range(512, data.rindex(b"caption") + 512, 512):
        for place in (cut - 1, cut, cut + 1):
            found, reported = read(put(tmp_path / "x.tar", data[:place]), on_error=on_error, on_truncated=on_truncated)
            assert all(sample.keys() > FIELDS.keys() for sample in found), place
            assert reported or on_truncated == "ignore", place
            assert len(found) <= place // 3072


@pytest.mark.parametrize(("on_error", "size"), [("raise", 512), ("skip", 512), ("skip", 4096), ("skip", RECORD)])
def test_every_zeroed_page(tmp_path, on_error, size):
    """Wherever it lies: whole samples only, and what is missing is reported; but zeros up to the
    end of the file cannot be told from an end.
    """
    data = shard(9)
    for start in range(0, len(data) - 1024, 512):
        damaged = zeroed(data, start, start + size)[: len(data)]
        if damaged == data:
            continue
        reaches_end = not damaged[start:].strip(b"\0")
        found, reported = read(put(tmp_path / "x.tar", damaged), on_error=on_error)
        assert all(sample.keys() > FIELDS.keys() for sample in found[: -1 if reaches_end else None]), start
        assert reported or len(found) == 9 or reaches_end, start


@pytest.mark.parametrize("stem", ["é", "n" * 120, "d" * 90 + "/" + "ä" * 700], ids=["not ASCII", "long", "very long"])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_every_damaged_block_of_names_in_extended_headers(tmp_path, form, stem):
    """Without its extended header, a file has another name, as of another sample."""
    data = tar([(f"{stem}{number}.{field}", b"data") for number in range(5) for field in ("cls", "txt")], format=form)
    names = {f"{stem}{number}" for number in range(5)}
    for start in range(0, len(data.rstrip(b"\0")), 512):
        block = data[start : start + 512]
        changes = [bytes(512)]
        if is_header(block):
            changes += [b"\xff" * 512, bytes([block[0] ^ 1]) + block[1:]]
        elif form == tarfile.PAX_FORMAT and start and is_header(data[start - 512 : start]):
            changes += [
                bytes([block[0] ^ 1]) + block[1:]
            ]  # a length; nothing shows that the bytes of a name are others
        for change in changes:
            damaged = data[:start] + change + data[start + 512 :]
            found, reported = read(put(tmp_path / "x.tar", damaged), on_error="skip")
            assert all(sample.keys() > {"cls", "txt"} for sample in found), start
            assert set(keys(found)) <= names, start
            assert reported or block[:4] == b"data", start


INNER = tar([("in/1.cls", b"1"), ("in/1.jpg", b"2"), ("in/2.cls", b"1"), ("in/2.jpg", b"2")])


@pytest.mark.parametrize(("damage", "place"), [("name", 0), ("size", 1), ("all", 1), ("zeros", 0)])
def test_damage_of_a_member_that_is_a_tar(tmp_path, damage, place):
    """Its members follow, as if they were those of the shard; the samples around it stay whole."""
    members = [(f"{number}.{name}", data) for number in range(4) for name, data in (("tar", INNER), ("txt", b"text"))]
    data, start = tar(members), place * (512 + len(INNER) + 1024)
    if damage in ("name", "size"):
        data = flip(data, start + {"name": 0, "size": 130}[damage])
    else:
        data = data[:start] + {"all": b"?", "zeros": b"\0"}[damage] * 512 + data[start + 512 :]
    found, reported = read(put(tmp_path / "x.tar", data), on_error="skip")
    assert keys(found)[-1] == "3"
    assert set(keys(found)) <= {"0", "1", "2", "3", "in/1", "in/2"}
    assert "damaged" in reported


# In a tar neither data nor the content of extended headers has a checksum, and that of a header is
# a plain sum: so nothing can see changes in the first two, or two that cancel out in a header. The
# bytes to change are those of headers, padding and ends.

PLAIN = [
    (f"{number}.{field}", bytes([number + 1]) * size) for number in range(5) for field, size in (("a", 0), ("b", 700))
]
LONG = [("n" * 120 + ".a", b"long"), ("n" * 120 + ".b", b"longer")]
MIXED = (
    tar(PLAIN[:4], end=False)
    + tar(LONG, format=1, end=False)
    + tar([*PLAIN[4:]], format=2, end=False)
    + tar([(name.replace("n", "m"), data) for name, data in LONG], format=2)
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A path, the samples of MIXED by their keys, and the places of its structure."""
    path, structure, place = tmp_path_factory.mktemp("damaged") / "x.tar", list[int](), 0
    original, _ = read(put(path, MIXED))
    while place < len(MIXED):
        block = MIXED[place : place + 512]
        end = place + 512 + (tarfile.TarInfo.frombuf(block, "utf-8", "strict").size if block.strip(b"\0") else 0)
        structure += [*range(place, place + 512), *range(end, end + (-end & 511))]
        place = end + (-end & 511)
    return path, {sample["__key__"]: sample for sample in original}, structure


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 1 << 30), bit=st.integers(0, 7), on_error=st.sampled_from(["raise", "skip"]))
def test_one_changed_byte_of_the_structure_never_makes_up_a_sample(scratch, place, bit, on_error):
    """Every sample that is returned is one of the shard's, whole."""
    path, original, structure = scratch
    data = bytearray(MIXED)
    data[structure[place % len(structure)]] ^= 1 << bit
    found, reported = read(put(path, bytes(data)), on_error=on_error, max_member_bytes=4096)
    assert all(sample == original[sample["__key__"]] for sample in found)
    assert reported or len(found) == len(original)


def test_hostile_tars():
    run = run_proof("fuzz_tar.py", "--rounds", 300)
    assert run.returncode == 0, run.stdout + run.stderr


# Zeros at the end of a shard: its end, or lost pages

ALL = {"jpg", "json", "txt"}


def uniform(count, image_bytes, fields=("jpg", "json", "txt")):
    """A shard of samples with the same fields."""
    sizes = {"jpg": image_bytes}
    return tar([(f"{n:05d}.{field}", b"x" * sizes.get(field, 100)) for n in range(count) for field in fields])


def fields_of(sample):
    return {name for name in sample if not name.startswith("__")}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(10, 40),
    image_bytes=st.sampled_from([100, 2_000, 20_000]),
    place=st.floats(0, 1),
    how=st.sampled_from(["cut", "zeroed block", "zeroed page", "preallocated"]),
)
def test_no_half_sample_of_a_uniform_shard_is_silent(tmp_path, count, image_bytes, place, how):
    """Wherever it is cut or zeroed from on, after 8 whole samples: an error, or a warning that
    names the sample; with "skip" it is dropped and counted.
    """
    data = uniform(count, image_bytes)
    each = (len(data.rstrip(b"\0")) + 511) // 512 * 512 // count
    step = {"cut": 1, "zeroed block": 512}.get(how, 4096)
    kept = 8 * each + int(place * (count - 8) * each)
    kept += -kept % step
    more = 0 if how == "cut" else max(0, len(data) - kept) + (how == "preallocated") * 10_000 * 512
    path = put(tmp_path / "x.tar", data[:kept] + bytes(more))
    found, reported = read(path)
    half = [sample["__key__"] for sample in found if fields_of(sample) != ALL]
    assert half in ([], [found[-1]["__key__"]])
    if half:
        [warning] = reported
        assert f"sample {half[0]!r} is the last one of shard" in warning
        assert "wds-pipes verify" in warning
    skipping, counted = read(path, on_error="skip")
    assert skipping == [sample for sample in found if sample["__key__"] not in half]
    assert counted or not (half or reported)


def test_only_what_all_samples_have_is_missed(tmp_path):
    """At least 8 of them, and the last of these fields; a resume compares with all of them, too."""
    whole = [(f"{n:03d}.{field}", b"x") for n in range(9) for field in ("jpg", "txt")]
    last = [("009.jpg", b"x")]
    [warning] = read(put(tmp_path / "x.tar", tar([*whole, *last])))[1]
    assert "sample '009' is the last one of shard" in warning
    assert "has no 'txt', unlike all samples before it" in warning
    assert "byte 18432" in warning
    for others in (whole[4:], whole[:9] + whole[10:], [*whole[:-1], ("008.cls", b"x")]):
        assert read(put(tmp_path / "x.tar", tar([*others, *last])))[1] == []
    assert read(put(tmp_path / "x.tar", tar([*whole, ("009.txt", b"x")])))[1] == []  # zeros take the last field
    path = put(tmp_path / "x.tar", tar([*whole, *last]))
    assert read(path, on_error="skip") == (read(path)[0][:-1], ["skipped"])


def test_all_readers_tell_of_it(tmp_path):
    """By the offsets of what the shard was, it is an error."""
    path = put(tmp_path / "x.tar", tar(pairs(11)))
    index_shards(path, offsets=True)
    whole = (tmp_path / "x.tar").read_bytes()
    end = whole.index(b"0010.cls")
    put(tmp_path / "x.tar", whole[:end] + bytes(len(whole) - end))
    data = wp.IndexedShards(path)
    assert data[9]["__key__"] == "0009"
    for read_last in (lambda: data[10], lambda: data[10:][0], lambda: data.by_key("0010"), lambda: list(data)):
        with pytest.raises(ShardError, match="ends at byte .*, and not at"):
            read_last()
    with pytest.raises(ShardError):
        list(wp.SampleList(path).fetch_samples())
    assert len(list(wp.SampleList(path).fetch_samples(on_error="skip"))) == 10
    told = "sample '0010' is the last one of shard .* and has no 'cls'"
    with pytest.warns(ShardWarning, match=told):
        index_shards(path, offsets=True)
    with pytest.warns(ShardWarning, match=told):
        assert len(list(tools.ls(path))) == 11
    [finding] = [one for one in tools.verify(path).findings if one.kind == "sample"]
    assert (finding.key, finding.byte) == ("0010", end - 1024)
    tools.repair(path, tmp_path / "out")
    assert len(samples(glob(str(tmp_path / "out/*.tar")))) == 10
    assert '"key": "0010"' in (tmp_path / "out/lost.jsonl").read_text()
    with pytest.warns(ShardWarning, match=told):
        tools.dedup(path, tmp_path / "deduped")


# Resuming beside damage

EXTENDED = tar([(f"é{n}.{field}", data) for n in range(3) for field, data in FIELDS.items()], format=tarfile.PAX_FORMAT)
DAMAGE = {
    "names in extended headers": EXTENDED[:9000] + b"?" + EXTENDED[9001:],
    "cut after a member": shard(3)[: 2 * 3072 + 1024],
    "cut after a sample": shard(3)[: 2 * 3072],
    "cut inside": shard(2)[:2900],
    "nothing": b"",
    "web page": HTML,
    "cut gz": gzip.compress(shard(2))[:-30],
    "too large": tar([("big.a", bytes(5000))]) + shard(1),
    "extended header": pax((b"path", b"x.a")) + flip(header(b"x.a"), 3) + shard(2),
    "zeros up to an end of records": zeroed(shard(7), 16384, 2 * RECORD),
    "zeros elsewhere": zeroed(shard(5), 4096, 8192),
    "zeros at the start": bytes(RECORD) + shard(5)[RECORD:],
    "two archives": shard(2) + shard(2, start=2),
    "two of other fields": shard(2) + shard(2, {"cls": b"1", "png": b""}, start=2),
    "preallocated": shard(4)[: 2 * 3072] + bytes(2 * RECORD),
    "zeros in place of the last members": shard(10)[: 9 * 3072 + 1024] + bytes(RECORD),
    "bytes after the end": shard(2)[: 2 * 3072] + bytes(1024) + b"garbage" * 300,
    "bytes and samples after the end": shard(2)[: 2 * 3072] + bytes(1024) + b"garbage!" * 192 + shard(2, start=2),
    "a damaged name": shard(4)[:3072] + b"?" + shard(4)[3073:],
    "a lost header": shard(4)[:3072] + b"?" * 512 + shard(4)[3584:],
    "no sample": tar([]),
}
WAYS = {
    "members": lambda urls, options: load(urls, **options),
    "samples": group,
    "a stage between": lambda urls, options: GroupByKey(Renewed(load(urls, **options))),
    "fields": lambda urls, options: group(urls, {**options, "on_truncated": "ignore"}, fields=["cls", "txt"]),
}


class Counts:
    """A stream whose items carry the counts at their place, so that check_resume compares these
    too.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self):
        for item in self.stream:
            position = self.stream.chain.dump(self.stream.position.mark)
            yield item, [{name: entry.get(name) for name in ("damaged", "skipped", "filtered")} for entry in position]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::wds_pipes.ShardWarning")
def test_a_resume_beside_damage_is_exact(tmp_path, way):
    """The samples, the state and the counts are those of an uninterrupted run, whatever the cut."""
    options = {"on_error": "skip", "max_member_bytes": 4000}
    for number, data in enumerate(DAMAGE.values()):
        urls = [put(tmp_path / f"{number}.tar", data), put(tmp_path / "sound.tar", shard(1))]
        [epoch, *_] = check_resume(lambda urls=urls: Counts(Stream(WAYS[way](urls, options))))
        assert len(epoch) >= 1


@pytest.mark.filterwarnings("ignore::wds_pipes.ShardWarning")
def test_an_index_is_not_made_of_such_shards(tmp_path):
    """It is made by the same rules."""
    sound = ("names in extended headers", "preallocated", "zeros in place of the last members", "no sample")
    for data in (data for name, data in DAMAGE.items() if name not in sound):
        with pytest.raises(ShardError):
            index_shards(put(tmp_path / "x.tar", data))


# Archives one after another. Between them writers leave nothing but the mark (Go, Java, tar -b1),
# records, or large records (tar -b 2048).


@pytest.mark.parametrize(("padding", "count"), [(1024, 2), (1536, 2), (RECORD, 1), (1 << 20, 2)])
def test_archives_one_after_another(tmp_path, padding, count):
    """They are read whole with concatenated=True, also empty ones and of other fields, and resumed;
    otherwise the error names it.
    """
    other = shard(count, {"cls": b""}, start=count)[: count * 512]
    path = put(tmp_path / "x.tar", shard(count)[: count * 3072] + bytes(2 * padding) + other + bytes(1024))
    found, reported = read(path, concatenated=True)
    assert (keys(found), reported) == ([f"{number:03d}" for number in range(2 * count)], [])
    check_resume(lambda: Stream(group([path], {"concatenated": True})))
    left, reported = read(path)
    assert left == found[: count - 1]
    assert f"byte {count * 3072}: it has " in reported[0]
    assert "pass load_tar(concatenated=True)" in reported[0]
    assert read(path, on_error="skip") == ([*left, *found[count + 1 :]], ["damaged", "skipped"])


def test_joined_archives_may_be_compressed_and_end_as_others(tmp_path):
    path = put(tmp_path / "x.tar.gz", gzip.compress(shard(2)) + gzip.compress(shard(2, start=2)))
    found, reported = read(path, concatenated=True)
    assert (len(found), reported) == (4, [])
    found, reported = read(put(tmp_path / "x.tar", shard(2) + b"garbage" * 200), concatenated=True)
    assert len(found) == 1
    assert "has data after its end-of-archive mark, at byte 10240" in reported[0]


# Fewer or more samples than said


@pytest.mark.parametrize(
    ("empty", "place"),
    [(tar([]), 0), (tar([(".hidden", b"h")]), 1), (header(b"folder/", kind=b"5") + END, 3)],
    ids=["no member", "hidden", "folder"],
)
@pytest.mark.filterwarnings("ignore:.*none makes a sample:wds_pipes.ShardWarning")
def test_an_empty_shard_that_should_have_samples_is_an_error(tmp_path, empty, place):
    """At the beginning, in the middle and at the end; resumed anywhere, the error comes all the
    same.
    """
    urls = [put(tmp_path / f"{number}.tar", empty if number == place else shard(3)) for number in range(4)]

    def chain(count=3):
        return wp.ShardList(urls, samples_per_shard=count).open_shards().load_tar().group_by_key()

    for make in (
        chain,
        lambda: chain().interleave_shards(2),
        lambda: wp.PipeLoader(chain(), batch_size=1, num_workers=0, rank=place % 2, world_size=2, lanes=4),
    ):
        pipe, states, message = make(), [make().state_dict()], "has only 0 samples, and samples_per_shard or the index"
        with pytest.raises(ShardError, match=message):  # noqa: PT012 - any of them may raise
            for _ in pipe:
                states.append(pipe.state_dict())
        for state in states[-2:]:
            with pytest.raises(ShardError, match=message):
                list(loaded(make(), state))
    assert len(list(chain([0 if number == place else 3 for number in range(4)]))) == 9
