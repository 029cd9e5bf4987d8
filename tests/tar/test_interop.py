"""Shards of every writer of the package are read alike by GNU tar, bsdtar, tarfile and webdataset.
Energon, DALI and the datasets library are tried by tests/bench/interop.py.
"""

import os
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

from tars import by_tarfile, by_webdataset, fill, pairs, put, tar

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.tar.writer import write_shard

# Usual keys, directories, other alphabets, and names that need two kinds of long headers.
KEYS = ("000000", "a/b-1/c_2", "größe/日本", "n" * 130, "d" * 120 + "/" + "n" * 60)
SAMPLES = [
    {"__key__": key, "txt": f"text {key}".encode(), "seg.bin": bytes([place]) * (511 + place), "cls": b"7"}
    for place, key in enumerate(sorted(KEYS))
]
MEMBERS = [(f"{sample['__key__']}.{field}", sample[field]) for sample in SAMPLES for field in ("cls", "seg.bin", "txt")]


def test_others_read_the_same(tmp_path):
    write_shard(str(tmp_path / "x.tar"), SAMPLES)
    fill(wp.ShardWriter(tmp_path / "x-%d.tar"), SAMPLES)
    shard = tmp_path / "x.tar"
    assert shard.read_bytes() == (tmp_path / "x-0.tar").read_bytes()
    assert by_tarfile(shard) == MEMBERS
    read = [{name: value for name, value in sample.items() if name != "__url__"} for sample in by_webdataset(shard)]
    assert read == SAMPLES
    for program in ("tar", "bsdtar"):
        if shutil.which(program) is None:
            continue
        folder = tmp_path / program
        folder.mkdir()
        unpack = [program, "-xf", str(shard), "-C", str(folder)]
        done = subprocess.run(
            unpack, env={**os.environ, "LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), program
        assert [(name, (folder / name).read_bytes()) for name, _ in MEMBERS] == MEMBERS
        assert sum(path.is_file() for path in folder.rglob("*")) == len(MEMBERS)


def test_offsets_are_the_bytes_that_energon_writes(tmp_path):
    """The first header of each sample, and the end of the last one, with ``struct.pack("Q")``."""
    path = put(tmp_path / "x.tar", tar([*pairs(3), *((f"{'y' * 120}{n}.txt", b"") for n in range(2))], format=1))
    index_shards(path, offsets=True)
    expected, last = b"", None
    with tarfile.open(path) as archive:
        for member in archive:
            key = member.name.partition(".")[0]
            expected += struct.pack("Q", member.offset) if key != last else b""
            last = key
        expected += struct.pack("Q", archive.offset)
    assert Path(f"{path}.idx").read_bytes() == expected
