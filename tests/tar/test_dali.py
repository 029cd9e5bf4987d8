"""The index of DALI: the bytes that its own program writes; tests/bench/interop.py asks DALI."""

import os
import tarfile

import pytest
from remote import content
from tars import KINDS, fill, header, padded, pairs, put, tar

import wds_pipes as wp
from wds_pipes.tar import TarWriter, index_shards

LINK, FOLDER = tarfile.TarInfo("s.txt"), tarfile.TarInfo("d")
LINK.type, LINK.linkname, FOLDER.type = tarfile.SYMTYPE, "b.CLS", tarfile.DIRTYPE
LONG = {"usual": "", "gnu": "x" * 150, "pax": "x" * 150}
# What DALI describes: in lines of one name up to the first dot, the extension and the name of each
# file. A file without a dot is a sample too.
LINES = [
    [("txt", "d/a.txt"), ("seg.png", "d/a.seg.png")],
    [("README", "README")],
    [("json", "__meta__/i.json")],
    [("CLS", "b.CLS"), ("txt", "b.txt")],
    [("txt", "{long}c.txt"), ("cls", "{long}c.cls")],
    [("txt", "d.e/c.txt")],
    [("txt", "\N{SNOWMAN}.txt")],
    [("txt", "./z.txt")],
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_the_bytes_are_those_of_dali(kind, tmp_path):
    names = [name.format(long=LONG[kind]) for line in LINES for _, name in line]
    members = [FOLDER, (".hidden.txt", b"h"), ("d/._x.txt", b"m"), *((name, name.encode()) for name in names)]
    path = put(tmp_path / "x.y.tar", tar([*members, LINK], format=KINDS[kind]))
    index_shards(path, dali=True)
    with tarfile.open(path, encoding="utf-8") as archive:
        places = {member.name: f"{member.offset_data} {member.size} {member.name}" for member in archive}
    lines = [" ".join(f"{ending} {places[name.format(long=LONG[kind])]}" for ending, name in line) for line in LINES]
    assert content(tmp_path / "x.idx").decode() == "\n".join(["v1.2 8", *lines, ""])
    assert sorted(os.listdir(tmp_path)) == ["x.idx", "x.y.tar"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar([("a b.txt", b"")]), "member 'a b.txt' at byte 0 has a blank in its name"),
        (tar([("a.t\tt", b"")]), "has a blank in its name"),
        (tar([("a.", b"")]), "has no extension"),
        (tar([(".hidden", b"")]), "has no samples"),
        (header(b"a.txt", 2, kind=b"7") + padded(b"ab") + bytes(1024), "is sparse or contiguous"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*none makes a sample:wds_pipes.ShardWarning")
def test_what_has_no_place_in_it(data, message, tmp_path):
    path = put(tmp_path / "x.tar", data)
    with pytest.raises(wp.ShardError, match=message):
        index_shards(path, dali=True)
    assert os.listdir(tmp_path) == ["x.tar"]


def test_a_shard_that_is_written_again_loses_it(tmp_path):
    """But not a file of this name that is none."""
    path, sample = put(tmp_path / "x.tar", tar(pairs(2))), {"__key__": "a", "txt": "text"}
    index_shards(path, dali=True, offsets=True)
    for left in (["x.tar"], ["x.idx", "x.tar"]):
        fill(TarWriter(path, overwrite=True), [sample])
        assert sorted(os.listdir(tmp_path)) == left
        put(tmp_path / "x.idx", b"of another program")
