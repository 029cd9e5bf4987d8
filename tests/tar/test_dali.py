"""The index of DALI: the bytes that its own program writes, and samples by it; and what Energon and
DALI themselves read, where they are installed.
"""

import contextlib
import io
import os
import struct
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import samples
from remote import bare, content
from tars import filled, header, padded, pairs, put, tar

import wds_pipes as wp
from wds_pipes.tar import ShardWriter, TarWriter, index_shards


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


NAMES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "d/", "d.e/", "./", "__meta__/", ".", "x" * 120 + "/"]),
    st.sampled_from(["a", "b", "\u00e9"]),
    st.sampled_from(["", ".x", ".X", ".y", ".x.y"]),
)


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 1100)), max_size=12), st.sampled_from([1, 2]))
def test_the_bytes_are_those_of_dali_whatever_the_names(tmp_path, members, kind):
    path = put(tmp_path / "x.tar", tar(((name, bytes(size)) for name, size in members), format=kind))
    expected = by_tarfile(path)
    try:
        index_shards(path, dali=True, key_split=lambda name: None)
    except wp.ShardError as error:
        assert "has no samples, which DALI refuses" in str(error)  # noqa: PT017
        assert expected == b"v1.2 0\n"
    else:
        assert content(tmp_path / "x.idx") == expected


def test_files_of_v7_have_a_place(tmp_path):
    data = header(b"a.txt", 2, kind=b"\0") + padded(b"v7")
    path = put(tmp_path / "x.tar", filled(data + tar(pairs(1), end=False)))
    index_shards(path, dali=True)
    assert content(tmp_path / "x.idx").startswith(b"v1.2 2\ntxt 512 2 a.txt\n")


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
def test_what_has_no_place_in_it(member, message, tmp_path):
    path = put(tmp_path / "x.tar", member + bytes(1024) if isinstance(member, bytes) else tar([member]))
    with pytest.raises(wp.ShardError, match=message):
        index_shards(path, dali=True)
    assert os.listdir(tmp_path) == ["x.tar"]
    with TarWriter(tmp_path / "a.tar.gz") as writer:
        writer.write({"__key__": "a", "txt": "text"})
    with pytest.raises(ValueError, match="only uncompressed shards have offsets"):
        index_shards(tmp_path / "a.tar.gz", dali=True)


# As offsets


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_samples_by_an_index_of_dali(kind, tmp_path):
    path = put(tmp_path / "x.tar", tar(odd(kind), format=kind))
    index_shards(path, dali=True)
    data, expected = wp.IndexedShards(path), list(samples(path, shuffle=False))
    assert list(data) == expected
    assert [data[number] for number in range(-len(expected), 0)] == expected
    with pytest.raises(wp.ShardError, match="has no index of keys"):
        data.by_key("b")
    folder = tmp_path / "folder"
    folder.mkdir()
    os.rename(tmp_path / "x.idx", folder / "x.idx")
    assert list(wp.IndexedShards(path, index=folder)) == expected
    with pytest.raises(wp.ShardError, match=r"there is no .*x\.tar\.idx.*--offsets"):
        len(wp.IndexedShards(path))


def test_remote_samples_by_an_index_of_dali(web, tmp_path):
    path = put(tmp_path / "x.tar", tar(pairs(20)))
    index_shards(path, dali=True)
    url = web.put("d/x.tar", content(path))
    web.put("d/x.idx", content(tmp_path / "x.idx"))
    assert list(map(bare, wp.IndexedShards(url))) == list(map(bare, samples(path, shuffle=False)))


def test_a_shard_that_is_written_again_loses_it(tmp_path):
    path = put(tmp_path / "x.tar", tar(pairs(2)))
    index_shards(path, dali=True, offsets=True)
    with TarWriter(path, overwrite=True) as writer:
        writer.write({"__key__": "a", "txt": "text"})
    assert os.listdir(tmp_path) == ["x.tar"]
    put(tmp_path / "x.idx", b"of another program")
    with TarWriter(path, overwrite=True) as writer:
        writer.write({"__key__": "a", "txt": "text"})
    assert sorted(os.listdir(tmp_path)) == ["x.idx", "x.tar"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"v1.1 1\ntxt 512 3\n", "not that of version 1.2"),
        (b"v1.2 2\ntxt 512 3 a.txt\n", "has 1 lines, not one for each of 2 samples"),
        (b"v1.2 999999999999999999\n", "has 0 lines"),
        (b"v1.2 1\ntxt 512 3 a.txt", "has 0 lines|has 1 lines"),
        (b"v1.2 1\ntxt 512 a.txt\n", "line 2 is not of extensions"),
        (b"v1.2 1\n\n", "line 2 is not of extensions"),
        (b"v1.2 1\ntxt 100 3 a.txt\n", "'a.txt' cannot begin at byte '100'"),
        (b"v1.2 1\ntxt 512 -3 a.txt\n", "cannot begin at byte '512'"),
        (b"v1.2 1\ntxt 512 99999999999999999999999 a.txt\n", "cannot begin"),
        (b"v1.2 1\ntxt 512 99999999 a.txt\n", "it has 10240 bytes"),
        (b"v1.2 1\ncls 512 3 a.txt\n", "file 'a.txt' does not belong there"),
        (b"v1.2 1\ntxt 512 3 a.txt cls 1536 3 b.cls\n", "file 'b.cls' does not belong there"),
        (b"v1.2 2\ntxt 512 3 a.txt\ncls 1536 3 a.cls\n", "line 3: file 'a.cls' does not belong there"),
        (b"v1.2 2\ntxt 1024 3 a.txt\ntxt 512 3 b.txt\n", "line 3: file 'b.txt' cannot begin at byte '512'"),
    ],
)
def test_a_damaged_index_is_an_error_in_words(data, message, tmp_path):
    path = put(tmp_path / "x.tar", tar([("a.txt", b"abc")]))
    put(tmp_path / "x.idx", data)
    with pytest.raises(wp.ShardError, match=message) as told:
        wp.IndexedShards(path)[0]
    assert "Make it with: wds-pipes index SHARDS --offsets" in str(told.value)


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    """A shard of nine samples, and its index of DALI."""
    directory = tmp_path_factory.mktemp("nine")
    with ShardWriter(directory / "x-%d.tar") as writer:
        for number in range(9):
            writer.write({"__key__": f"{number:03d}", "cls": number, "txt": "x" * 10 * number})
    index_shards(directory / "x-0.tar", dali=True)
    return directory, content(directory / "x-0.idx")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_harmless(data, nine):
    directory, right = nine
    path = directory / "x-0.tar"
    expected = {sample["__key__"]: sample for sample in samples(str(path), shuffle=False)}
    place, length = data.draw(st.integers(0, len(right) - 1)), data.draw(st.integers(1, 40))
    lines = right.splitlines(keepends=True)
    wrong = {
        "cut": right[:place],
        "flip": right[:place] + bytes([right[place] ^ data.draw(st.integers(1, 255))]) + right[place + 1 :],
        "digit": right[:place] + data.draw(st.sampled_from([b"0", b"5", b" ", b"\n", b"-"])) + right[place + 1 :],
        "remove": right[:place] + right[place + length :],
        "insert": right[:place] + data.draw(st.binary(max_size=20)) + right[place:],
        "lines": b"".join(lines[:1] + data.draw(st.permutations(lines[1:]))),
        "fewer": b"v1.2 8\n" + b"".join(lines[1:5] + lines[6:]),
    }[data.draw(st.sampled_from(["cut", "flip", "digit", "remove", "insert", "lines", "fewer"]))]
    Path(directory / "x-0.idx").write_bytes(wrong)
    try:
        damaged = wp.IndexedShards(path)
        len(damaged)
    except wp.ShardError:
        return
    for number in range(len(damaged)):
        with contextlib.suppress(wp.ShardError):
            sample = damaged[number]
            assert sample == expected[sample["__key__"]]


# The others themselves


def test_dali_reads_it(tmp_path):
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    from nvidia.dali import fn, pipeline_def

    paths = [put(tmp_path / f"{number}.tar", tar(pairs(number + 3))) for number in range(2)]
    index_shards(paths, dali=True)

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline():
        index_paths = [path.replace(".tar", ".idx") for path in paths]
        return fn.readers.webdataset(paths=paths, index_paths=index_paths, ext=["txt", "cls"], name="reader")

    built = pipeline()
    built.build()
    found = [[field.at(0).tobytes() for field in built.run()] for _ in range(7)]
    assert found == [[sample["txt"], sample["cls"]] for sample in samples(paths, shuffle=False)]


def test_energon_reads_offsets(tmp_path):
    itar = pytest.importorskip("megatron.energon.flavors.webdataset.itar", reason="Megatron-Energon is not installed")
    path = put(tmp_path / "x.tar", tar(pairs(5)))
    index_shards(path, offsets=True)
    with itar.TarIndexReader(path) as reader:
        offsets = list(reader)
    assert offsets == list(struct.unpack("<6Q", content(f"{path}.idx")))
    with itar.open_itar(path, offsets[2], offsets[3] - offsets[2]) as archive:
        assert [member.name for member in archive] == ["0002.txt", "0002.cls"]


def test_the_offsets_of_energon(tmp_path):
    """Its ``prepare`` writes the first header of each sample, and the end of the last one, with
    ``struct.pack("Q")``; ours are the same bytes.
    """
    path = put(tmp_path / "x.tar", tar([*pairs(3), *((f"{'y' * 120}{n}.txt", b"") for n in range(2))], format=1))
    index_shards(path, offsets=True)
    expected, last = b"", None
    with tarfile.open(path) as archive:
        for member in archive:
            key = member.name.partition(".")[0]
            expected += struct.pack("Q", member.offset) if key != last else b""
            last = key
        expected += struct.pack("Q", archive.offset)
    assert content(f"{path}.idx") == expected
    assert io.BytesIO(expected).read(8) == bytes(8)
