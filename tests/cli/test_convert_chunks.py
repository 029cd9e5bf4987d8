"""``wds-pipes convert --from mds`` and ``--from litdata``: what these libraries have written."""

import gzip
import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import outputs, run_command
from tars import samples

from wds_pipes.cli.converting.litdata_types import decoder
from wds_pipes.codecs.table import ROWS

DATA = Path(__file__).parents[1] / "data"
FORMS = ["mds/plain", "mds/zstd", "litdata/pairs", "litdata/rows", "litdata/chunk", "litdata/batch", "litdata/sample"]


def convert(source, dest, *options, code=0):
    """Convert one of FORMS, or a copy of it, with three samples in a shard."""
    source = source if isinstance(source, Path) else DATA / source
    if source.name == "rows":
        pytest.importorskip("pyarrow")
    kind = "mds" if "mds" in source.parts else "litdata"
    return run_command("convert", source, dest, "--from", kind, "--max-samples", 3, *options, code=code)


def refused(source, dest, code=(1, 2)):
    """The message of a refusal."""
    return " ".join(convert(source, dest, code=code).stderr.split())


def copied(name, folder):
    """A copy of a data set, to be changed."""
    return Path(shutil.copytree(DATA / name, folder / name))


def edit(source, change):
    """Change the index of a data set."""
    index = json.loads((source / "index.json").read_text())
    change(index)
    (source / "index.json").write_text(json.dumps(index))


def read(folder):
    """The fields of the samples in all shards, whose keys are their numbers."""
    found = samples(sorted(map(str, Path(folder).rglob("*.tar"))))
    assert [sample["__key__"] for sample in found] == [f"{number:09d}" for number in range(len(found))]
    return [{name: value for name, value in sample.items() if name[:2] != "__"} for sample in found]


def stored(name):
    """The bytes of the files of a data set."""
    return b"".join(path.read_bytes() for path in sorted((DATA / name).iterdir()))


def check_arrays(fields, expected):
    """Arrays have these values and types."""
    assert {name for name in fields if name.endswith("npy")} == set(expected)
    for name, array in expected.items():
        found = ROWS["npy"].decode(fields[name])
        assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())


def picture(number):
    return (np.arange(36).reshape(3, 4, 3) + number).astype(np.uint8)


@pytest.mark.parametrize("where", ["disk", "web"])
@pytest.mark.parametrize("name", ["../secret", "{folder}/secret"])
def test_an_index_names_no_file_outside_of_its_data_set(tmp_path, where, name, web):
    """Whoever wrote it would choose which file of this machine becomes a sample."""
    source = copied("mds/plain", tmp_path)
    [shard, *_] = sorted(source.glob("*.mds"))
    for folder in (tmp_path, source.parent):
        (folder / "secret").write_bytes(shard.read_bytes())
    name = name.format(folder=tmp_path)
    edit(source, lambda index: index["shards"][0]["raw_data"].update(basename=name))
    if where == "web":
        shutil.copytree(source, Path(web.directory) / "mds", dirs_exist_ok=True)
        source = f"{web.url}/mds"
    told = run_command("convert", source, tmp_path / "out", "--from", "mds", code=2).stderr
    assert f"'{name}' is no name of a file below" in " ".join(told.split())


# Values


def test_every_type_of_mds(tmp_path):
    """Images and pickles are as they were, pixels and arrays are npy, and the rest is JSON."""
    convert("mds/types", tmp_path)
    for number, fields in enumerate(read(tmp_path)):
        jpegs = ["jpeg.jpg", "jpeg_array.0.jpg", "jpeg_array.1.jpg", *(f"list_of_jpeg.{n}.jpg" for n in range(number))]
        files = {name: value for name, value in fields.items() if name.rpartition(".")[2] in ("jpg", "png", "pkl")}
        assert set(files) == {*jpegs, "png", "list_of_png.0.png", "pkl"}
        assert all(value in stored("mds/types") for value in files.values())
        assert all(fields[name].startswith(b"\xff\xd8\xff") for name in jpegs)
        assert fields["png"] == fields["list_of_png.0.png"]
        assert fields["bytes.bin"] == (b"\0" + bytes([number])) * number
        check_arrays(
            fields,
            {
                "ndarray.npy": np.arange(number + 1, dtype=np.float32).reshape(1, -1),
                "ndarray_int16.npy": np.full((2, 300), number, np.int16),
                "ndarray_uint8_2x3.npy": np.full((2, 3), number, np.uint8),
                **dict.fromkeys(["pil.npy", "list_of_pil.0.npy", "list_of_pil.1.npy"], picture(number)),
            },
        )
        assert json.loads(fields["json"]) == {
            "str": f"größe {number}",
            "int": number - 2,
            "uint8": number,
            "int64": -number,
            "float16": number / 2,
            "float64": number / 3,
            "str_int": 10**30 + number,
            "str_float": number / 3,
            "str_decimal": "0.10",
            "json": {"n": [number, None]},
        } | ({} if number else {"list_of_jpeg": []})


def test_every_type_of_litdata(tmp_path):
    """As with MDS; bytes and arrays in an inner dict are fields of their own."""
    convert("litdata/types", tmp_path)
    for number, fields in enumerate(read(tmp_path)):
        assert fields["image.jpg"].startswith(b"\xff\xd8\xff")
        assert fields["image.jpg"] in stored("litdata/types")
        assert fields["object.pkl"] in stored("litdata/types")
        assert (fields["clip.webm"], fields["raw.bin"]) == (b"no video", b"\0" * number)
        check_arrays(
            fields,
            {
                "meta.mask.npy": np.full((2, 2), number, np.uint16),
                "pixels.npy": picture(number),
                "row.npy": np.arange(number, dtype=np.float64),
                "ids.npy": np.arange(number),
                "matrix.npy": np.full((2, 1), number, np.int16),
            },
        )
        assert json.loads(fields["json"]) == {
            "meta.score": number / 3,
            "meta.flag": number % 2 == 0,
            "text": f"größe {number}",
            "label": number,
            "boxes": [[1, 2.5], [number, None]],
            "words": ["a", "größe"],
            "counts": [1, number],
            "parts": [0.5, 1.5],
            "flags": [True, False],
            "more": {"c": number, "d": [1, {}]},
            "people": [{"name": "A", "age": number, "tall": None}, {"name": "B", "age": 2, "tall": 1.5}],
            "any": [None, {"a": None, "b": {"c": [True, "x", 7, 0.5, {}]}}],
        }
        assert len(fields) == 10


def test_items_that_are_no_dicts(tmp_path):
    """Columns of a tuple are its places; tokens are one array."""
    convert("litdata/pairs", tmp_path / "pairs", "--value", "jpg=0", "--value", "cls=1")
    for number, fields in enumerate(read(tmp_path / "pairs")):
        assert fields == {"jpg": fields["jpg"], "cls": str(number).encode()}
        assert fields["jpg"] in stored("litdata/pairs")
    convert("litdata/tokens", tmp_path / "tokens")
    for number, fields in enumerate(read(tmp_path / "tokens")):
        check_arrays(fields, {"value.npy": np.arange(number + 1, dtype=np.int32)})


def test_rows_of_litdata_in_a_table_of_arrow(tmp_path):
    convert("litdata/rows", tmp_path)
    assert [json.loads(fields["json"]) for fields in read(tmp_path)] == [
        {"text": f"größe {number}", "n": number, "tags": ["a"] * number} for number in range(10)
    ]


@pytest.mark.parametrize(("plain", "others"), [("mds/plain", ["mds/zstd", "mds/gz"]), ("litdata/images", FORMS[-3:])])
def test_every_compression_is_the_same_data(tmp_path, plain, others):
    """With one column of images, the field is jpg."""
    convert(plain, tmp_path / "plain")
    found = read(tmp_path / "plain")
    assert [json.loads(fields["json"]) for fields in found] == [{"label": number} for number in range(10)]
    assert all(fields["jpg"] in stored(plain) for fields in found)
    for place, name in enumerate(others):
        convert(name, tmp_path / str(place))
        assert outputs(tmp_path / str(place)) == outputs(tmp_path / "plain")


def test_a_value_of_litdata_in_json_as_older_versions_have_it():
    assert decoder("json")(b'{"a": [1]}') == {"a": [1]}


# Jobs


@pytest.mark.parametrize("name", ["mds/zstd", "litdata/batch"])
def test_every_way_writes_the_same_bytes(tmp_path, name):
    """In processes, in shares in any order, and after a part of it was removed."""
    convert(name, tmp_path / "whole")
    whole = outputs(tmp_path / "whole")
    convert(name, tmp_path / "processes", "-j", 2)
    assert outputs(tmp_path / "processes") == whole
    for index in (1, 0):
        convert(name, tmp_path / "shares", "--tasks", 2, "--task", index)
    assert outputs(tmp_path / "shares") == whole
    (tmp_path / "shares/shard-000001.tar").unlink()
    assert "1 written, 3 there already" in convert(name, tmp_path / "shares").stdout
    assert outputs(tmp_path / "shares") == whole


@pytest.mark.parametrize("name", ["mds/plain", "mds/zstd", "litdata/rows", "litdata/batch"])
def test_from_a_store(tmp_path, s3, name):
    for path in (DATA / name).iterdir():
        s3.put(f"chunks/{name}/{path.name}", path.read_bytes())
    options = ["--from", name.partition("/")[0], "--max-samples", 3]
    options += ["--storage-options", json.dumps(s3.storage_options)]
    run_command("convert", f"{s3.url}/chunks/{name}", tmp_path / "a", *options)
    convert(name, tmp_path / "b")
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")


def test_a_shard_that_was_decompressed(tmp_path):
    """Streaming keeps it beside the compressed one, or instead of it."""
    source = copied("mds/gz", tmp_path)
    shutil.copy(DATA / "mds/plain/shard.00000.mds", source)
    (source / "shard.00000.mds.gz").unlink()
    convert(source, tmp_path / "a")
    convert("mds/plain", tmp_path / "b")
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")


def test_another_index_is_refused(tmp_path):
    """Values that were read in another way are never in one data set."""
    source = copied("litdata/images", tmp_path)
    convert(source, tmp_path / "out")
    edit(source, lambda index: index["config"].update(data_format=["bytes", "int"]))
    assert "the inputs were changed: 4 of 4 tasks" in refused(source, tmp_path / "out")


# Damage


@pytest.mark.parametrize("name", FORMS)
def test_files_that_are_missing_cut_or_damaged(tmp_path, name):
    """Each is named, and a sample is never wrong."""
    convert(name, tmp_path / "whole")
    whole = read(tmp_path / "whole")
    source = copied(name, tmp_path)
    file = sorted(path for path in source.iterdir() if path.name != "index.json")[1]
    content = file.read_bytes()
    file.unlink()
    assert f"{file} does not exist, and index.json lists it" in refused(source, tmp_path / "o")
    file.write_bytes(content[:-1])
    assert str(file) in refused(source, tmp_path / "o")
    file.write_bytes(b"")
    assert str(file) in refused(source, tmp_path / "o")
    for place in range(0, len(content), len(content) // 8):
        file.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        shutil.rmtree(tmp_path / "o", ignore_errors=True)
        told = convert(source, tmp_path / "o", code=(0, 1, 2))
        if told.exit_code:
            assert str(file) in told.stderr
            assert "Traceback" not in told.stderr
        else:  # a byte in a picture or a name, which has no checksum
            assert [set(fields) for fields in read(tmp_path / "o")] == [set(fields) for fields in whole]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mds/plain", lambda index: index["shards"][1].update(samples=3), "it has 4 records, and index.json says 3"),
        ("mds/plain", lambda index: index.pop("shards"), "is no index that MDSWriter has written (KeyError: 'shards')"),
        ("mds/plain", lambda index: index["shards"][0].update(version=1), "(ValueError: version 1)"),
        ("mds/plain", lambda index: index["shards"][0].update(format="csv"), "of format csv, and not mds"),
        (
            "mds/plain",
            lambda index: index["shards"][0].update(column_encodings=["jpeg", "xml"]),
            "has column 'label' of type 'xml', which is not known",
        ),
        (
            "mds/plain",
            lambda index: index["shards"][0].update(column_names=["a", "a"]),
            "the columns have not one name, one encoding and one size each",
        ),
        (
            "mds/plain",
            lambda index: index["shards"][0].update(column_encodings=["int", "int"]),
            "shard.00000.mds, byte 210: the sample has no such columns as index.json says",
        ),
        (
            "mds/plain",
            lambda index: index["shards"][0].update(column_sizes=[None, -8]),
            "the size of a column is less than 1",
        ),
        ("mds/plain", lambda index: index.update(shards=[]), "has no records, so there is nothing to write"),
        (
            "mds/gz",
            lambda index: index["shards"][2].update(compression="br"),
            "shard.00002.mds.gz is compressed as br, which is not read, but gz, bz2, xz, zst are: decompress it to",
        ),
        ("litdata/images", lambda index: index["chunks"][1].update(chunk_size=3), "4 records, and index.json says 3"),
        ("litdata/batch", lambda index: index["chunks"][1].update(chunk_size=5), "4 records, and index.json says 5"),
        ("litdata/rows", lambda index: index["chunks"][1].update(chunk_size=5), "4 records, and index.json says 5"),
        ("litdata/images", lambda index: index.update(chunks=[]), "has no records, so there is nothing to write"),
        ("litdata/images", lambda index: index.pop("config"), "is no index that litdata.optimize has written"),
        (
            "litdata/images",
            lambda index: index["config"].update(encryption={"algorithm": "fernet"}),
            "is of an encrypted data set, which is not read",
        ),
        (
            "litdata/images",
            lambda index: index["config"].update(item_loader="ParquetLoader"),
            "is of a data set for ParquetLoader, which is not read: use --from parquet",
        ),
        (
            "litdata/images",
            lambda index: index["config"].update(data_format=["graph", "int"]),
            "has values of type 'graph', which only litdata reads",
        ),
        (
            "litdata/images",
            lambda index: index["config"].update(data_format=["jpeg"]),
            "an item has fewer values than data_spec says",
        ),
        (
            "litdata/images",
            lambda index: index["config"].update(data_format=["int", "jpeg"]),
            "chunk-0-0.bin, byte 24: the item has no such values as index.json says",
        ),
    ],
)
def test_an_index_that_does_not_fit(tmp_path, name, change, message):
    source = copied(name, tmp_path)
    edit(source, change)
    assert message in refused(source, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.tar"))


def test_a_directory_without_an_index(tmp_path):
    """Those in it are named."""
    assert "has no index.json: name the directory that MDSWriter has written. It is in gz, plain, types" in refused(
        DATA / "mds", tmp_path
    )
    assert "has no index.json: name the directory that litdata.optimize has written" in refused(
        tmp_path / "litdata", tmp_path
    )
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds/index.json").write_text("{bad")
    assert "index.json is no index that MDSWriter has written (JSONDecodeError: " in refused(tmp_path / "mds", tmp_path)
    (tmp_path / "mds/index.json").write_text("[]")
    assert "index.json is no index that MDSWriter has written (TypeError: " in refused(tmp_path / "mds", tmp_path)


@pytest.mark.parametrize(("name", "missing"), [("mds/zstd", "zstd"), ("litdata/rows", "pyarrow")])
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, name, missing):
    module = (
        missing if missing == "pyarrow" else "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    )
    monkeypatch.setitem(sys.modules, module, None)
    extra = "parquet" if missing == "pyarrow" else "formats"
    arguments = ["convert", DATA / name, tmp_path, "--from", name.partition("/")[0]]
    assert f"pip install 'wds_pipes[{extra}]'" in run_command(*arguments, code=2).stderr


@pytest.mark.parametrize("change", ["checksum", "more"])
def test_the_end_of_a_compressed_file(tmp_path, change):
    """Its checksum is compared, and nothing follows its last record."""
    source = copied("mds/gz", tmp_path)
    file = source / "shard.00002.mds.gz"
    content = gzip.decompress(file.read_bytes())
    packed = gzip.compress(content) if change == "checksum" else gzip.compress(content + b"x")
    file.write_bytes(packed[:-8] + b"????" + packed[-4:] if change == "checksum" else packed)
    edit(source, lambda index: index["shards"][2]["zip_data"].update(bytes=len(file.read_bytes())))
    what = "incorrect data check" if change == "checksum" else "there are bytes after its last record"
    assert what in refused(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("json", struct.pack("<B2I", 6, (1 << 32) - 1, 0)),
        ("json", struct.pack("<BI", 2, (1 << 32) - 1)),
        ("json", b"\5\1\0\0\0\0\0\0\0" * 10_000),
        ("json", b"\x20"),
        ("json", b""),
        ("pil", struct.pack("<3I3s", 60_000, 60_000, 3, b"RGB")),
        ("numpy", struct.pack("<4I", 3, 2, 1 << 31, 1 << 31)),
        ("tensor", struct.pack(">2I", 0, 1 << 31)),
        ("jpeg_array", struct.pack("<I", (1 << 32) - 1)),
    ],
)
def test_a_value_that_says_too_much_takes_no_memory(kind, data):
    with pytest.raises((ValueError, LookupError, RecursionError, struct.error)):
        decoder(kind)(data)


def test_a_table_that_says_too_much_takes_no_memory(tmp_path):
    source = copied("litdata/images", tmp_path)
    edit(source, lambda index: index["chunks"][1].update(chunk_size=(1 << 32) - 1))
    file = source / "chunk-0-1.bin"
    file.write_bytes(struct.pack("<I", (1 << 32) - 1) + file.read_bytes()[4:])
    assert f"{file} has 2,636 bytes, and index.json says 4,294,967,295 records" in refused(source, tmp_path / "out")
