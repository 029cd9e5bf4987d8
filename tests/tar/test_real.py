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


@pytest.fixture
def root(tmp_path) -> Path:
    """Files with names and contents of many sorts: 8, a symbolic link and a hard one."""
    root = tmp_path / "tree"
    files = {
        "a.txt": b"one",
        "a.seg.png": bytes(range(256)) * 5,
        "b b.JPG": b"",
        "dir.v1/c.cls": b"7" * 512,
        "dir.v1/c.txt": b"x" * 513,
        "dir.v1/deeper/d.json": b"{}" * 70_000,
        "größe/日本.txt": b"unicode",
        "z no dot": b"not a sample",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "link.txt").symlink_to("a.txt")
    os.link(root / "a.txt", root / "y.txt")
    return root


def add_long_names(root: Path, limit: int) -> None:
    """Names of all lengths around the limits of the formats: 100 bytes, 155 before a slash, 256
    in all.
    """
    for length in (99, 100, 101, 155, 156, 250):
        if length <= limit:
            (root / f"{'n' * (length - 4)}.txt").write_bytes(b"%d" % length)
    for number in (2, 9, 40):
        folder = root / "/".join([f"folder{number}"] * number)
        if len(str(folder.relative_to(root))) + 6 <= limit:
            folder.mkdir(parents=True)
            (folder / f"e{number}.txt").write_bytes(b"deep %d" % number)


def add_sparse(root: Path) -> None:
    """Files with holes: at the start, at the end, only a hole, and more pieces than one header
    holds.
    """
    for name, size, places in (
        ("s1.bin", 1 << 20, [300_000]),
        ("s2.bin", 1 << 19, [0, 200_000]),
        ("s3.bin", 1 << 18, []),
        ("s4.bin", 3 << 20, range(0, 3 << 20, 1 << 16)),
    ):
        with open(root / name, "wb") as file:
            file.truncate(size)
            for place in places:
                file.seek(place)
                file.write(b"piece at %d" % place)


def same_as_the_others(path: Path, members: int) -> None:
    assert by_load_tar(path) == by_tarfile(path)
    assert len(by_load_tar(path)) == members
    assert samples([str(path)], on_repeated_key="ignore") == by_webdataset(path)


def run_tar(program: str, path: Path, root: Path, *options: str) -> None:
    subprocess.run([program, *options, "-cf", path, "-C", root, "."], check=True, capture_output=True, timeout=60)


def is_gnu_tar() -> bool:
    return (
        shutil.which("tar") is not None
        and "GNU" in subprocess.run(["tar", "--version"], capture_output=True, text=True, check=False).stdout
    )


needs_gnu_tar = pytest.mark.skipif(not is_gnu_tar(), reason="tar is not GNU tar")
needs_bsdtar = pytest.mark.skipif(
    shutil.which("bsdtar") is None, reason="bsdtar is not installed (package libarchive-tools)"
)


@needs_gnu_tar
@pytest.mark.parametrize(
    ("format", "limit", "sparse"),
    [("v7", 97, False), ("oldgnu", 999, True), ("gnu", 999, True), ("ustar", 97, False), ("posix", 999, True)],
)
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_gnu_tar(tmp_path, root, format, limit, sparse):
    """Every format that GNU tar writes, with names up to what it holds, links and holes."""
    add_long_names(root, limit)
    if sparse:
        add_sparse(root)
    path = tmp_path / "x.tar"
    run_tar("tar", path, root, f"--format={format}", "--sort=name", *(["--sparse"] if sparse else []))
    same_as_the_others(path, 8 + (6 + 3 + 4 if sparse else 2))


@needs_gnu_tar
@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0"])
def test_gnu_tar_sparse_in_pax(tmp_path, version):
    root = tmp_path / "tree"
    root.mkdir()
    add_sparse(root)
    path = tmp_path / "x.tar"
    run_tar("tar", path, root, "--format=posix", f"--sparse-version={version}", "--sparse")
    assert path.stat().st_size < 300_000
    same_as_the_others(path, 4)


@needs_bsdtar
@pytest.mark.parametrize("format", ["ustar", "gnutar", "pax"])
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_bsdtar(tmp_path, root, format):
    """The formats that libarchive writes."""
    add_long_names(root, 999 if format == "pax" else 90)
    path = tmp_path / "x.tar"
    run_tar("bsdtar", path, root, f"--format={format}")
    same_as_the_others(path, 8 + (9 if format == "pax" else 2))


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
    for name, kind in (
        ("dir", tarfile.DIRTYPE),
        ("sym", tarfile.SYMTYPE),
        ("hard", tarfile.LNKTYPE),
        ("device", tarfile.CHRTYPE),
        ("fifo", tarfile.FIFOTYPE),
    ):
        info = tarfile.TarInfo(name)
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
