"""The types of values in items of LitData, by their names in its index."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from wds_pipes.cli.converting.chunks import as_file, parts, pixels

# The types of the elements of arrays, by their numbers.
_OF_TENSORS = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
_OF_ARRAYS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)
# Files as they are, and their extensions; that of others is in the name of the type.
_FILES = {
    "jpeg": "jpg",
    "image": "jpg",
    "audio": "wav",
    "video": "mp4",
    "nifti": "nii",
    "mesh": "glb",
    "pdf": "pdf",
    "tiff": "tif",
    "tifffile": "tif",
    "file": "",
    "pickle": "pkl",  # which is never loaded
}


def decoder(name: str) -> Callable[[bytes], Any]:
    """The function that decodes values of a type, but no images.

    Raises:
        LookupError, ValueError: there is none.
    """
    kind, _, given = name.partition(":")
    if kind in _FILES:
        return partial(as_file, ending=given or _FILES[kind])
    if kind == "no_header_tensor":
        return partial(_elements, _OF_TENSORS[int(given)])
    if kind == "no_header_numpy":
        return partial(_elements, _OF_ARRAYS[int(given)])
    return _DECODERS[name]


def _elements(of: str, data: bytes) -> Any:
    import numpy as np

    return np.frombuffer(data, of)


def _array(types: tuple[str, ...], order: str, data: bytes) -> Any:
    """An array after the number of its type, how many axes it has, and their lengths."""
    of, axes = struct.unpack_from(f"{order}2I", data)
    shape = struct.unpack_from(f"{order}{axes}I", data, 8)
    return _elements(types[of], data[8 + 4 * axes :]).reshape(shape)


def _nested(data: bytes) -> Any:
    """A list or dict: JSON, or values with their types."""
    if not data or data[0] > 0x20:
        return json.loads(data)
    return _Nested(data).value()


class _Nested:
    """Values that each begin with the number of their type."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self) -> Any:
        """The next value."""
        return self._of_type(self._one("B"))

    def _of_type(self, kind: int) -> Any:
        if kind in _PLAIN:
            return self._one(_PLAIN[kind])
        if kind in _LISTS:
            return list(self._some(self._one("I"), _LISTS[kind]))
        if kind == 0:
            return json.loads(self._text())
        if kind == 1:
            return [self._text() for _ in range(self._one("I"))]
        if kind == 5:
            return {self._text(): self.value() for _ in range(self._one("I"))}
        if kind == 6:
            count, names = self._one("I"), self._of_type(1)
            if not names:
                raise ValueError("records have no names")
            return [{name: self._of_type(_IN_RECORDS[self._one("B")]) for name in names} for _ in range(count)]
        if kind == 7:
            return self._text()
        if kind == 11:
            return None
        raise ValueError(f"a value is of type {kind}, which is not known")

    def _text(self) -> str:
        (text,) = self._some(self._one("I"), "s")
        return str(text, "utf-8")

    def _one(self, form: str) -> Any:
        return self._some(1, form)[0]

    def _some(self, count: int, form: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{form}")
        found = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return found


# The types of values in lists and dicts: numbers, lists of numbers, and those in lists of records,
# where a record has other numbers for the same types.
_PLAIN = {8: "q", 9: "d", 10: "?"}
_LISTS = {2: "q", 3: "d", 4: "?"}
_IN_RECORDS = {0x10: 11, 0x11: 7, 0x12: 8, 0x13: 9, 0x14: 10}

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bytes": bytes,
    "int": lambda data: struct.unpack("<q", data)[0],
    "float": lambda data: struct.unpack("<d", data)[0],
    "bool": lambda data: struct.unpack("<?", data)[0],
    "pil": pixels,
    "jpeg_array": lambda data: [as_file(part, "jpg") for part in parts(data)],
    "tensor": partial(_array, _OF_TENSORS, ">"),
    "numpy": partial(_array, _OF_ARRAYS, "<"),
    "json": _nested,
    "graph:pickle": partial(as_file, ending="pkl"),
}
