"""The index of DALI: the bytes that its own program writes; tests/bench/interop.py asks DALI."""

import os
import tarfile

import pytest
from remote import content
from tars import fill, header, padded, pairs, put, tar

import wds_pipes as wp
from wds_pipes.tar import TarWriter, index_shards


def by_tarfile(path) -> bytes:
    """What DALI describes: the files that the standard library finds, in lines of one name up to
    the first dot.
    """
    lines, last = [], None
    with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            if not member.isreg():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, dot, extension = base.partition(".")
            if not dot:
                stem, extension = base[:-1], member.name
            stem = f"{folder}/{stem}" if "/" in member.name else stem
            if not stem or stem.endswith("/"):
                continue
            if stem != last:
                lines.append([])
            last = stem
            lines[-1] += [extension, str(member.offset_data), str(member.size), member.name]
    text = "".join(" ".join(line) + "\n" for line in lines)
    return f"v1.2 {len(lines)}\n{text}".encode("utf-8", "surrogateescape")


def odd(kind) -> list:
    """Members of many kinds."""

    def other(name, type, link=""):
        info = tarfile.TarInfo(name)
        info.type, info.linkname = type, link
        return info

    long = "" if kind == tarfile.USTAR_FORMAT else "x" * 150
    return [
        other("d", tarfile.DIRTYPE),
        ("d/a.txt", b"a" * 700),
        ("d/a.seg.png", b"b"),
        ("README", b"read me"),
        (".hidden.txt", b"h"),
        ("d/._x.txt", b"m"),
        ("__meta__/i.json", b"{}"),
        ("b.CLS", b"1"),
        other("s.txt", tarfile.SYMTYPE, "b.CLS"),
        ("b.txt", b""),
        other("h.txt", tarfile.LNKTYPE, "b.CLS"),
        (f"{long}c.txt", b"long"),
        (f"{long}c.cls", b"7"),
        ("d.e/c.txt", b"c"),
        ("\N{SNOWMAN}.txt", b"c"),
        ("./z.txt", b"zz"),
    ]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_the_bytes_are_those_of_dali(kind, tmp_path):
    path = put(tmp_path / "x.y.tar", tar(odd(kind), format=kind))
    index_shards(path, dali=True)
    assert content(tmp_path / "x.idx") == by_tarfile(path)
    assert content(tmp_path / "x.idx").startswith(
        b"v1.2 8\ntxt 1024 700 d/a.txt seg.png 2560 1 d/a.seg.png\nREADME 3584 7"
    )
    assert sorted(os.listdir(tmp_path)) == ["x.idx", "x.y.tar"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("a b.txt", b""), "member 'a b.txt' at byte 0 has a blank in its name"),
        (("a.t\tt", b""), "has a blank in its name"),
        (("a.", b""), "has no extension"),
        ((".hidden", b""), "has no samples"),
        (header(b"a.txt", 2, kind=b"7") + padded(b"ab"), "is sparse or contiguous"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*none makes a sample:wds_pipes.ShardWarning")
def test_what_has_no_place_in_it(member, message, tmp_path):
    path = put(tmp_path / "x.tar", member + bytes(1024) if isinstance(member, bytes) else tar([member]))
    with pytest.raises(wp.ShardError, match=message):
        index_shards(path, dali=True)
    assert os.listdir(tmp_path) == ["x.tar"]


def test_a_shard_that_is_written_again_loses_it(tmp_path):
    path = put(tmp_path / "x.tar", tar(pairs(2)))
    index_shards(path, dali=True, offsets=True)
    fill(TarWriter(path, overwrite=True), [{"__key__": "a", "txt": "text"}])
    assert os.listdir(tmp_path) == ["x.tar"]
    put(tmp_path / "x.idx", b"of another program")
    fill(TarWriter(path, overwrite=True), [{"__key__": "a", "txt": "text"}])
    assert sorted(os.listdir(tmp_path)) == ["x.idx", "x.tar"]
