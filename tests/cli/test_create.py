"""``wds-pipes create``: shards of files, lists and tables."""

import errno
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import assert_readable, outputs, run_command
from scripts import run_proof
from tars import samples
from waiting import wait_for

import wds_pipes as wp
from wds_pipes.cli import main
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tools import files as records

run = partial(run_command, "create")


def refused(*arguments, stdin=None):
    """The message of a refusal: the exit code is 1 for what is wrong with the samples, else 2."""
    result = CliRunner().invoke(main, ["create", *map(str, arguments)], input=stdin)
    told = " ".join(result.stderr.split())
    assert result.exit_code == (1 if "in the input, so nothing was written:" in told else 2), result.output
    return told


def read(folder):
    """The samples of a folder by their keys, without the URL."""
    found = samples([str(folder)])
    assert len({sample["__key__"] for sample in found}) == len(found)
    return {
        sample["__key__"]: {name: value for name, value in sample.items() if not is_metadata(name)} for sample in found
    }


def fill(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """60 samples of two fields in directories, and what is left out."""
    numbers = random.Random(3)
    files = {}
    for number in range(60):
        name = f"{'cat' if number % 3 else 'dog'}/v1.0/{number:03d}"
        files |= {f"{name}.JPG": numbers.randbytes(numbers.randrange(3000)), f"{name}.seg.png": b"x" * number}
    return fill(tmp_path_factory.mktemp("source"), {**files, ".hidden/x.jpg": "x", "cat/.DS_Store": "x"})


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The outputs of one process."""
    folder = tmp_path_factory.mktemp("create") / "whole"
    result = run(source, folder, "--max-samples", 7)
    size = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert result.stdout == f"written to {folder}: 9 shards, 60 samples, {size / 1000:.0f} kB\n"
    assert_readable(folder)
    return outputs(folder)


def test_files_of_one_name_are_a_sample(source, whole, tmp_path):
    """In the order of their names, with an index and offsets that readers take."""
    fill(tmp_path, whole)
    found = [sample["__key__"] for sample in samples(sorted(map(str, tmp_path.glob("*.tar"))))]
    assert found == sorted(found)
    assert len(found) == 60
    for key, fields in read(tmp_path).items():
        assert fields == {
            "jpg": (source / f"{key}.JPG").read_bytes(),
            "seg.png": (source / f"{key}.seg.png").read_bytes(),
        }
    indexed = wp.IndexedShards(str(tmp_path / "index.json"))
    assert [indexed[number]["__key__"] for number in range(60)] == found
    assert indexed.by_key(found[33])["__key__"] == found[33]


def test_every_way_writes_the_same_bytes(source, whole, tmp_path):
    """Again, in two processes, in shares in any order, and after a part of it was removed."""
    run(source, tmp_path / "again", "--max-samples", 7)
    run(source, tmp_path / "processes", "--max-samples", 7, "-j", 2)
    assert outputs(tmp_path / "again") == outputs(tmp_path / "processes") == whole
    folder = tmp_path / "shares"
    told = [run(source, folder, "--max-samples", 7, "--tasks", 3, "--task", index).stdout for index in (2, 0, 1)]
    assert outputs(folder) == whole
    assert told[0] == f"written to {folder}: 3 of 9 tasks\n"
    assert "9 shards, 60 samples" in told[2]
    (tmp_path / "again/shard-000003.tar").unlink()
    (tmp_path / "again/index.json").unlink()
    assert "(8 of 9 there already)" in run(source, tmp_path / "again", "--max-samples", 7).stdout
    assert outputs(tmp_path / "again") == whole


def test_a_random_order_depends_on_the_seed_and_the_keys(source, whole, tmp_path):
    orders = {}
    for seed in (1, 2):
        run(source, tmp_path / str(seed), "--shuffle", seed)
        orders[seed] = [sample["__key__"] for sample in samples([str(tmp_path / str(seed) / "shard-000000.tar")])]
    assert sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(orders[1]), tuple(orders[2]), tuple(sorted(orders[1]))}) == 3
    lines = [f"{key}.JPG" for key in reversed(orders[2])]
    listed = fill(tmp_path, {"list.txt": "\n".join(lines)}) / "list.txt"
    run(listed, tmp_path / "list", "--root", source, "--shuffle", 2)
    assert [sample["__key__"] for sample in samples([str(tmp_path / "list")])] == orders[2]


def test_splits_are_those_of_split_by_key(source, tmp_path):
    run(source, tmp_path / "out", "--split", "train=0.7,val=0.3", "--max-samples", 20)
    assert sorted(os.listdir(tmp_path / "out")) == [".wds-pipes", "train", "val"]
    parts = {name: list(read(tmp_path / "out" / name)) for name in ("train", "val")}
    assert sum(map(len, parts.values())) == 60
    run(source, tmp_path / "all")
    views = wp.IndexedShards(str(tmp_path / "all" / "*.tar")).split({"train": 0.7, "val": 0.3})
    assert {name: [view[number]["__key__"] for number in range(len(view))] for name, view in views.items()} == parts
    assert len(wp.IndexedShards(str(tmp_path / "out/train/index.json"))) == len(parts["train"])


def test_directories_are_classes(source, tmp_path):
    """As in ImageFolder."""
    run(source, tmp_path / "out", "--from", "classes")
    assert json.loads((tmp_path / "out/classes.json").read_text()) == ["cat", "dog"]
    found = read(tmp_path / "out")
    assert {key: fields["cls"] for key, fields in found.items()} == {
        key: b"0" if key.startswith("cat") else b"1" for key in found
    }


FILES = {"data/a.jpg": "A", "data/sub/b.jpg": "B", "data/my c.jpg": "C"}


@pytest.mark.parametrize(
    ("content", "labels", "classes"),
    [
        ("data/a.jpg 3\n\ndata/sub/b.jpg 10\ndata/my c.jpg\t-1\n", [b"3", b"10", b"-1"], None),
        ("data/a.jpg dog\ndata/sub/b.jpg cat\ndata/my c.jpg dog", [b"1", b"0", b"1"], ["cat", "dog"]),
        ("data/a.jpg\ndata/sub/b.jpg\n", [None, None], None),
    ],
)
def test_lists(tmp_path, monkeypatch, content, labels, classes):
    """Paths with labels, in the order of the lines; also from standard input."""
    fill(tmp_path, {**FILES, "list.txt": content})
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "list.txt", "out")
    run("-", "piped", "--from", "list", stdin=content)
    assert outputs("piped") == outputs("out")
    expected = dict(zip(["data/a", "data/sub/b", "data/my c"], labels))
    found = read("out")
    assert {key: fields.get("cls") for key, fields in found.items()} == expected
    assert list(found) == list(expected)
    assert [fields["jpg"] for fields in found.values()] == [b"A", b"B", b"C"][: len(labels)]
    assert (json.loads(Path("out/classes.json").read_text()) if classes else None) == classes


ROWS = [
    {"id": "x1", "image": "data/a.jpg", "label": 3, "text": "größe, und"},
    {"id": "x2", "image": "data/sub/b.jpg", "label": 4, "text": ""},
]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "stdin"])
def test_tables(tmp_path, kind):
    """The same samples of each kind; files are found beside the table."""
    fill(tmp_path, FILES)
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    path = tmp_path / f"table.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif kind in ("csv", "tsv"):
        comma = {"csv": ",", "tsv": "\t"}[kind]
        lines = [["id", "image", "label", "text"], *([f'"{value}"' for value in row.values()] for row in ROWS)]
        path.write_text("".join(comma.join(line) + "\n" for line in lines), encoding="utf-8-sig")
    else:
        path.write_text(text)
    options = ["--key", "id", "--file", "image", "--value", "cls=label", "--value", "txt=text"]
    if kind == "stdin":
        run("-", tmp_path / "out", "--from", "jsonl", *options, "--root", tmp_path, stdin=text)
    else:
        run(path, tmp_path / "out", *options)
    assert read(tmp_path / "out") == {
        "x1": {"jpg": b"A", "cls": b"3", "txt": "größe, und".encode()},
        "x2": {"jpg": b"B", "cls": b"4", "txt": b""},
    }


def test_each_row_of_a_long_table_is_a_sample(tmp_path):
    """More rows than are read ahead."""
    fill(tmp_path, {f"f/{number}.txt": str(number) for number in range(2100)})
    fill(tmp_path, {"t.csv": "path,n\n" + "".join(f"f/{number}.txt,{number}\n" for number in range(2100))})
    run(tmp_path / "t.csv", tmp_path / "out", "--file", "path", "--value", "cls=n")
    found = [(fields["cls"], fields["txt"]) for fields in read(tmp_path / "out").values()]
    assert found == [(str(number).encode(),) * 2 for number in range(2100)]


def test_rows_in_groups_are_exploded_again(tmp_path):
    """A member of one row would be mostly header."""
    rows = [{"n": number, "text": "größe"} for number in range(2100)]
    fill(tmp_path, {"t.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    assert "21 samples" in run(tmp_path / "t.jsonl", tmp_path / "out", "--group", 100).stdout
    pipe = wp.ShardList(str(tmp_path / "out")).open_shards().load_tar().group_by_key().explode_records("jsonl")
    found = list(pipe)
    assert [{name: sample[name] for name in ("n", "text")} for sample in found] == rows
    assert [sample["__key__"] for sample in found[99:101]] == ["000000000/99", "000000100/0"]
    assert "--group is for" in refused(tmp_path / "t.jsonl", tmp_path / "no", "--group", 2, "--key", "n")


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a.jpg": "", "README": ""}, [], "README belongs to no sample: it has no extension, which names its field"),
        ({"a.jpg": "", "README": ""}, [], "--ignore 'README'"),
        ({"a.jpg": "", "a.JPG": ""}, [], "a.JPG and a.jpg are both field 'jpg' of sample 'a': rename one"),
        ({"v1.0_a.jpg": "", "v1.0_b.jpg": ""}, [], "v1.0_a.jpg: a key ends at the first dot of a name"),
        ({"v1.0_a.jpg": "", "b.jpg": ""}, [], "or --key-split last-dot, which writes"),
        ({"a.b.jpg": "", "a_b.txt": ""}, ["--key-split", "last-dot"], "would both have the key 'a_b'"),
        ({"__x__/a.jpg": "", "b.jpg": ""}, [], "__x__/a.jpg belongs to no sample"),
        ({"a.jpg": "", "a.__key__": ""}, [], "sample 'a' with field '__key__' would not be read back as that"),
        ({"a.jpg": "", "a.__X__": ""}, [], "begin and end with two underscores are kept for metadata; rename"),
        ({"a.jpg": "", "x.gif": ""}, ["--from", "classes"], "a.jpg is in no directory of a class"),
        ({"c/a.jpg": "", "c/a.cls": ""}, ["--from", "classes"], "'c/a' has a field 'cls' already"),
        ({".x": ""}, [], "no samples, so there is nothing to write"),
        ({"a.jpg": ""}, ["--split", "train=0.999,val=0.001"], "split 'val' would have none of 1 sample"),
        ({"a.jpg": ""}, ["--max-bytes", "7 apples"], "'7 apples' is not a size"),
    ],
)
def test_what_would_not_be_read_back_is_refused_with_the_mend(tmp_path, files, options, message):
    """Before anything is written."""
    fill(tmp_path / "in", files)
    assert message in refused(tmp_path / "in", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_all_problems_are_told_at_once(tmp_path):
    fill(tmp_path / "in", {**{f"file{number}": "" for number in range(30)}, "a.jpg": ""})
    told = refused(tmp_path / "in", tmp_path / "out")
    assert told.startswith("Error: 30 problems in the input, so nothing was written: file0 belongs to no sample")
    assert "and 20 more problems" in told
    run(tmp_path / "in", tmp_path / "out", "--ignore", "file*")


def test_a_table_with_semicolons(tmp_path):
    """As spreadsheets save CSV where the comma is in numbers; text with a comma needs no quotes."""
    fill(tmp_path, {"t.csv": '\ufeffid;text\r\n1;a, b\r\n2;"c;d"\r\n'})
    run(tmp_path / "t.csv", tmp_path / "out", "--key", "id", "--value", "txt=text")
    assert read(tmp_path / "out") == {"1": {"txt": b"a, b"}, "2": {"txt": b"c;d"}}


def test_names_with_dots(tmp_path):
    """With a choice they are written; a dotted field that all samples have needs none."""
    fill(tmp_path / "in", {"v1.0_a.jpg": "a", "v1.0_b.jpg": "b"})
    run(tmp_path / "in", tmp_path / "last", "--key-split", "last-dot")
    assert list(read(tmp_path / "last")) == ["v1_0_a", "v1_0_b"]
    run(tmp_path / "in", tmp_path / "first", "--key-split", "first-dot")
    assert read(tmp_path / "first") == {"v1": {"0_a.jpg": b"a", "0_b.jpg": b"b"}}


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("l.txt", "data/a.jpg 1\ndata/a.jpg 1", [], ["data/a.jpg comes twice: name it once"]),
        (
            "l.txt",
            "data/a.jpg 1\ndata/x.jpg 1",
            [],
            ["line 2: ", "x.jpg is no file that can be found: check the path"],
        ),
        ("l.txt", "data/a.jpg 1\ndata/sub/b.jpg", [], ["sample 'data/sub/b' has no label, and others have"]),
        ("t.csv", "id,path\n1,data/a.jpg\n", ["--file", "pth"], ["has no column 'pth'. Did you mean 'path'?"]),
        ("t.csv", "id,path\n1,data/a.jpg\n", ["--file", "zebra"], ["has no column 'zebra'; it has: id, path"]),
        ("t.csv", "id,path\n1,data/x.jpg\n", ["--file", "path"], ["row 1: ", "x.jpg cannot be found"]),
        ("t.csv", "id,path\n1\n", ["--file", "path"], ["line 2 of", "not as many columns"]),
        ("t.csv", "id,path\n1,a,b\n", ["--file", "path"], ["not as many columns as the first line, 2"]),
        ("t.csv", "id,path\n1,\n", ["--file", "path"], ["sample '000000000' has no fields"]),
        ("t.csv", "id,path\n,data/a.jpg\n", ["--key", "id", "--file", "path"], ["row 1: ", "has no key in column"]),
        ("t.csv", "id\nx\nx\n", ["--key", "id"], ["two samples have the key 'x': give each its own"]),
        ("t.csv", "id\na.b\na_b\n", ["--key", "id"], ["two samples have the key 'a_b'"]),
        ("t.csv", "id\na\n", ["--value", "id"], ["--value is written as FIELD=COLUMN"]),
        ("t.csv", "id,b\na,b\n", ["--value", "txt=id", "--value", "txt=b"], ["--value names field 'txt' twice"]),
        ("t.csv", "id,n\nx,1\n,2", ["--value", "cls=id"], ["row 2: column 'id' has no label, but ''"]),
        ("t.csv", "id\nx\n", ["--value", "json=id"], ["row 1: ", "column 'id' cannot be field 'json'"]),
        ("t.csv", "id\nx\n", ["--value", "JPG=id"], ["row 1: "]),
        ("t.jsonl", "{}\n[]\n", [], ["line 2 of", "is no JSON object"]),
        ("t.jsonl", "{}\n{\n", [], ["line 2 of", "is no JSON: "]),
        ("t.csv", b"id\n\xff\n", [], ["is not UTF-8 text"]),
        ("a.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF", [], ["a.jpg is not UTF-8 text"]),
        ("-", "", ["--from", "files"], ["is a list or a table, and --from files reads a directory"]),
        (".", "", ["--from", "csv"], ["is a directory, and --from csv reads a file"]),
        ("a.csv", "x", ["--from", "files"], ["is a file, and --from files reads a directory"]),
        ("t.csv", "id,v\n1,a\n".encode("utf-16"), [], ["is not UTF-8 text", "iconv -f UTF-16 -t UTF-8"]),
        ("t.tsv", b"\xfe\xff" + "id\tv\n".encode("utf-16-be"), [], ["iconv -f UTF-16 -t UTF-8"]),
        ("t.csv", 'id,v\n1,a\n2,b\n3,"x"y\n4,d\n', [], ["line 4 of", "is no CSV"]),
        ("t.tsv", 'id\tv\n1\ta\n\n\n2\t"x"y\n', [], ["line 5 of", "is no TSV"]),
        ("t.csv", 'id,v\n1,"a\n2,b\n3,c\n', [], ["line 4 of", "is no CSV: unexpected end of data"]),
        ("t.csv", 'id,"v"w\n1,a\n', [], ["line 1 of", "is no CSV"]),
        ("t.csv", "id,v\n1,a\n\n\n2\n", [], ["line 5 of", "not as many columns"]),
        ("t.jsonl", '\n{"id": 1, "txt": "x"}\n', ["--value", "txt=nope"], ["has no column 'nope'"]),
        ("t.jsonl", '{"y": 1}\n{"y": null}\n', ["--value", "cls=y"], ["sample '000000001' has no label"]),
        ("t.jsonl", '{"y": 1, "txt": 2}\n{"txt": 3}\n', ["--value", "cls=y"], ["sample '000000001' has no label"]),
        (
            "t.jsonl",
            '{"id": 1.5, "y": 1}\n',
            ["--key", "id", "--value", "cls=y"],
            ["has no key in column 'id', but 1.5"],
        ),
        (
            "t.csv",
            "y\n0.0\n1.0\n10.0\n",
            ["--value", "cls=y"],
            ["'0.0' is no integer: write integers, such as 3 and not"],
        ),
        (
            "t.csv",
            "y\n0\nnan\n10\n",
            ["--value", "cls=y"],
            ["'nan' is no integer", "leave out samples without a label"],
        ),
        (
            "t.tsv",
            'id\tv\n1\t"the start\n2\tplain\n3\tend"\n',
            [],
            ["line 4 of", "has a value in quotes that has a tab or several"],
        ),
        ("t.csv", "y\n0\nx\n", ["--value", "cls=y"], ["some labels are numbers, and 'x' is no integer"]),
    ],
    ids=itertools.count(),
)
def test_wrong_tables(tmp_path, name, content, options, message):
    fill(tmp_path, {**FILES, **({} if name in ".-" else {name: content})})
    told = refused("-" if name == "-" else tmp_path / name, tmp_path / "out", *options)
    for part in message:
        assert part in told
    assert not (tmp_path / "out").exists()


def test_a_class_without_samples(tmp_path):
    """Train and test would number the others in different ways."""
    fill(tmp_path, {"in/cat/a.jpg": b"x", "in/emu/b.jpg": b"x", "in/dog/.hidden": b""})
    assert "dog is the directory of a class" in refused(tmp_path / "in", tmp_path / "out", "--from", "classes")
    run(tmp_path / "in", tmp_path / "out", "--from", "classes", "--ignore", "dog")
    assert [fields["cls"] for fields in read(tmp_path / "out").values()] == [b"0", b"1"]


@pytest.mark.parametrize(("kind", "what"), [("files", "file"), ("classes", "directory")])
def test_links_out_of_a_directory_are_followed_if_one_says_so(tmp_path, kind, what):
    fill(tmp_path / "in", {"a/x.txt": "x"})
    fill(tmp_path / "secret", {"y.txt": "y"})
    (tmp_path / "in/a/inside.txt").symlink_to("x.txt")
    link = tmp_path / "in" / ("a/y.txt" if what == "file" else "b")
    link.symlink_to(tmp_path / "secret" / ("y.txt" if what == "file" else "."))
    options = (tmp_path / "in", tmp_path / "out", "--from", kind)
    told = refused(*options)
    assert f"{link} is a link out of SOURCE" in told
    assert "--follow-symlinks" in told
    run(*options, "--follow-symlinks")
    assert {key[0] for key in read(tmp_path / "out")} == ({"a"} if what == "file" else {"a", "b"})
    assert len(read(tmp_path / "out")) == 3


def test_a_list_from_elsewhere_names_no_file_of_this_machine(tmp_path, web):
    (tmp_path / "secret.txt").write_text("mine")
    (Path(web.directory) / "in.txt").write_text(f"{tmp_path}/secret.txt\n")
    options = (f"{web.url}/in.txt", tmp_path / "out", "--from", "list")
    assert "a file of this machine" in refused(*options)
    assert "a file of this machine" in refused(*options, "--root", tmp_path / "other")
    run(*options, "--root", tmp_path)


def test_shards_are_no_files_to_pack(tmp_path):
    """Unless that is said."""
    fill(tmp_path, {"in/a.tar": b"x", "in/a.tar.idx": b"y", "in/index.json": b"{}"})
    told = refused(tmp_path / "in", tmp_path / "out")
    assert "SOURCE has shards, such as a.tar: wds-pipes reshard" in told
    fill(tmp_path, {"in/classes.json": b"[]", "in/cat/b.jpg": b"1", "in/cat/c.json": b"{}", "in/cat/t.tgz": b"x"})
    for kind in ("files", "classes"):
        told = run(tmp_path / "in", tmp_path / kind, "--from", kind).stderr
        assert "warning: 5 files of shards left out, such as a.tar: pass --include 'a.tar' to pack it\n" in told
        assert set(read(tmp_path / kind)) == {"cat/b", "cat/c"}
    run(tmp_path / "in", tmp_path / "out", "--include", "a.tar")
    assert read(tmp_path / "out")["a"] == {"tar": b"x"}


def test_another_file_of_one_size_and_time_is_another_one(tmp_path):
    """In a table: its name shows it."""
    fill(tmp_path, {"a.bin": b"AAAA", "b.bin": b"BBBB"})
    for name in "ab":
        os.utime(tmp_path / f"{name}.bin", (1e9, 1e9))
    for name in "ab":
        fill(tmp_path, {"t.csv": f"id,f\nk,{name}.bin\n"})
        more = ["--overwrite"] if name == "b" else []
        if more:
            assert "1 of 1 task would be other" in refused(
                tmp_path / "t.csv", tmp_path / "out", "--key", "id", "--file", "f"
            )
        run(tmp_path / "t.csv", tmp_path / "out", "--key", "id", "--file", "f", *more)
    assert samples([str(tmp_path / "out/shard-000000.tar")])[0]["bin"] == b"BBBB"


def test_paths_with_blanks_in_a_list(tmp_path):
    """Without labels, they need no tab."""
    fill(tmp_path, {"my pics/my cat.txt": b"1", "dog.txt": b"2", "l.txt": "my pics/my cat.txt\ndog.txt\n"})
    run(tmp_path / "l.txt", tmp_path / "out", "--from", "list")
    assert [one["__key__"] for one in samples([str(tmp_path / "out/shard-000000.tar")])] == ["my pics/my cat", "dog"]


def test_times_of_parquet(tmp_path):
    """As in convert: text, also those in nanoseconds."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {
        "us": pyarrow.array([10**15], pyarrow.timestamp("us")),
        "ns": pyarrow.array([1], pyarrow.timestamp("ns", tz="UTC")),
        "took": pyarrow.array([7], pyarrow.duration("ns")),
        "day": pyarrow.array([1], pyarrow.date32()),
        "raw": pyarrow.array([b"\xff"]),
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "t.parquet")
    run(tmp_path / "t.parquet", tmp_path / "out")
    run_command("convert", tmp_path / "t.parquet", tmp_path / "same", "--from", "parquet")
    [made] = samples([str(tmp_path / "out/shard-000000.tar")])
    row = json.loads(made["json"])
    assert row["us"] == "2001-09-09T01:46:40"
    assert row["ns"].startswith("1970-01-01 00:00:00.000000001")
    assert (row["took"], row["day"], row["raw"]) == (7, "1970-01-02", {"base64": "/w=="})
    assert len(samples([str(tmp_path / "same/shard-000000.tar")])) == 1


def test_two_columns_of_one_name_are_refused(tmp_path):
    """One of them would be lost, also if no option names it."""
    path = fill(tmp_path, {"t.csv": "id,v,v\n1,a,b\n"}) / "t.csv"
    told = run(path, tmp_path / "out", "--value", "txt=id", code=1).stderr
    assert told == f"Error: {path} has two columns 'v': rename one of them\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "SOURCE 'nowhere' does not exist"),
        (["nowhere", "out", "--from", "csv"], "SOURCE 'nowhere' does not exist"),
        (["-", "out"], "standard input may be anything: pass --from"),
        (["t.json", "out"], "pass --from jsonl if it is an object on each line"),
        ([".", "out.tar"], "'out.tar' is none: name one"),
        ([".", "out", "--key", "id"], "--key is for csv, tsv, jsonl, parquet, and SOURCE is files"),
        (["t.csv", "out", "--ignore", "x"], "--ignore is for files, classes, and SOURCE is csv"),
        ([".", "out", "--task", "1"], "--task and --tasks belong together"),
        ([".", "out", "--task", "2", "--tasks", "2"], "of 2 the last is --task 1"),
        ([".", "out", "--split", "train"], "--split is written as train=0.9,val=0.1"),
        ([".", "out", "--split", "train=0.9,val=0.2"], "sum to 1"),
        ([".", "out", "--split", "a=0.5,a=0.5"], "have different names"),
        ([".", "out", "--storage-options", "[]"], "--storage-options is not JSON like"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, arguments, message):
    fill(tmp_path, {"t.csv": "id\nx\n", "t.json": "{}\n"})
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)


def test_changed_inputs_and_options_are_refused_in_words(tmp_path):
    """And replaced with --overwrite, where what has not changed is kept."""
    source, out = fill(tmp_path / "in", {f"{number}.txt": "x" for number in range(6)}), tmp_path / "out"
    run(source, out, "--max-samples", 2)
    fill(source, {"3.txt": "y"})
    assert "1 of 3 tasks would be other than before, the first is shard-000001.tar" in refused(
        source, out, "--max-samples", 2
    )
    assert "max_samples was 2, and is now 3" in refused(source, out, "--max-samples", 3)
    assert "(2 of 3 there already)" in run(source, out, "--max-samples", 2, "--overwrite").stdout
    assert read(out)["3"] == {"txt": b"y"}
    run(source, out, "--max-samples", 3, "--overwrite")
    run(source, tmp_path / "fresh", "--max-samples", 3)
    assert outputs(out) == outputs(tmp_path / "fresh")
    fill(tmp_path / "mine", {"shard-000000.tar": "mine"})
    assert "and no plan of a job: another program wrote them" in refused(source, tmp_path / "mine")
    assert outputs(tmp_path / "mine") == {"shard-000000.tar": b"mine"}


def test_reports_for_people_and_machines(tmp_path, source):
    dry = run(source, tmp_path / "out", "--max-samples", 25, "--dry-run").stdout
    assert not (tmp_path / "out").exists()
    report = json.loads(run(source, tmp_path / "out", "--max-samples", 25, "--json").stdout)
    assert report["written"] == ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar"]
    assert (report["complete"], report["failed"], report["tasks"]) == (True, {}, 3)
    assert [report["facts"][name]["samples"] for name in report["written"]] == [25, 25, 10]
    sizes = [os.path.getsize(tmp_path / "out" / name) for name in report["written"]]
    assert [report["facts"][name]["size"] for name in report["written"]] == sizes
    assert dry.splitlines() == [
        *(
            f"would write {name}: {count} samples, {size:,} bytes"
            for name, count, size in zip(report["written"], [25, 25, 10], sizes)
        ),
        f"{tmp_path / 'out'}: 3 tasks to do",
    ]


@pytest.mark.parametrize("room", [1500, 60_000])
def test_a_full_disk_is_said_in_one_line(source, whole, tmp_path, monkeypatch, room):
    """Nothing incomplete gets a final name, and the same command finishes when there is room."""
    true, left = os.write, [room]

    def write(fd, data):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        told = run(source, tmp_path / "out", "--max-samples", 7, code=1).stderr
    assert re.search(rf"{tmp_path}/out/[^ ]*: No space left|No space left on device: '{tmp_path}/out/", told)
    assert told.count("No space") == 1
    assert outputs(tmp_path / "out").items() <= whole.items()
    run(source, tmp_path / "out", "--max-samples", 7)
    assert outputs(tmp_path / "out") == whole


def test_outputs_are_no_inputs_of_the_next_run(tmp_path):
    source = fill(tmp_path / "in", {"a.txt": "x", "b.txt": "y"})
    assert "is none: name one" in refused(source, source / "a.txt")
    assert "is a shard: wds-pipes reshard, sort" in refused(fill(tmp_path, {"x.tar": "x"}) / "x.tar", source)
    run(source, source / "to/out")
    assert "(1 of 1 there already)" in run(source, source / "to/out").stdout


def test_a_file_that_changes_fails_its_task_alone(tmp_path, monkeypatch):
    """The others are kept, and the next run writes the rest."""
    source, out = fill(tmp_path / "in", {f"{number}.txt": "x" for number in range(6)}), tmp_path / "out"
    true = records._read_local

    def changed(content, key):
        if key == "3":
            fill(source, {"3.txt": "other"})
        return true(content, key)

    with monkeypatch.context() as patch:
        patch.setattr(records, "_read_local", changed)
        told = run(source, out, "--max-samples", 2, code=1).stderr
    assert "3.txt was changed after it was listed: run the command again" in told
    assert sorted(path.name for path in out.glob("*.tar")) == ["shard-000000.tar", "shard-000002.tar"]
    assert "(2 of 3 there already)" in run(source, out, "--max-samples", 2, "--overwrite").stdout


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    """SIGKILL at random moments: nothing incomplete under a final name, and the same end."""
    done = run_proof("kill_jobs.py", "--only", "create", "--rounds", 1, "--kills", 3, "--samples", 1200, "--seed", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "commands=1 kills=3" in done.stdout


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (signal.SIGTERM, ""),
        (signal.SIGINT, "what is finished is kept: run the same command again to go on\nAborted!\n"),
    ],
)
def test_a_signal_discards_what_is_being_written(source, tmp_path, sent, told):
    """As schedulers send it, and Ctrl-C; the next run writes what is missing."""
    command = [sys.executable, "-m", "wds_pipes", "create", source, tmp_path / "out", "--max-samples", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "out/.wds-pipes/plan.json").exists)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + sent, told)
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".partial")]
    assert "60 shards, 60 samples" in run(source, tmp_path / "out", "--max-samples", 1).stdout


def test_closed_streams_are_not_written_to(source, tmp_path):
    """As some schedulers start commands: no file may get the number of a stream."""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "wds_pipes"]
    done = subprocess.run([*closed, "create", source, tmp_path / "out", "--max-samples", "30", "-j", "2"], check=False)
    assert done.returncode == 0
    assert "(2 of 2 there already)" in run(source, tmp_path / "out", "--max-samples", 30).stdout
