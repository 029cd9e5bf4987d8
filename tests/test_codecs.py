"""Decoders by extension, compared with the libraries that define the formats; encoders; limits;
refusals.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import sys
import time
import warnings
import zipfile
import zlib
from functools import partial

import cbor2
import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset.autodecode
import webdataset.tenbin
import yaml
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import memory_below
from pickles import Creates
from PIL import Image, features

from wds_pipes.codecs import arrays, table
from wds_pipes.codecs.codec import NotAllowedError
from wds_pipes.codecs.images import IMAGE_SPECS
from wds_pipes.codecs.table import ROWS, TABLE, Decoding, encode
from wds_pipes.testing import same

PACK = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


def decode(field, data, *specs, allow_pickle=False, max_image_pixels=1 << 26):
    """What a field becomes; the bytes themselves if it has no decoder."""
    decoder = Decoding(specs, allow_pickle=allow_pickle, max_image_pixels=max_image_pixels).decoder(field)
    return data if decoder is None else decoder(data)


def written(write, *args, **options):
    """The bytes that a function writes to a file."""
    file = io.BytesIO()
    write(file, *args, **options)
    return file.getvalue()


def torch_bytes(value, **options):
    return written(lambda file: torch.save(value, file, **options))


def image_bytes(image, form, **options):
    return written((Image.fromarray(image) if isinstance(image, np.ndarray) else image).save, form, **options)


ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = [ARRAY, np.zeros((0, 2), np.uint8), np.arange(5, dtype=np.float16), np.arange(70, dtype=np.uint64)]
OBJECT = {"a": [1, 2.5, None, True], "ü": {"b": "x"}}


# Every row of the table of fields

CASES = [
    *[(field, "Grüße\r\n".encode(), "Grüße\r\n") for field in ("txt", "text", "transcript", "html", "htm")],
    *[(field, b" 42\n", 42) for field in ("cls", "cls2", "class", "count", "index", "inx", "id")],
    *[(field, json.dumps(OBJECT).encode(), OBJECT) for field in ("json", "jsn")],
    ("jsonl", b'{"a": 1}\n\n[2]\r\n"x"', [{"a": 1}, [2], "x"]),
    ("npy", written(np.save, ARRAY), ARRAY),
    ("npz", written(np.savez, a=ARRAY, b=np.arange(3)), {"a": ARRAY, "b": np.arange(3)}),
    ("npz", written(np.savez_compressed, ARRAY), {"arr_0": ARRAY}),
    *[(field, bytes(webdataset.tenbin.encode_buffer(ARRAYS)), ARRAYS) for field in ("ten", "tenbin", "tb")],
    ("scalar.ten", bytes(webdataset.tenbin.encode_buffer([np.array(3, np.int64)])), [np.array(3, np.int64)]),
    *[(field, msgpack.packb(OBJECT), OBJECT) for field in ("mp", "msg", "msgpack")],
    ("cbor", cbor2.dumps(OBJECT), OBJECT),
    ("safetensors", safetensors.torch.save({"a": torch.from_numpy(ARRAY)}), {"a": torch.from_numpy(ARRAY)}),
    *[
        (
            field,
            torch_bytes({"a": torch.from_numpy(ARRAY), "b": [1, "x"]}),
            {"a": torch.from_numpy(ARRAY), "b": [1, "x"]},
        )
        for field in ("pt", "pth")
    ],
    ("pt", torch_bytes(torch.arange(3), _use_new_zipfile_serialization=False), torch.arange(3)),
]


@pytest.mark.parametrize(("field", "data", "expected"), CASES, ids=[case[0] for case in CASES])
def test_fields_decode(field, data, expected):
    """In any case of the letters, and with anything before the last dot; and as webdataset decodes
    them, whose decoder of cbor needs a package that is not maintained. Arrays can be written to.
    """
    for name in (field, field.upper(), f"left.png.{field}"):
        assert same(decode(name, data), expected)
    value = decode(field, data)
    for array in value.values() if field == "npz" else value if field == "ten" else [value]:
        assert not isinstance(array, np.ndarray) or array.flags.writeable
    if field in webdataset.autodecode.decoders and field != "cbor":
        assert same(webdataset.autodecode.decoders[field](data), expected)


DAMAGED = [
    ("txt", b"\xff\xfe"),
    ("cls", b"4.5"),
    ("cls", b""),
    ("cls", b"9" * 10_000),
    ("json", b"{"),
    ("json", b"[" * 200_000),
    ("jsonl", b"{}\n{"),
    ("npy", b"garbage"),
    ("npy", b""),
    ("npy", pickle.dumps(3)),
    ("npy", written(np.save, ARRAY)[:-4]),
    ("npz", written(np.savez, ARRAY)[:-40]),
    ("ten", b"garbage, garbage"),
    ("ten", bytes(webdataset.tenbin.encode_buffer([ARRAY]))[:-64]),
    ("ten", bytes(webdataset.tenbin.encode_buffer([ARRAY])).replace(b"f4\0", b"O8\0")),
    ("ten", bytes(webdataset.tenbin.encode_buffer([ARRAY])).replace(struct.pack("<q", 3), struct.pack("<q", -1))),
    (
        "ten",
        bytes(webdataset.tenbin.encode_buffer([ARRAY])).replace(
            struct.pack("<qq", 2, 2), struct.pack("<qq", 1 << 60, 2)
        ),
    ),
    ("ten", bytes(webdataset.tenbin.encode_buffer([ARRAY])).replace(struct.pack("<q", 3), struct.pack("<q", 4))),
    ("mp", b"\x92\x01"),
    ("cbor", b"\x82\x01"),
    ("cbor", b""),
    ("mp", b"\x01\x02\x03"),
    ("safetensors", b"\xff" * 20),
    ("pt", b""),
    ("pt", b"garbage"),
    ("pt", torch_bytes(torch.arange(3))[:-20]),
    ("txt.gz", b"no gzip"),
    ("txt.gz", gzip.compress(bytes(1000), mtime=0)[:-12]),
    ("txt.bz2", b"no bzip"),
    ("txt.xz", b"no xz"),
    ("txt.zst", b"no zstd"),
    *[(f"txt.{kind}", pack(bytes(580_000))[:-1]) for kind, pack in PACK.items()],
    *[(f"txt.{kind}", pack(bytes(580_000)) + b"x") for kind, pack in PACK.items()],
    *[(f"txt.{kind}", b"") for kind in PACK],
]


@pytest.mark.parametrize(("field", "data"), DAMAGED, ids=[case[0] for case in DAMAGED])
def test_damaged_fields_are_an_error(field, data):
    """The error may be skipped: it is not NotAllowedError, and the interpreter does not crash."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each library has its own
        decode(field, data)
    assert not isinstance(caught.value, (NotAllowedError, ImportError))


def npy_header(text, version=1):
    """An npy of 100 bytes with this header."""
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + bytes(100)


def zipped(content, kind=zipfile.ZIP_STORED):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", kind) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return packed.getvalue()


def image(shape, dtype=np.uint8, form="PNG"):
    return image_bytes(np.ones(shape, dtype), form)


NO_IMAGE = "the data are none of JPEG"
DEEP = b"-" * 9000 + b"1"
REFUSED = [
    ("yaml", b"!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("tif", image((2, 2), np.int32, "TIFF"), "32 bits a pixel, .*: use 'raw'"),
    ("tif", image((2, 2), np.float32, "TIFF"), "32 bits a pixel, .*: use 'raw'"),
    ("jpg", b"", NO_IMAGE),
    ("jpg", b"GIF", NO_IMAGE),
    ("jpg", b"<html>404</html>", NO_IMAGE),
    # for which Pillow would start another program
    ("jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NO_IMAGE),
    # numpy and torch write none, and the size of its contents cannot be limited
    ("npz", zipped({"a.npy": b""}, zipfile.ZIP_BZIP2), "neither stored nor deflated"),
    ("npz", zipped({"a.npy": b""}, zipfile.ZIP_LZMA), "neither stored nor deflated"),
    # Python's parser raises a MemoryError, which would not be skipped
    ("npy", npy_header(DEEP), "its header is nested too deeply"),
    ("cbor", b"\x01\x02\x03", r"ends at byte 1 of 3: explode_records\('cbor'\) reads several"),
    ("txt.gz.gz.zst", b"", "packed more than 2 times"),
    ("txt" + ".gz" * 100_000, b"", "packed more than 2 times"),
]


@pytest.mark.parametrize(("field", "data", "message"), REFUSED, ids=[f"{row[0]:.9} {row[2]:.20}" for row in REFUSED])
def test_what_is_refused_says_why(field, data, message):
    with pytest.raises((ValueError, yaml.YAMLError), match=message):
        decode(field, data, "rgb8", "yaml")


def test_csv_and_yaml_only_on_request():
    """They are bytes otherwise."""
    rows = [["a", "b,c", 'd"'], ["1", "", "x\ny"]]
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    table, document = text.getvalue().encode(), yaml.safe_dump(OBJECT, allow_unicode=True).encode()
    assert decode("csv", table) == table
    assert decode("yaml", document) == decode("yml", document) == document
    assert decode("csv", table, "csv") == rows
    assert decode("yaml", document, "csv", "yaml") == decode("yml", document, "yml") == OBJECT


@pytest.mark.parametrize("field", ["", "bin", "xyz", "jpg", "seg.png", "mp4", "wav", "tar", "py", "txt~"])
def test_unknown_fields_stay_bytes(field):
    assert decode(field, b"\x00\xff") == b"\x00\xff"


def test_an_array_of_version_3_is_read():
    """numpy writes it where the names of fields are not latin-1."""
    array = np.zeros(3, [("名", "<i4"), ("ä\x85\xa0", "<f8")])
    with pytest.warns(UserWarning, match="format 3.0"):
        data = written(np.save, array)
    assert same(decode("npy", data), array)


KINDS = [
    *("b1", "i1", "u1", "i2", "<u2", ">u2", "<i8", ">f4", "f8", "f2", "c8", ">c16", "f16", "U3", "S2", "M8[s]", "O"),
    [("a", "<i4"), ("b", "f8", (2,))],
]


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.lists(st.integers(0, 4), max_size=4),
    fortran=st.booleans(),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    extra=st.integers(-3, 3),
)
def test_an_npy_is_read_as_numpy_reads_it(kind, shape, fortran, version, extra):
    """Of any type, shape, order and version, cut short or with more bytes after it."""
    array = np.zeros(shape, kind, order="F" if fortran else "C")
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    data = file.getvalue() + bytes(max(0, extra))
    data = data[: len(data) + min(0, extra)]
    try:
        expected = np.load(io.BytesIO(data), allow_pickle=False)
    except ValueError:
        with pytest.raises((ValueError, NotAllowedError)):
            decode("npy", data)
    else:
        found = decode("npy", data)
        assert same(found, expected)
        assert found.flags.f_contiguous == expected.flags.f_contiguous
        assert found.flags.writeable


NUMBERS_OF_HEADERS = ["0", "1", "3", "007", "1e1", "-1", str(1 << 62), "9" * 30, " 2", "True", "x"]


@settings(deadline=None)
@given(
    descr=st.sampled_from(["<u2", ">f4", "|b1", "|u1", "<u1", "=i4", "|O", "<f3", "i4", "<M8", "<i16"]),
    sizes=st.lists(st.sampled_from(NUMBERS_OF_HEADERS), max_size=3),
    form=st.sampled_from(["({},)", "({})", "[{}]", "({}, )"]),
    end=st.sampled_from([", }\n", ", } \t\n", ", }", "}\n", ", }x\n", ", }" + " " * 10_000 + "\n"]),
    length=st.integers(-2, 2),
)
def test_an_unusual_header_of_an_npy_is_read_as_numpy_reads_it(descr, sizes, form, end, length):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {form.format(', '.join(sizes))}{end}".encode()
    data = b"\x93NUMPY\x01\0" + (len(text) + length).to_bytes(2, "little") + text + bytes(64)
    with warnings.catch_warnings(record=True):
        try:
            expected = np.load(io.BytesIO(data), allow_pickle=False)
        except Exception:
            with pytest.raises(Exception):  # noqa: B017, PT011 - numpy has many for what is no header
                decode("npy", data)
        else:
            assert same(decode("npy", data), expected)


JSON_TEXTS = (
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ).map(json.dumps)
    | st.from_regex(r"-?[0-9]{0,22}(\.[0-9]{0,22})?([eE][-+]?[0-9]{1,3})?", fullmatch=True)
    | st.integers(2**63 - 2, 2**64 + 2).map(str)
    | st.integers(-(2**63) - 2, -(2**63) + 2).map(str)
    | st.text('[]{}",:\\\t 0a', max_size=12)
    | st.sampled_from(['{"a": 1, "b": 2, "a": 3}', '"\\ud800"', "[NaN, -Infinity]", "\ufeff1", "-0", '"\x01"', "[1,]"])
)


@settings(deadline=None)
@given(text=JSON_TEXTS, encoding=st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16", "utf-32-le"]))
def test_json_is_read_as_python_reads_it(text, encoding):
    """Also by ``orjson``, which makes floats of large integers and refuses what Python reads."""
    data = text.encode(encoding, "surrogatepass")
    try:
        expected = json.loads(data)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            decode("json", data)
    else:
        assert repr(decode("json", data)) == repr(expected), "repr tells 1 from 1.0, and has NaN and the order of keys"


@settings(deadline=None)
@given(place=st.integers(1, 700), value=st.integers(0, 255), more=st.binary(max_size=30))
def test_the_directory_of_a_zip_is_read_as_zipfile_reads_it(place, value, more):
    """Whatever stands in its last bytes, so that no limit can be passed by."""
    data = bytearray(torch_bytes(torch.arange(4)))
    data[-place] = value
    data += more
    try:
        names = arrays.check_zip(bytes(data))
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (ValueError, NotImplementedError, zipfile.BadZipFile):
        return
    assert sum(entry.file_size for entry in entries) <= arrays.MAX_DECODED_BYTES
    assert len(names) == len(entries)


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS[:13]), shape=st.lists(st.sampled_from([0, 1, 12, 123]), max_size=3))
def test_an_npy_is_written_as_numpy_writes_it(kind, shape):
    array = np.zeros(shape, kind)
    assert encode("npy", array) == written(np.save, array)


# Packed fields


@pytest.mark.parametrize("kind", PACK)
def test_packed_fields_are_unpacked_first(kind):
    """Also unknown ones, twice packed ones and those with a decoder of the caller's; and values are
    packed when they are encoded.
    """
    pack = PACK[kind]
    assert kind != "gz" or encode("txt.gz", "x")[4:8] == bytes(4), "the same bytes at any time"
    for name, value in ((f"txt.{kind}", "Grüße\n"), (f"left.json.gz.{kind}", OBJECT), (f"npy.{kind}", ARRAY)):
        assert same(decode(name, encode(name, value)), value)
    assert decode(f"left.JSON.{kind.upper()}", pack(b"[1]")) == [1]
    assert decode(f"bin.{kind}", pack(b"\xff")) == decode(kind, pack(b"\xff")) == b"\xff"
    assert decode(f"cls.gz.{kind}", pack(PACK["gz"](b"7"))) == 7
    assert decode(f"seg.png.{kind}", pack(b"abc"), {"seg.png": len}) == 3
    assert decode(f"txt.{kind}", b"abcd", {kind: len}) == decode(f"txt.{kind}", b"abcd", {f"txt.{kind}": len}) == 4


def zeros_npz(*sizes):
    """An npz of arrays of so many zeros."""
    return written(np.savez_compressed, *(np.zeros(size, np.uint8) for size in sizes))


def lying_zip(size):
    """An npz of 16 MiB that declares less, in both places."""
    data = bytearray(zeros_npz(16 << 20))
    entry = data.rindex(b"PK\1\2")
    data[22:26] = data[entry + 24 : entry + 28] = struct.pack("<I", size)
    return bytes(data)


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def large_png(width, height):
    """The head of a png that claims to be large, with hardly any data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


WEBP_34_BYTES = (
    b"RIFF"
    + struct.pack("<I", 26)
    + b"WEBPVP8L"
    + struct.pack("<I", 14)
    + b"\x2f"
    + struct.pack("<I", 16382 | 16382 << 14)
    + bytes(9)
)
LARGE_WEBPS = (
    WEBP_34_BYTES,
    WEBP_34_BYTES[:12] + b"VP8X" + struct.pack("<II", 10, 0) + b"\xff\xff\0" * 2 + bytes(9),
    WEBP_34_BYTES[:12]
    + b"VP8 "
    + struct.pack("<I", 14)
    + b"\x10\0\0\x9d\x01\x2a"
    + struct.pack("<HH", 16383, 16383)
    + bytes(4),
)
HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 1024)}" % (1 << 50)
PROMISED = "its header promises an array of shape"
BOMBS = {  # how each is made, and what is said of it
    **{
        f"bin.{kind}": (partial(pack, bytes(20 << 20)), "it unpacks to more than 1048576 bytes")
        for kind, pack in PACK.items()
    },
    "npz": (partial(zeros_npz, 16 << 20), "it unpacks to more than 10485760 bytes"),
    "several.npz": (partial(zeros_npz, *[1 << 20] * 20), "it unpacks to more than 10485760 bytes"),
    "pt": (
        partial(zipped, {"archive/data/0": bytes(16 << 20)}, zipfile.ZIP_DEFLATED),
        "it unpacks to more than 10485760 bytes",
    ),
    **{f"declares.{size}.npz": (partial(lying_zip, size), "Bad CRC-32") for size in (0, 100)},
    **{f"{version}.npy": (partial(npy_header, HUGE, version), PROMISED) for version in (1, 2, 3)},
    "array.npz": (lambda: zipped({"a.npy": npy_header(HUGE)}), PROMISED),
    **{
        f"{width}.png": (
            partial(large_png, width, height),
            f"{width} x {height} pixels, more than 67108864. Pass a larger",
        )
        for width, height in ((10_000, 10_000), (13_000, 13_001), (2_000_000_000, 2))
    },
    **{
        f"{number}.webp": (
            partial(bytes, data),
            r"the image has (16383 x 16383|65536 x 65536) pixels, more than 67108864. Pass a larger",
        )
        for number, data in enumerate(LARGE_WEBPS)
    },
}


@pytest.mark.parametrize("field", BOMBS)
def test_a_bomb_is_an_error_and_does_not_take_the_memory(field, monkeypatch):
    """Not a MemoryError, which would not be skipped, nor Pillow's own warning. xz alone takes a
    dictionary of 8 MiB.
    """
    monkeypatch.setattr(table, "MAX_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(arrays, "MAX_DECODED_BYTES", 10 << 20)
    make, message = BOMBS[field]
    data = make()
    with memory_below(16 << 20), pytest.raises((ValueError, zipfile.BadZipFile), match=message):
        decode(field, data, "rgb8")


@pytest.mark.parametrize("kind", PACK)
def test_as_many_bytes_as_the_limit_are_unpacked(kind, monkeypatch):
    monkeypatch.setattr(table, "MAX_DECODED_BYTES", 1 << 20)
    assert len(decode(f"bin.{kind}", PACK[kind](bytes(1 << 20)))) == 1 << 20


# Pickles


def objects(value):
    array = np.empty(1, object)
    array[0] = value
    return array


PICKLES = {
    "pyd": pickle.dumps,
    "pkl": pickle.dumps,
    "pickle": lambda value: pickle.dumps(value, 0),
    "pkl.gz": lambda value: gzip.compress(pickle.dumps(value)),
    "npy": lambda value: written(np.save, objects(value), allow_pickle=True),
    "npz": lambda value: written(np.savez, objects(value)),
    "pt": torch_bytes,
    "pth": lambda value: torch_bytes({"a": value}, _use_new_zipfile_serialization=False),
    "x.pt": pickle.dumps,
}


@pytest.mark.parametrize("field", PICKLES)
def test_pickles_are_refused_and_do_nothing(field, tmp_path):
    """The error says how to allow them; then they run, which shows that the refusal protects."""
    path = tmp_path / "made"
    data = PICKLES[field](Creates(path))
    with pytest.raises(NotAllowedError, match="allow_pickle=True only if you trust"):
        decode(field, data)
    assert not path.exists()
    if field != "x.pt":
        decode(field, data, allow_pickle=True)
        assert path.exists()


def test_torchscript_is_refused():
    """It is code, in a zip that torch.load would pass to torch.jit.load."""
    with pytest.raises(NotAllowedError, match="TorchScript"):
        decode("pt", zipped(dict.fromkeys(("a/data.pkl", "a/constants.pkl", "a/version"), b"3")))


@pytest.mark.parametrize(
    ("field", "data", "value"),
    [
        ("pkl", pickle.dumps({1, 2}), {1, 2}),
        ("npy", written(np.save, ARRAY), ARRAY),
        ("npz", written(np.savez, a=ARRAY), {"a": ARRAY}),
        ("pt", torch_bytes({"a": 1}), {"a": 1}),
    ],
)
def test_allow_pickle_still_reads_harmless_fields(field, data, value):
    assert same(decode(field, data, allow_pickle=True), value)


# Specs and names


def test_decoders_of_the_caller_go_by_the_longest_end_of_the_name():
    """Before the table and before the image spec; in any case of the letters."""
    own = {"png": lambda data: "png", ".SEG.png": lambda data: "seg", "txt": len}
    found = [decode(name, b"abc", "rgb8", own) for name in ("png", "a.PNG", "seg.png", "left.seg.png", "txt")]
    assert found == ["png", "png", "seg", "seg", 3]
    assert decode("txt", b"abc", {"txt": len}, {"txt": bytes.decode}) == "abc"
    assert decode("txt.gz.zst", PACK["zst"](PACK["gz"](b"abc"))) == "abc"
    assert decode("x" + ".gz" * 100_000, b"abcd", {"gz": len}) == 4


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        (("rgb9",), ValueError, "unknown spec 'rgb9': use one of l, l8, .*, audio, csv, video, yaml"),
        (("RGB",), ValueError, "unknown spec 'RGB'"),
        (("rgb", "l8"), ValueError, "images cannot be both 'rgb' and 'l8'"),
        (({"png": "rgb"},), TypeError, "a decoder is given as"),
        (({3: len},), TypeError, "a decoder is given as"),
        ((["rgb"],), TypeError, "a spec is a name, a dict of functions"),
    ],
)
def test_wrong_specs_are_refused(specs, error, message):
    with pytest.raises(error, match=message):
        decode("txt", b"", *specs)


def test_a_name_of_a_million_dots_costs_no_more_than_others():
    """Only as many parts are read as the caller's names have; all of them would take hours."""
    own = {"seg.png": len, "a.b.c": len}
    start = time.process_time()
    assert decode("x." * 500_000 + "seg.png", b"abc", own) == 3
    assert decode("x." * 500_000 + "bin", b"abc", own) == b"abc"
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("field", "modules", "package"),
    [
        ("mp", ["msgpack"], "pip install msgpack"),
        ("cbor", ["cbor2"], "pip install cbor2"),
        ("safetensors", ["safetensors", "safetensors.torch"], "pip install safetensors"),
        ("yaml", ["yaml"], "pip install pyyaml"),
        ("txt.zst", ["backports.zstd", "compression.zstd"], "pip install"),
        ("pt", ["torch"], "pip install torch"),
    ],
)
def test_a_missing_library_says_what_to_install(field, modules, package, monkeypatch):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        decode(field, b"(\xb5/\xfd", "yaml")


# Images; their decoders and sizes are in test_images.py

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 4), np.uint8)


def png(mode="RGB"):
    picture = Image.fromarray(PIXELS)
    return image_bytes((picture.convert("RGB") if mode == "P" else picture).convert(mode), "PNG")


@pytest.mark.parametrize("spec", [spec for spec in IMAGE_SPECS if spec != "raw"])
def test_image_specs_decode_as_in_webdataset(spec):
    """The same numbers, dtype and shape for every mode of image; an L tensor of ours has its
    channel dimension. Ours can be written to, in memory of its own order; encoded and decoded again
    it is the same.
    """
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        value, expected = decode("png", png(mode), spec), webdataset.autodecode.ImageHandler(spec)("png", png(mode))
        assert same(decode("png", encode("png", value), spec), value)
        assert type(value) is type(expected)
        if isinstance(value, Image.Image):
            assert value.mode == expected.mode
        else:
            assert np.asarray(value).flags.writeable
            assert np.asarray(value).flags.c_contiguous
        expected = np.asarray(expected)
        assert same(np.asarray(value), expected[None] if spec in ("torchl", "torchl8") else expected), mode


def test_an_image_below_the_limit_decodes_without_pillows_warning(monkeypatch):
    """The limit is ours alone. The content decides, not the extension."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    for extension in ("png", "jpg", "gif"):
        assert decode(extension, png(), "rgb8", max_image_pixels=35).shape == (5, 7, 3)
        with pytest.raises(ValueError, match="7 x 5 pixels"):
            decode(extension, png(), "rgb8", max_image_pixels=34)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "PPM", "WEBP"])
def test_truncated_images_are_an_error(form):
    """Not an image that is grey below."""
    data = image_bytes(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), form)
    for part in (0.02, 0.5, 0.9):
        with pytest.raises((OSError, ValueError, SyntaxError, IndexError, struct.error, UserWarning)):
            decode(form.lower(), data[: int(len(data) * part)], "rgb8")


@pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP")
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0x"}])
def test_the_size_of_a_webp_is_that_of_its_header(options):
    """Of all three kinds of first chunk."""
    data = image_bytes(np.zeros((5, 300, 3), np.uint8), "WEBP", **options)
    assert decode("webp", data, "rgb8", max_image_pixels=1500).shape == (5, 300, 3)
    with pytest.raises(ValueError, match="300 x 5 pixels"):
        decode("webp", data, "rgb8", max_image_pixels=1499)


# What each format holds. Others refuse it, or hold what Pillow makes of it.
PICTURES = {
    "bits": PIXELS[..., 0] > 99,
    "grey": PIXELS[..., 0].copy(),
    "few colours": np.random.default_rng(2).integers(0, 256, (256, 3), np.uint8)[
        np.arange(17 * 16).reshape(17, 16) % 256
    ],
    "colours": np.random.default_rng(2).integers(0, 256, (17, 16, 3), np.uint8),
    "alpha": PIXELS,
    "16 bits": np.random.default_rng(2).integers(0, 1 << 16, (5, 7), np.uint16),
}
GREY, COLOURS = {"bits", "grey"}, {"grey", "few colours", "colours"}
HELD = {
    "png": {*GREY, *COLOURS, "alpha", "16 bits"},
    "gif": {*GREY, "few colours"},
    "bmp": {*GREY, *COLOURS},
    "tif": {*GREY, *COLOURS, "alpha", "16 bits"},
    "ppm": {*GREY, *COLOURS, "16 bits"},
}


@pytest.mark.parametrize("extension", sorted({name for row in HELD for name in ROWS[row].names}))
def test_an_image_is_written_exactly_or_refused(extension):
    """As an array, and as a PIL image. Pillow makes a palette of the colours of a GIF."""
    assert {row.names[0] for row in TABLE if row.asked == "image" and row.encode and not row.lossy} == HELD.keys()
    for name, array in PICTURES.items():
        for value in (array, Image.fromarray(array)):
            if name not in HELD[ROWS[extension].names[0]]:
                if extension != "gif" or name == "alpha":
                    with pytest.raises((ValueError, TypeError, OSError)):
                        encode(extension, value)
                continue
            try:
                data = encode(extension, value)
            except OSError as error:
                assert "cannot write mode I;16 as PPM" in str(error)  # noqa: PT017 - an older Pillow refuses it
                continue
            if name == "16 bits":  # which a spec scales
                found = np.asarray(Image.open(io.BytesIO(data)))
            else:
                found = decode(extension, data, {2: "l8", 3: "rgb8"}[array.ndim] if name != "alpha" else "rgba8")
            assert np.array_equal(found, array * 255 if name == "bits" else array), name


@pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP")
def test_a_lossy_image_keeps_its_alpha():
    alpha = np.repeat(np.repeat(PIXELS[..., 3:], 8, 0), 8, 1)
    picture = np.concatenate([np.full((*alpha.shape[:2], 3), 99, np.uint8), alpha], -1)
    assert same(decode("webp", encode("webp", picture), "rgba8")[..., 3:], alpha)


# Encoders


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("json", '{"a":  [1, "ü"]}\n', {"a": [1, "ü"]}),
        ("json.gz", "[1]", [1]),
        ("json", json.dumps("a text"), "a text"),
        ("json", "7", 7),
        ("jsonl", '{"a": 1}\n\n"ü\u2028"\n', [{"a": 1}, "ü\u2028"]),
        ("csv", 'a,"b\n"\r\n', [["a", "b\n"]]),
        ("yaml", "a: [1, ü]", {"a": [1, "ü"]}),
        ("cls", " 3", 3),
    ],
)
def test_a_str_is_the_text_of_its_format(field, text, value):
    """It is written as it is, not encoded once more."""
    data = encode(field, text)
    assert (gzip.decompress(data) if field.endswith("gz") else data) == text.encode()
    assert decode(field, data, "csv", "yaml") == value


SAME_BYTES = [
    *[(field, kind(b"\xff"), b"\xff") for field in ("jpg", "txt", "") for kind in (bytes, bytearray, memoryview)],
    ("txt.gz", gzip.compress(b"x", mtime=7), gzip.compress(b"x", mtime=7)),
    ("csv", [[1, 2.5, "x"]], b"1,2.5,x\r\n"),
    ("cls", np.array(3), b"3"),
    ("cls", np.array([3])[0], b"3"),
    ("cls", torch.tensor(3), b"3"),
    # one array as a list of it; in the byte order of the format
    ("ten", ARRAYS, bytes(webdataset.tenbin.encode_buffer(ARRAYS))),
    ("tb", torch.from_numpy(ARRAY), bytes(webdataset.tenbin.encode_buffer([ARRAY]))),
    ("ten", ARRAY.astype(">f4"), bytes(webdataset.tenbin.encode_buffer([ARRAY]))),
    ("ten", np.asfortranarray(ARRAY), bytes(webdataset.tenbin.encode_buffer([ARRAY]))),
    ("npz", {"b": ARRAY, "a": np.asfortranarray(ARRAY), "c": 3}, written(np.savez, b=ARRAY, a=ARRAY.copy("F"), c=3)),
]


@pytest.mark.parametrize(("field", "value", "data"), SAME_BYTES)
def test_the_bytes_are_those_of_the_format(field, value, data):
    assert encode(field, value) == data


def test_tensors_of_safetensors_are_sorted_by_name():
    """The library returns them in an order that differs from call to call."""
    data = encode("safetensors", {name: torch.zeros(1) for name in "hcagbfed"})
    assert [list(decode("safetensors", data)) for _ in range(5)] == [list("abcdefgh")] * 5


def test_a_row_of_a_tensor_is_written_without_the_rest():
    """torch.save would write the whole tensor that it is a view of."""
    table = torch.arange(100_000.0).reshape(1000, 100).requires_grad_()
    data = encode("pth", {"row": [table[3]]})
    assert len(data) < 5_000
    assert data == encode("pth", {"row": [table[3].clone()]})
    assert torch.equal(decode("pth", data)["row"][0], table[3])


@pytest.mark.parametrize(
    "names", [["allow_pickle"], ["file", "args", "kwds", "self"], ["a.npy", "a", "a/b", "../a", "", "ü"]]
)
def test_arrays_of_any_name_are_written(names):
    """As np.savez writes them, where it does not take the name for its own option."""
    value = {name: np.full(2, number) for number, name in enumerate(names)}
    assert same(decode("npz", encode("npz", value)), value)


MASKED = np.ma.masked_array(np.zeros((1, 4, 4, 3), np.uint8), True)
NO_MASK = r"it is a masked array, whose mask would be lost: .* array.filled\(0\)"
NOT_WRITTEN = [
    ("png", np.full((2, 2, 3), 1.5), "floats from 0 to 1, and these go from 1.5 to 1.5"),
    ("png", np.full((2, 2, 3), np.nan), "floats from 0 to 1, and these go from nan to nan"),
    ("png", np.zeros((2, 2, 5), np.uint8), r"not uint8 of shape \(2, 2, 5\)"),
    ("png", np.zeros((2, 2), np.int64), r"not int64 of shape \(2, 2\)"),
    ("png", torch.zeros(2, 2, 3), r"not a tensor of shape \(2, 2, 3\)"),
    ("png", np.zeros((0, 2, 3)), r"not float64 of shape \(0, 2, 3\)"),
    ("jpg", "x", "not str"),
    ("jpg", PIXELS, "JPEG would drop the transparency of the image: convert"),
    ("txt", 3, "text must be str, not int"),
    *[
        ("cls", value, "it must be an integer")
        for value in ("cat", "٣.", True, 3.0, torch.tensor(True), np.array([3]), torch.tensor([3, 4]))
    ],
    ("ten", [np.zeros(2, bool)], "a tensor of type bool cannot be written"),
    ("ten", "x", "a tensor of type"),
    ("npz", [1], "it must be a dict of arrays by name, not list"),
    ("npz", {1: ARRAY}, "the name of an array must be str, not 1"),
    ("csv", [{"a": 1}], "it must be a list of rows"),
    ("csv", [["a", None]], "it must be a list of rows"),
    ("json", {1, 2}, "not JSON serializable"),
    ("bin", "x", "there is no encoder for 'bin' and str"),
    ("pkl", 3, "there is no encoder for 'pkl' and int"),
    ("npy", objects(3), "Object arrays|object arrays"),
    ("npz", {"a": objects(3)}, "Object arrays|object arrays"),
    ("pth", {"a": Decoding}, "would not be read back: pass bytes"),
    # no format has its mask
    ("npy", MASKED, NO_MASK),
    ("npz", {"a": MASKED}, NO_MASK),
    ("ten", [MASKED], NO_MASK),
    ("png", MASKED[0], NO_MASK),
    ("wav", (MASKED[0, 0].T.astype(np.float32), 8000), NO_MASK),
    ("mp4", (MASKED, 10), NO_MASK),
]


@pytest.mark.parametrize(
    ("field", "value", "message"), NOT_WRITTEN, ids=[f"{number} {row[0]}" for number, row in enumerate(NOT_WRITTEN)]
)
def test_what_does_not_fit_its_field_is_not_written(field, value, message):
    pytest.importorskip({"wav": "soundfile", "mp4": "av"}.get(field, "numpy"))
    with pytest.raises((TypeError, ValueError), match=message):
        encode(field, value)


def test_arrays_of_dtypes_that_numpy_does_not_know_are_not_written():
    """numpy would write them as bytes without a dtype."""
    kind = pytest.importorskip("ml_dtypes").bfloat16
    for value in (np.zeros(2, [("a", "i4"), ("b", kind, 2)]), np.array([1.5, 2], kind)):
        for field, content in (("npy", value), ("npz", {"x": value})):
            with pytest.raises(ValueError, match="would be read back as bytes"):
                encode(field, content)
    structured = np.zeros(2, [("a", "i4"), ("b", "V3"), ("c", "<f2", (2, 2))])
    assert np.array_equal(decode("npy", encode("npy", structured)), structured)
