"""``wds-pipes verify``: each kind of finding, with its shard, key, byte and mend."""

import gzip
import itertools
import json
import os
import shlex
import shutil
import tarfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from remote import content
from tars import filled, put, samples, tar

from wds_pipes import SampleError, ShardError, ShardWarning
from wds_pipes.cli import main
from wds_pipes.cli.look import KINDS
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards
from wds_pipes.tools import verify


def run(*arguments):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def found(*arguments):
    """The findings, and the exit code must fit them."""
    result = run(*arguments, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == bool(report["findings"]), result.output
    assert sum(report["counts"].values()) >= len(report["findings"])
    return report["findings"]


def good(count=5, first=0):
    return [
        (f"{number:04d}.{field}", b"%d" % number) for number in range(first, first + count) for field in ("cls", "txt")
    ]


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_the_reference_says_what_each_kind_means():
    page = Path(__file__).parents[2] / "tutorials" / "docs" / "reference" / "commands.md"
    table = page.read_text().split("| finding of `verify` |")[1].split("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == list(KINDS)


def test_nothing_is_wrong_with_good_shards(tmp_path):
    make_shards(tmp_path, shards=3, samples=4, fields=("txt", "cls", "jpg", "npy"))
    index_shards(str(tmp_path), tmp_path / "index.json", offsets=True)
    for arguments in ([], ["--decode"]):
        result = run(tmp_path, *arguments)
        assert (result.exit_code, result.output) == (0, "3 shards, 12 samples: nothing is wrong\n")


def test_what_was_not_looked_at_is_said(tmp_path):
    """With the option that looks at it."""
    put(tmp_path / "a.tar", tar(good()))
    notes = run(tmp_path / "a.tar").output.splitlines()
    assert notes == [
        "note: changed bytes inside of fields do not show: no MD5 of 1 shard is known (wds-pipes index writes them to "
        "an index.json), and fields were not decoded (--decode)",
        "1 shard, 5 samples: nothing is wrong",
    ]
    assert "were not decoded" not in run(tmp_path / "a.tar", "--decode").output
    index_shards(str(tmp_path / "a.tar"), tmp_path / "index.json")
    assert "note" not in run(tmp_path / "a.tar").output
    put(tmp_path / "b.tar", tar([("c.pkl", b"x")]))
    assert "note: field 'pkl' was not decoded" in run(tmp_path / "b.tar", "--decode").output


def test_a_shard_that_a_directory_lacks(tmp_path):
    """Where the directory is named; a part of the shards may be named otherwise."""
    make_shards(tmp_path, shards=3, samples=1)
    index_shards(str(tmp_path), tmp_path / "index.json")
    lost = sorted(tmp_path.glob("*.tar"))[1]
    lost.unlink()
    (one,) = found(f"{tmp_path}/")
    assert (one["kind"], one["shard"]) == ("checksum", str(lost))
    assert f"does not exist, and {tmp_path / 'index.json'} lists it" in one["text"]
    assert found(*tmp_path.glob("*.tar")) == []


def test_an_appended_archive_is_not_overlooked(tmp_path):
    """By an index of what came before."""
    path = put(tmp_path / "a.tar", filled(tar(good(3))))
    index_shards(path, offsets=True)
    put(tmp_path / "a.tar", filled(tar(good(3))) + filled(tar(good(2, 3))))
    for command in (["get", "3", path], ["cat", path, "--slice", "0:9"]):
        assert "another archive was appended to it" in run_command(*command, code=1).stderr


def test_the_mending_commands_are_named_once_and_in_order(tmp_path):
    put(tmp_path / "a.tar", flipped(filled(tar([*good(9), ("0003.cls", b"1"), ("0003.txt", b"1")])), 2053))
    put(tmp_path / "b.tar", tar(good(3, 8)))
    lines = run(tmp_path).stdout.splitlines()
    assert lines[-4].startswith("These commands mend it, one after the other")
    mends = [f"  -> wds-pipes repair {tmp_path} NEW --drop-repeated", f"  -> wds-pipes dedup {tmp_path} NEW"]
    assert lines[-3:-1] == mends


def test_a_directory_that_is_not_finished_is_noted(tmp_path):
    (tmp_path / "in").mkdir()
    put(tmp_path / "in/a.tar", tar(good(3)))
    put(tmp_path / "in/b.tar", tar([*good(3, 3), *good(1, 3)]))
    run_command("repair", tmp_path / "in", tmp_path / "out", code=1)
    assert "out/ is not finished: 1 of 2 tasks of wds-pipes repair are left" in run(tmp_path / "out").stdout
    assert "not finished" not in run(tmp_path / "in").stdout


def test_archives_one_after_another(tmp_path):
    """Each command that mends reads them too; none is advised that would lose whole samples."""
    pieces = [("0003.cls", b"3"), *good(1, 4), ("0003.txt", b"3")]
    path = put(tmp_path / "a.tar", filled(tar(good(3))) + filled(tar(pieces)))
    assert "damage" in [finding["kind"] for finding in found(path)]
    assert [finding["mend"] for finding in found(path) if finding["kind"] in ("damage", "sample")] == [None] * 2
    [finding] = found(path, "--concatenated", "--ignore", "some-fields")
    assert (finding["kind"], finding["key"]) == ("sample", "0003")
    words = [str(tmp_path / "NEW") if word == "NEW" else word for word in shlex.split(finding["mend"])[1:]]
    run_command(*words)
    assert found(tmp_path / "NEW") == []


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10239), st.integers(1, 255), st.booleans())
def test_all_damage_that_reading_finds_is_found(tmp_path_factory, place, change, cut):
    """And nothing else: a pipe over the shard raises or warns exactly if verify finds something."""
    data = bytearray(filled(tar(good(6), end=False)))
    data = data[: place + 1] if cut else data
    data[place % len(data)] ^= change
    path = put(tmp_path_factory.mktemp("v") / "a.tar", bytes(data))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardWarning)
        try:
            samples([path])
            bad = False
        except (ShardError, SampleError, ShardWarning):
            bad = True
    kinds = [one["kind"] for one in found(path)]
    findings = [kind for kind in kinds if kind in ("damage", "sample")]
    assert bool(findings or "some-fields" in kinds) >= bad
    assert bad or not findings


DOTTED = [*good(5), ("img.v2.txt", b"a"), ("img.v2.cls", b"1")]
MENDED = {  # the shards, and the options of verify
    "damage": ({"a.tar": flipped(filled(tar(good(9))), 2053), "b.tar": filled(tar(good(5, 20)))[:9000]}, []),
    "end": ({"a.tar": tar(good(), end=False)}, []),
    "sample": ({"a.tar": tar([*good(3), ("z.cls", b"1"), ("z.txt", b""), ("z.cls", b"2")])}, []),
    "sample again": ({"a.tar": tar([*good(3), *good(1)])}, []),
    "sample in pieces": ({"a.tar": tar(sorted(good(3), key=lambda member: member[0][-3:]))}, []),
    "reserved-name": (
        {"a.tar": tar([("0.__KEY__", b"x"), ("0.txt", b"0"), ("1.txt", b"1"), ("1.__url__", b""), ("1.__x__", b"")])},
        [],
    ),
    "duplicate-key": ({"a.tar": tar(good(4)), "b.tar": tar(good(4, 3))}, []),
    "duplicate-key, same names": ({"a/0.tar": tar(good(4)), "b/0.tar": tar(good(4, 3))}, []),
    "undecodable": ({"a.tar": tar([("a.cls", b"1"), ("b.cls", b"one"), ("c.cls", b"3")])}, ["--decode"]),
    "dotted-name": ({"a.tar": tar(DOTTED)}, ["--ignore", "some-fields"]),
    "with --key-split": ({"a.tar": tar([*DOTTED, *good(1)])}, ["--key-split", "last-dot"]),
}


@pytest.mark.parametrize("case", MENDED)
def test_the_command_of_a_finding_mends_it(case, tmp_path, monkeypatch):
    """As it is printed: in what it writes, nothing is wrong."""
    contents, options = MENDED[case]
    monkeypatch.chdir(tmp_path)
    for name, data in contents.items():
        (Path("my data") / name).parent.mkdir(exist_ok=True, parents=True)
        put(Path("my data") / name, data)
    folders = sorted(str(path) for path in {path.parent for path in Path("my data").rglob("*.tar")})
    findings = found(*folders, *options)
    [mend] = {finding["mend"] for finding in findings if finding["mend"]}
    assert all(finding["mend"] for finding in findings if finding["kind"] != "some-fields")
    command = shlex.split(mend)
    assert command[0] == "wds-pipes"
    assert run(*folders, *options).stdout.count("->") == 1
    run_command(*command[1:])
    written = sorted(str(path) for path in Path("NEW").rglob("*.tar"))
    assert found(*written, *options) == []
    assert samples(written)


def links():
    """A shard with two links of samples, and one that is of none."""
    hard, soft, outside = (tarfile.TarInfo(name) for name in ("b.jpg", "c.txt", "latest"))
    hard.type, hard.linkname = tarfile.LNKTYPE, "a.jpg"
    soft.type = outside.type = tarfile.SYMTYPE
    soft.linkname = outside.linkname = "a.txt"
    files = [("a.jpg", b"1"), hard, outside, ("c.__key__", b""), ("c.__Url__", b""), ("c.jpg", b"2"), soft]
    return tar([*files, ("c.__mask.png", b"3")])


def broken():
    """A shard with damage in two places."""
    return flipped(flipped(filled(tar(good(9))), 2053), 8197)


JPEG = b"\xff\xd8\xff"
BROKEN = {
    "a.tar": broken(),
    "b.tar": filled(tar(good(3, 100)))[:2000],
    "c.tar": b"<html>no</html>",
    "d.tar.gz": gzip.compress(tar(good(50, 200)))[:-20],
}
VIEWS = [(f"{number}.{field}", b"") for number in range(4) for field in ("left.jpg", "right.jpg", "seg.v2.png", "cls")]
SOME = [*good(5), ("0005.cls", b"1"), ("0005.txt", b""), ("0005.json", b"{}"), ("0006.txt", b"")]
UNDECODABLE = [("a.cls", b"1"), ("a.jpg", JPEG), ("b.cls", b"one"), ("b.jpg", b""), ("c.pkl", b"x")]
SHARED = {"a.tar": tar(good(4)), "b.tar": tar(good(4, 3)), "c.tar.gz": gzip.compress(tar(good(2, 6)))}
ONLY = ["--ignore", "some-fields"]


# The shards, the options, and of each finding: the kind, the shard, the key, the byte, the command
# that mends it, and a part of the text.
@pytest.mark.parametrize(
    ("contents", "options", "expected"),
    [
        (
            {"a.tar": tar([("README", b"x"), ("LICENSE", b"")])},
            [],
            [("sample", "a.tar", None, 0, None, "'README' is the first of 2 files, of which none makes a sample")],
        ),
        (
            {"a.tar": links()},
            ONLY,
            [
                ("link", "a.tar", "b", 1024, None, "'b.jpg' is a hard link to 'a.jpg'"),
                ("reserved-name", "a.tar", "c", 2048, "repair", ""),
                ("reserved-name", "a.tar", "c", 2560, "repair", "'__url__' (byte 2560): "),
                ("link", "a.tar", "c", 4096, None, ""),
            ],
        ),
        (
            SHARED,
            [],
            [
                ("duplicate-key", "a.tar", "0003", 6144, "dedup", "b.tar (byte 0)"),
                ("duplicate-key", "b.tar", "0006", 6144, "dedup", "c.tar.gz (byte 0)"),
            ],
        ),
        (SHARED, ["--ignore", "duplicate-key"], []),
        (
            {"a.tar": tar(SOME)},
            [],
            [
                ("some-fields", "a.tar", "0006", 12800, None, "without field 'cls', which 6 of 7 samples have"),
                ("some-fields", "a.tar", "0005", 10240, None, "first with field 'json'"),
            ],
        ),
        (
            {"a.tar": tar([*good(5), ("img.v2.txt", b"a"), ("img.v2.cls", b"1")])},
            ONLY,
            [("dotted-name", "a.tar", "img", 10240, "repair", "--key-split last-dot")] * 2,
        ),
        ({"a.tar": tar([*good(5), ("img.v2.txt", b"a"), ("img.v2.cls", b"1")])}, ["--key-split", "last-dot"], []),
        ({"a.tar": tar(VIEWS)}, [], []),
        ({"a.tar": tar(UNDECODABLE)}, ONLY, []),
        (
            {"a.tar": tar(UNDECODABLE)},
            [*ONLY, "--decode"],
            [
                ("undecodable", "a.tar", "a", 1024, "repair", "field 'jpg' of sample 'a' cannot be decoded: "),
                ("undecodable", "a.tar", "b", 2048, "repair", ""),
                ("undecodable", "a.tar", "b", 3072, "repair", ""),
            ],
        ),
        (
            BROKEN,
            [],
            [
                ("damage", "a.tar", None, 2048, "repair", ""),
                ("damage", "a.tar", None, 8192, "repair", ""),
                ("damage", "b.tar", None, 1024, "repair", "is cut"),
                ("damage", "c.tar", None, 0, None, "looks like a web page"),
                ("damage", "d.tar.gz", None, None, "repair", ""),
            ],
        ),
    ],
    ids=itertools.count(),
)
def test_what_is_found(contents, options, expected, tmp_path):
    for name, data in contents.items():
        put(tmp_path / name, data)
    findings = found(tmp_path, *options)
    assert len(findings) == len(expected), findings
    for finding, (*facts, byte, mend, text) in zip(findings, expected, strict=True):
        assert [finding["kind"], os.path.basename(finding["shard"]), finding["key"]] == facts
        assert finding["byte"] == byte or byte is None
        assert (finding["mend"] or "wds-pipes").split()[1:2] == [mend] * (mend is not None)
        assert text in finding["text"]


def test_a_missing_shard_is_a_finding_if_others_are_there(tmp_path, monkeypatch):
    """One that is named alone, or a pattern of none, is a wrong name. Processes find the same."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "a.tar", tar(good()))
    for options in ([], ["-j", 2]):
        [finding] = found("a.tar", "gone.tar", *options)
        assert (finding["kind"], finding["text"][:29]) == ("damage", "shard gone.tar does not exist")
    assert "does not exist" in run_command("verify", "no.tar", code=2).stderr
    assert "no shard matches" in run_command("verify", "x*.tar", code=2).stderr


def test_checksums_of_an_index(tmp_path):
    first, second = make_shards(tmp_path, shards=2, samples=4)
    index_shards([first, second], tmp_path / "index.json")
    data = bytearray(content(second))
    data[512] ^= 1  # the content of a field
    put(tmp_path / "shard-000001.tar", bytes(data))
    [finding] = found(first, second)
    assert (finding["kind"], finding["shard"], "its MD5 is" in finding["text"]) == ("checksum", second, True)
    assert found(second, "--index", tmp_path / "index.json") == [finding]
    put(tmp_path / "shard-000001.tar", bytes(data) + bytes(10240))
    shutil.copy(first, tmp_path / "new.tar")
    texts = " ".join(one["text"] for one in [*found(second), *found(tmp_path)] if one["kind"] == "checksum")
    assert "bytes, and the index says" in texts
    assert "is not in index" in texts


def test_stale_indexes_are_mended_by_the_commands_they_name(tmp_path):
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    put(path, tar(good(4)))
    put(other, tar(good(3, 50)))
    index_shards([str(path)], offsets=True)
    shutil.copy(other, path)
    findings = found(path)
    assert {one["kind"] for one in findings} == {"stale-index"}
    assert len(findings) == 2
    for finding in findings:
        run_command(*shlex.split(finding["mend"])[1:])
    assert found(path) == []
    put(tmp_path / "a.tar.idx", b"12345")
    assert [finding["kind"] for finding in found(path)] == ["stale-index"]


def test_many_findings_are_counted(tmp_path):
    members = [(f"{number:04d}.cls", b"no") for number in range(150)]
    path = put(tmp_path / "a.tar", tar(members))
    report = json.loads(run(path, "--decode", "--json").stdout)
    assert (len(report["findings"]), report["counts"]) == (100, {"undecodable": 150})
    assert "150 findings, of which 50 are not shown" in run(path, "--decode").stdout


def test_only_a_few_shards_wait_for_an_executor(tmp_path):
    """Each waiting call holds the names of all shards."""
    urls, waiting, most = make_shards(tmp_path, shards=30, samples=1), [], []

    class Watched(ThreadPoolExecutor):
        def submit(self, *call, **options):
            waiting[:] = [one for one in waiting if not one.done()]
            most.append(len(waiting))
            waiting.append(super().submit(*call, **options))
            return waiting[-1]

    with Watched(2) as executor:
        assert not verify(urls, jobs=2, executor=executor).findings
    assert len(most) == 30
    assert max(most) <= 5
