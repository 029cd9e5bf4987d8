"""Whole-shard compression: told by content, read over all its parts."""

import bz2
import gzip
import hashlib
import io
import lzma
import sys
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import pairs, put, samples, tar

from wds_pipes import ShardError
from wds_pipes.io import decompress, detect
from wds_pipes.io.compression import damage, decompress_bytes, unreadable

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}
DATA = tar(pairs(20))


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("name", ["x.tar", "x.bin", "x"])
def test_the_name_does_not_matter(tmp_path, kind, name):
    path = put(tmp_path / name, COMPRESS[kind](DATA))
    assert len(samples([path])) == 20


@pytest.mark.parametrize("kind", COMPRESS)
def test_kinds_are_told_by_their_first_bytes(kind):
    assert detect(COMPRESS[kind](DATA)) == detect(COMPRESS[kind](b"")) == kind
    assert detect(DATA) == detect(b"") == detect(b"BZh9") == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("size", [1, 700, 5000])
def test_several_streams_in_one_file_are_one(kind, size):
    """As pigz, lbzip2 and pzstd write them, and as cat puts them together."""
    packed = b"".join(
        COMPRESS[kind](DATA[place : place + size]) for place in range(0, len(DATA) if size > 1 else 1500, size)
    )
    with decompress(io.BytesIO(packed), kind) as stream:
        assert stream.read() == (DATA if size > 1 else DATA[:1500])


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_read_gives_all_bytes_that_were_asked_for(kind):
    """However the data lies in blocks."""
    data = bytes(range(256)) * 5_000
    with decompress(io.BytesIO(COMPRESS[kind](data)), kind) as stream:
        assert stream.read(750_000) == data[:750_000]
        assert stream.read(512) == data[750_000:750_512]
        assert stream.read(len(data)) == data[750_512:]
        assert stream.read(1) == b""


def test_without_a_zstd_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    for name in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    path = put(tmp_path / "x.tar", COMPRESS["zst"](DATA))
    with pytest.raises(ShardError, match=r"pip install 'wds_pipes\[formats\]'"):
        samples([path], {"on_error": "skip"})  # never skipped: it is not the shard's fault


def unpacked(data, kind):
    """All that a compressed file holds."""
    with decompress(io.BytesIO(data), kind) as stream:
        return stream.read()


NOISE = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(3000))
assert not unpacked(COMPRESS["zst"](b""), "zst")  # damage() names the errors of what was imported
DAMAGE_OR_END = (EOFError, OSError, *damage())


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("streams", [1, 3])
def test_a_stream_that_ends_early_is_an_error_at_every_cut(kind, streams):
    """Not the part that is there: a cut anywhere but between two streams, also in the last byte
    of a checksum.
    """
    parts = [COMPRESS[kind](NOISE[number::streams]) for number in range(streams)]
    data = b"".join(parts)
    ends = {sum(map(len, parts[:number])) for number in range(1, streams)}
    for cut in sorted({*range(0, len(data), 997), *range(1, 40), *range(len(data) - 12, len(data))} - ends):
        with pytest.raises(EOFError):
            unpacked(data[:cut], kind)


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_cut_shard_is_an_error_at_every_cut(tmp_path, kind):
    """A warning would let a part of a shard pass as the whole of it."""
    packed = COMPRESS[kind](
        tar([(f"{number:03d}.bin", NOISE[number * 90 : number * 90 + 2000]) for number in range(100)])
    )
    for cut in range(11, len(packed), 7919):
        path = put(tmp_path / "x.tar", packed[:cut])
        with pytest.raises(ShardError, match="is cut short inside its compressed data"):
            samples([path])


@pytest.mark.parametrize("kind", COMPRESS)
def test_zeros_may_follow_a_stream_and_nothing_else(kind):
    """Archives are padded with zeros; a second stream whose first bytes are damaged must not be
    left out without a word.
    """
    one, two = COMPRESS[kind](b"one"), COMPRESS[kind](b"two")
    assert unpacked(one + bytes(4096), kind) == b"one"
    assert unpacked(one + bytes(512) + two, kind) == b"onetwo"
    for place in range(4):
        damaged = bytearray(two)
        damaged[place] ^= 4
        with pytest.raises(DAMAGE_OR_END):
            unpacked(one + bytes(damaged), kind)
    for rest in (b"garbage", b"\0\0garbage", two[:3], bytes(9) + two[:-1], b"\n"):
        with pytest.raises(DAMAGE_OR_END):
            unpacked(one + rest, kind)


@pytest.mark.parametrize("kind", COMPRESS)
def test_one_step_takes_a_bounded_amount_of_memory(kind):
    """However small the data is that unpacks to 32 MiB."""
    bomb = COMPRESS[kind](bytes(1 << 25))
    tracemalloc.start()
    with decompress(io.BytesIO(bomb), kind) as stream:
        total = 0
        while count := len(stream.read(1 << 20)):
            total += count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 1 << 25
    assert peak < 16 << 20


def test_an_xz_stream_that_wants_much_memory_is_refused():
    """A dictionary of 1.5 GiB, before it is taken."""
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    data = lzma.compress(NOISE, filters=filters)
    assert unpacked(data, "xz") == NOISE
    header = bytearray(data[12:24])  # size, flags, filter, its size, the dictionary, padding, checksum
    assert header[2:5] == bytes([0x21, 1, 16])
    header[4] = 39  # 3 GiB
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    with pytest.raises(lzma.LZMAError, match="Memory usage limit"):
        unpacked(data[:12] + bytes(header) + data[24:], "xz")


@pytest.mark.parametrize(("log", "frames"), [(28, 1), (31, 1), (31, 2)])
def test_a_zstd_stream_with_a_large_window_names_the_limit(tmp_path, log, frames):
    """It is not called damaged, also in a second frame."""
    parameters = zstandard.ZstdCompressionParameters(window_log=log, enable_ldm=True)
    large = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(large, closefd=False) as writer:
        writer.write(tar(pairs(3)))
    path = put(tmp_path / "x.tar", COMPRESS["zst"](b"") * (frames - 1) + large.getvalue())
    limit = rf"window of {1 << log >> 20} MiB \(zstd --long={log}\), and at most 128 MiB are read"
    with pytest.raises(ShardError, match=f"cannot be decompressed: .*{limit}"):
        samples([path])


@settings(deadline=None)
@given(
    content=st.binary(max_size=300),
    frames=st.integers(1, 2),
    damage=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 255)),
    more=st.sampled_from([b"", b"\0\0", b"x"]),
    size=st.booleans(),
)
def test_a_small_zstd_field_is_read_as_its_stream(content, frames, damage, more, size):
    """Or refused for the same reason: damaged, cut, with other bytes or streams after it."""
    pack = zstandard.ZstdCompressor(write_checksum=True, write_content_size=size).compress
    data = bytearray(pack(content) * frames + more)
    if damage is not None and damage[0] < len(data):
        data[damage[0]] = damage[1]
    try:
        expected = decompress(io.BytesIO(data), "zst").read()
    except unreadable() as error:
        with pytest.raises(type(error)):
            decompress_bytes(bytes(data), "zst", 1 << 20)
    else:
        assert decompress_bytes(bytes(data), "zst", 1 << 20) == expected
