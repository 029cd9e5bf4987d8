"""Every kind of damage is told by an error or a warning, and no damage hangs, takes memory
without bound, or makes up a sample.
"""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import time
import warnings

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import after, loaded
from tars import END, Reads, by_reader, filled, header, load, padded, pairs, pax, put, record, samples, tar

from wds_pipes import SampleError, ShardError, ShardWarning
from wds_pipes.core.stream import Stream
from wds_pipes.stages import GroupByKey
from wds_pipes.tar import TarReader
from wds_pipes.tar.headers import MAX_HEADER_BYTES
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
MENDS = ("rite or fetch it again", "Pack the files again", "check ", "aise that limit", "rite the shard again")
CUTS = {name for name in BROKEN if name.startswith(("cut", "zero bytes", "extended header", "old sparse map cut"))}


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
    options = {"max_member_bytes": 1000, "on_truncated": "warn"}
    if name in CUTS:
        with pytest.warns(ShardWarning) as warned:
            assert samples([path], options) == []
        assert [message in str(warning.message) for warning in warned] == [True]
        assert samples([path], {**options, "on_truncated": "ignore"}) == []
    else:
        with pytest.raises(ShardError):
            samples([path], options)
    stream = Stream(GroupByKey(load([path, good], max_member_bytes=1000, on_error="skip")))
    keys = [sample["__key__"] for sample in stream]
    assert keys[-2:] == ["a", "b"]
    assert stream.counts()["damaged"] >= 1
    assert stream.counts()["skipped"] + len(keys) - 2 <= 2


@pytest.mark.parametrize(
    ("data", "cut"),
    [
        (WHOLE[:2560], "is cut: it has no end-of-archive mark"),
        (WHOLE[: 2560 + 100], "is cut: it has no end-of-archive mark"),
        (WHOLE[: 2560 + 512], "is cut inside the zeros at its end"),
        (WHOLE[:3600], "is cut inside the zeros at its end"),
    ],
    ids=["no mark", "a few zeros", "one block of zeros", "half a block of zeros"],
)
def test_a_shard_without_its_mark_is_cut(tmp_path, data, cut):
    """All its members come, and all its samples but the last one, which may be half."""
    path = put(tmp_path / "x.tar", data)
    with pytest.raises(ShardError, match=cut) as caught:
        samples([path])
    assert caught.value.offset == 2560
    assert by_reader(data, on_truncated="ignore") == [*TWO, ("", None)]
    assert [sample["__key__"] for sample in samples([path], {"on_truncated": "ignore"})] == ["a"]
    with pytest.warns(ShardWarning, match=cut) as caught:
        assert [sample["__key__"] for sample in samples([path], {"on_truncated": "warn"})] == ["a"]
    assert len(caught) == 1
    stream = Stream(GroupByKey(load([path], on_error="skip")))
    assert [sample["__key__"] for sample in stream] == ["a"]
    assert (stream.counts()["damaged"], stream.counts()["skipped"]) == (1, 1)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (WHOLE + b"garbage", "has data after its end-of-archive mark, at byte 10240"),
        (WHOLE[:3584] + b"garbage" * 200, "has data after its end-of-archive mark, at byte 3584"),
        (WHOLE + tar([("c.txt", b"")]), "has data after its end-of-archive mark, at byte 10240"),
        (WHOLE + bytes(10240), "has more than 11264 bytes of zeros"),
    ],
    ids=["garbage", "garbage for padding", "another archive", "zeros"],
)
def test_what_follows_the_mark_is_damage(tmp_path, data, what):
    path = put(tmp_path / "x.tar", data)
    with pytest.raises(ShardError, match=what) as caught:
        samples([path])
    assert caught.value.offset == 2560
    assert "load_tar(concatenated=True)" in str(caught.value)
    stream = Stream(GroupByKey(load([path], on_error="skip")))
    assert {sample["__key__"] for sample in stream} <= {"a", "b"}
    assert stream.counts()["damaged"] == 1


@pytest.mark.parametrize(
    "data",
    [WHOLE, WHOLE[:3584], WHOLE + bytes(512), WHOLE[: 3584 + 10240], bytes(1024), bytes(10240)],
    ids=["whole", "two blocks", "more zeros", "a record more", "empty", "empty record"],
)
def test_an_end_may_have_up_to_a_record_of_zeros(tmp_path, data):
    members = TWO if data.strip(b"\0") else []
    assert by_reader(data) == members
    assert [sample["txt"] for sample in samples([put(tmp_path / "x.tar", data)])] == [content for _, content in members]


@pytest.mark.parametrize("passed_over", [300, 200_000], ids=["read past", "sought past"])
@pytest.mark.parametrize("left", [0, 1, 299])
def test_a_cut_is_seen_in_data_that_nobody_wants_too(passed_over, left):
    """With fields= the data of others is passed over, which must not hide that it ends too
    early.
    """
    data = tar([("a.cls", b"1"), ("a.txt", b"y" * passed_over)])[: 1536 + left]
    with pytest.raises(ShardError, match=f"is cut inside member 'a.txt' of {passed_over} bytes") as caught:
        by_reader(data, want=lambda name: name == "a.cls")
    assert caught.value.offset == 1024
    whole = tar([("a.cls", b"1"), ("a.txt", b"y" * passed_over)])[: 1536 + passed_over + (-passed_over & 511)]
    assert by_reader(whole + END, want=lambda name: name == "a.cls") == [("a.cls", b"1"), ("a.txt", None)]


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("part", [0.3, 0.97])
def test_truncated_compressed_data(tmp_path, kind, part):
    """Raised, or warned of with on_truncated="warn"; the members before are given, and only
    whole.
    """
    members = [
        (f"{number:03d}.bin", bytes((number * place) % 251 for place in range(700)) + b"%d" % number)
        for number in range(200)
    ]
    data = COMPRESS[kind](tar(members))
    path = put(tmp_path / "x.tar", data[: int(len(data) * part)])
    with pytest.raises(ShardError, match="is cut|is empty"):
        samples([path])
    with pytest.warns(ShardWarning, match="is cut|is empty"):
        found = samples([path], {"on_truncated": "warn"})
    assert [sample["bin"] for sample in found] == [data for _, data in members[: len(found)]]
    assert len(found) < 200


@pytest.mark.parametrize("kind", COMPRESS)
def test_damage_in_compressed_data_is_told(tmp_path, kind):
    """It is a ShardError that says so, also if a resume decompresses up to its place."""
    members = [(f"{number:03d}.bin", bytes((number * place) % 251 for place in range(9000))) for number in range(60)]
    data = COMPRESS[kind](tar(members))
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    stream = Stream(load([str(path)]))
    after(stream, 59)
    state = stream.state_dict()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(byte ^ 255 for byte in data[middle : middle + 60]) + data[middle + 60 :])
    with pytest.raises(ShardError, match=r"damaged|checksum|cut|cannot be read on") as caught:
        samples([str(path)])
    assert (caught.value.url, caught.value.offset % 512) == (str(path), 0)
    stream = loaded(Stream(load([str(path)])), state)
    with pytest.raises(ShardError) as caught:
        list(stream)
    assert caught.value.url == str(path)


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("rest", [b"garbage" * 9, COMPRESS["gz"](WHOLE)[2:]], ids=["garbage", "half a stream"])
def test_bytes_behind_compressed_data(tmp_path, kind, rest):
    """All members come before the error: it may be another stream of the shard that is damaged.
    Zeros are none: some programs fill up the last block of a tape or a page.
    """
    assert len(samples([put(tmp_path / "y.tar", COMPRESS[kind](WHOLE) + bytes(1000))])) == 2
    path = put(tmp_path / "x.tar", COMPRESS[kind](WHOLE) + rest)
    found = []
    with pytest.raises(ShardError, match=r"damaged compressed data|cannot be read on|cut short"):
        found += (sample["__key__"] for sample in Stream(GroupByKey(load([path]))))
    assert found[:1] == ["a"]


def test_an_error_names_no_secret(tmp_path):
    """Not from the reader, and not from decompressing."""
    for data in (HTML, gzip.compress(WHOLE)[:50]):
        reader = TarReader(io.BytesIO(data), url="https://user:secret@host/x.tar?token=secret&part=1")
        with pytest.raises(ShardError) as caught:
            list(reader)
        assert "secret" not in str(caught.value) + caught.value.url
        assert "part=1" in str(caught.value)


@pytest.mark.parametrize(
    ("damaged", "left", "skipped"),
    [
        (b"0002.a", ["0000", "0003", "0004"], 2),  # 0001 may have lost a member too
        (b"0001.b", ["0000", "0002", "0003", "0004"], 1),  # its first member before, its last behind
    ],
)
def test_the_walk_goes_on_at_the_next_valid_header(damaged, left, skipped, tmp_path):
    """One damaged header costs its member and the samples beside it, and is counted once."""
    data = tar(pairs(5, fields=("a", "b", "c")))
    [place] = [place for place in range(0, len(data), 512) if data[place : place + 6] == damaged]
    stream = Stream(GroupByKey(load([put(tmp_path / "x.tar", flip(data, place + 1))], on_error="skip")))
    assert [sample["__key__"] for sample in stream] == left
    counts = {"delivered": len(left), "filtered": 0, "skipped": skipped, "dropped": 0, "damaged": 1}
    assert stream.counts() == counts


@pytest.mark.parametrize("cut", [1, 150, 300, 511])
def test_a_cut_header_after_a_file_that_may_have_another_name(cut):
    """Reading on after damage passes over such a file, and what follows need not be a header."""
    data = tar([("a.txt", b"x"), ("b" * 96 + ".txt", b"y")], end=False) + WHOLE[:cut]
    errors = []
    assert not any(member.name for member in TarReader(io.BytesIO(flip(data, 2)), on_error=errors.append))
    assert [error.offset for error in errors] == [0, len(data) - cut]


def test_damage_after_damage_is_read_once():
    """A damaged header is no reason to read what follows again, wherever its size leads to."""
    count = 3000
    data = b"".join(flip(header(b"%d.txt" % number, 1 << 20), 1) + header(b"x.cls") for number in range(count))
    errors, stream = [], Reads(data + END)
    members = list(TarReader(stream, on_error=errors.append))
    assert len(errors) == sum(member.name == "x.cls" for member in members) == count
    assert stream.count <= len(data) + 2 * len(END)


def test_the_size_in_a_damaged_header_is_not_trusted():
    """It may be what is damaged: the members that it would pass over are sound."""
    data = header(b"a.txt", 2048) + tar([("b.txt", b"b"), ("c.txt", b"c"), ("d.txt", b"d")])
    assert by_reader(filled(flip(data, 1)), on_error=lambda error: None) == [
        ("", None),
        ("b.txt", b"b"),
        ("c.txt", b"c"),
        ("d.txt", b"d"),
    ]


def test_an_oversize_member_is_passed_over_not_read(tmp_path):
    """With on_error="skip" the walk goes on right behind it, however large it is."""
    data = tar([("a.bin", b"a" * 10), ("b.bin", b"b" * 300_000), ("c.bin", b"c" * 10)])
    stream, errors = Reads(data), []
    members = list(TarReader(stream, max_member_bytes=1000, on_error=errors.append))
    assert [(member.name, member.data) for member in members] == [
        ("a.bin", b"a" * 10),
        ("", None),
        ("c.bin", b"c" * 10),
    ]
    assert 0 <= min(stream.sizes) <= max(stream.sizes) <= 1000
    assert len(errors) == 1


@pytest.mark.parametrize(
    "bad", [{"max_member_bytes": 0}, {"on_truncated": "skip"}, {"on_error": "warn"}, {"max_errors": -1}]
)
def test_wrong_options_are_told_when_the_pipe_is_built(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        load(["x.tar"], **bad)


def test_many_pax_records_are_read_in_linear_time():
    """A header of the greatest size, full of the smallest records."""
    content = b"6 a=b\n" * (MAX_HEADER_BYTES // 6)
    data = filled(header(b"x", len(content), kind=b"x") + padded(content) + tar(TWO))
    start = time.process_time()
    assert len(by_reader(data)) == 2
    assert time.process_time() - start < 5


# Random damage. In a tar neither data nor the content of extended headers has a checksum, and that
# of a header is a plain sum: so nothing can see changes in the first two, or two that cancel out in
# a header. The bytes to change are those of headers, padding and ends, for the strictest property
# one at a time.

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
ORIGINAL: dict = {}
STRUCTURE: list[int] = []


def originals(tmp_path_factory) -> None:
    if not ORIGINAL:
        path = put(tmp_path_factory.mktemp("whole") / "x.tar", MIXED)
        ORIGINAL.update(
            {
                sample["__key__"]: {name: value for name, value in sample.items() if name != "__url__"}
                for sample in samples([path])
            }
        )
        place = 0
        while place < len(MIXED):
            block = MIXED[place : place + 512]
            size = tarfile.TarInfo.frombuf(block, "utf-8", "strict").size if block.strip(b"\0") else 0
            STRUCTURE.extend(
                [*range(place, place + 512), *range(place + 512 + size, place + 512 + size + (-size & 511))]
            )
            place += 512 + size + (-size & 511)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    originals(tmp_path_factory)
    return tmp_path_factory.mktemp("damaged") / "x.tar"


def outcome(path, data: bytes, on_error: str):
    """What came, and whether something was told: an error, a warning or a count."""
    path.write_bytes(data)
    stream = Stream(
        GroupByKey(
            load([str(path)], max_member_bytes=4096, on_error=on_error), on_error=on_error, on_repeated_key="warn"
        )
    )
    found, told = [], False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for sample in stream:
                found.append({name: value for name, value in sample.items() if name != "__url__"})
        except (ShardError, SampleError):
            told = True
    position = stream.chain.dump(stream.position.mark) if stream.position.mark else [{}] * 4
    told = told or bool(caught) or position[2].get("damaged", 0) > 0 or position[3].get("skipped", 0) > 0
    return found, told


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 1 << 30), bit=st.integers(0, 7), on_error=st.sampled_from(["raise", "skip"]))
def test_one_changed_byte_of_the_structure_never_makes_up_a_sample(scratch, place, bit, on_error):
    """Every sample that is given is one of the shard's, whole."""
    data = bytearray(MIXED)
    data[STRUCTURE[place % len(STRUCTURE)]] ^= 1 << bit
    found, told = outcome(scratch, bytes(data), on_error)
    for sample in found:
        assert sample == ORIGINAL[sample["__key__"]]
    assert told or len(found) == len(ORIGINAL)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["flip", "delete", "insert", "repeat"]),
            st.integers(0, 1 << 30),
            st.integers(1, 1500),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=4,
    ),
    on_error=st.sampled_from(["raise", "skip"]),
)
def test_any_damage_ends_and_is_told_if_it_shows(scratch, changes, on_error):
    """Flips, deletions, insertions and repeats anywhere in the structure: no hang, no other
    exception, nothing made up without a word.

    Lengths are odd, since a tar from which whole members were taken is a valid one.
    """
    data = bytearray(MIXED)
    for what, where, count, value in changes:
        place = STRUCTURE[where % len(STRUCTURE)] % len(data)
        if what == "flip":
            data[place] ^= value
        elif what == "delete":
            del data[place : place + (count | 1)]
        elif what == "insert":
            data[place:place] = bytes([value]) * count
        else:
            data[place:place] = data[place : place + count]
        if not data:
            break
    found, told = outcome(scratch, bytes(data), on_error)
    made_up = [sample for sample in found if sample != ORIGINAL.get(sample["__key__"])]
    assert told or not made_up


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=3000))
def test_noise_is_no_shard(scratch, data):
    """Whatever the bytes are: a ShardError, or nothing where they are only zeros."""
    found, told = outcome(scratch, data, "raise")
    assert found == []
    assert told or not data.strip(b"\0")


@settings(max_examples=100, deadline=None)
@given(
    fields=st.lists(
        st.tuples(
            st.sampled_from([b"0", b"\0", b"7", b"S", b"x", b"g", b"L", b"K", b"1", b"5", b"Z", b"V"]),
            st.one_of(st.integers(0, 5000), st.integers(0, 1 << 70), st.binary(min_size=12, max_size=12)),
            st.binary(max_size=1200),
        ),
        max_size=6,
    ),
    on_error=st.sampled_from(["raise", "skip"]),
)
def test_valid_headers_with_any_size_and_kind_take_no_more_memory_than_allowed(fields, on_error):
    """No read is larger than a member or a header may be, whatever the sizes say."""
    data = b""
    for kind, size, content in fields:
        digits = (
            size
            if isinstance(size, bytes)
            else b"%011o\0" % size
            if size < 8**11
            else b"\x80" + size.to_bytes(11, "big")
        )
        data += header(b"a.txt", kind=kind, at_124=digits) + padded(content)
    stream, errors = Reads(data + END), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for member in TarReader(
                stream, max_member_bytes=4096, on_error=errors.append if on_error == "skip" else None
            ):
                assert member.data is None or len(member.data) <= 4096
        except ShardError:
            assert on_error == "raise"
    assert 0 <= min(stream.sizes, default=0) <= max(stream.sizes, default=0) <= MAX_HEADER_BYTES
    assert len(errors) <= len(data) // 512 + 2


@settings(max_examples=100, deadline=None)
@given(
    content=st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.sampled_from(
                [
                    b"path",
                    b"size",
                    b"GNU.sparse.map",
                    b"GNU.sparse.size",
                    b"GNU.sparse.major",
                    b"GNU.sparse.realsize",
                    b"GNU.sparse.name",
                ]
            ).flatmap(lambda key: st.binary(max_size=9).map(lambda value: record(key, value)))
        ).map(b"".join),
    ),
    kind=st.sampled_from([b"x", b"g", b"X"]),
    data=st.binary(max_size=600),
)
def test_any_pax_header_is_read_or_told(content, kind, data):
    """No other exception than ShardError comes out of it."""
    shard = header(b"x", len(content), kind=kind) + padded(content) + header(b"a.txt", len(data)) + padded(data) + END
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            by_reader(shard, max_member_bytes=4096)
        except ShardError as error:
            assert error.offset is not None  # noqa: PT017


@pytest.mark.parametrize(("grouped", "on_truncated"), [(False, "raise"), (True, "warn")])
def test_resume_is_exact_around_damage(tmp_path, grouped, on_truncated):
    """Each damaged place is met once, wherever the run is cut: at a shard's first byte, in the
    middle, in data, at the end.
    """
    data = tar(pairs(5))
    urls = [
        put(tmp_path / "0.tar", data),
        put(tmp_path / "1.tar", flip(data, 1)),
        put(tmp_path / "2.tar", flip(data, 512 + 512 * 2 + 1)),
        put(tmp_path / "3.tar", data[:2900]),
        put(tmp_path / "4.tar", b""),
        put(tmp_path / "5.tar", HTML),
        put(tmp_path / "6.tar", flip(tar(pairs(4), format=2), 1)),
        put(tmp_path / "7.tar", gzip.compress(data)[:-30]),
        put(tmp_path / "8.tar", pax((b"path", b"x.a")) + flip(header(b"x.a"), 3) + tar(pairs(2))),
        put(tmp_path / "9.tar", tar([("big.a", bytes(5000))]) + tar(pairs(3))),
    ]

    def make():
        chain = load(urls, on_error="skip", on_truncated=on_truncated, max_member_bytes=4000)
        return Counts(Stream(GroupByKey(chain) if grouped else chain))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (epoch, *_) = check_resume(make)
    assert len(epoch) > 10


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
            yield (
                item,
                [
                    {name: value for name, value in entry.items() if name in ("damaged", "skipped", "filtered")}
                    for entry in position
                ],
            )
