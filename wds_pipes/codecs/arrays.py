"""Arrays and tensors: npy, npz, tenbin, safetensors, pt."""

from __future__ import annotations

import functools
import io
import math
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_pipes.codecs.codec import MAX_DECODED_BYTES, TOO_LARGE, NotAllowedError, not_allowed
from wds_pipes.core.importing import library
from wds_pipes.errors import mended


def as_array(value: Any) -> npt.NDArray[Any]:
    """Return an array of what is written; ValueError if it has a mask, which no format holds."""
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError("it is a masked array, whose mask would be lost: fill it first, as in array.filled(0)")
    return np.asarray(value)


# The header that numpy writes for an array of numbers: version 1.0, one form of the dict, spaces up
# to a line feed. Any other valid header is read by numpy, which takes ten times as long.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][biufc]\d\d?)', 'fortran_order': (?:(True)|False), "
    rb"'shape': \((|SIZE,|SIZE(?:, SIZE)+)\), \} *\n".replace(rb"SIZE", rb"(?:0|[1-9]\d{0,17})"),
    re.DOTALL,
)
_NPY_HEADER = 512  # bytes; most have 128
_NUMBERS = {
    dtype.str.encode(): dtype
    for code in ("b1", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8", "c16")
    for dtype in (np.dtype(f"<{code}"), np.dtype(f">{code}"))
}
_GROWS = 21  # digits of the first size, for which numpy leaves room in a header
_ALIGNED = 64  # bytes, of which the length of a header is a multiple


def decode_npy(data: bytes) -> Any:
    """Decode an array, which can be written to; NotAllowedError if it holds Python objects."""
    plain = _plain_npy(data)
    if plain is not None:
        return plain
    _check_npy(data)
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        if "Object arrays cannot be loaded" in str(error):
            raise not_allowed("it holds Python objects, and ") from error
        raise


def _plain_npy(data: bytes) -> npt.NDArray[Any] | None:
    """Decode an array of numbers with a header as numpy writes it; None: it is another one.

    Raises:
        ValueError: it is cut short.
    """
    start = 10 + int.from_bytes(data[8:10], "little")
    found = _read_header(data[:start]) if start <= _NPY_HEADER else None
    if found is None:
        return None
    shape, fortran, count, dtype = found
    if count * dtype.itemsize > len(data) - start:
        raise _cut_short(shape, dtype)
    array = np.frombuffer(data, dtype, count, start).copy() if count else np.empty(0, dtype)
    if len(shape) == 1:
        return array
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


# Arrays of one shape are common, or of a few thousand lengths.
@functools.lru_cache(4096)
def _read_header(header: bytes) -> tuple[tuple[int, ...], bool, int, np.dtype[Any]] | None:
    """Return the shape, whether the order is that of Fortran, the number of values and the type of
    an array of numbers with a header as numpy writes it; None: it is another one, or is cut short.
    """
    match = _NPY.fullmatch(header)
    if match is None or len(header) != 10 + int.from_bytes(header[8:10], "little"):
        return None
    code, fortran, sizes = match.groups()
    shape = tuple(map(int, sizes.rstrip(b",").split(b","))) if sizes else ()
    dtype = _NUMBERS.get(code)
    return None if dtype is None else (shape, bool(fortran), math.prod(shape), dtype)


def _cut_short(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ValueError:
    """Return the error for an array that needs more bytes than there are."""
    return ValueError(f"it is cut short: its header promises an array of shape {shape} and type {dtype}")


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
        raise _cut_short(shape, dtype)


def decode_npz(data: bytes) -> dict[str, Any]:
    """Decode arrays by name; NotAllowedError if they hold Python objects."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {
            entry.filename.removesuffix(".npy"): _read_entry(archive, entry, data) for entry in checked_entries(archive)
        }
    return {name: decode_npy(content) if content[:6] == b"\x93NUMPY" else content for name, content in entries.items()}


def pickled_arrays(data: bytes) -> Any:
    """Decode an array, or arrays by name, which may hold Python objects."""
    if data[:2] != b"PK":
        return np.load(io.BytesIO(data), allow_pickle=True)
    check_zip(data)
    with np.load(io.BytesIO(data), allow_pickle=True) as arrays:
        return dict(arrays)


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, data: bytes) -> bytes:
    """The content of an entry of a zip in ``data``."""
    if entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size:
        # np.savez stores its entries: their bytes follow their header of 30 bytes, name and extra.
        start = entry.header_offset + 30
        start += sum(struct.unpack_from("<HH", data, start - 4)) if start <= len(data) else 0
        content = data[start : start + entry.file_size]
        if len(content) == entry.file_size and zlib.crc32(content) == entry.CRC:
            return content
    # archive.read would first unpack everything, even if the declared size is small.
    with archive.open(entry) as file:
        # One byte more reaches the end, where zipfile compares the checksum.
        return file.read(entry.file_size + 1)


def checked_entries(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The entries of a zip; ValueError if it unpacks to more than MAX_DECODED_BYTES."""
    entries = archive.infolist()
    _check_entries([entry.file_size for entry in entries], {entry.compress_type for entry in entries})
    return entries


def _check_entries(sizes: list[int], methods: set[int]) -> None:
    """Raise ValueError if entries of a zip unpack to more than MAX_DECODED_BYTES."""
    if sum(sizes) > MAX_DECODED_BYTES:
        raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))
    if not methods <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        # zipfile unpacks other types without a limit.
        raise ValueError("its entries are neither stored nor deflated, as numpy and torch write them")


def check_zip(data: bytes) -> list[bytes]:
    """The names in a zip; ValueError if it unpacks to more than MAX_DECODED_BYTES."""
    plain = _plain_entries(data)
    if plain is None:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [entry.filename.encode() for entry in checked_entries(archive)]
    names, methods, sizes = plain
    _check_entries(sizes, set(methods))
    return names


# The directory of a zip, and its end: see APPNOTE.TXT of PKWARE, 4.3.12 and 4.3.16.
_ENTRY = struct.Struct("<4s6xH8xIIHHH12x")  # signature, method, sizes, lengths of name, extra, comment
_END = struct.Struct("<4s8xII2x")  # signature, size and offset of the directory
_END_64 = struct.Struct("<4s36xQQ4s4xQ4x")  # the same in a zip64 record; signature of its locator, and where it starts
_LOCATOR = 20  # bytes


def _plain_entries(data: bytes) -> tuple[list[bytes], list[int], list[int]] | None:
    """The names, methods and sizes of the entries of a zip as torch writes it, in a tenth of the
    time of zipfile; None: it is another one, such as one with a comment or more than 4 GiB.
    """
    end = len(data) - _END.size
    if end < 0:
        return None
    signature, size, place = _END.unpack_from(data, end)
    last = place + size
    if signature != b"PK\5\6":
        return None
    if last == end - _END_64.size:  # torch writes both
        if _END_64.unpack_from(data, last) != (b"PK\6\6", size, place, b"PK\6\7", last):
            return None
    elif last != end or data[end - _LOCATOR :].startswith(b"PK\6\7"):
        return None
    names, methods, sizes = [], [], []
    while place < last:
        if place + _ENTRY.size > last:
            return None
        signature, method, _, unpacked, named, extra, comment = _ENTRY.unpack_from(data, place)
        start = place + _ENTRY.size
        place = start + named + extra + comment
        if signature != b"PK\1\2" or unpacked == 0xFFFFFFFF or place > last:
            return None
        names.append(data[start : start + named])
        methods.append(method)
        sizes.append(unpacked)
    return names, methods, sizes


def encode_npy(value: Any) -> bytes:
    """Encode an array; ValueError if it holds Python objects, or would not be read back."""
    file, array = io.BytesIO(), as_array(value)
    if array.dtype.str.encode() in _NUMBERS and array.flags.c_contiguous:
        return _npy_header(array) + array.tobytes()
    if np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(array.dtype)) != array.dtype:
        raise ValueError(
            f"an array of {array.dtype} would be read back as bytes: convert it, as with "
            "array.astype(np.float32), or write its tensor as safetensors or pt"
        )
    np.save(file, array, allow_pickle=False)
    data = file.getvalue()
    _check_npy(data)
    return data


def _npy_header(array: npt.NDArray[Any]) -> bytes:
    """Return the header that numpy writes for an array of numbers in C order."""
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}"
    if array.ndim:
        text += " " * (_GROWS - len(str(array.shape[0])))
    length = len(text) + 1 + -(len(text) + 11) % _ALIGNED
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def encode_npz(value: Any) -> bytes:
    """Encode a dict of arrays by name, as ``np.savez`` does, which does not take every name."""
    if not isinstance(value, Mapping):
        raise TypeError(f"it must be a dict of arrays by name, not {type(value).__name__}; an array alone is an npy")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in value.items():
            if not isinstance(name, str):
                raise TypeError(f"the name of an array must be str, not {name!r:.80}")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                entry.write(encode_npy(array))
    return file.getvalue()


def decode_safetensors(data: bytes) -> dict[str, Any]:
    """Decode tensors by name."""
    tensors = library("safetensors.torch", "safetensors", "a safetensors field").load(data)
    # The library returns them in another order at each call.
    return tensors if len(tensors) < 2 else dict(sorted(tensors.items()))


def encode_safetensors(value: Any) -> bytes:
    """Encode a dict of tensors by name."""
    return bytes(library("safetensors.torch", "safetensors", "a safetensors field").save(value))


def decode_torch(data: bytes) -> Any:
    """Decode tensors and plain objects; NotAllowedError if the file holds anything else."""
    torch = library("torch", "torch", "a pt field")
    archive = data[:2] == b"PK"
    if archive and any(name.endswith(b"/constants.pkl") for name in check_zip(data)):
        raise not_allowed("it is a TorchScript archive, and ")
    if data[:1] == b"\x80" and data[:2] != b"\x80\x02":  # torch.save writes protocol 2
        raise not_allowed("it is a plain pickle, and ")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if archive or data[:1] == b"\x80":
            raise not_allowed("it holds more than tensors and plain objects, and ") from error
        raise


# The tensors of webdataset's "tenbin": chunks of 8 bytes magic, 8 bytes length and the content
# padded to 64 bytes; before each data chunk comes a header chunk (dtype, name, ndim, shape as
# int64).
_TEN_MAGIC = b"~TenBin~"
_TEN_DTYPES = {code: np.dtype(code) for code in ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]}


def decode_tenbin(data: bytes) -> list[Any]:
    """Decode a list of arrays."""
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


def encode_tenbin(value: Any) -> bytes:
    """Encode a list of arrays; an array is a list of one."""
    blocks = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        array = as_array(item)
        code = array.dtype.str[1:]
        if code not in _TEN_DTYPES:
            raise TypeError(f"a tensor of type {array.dtype} cannot be written: use one of {', '.join(_TEN_DTYPES)}")
        header = struct.pack(f"<8s8xq{array.ndim}q", code.encode(), array.ndim, *array.shape)
        for content in (header, array.astype(_TEN_DTYPES[code], copy=False).tobytes()):
            blocks += [_TEN_MAGIC, struct.pack("<q", len(content)), content, bytes(-len(content) & 63)]
    return b"".join(blocks)


def encode_torch(value: Any) -> bytes:
    """Encode tensors and plain objects, without what tensors are views of; ValueError if they
    could not be decoded again.
    """
    torch, file = library("torch", "torch", "a pt field"), io.BytesIO()

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().clone()
        if type(value) is dict:
            return {key: own(item) for key, item in value.items()}
        return type(value)(map(own, value)) if type(value) in (list, tuple) else value

    torch.save(own(value), file)
    try:
        decode_torch(file.getvalue())
    except NotAllowedError as error:
        raise mended(
            ValueError,
            "it holds more than tensors and plain objects, and would not be read back",
            mend="pass bytes, or write its state_dict(); allow_pickle=True reads it",
            mend_cli="pass bytes, or write its state_dict()",
        ) from error
    return file.getvalue()


def pickled_tensors(data: bytes) -> Any:
    """Decode anything that torch.save wrote."""
    return library("torch", "torch", "a pt field").load(io.BytesIO(data), map_location="cpu", weights_only=False)
