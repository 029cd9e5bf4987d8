"""Which encoder a field has: a table by extension."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from wds_pipes.codecs.arrays import encode_tenbin, encode_torch
from wds_pipes.codecs.images import image_encoder
from wds_pipes.codecs.names import IMAGE, INTEGER, MAX_DECODED_BYTES, MAX_PACKED, ON_REQUEST, PACKED, TEXT, Encoder
from wds_pipes.core.importing import library
from wds_pipes.io import compression


def _encode_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"text must be str, not {type(value).__name__}")
    return value.encode("utf-8")


def _encode_integer(value: Any) -> bytes:
    if isinstance(value, str):
        data = value.encode("utf-8")
        try:
            int(data)  # as it is decoded
        except ValueError:
            raise TypeError(f"it must be an integer, not {value!r:.80}; a text belongs in a field named txt") from None
        return data
    # Arrays and tensors without dimensions, such as labels of torch, are integers too.
    whole = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if isinstance(whole, bool) or not isinstance(whole, int):
        raise TypeError(f"it must be an integer, not {type(value).__name__}; a text belongs in a field named txt")
    return str(whole).encode()


def _encode_json(value: Any) -> bytes:
    if isinstance(value, str):
        _check_json(value)
        return value.encode("utf-8")
    return _dump(value)


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8")


def _check_json(text: str | bytes) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"a str is written as the JSON text that it is, and this one does not parse ({error}): pass an object, "
            "json.dumps(text) for a JSON string, or name the field txt"
        ) from error


def _encode_lines(value: Any) -> bytes:
    if isinstance(value, str):
        data = value.encode("utf-8")
        for line in data.splitlines():
            if line.strip():
                _check_json(line)
        return data
    if isinstance(value, dict):
        raise TypeError("it must be a list of objects, or JSON Lines as str, not dict: pass [value]")
    return b"".join(_dump(item) + b"\n" for item in value)


def _encode_msgpack(value: Any) -> bytes:
    msgpack = library("msgpack", "msgpack", "a MessagePack field")
    data = bytes(msgpack.packb(value))
    try:
        msgpack.unpackb(data)
    except ValueError as error:
        raise ValueError(f"it would not be read back ({error}): use str for the keys of dicts") from error
    return data


def _encode_cbor(value: Any) -> bytes:
    return bytes(library("cbor2", "cbor2", "a CBOR field").dumps(value))


def _encode_safetensors(value: Any) -> bytes:
    return bytes(library("safetensors.torch", "safetensors", "a safetensors field").save(value))


def _encode_npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _encode_npz(value: Any) -> bytes:
    if not isinstance(value, Mapping):
        raise TypeError(f"it must be a dict of arrays by name, not {type(value).__name__}; an array alone is an npy")
    if any(np.asarray(array).dtype.hasobject for array in value.values()):
        raise ValueError("object arrays cannot be saved: they would be pickled")
    file = io.BytesIO()
    np.savez(file, **value)
    return file.getvalue()


ENCODERS: dict[str, Encoder] = {
    **dict.fromkeys(TEXT | ON_REQUEST, _encode_text),
    **dict.fromkeys(INTEGER, _encode_integer),
    **dict.fromkeys(("json", "jsn"), _encode_json),
    "jsonl": _encode_lines,
    "npy": _encode_npy,
    **dict.fromkeys(("ten", "tenbin", "tb"), encode_tenbin),
    **dict.fromkeys(("mp", "msg", "msgpack"), _encode_msgpack),
    "cbor": _encode_cbor,
    "safetensors": _encode_safetensors,
    **dict.fromkeys(("pt", "pth"), encode_torch),
    "npz": _encode_npz,
    # Pillow would write several sizes of an icon, and none above 256 pixels.
    **{extension: image_encoder(extension) for extension in IMAGE - {"ico"}},
}


def encode(field: str, value: Any) -> bytes:
    """Encode a field; bytes are returned unchanged.

    If the name ends in ``gz``, ``bz2``, ``xz`` or ``zst``, a value that is not bytes is encoded and
    then compressed, and bytes must be compressed already.

    Raises:
        TypeError: the value does not suit the field, or the field has no encoder and the value is
            not bytes.
        ValueError: the value would not be read back: a str that is not JSON, bytes that are not
            compressed as the name says, more layers or bytes than are unpacked.
    """
    name, packed = field.lower(), []
    while (kind := PACKED.get(name.rpartition(".")[2])) is not None:
        packed.append(kind)
        name = name.rpartition(".")[0]
    if len(packed) > MAX_PACKED:
        raise ValueError(f"it is packed more than {MAX_PACKED} times by its name, which is not read back")
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if packed and compression.detect(data[: compression.MAGIC_BYTES]) != packed[0]:
            raise ValueError(
                f"its bytes are not compressed as {packed[0]}, which its name promises: compress them, or name the "
                f"field without .{packed[0]}"
            )
        return data
    encoder = ENCODERS.get(name.rpartition(".")[2])
    if encoder is None:
        raise TypeError(
            f"there is no encoder for {field!r} and {type(value).__name__}: pass bytes"
            f"{' (text.encode())' if isinstance(value, str) else ''}, or use one of {', '.join(sorted(ENCODERS))}"
        )
    data = encoder(value)
    if packed and len(data) > MAX_DECODED_BYTES:
        raise ValueError(f"it has more than {MAX_DECODED_BYTES} bytes, which are not unpacked when it is read")
    for kind in reversed(packed):
        data = compression.compress_bytes(data, kind)
    return data
