"""``wds-pipes convert``: shards of data sets in other formats."""

import contextlib
import gzip
import io
import json
import math
import os
import shutil
import struct
from functools import partial
from pathlib import Path

import commands
import numpy as np
import pytest
from commands import outputs, run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import samples

from wds_pipes.errors import SampleError
from wds_pipes.tar.encoded import check_name
from wds_pipes.tools import convert
from wds_pipes.tools.rows import columns_of, sample_of
from wds_pipes.tools.sources import framed, packed, tensor_protos

arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
lmdb = pytest.importorskip("lmdb")
DATA = Path(__file__).parents[1] / "data"
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(256))


run = partial(run_command, "convert")
refused = partial(commands.refused, "convert", code=(1, 2))


def read(folder):
    """The fields of the samples in all shards, by key."""
    found = samples(sorted(map(str, Path(folder).rglob("*.tar"))))
    assert len({sample["__key__"] for sample in found}) == len(found)
    return {sample["__key__"]: {name: value for name, value in sample.items() if name[:2] != "__"} for sample in found}


def tfrecord(records):
    return b"".join(map(framed, records))


# TFRecord


def test_tfrecord_that_a_library_has_written(tmp_path):
    """Bytes are a field by what they are; numbers and text are JSON."""
    convert(DATA / "records.tfrecord", tmp_path / "out", kind="tfrecord")
    found = read(tmp_path / "out")
    assert list(found) == [f"records/{number:09d}" for number in range(4)]
    for number, fields in enumerate(found.values()):
        boxes = list(range(number))
        assert fields["jpg"][:3] == b"\xff\xd8\xff"
        assert json.loads(fields["json"]) == {
            "boxes": boxes[0] if number == 1 else boxes,
            "image/class/label": number,
            "image/filename": f"n01.{number}.JPEG",
        }


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Four files of records, one of them compressed, and one empty."""
    folder = tmp_path_factory.mktemp("records")
    for place in range(4):
        content = tfrecord(packed({"image": JPEG + bytes([place]), "x": number}) for number in range(5 * (place != 2)))
        name = f"train.tfrecord-{place:05d}-of-00004"
        (folder / name).write_bytes(gzip.compress(content) if place == 1 else content)
    return folder


def test_each_file_is_a_shard(records, tmp_path):
    """Their names are those of the files, and keys are numbers in them."""
    run(records, tmp_path / "all", "--from", "tfrecord")
    assert sorted(path.name for path in (tmp_path / "all").glob("*.tar")) == [
        f"train-{number:05d}-of-00004.tar" for number in range(4)
    ]
    run(records / "*-0000[13]-*", tmp_path / "two", "--from", "tfrecord")
    found = read(tmp_path / "two")
    assert list(found) == [f"train-{place:05d}-of-00004/{n:09d}" for place in (1, 3) for n in range(5)]
    assert found["train-00003-of-00004/000000004"] == {"jpg": JPEG + b"\3", "json": b'{"x": 4}'}


RECORDS = [packed({"x": JPEG, "y": number}) for number in range(3)]
SIZE = len(tfrecord(RECORDS[:1]))


LISTS = b"\x12\x0b\x0a\x09\x0a\x03rgb\x12\x02\x0a\x00"  # of features, which a SequenceExample has besides


@pytest.mark.parametrize(
    ("content", "byte", "message"),
    [
        (b"not a record file", 0, "the checksum of a length is wrong, or it is no TFRecord file"),
        (tfrecord(RECORDS)[:-1], 2 * SIZE, "the file is cut"),
        (tfrecord(RECORDS)[: SIZE + 7], SIZE, "the file is cut"),
        (tfrecord(RECORDS)[:SIZE] + b"\1" + tfrecord(RECORDS)[SIZE + 1 :], SIZE, "the checksum of a length is wrong"),
        (tfrecord(RECORDS)[: SIZE + 20] + b"?" + tfrecord(RECORDS)[SIZE + 21 :], SIZE, "the checksum of the record"),
        (gzip.compress(tfrecord(RECORDS))[:-9], 3 * SIZE, "the compressed data ends before"),
        (tfrecord([b"\xff\xff"]), 0, ""),
        (tfrecord([RECORDS[0] + LISTS]), 0, "it is a tf.train.SequenceExample"),
    ],
)
def test_damaged_records_say_where(tmp_path, content, byte, message):
    """And nothing is written of them."""
    (tmp_path / "a.tfrecord").write_bytes(content)
    told = refused(tmp_path / "a.tfrecord", tmp_path / "out", "--from", "tfrecord")
    assert f"a.tfrecord, byte {byte}: no record of tf.train.Example can be read there: {message}" in told
    assert not list(tmp_path.rglob("*.tar"))


def test_a_record_that_differs_later_is_an_error_of_its_shard(tmp_path):
    """The first records decide what a column is; the other shards are written."""
    for name, values in (("a", [b"text"] * 100), ("b", [b"\0\1"])):
        (tmp_path / f"{name}.tfrecord").write_bytes(tfrecord(packed({"x": value}) for value in values))
    message = refused(tmp_path / "*.tfrecord", tmp_path / "out", "--from", "tfrecord", code=1)
    assert "column 'x' has bytes that are no text, and was text in the first records" in message
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["a.tar"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (DATA / "records.tfrecord", ["tfrecord", "--max-samples", 5], "each becomes one shard"),
        ("bad", ["tfrecord"], "there is no file *.tfrecord"),
        ("empty.tfrecord", ["tfrecord"], "has no records"),
        ("two", ["tfrecord"], "a.b.tfrecord and a_b.tfrecord would both be a_b.tar: rename one"),
        ("s3://b/x", ["lmdb"], "copy s3://b/x there"),
        ("missing", ["lmdb"], "cannot be found"),
        ("no.lmdb", ["lmdb"], "is no LMDB"),
        ("two", ["hf"], "has no state.json"),
        ("bad", ["hf"], "state.json has no names in '_data_files'"),
        ("empty", ["hf"], "state.json has no names in '_data_files'"),
        ("data.txt", ["torchrecord", "--key", "x"], "--key"),
        (
            DATA / "records.tfrecord",
            ["tfrecord", "--value", "cls=boxes", "--key", "image/filename"],
            "record 'n01_0_JPEG': column 'boxes' cannot be field 'cls'",
        ),
    ],
)
def test_wrong_calls(tmp_path, monkeypatch, source, options, message):
    files = {"two/a.b.tfrecord": "", "two/a_b.tfrecord": "", "empty.tfrecord": "", "no.lmdb": "nothing" * 1000}
    for name, text in {**files, "bad/state.json": "{bad", "empty/state.json": '{"_data_files": [{}]}'}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert message in refused(source, "out", "--from", *options)
    assert not list(tmp_path.rglob("*.tar"))


def parquet_of(path, table):
    pq.write_table(table if isinstance(table, arrow.Table) else arrow.table(table), path, row_group_size=100)
    return path


def test_no_column_and_no_key_is_lost(tmp_path):
    def told(*arguments):
        return refused(tmp_path / "x.parquet", tmp_path / "out", "--from", "parquet", *arguments)

    parquet_of(tmp_path / "x.parquet", arrow.Table.from_arrays([arrow.array([1]), arrow.array([2])], ["a", "a"]))
    assert f"{tmp_path}/x.parquet has two columns 'a': rename one of them" in told()
    parquet_of(tmp_path / "x.parquet", {"__key__": ["a", None], "txt": ["x", "y"]})
    assert "record 000000001 has no key in column '__key__', but None: give it one" in told()


def array(data):
    found = np.load(io.BytesIO(data))
    return found.dtype, found.tolist()


CUBE = arrow.list_(arrow.list_(arrow.list_(arrow.uint8())))
OF_CUBE = {
    b"ARROW:extension:name": b"datasets.features.features.Array3DExtensionType",
    b"ARROW:extension:metadata": b'[[2, 1, 3], "uint8"]',
}
TENSOR = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
# Columns, their metadata, and for both rows the dtype of an array; None: the value is JSON.
LISTS = {
    "emb": (arrow.array([[0.5, 0.25], [0.5, None]], arrow.list_(arrow.float32())), None, (np.float32, None)),
    "none": (arrow.array([[], None], arrow.list_(arrow.float32())), None, (np.float32, None)),
    "cube": (arrow.array([[[[1, 2, 3]], [[4, 5, 6]]]] * 2, CUBE), OF_CUBE, (np.uint8, np.uint8)),
    "box": (
        arrow.array([[[1, 2], [3, 4]], []], arrow.list_(arrow.list_(arrow.float16(), 2))),
        None,
        (np.float16, np.float16),
    ),
    "any": (arrow.array([[[1], [2, 3]], [[1]]], arrow.list_(arrow.list_(arrow.int32()))), None, (None, None)),
    "large": (arrow.array([[2**63 + 1, 5], [1]], arrow.list_(arrow.uint64())), None, (np.uint64, np.uint64)),
    "tensor": (arrow.FixedShapeTensorArray.from_numpy_ndarray(TENSOR), None, (np.int32, np.int32)),
}


def test_lists_of_numbers_are_arrays_of_the_dtype_of_their_column(tmp_path):
    """Also tensors, and those of Hugging Face's Array3D. Lists that have a null, and lists of lists
    that may differ in length, are JSON.
    """
    fields = [arrow.field(name, column.type, metadata=about) for name, (column, about, _) in LISTS.items()]
    table = arrow.table([column for column, *_ in LISTS.values()], arrow.schema(fields))
    run(parquet_of(tmp_path / "x.parquet", table), tmp_path / "out", "--from", "parquet")
    for number, sample in enumerate(read(tmp_path / "out").values()):
        rest = json.loads(sample["json"])
        for name, (column, _, dtypes) in LISTS.items():
            value = TENSOR[number].tolist() if name == "tensor" else column[number].as_py()
            found = rest.get(name) if dtypes[number] is None else array(sample[f"{name}.npy"])
            assert found == (value if dtypes[number] is None else (dtypes[number], value)), name
    chosen = ("e.npy=cube", "j.json=box", "a.npy=large", "b.npy=tensor")
    run(tmp_path / "x.parquet", tmp_path / "one", "--from", "parquet", *(f"--value={one}" for one in chosen))
    first = read(tmp_path / "one")["000000000"]
    assert array(first["e.npy"]) == (np.uint8, [[[1, 2, 3]], [[4, 5, 6]]])
    assert array(first["a.npy"]) == (np.uint64, [2**63 + 1, 5])
    assert array(first["b.npy"]) == (np.int32, TENSOR[0].tolist())
    assert json.loads(first["j.json"]) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("options", "names"), [(["--value=cls=label"], ["cat", "dog"]), (["--value=cls=n"], None), ([], ["cat", "dog"])]
)
def test_names_of_a_class_label_are_written(tmp_path, options, names):
    """As Hugging Face has them in the metadata of a schema."""
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "n": {"dtype": "int64", "_type": "Value"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = arrow.table({"label": [1, 0], "n": [1, 2]}).replace_schema_metadata(about)
    run(parquet_of(tmp_path / "x.parquet", table), tmp_path / "out", "--from", "parquet", *options)
    found = outputs(tmp_path / "out").get("classes.json", b"null")
    assert json.loads(found) == names


def test_images_are_named_by_what_they_are(tmp_path):
    """A field of another extension would be decoded as what it is not."""
    png = b"\x89PNG\r\n\x1a\n"
    parquet_of(tmp_path / "x.parquet", {"image": [JPEG, png], "other": [b"x", b"y"]})
    run(
        tmp_path / "x.parquet", tmp_path / "out", "--from", "parquet", "--value", "a.jpeg=image", "--value", "gif=other"
    )
    run_command("create", tmp_path / "x.parquet", tmp_path / "made", "--value", "a.jpeg=image", "--value", "gif=other")
    for folder in ("out", "made"):
        assert list(read(tmp_path / folder).values()) == [{"a.jpeg": JPEG, "gif": b"x"}, {"a.png": png, "gif": b"y"}]
    both = ["--value", "a.png=image", "--value", "a.jpg=other"]
    parquet_of(tmp_path / "x.parquet", {"image": [JPEG], "other": [JPEG]})
    assert "two values for field 'a.jpg'" in refused(
        tmp_path / "x.parquet", tmp_path / "no", "--from", "parquet", *both
    )


def test_a_damaged_data_set_is_never_read_anywhere_in_memory(tmp_path):
    batch = arrow.record_batch({"a": [b"x" * 1000, b"y" * 1000]})
    with arrow.OSFile(str(tmp_path / "d.arrow"), "wb") as file, arrow.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
    content = (tmp_path / "d.arrow").read_bytes()
    offsets = struct.pack("<3i", 0, 1000, 2000)
    assert offsets in content
    (tmp_path / "d.arrow").write_bytes(content.replace(offsets, struct.pack("<3i", 0, 1 << 30, 2000)))
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    assert "d.arrow cannot be read: " in refused(tmp_path, tmp_path / "out", "--from", "hf", code=1)


# Tables


def test_a_saved_data_set(tmp_path):
    """What datasets.save_to_disk() has written: its splits, and images as they are."""
    told = run(DATA / "saved", tmp_path / "out", "--from", "hf", "--max-samples", 2).stdout
    assert "3 shards, 5 samples" in told
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.tar")) == [
        "test-000000.tar",
        "train-000000.tar",
        "train-000001.tar",
    ]
    train = read(tmp_path / "out/train")
    assert [sorted(fields) for fields in train.values()] == [["jpg", "json"], ["jpg", "json"], ["json", "png"]]
    assert list(train) == ["000000000", "000000001", "000000002"]
    assert json.loads(train["000000001"]["json"]) == {"label": 1, "text": "größe 1"}
    arrow = b"".join(path.read_bytes() for path in (DATA / "saved/train").glob("*.arrow"))
    assert train["000000002"]["png"] in arrow
    assert json.loads((tmp_path / "out/train/index.json").read_text())["shardlist"][0]["nsamples"] == 2
    run(DATA / "saved/test", tmp_path / "test", "--from", "hf")
    assert read(tmp_path / "test") == read(tmp_path / "out/test")


@pytest.mark.parametrize(
    ("name", "where"), [("../test", "split"), ("{data}/saved/test/data-00000-of-00001.arrow", "file")]
)
def test_a_saved_data_set_names_no_file_outside_of_itself(tmp_path, name, where):
    source, name = shutil.copytree(DATA / "saved/train", tmp_path / "in"), name.format(data=DATA)
    if where == "split":
        (source / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    else:
        state = json.loads((source / "state.json").read_text())
        (source / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
    assert f"'{name}' is no name of a file below" in refused(source, tmp_path / "out", "--from", "hf")


@pytest.mark.parametrize("linked", ["test", "test/data-00000-of-00001.arrow"])
def test_a_link_out_of_a_saved_data_set_is_refused(tmp_path, linked):
    shutil.copytree(DATA / "saved", tmp_path / "in")
    (tmp_path / "in" / linked).rename(tmp_path / "outside")
    (tmp_path / "in" / linked).symlink_to(tmp_path / "outside")
    told = refused(tmp_path / "in", tmp_path / "out", "--from", "hf")
    assert "test/data-00000-of-00001.arrow is a link out of SOURCE" in told


def test_columns_with_other_columns_and_without_values(tmp_path):
    """Files and arrays in a list are fields of their own, without those that are null; bytes that
    are deeper, or beside text, are base64 in JSON; times are text, also those in nanoseconds.
    """
    columns = {
        "pages": [[{"bytes": JPEG, "path": None}, None, {"bytes": b"x", "path": "a.PDF"}], []],
        "parts": [[b"\0", None], None],
        "inner": [{"n": 1, "data": b"\0", "more": [b"\0", b"text by chance"]}, None],
        "map": arrow.array([[("k", 1)], None], arrow.map_(arrow.string(), arrow.int64())),
        "none": arrow.nulls(2, arrow.binary()),
        "audio": [{"bytes": b"RIFF\0\0\0\0WAVE", "path": "x"}, {"bytes": None, "path": None}],
        "us": arrow.array([10**15, None], arrow.timestamp("us")),
        "ns": arrow.array([1, None], arrow.timestamp("ns")),
        "took": arrow.array([7, None], arrow.duration("ns")),
        "day": arrow.array([1, None], arrow.date32()),
    }
    run(parquet_of(tmp_path / "x.parquet", columns), tmp_path / "out", "--from", "parquet")
    first, second = read(tmp_path / "out").values()
    times = {"us": "2001-09-09T01:46:40", "ns": "1970-01-01 00:00:00.000000001", "took": 7, "day": "1970-01-02"}
    more = [{"base64": "AA=="}, {"base64": "dGV4dCBieSBjaGFuY2U="}]
    rest = {"inner": {"n": 1, "data": {"base64": "AA=="}, "more": more}, "map": [["k", 1]], "none": None, **times}
    assert json.loads(first.pop("json")) == rest
    assert first == {
        "pages.0.jpg": JPEG,
        "pages.2.pdf": b"x",
        "parts.0.bin": b"\0",
        "audio.wav": b"RIFF\0\0\0\0WAVE",
    }
    assert json.loads(second.pop("json")) == {"pages": [], "parts": None, **dict.fromkeys(rest)}
    assert second == {}


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """Two files of 10 and 7 rows in small groups of rows."""
    folder = tmp_path_factory.mktemp("parquet")
    rows = [
        {
            "image": {"bytes": JPEG + bytes([number]), "path": "x.jpg"},
            "mask": {"bytes": b"P5 odd", "path": "x.PGM"} if number % 2 else None,
            "label": number,
            "score": math.nan if number == 3 else number / 2,
            "words": ["a", None],
            "name": f"n{number}",
        }
        for number in range(17)
    ]
    for name, part in (("a", rows[:10]), ("b", rows[10:])):
        pq.write_table(arrow.Table.from_pylist(part), folder / f"{name}.parquet", row_group_size=4)
    return folder


@pytest.mark.parametrize("count", [3, 100])
def test_shards_have_so_many_rows(parquet, tmp_path, count):
    """Whatever files and groups they are in."""
    run(parquet, tmp_path, "--from", "parquet", "--max-samples", count)
    sizes = [len(samples([str(shard)])) for shard in sorted(tmp_path.glob("*.tar"))]
    assert sizes == [*[count] * (17 // count), 17 % count]
    found = read(tmp_path)
    assert list(found) == [f"{number:09d}" for number in range(17)]
    for number, fields in enumerate(found.values()):
        assert fields["image.jpg"] == JPEG + bytes([number])
        assert fields.get("mask.pgm") == (b"P5 odd" if number % 2 else None)
        score = math.nan if number == 3 else number / 2  # as create writes it, too
        row = {"label": number, "score": score, "words": ["a", None], "name": f"n{number}"}
        masked = {} if number % 2 else {"mask": None}
        assert json.dumps(json.loads(fields["json"]), sort_keys=True) == json.dumps(row | masked, sort_keys=True)


# LMDB


def fill(path, entries, **options):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), map_size=1 << 24, **options) as store, store.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.put(key, value)


@pytest.mark.parametrize("subdir", [True, False])
def test_a_database(tmp_path, subdir):
    """Its keys are keys, and values are fields by what they are."""
    entries = {f"n{number:02d}/a.b".encode(): JPEG + bytes([number]) for number in range(7)}
    fill(tmp_path / "db", entries | {b"x": "größe".encode(), b"y": b"\0\1", b"__len__": b"9"}, subdir=subdir)
    run(tmp_path / "db", tmp_path / "out", "--from", "lmdb", "--max-samples", 4)
    expected = {f"n{number:02d}/a_b": {"jpg": JPEG + bytes([number])} for number in range(7)}
    assert read(tmp_path / "out") == expected | {"x": {"txt": "größe".encode()}, "y": {"bin": b"\0\1"}}
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    run(tmp_path / "db", tmp_path / "named", "--from", "lmdb", "--key", "key", "--value", "data=value")
    assert read(tmp_path / "named")["y"] == {"data": b"\0\1"}


@pytest.mark.parametrize("pages", [1, 40])
def test_a_database_that_is_cut_is_an_error(tmp_path, pages):
    """Its end is never read from the memory to which it is mapped: that would end the process."""
    fill(tmp_path / "db", {b"%05d" % number: JPEG * 10 for number in range(200)})
    file = tmp_path / "db/data.mdb"
    whole = file.stat().st_size
    os.truncate(file, whole - pages * 4096)
    message = refused(tmp_path / "db", tmp_path / "o", "--from", "lmdb", code=1)
    assert f"{file} has {whole - pages * 4096:,} bytes, and says that it has {whole:,}: it is cut" in message


def protos(*tensors):
    """The message of tensors."""
    message = tensor_protos()()
    for tensor in tensors:
        message.protos.add(**tensor)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"b", "key b'a': the value is no TensorProtos"),
        (protos(*({"name": "a", "data_type": 4, "string_data": [b"x"]},) * 2), "two of its tensors have one name"),
        (protos(*({"name": name, "data_type": 4, "string_data": [b"x"]} for name in "aA")), "would be 1 fields"),
    ],
)
def test_what_is_no_torchrecord(tmp_path, value, message):
    """No tensor is lost."""
    fill(tmp_path / "db", {b"a": value})
    assert message in refused(tmp_path / "db", tmp_path / "out", "--from", "torchrecord", code=1)


def test_torchrecord(tmp_path):
    """As its writer puts them: pictures of bytes or pixels, and classes as text; databases in the
    order of their numbers.
    """
    pixels = bytes(range(18))
    for place in (0, 1, 10):
        values = {b"9": (pixels, b"7")} | {str(n).encode(): (JPEG, str(place).encode()) for n in range(3)}
        entries = {
            key: protos({"data_type": 3, "byte_data": data, "dims": [2, 3]}, {"data_type": 3, "byte_data": label})
            for key, (data, label) in values.items()
        }
        fill(tmp_path / f"in/db{place}", entries)
    run(tmp_path / "in", tmp_path / "out", "--from", "torchrecord", "--max-samples", 5)
    found = read(tmp_path / "out")
    assert list(found) == [f"{number:09d}" for number in range(12)]
    assert found["000000000"] == {"jpg": JPEG, "cls": b"0"}
    assert [fields["cls"] for fields in found.values()] == [*[b"0"] * 3, b"7", *[b"1"] * 3, b"7", *[b"10"] * 3, b"7"]
    assert array(found["000000003"]["npy"]) == (np.uint8, np.frombuffer(pixels, np.uint8).reshape(3, 2, 3).tolist())


def test_tensors_of_numbers(tmp_path):
    """Each type, with its shape."""
    half = np.array([1.5, -2], np.float16)
    numbers = {
        "float": ({"data_type": 1, "float_data": range(6)}, np.arange(6, dtype=np.float32).reshape(2, 3)),
        "double": ({"data_type": 13, "double_data": [0, 1]}, np.arange(2, dtype=np.float64)),
        "int64": ({"data_type": 10, "int64_data": [1 << 40, -1]}, np.array([[1 << 40, -1]])),
        "int32": ({"data_type": 2, "int32_data": [3, 4]}, np.array([3, 4], np.int32)),
        "half": ({"data_type": 12, "int32_data": half.view(np.uint16).tolist()}, half),
    }
    tensors = [{"name": name, "dims": expected.shape, **tensor} for name, (tensor, expected) in numbers.items()]
    tensors.append({"name": "label", "data_type": 2, "int32_data": [5]})
    tensors.append({"name": "title", "data_type": 4, "string_data": ["größe".encode()]})
    fill(tmp_path / "db", {b"0": protos(*tensors)})
    run(tmp_path / "db", tmp_path / "out", "--from", "torchrecord")
    (fields,) = read(tmp_path / "out").values()
    for name, (_, expected) in numbers.items():
        assert array(fields[f"{name}.npy"]) == (expected.dtype, expected.tolist())
    assert (fields["label.cls"], fields["title.txt"]) == (b"5", "größe".encode())


def test_the_list_of_a_torchrecord(tmp_path):
    """Lines of paths and labels, as create --from list reads them."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jpg").write_bytes(JPEG)
    (tmp_path / "data.txt").write_text("a.jpg 3\nb.jpg 4\n")
    run(tmp_path / "data.txt", tmp_path / "out", "--from", "torchrecord")
    assert read(tmp_path / "out") == {"a": {"jpg": JPEG, "cls": b"3"}, "b": {"jpg": JPEG, "cls": b"4"}}


# Rows


text = st.text("aB/.ü\0\x1b")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.fixed_dictionaries({"a": values, "b/C": values}), min_size=1, max_size=4))
def test_any_row_is_a_sample_that_can_be_written_or_an_error(rows):
    """Bytes are never changed, and all names can be written."""

    columns = columns_of(rows, None, {}, "x")
    for row in rows:
        with contextlib.suppress(SampleError):
            sample = sample_of(row, "7", columns)
            assert sample.pop("__key__") == "7"
            assert sample
            for name in sample:
                check_name("7", name)
            for name in ("a", "b/C"):
                if isinstance(row[name], bytes) and name not in columns.text:
                    assert row[name] in sample.values()


def test_a_selection_of_rows_is_not_ignored(tmp_path):
    """Old versions of datasets saved one beside all rows."""
    source = shutil.copytree(DATA / "saved/test", tmp_path / "in")
    state = json.loads((source / "state.json").read_text())
    (source / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "x.arrow"}]}))
    assert f"{source} has a selection of its rows beside them" in refused(source, tmp_path / "out", "--from", "hf")
