"""``wds-pipes create``: shards of files, lists and tables."""

import base64
import csv
import errno
import itertools
import json
import os
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import commands
import pytest
from commands import assert_readable, outputs, run_command
from memory import memory_below
from scripts import run_proof
from tars import samples

import wds_pipes as wp
from wds_pipes.io.compression import compress_bytes
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tools import create
from wds_pipes.tools import files as records

pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
run = partial(run_command, "create")
refused = partial(commands.refused, "create", code=(1, 2))


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


LEFT_OUT = (".hidden/x.jpg", "cat/.DS_Store", "cat/Thumbs.db", "desktop.ini", "__MACOSX/cat/v1.0/000.JPG")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """60 samples of two fields in directories, and what is left out."""
    numbers = random.Random(3)
    files = {}
    for number in range(60):
        name = f"{'cat' if number % 3 else 'dog'}/v1.0/{number:03d}"
        files |= {f"{name}.JPG": numbers.randbytes(numbers.randrange(3000)), f"{name}.seg.png": b"x" * number}
    return fill(tmp_path_factory.mktemp("source"), {**files, **dict.fromkeys(LEFT_OUT, "x")})


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


def test_a_random_order_depends_on_the_seed_and_the_keys(source, tmp_path):
    def order(path, *options):
        run(path, tmp_path / "out", "--overwrite", *options)
        return list(read(tmp_path / "out"))

    found = order(source, "--shuffle", 2)
    fill(tmp_path, {"list.txt": "\n".join(f"{key}.JPG" for key in reversed(found))})
    assert order(tmp_path / "list.txt", "--shuffle", 2, "--root", source) == found
    assert len({tuple(found), tuple(order(source, "--shuffle", 1)), tuple(sorted(found))}) == 3


def test_splits_are_those_of_split_by_key(source, tmp_path):
    run(source, tmp_path / "out", "--split", "train=0.7,val=0.3", "--max-samples", 20)
    assert sorted(os.listdir(tmp_path / "out")) == [".wds-pipes", "train", "val"]
    run(source, tmp_path / "all")
    views = wp.IndexedShards(str(tmp_path / "all" / "*.tar")).split({"train": 0.7, "val": 0.3})
    for name, view in views.items():
        assert [view[number]["__key__"] for number in range(len(view))] == list(read(tmp_path / "out" / name))
        assert len(wp.IndexedShards(str(tmp_path / "out" / name / "index.json"))) == len(view)


def test_directories_are_classes(source, tmp_path):
    """As in ImageFolder. Where one has no samples, train and test would number the others in
    different ways.
    """
    run(source, tmp_path / "out", "--from", "classes")
    assert json.loads((tmp_path / "out/classes.json").read_text()) == ["cat", "dog"]
    found = {key: fields["cls"] for key, fields in read(tmp_path / "out").items()}
    assert found == {key: b"0" if key.startswith("cat") else b"1" for key in found}
    fill(tmp_path, {"in/cat/a.jpg": b"x", "in/emu/b.jpg": b"x", "in/dog/.hidden": b""})
    assert "dog is the directory of a class" in refused(tmp_path / "in", tmp_path / "none", "--from", "classes")
    run(tmp_path / "in", tmp_path / "two", "--from", "classes", "--ignore", "dog")
    assert [fields["cls"] for fields in read(tmp_path / "two").values()] == [b"0", b"1"]


FILES = {"data/a.jpg": "A", "data/sub/b.jpg": "B", "data/my c.jpg": "C"}


LIST = "data/a.jpg 3\n\ndata/sub/b.jpg 10\ndata/my c.jpg\t-1\n"
DOTS = {"in/r.1/v1.0_a.jpg": "a", "in/r.1/v1.0_b.jpg": "b"}
A, B, C = ({"jpg": name} for name in (b"A", b"B", b"C"))


@pytest.mark.parametrize(
    ("files", "source", "options", "expected", "classes"),
    [
        (
            {**FILES, "l": LIST},  # a path with blanks needs a tab before its label
            "l",
            [],
            {"data/a": A | {"cls": b"3"}, "data/sub/b": B | {"cls": b"10"}, "data/my c": C | {"cls": b"-1"}},
            None,
        ),
        (
            {**FILES, "l": "data/my c.jpg\tdog\ndata/sub/b.jpg cat\n"},
            "l",
            [],
            {"data/my c": C | {"cls": b"1"}, "data/sub/b": B | {"cls": b"0"}},
            ["cat", "dog"],
        ),
        ({**FILES, "l": "data/my c.jpg\ndata/a.jpg\n"}, "l", [], {"data/my c": C, "data/a": A}, None),
        # as spreadsheets save CSV where the comma is in numbers; text with a comma needs no quotes
        (
            {"t.csv": '\ufeffid;text\r\n1;a, b\r\n2;"c;d"\r\n'},
            "t.csv",
            ["--key", "id", "--value", "txt=text"],
            {"1": {"txt": b"a, b"}, "2": {"txt": b"c;d"}},
            None,
        ),
        (DOTS, "in", ["--key-split", "last-dot"], {"r.1/v1_0_a": {"jpg": b"a"}, "r.1/v1_0_b": {"jpg": b"b"}}, None),
        (DOTS, "in", ["--key-split", "first-dot"], {"r.1/v1": {"0_a.jpg": b"a", "0_b.jpg": b"b"}}, None),
        (DOTS, "in", ["--key-split", "folder"], {"r_1": {"v1.0_a.jpg": b"a", "v1.0_b.jpg": b"b"}}, None),
    ],
    ids=itertools.count(),
)
def test_what_samples_are_made(tmp_path, *, files, source, options, expected, classes):
    """In the order of the input."""
    fill(tmp_path, files)
    run(tmp_path / source, tmp_path / "out", *options)
    assert list(read(tmp_path / "out").items()) == list(expected.items())
    assert json.loads(outputs(tmp_path / "out").get("classes.json", b"null")) == classes


ROWS = [
    {"id": "x1", "image": "data/a.jpg", "label": 3, "text": "größe, und"},
    {"id": "x2", "image": "data/sub/b.jpg", "label": 4, "text": ""},
]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("piped", [False, True])
def test_tables(tmp_path, kind, piped):
    """The same samples of each kind, also from standard input; files are found beside a table."""
    fill(tmp_path, FILES)
    path = tmp_path / f"table.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        lines = [["id", "image", "label", "text"], *([f'"{value}"' for value in row.values()] for row in ROWS)]
        comma = {"csv": ",", "tsv": "\t"}[kind]
        path.write_text("".join(comma.join(line) + "\n" for line in lines), encoding="utf-8-sig")
    options = ["--key", "id", "--file", "image", "--value", "cls=label", "--value", "txt=text"]
    if piped:
        run("-", tmp_path / "out", "--from", kind, *options, "--root", tmp_path, stdin=path.read_bytes())
    else:
        run(path, tmp_path / "out", *options)
    assert read(tmp_path / "out") == {
        "x1": {"jpg": b"A", "cls": b"3", "txt": "größe, und".encode()},
        "x2": {"jpg": b"B", "cls": b"4", "txt": b""},
    }


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_compressed_table(tmp_path, kind):
    packed = compress_bytes(
        "".join(json.dumps({"id": n, "text": f"text {n}"}) + "\n" for n in range(300)).encode(), kind
    )
    fill(tmp_path, {f"t.jsonl.{kind}": packed, f"cut.jsonl.{kind}": packed[:-9]})
    fill(tmp_path, {f"bad.jsonl.{kind}": packed[:100] + bytes(200) + packed[300:]})
    run(tmp_path / f"t.jsonl.{kind}", tmp_path / "out", "--key", "id", "--value", "txt=text")
    assert read(tmp_path / "out") == {str(n): {"txt": f"text {n}".encode()} for n in range(300)}
    for name in (f"cut.jsonl.{kind}", f"bad.jsonl.{kind}"):
        message = refused(tmp_path / name, tmp_path / "no", "--key", "id", "--value", "txt=text")
        assert f"{name} is damaged, or was cut: " in message


def test_a_column_of_bytes_has_one_type(tmp_path):
    """Base64 in JSON, also where some values are text by chance; or a field that --value names."""
    codes = [b"oI", b"\xff\0", b"<Y"]
    table = pyarrow.table({"code": pyarrow.array(codes, pyarrow.binary()), "pair": [[code, b"a"] for code in codes]})
    parquet.write_table(table, tmp_path / "t.parquet")
    run(tmp_path / "t.parquet", tmp_path / "out")
    for code, sample in zip(codes, read(tmp_path / "out").values(), strict=True):
        both = [{"base64": base64.b64encode(value).decode()} for value in (code, b"a")]
        assert json.loads(sample["json"]) == {"code": both[0], "pair": both}
    run(tmp_path / "t.parquet", tmp_path / "named", "--value", "bin=code")
    assert list(read(tmp_path / "named").values()) == [{"bin": code} for code in codes]


PARTS = [range(5), range(5, 5), range(5, 12), range(12, 20)]


def write_part(path, kind, rows):
    if kind == "parquet":
        schema = pyarrow.schema({"n": pyarrow.int64(), "text": pyarrow.string()})
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path, row_group_size=3)
        return
    lines = (
        [json.dumps(row) for row in rows] if kind == "jsonl" else ["n,text", *(f'{row["n"]},"a\nb"' for row in rows)]
    )
    data = "".join(line + "\n\n" * (kind == "jsonl") + "\n" * (kind == "csv") for line in lines).encode()
    packed = path.suffix.lstrip(".")
    path.write_bytes(compress_bytes(data, packed) if packed in ("zst", "gz") else data)


@pytest.mark.parametrize(
    ("kind", "ending"), [("parquet", ""), ("jsonl", ""), ("jsonl", ".zst"), ("csv", ""), ("csv", ".gz")], ids=str
)
def test_several_files_of_a_table(tmp_path, kind, ending):
    """In the order of their names, whatever file a shard begins in; also in shares, and again."""
    (tmp_path / "in/b").mkdir(parents=True)
    for name, part in zip(("b/0", "b/1", "b/2", "c"), PARTS, strict=True):
        rows = [{"n": number, "text": "a\nb"} for number in part]
        write_part(tmp_path / f"in/{name}.{kind}{ending}", kind, rows)
    for share in (1, 0):
        options = ("--from", kind, "--max-samples", 3, "--task", share, "--tasks", 2)
        run(tmp_path / "in", tmp_path / "out", *options)
    assert [row["n"] for row in map(json.loads, json_of(tmp_path / "out"))] == [
        number if kind != "csv" else str(number) for number in range(20)
    ]
    assert list(read(tmp_path / "out")) == [f"{number:09d}" for number in range(20)]
    assert len(outputs(tmp_path / "out")["index.json"]) > 0
    run(f"{tmp_path}/in/b/*.{kind}{ending}", tmp_path / "some", "--max-bytes", 16)
    assert len(list((tmp_path / "some").glob("*.tar"))) > 3
    assert len(read(tmp_path / "some")) == 12
    for option in (("--shuffle", 0), ("--group", 2), ("--split", "a=0.5,b=0.5")):
        told = refused(tmp_path / "in", tmp_path / "no", "--from", kind, *option)
        assert f"{option[0]} needs the whole table, and SOURCE may be several files" in told


def json_of(folder):
    return [sample["json"] for sample in samples([str(folder)])]


def test_an_image_column_of_the_hub_is_a_field_of_its_extension(tmp_path):
    pictures = [b"\xff\xd8\xff" + bytes([number]) for number in range(4)]
    rows = [{"image": {"bytes": data, "path": "x"}, "label": number} for number, data in enumerate(pictures)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    run(tmp_path / "t.parquet", tmp_path / "out")
    expected = [{"jpg": data, "json": json.dumps({"label": number})} for number, data in enumerate(pictures)]
    assert [{**sample, "json": sample["json"].decode()} for sample in read(tmp_path / "out").values()] == expected


def test_labels_of_the_hub_keep_the_names_of_their_classes(tmp_path):
    """One file, as several."""
    features = {"label": {"_type": "ClassLabel", "names": ["cat", "dog", "owl"]}}
    rows = pyarrow.table({"label": [1, 0, 1]}).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    parquet.write_table(rows, tmp_path / "t.parquet")
    for name in ("t.parquet", "*.parquet*"):
        folder = tmp_path / str(len(name))
        run(tmp_path / name, folder, "--value", "cls=label")
        assert [sample["cls"] for sample in read(folder).values()] == [b"1", b"0", b"1"]
        assert json.loads((folder / "classes.json").read_text()) == ["cat", "dog", "owl"]


def test_a_table_is_not_held_in_memory(tmp_path):
    """Of 64 MB of rows."""
    with (tmp_path / "t.jsonl").open("w") as file:
        for number in range(4_000):
            file.write(json.dumps({"n": number, "text": "x" * 16_000}) + "\n")
    with memory_below(16 << 20):
        create(tmp_path / "t.jsonl", tmp_path / "out")


def test_a_parquet_file_is_not_read_compressed(tmp_path):
    fill(tmp_path, {"t.parquet.gz": compress_bytes(b"PAR1", "gz")})
    assert "t.parquet.gz is a compressed Parquet file" in refused(tmp_path / "t.parquet.gz", tmp_path / "no")


def test_each_row_of_a_long_table_is_a_sample(tmp_path):
    """More rows than are read ahead."""
    fill(tmp_path, {f"f/{number}.txt": str(number) for number in range(1100)})
    fill(tmp_path, {"t.csv": "path,n\n" + "".join(f"f/{number}.txt,{number}\n" for number in range(1100))})
    run(tmp_path / "t.csv", tmp_path / "out", "--file", "path", "--value", "cls=n")
    found = [(fields["cls"], fields["txt"]) for fields in read(tmp_path / "out").values()]
    assert found == [(str(number).encode(),) * 2 for number in range(1100)]


def test_a_long_cell_is_read_and_the_limit_of_the_process_stays(tmp_path):
    limit = csv.field_size_limit()
    fill(tmp_path, {"t.csv": f"v\n{'x' * (limit + 1)}\n"})
    run(tmp_path / "t.csv", tmp_path / "out", "--value", "txt=v")
    assert [len(fields["txt"]) for fields in read(tmp_path / "out").values()] == [limit + 1]
    assert csv.field_size_limit() == limit


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
        ({"a.jpg": "", "README": ""}, [], "has an extension, which names its field, does not begin with a dot"),
        ({"a.jpg": "", "a.JPG": ""}, [], "a.JPG and a.jpg are both field 'jpg' of sample 'a': rename one"),
        ({"v1.0_a.jpg": "", "v1.0_b.jpg": ""}, [], "v1.0_a.jpg would be field '0_a.jpg' of sample 'v1'"),
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
    told = " ".join(run(tmp_path / "in", tmp_path / "out", code=1).stderr.split())
    assert told.startswith("Error: 30 problems in the input, so nothing was written: file0 belongs to no sample")
    assert "and 20 more problems" in told
    assert told.count("rename the file, or leave it out with --ignore") == 1
    run(tmp_path / "in", tmp_path / "out", "--ignore", "file*")


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("l.txt", "data/a.jpg 1\ndata/a.jpg 1", [], ["data/a.jpg comes twice: name it once"]),
        (
            "l.txt",
            "data/a.jpg 1\ndata/x.jpg 1",
            [],
            ["line 2: ", "x.jpg is no file that can be found", "Check the path"],
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
        ("t.csv", "id\nx\n", ["--value", "json=id"], ["record '000000000'", "column 'id' cannot be field 'json'"]),
        ("t.csv", "id\nx\n", ["--value", "JPG=id"], ["record '000000000'"]),
        ("t.jsonl", "{}\n[]\n", [], ["line 2 of", "is no JSON object"]),
        ("t.jsonl", "{}\n{\n", [], ["line 2 of", "is no JSON: "]),
        ("t.csv", b"id\n\xff\n", [], ["is not UTF-8 text"]),
        ("a.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF", [], ["a.jpg is not UTF-8 text"]),
        ("-", "", ["--from", "files"], ["is a list or a table, and --from files reads a directory"]),
        (".", "", ["--from", "tsv"], ["there is no file *.tsv in"]),
        ("a.csv", "x", ["--from", "files"], ["is a file, and --from files reads a directory"]),
        ("t.csv", "id,v\n1,a\n".encode("utf-16"), [], ["is not UTF-8 text", "iconv -f UTF-16 -t UTF-8"]),
        ("t.csv", "id;v\n1;Käse\n".encode("cp1252"), [], ["is not UTF-8 text", "iconv -f CP1252 -t UTF-8"]),
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
        ("t.csv", "id,v,v\n1,a,b\n", ["--value", "txt=id"], ["t.csv has two columns 'v': rename one of them"]),
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


@pytest.mark.parametrize(("kind", "link", "target"), [("files", "a/y.txt", "y.txt"), ("classes", "b", "")])
def test_links_out_of_a_directory_are_followed_if_one_says_so(tmp_path, kind, link, target):
    fill(tmp_path, {"in/a/x.txt": "x", "secret/y.txt": "y"})
    (tmp_path / "in/a/inside.txt").symlink_to("x.txt")
    (tmp_path / "in" / link).symlink_to(tmp_path / "secret" / target)
    options = (tmp_path / "in", tmp_path / "out", "--from", kind)
    assert f"in/{link} is a link out of SOURCE" in refused(*options)
    run(*options, "--follow-symlinks")
    assert set(read(tmp_path / "out")) == {"a/x", "a/inside", f"{link[0]}/y"}


def test_a_list_from_elsewhere_names_no_file_of_this_machine(tmp_path, web):
    (tmp_path / "secret.txt").write_text("mine")
    (Path(web.directory) / "in.txt").write_text(f"{tmp_path}/secret.txt\n")
    options = (f"{web.url}/in.txt", tmp_path / "out", "--from", "list")
    assert "a file of this machine" in refused(*options)
    assert "a file of this machine" in refused(*options, "--root", tmp_path / "other")
    run(*options, "--root", tmp_path)


def test_shards_are_no_files_to_pack(tmp_path):
    """Unless that is said."""
    fill(tmp_path / "in", {"a.tar": b"x", "a.tar.idx": b"y", "index.json": b"{}"})
    assert "SOURCE has shards, such as a.tar: wds-pipes reshard" in refused(tmp_path / "in", tmp_path / "out")
    fill(tmp_path / "in", {"classes.json": b"[]", "cat/b.jpg": b"1", "cat/c.json": b"{}", "cat/t.tgz": b"x"})
    for kind in ("files", "classes"):
        told = run(tmp_path / "in", tmp_path / kind, "--from", kind).stderr
        assert "warning: 5 files of shards left out, such as a.tar: pass --include 'a.tar' to pack it\n" in told
        assert set(read(tmp_path / kind)) == {"cat/b", "cat/c"}
    run(tmp_path / "in", tmp_path / "out", "--include", "a.tar")
    assert read(tmp_path / "out")["a"] == {"tar": b"x"}


def test_tables_and_parts_of_a_tar_are_no_files_to_pack(tmp_path):
    fill(tmp_path / "rows", {"a.parquet": b"x", "sub/b.parquet": b"y"})
    assert "wds-pipes convert --from parquet makes" in refused(tmp_path / "rows", tmp_path / "out")
    run(tmp_path / "rows", tmp_path / "out", "--include", "*.parquet")
    assert read(tmp_path / "out") == {"a": {"parquet": b"x"}, "sub/b": {"parquet": b"y"}}
    fill(tmp_path / "parts", {"x.tar.part00": b"x", "x.tar.part01": b"y"})
    for source in ("parts", "parts/x.tar.part00"):
        assert "x.tar.part00 is a part of a tar: join" in refused(tmp_path / source, tmp_path / "none")


def test_another_file_of_one_size_and_time_is_another_one(tmp_path):
    """In a table: its name shows it. What was written of another input is replaced only with
    --overwrite.
    """
    fill(tmp_path, {"a.bin": b"AAAA", "b.bin": b"BBBB", "a.csv": "id,f\nk,a.bin\n", "b.csv": "id,f\nk,b.bin\n"})
    for name in ("a.bin", "b.bin"):
        os.utime(tmp_path / name, (1e9, 1e9))
    options = [tmp_path / "out", "--key", "id", "--file", "f"]
    run(tmp_path / "a.csv", *options)
    assert "1 of 1 task would be other" in refused(tmp_path / "b.csv", *options)
    run(tmp_path / "b.csv", *options, "--overwrite")
    assert read(tmp_path / "out") == {"k": {"bin": b"BBBB"}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "SOURCE 'nowhere' does not exist"),
        (["-", "out"], "standard input may be anything: pass --from"),
        (["t.json", "out"], "pass --from jsonl if it is an object on each line"),
        ([".", "out.tar"], "'out.tar' is none: name one"),
        ([".", "t.csv"], "is none: name one"),
        (["x.tar", "out"], "is a shard: wds-pipes reshard, sort"),
        ([".", "out", "--key", "id"], "--key is for csv, tsv, jsonl, parquet, and SOURCE is files"),
        (["t.csv", "out", "--ignore", "x"], "--ignore is for files, classes, and SOURCE is csv"),
        (["t.csv", "out", "--root", "x"], "--root is where the paths of --file begin"),
        ([".", "out", "--split", "train"], "--split is written as train=0.9,val=0.1"),
        ([".", "out", "--split", "train=0.9,val=0.2"], "sum to 1"),
        ([".", "out", "--split", "a=0.5,a=0.5"], "names a split twice"),
        ([".", "out", "--storage-options", "[]"], "--storage-options is not JSON like"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, arguments, message):
    fill(tmp_path, {"t.csv": "id\nx\n", "t.json": "{}\n", "x.tar": "x"})
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)


def test_sources_are_paths_too(tmp_path):
    """For the function, as pathlib has them."""
    fill(tmp_path, {"in/a.txt": "x", "l.txt": "a.txt"})
    assert str(create(tmp_path / "in", tmp_path / "out")) == f"written to {tmp_path}/out: 1 shard, 1 sample, 10.2 kB"
    assert create(tmp_path / "l.txt", tmp_path / "list", root=tmp_path / "in").complete


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


def test_a_full_disk_is_said_in_one_line(source, whole, tmp_path, monkeypatch):
    """Nothing incomplete gets a final name, and the same command finishes when there is room."""
    true, left = os.write, [60_000]

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
    fill(tmp_path, {"a.txt": "x", "b.txt": "y"})
    run(tmp_path, tmp_path / "to/out")
    assert "(1 of 1 there already)" in run(tmp_path, tmp_path / "to/out").stdout


def test_a_file_that_changes_fails_its_task_alone(tmp_path, monkeypatch):
    """The others are kept."""
    source, true = fill(tmp_path / "in", {f"{number}.txt": "x" for number in range(6)}), records._read_local

    def changed(content):
        if content.url.endswith("3.txt"):
            fill(source, {"3.txt": "other"})
        return true(content)

    monkeypatch.setattr(records, "_read_local", changed)
    told = run(source, tmp_path / "out", "--max-samples", 2, code=1).stderr
    assert "3.txt was changed after it was listed: run the command again" in told
    assert sorted(path.name for path in tmp_path.glob("out/*.tar")) == ["shard-000000.tar", "shard-000002.tar"]


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    """SIGKILL at random moments: nothing incomplete under a final name, and the same end."""
    done = run_proof("kill_jobs.py", "--only", "create", "--rounds", 1, "--kills", 3, "--samples", 1200, "--seed", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "commands=1 kills=3" in done.stdout


def test_closed_streams_are_not_written_to(source, whole, tmp_path):
    """As some schedulers start commands: no file may get the number of a stream, also of the
    processes that the command starts.
    """
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "wds_pipes"]
    done = subprocess.run([*closed, "create", source, tmp_path, "--max-samples", "7", "-j", "2"], check=False)
    assert done.returncode == 0
    assert outputs(tmp_path) == whole
