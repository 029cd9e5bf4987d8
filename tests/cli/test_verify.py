"""``wds-pipes verify``: each kind of finding, with its shard, key, byte and mend."""

import gzip
import json
import os
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from remote import content
from tars import filled, put, samples, tar

from wds_pipes import SampleError, ShardError, ShardWarning
from wds_pipes.cli import main
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards
from wds_pipes.tools.findings import KINDS


def run(*arguments):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def found(*arguments):
    """The findings, and the exit code must fit them."""
    result = run(*arguments, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == bool(report["findings"]), result.output
    assert sum(report["counts"].values()) >= len(report["findings"])
    return report["findings"]


def one(*arguments):
    [finding] = found(*arguments)
    return finding


def good(count=5, first=0):
    return [
        (f"{number:04d}.{field}", b"%d" % number) for number in range(first, first + count) for field in ("cls", "txt")
    ]


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


def test_files_that_make_no_sample(tmp_path):
    finding = one(put(tmp_path / "a.tar", tar([("README", b"x"), ("LICENSE", b"")])))
    assert finding["kind"] == "sample"
    assert "byte 0: 'README' is the first of 2 files, of which none makes a sample" in finding["text"]


def test_an_appended_archive_is_not_overlooked(tmp_path):
    """By an index of what came before."""
    path = put(tmp_path / "a.tar", filled(tar(good(3))))
    index_shards(path, offsets=True)
    put(tmp_path / "a.tar", filled(tar(good(3))) + filled(tar(good(2, 3))))
    for command in (["get", "3", path], ["cat", path, "--slice", "0:9"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        assert "another archive was appended to it" in result.stderr


def test_a_directory_that_is_not_finished_is_noted(tmp_path):
    (tmp_path / "in").mkdir()
    put(tmp_path / "in/a.tar", tar(good(3)))
    put(tmp_path / "in/b.tar", tar([*good(3, 3), *good(1, 3)]))
    assert CliRunner().invoke(main, ["repair", str(tmp_path / "in"), str(tmp_path / "out")]).exit_code == 1
    assert "out/ is not finished: 1 of 2 tasks of wds-pipes repair are left" in run(tmp_path / "out").stdout
    assert "not finished" not in run(tmp_path / "in").stdout


def test_the_mending_commands_are_named_once_and_in_order(tmp_path):
    put(tmp_path / "a.tar", flipped(filled(tar([*good(9), ("0003.cls", b"1"), ("0003.txt", b"1")])), 2053))
    put(tmp_path / "b.tar", tar(good(3, 8)))
    lines = run(tmp_path).stdout.splitlines()
    assert lines[-4].startswith("These commands mend it, one after the other")
    assert lines[-3:-1] == [
        f"  -> wds-pipes repair {tmp_path} NEW --drop-repeated",
        f"  -> wds-pipes dedup {tmp_path} NEW",
    ]


def test_archives_one_after_another(tmp_path):
    """Each command that mends reads them too."""
    path = put(tmp_path / "a.tar", filled(tar(good(3))) + filled(tar([*good(2, 3), *good(1, 3)])))
    assert "damage" in [finding["kind"] for finding in found(path)]
    finding = one(path, "--concatenated")
    assert (finding["kind"], finding["key"]) == ("sample", "0003")
    mended = CliRunner().invoke(
        main, [*shlex.split(finding["mend"])[1:3], str(tmp_path / "NEW"), *shlex.split(finding["mend"])[4:]]
    )
    assert mended.exit_code == 0, mended.output
    assert found(tmp_path / "NEW") == []


def test_several_damaged_places_and_shards_are_all_found(tmp_path):
    data = bytearray(filled(tar(good(9))))
    for place in (2048, 8192):
        data[place + 5] ^= 1
    put(tmp_path / "a.tar", bytes(data))
    put(tmp_path / "b.tar", filled(tar(good(3, 100)))[:2000])
    put(tmp_path / "c.tar", b"<html>no</html>")  # in which nothing can be repaired
    put(tmp_path / "d.tar.gz", gzip.compress(tar(good(50, 200)))[:-20])
    findings = found(tmp_path)
    assert [(os.path.basename(one["shard"]), one["byte"]) for one in findings if one["kind"] == "damage"][:4] == [
        ("a.tar", 2048),
        ("a.tar", 8192),
        ("b.tar", 1024),
        ("c.tar", 0),
    ]
    assert {os.path.basename(one["shard"]) for one in findings if one["mend"] is None} >= {"c.tar"}
    assert findings[-1]["shard"].endswith("d.tar.gz")
    assert findings == found(tmp_path, "-j", 2)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10239), st.integers(1, 255), st.booleans())
def test_all_damage_that_reading_finds_is_found(tmp_path_factory, place, change, cut):
    """And nothing else: a pipe over the shard raises or warns exactly if verify finds something."""
    import warnings

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


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


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
    result = CliRunner().invoke(main, command[1:])
    assert result.exit_code == 0, result.output
    written = sorted(str(path) for path in Path("NEW").rglob("*.tar"))
    assert found(*written, *options) == []
    assert samples(written)


def test_files_that_no_sample_can_have(tmp_path):
    """Links of samples, and names of metadata: each has a finding."""
    link, other, outside = (tarfile.TarInfo(name) for name in ("b.jpg", "c.txt", "latest"))
    link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
    other.type = outside.type = tarfile.SYMTYPE
    other.linkname = outside.linkname = "a.txt"
    files = [("a.jpg", b"1"), link, outside, ("c.__key__", b""), ("c.__Url__", b""), ("c.jpg", b"2"), other]
    path = put(tmp_path / "a.tar", tar([*files, ("c.__mask.png", b"3")]))
    result = found(path, "--ignore", "some-fields")
    assert [(one["kind"], one["key"], one["byte"]) for one in result] == [
        ("link", "b", 1024),
        ("reserved-name", "c", 2048),
        ("reserved-name", "c", 2560),
        ("link", "c", 4096),
    ]
    assert [one["mend"] is None for one in result] == [True, False, False, True]
    assert "'b.jpg' is a hard link to 'a.jpg'" in result[0]["text"]
    assert "'__url__' (byte 2560)" in result[2]["text"]
    assert "Rename the file 'c.__Url__'" in result[2]["text"]


@pytest.mark.parametrize("names", [["no.tar"], ["x*.tar"], ["a.tar", "gone.tar"]])
def test_a_missing_shard_is_a_finding_if_others_are_there(names, tmp_path, monkeypatch):
    """One that is named alone, or a pattern of none, is a wrong name."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "a.tar", tar(good()))
    alone = len(names) == 1
    result = run(*names)
    assert result.exit_code == (2 if alone else 1)
    assert ("damage: shard gone.tar does not exist" in result.stdout) != alone


def test_keys_that_several_shards_have(tmp_path):
    put(tmp_path / "a.tar", tar(good(4)))
    put(tmp_path / "b.tar", tar(good(4, 3)))
    put(tmp_path / "c.tar.gz", gzip.compress(tar(good(2, 6))))
    three, six = found(tmp_path)
    assert (three["kind"], three["key"], three["byte"]) == ("duplicate-key", "0003", 3 * 2048)
    assert "b.tar (byte 0)" in three["text"]
    assert (six["key"], six["shard"]) == ("0006", str(tmp_path / "b.tar"))
    assert run(tmp_path, "--ignore", "duplicate-key").exit_code == 0


def test_fields_that_only_some_samples_have(tmp_path):
    members = [*good(5), ("0005.cls", b"1"), ("0005.txt", b""), ("0005.json", b"{}"), ("0006.txt", b"")]
    path = put(tmp_path / "a.tar", tar(members))
    lacks, has = found(path)
    assert (lacks["kind"], lacks["key"], lacks["byte"]) == ("some-fields", "0006", 12800)
    assert "first without field 'cls', which 6 of 7 samples have" in lacks["text"]
    assert (has["key"], "first with field 'json'" in has["text"]) == ("0005", True)
    assert run(path, "--ignore", "some-fields").exit_code == 0


def test_keys_with_dots(tmp_path):
    """Fields with dots that most samples have are none: those of several views or masks."""
    trap = [("img.v2.txt", b"a"), ("img.v2.cls", b"1")]
    path = put(tmp_path / "a.tar", tar([*good(5), *trap]))
    findings = found(path, "--ignore", "some-fields")
    assert [(one["kind"], one["key"], one["byte"]) for one in findings] == [("dotted-name", "img", 10240)] * 2
    assert "--key-split last-dot" in findings[0]["text"]
    assert found(path, "--key-split", "last-dot") == []
    views = [
        (f"{number}.{field}", b"") for number in range(4) for field in ("left.jpg", "right.jpg", "seg.v2.png", "cls")
    ]
    assert found(put(tmp_path / "b.tar", tar(views))) == []


def test_fields_that_cannot_be_decoded(tmp_path):
    members = [("a.cls", b"1"), ("a.jpg", b"\xff\xd8\xffbroken"), ("b.cls", b"one"), ("b.jpg", b"")]
    path = put(tmp_path / "a.tar", tar([*members, ("c.pkl", b"x")]))
    assert [one["kind"] for one in found(path, "--ignore", "some-fields")] == []
    findings = found(path, "--ignore", "some-fields", "--decode")
    assert [(one["kind"], one["key"], one["byte"]) for one in findings] == [
        ("undecodable", "a", 1024),
        ("undecodable", "b", 2048),
        ("undecodable", "b", 3072),
    ]
    assert "note: field 'pkl' was not decoded" in run(path, "--decode").output


def test_checksums_of_an_index(tmp_path):
    first, second = make_shards(tmp_path, shards=2, samples=4)
    index_shards([first, second], tmp_path / "index.json")
    data = bytearray(content(second))
    data[512] ^= 1  # the content of a field
    put(tmp_path / "shard-000001.tar", bytes(data))
    finding = one(first, second)
    assert (finding["kind"], finding["shard"], "its MD5 is" in finding["text"]) == ("checksum", second, True)
    assert one(second, "--index", tmp_path / "index.json")["text"] == finding["text"]
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
        command = shlex.split(finding["mend"])
        assert CliRunner().invoke(main, command[1:]).exit_code == 0, finding
    assert found(path) == []
    put(tmp_path / "a.tar.idx", b"12345")
    assert one(path)["kind"] == "stale-index"


def test_many_findings_are_counted(tmp_path):
    members = [(f"{number:04d}.cls", b"no") for number in range(150)]
    path = put(tmp_path / "a.tar", tar(members))
    report = json.loads(run(path, "--decode", "--json").stdout)
    assert (len(report["findings"]), report["counts"]) == (100, {"undecodable": 150})
    assert "150 findings, of which 50 are not shown" in run(path, "--decode").stdout
