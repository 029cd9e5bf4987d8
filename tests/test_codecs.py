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
import struct
import time
import zipfile
import zlib

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
from memory import memory_below
from pickles import Creates
from PIL import Image, features

from wds_pipes.codecs import arrays, decoding
from wds_pipes.codecs.codec import NotAllowedError
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.images import IMAGE_SPECS, webp_size
from wds_pipes.codecs.table import IMAGE, ROWS, TABLE, encode
from wds_pipes.testing import same

PACK = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


def decode(field, data, *specs, allow_pickle=False, max_image_pixels=1 << 27):
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
    them, whose decoder of cbor needs a package that is not maintained.
    """
    for name in (field, field.upper(), f"left.png.{field}"):
        assert same(decode(name, data), expected)
    if field in webdataset.autodecode.decoders and field != "cbor":
        assert same(webdataset.autodecode.decoders[field](data), expected)


@pytest.mark.parametrize("field", ["npy", "npz", "ten"])
def test_arrays_can_be_written_to(field):
    data = next(data for name, data, _ in CASES if name == field)
    value = decode(field, data)
    arrays = value.values() if field == "npz" else value if field == "ten" else [value]
    assert all(array.flags.writeable for array in arrays)


def test_csv_and_yaml_only_on_request():
    """They are bytes otherwise; yaml is loaded safely."""
    rows = [["a", "b,c", 'd"'], ["1", "", "x\ny"]]
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    table, document = text.getvalue().encode(), yaml.safe_dump(OBJECT, allow_unicode=True).encode()
    assert decode("csv", table) == table
    assert decode("yaml", document) == decode("yml", document) == document
    assert decode("csv", table, "csv") == rows
    assert decode("yaml", document, "csv", "yaml") == OBJECT
    assert decode("yml", document, "yml") == OBJECT
    assert encode("csv", [[1, 2.5, "x"]]) == b"1,2.5,x\r\n"
    with pytest.raises(yaml.YAMLError):
        decode("yaml", b"!!python/object/apply:os.getcwd []", "yaml")


@pytest.mark.parametrize("field", ["", "bin", "xyz", "jpg", "seg.png", "mp4", "wav", "tar", "py", "txt~"])
def test_unknown_fields_stay_bytes(field):
    assert decode(field, b"\x00\xff") == b"\x00\xff"


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


# Packed fields


@pytest.mark.parametrize("kind", PACK)
def test_packed_fields_are_unpacked_first(kind):
    """Also unknown ones, twice packed ones and those with a decoder of the caller's; and values are
    packed when they are encoded.
    """
    pack = PACK[kind]
    for name, value in ((f"txt.{kind}", "Grüße\n"), (f"left.json.gz.{kind}", OBJECT), (f"npy.{kind}", ARRAY)):
        assert same(decode(name, encode(name, value)), value)
    assert decode(f"txt.{kind}", pack(b"abc")) == "abc"
    assert decode(f"left.JSON.{kind.upper()}", pack(b"[1]")) == [1]
    assert decode(f"bin.{kind}", pack(b"\xff")) == decode(kind, pack(b"\xff")) == b"\xff"
    assert decode(f"cls.gz.{kind}", pack(gzip.compress(b"7"))) == 7
    assert decode(f"seg.png.{kind}", pack(b"abc"), {"seg.png": len}) == 3
    assert decode(f"txt.{kind}", b"abcd", {kind: len}) == decode(f"txt.{kind}", b"abcd", {f"txt.{kind}": len}) == 4


@pytest.mark.parametrize("kind", PACK)
def test_a_bomb_is_an_error_and_does_not_take_the_memory(kind, monkeypatch):
    """32 MiB of zeros against a limit of 1 MiB; xz alone takes a dictionary of 8 MiB."""
    monkeypatch.setattr(decoding, "MAX_DECODED_BYTES", 1 << 20)
    assert len(decode(f"bin.{kind}", PACK[kind](bytes(1 << 20)))) == 1 << 20
    bomb = PACK[kind](bytes(32 << 20))
    refused_below(16 << 20, lambda: decode(f"bin.{kind}", bomb), "it unpacks to more than 1048576 bytes")


@pytest.mark.parametrize(
    ("field", "bomb"),
    [
        ("npz", written(np.savez_compressed, np.zeros(16 << 20, np.uint8))),
        ("npz", written(np.savez_compressed, *[np.zeros(1 << 20, np.uint8)] * 20)),
        ("pt", None),
    ],
)
def test_a_bomb_in_a_zip_is_an_error_and_does_not_take_the_memory(field, bomb, monkeypatch):
    """npz and pt are zips; their entries may be deflated."""
    monkeypatch.setattr(arrays, "MAX_DECODED_BYTES", 10 << 20)
    if bomb is None:
        packed = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(torch_bytes(torch.zeros(4 << 20)))) as plain,
            zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as deflated,
        ):
            for name in plain.namelist():
                deflated.writestr(name, plain.read(name))
        bomb = packed.getvalue()
    refused_below(4 << 20, lambda: decode(field, bomb), "it unpacks to more than 10485760 bytes")


@pytest.mark.parametrize("size", [0, 100])
def test_a_zip_that_declares_less_than_it_unpacks_to_takes_no_memory(size):
    """In both places where it declares the size of its entry."""
    data = bytearray(written(np.savez_compressed, np.zeros(16 << 20, np.uint8)))
    entry = data.rindex(b"PK\1\2")
    data[22:26] = data[entry + 24 : entry + 28] = struct.pack("<I", size)
    refused_below(4 << 20, lambda: decode("npz", bytes(data)), "Bad CRC-32", zipfile.BadZipFile)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_in_another_compression_is_refused(kind):
    """numpy and torch write none, and the size of its contents cannot be limited."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", kind) as archive:
        archive.writestr("a.npy", written(np.save, ARRAY))
    with pytest.raises(ValueError, match="neither stored nor deflated"):
        decode("npz", packed.getvalue())


def refused_below(size, call, message, kind=ValueError):
    """``call`` raises before Python has taken so many bytes of memory."""
    with memory_below(size), pytest.raises(kind, match=message):
        call()


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
    """The error says how to allow them."""
    path = tmp_path / "made"
    with pytest.raises(NotAllowedError, match="allow_pickle=True only if you trust"):
        decode(field, PICKLES[field](Creates(path)))
    assert not path.exists()


@pytest.mark.parametrize("field", [field for field in PICKLES if field != "x.pt"])
def test_pickles_run_if_the_caller_allows_it(field, tmp_path):
    """This shows that the refusal above is what protects."""
    path = tmp_path / "made"
    decode(field, PICKLES[field](Creates(path)), allow_pickle=True)
    assert path.exists()


def test_torchscript_is_refused():
    """It is code, in a zip that torch.load would pass to torch.jit.load."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("a/data.pkl", "a/constants.pkl", "a/version"):
            archive.writestr(name, b"3")
    with pytest.raises(NotAllowedError, match="TorchScript"):
        decode("pt", file.getvalue())


@pytest.mark.parametrize(
    ("field", "value"), [("pkl", {1, 2}), ("npy", np.array([1, 2])), ("npz", {"a": np.array([1])}), ("pt", {"a": 1})]
)
def test_allow_pickle_still_reads_harmless_fields(field, value):
    data = {
        "pkl": pickle.dumps,
        "npy": lambda value: written(np.save, value),
        "npz": lambda value: written(np.savez, **value),
        "pt": torch_bytes,
    }[field](value)
    assert same(decode(field, data, allow_pickle=True), value)


# Decoders of the caller's


def test_decoders_of_the_caller_go_by_the_longest_end_of_the_name():
    """Before the table and before the image spec; in any case of the letters."""
    own = {"png": lambda data: "png", ".SEG.png": lambda data: "seg", "txt": len}
    assert [decode(name, b"abc", "rgb8", own) for name in ("png", "a.PNG", "seg.png", "left.seg.png", "txt")] == [
        "png",
        "png",
        "seg",
        "seg",
        3,
    ]
    assert decode("bin", b"abc", {"txt": len}, {"bin": bytes.decode}) == "abc"
    assert decode("txt", b"abc", {"txt": len}, {"txt": bytes.decode}) == "abc"


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        (("rgb9",), ValueError, "unknown spec 'rgb9': use one of l, l8, .*, audio, csv, video, yaml"),
        (("RGB",), ValueError, "unknown spec 'RGB'"),
        (("rgb", "l8"), ValueError, "images cannot be both 'rgb' and 'l8'"),
        (("rgb", "rgb"), ValueError, "images cannot be both"),
        (({"png": "rgb"},), TypeError, "a decoder is given as"),
        (({3: len},), TypeError, "a decoder is given as"),
        ((["rgb"],), TypeError, "a spec is a name, a dict of functions"),
    ],
)
def test_wrong_specs_are_refused(specs, error, message):
    with pytest.raises(error, match=message):
        Decoding(specs, allow_pickle=False, max_image_pixels=1)


# Images

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 4), np.uint8)


def png(mode="RGB", **options):
    image = Image.fromarray(PIXELS)
    return image_bytes((image.convert("RGB") if mode == "P" else image).convert(mode), "PNG", **options)


THEIR_SPECS = [spec for spec in IMAGE_SPECS if spec != "raw"]


@pytest.mark.parametrize("spec", THEIR_SPECS)
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_image_specs_decode_as_in_webdataset(spec, mode):
    """The same numbers, dtype and shape for every mode of image; an L tensor of ours has its
    channel dimension. Ours can be written to, in memory of its own order; encoded and decoded again
    it is the same.
    """
    data = png(mode)
    assert same(decode("png", encode("png", decode("png", data, spec)), spec), decode("png", data, spec))
    expected = webdataset.autodecode.ImageHandler(spec)("png", data)
    value = decode("png", data, spec)
    assert type(value) is type(expected)
    if isinstance(value, Image.Image):
        assert value.mode == expected.mode
        value, expected = np.asarray(value), np.asarray(expected)
    if spec in ("torchl", "torchl8"):
        expected = expected[None]
    assert same(value, expected)
    if not spec.startswith("pil"):
        flags = np.asarray(value).flags
        assert flags.writeable
        assert flags.c_contiguous


@pytest.mark.parametrize("extension", sorted(IMAGE))
def test_the_content_decides_not_the_extension(extension):
    """A png that is called jpg is common."""
    assert decode(extension, png(), "rgb8").shape == (5, 7, 3)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bit_images_are_a_clear_error(dtype):
    with pytest.raises(ValueError, match="32 bits a pixel, .*: use 'raw'"):
        decode("tif", image_bytes(np.ones((2, 2), dtype), "TIFF"), "rgb8")


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def large_png(width, height):
    """The head of a png that claims to be large, with hardly any data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(10_000, 10_000), (13_000, 13_000), (60_000, 60_000), (2_000_000_000, 2)])
def test_too_large_images_are_refused_before_they_are_decoded(size):
    """Without Pillow's own warning, which the test run would make an error."""
    data = large_png(*size)
    said = f"has {size[0]} x {size[1]} pixels, more than max_image_pixels"
    refused_below(1 << 20, lambda: decode("png", data, "rgb8", max_image_pixels=1 << 20), said)


def test_an_image_below_the_limit_decodes_without_pillows_warning(monkeypatch):
    """The limit is ours alone."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    assert decode("png", png(), "rgb8", max_image_pixels=35).shape == (5, 7, 3)
    with pytest.raises(ValueError, match="7 x 5 pixels"):
        decode("png", png(), "rgb8", max_image_pixels=34)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "PPM", "WEBP"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_truncated_images_are_an_error(form, part):
    """Not an image that is grey below."""
    data = image_bytes(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), form)
    with pytest.raises((OSError, ValueError, SyntaxError, IndexError, struct.error, UserWarning)):
        decode(form.lower(), data[: int(len(data) * part)], "rgb8")


@pytest.mark.parametrize(
    "data", [b"", b"GIF", b"<html>404</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_a_field_that_is_no_image_is_an_error(data):
    """EPS too, for which Pillow would start another program."""
    with pytest.raises(ValueError, match="the data are none of JPEG"):
        decode("jpg", data, "rgb8")


WEBP_34_BYTES = (
    b"RIFF"
    + struct.pack("<I", 26)
    + b"WEBPVP8L"
    + struct.pack("<I", 14)
    + b"\x2f"
    + struct.pack("<I", 16382 | 16382 << 14)
    + bytes(9)
)


def test_a_large_webp_is_refused_before_it_is_opened():
    """Opening it would take memory for all its pixels."""
    for data in (
        WEBP_34_BYTES,
        WEBP_34_BYTES[:12] + b"VP8X" + struct.pack("<II", 10, 0) + b"\xff\xff\0" * 2 + bytes(9),
        WEBP_34_BYTES[:12]
        + b"VP8 "
        + struct.pack("<I", 14)
        + b"\x10\0\0\x9d\x01\x2a"
        + struct.pack("<HH", 16383, 16383)
        + bytes(4),
    ):
        with pytest.raises(
            ValueError, match=r"the image has (16383 x 16383|65536 x 65536) pixels, more than max_image_pixels"
        ):
            decode("webp", data, "rgb8")


@pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP")
@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0x"}])
def test_the_size_of_a_webp_is_that_of_its_header(options):
    """Of all three kinds of first chunk."""
    data = image_bytes(np.zeros((5, 300, 3), np.uint8), "WEBP", **options)
    assert webp_size(data) == (300, 5)
    assert decode("webp", data, "rgb8", max_image_pixels=1500).shape == (5, 300, 3)
    with pytest.raises(ValueError, match="300 x 5 pixels"):
        decode("webp", data, "rgb8", max_image_pixels=1499)


# Names of fields


def test_a_name_of_a_million_dots_costs_no_more_than_others():
    """Only as many parts are read as the caller's names have; all of them would take hours."""
    decoding = Decoding(({"seg.png": len, "a.b.c": len},), allow_pickle=False, max_image_pixels=1)
    start = time.process_time()
    assert decoding.decoder("x." * 500_000 + "seg.png")(b"abc") == 3
    assert decoding.decoder("x." * 500_000 + "bin") is None
    assert time.process_time() - start < 5


def test_a_field_is_packed_twice_at_most():
    """``.gz.gz.gz`` and so on would be unpacked again and again."""
    data = PACK["zst"](PACK["gz"](b"abc"))
    assert decode("txt.gz.zst", data) == "abc"
    for name in ("txt.gz.gz.zst", "txt" + ".gz" * 100_000):
        with pytest.raises(ValueError, match="packed more than 2 times"):
            decode(name, data)
    assert decode("x" + ".gz" * 100_000, b"abcd", {"gz": len}) == 4


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("field", ["npy", "npz"])
def test_an_array_that_declares_more_than_it_has_takes_no_memory(field, version):
    """The error is not a MemoryError, which would not be skipped."""
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 1024)}" % (1 << 50)
    data = (
        b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + bytes(100)
    )
    if field == "npz":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("a.npy", data)
        data = packed.getvalue()
    refused_below(1 << 20, lambda: decode(field, data), "its header promises an array of shape")


def test_an_array_of_version_3_is_read():
    """numpy writes it where the names of fields are not latin-1."""
    array = np.zeros(3, [("名", "<i4"), ("ä\x85\xa0", "<f8")])
    with pytest.warns(UserWarning, match="format 3.0"):
        data = written(np.save, array)
    assert same(decode("npy", data), array)


def test_an_array_with_a_hostile_header_is_an_error_of_its_sample():
    """Python's parser raises a MemoryError, which would not be skipped."""
    text = b"-" * 9000 + b"1"
    data = b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text
    with pytest.raises(ValueError, match="its header is nested too deeply"):
        decode("npy", data)


# Libraries that are not there


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
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        decode(field, b"(\xb5/\xfd", "yaml")


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
    ],
)
def test_a_str_is_the_text_of_its_format(field, text, value):
    """It is written as it is, not encoded once more."""
    data = encode(field, text)
    assert (gzip.decompress(data) if field.endswith("gz") else data) == text.encode()
    assert decode(field, data, "csv", "yaml") == value


def test_a_compressed_field_has_the_same_bytes_at_any_time():
    assert encode("txt.gz", "x" * 100)[4:8] == bytes(4)
    assert encode("txt.gz", gzip.compress(b"x", mtime=7)) == gzip.compress(b"x", mtime=7)


def test_tensors_of_safetensors_are_sorted_by_name():
    """The library returns them in an order that differs from call to call."""
    data = encode("safetensors", {name: torch.zeros(1) for name in "hcagbfed"})
    assert [list(decode("safetensors", data)) for _ in range(5)] == [list("abcdefgh")] * 5


def test_tenbin_is_encoded_as_webdataset_does():
    """One array as a list of it; in the byte order of the format."""
    assert encode("ten", ARRAYS) == bytes(webdataset.tenbin.encode_buffer(ARRAYS))
    assert encode("tb", torch.from_numpy(ARRAY)) == bytes(webdataset.tenbin.encode_buffer([ARRAY]))
    assert encode("ten", ARRAY.astype(">f4")) == encode("ten", ARRAY) == encode("ten", np.asfortranarray(ARRAY))


def test_a_row_of_a_tensor_is_written_without_the_rest():
    """torch.save would write the whole tensor that it is a view of."""
    table = torch.arange(100_000.0).reshape(1000, 100).requires_grad_()
    data = encode("pth", {"row": [table[3]]})
    assert len(data) < 5_000
    assert data == encode("pth", {"row": [table[3].clone()]})
    assert torch.equal(decode("pth", data)["row"][0], table[3])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.full((2, 2, 3), 1.5), "floats from 0 to 1, and these go from 1.5 to 1.5"),
        (np.full((2, 2, 3), np.nan), "floats from 0 to 1, and these go from nan to nan"),
        (np.zeros((2, 2, 5), np.uint8), r"not uint8 of shape \(2, 2, 5\)"),
        (np.zeros((2, 2, 3), np.int64), r"not int64 of shape \(2, 2, 3\)"),
        (np.zeros((2, 2), np.int64), r"not int64 of shape \(2, 2\)"),
        (torch.zeros(2, 2, 3), r"not a tensor of shape \(2, 2, 3\)"),
        (np.zeros((0, 2, 3)), r"not float64 of shape \(0, 2, 3\)"),
    ],
)
def test_what_is_no_image_is_not_encoded(value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        encode("png", value)


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


def test_each_exact_image_format_is_in_the_list_above():
    exact = {row.names[0] for row in TABLE if row.asked == "image" and row.encode and not row.lossy}
    assert exact == HELD.keys()


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("extension", sorted({name for row in HELD for name in ROWS[row].names}))
def test_an_image_is_written_exactly_or_refused(extension, name):
    """As an array, and as a PIL image. Pillow makes a palette of the colours of a GIF."""
    array = PICTURES[name]
    for value in (array, Image.fromarray(array)):
        if name not in HELD[ROWS[extension].names[0]]:
            if extension != "gif" or name == "alpha":
                with pytest.raises((ValueError, TypeError, OSError)):
                    encode(extension, value)
            continue
        try:
            data = encode(extension, value)
        except OSError as error:
            if "cannot write mode I;16 as PPM" not in str(error):
                raise
            return  # an older Pillow refuses it
        if name == "16 bits":  # which a spec scales
            found = np.asarray(Image.open(io.BytesIO(data)))
        else:
            found = decode(extension, data, {2: "l8", 3: "rgb8"}[array.ndim] if name != "alpha" else "rgba8")
        assert np.array_equal(found, array * 255 if name == "bits" else array)


@pytest.mark.parametrize("extension", ["jpg", "webp"])
def test_a_lossy_image_keeps_its_alpha_or_is_refused(extension):
    alpha = np.repeat(np.repeat(PIXELS[..., 3:], 8, 0), 8, 1)
    picture = np.concatenate([np.full((*alpha.shape[:2], 3), 99, np.uint8), alpha], -1)
    if extension == "jpg":
        with pytest.raises(ValueError, match="JPEG would drop the transparency of the image: convert"):
            encode(extension, picture)
    elif features.check("webp"):
        assert same(decode(extension, encode(extension, picture), "rgba8")[..., 3:], alpha)


@pytest.mark.parametrize("value", [np.array(3), np.array([3])[0], torch.tensor(3), " 3"])
def test_an_integer_without_dimensions_or_as_text_is_written(value):
    """Such as a label that was a tensor."""
    assert decode("cls", encode("cls", value)) == 3


def test_a_sequence_of_cbor_says_what_reads_it():
    with pytest.raises(ValueError, match=r"ends at byte 1 of 3: explode_records\('cbor'\) reads several"):
        decode("cbor", b"\x01\x02\x03")


@pytest.mark.parametrize("data", [b"\xff", bytearray(b"\xff"), memoryview(b"\xff")])
@pytest.mark.parametrize("field", ["jpg", "txt", "bin", ""])
def test_bytes_are_encoded_as_they_are(field, data):
    assert encode(field, data) == b"\xff"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("txt", 3),
        ("cls", "cat"),
        ("cls", "٣"),
        ("cls", True),
        ("ten", [np.zeros(2, bool)]),
        ("ten", "x"),
        ("cls", 3.0),
        ("cls", torch.tensor(True)),
        ("cls", np.array([3])),
        ("cls", torch.tensor([3, 4])),
        ("npz", [1]),
        ("csv", [{"a": 1}]),
        ("csv", [["a", None]]),
        ("json", {1, 2}),
        ("jpg", "x"),
        ("bin", "x"),
        ("pkl", 3),
    ],
)
def test_values_that_do_not_fit_their_field_are_refused(field, value):
    with pytest.raises(TypeError):
        encode(field, value)


@pytest.mark.parametrize("inner", [False, True])
def test_arrays_of_dtypes_that_numpy_does_not_know_are_not_written(inner):
    """numpy would write them as bytes without a dtype."""
    kind = pytest.importorskip("ml_dtypes").bfloat16
    value = np.zeros(2, [("a", "i4"), ("b", kind, 2)]) if inner else np.array([1.5, 2], kind)
    for field, content in (("npy", value), ("npz", {"x": value})):
        with pytest.raises(ValueError, match="would be read back as bytes"):
            encode(field, content)
    structured = np.zeros(2, [("a", "i4"), ("b", "V3"), ("c", "<f2", (2, 2))])
    assert np.array_equal(decode("npy", encode("npy", structured)), structured)


@pytest.mark.parametrize(
    "names",
    [
        ["allow_pickle"],
        ["file", "args", "kwds", "self"],
        ["a.npy", "a", "a/b", "../a", "", "ü"],
        ["arr_0", "arr_1"],
    ],
)
def test_arrays_of_any_name_are_written(names):
    """As np.savez writes them, where it does not take the name for its own option."""
    value = {name: np.full(2, number) for number, name in enumerate(names)}
    assert same(decode("npz", encode("npz", value)), value)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("npz", {1: ARRAY}, TypeError, "the name of an array must be str, not 1"),
        ("npy", objects(3), ValueError, "Object arrays|object arrays"),
        ("npz", {"a": objects(3)}, ValueError, "Object arrays|object arrays"),
        ("pth", {"a": Decoding}, ValueError, "would not be read back without allow_pickle=True"),
    ],
)
def test_what_would_not_be_read_back_is_not_written(field, value, error, message):
    with pytest.raises(error, match=message):
        encode(field, value)


def test_an_npz_has_the_bytes_of_numpy():
    """And the same ones each time."""
    value = {"b": ARRAY, "a": np.asfortranarray(ARRAY), "c": 3, "d": np.array(["x", "yy"]), "e": np.zeros((0, 2))}
    assert encode("npz", value) == encode("npz", value) == written(np.savez, **value)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("npy", lambda array: array),
        ("npz", lambda array: {"a": array}),
        ("ten", lambda array: [array]),
        ("png", lambda array: np.ma.masked_array(np.zeros((4, 4), np.uint8), True)),
        ("wav", lambda array: (np.ma.masked_array(np.zeros((1, 4), np.float32), True), 8000)),
        ("mp4", lambda array: (np.ma.masked_array(np.zeros((1, 4, 4, 3), np.uint8), True), 10)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_masked_array_is_not_written(field, make):
    """No format has its mask."""
    pytest.importorskip({"wav": "soundfile", "mp4": "av"}.get(field, "numpy"))
    with pytest.raises(ValueError, match=r"it is a masked array, whose mask would be lost: .* array.filled\(0\)"):
        encode(field, make(np.ma.masked_array([1.0, 999.0], [False, True])))
