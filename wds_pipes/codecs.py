"""Decode fields to objects and encode objects to fields, by extension, with one table each.

Rules:
1. A library that is not a base dependency is imported when the first field needs it. If it is
   missing, the error says what to install.
2. Nothing is unpickled unless the caller allows it, and nothing larger than its limit is unpacked
   or decoded.
3. A decoder takes bytes and returns an object; an encoder takes an object and returns bytes. The
   caller, who knows the sample, wraps the exceptions that they raise.
"""

from __future__ import annotations

import csv
import functools
import importlib
import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wds_pipes.io import compression


class NotAllowedError(Exception):
    """A field is not decoded for safety, not because it is damaged. This error is never skipped."""


UNPICKLING = (
    "unpickling runs code from the data; pass allow_pickle=True only if you trust the author of "
    "the shards, or leave the field out with fields="
)
TOO_LARGE = "it unpacks to more than {} bytes"

Decoder = Callable[[bytes], Any]
Encoder = Callable[[Any], bytes]

TEXT = frozenset(["txt", "text", "transcript", "html", "htm"])
INTEGER = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id"])
IMAGE = frozenset(["jpg", "jpeg", "png", "ppm", "pgm", "pbm", "bmp", "tif", "tiff", "webp", "gif"])
PICKLE = frozenset(["pyd", "pkl", "pickle"])
PACKED = {"gz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zst"}
ON_REQUEST = frozenset(["csv", "yaml", "yml"])
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM")  # Pillow's names
MAX_DECODED_BYTES = 1 << 30
MAX_PACKED = 2  # layers of gz, bz2, xz and zst that are unpacked
MAX_MERGED = 100_000  # pairs that merge keys may add to a YAML mapping
MAX_SCANS = 100  # of a JPEG: decoding a scan takes time for all pixels; usual files have 1 or 10

# The result of an image spec: Pillow's mode, floats in 0..1 instead of uint8, the kind of object.
IMAGE_SPECS: dict[str, tuple[str, bool, str]] = {
    **{f"{name}8": (mode, False, "numpy") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{name: (mode, True, "numpy") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{f"torch{name}8": (mode, False, "torch") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{f"torch{name}": (mode, True, "torch") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{
        "pill": ("L", False, "pil"),
        "pil": ("RGB", False, "pil"),
        "pilrgb": ("RGB", False, "pil"),
        "pilrgba": ("RGBA", False, "pil"),
    },
}


def library(name: str, package: str, what: str) -> Any:
    """Import the module ``name``. If it is missing, the error says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} needs the {package} package: pip install {package}") from error


def image_decoder(spec: str, max_pixels: int) -> Decoder:
    """A decoder of images with Pillow; ``spec`` names the kind of result, see ``decode_by_ext``."""
    mode, floats, kind = IMAGE_SPECS[spec]

    def decode(data: bytes) -> Any:
        with open_image(data, max_pixels) as image:
            converted = _in_8_bits(image).convert(mode)
        del image  # free its memory before the next copy is made
        if kind == "pil":
            return converted
        array = np.asarray(converted)
        del converted
        if floats:
            array = array.astype(np.float32)
            array /= np.float32(255)
        if kind == "numpy":
            return array if array.flags.writeable else array.copy()
        import torch

        planes = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        return torch.from_numpy(np.ascontiguousarray(planes) if floats else planes.copy(order="C"))

    return decode


def open_image(data: bytes, max_pixels: int) -> Any:
    """Open the image in ``data`` with Pillow, and check its limits. It is not decoded yet.

    Pillow's own ``open`` would warn of large images before their size can be checked, and try
    formats that run other programs, such as EPS.

    Raises:
        ValueError: it is not an image of a known format, or exceeds a limit.
    """
    from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 - these two register their formats

    Image.preinit()
    for name in IMAGE_FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is None or accept(data[:16]) is True:
            if name == "WEBP":  # Pillow allocates memory for all pixels when it opens one
                _check_pixels(*_webp_size(data), max_pixels)
            image = factory(io.BytesIO(data), "")
            _check_pixels(image.width, image.height, max_pixels)
            if name == "JPEG" and (scans := _count_scans(data)) > MAX_SCANS:
                raise ValueError(
                    f"the JPEG has {scans} scans, more than {MAX_SCANS}, each of which costs as "
                    "much time as a whole image"
                )
            return image
    raise ValueError(f"the data are none of {', '.join(IMAGE_FORMATS)}")


def _check_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise ValueError(f"the image has {width} x {height} pixels, more than max_image_pixels={most}")


def _count_scans(data: bytes) -> int:
    """Count the scans of a JPEG by their marker (FF DA), which cannot occur inside compressed
    data.
    """
    # Compare 16-bit numbers at both alignments: this takes a seventh of the time of data.count().
    return sum(
        int(np.count_nonzero(np.frombuffer(data, "<u2", (len(data) - start) // 2, start) == 0xDAFF)) for start in (0, 1)
    )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in the first chunk of a WebP (RFC 9649); 0 if it is damaged.

    Pillow reports that damage.
    """
    kind, head = data[12:16], data[20:30]
    if len(head) == 10 and kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if len(head) == 10 and kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 6)
        return width & 0x3FFF, height & 0x3FFF
    if len(head) >= 5 and kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return 0, 0


def _in_8_bits(image: Any) -> Any:
    """Convert an image whose mode Pillow does not convert well.

    Pillow clips 16-bit pixels instead of scaling them, and warns of palettes with transparency.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        from PIL import Image

        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            "the image has 32-bit pixels, whose range is not known: decode it with a function of "
            "your own, {'tif': function}"
        )
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")
    return image


def _arrays(load: Callable[[], Any]) -> Any:
    """Call ``load``; NotAllowedError if numpy would have to unpickle objects."""
    try:
        return load()
    except ValueError as error:
        if "Object arrays cannot be loaded" in str(error):
            raise NotAllowedError(f"it holds Python objects, and {UNPICKLING}") from error
        raise


def _npy(data: bytes) -> Any:
    _check_npy(data)
    return _arrays(lambda: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False))


def _check_npy(data: bytes) -> None:
    """Raise ValueError if ``data`` is shorter than its header says.

    numpy would allocate the whole array before it reads the data.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        return
    # Version 3 differs from 2 only in the encoding of field names.
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = read(file)
    except MemoryError as error:
        # Python's parser raises this for a text that is nested too deeply; headers are small.
        raise ValueError("its header is nested too deeply") from error
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > len(data) - file.tell():
        raise ValueError(f"it is cut short: its header promises an array of shape {shape} and type {dtype}")


def _npz(data: bytes, allow_pickle: bool = False) -> dict[str, Any]:
    check_zip(data)
    if not allow_pickle:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename.removesuffix(".npy"): _read_entry(archive, entry) for entry in archive.infolist()}
        return {name: _npy(content) if content[:6] == b"\x93NUMPY" else content for name, content in entries.items()}
    with np.load(io.BytesIO(data), allow_pickle=allow_pickle) as arrays:
        return {name: _arrays(lambda name=name: arrays[name]) for name in arrays.files}  # type: ignore[misc]


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The content of an entry.

    ``archive.read`` would first unpack everything, even if the declared size is small.
    """
    with archive.open(entry) as file:
        # One byte more reaches the end, where zipfile compares the checksum.
        return file.read(entry.file_size + 1)


def check_zip(data: bytes) -> list[str]:
    """The names in a zip; ValueError if it unpacks to more than MAX_DECODED_BYTES."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > MAX_DECODED_BYTES:
        raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
        # zipfile unpacks other types without a limit.
        raise ValueError("its entries are neither stored nor deflated, as numpy and torch write them")
    return [entry.filename for entry in entries]


def _lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def _msgpack(data: bytes) -> Any:
    return library("msgpack", "msgpack", "a MessagePack field").unpackb(data)


def _cbor(data: bytes) -> Any:
    return library("cbor2", "cbor2", "a CBOR field").loads(data)


def _safetensors(data: bytes) -> Any:
    return library("safetensors.torch", "safetensors", "a safetensors field").load(data)


def _torch(data: bytes) -> Any:
    torch = library("torch", "torch", "a pt field")
    archive = data[:2] == b"PK"
    if archive and any(name.endswith("/constants.pkl") for name in check_zip(data)):
        raise NotAllowedError(f"it is a TorchScript archive, and {UNPICKLING}")
    if data[:1] == b"\x80" and data[:2] != b"\x80\x02":  # torch.save writes protocol 2
        raise NotAllowedError(f"it is a plain pickle, and {UNPICKLING}")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if archive or data[:1] == b"\x80":
            raise NotAllowedError(f"it holds more than tensors and plain objects, and {UNPICKLING}") from error
        raise


def _yaml(data: bytes) -> Any:
    yaml = library("yaml", "pyyaml", "a YAML field")
    return yaml.load(data, _yaml_loader(yaml))


@functools.cache
def _yaml_loader(yaml: Any) -> Any:
    """PyYAML's safe loader with a limit on the pairs that merge keys (``<<``) add.

    With merge keys, a short text may multiply its content.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            pairs = 0
            for key, value in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                        if isinstance(merged, yaml.MappingNode):
                            self.flatten_mapping(merged)
                            pairs += len(merged.value)
            if pairs > MAX_MERGED:
                raise ValueError(f"its merge keys (<<) bring more than {MAX_MERGED:,} pairs into one mapping")
            super().flatten_mapping(node)

    return Loader


# The tensors of webdataset's "tenbin": chunks of 8 bytes magic, 8 bytes length and the content
# padded to 64 bytes; before each data chunk comes a header chunk (dtype, name, ndim, shape as
# int64).
_TEN_MAGIC = b"~TenBin~"
_TEN_DTYPES = {code: np.dtype(code) for code in ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]}


def _tenbin(data: bytes) -> list[Any]:
    chunks, place = [], 0
    while place < len(data):
        if data[place : place + 8] != _TEN_MAGIC or len(data) < place + 16:
            raise ValueError(f"no tensor starts at byte {place}")
        (length,) = struct.unpack_from("<q", data, place + 8)
        if length < 0 or place + 16 + length > len(data):
            raise ValueError(f"the chunk at byte {place} is cut short")
        chunks.append(data[place + 16 : place + 16 + length])
        place += 16 + length + (-length & 63)
    if len(chunks) % 2:
        raise ValueError("a header has no data")
    arrays = []
    for header, content in zip(chunks[::2], chunks[1::2], strict=True):
        code = header[:8].rstrip(b"\0").decode("ascii", "replace")
        if code not in _TEN_DTYPES:
            raise ValueError(f"unknown tensor type {code!r}")
        ndim = struct.unpack_from("<q", header, 16)[0] if len(header) >= 24 else -1
        shape = struct.unpack_from(f"<{ndim}q", header, 24) if 0 <= ndim <= (len(header) - 24) // 8 else (-1,)
        if min(shape, default=0) < 0:
            raise ValueError("a header is damaged")
        arrays.append(np.frombuffer(content, dtype=_TEN_DTYPES[code]).reshape(shape).copy())
    return arrays


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(TEXT, lambda data: data.decode("utf-8")),
    **dict.fromkeys(INTEGER, int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "jsonl": _lines,
    "npy": _npy,
    "npz": _npz,
    **dict.fromkeys(("ten", "tenbin", "tb"), _tenbin),
    **dict.fromkeys(("mp", "msg", "msgpack"), _msgpack),
    "cbor": _cbor,
    "safetensors": _safetensors,
    **dict.fromkeys(("pt", "pth"), _torch),
    "csv": lambda data: list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""))),
    **dict.fromkeys(("yaml", "yml"), _yaml),
}


def _refuse_pickle(data: bytes) -> Any:
    raise NotAllowedError(UNPICKLING)


def _pickled_arrays(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=True)


def _pickled_npz(data: bytes) -> Any:
    return _npz(data, allow_pickle=True)


def _pickled_tensors(data: bytes) -> Any:
    return library("torch", "torch", "a pt field").load(io.BytesIO(data), map_location="cpu", weights_only=False)


def unpack(data: bytes, kind: str) -> bytes:
    """Unpack a compressed field; ValueError if it is larger than MAX_DECODED_BYTES."""
    content = compression.decompress_bytes(data, kind, MAX_DECODED_BYTES)
    if content is None:
        raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))
    return content


class Decoding:
    """Chooses the decoder of a field, by the specs of ``decode_by_ext``.

    Raises:
        ValueError: a spec is unknown, or two specs are for images.
        TypeError: a spec is neither a name nor a dict of functions.
    """

    def __init__(
        self, specs: tuple[str | Mapping[str, Decoder], ...], *, allow_pickle: bool, max_image_pixels: int
    ) -> None:
        self._own: dict[str, Decoder] = {}
        self._known = {name: decode for name, decode in DECODERS.items() if name not in ON_REQUEST}
        images: str | None = None
        for spec in specs:
            if isinstance(spec, Mapping):
                for name, decode in spec.items():
                    if not isinstance(name, str) or not callable(decode):
                        raise TypeError(f"a decoder is given as {{'ext': function}}, not {name!r}: {decode!r}")
                    self._own[name.lower().lstrip(".")] = decode
            elif not isinstance(spec, str):
                raise TypeError(f"a spec is a name or a dict of functions by extension, not {spec!r}")
            elif spec in ON_REQUEST:
                self._known[spec] = DECODERS[spec]
            elif spec in IMAGE_SPECS and images is None:
                images = spec
            elif spec in IMAGE_SPECS:
                raise ValueError(
                    f"images cannot be both {images!r} and {spec!r}: choose one, or give a function by extension"
                )
            else:
                raise ValueError(
                    f"unknown spec {spec!r}: use one of {', '.join(sorted(IMAGE_SPECS))}, "
                    f"{', '.join(sorted(ON_REQUEST))}, or {{'ext': function}}"
                )
        self._parts = max((name.count(".") + 1 for name in self._own), default=0)
        if images is not None:
            self._known.update(dict.fromkeys(IMAGE, image_decoder(images, max_image_pixels)))
        if allow_pickle:
            self._known.update(
                {
                    **dict.fromkeys(PICKLE, pickle.loads),
                    "npy": _pickled_arrays,
                    "npz": _pickled_npz,
                    "pt": _pickled_tensors,
                    "pth": _pickled_tensors,
                }
            )
        else:
            self._known.update(dict.fromkeys(PICKLE, _refuse_pickle))

    def decoder(self, field: str) -> Decoder | None:
        """The decoder of a field, or None if the field is not decoded.

        The caller's own decoders are found by the longest matching end of the name, those of the
        table by the last part of the name.

        Raises:
            ValueError: by its name, the field is packed more than MAX_PACKED times.
        """
        name, packed = field.lower(), []
        while True:
            last = name.rpartition(".")[2]
            own = self._of_caller(name)
            if own is not None or last not in PACKED:
                break
            packed.append(PACKED[last])
            if len(packed) > MAX_PACKED:
                raise ValueError(f"it is packed more than {MAX_PACKED} times by its name")
            name = name[: -len(last) - 1]
        decode = own or self._known.get(last)
        if not packed:
            return decode

        def unpack_and_decode(data: bytes) -> Any:
            for kind in packed:
                data = unpack(data, kind)
            return data if decode is None else decode(data)

        return unpack_and_decode

    def _of_caller(self, name: str) -> Decoder | None:
        """The caller's own decoder of a field, or None.

        At most as many parts of the name are compared as the caller's longest extension has.
        """
        if not self._own:
            return None
        parts = name.rsplit(".", self._parts)
        parts = parts[-self._parts :] if len(parts) > self._parts else parts
        return next(
            (own for start in range(len(parts)) if (own := self._own.get(".".join(parts[start:]))) is not None), None
        )


def _encode_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"text must be str, not {type(value).__name__}")
    return value.encode("utf-8")


def _encode_integer(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"it must be an integer, not {type(value).__name__}; a text belongs in a field named txt")
    return str(int(value)).encode()


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8")


def _encode_npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _encode_npz(value: Any) -> bytes:
    if any(np.asarray(array).dtype.hasobject for array in value.values()):
        raise ValueError("object arrays cannot be saved: they would be pickled")
    file = io.BytesIO()
    np.savez(file, **value)
    return file.getvalue()


def _image_encoder(extension: str) -> Encoder:
    formats = {"jpg": "JPEG", "tif": "TIFF", "ppm": "PPM", "pgm": "PPM", "pbm": "PPM"}
    name = formats.get(extension, extension.upper())

    def encode(value: Any) -> bytes:
        from PIL import Image

        image = Image.fromarray(value) if isinstance(value, np.ndarray) else value
        if not isinstance(image, Image.Image):
            raise TypeError(
                "an image must be a uint8 array of shape (H, W) or (H, W, 3 or 4), a PIL image "
                f"or bytes, not {type(value).__name__}"
            )
        file = io.BytesIO()
        image.save(file, name, **({"quality": 95} if name in ("JPEG", "WEBP") else {}))
        return file.getvalue()

    return encode


ENCODERS: dict[str, Encoder] = {
    **dict.fromkeys(TEXT, _encode_text),
    **dict.fromkeys(INTEGER, _encode_integer),
    **dict.fromkeys(("json", "jsn"), _encode_json),
    "jsonl": lambda value: b"".join(_encode_json(item) + b"\n" for item in value),
    "npy": _encode_npy,
    "npz": _encode_npz,
    **{extension: _image_encoder(extension) for extension in IMAGE},
}


def encode(field: str, value: Any) -> bytes:
    """Encode a field; bytes are returned unchanged.

    Raises:
        TypeError: the value does not suit the field, or the field has no encoder and the value is
            not bytes.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    encoder = ENCODERS.get(field.rpartition(".")[2])
    if encoder is None:
        raise TypeError(
            f"there is no encoder for {field!r} and {type(value).__name__}: pass bytes, or use "
            f"one of {', '.join(sorted(ENCODERS))}"
        )
    return encoder(value)
