"""Tars that others wrote: the standard library's and webdataset's view of them is ours, except
where each exception below says otherwise.
"""

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from tars import END, KINDS, by_reader, by_tarfile, by_webdataset, filled, header, load, padded, pax, samples, tar

from wds_pipes import ShardError
from wds_pipes.core.stream import Stream

SHARED = ["compressed.tar", "sample.tgz", "mpdata.tar", "photos-000000.tar", "photos-000001.tar"]
LIBRARY = Path(os.__file__).parent / "test"
TESTTARS = [path for folder in (LIBRARY, LIBRARY / "archivetestdata") for path in sorted(folder.glob("testtar.tar*"))]


def by_load_tar(path) -> list[tuple[str, bytes]]:
    return [(member.name, member.data) for member in Stream(load([str(path)]))]


@pytest.mark.parametrize("name", SHARED)
def test_published_shards_give_the_members_of_tarfile_and_the_samples_of_webdataset(shared_data, name):
    path = shared_data / name
    assert by_load_tar(path) == by_tarfile(path)
    assert len(samples([str(path)])) == {"compressed.tar": 3, "sample.tgz": 90}.get(name, 100)
    assert samples([str(path)]) == by_webdataset(path)


@pytest.mark.parametrize(
    "path",
    TESTTARS or [pytest.param(None, marks=pytest.mark.skip(reason="this Python has no test tars"))],
    ids=lambda path: path and path.name,
)
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_the_tars_that_python_tests_itself_with(path):
    assert by_load_tar(path) == by_tarfile(path)
    assert len(by_load_tar(path)) >= 1


def tree(root: Path, limit: int) -> int:
    """Files with names and contents of many sorts, a symbolic link and a hard one; names of all
    lengths around the limits of the formats: 100 bytes, 155 before a slash, 256 in all; and files
    with holes. Return how many files there are.
    """
    files = {
        "a.txt": b"one",
        "a.seg.png": bytes(range(256)) * 5,
        "b b.JPG": b"",
        "dir.v1/c.cls": b"7" * 512,
        "dir.v1/c.txt": b"x" * 513,
        "dir.v1/deeper/d.json": b"{}" * 70_000,
        "größe/日本.txt": b"unicode",
        "z no dot": b"not a sample",
        **{f"{'n' * (length - 4)}.txt": b"%d" % length for length in (99, 100, 101, 155, 156, 250)},
        **{f"{f'folder{number}/' * number}e{number}.txt": b"deep %d" % number for number in (2, 9, 40)},
    }
    files = {name: data for name, data in files.items() if len(name) <= limit}
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "link.txt").symlink_to("a.txt")
    os.link(root / "a.txt", root / "y.txt")
    return len(files)


# At the start, at the end, only a hole, and more pieces than one header holds.
HOLES = {
    "s1": (1 << 20, [300_000]),
    "s2": (1 << 19, [0, 200_000]),
    "s3": (1 << 18, []),
    "s4": (3 << 20, range(0, 3 << 20, 1 << 16)),
}


def sparse(root: Path) -> int:
    for name, (size, places) in HOLES.items():
        with open(root / f"{name}.bin", "wb") as file:
            file.truncate(size)
            for place in places:
                file.seek(place)
                file.write(b"piece at %d" % place)
    return len(HOLES)


def same_as_the_others(path: Path, members: int) -> None:
    assert by_load_tar(path) == by_tarfile(path)
    assert len(by_load_tar(path)) == members
    assert samples([str(path)], on_repeated_key="ignore") == by_webdataset(path)


def has(program: str) -> bool:
    version = [program, "--version"]
    found = shutil.which(program) and subprocess.run(version, capture_output=True, check=False).stdout
    return bool(found) and (program != "tar" or b"GNU" in found)


@pytest.mark.parametrize(
    ("program", "options", "limit", "holes"),
    [
        ("tar", ["--format=v7"], 97, False),
        ("tar", ["--format=oldgnu", "--sparse"], 999, True),
        ("tar", ["--format=gnu", "--sparse"], 999, True),
        ("tar", ["--format=ustar"], 97, False),
        *(
            ("tar", ["--format=posix", "--sparse", f"--sparse-version={one}"], 999, True)
            for one in ("0.0", "0.1", "1.0")
        ),
        ("bsdtar", ["--format=ustar"], 90, False),
        ("bsdtar", ["--format=gnutar"], 90, False),
        ("bsdtar", ["--format=pax"], 999, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_programs_that_write_tars(tmp_path, program, options, limit, holes):
    """Every format that they write, with names up to what it holds, links and holes."""
    if not has(program):
        pytest.skip(f"{program} is not installed, or another one")
    root, path = tmp_path / "tree", tmp_path / "x.tar"
    root.mkdir()
    count = tree(root, limit) + (sparse(root) if holes else 0)
    subprocess.run([program, *options, "-cf", path, "-C", root, "."], check=True, capture_output=True, timeout=60)
    same_as_the_others(path, count)
    assert not holes or path.stat().st_size < 500_000


@pytest.mark.parametrize(
    ("format", "compress"),
    [
        *((format, bytes) for format in KINDS.values()),
        *((tarfile.PAX_FORMAT, compress) for compress in (gzip.compress, bz2.compress, lzma.compress)),
    ],
    ids=[*KINDS, "gz", "bz2", "xz"],
)
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_python_tarfile(tmp_path, format, compress):
    """The formats of the standard library, compressed whole too, with a float mtime for each
    member and names that are not UTF-8.
    """
    members = [("a" * length + ".txt", b"%d" % length) for length in (1, 50, 94, 95, 96)]
    members += [
        ("d" * 80 + "/" + "n" * 60 + ".txt", b"prefix"),
        ("\udcff\udcfe.txt", b"no UTF-8"),
        ("ü" * 30 + ".txt", b"UTF-8"),
    ]
    if format != tarfile.USTAR_FORMAT:
        members += [
            ("n" * 300 + ".txt", b"long"),
            ("ü" * 300 + ".txt", b"long UTF-8"),
            ("\udcff" * 120 + ".txt", b"long and no UTF-8"),
        ]
    infos = []
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.mtime = 1_700_000_000.5 if format == tarfile.PAX_FORMAT else 1_700_000_000
        infos.append((info, data))
    for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        info = tarfile.TarInfo(f"kind {kind!r}")
        info.type, info.linkname = kind, "a.txt" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
        infos.insert(1, (info, b""))
    contiguous = tarfile.TarInfo("contiguous.txt")
    contiguous.type = tarfile.CONTTYPE
    infos.insert(3, (contiguous, b"contiguous"))
    data = tar(infos, format=format)
    path = tmp_path / "x.tar"
    path.write_bytes(compress(data))
    assert sorted(by_load_tar(path)) == sorted([*members, ("contiguous.txt", b"contiguous")])
    same_as_the_others(path, len(members) + 1)


def test_a_header_of_gnu_tar_with_access_times_has_no_prefix():
    """With --incremental old GNU headers hold times where ustar has the prefix; tarfile takes
    them for a part of the name.
    """
    data = header(b"a.txt", 1, at_257=b"ustar  \0", at_345=b"14567123456\0") + padded(b"x") + END
    assert by_reader(data) == [("a.txt", b"x")]


def test_a_checksum_of_signed_bytes_is_accepted():
    """Some old programs summed signed bytes; tarfile accepts both too."""
    name = "ü.txt".encode()
    block = bytearray(header(name, 1))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % (sum(block) - 256 * sum(byte > 127 for byte in block))
    data = bytes(block) + padded(b"x") + END
    assert by_reader(data) == by_tarfile(data) == [("ü.txt", b"x")]


@pytest.mark.parametrize(
    "digits",
    [
        *(b"3          \0", b"         3 \0", b"00000000003\0", b"00000000003 ", b"3\0junkjunkju"),
        b"\x80" + (3).to_bytes(11, "big"),
    ],
)
def test_a_size_however_it_is_filled_up(digits):
    """GNU tar writes sizes above 8 GiB in base 256; smaller ones may come so too."""
    data = header(b"a.txt", at_124=digits) + padded(b"xyz") + END
    assert by_reader(data) == by_tarfile(data) == [("a.txt", b"xyz")]


def test_pax_records_win_over_the_header_and_empty_ones_do_not():
    data = pax((b"path", b"b.txt"), (b"size", b"2")) + header(b"a.txt", 7) + padded(b"xy") + END
    assert by_reader(data) == by_tarfile(data) == [("b.txt", b"xy")]
    data = pax((b"path", b""), (b"size", b"")) + header(b"a.txt", 2) + padded(b"xy") + END
    assert by_reader(data) == [("a.txt", b"xy")]


def test_a_global_pax_header_is_passed_over():
    """git archive writes its commit so."""
    data = filled(pax((b"comment", b"0123456789"), kind=b"g") + tar([("a.txt", b"x")], format=tarfile.PAX_FORMAT))
    assert by_reader(data) == by_tarfile(data) == [("a.txt", b"x")]


# Where we are deliberately stricter than tarfile: both are shown.


def test_exception_a_global_header_cannot_rename_all_members():
    """tarfile gives every member the one name."""
    data = pax((b"path", b"same.txt"), kind=b"g") + tar([("a.txt", b"1"), ("b.txt", b"2")])
    assert [name for name, _ in by_tarfile(data)] == ["same.txt", "same.txt"]
    with pytest.raises(ShardError, match="global pax header"):
        by_reader(data)


def test_exception_a_member_without_a_name_is_passed_over():
    """It can be no sample, and our name for a gap is the empty one."""
    data = header(b"", 1) + padded(b"x") + header(b"a.txt", 1) + padded(b"y") + END
    assert by_tarfile(data) == [("", b"x"), ("a.txt", b"y")]
    assert by_reader(data) == [("a.txt", b"y")]
