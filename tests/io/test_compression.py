"""Whole-shard compression: told by content, read over all its parts."""

import bz2
import gzip
import io
import lzma
import sys

import pytest
import zstandard
from tars import pairs, put, samples, tar

from wds_pipes import ShardError
from wds_pipes.io import decompress, detect

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}
DATA = tar(pairs(20))


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("name", ["x.tar", "x.bin", "x"])
def test_the_name_does_not_matter(tmp_path, kind, name):
    path = put(tmp_path / name, COMPRESS[kind](DATA))
    assert len(samples([path])) == 20


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar.zst"])
def test_a_plain_tar_may_have_any_name(tmp_path, name):
    assert len(samples([put(tmp_path / name, DATA)])) == 20


@pytest.mark.parametrize("kind", COMPRESS)
def test_kinds_are_told_by_their_first_bytes(kind):
    assert detect(COMPRESS[kind](DATA)) == detect(COMPRESS[kind](b"")) == kind
    assert detect(DATA) == detect(b"") == detect(b"BZh9") == ""


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("size", [1, 700, 5000])
def test_several_streams_in_one_file_are_one(kind, size):
    """As pigz, lbzip2 and pzstd write them, and as cat puts them together."""
    packed = b"".join(COMPRESS[kind](DATA[place : place + size]) for place in range(0, len(DATA) if size > 1 else 1500, size))
    with decompress(io.BytesIO(packed), kind) as stream:
        assert stream.read() == (DATA if size > 1 else DATA[:1500])


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_read_gives_all_bytes_that_were_asked_for(kind):
    """However the data lies in blocks."""
    data = bytes(range(256)) * 20_000
    with decompress(io.BytesIO(COMPRESS[kind](data)), kind) as stream:
        assert stream.read(3_000_000) == data[:3_000_000]
        assert stream.read(512) == data[3_000_000:3_000_512]
        assert stream.read(len(data)) == data[3_000_512:]
        assert stream.read(1) == b""


def test_a_zstd_shard_whose_frames_have_no_sizes(tmp_path):
    """As a stream writes them."""
    file = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
        packed.write(DATA)
    assert len(samples([put(tmp_path / "x.tar", file.getvalue())])) == 20


def test_a_zstd_skippable_frame_at_the_start(tmp_path):
    """pzstd writes one."""
    data = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + COMPRESS["zst"](DATA)
    assert len(samples([put(tmp_path / "x.tar", data)])) == 20


def test_without_a_zstd_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    path = put(tmp_path / "x.tar", COMPRESS["zst"](DATA))
    with pytest.raises(ShardError, match=r"pip install 'wds_pipes\[formats\]'"):
        samples([path], {"on_error": "skip"})  # never skipped: it is not the shard's fault


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown compression 'zip'"):
        decompress(io.BytesIO(), "zip")


@pytest.mark.parametrize("kind", COMPRESS)
def test_closing_closes_what_is_below(kind):
    stream = decompress(io.BytesIO(COMPRESS[kind](DATA)), kind)
    stream.read(10)
    stream.close()
    assert stream.closed
