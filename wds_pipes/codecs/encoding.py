"""Which encoder a field has: a table by extension."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from wds_pipes.codecs.images import image_encoder
from wds_pipes.codecs.names import IMAGE, INTEGER, TEXT, Encoder


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


ENCODERS: dict[str, Encoder] = {
    **dict.fromkeys(TEXT, _encode_text),
    **dict.fromkeys(INTEGER, _encode_integer),
    **dict.fromkeys(("json", "jsn"), _encode_json),
    "jsonl": lambda value: b"".join(_encode_json(item) + b"\n" for item in value),
    "npy": _encode_npy,
    "npz": _encode_npz,
    **{extension: image_encoder(extension) for extension in IMAGE},
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
