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
import google_crc32c
import numpy as np
import pytest
from commands import outputs, run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import samples

from wds_pipes.errors import SampleError
from wds_pipes.tar.encoded import check_name
from wds_pipes.tools.rows import columns_of, sample_of
from wds_pipes.tools.tfrecord import example, tensor_protos

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
    """A TFRecord file, as its format is published."""

    def crc(data):
        value = google_crc32c.value(data)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, crc(length), record, crc(record)]
    return b"".join(parts)


def example_of(**features):
    """An Example by the classes of protobuf."""
    message = example()()
    for name, values in features.items():
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(values[0])]
        getattr(message.features.feature[name], kind).value.extend(values)
    return message.SerializeToString()


# TFRecord


def test_tfrecord_that_a_library_has_written(tmp_path):
    """Bytes are a field by what they are; numbers and text are JSON."""
    run(DATA / "records.tfrecord", tmp_path / "out", "--from", "tfrecord")
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
        content = tfrecord(example_of(image=[JPEG + bytes([place])], x=[number]) for number in range(5 * (place != 2)))
        name = f"train.tfrecord-{place:05d}-of-00004"
        (folder / name).write_bytes(gzip.compress(content) if place == 1 else content)
    return folder


def test_each_file_is_a_shard(records, tmp_path):
    """Their names are those of the files, and keys are numbers in them."""
    run(records, tmp_path / "all", "--from", "tfrecord", "-j", 2)
    assert sorted(path.name for path in (tmp_path / "all").glob("*.tar")) == [
        f"train-{number:05d}-of-00004.tar" for number in range(4)
    ]
    run(records / "*-0000[13]-*", tmp_path / "two", "--from", "tfrecord")
    found = read(tmp_path / "two")
    assert list(found) == [f"train-{place:05d}-of-00004/{n:09d}" for place in (1, 3) for n in range(5)]
    assert found["train-00003-of-00004/000000004"] == {"jpg": JPEG + b"\3", "json": b'{"x": 4}'}


RECORDS = [example_of(x=[JPEG], y=[number]) for number in range(3)]
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
        (tmp_path / f"{name}.tfrecord").write_bytes(tfrecord(example_of(x=[value]) for value in values))
    message = refused(tmp_path / "*.tfrecord", tmp_path / "out", "--from", "tfrecord", code=1)
    assert "column 'x' has bytes that are no text, and was text in the first records" in message
    assert "--value bin=x" in message
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["a.tar"]


def test_wrong_calls(tmp_path):
    source = DATA / "records.tfrecord"
    assert "each becomes one shard" in refused(source, tmp_path, "--from", "tfrecord", "--max-samples", 5, code=2)
    assert "there is no file *.tfrecord" in refused(tmp_path, tmp_path / "o", "--from", "tfrecord")
    assert "copy s3://b/x there" in refused("s3://b/x", tmp_path / "o", "--from", "lmdb")
    assert "has no state.json" in refused(tmp_path, tmp_path / "o", "--from", "hf")
    (tmp_path / "empty.tfrecord").write_bytes(b"")
    assert "has no records" in refused(tmp_path / "empty.tfrecord", tmp_path / "o", "--from", "tfrecord")
    message = refused(source, tmp_path / "o", "--from", "tfrecord", "--value", "cls=boxes", "--key", "image/filename")
    assert "record 'n01_0_JPEG': column 'boxes' cannot be field 'cls'" in message
    for name in ("a.b.tfrecord", "a_b.tfrecord"):
        shutil.copy(source, tmp_path / name)
    assert "a.b.tfrecord and a_b.tfrecord would both be a_b.tar: rename one" in refused(
        tmp_path, tmp_path / "o", "--from", "tfrecord"
    )


def parquet_of(path, columns, names=None):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table(columns) if names is None else arrow.Table.from_arrays(columns, names)
    parquet.write_table(table, path, row_group_size=100)
    return path


def test_no_column_and_no_key_is_lost(tmp_path):
    arrow = pytest.importorskip("pyarrow")

    def told(*arguments):
        return refused(tmp_path / "x.parquet", tmp_path / "out", "--from", "parquet", *arguments)

    parquet_of(tmp_path / "x.parquet", [arrow.array([1]), arrow.array([2])], ["a", "a"])
    assert f"{tmp_path}/x.parquet has two columns 'a': rename one of them" in told()
    parquet_of(tmp_path / "x.parquet", {"__key__": ["a", None], "txt": ["x", "y"]})
    assert "record 000000001 has no key in column '__key__', but None: give it one" in told()
    assert "--value names field 'txt' twice" in told("--value", "txt=txt", "--value", "txt=__key__")


def test_lists_of_numbers_are_arrays_of_the_dtype_of_their_column(tmp_path):
    """Also those of Hugging Face's Array3D; lists of lists that may differ in length are JSON."""
    arrow = pytest.importorskip("pyarrow")
    cube = arrow.list_(arrow.list_(arrow.list_(arrow.uint8())))
    of = {
        b"ARROW:extension:name": b"datasets.features.features.Array3DExtensionType",
        b"ARROW:extension:metadata": b'[[2, 1, 3], "uint8"]',
    }
    columns = {
        "emb": (arrow.list_(arrow.float32()), [[0.1, 0.2], [], [0.5, None], None]),
        "cube": (cube, [[[[1, 2, 3]], [[4, 5, 6]]]] * 4),
        "box": (arrow.list_(arrow.list_(arrow.float16(), 2)), [[[1, 2], [3, 4]], []] * 2),
        "any": (arrow.list_(arrow.list_(arrow.int32())), [[[1], [2, 3]], [[1]]] * 2),
    }
    values = [arrow.array(found, kind) for kind, found in columns.values()]
    fields = [arrow.field(name, kind, metadata=of if kind == cube else None) for name, (kind, _) in columns.items()]
    pyarrow = pytest.importorskip("pyarrow.parquet")
    pyarrow.write_table(arrow.table(values, arrow.schema(fields)), tmp_path / "x.parquet")
    run(tmp_path / "x.parquet", tmp_path / "out", "--from", "parquet")
    first, second, third, fourth = read(tmp_path / "out").values()

    def array(data):
        found = np.load(io.BytesIO(data))
        return found.dtype, found.shape, found.tolist()

    assert array(first["emb.npy"]) == (np.float32, (2,), np.float32([0.1, 0.2]).tolist())
    assert array(second["emb.npy"]) == (np.float32, (0,), [])
    assert json.loads(third["json"]) == {"emb": [0.5, None], "any": [[1], [2, 3]]}
    assert json.loads(fourth["json"]) == {"emb": None, "any": [[1]]}
    assert array(first["cube.npy"]) == (np.uint8, (2, 1, 3), [[[1, 2, 3]], [[4, 5, 6]]])
    assert array(first["box.npy"]) == (np.float16, (2, 2), [[1, 2], [3, 4]])
    assert array(second["box.npy"]) == (np.float16, (0, 2), [])
    run(tmp_path / "x.parquet", tmp_path / "one", "--from", "parquet", "--value", "e.npy=cube", "--value", "j.json=box")
    assert array(read(tmp_path / "one")["000000000"]["e.npy"])[:2] == (np.uint8, (2, 1, 3))
    assert json.loads(read(tmp_path / "one")["000000000"]["j.json"]) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("options", "names"), [(["cls=label"], ["cat", "dog"]), (["cls=n"], None), ([], ["cat", "dog"])]
)
def test_names_of_a_class_label_are_written(tmp_path, options, names):
    """As Hugging Face has them in the metadata of a schema."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    label = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    features = {"label": label, "n": {"dtype": "int64", "_type": "Value"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = arrow.table({"label": [1, 0], "n": [1, 2]}).replace_schema_metadata(about)
    parquet.write_table(table, tmp_path / "x.parquet")
    run(tmp_path / "x.parquet", tmp_path, "--from", "parquet", *(f"--value={value}" for value in options))
    found = tmp_path / "classes.json"
    assert (json.loads(found.read_text()) if found.exists() else None) == names


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


def test_large_integers_and_tensors_stay_what_they_are(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    large = arrow.array([[2**63 + 1, 5]], arrow.list_(arrow.uint64()))
    tensor = arrow.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6, dtype=np.int32).reshape(1, 2, 3))
    parquet_of(tmp_path / "x.parquet", [large, tensor], ["large", "tensor"])
    run(tmp_path / "x.parquet", tmp_path / "out", "--from", "parquet", "--value=a.npy=large", "--value=b.npy=tensor")
    [found] = read(tmp_path / "out").values()
    assert np.load(io.BytesIO(found["a.npy"])).tolist() == [2**63 + 1, 5]
    tensor = np.load(io.BytesIO(found["b.npy"]))
    assert (tensor.dtype, tensor.tolist()) == (np.int32, [[0, 1, 2], [3, 4, 5]])


def test_a_damaged_data_set_is_never_read_anywhere_in_memory(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    batch = arrow.record_batch({"a": [b"x" * 1000, b"y" * 1000]})
    with arrow.OSFile(str(tmp_path / "d.arrow"), "wb") as file, arrow.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(batch)
    content = (tmp_path / "d.arrow").read_bytes()
    offsets = struct.pack("<3i", 0, 1000, 2000)
    assert offsets in content
    (tmp_path / "d.arrow").write_bytes(content.replace(offsets, struct.pack("<3i", 0, 1 << 30, 2000)))
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    assert "d.arrow cannot be read: " in refused(tmp_path, tmp_path / "out", "--from", "hf", code=1)


@pytest.mark.parametrize("state", ["{bad", '{"_data_files": [{}]}'])
def test_a_state_that_names_no_files(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    assert "state.json has no names in '_data_files'" in refused(tmp_path, tmp_path / "out", "--from", "hf")


# Tables


def test_a_saved_data_set(tmp_path):
    """What datasets.save_to_disk() has written: its splits, and images as they are."""
    pytest.importorskip("pyarrow")
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


@pytest.mark.parametrize(("name", "where"), [("../test", "split"), ("{data}/saved/test", "file")])
def test_a_saved_data_set_names_no_file_outside_of_itself(tmp_path, name, where):
    pytest.importorskip("pyarrow")
    shutil.copytree(DATA / "saved", tmp_path / "in")
    source, name = tmp_path / "in/train", name.format(data=DATA)
    if where == "split":
        (source / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    else:
        [arrow] = sorted(path.name for path in (DATA / "saved/test").glob("*.arrow"))
        name += f"/{arrow}"
        state = json.loads((source / "state.json").read_text())
        (source / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
    told = refused(source, tmp_path / "out", "--from", "hf")
    assert f"'{name}' is no name of a file below" in told


@pytest.mark.parametrize("linked", ["test", "test/data-00000-of-00001.arrow"])
def test_a_link_out_of_a_saved_data_set_is_refused(tmp_path, linked):
    pytest.importorskip("pyarrow")
    shutil.copytree(DATA / "saved", tmp_path / "in")
    (tmp_path / "in" / linked).rename(tmp_path / "outside")
    (tmp_path / "in" / linked).symlink_to(tmp_path / "outside")
    told = refused(tmp_path / "in", tmp_path / "out", "--from", "hf")
    assert "test/data-00000-of-00001.arrow is a link out of SOURCE" in told


def test_columns_with_other_columns_and_without_values(tmp_path):
    """Files and arrays in a list are fields of their own, without those that are null; bytes that
    are deeper, or beside text, are base64 in JSON.
    """
    arrow = pytest.importorskip("pyarrow")
    columns = {
        "pages": [[{"bytes": JPEG, "path": None}, None, {"bytes": b"x", "path": "a.PDF"}], []],
        "parts": [[b"\0", None], None],
        "inner": [{"n": 1, "data": b"\0"}, None],
        "map": arrow.array([[("k", 1)], None], arrow.map_(arrow.string(), arrow.int64())),
        "none": arrow.nulls(2, arrow.binary()),
        "audio": [{"bytes": b"RIFF\0\0\0\0WAVE", "path": "x"}, {"bytes": None, "path": None}],
    }
    run(parquet_of(tmp_path / "x.parquet", columns), tmp_path / "out", "--from", "parquet")
    first, second = read(tmp_path / "out").values()
    rest = {"inner": {"n": 1, "data": {"base64": "AA=="}}, "map": [["k", 1]], "none": None}
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
    pyarrow, table = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
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
        table.write_table(pyarrow.Table.from_pylist(part), folder / f"{name}.parquet", row_group_size=4)
    return folder


@pytest.mark.parametrize("count", [3, 100])
def test_shards_have_so_many_rows(parquet, tmp_path, count):
    """Whatever files and groups they are in."""
    run(parquet, tmp_path, "--from", "parquet", "--max-samples", count)
    shards = sorted(tmp_path.glob("*.tar"))
    assert len(shards) == -(-17 // count)
    assert [len(samples([str(shard)])) for shard in shards[:-1]] == [count] * (len(shards) - 1)
    found = read(tmp_path)
    assert list(found) == [f"{number:09d}" for number in range(17)]
    for number, fields in enumerate(found.values()):
        assert fields["image.jpg"] == JPEG + bytes([number])
        assert fields.get("mask.pgm") == (b"P5 odd" if number % 2 else None)
        row = json.loads(fields["json"])
        if number == 3:  # NaN, which equals nothing; create writes it so, too
            assert math.isnan(row["score"])
            row["score"] = 1.5
        assert row == {
            "label": number,
            "score": number / 2,
            "words": ["a", None],
            "name": f"n{number}",
        } | ({} if number % 2 else {"mask": None})


# LMDB


@pytest.fixture
def lmdb():
    return pytest.importorskip("lmdb")


def fill(lmdb, path, entries, **options):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), map_size=1 << 24, **options) as store, store.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.put(key, value)


@pytest.mark.parametrize("subdir", [True, False])
def test_a_database(lmdb, tmp_path, subdir):
    """Its keys are keys, and values are fields by what they are."""
    entries = {f"n{number:02d}/a.b".encode(): JPEG + bytes([number]) for number in range(7)}
    fill(lmdb, tmp_path / "db", entries | {b"x": "größe".encode(), b"y": b"\0\1", b"__len__": b"9"}, subdir=subdir)
    run(tmp_path / "db", tmp_path / "out", "--from", "lmdb", "--max-samples", 4)
    expected = {f"n{number:02d}/a_b": {"jpg": JPEG + bytes([number])} for number in range(7)}
    assert read(tmp_path / "out") == expected | {"x": {"txt": "größe".encode()}, "y": {"bin": b"\0\1"}}
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    run(tmp_path / "db", tmp_path / "processes", "--from", "lmdb", "--max-samples", 4, "-j", 2)
    assert outputs(tmp_path / "processes") == outputs(tmp_path / "out")
    run(tmp_path / "db", tmp_path / "named", "--from", "lmdb", "--key", "key", "--value", "data=value")
    assert read(tmp_path / "named")["y"] == {"data": b"\0\1"}


def test_what_is_no_database(lmdb, tmp_path):
    (tmp_path / "x").write_bytes(b"nothing" * 1000)
    assert "is no LMDB" in refused(tmp_path / "x", tmp_path / "out", "--from", "lmdb")
    assert "cannot be found" in refused(tmp_path / "y", tmp_path / "out", "--from", "lmdb")
    fill(lmdb, tmp_path / "db0", {b"a": b"b"})
    assert "key b'a': the value is no TensorProtos" in refused(
        tmp_path / "db0", tmp_path / "o", "--from", "torchrecord"
    )


@pytest.mark.parametrize("pages", [1, 40])
def test_a_database_that_is_cut_is_an_error(lmdb, tmp_path, pages):
    """Its end is never read from the memory to which it is mapped: that would end the process."""
    fill(lmdb, tmp_path / "db", {b"%05d" % number: JPEG * 10 for number in range(200)})
    file = tmp_path / "db/data.mdb"
    whole = file.stat().st_size
    os.truncate(file, whole - pages * 4096)
    message = refused(tmp_path / "db", tmp_path / "o", "--from", "lmdb", code=1)
    assert f"{file} has {whole - pages * 4096:,} bytes, and says that it has {whole:,}: it is cut" in message


def test_tensors_of_one_name(lmdb, tmp_path):
    """None of them is lost."""
    for names, told in (((b"a", b"a"), "two of its tensors have one name"), ((b"A", b"a"), "would be 1 fields")):
        message = tensor_protos()()
        for name in names:
            message.protos.add(name=name.decode(), data_type=4, string_data=[name])
        fill(lmdb, tmp_path / told, {b"0": message.SerializeToString()})
        assert told in refused(tmp_path / told, tmp_path / f"{told} out", "--from", "torchrecord", code=1)


def varint(number):
    parts = []
    while True:
        number, part = number >> 7, number & 127
        parts.append(part | (128 if number else 0))
        if not number:
            return bytes(parts)


def tensor(kind, data, dims=()):
    """A TensorProto of bytes as Caffe2 has written it."""
    content = b"".join(b"\x08" + varint(dim) for dim in dims) + b"\x10" + varint(kind)
    content += (b"\x2a" if kind == 3 else b"\x32") + varint(len(data)) + data
    return b"\x0a" + varint(len(content)) + content


def test_torchrecord(lmdb, tmp_path):
    """As its writer puts them: pictures of bytes or pixels, and classes as text; databases in the
    order of their numbers.
    """
    pixels = bytes(range(18))
    for place in (0, 1, 10):
        entries = {str(n).encode(): tensor(3, JPEG, (2, 3)) + tensor(3, str(place).encode()) for n in range(3)}
        fill(lmdb, tmp_path / f"in/db{place}", {b"9": tensor(3, pixels, (2, 3)) + tensor(3, b"7")} | entries)
    run(tmp_path / "in", tmp_path / "out", "--from", "torchrecord", "--max-samples", 5)
    found = read(tmp_path / "out")
    assert list(found) == [f"{number:09d}" for number in range(12)]
    assert found["000000000"] == {"jpg": JPEG, "cls": b"0"}
    assert [fields["cls"] for fields in found.values()] == [*[b"0"] * 3, b"7", *[b"1"] * 3, b"7", *[b"10"] * 3, b"7"]
    array = np.load(io.BytesIO(found["000000003"]["npy"]))
    assert array.shape == (3, 2, 3)
    assert array.tobytes() == pixels


def test_tensors_of_numbers(lmdb, tmp_path):
    """Each type, with its shape."""
    message = tensor_protos()()
    arrays = {
        "float_data": np.arange(6, dtype=np.float32).reshape(2, 3) / 3,
        "double_data": np.arange(2, dtype=np.float64),
        "int64_data": np.array([[1 << 40, -1]]),
        "int32_data": np.array([3, 4], np.int32),
    }
    kinds = {"float_data": 1, "double_data": 13, "int64_data": 10, "int32_data": 2}
    for field, array in arrays.items():
        proto = message.protos.add(dims=array.shape, data_type=kinds[field], name=field[:-5])
        getattr(proto, field).extend(array.reshape(-1).tolist())
    half = np.array([1.5, -2], np.float16)
    message.protos.add(dims=[2], data_type=12, name="half", int32_data=half.view(np.uint16).tolist())
    message.protos.add(data_type=2, name="label", int32_data=[5])
    message.protos.add(data_type=4, name="title", string_data=["größe".encode()])
    fill(lmdb, tmp_path / "db", {b"0": message.SerializeToString()})
    run(tmp_path / "db", tmp_path / "out", "--from", "torchrecord")
    (fields,) = read(tmp_path / "out").values()
    for name, array in {**{field[:-5]: array for field, array in arrays.items()}, "half": half}.items():
        decoded = np.load(io.BytesIO(fields[f"{name}.npy"]))
        assert decoded.dtype == array.dtype
        assert np.array_equal(decoded, array)
    assert fields["label.cls"] == b"5"
    assert fields["title.txt"] == "größe".encode()


def test_the_list_of_a_torchrecord(tmp_path):
    """Lines of paths and labels, as create --from list reads them."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jpg").write_bytes(JPEG)
    (tmp_path / "data.txt").write_text("a.jpg 3\nb.jpg 4\n")
    run(tmp_path / "data.txt", tmp_path / "out", "--from", "torchrecord")
    assert read(tmp_path / "out") == {"a": {"jpg": JPEG, "cls": b"3"}, "b": {"jpg": JPEG, "cls": b"4"}}
    assert "--key" in refused(tmp_path / "data.txt", tmp_path / "b", "--from", "torchrecord", "--key", "x")


# Rows


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
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
    pytest.importorskip("pyarrow")
    shutil.copytree(DATA / "saved/test", tmp_path / "in")
    state = json.loads((tmp_path / "in/state.json").read_text())
    (tmp_path / "in/state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "x.arrow"}]}))
    assert f"{tmp_path}/in has a selection of its rows beside them" in refused(
        tmp_path / "in", tmp_path / "out", "--from", "hf"
    )
