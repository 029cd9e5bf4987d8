"""``wds-pipes export``: shards in other formats, and back."""

import base64
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import commands
import pytest
from commands import outputs, stored
from commands import run_command as run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tars import samples, tar

from wds_pipes import ShardWriter

JPEG = b"\xff\xd8\xff\xe0" + bytes(range(256))


refused = partial(commands.refused, code=(1, 2))


def read(folder):
    """The samples of all shards in a directory, without their URLs."""
    found = samples(sorted(map(str, Path(folder).rglob("*.tar"))))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in found]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards of classes with names."""
    folder = tmp_path_factory.mktemp("export")
    for number in range(25):
        path = folder / "in" / ("cat" if number % 3 else "dog") / f"{number:03d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".jpg").write_bytes(JPEG + bytes([number]))
        path.with_suffix(".json").write_text(json.dumps({"n": number, "text": "größe"}))
        path.with_suffix(".seg.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(number))
        if number % 2:
            path.with_suffix(".txt").write_bytes("größe\r\n".encode())
    run("create", folder / "in", folder / "shards", "--from", "classes", "--max-samples", 10)
    return folder / "shards"


# Samples of any field that a writer takes, also of bytes that are no UTF-8, in fields of other than
# text, and integers also as they are not usually written.
_integers = st.integers(-(1 << 65), 1 << 65).map(lambda number: str(number).encode())
_FORMS = [b"", b"007", b"1_0", b" 7", b"7\n", b"+7", b"-0", b"x", b"\xff", b"1" * 5000]
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(str.encode)
_values = {
    "txt": _texts,
    "a.json": st.recursive(st.none() | st.floats(allow_nan=False) | st.text(max_size=5), st.lists, max_leaves=4).map(
        lambda value: json.dumps(value).encode()
    ),
    "cls": _integers,
    "a.id": _integers | st.sampled_from(_FORMS),
    "jpg": st.binary(max_size=40),
    "b.c.bin": st.binary(max_size=3),
    "x y": st.sampled_from([b"", b"null", b"\0", b"{}"]),
    "__m.bin": st.binary(max_size=3),
}
_keys = st.text(st.characters(exclude_characters="\0./", exclude_categories=["Cs"]), min_size=1, max_size=8)
_samples = st.dictionaries(
    _keys.filter(lambda key: not key.startswith("__")),
    st.fixed_dictionaries({}, optional=_values).filter(bool),
    min_size=1,
    max_size=12,
)


@pytest.mark.filterwarnings("ignore:.*unlike all samples before it:wds_pipes.ShardWarning")  # as samples may be
@pytest.mark.parametrize("kind", ["parquet", "tfrecord", "jsonl"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=_samples)
def test_any_samples_come_back(tmp_path, kind, found):
    """The same, or nothing is written: of lines, JSON and the fields of columns by their values."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    (folder / "in").mkdir(parents=True)
    with ShardWriter(f"{folder}/in/%06d.tar", max_samples=8) as writer:
        for key, fields in found.items():
            writer.write({"__key__": key, **fields})
    run("export", folder / "in", folder / "out", "--to", kind)
    expected = [{"__key__": key, **fields} for key, fields in found.items()]
    if kind == "jsonl":
        files = sorted(folder.glob("out/*.jsonl"))
        lines = [json.loads(line) for path in files for line in path.read_bytes().split(b"\n") if line]
        assert [without_base64(line) for line in lines] == expected
    else:
        run("convert", folder / "out", folder / "back", "--from", kind)
        assert read(folder / "back") == expected


def without_base64(line):
    """The sample of a line: bytes are base64, integers and JSON are values, and text is text."""
    sample = {"__key__": line.pop("__key__")}
    del line["__url__"]
    for field, value in line.items():
        if isinstance(value, dict) and set(value) == {"base64"}:
            sample[field] = base64.b64decode(value["base64"])
        else:
            sample[field] = (
                value.encode() if field != "a.json" and isinstance(value, str) else json.dumps(value).encode()
            )
    return sample


def test_images_are_read_back_as_classes(shards, tmp_path):
    """And each list is one of create --from list. Fields can be left out."""
    run("export", shards, tmp_path / "a", "--to", "imagefolder")
    run("create", tmp_path / "a/images", tmp_path / "b", "--from", "classes", "--max-samples", 10)
    assert outputs(tmp_path / "b") == outputs(shards)
    run("export", shards, tmp_path / "c", "--to", "imagefolder", "--fields", "jpg")
    assert {path.suffix for path in (tmp_path / "c/images").rglob("*.*")} == {".jpg"}
    run("create", tmp_path / "c/shard-000000.txt", tmp_path / "d", "--from", "list")
    assert [sample["jpg"] for sample in read(tmp_path / "d")] == [sample["jpg"] for sample in read(shards)[:10]]


def test_the_library_of_tfrecord_reads_them(shards, tmp_path):
    """With integers as integers, and only the fields that are named."""
    reader = pytest.importorskip("tfrecord.reader")
    run("export", shards, tmp_path, "--to", "tfrecord", "--fields", "cls,jpg")
    found = [row for path in sorted(tmp_path.glob("*.tfrecord")) for row in reader.tfrecord_loader(str(path), None)]
    for row, sample in zip(found, read(shards), strict=True):
        assert {name: bytes(row[name]) for name in ("__key__", "jpg")} == {
            "__key__": sample["__key__"].encode(),
            "jpg": sample["jpg"],
        }
        assert row["cls"].tolist() == [int(sample["cls"])]
        assert len(row) == 3


def write(folder, name, members):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(tar(members))
    return folder / name


@pytest.mark.parametrize(
    ("kind", "members", "options", "message"),
    [
        ("parquet", [("a.txt", b"\xff")], [], "a.tar: keys and fields of text must be UTF-8"),
        (
            "imagefolder",
            [("a.jpg", b"x")],
            [],
            "sample 'a' has no field 'cls', which names its class: name it with --label",
        ),
        ("imagefolder", [("a.cls", b"x")], [], "sample 'a' has no other fields than its class"),
        ("imagefolder", [("../a.jpg", b"x"), ("../a.cls", b"c")], [], "would not be a file in the directory of"),
        ("imagefolder", [("a.jpg", b"x"), ("a.cls", b"../c")], [], "would not be a file in the directory of its class"),
        ("imagefolder", [("a.jpg", b"x"), ("a.cls", b"c\td")], [], "would not be a file in the directory of its class"),
        ("imagefolder", [("a\nb.jpg", b"x"), ("a\nb.cls", b"c")], [], "would not be a file in the directory of its"),
        ("imagefolder", [("a.jpg", b"x"), ("a.y", b".h")], ["--label", "y"], "of class '.h' would not be a file"),
        (  # a key may begin with the name of the class, which its path has once
            "imagefolder",
            [("x.jpg", b"x"), ("x.cls", b"cat"), ("cat/x.jpg", b"y"), ("cat/x.cls", b"cat")],
            [],
            "samples 'x' and 'cat/x' would both be images/cat/x.jpg",
        ),
    ],
)
def test_samples_that_a_format_cannot_hold(tmp_path, kind, members, options, message):
    """Nothing of their shard is left."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    shard = write(tmp_path / "in", "a.tar", members)
    assert message in refused("export", shard, tmp_path / "out", "--to", kind, *options)
    assert not outputs(tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([b"0", b"-7", str((1 << 63) - 1).encode()], "int64"),
        ([b"1", b"000123"], "string"),
        ([b"1_0"], "string"),
        ([b"7\n", b"7"], "string"),
        ([str(1 << 63).encode()], "string"),
        ([b"1", b"\xff"], "binary"),
    ],
)
def test_a_column_is_of_integers_if_all_come_back_as_their_bytes(tmp_path, values, kind):
    parquet = pytest.importorskip("pyarrow.parquet")
    shard = write(tmp_path / "in", "a.tar", [(f"{number}.id", value) for number, value in enumerate(values)])
    run("export", shard, tmp_path / "out", "--to", "parquet")
    run("convert", tmp_path / "out", tmp_path / "back", "--from", "parquet")
    assert [sample["id"] for sample in read(tmp_path / "back")] == values
    assert str(parquet.read_schema(tmp_path / "out/a.parquet").field("id").type) == kind


@pytest.mark.parametrize(
    ("kind", "later", "message"),
    [
        ("parquet", ("b.id", b"007"), "field 'id' of sample 'b' is b'007', and the first samples have integers in it"),
        ("tfrecord", ("b.id", b"007"), "field 'id' of sample 'b' is b'007', and the first samples have integers in it"),
        ("parquet", ("b.x", b"y"), "sample 'b' has field 'x', which the first samples do not have: name the columns"),
    ],
)
def test_a_later_sample_that_does_not_fit_is_refused(tmp_path, monkeypatch, kind, later, message):
    """And not changed: the first samples decide what the columns are."""
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("wds_pipes.tools.exporting._GROUP_BYTES", 1)
    shard = write(tmp_path / "in", "a.tar", [("a.id", b"1"), later])
    assert message in refused("export", shard, tmp_path / "out", "--to", kind, code=1)
    assert not outputs(tmp_path / "out")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_shard_may_lack_the_fields_that_are_written(kind, tmp_path):
    """If all lack them, it is an error."""
    write(tmp_path / "in", "a.tar", [("0.txt", b"x"), ("0.cls", b"1")])
    write(tmp_path / "in", "b.tar", [("1.txt", b"x")])
    told = run("export", tmp_path / "in", tmp_path / "out", "--to", kind, "--fields", "cls").stdout
    assert told.endswith("2 files, 1 sample; 1 sample left out, which had none of the fields\n")
    message = refused("export", tmp_path / "in", tmp_path / "no", "--to", kind, "--fields", "cap")
    assert "no sample has the field cap: correct --fields, and pass --overwrite" in message


def test_a_file_without_values_changes_no_others(tmp_path):
    """Read as one table, 007 stays what it is."""
    parquet = pytest.importorskip("pyarrow.dataset")
    write(tmp_path / "in", "a.tar", [("0.jpg", b"x")])
    write(tmp_path / "in", "b.tar", [("1.jpg", b"x"), ("1.cls", b"007")])
    told = run("export", tmp_path / "in", tmp_path / "out", "--to", "parquet", "--fields", "jpg,cls")
    assert told.stderr == ""
    files = sorted(map(str, (tmp_path / "out").glob("*.parquet")))
    assert parquet.dataset(files).to_table()["cls"].to_pylist() == [None, "007"]


def test_images_of_two_shards_are_no_files_of_one_name(tmp_path):
    """Also where the other shard is written by another machine."""
    for name in ("a.tar", "b.tar"):
        write(tmp_path / "in", name, [("0.jpg", JPEG), ("0.cls", b"cat")])
    both = ["export", tmp_path / "in", tmp_path / "out", "--to", "imagefolder", "--tasks", 2, "--task"]
    run(*both, 0)
    for _ in range(2):
        message = refused(*both, 1, code=1)
        assert "a.txt and b.txt both have images/cat/0.jpg, so one of the two is lost" in message
    images = write(tmp_path / "images", "c.tar", [("0.jpg", JPEG), ("0.cls", b"cat")])
    told = refused("export", images, tmp_path / "in/a.tar", tmp_path / "b", "--to", "imagefolder", code=2)
    assert "images/c.tar would be among the images" in told


def test_images_that_this_command_did_not_write_are_never_mixed_with_its_own(tmp_path):
    """Neither replaced, also with --overwrite; what was begun goes on."""
    for name in "xy":
        write(tmp_path / "in", f"{name}.tar", [(f"{name}.jpg", JPEG), (f"{name}.cls", b"0")])
    out = tmp_path / "out"
    export = ["export", tmp_path / "in", out, "--to", "imagefolder"]
    for index in (0, 1):
        run(*export, "--tasks", 2, "--task", index)
    write(tmp_path / "in", "x.tar", [("z.jpg", JPEG), ("z.cls", b"0")])
    for kind in ("imagefolder", "jsonl"):
        told = refused("export", tmp_path / "in", out, "--to", kind, "--overwrite")
        assert "has files in images/ that this command did not write: remove that directory" in told
    assert [name for name in outputs(out) if "images" in name] == ["images/0/x.jpg", "images/0/y.jpg"]
    shutil.rmtree(out / ".wds-pipes")
    assert "another program wrote them" in refused(*export)
    shutil.rmtree(out / "images")
    run(*export, "--overwrite")
    assert [name for name in outputs(out) if "images" in name] == ["images/0/y.jpg", "images/0/z.jpg"]


def test_names_of_classes_that_are_damaged(tmp_path):
    write(tmp_path, "a.tar", [("0.jpg", JPEG), ("0.cls", b"0")])
    for content in (b"{bad", b"\xff", b"5"):
        (tmp_path / "classes.json").write_bytes(content)
        told = refused("export", tmp_path / "a.tar", tmp_path / "out", "--to", "imagefolder", code=2)
        assert f"classes.json of the shards in {tmp_path}/ is no list of names" in told


def test_no_message_shows_the_secret_of_a_url(web, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("wds_pipes.tools.exporting._GROUP_BYTES", 1)
    web.put("a.tar", tar([("0.txt", b"\xff"), ("0.cls2", b"1"), ("1.cls2", b"x")]))
    for kind in ("parquet", "imagefolder", "tfrecord"):
        message = refused("export", f"{web.url}/a.tar?token=SECRET", tmp_path / kind, "--to", kind, code=1)
        assert "a.tar?...: " in message
        assert "SECRET" not in message


def test_wrong_calls(tmp_path, shards, monkeypatch):
    assert "does not exist" in refused("export", tmp_path / "no.tar", tmp_path / "out", "--to", "jsonl")
    assert "--label is for" in refused("export", shards, tmp_path, "--to", "jsonl", "--label", "x", code=2)
    for name, kind in (("google_crc32c", "tfrecord"), ("pyarrow.parquet", "parquet")):
        monkeypatch.setitem(sys.modules, name, None)
        assert "pip install 'wds_pipes[" in refused("export", shards, tmp_path / "out", "--to", kind)


def test_to_a_store(tmp_path, s3):
    """Images too, which are listed there: those of others are not mixed with its own."""
    for kind, fields in (("parquet", "jpg"), ("imagefolder", "jpg")):
        shard = write(tmp_path / "in", "a.tar", [("0.jpg", JPEG), ("0.cls", b"0")])
        to = ["--to", kind, "--fields", fields]
        store = [f"{s3.url}/{kind}", *to, "--storage-options", json.dumps(s3.storage_options)]
        run("export", shard, *store)
        run("export", shard, tmp_path / kind, *to)
        assert stored(s3, kind) == outputs(tmp_path / kind)
    write(tmp_path / "in", "a.tar", [("1.jpg", JPEG), ("1.cls", b"0")])
    assert "has files in images/ that this command did not write" in refused("export", shard, *store, "--overwrite")
