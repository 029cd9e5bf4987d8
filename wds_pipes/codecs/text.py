"""Text and objects: txt, cls, json, jsonl, csv, yaml, MessagePack, CBOR."""

from __future__ import annotations

import csv
import functools
import importlib
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from wds_pipes.core.importing import library
from wds_pipes.errors import mended


def decode_text(data: bytes) -> str:
    """Decode UTF-8."""
    return data.decode("utf-8")


def encode_text(value: Any) -> bytes:
    """Encode a str as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"text must be str, not {type(value).__name__}")
    return value.encode("utf-8")


def encode_integer(value: Any) -> bytes:
    """Encode an int, a text that is read as one, or an array or tensor without dimensions."""
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


# Of an integer with so many digits, orjson may make a float. Where all digits are 0, they are found
# in a tenth of the time of a regular expression.
_LONG, _AS_ZERO = b"0" * 19, bytes(ord("0") if ord("0") <= byte <= ord("9") else ord(" ") for byte in range(256))


@functools.cache
def _orjson() -> Any:
    """The package ``orjson``; None: it is not installed."""
    try:
        return importlib.import_module("orjson")
    except ImportError:
        return None


def decode_json(data: bytes, *, exact: bool = True) -> Any:
    """Decode an object, to the same values with and without ``orjson``; without ``exact``, integers
    of more than 19 digits may be floats.
    """
    library = _orjson()
    if library is None or (exact and _LONG in data.translate(_AS_ZERO)):
        return json.loads(data)
    try:
        return library.loads(data)
    except ValueError:  # it also refuses NaN, a byte order mark, and half of a surrogate pair
        return json.loads(data)


def encode_json(value: Any) -> bytes:
    """Encode an object; a str is the JSON text itself."""
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


def decode_lines(data: bytes) -> list[Any]:
    """Decode JSON Lines; blank lines are left out."""
    return [decode_json(line) for line in data.splitlines() if line.strip()]


def encode_lines(value: Any) -> bytes:
    """Encode a list of objects as JSON Lines; a str is the text itself."""
    if isinstance(value, str):
        data = value.encode("utf-8")
        for line in data.splitlines():
            if line.strip():
                _check_json(line)
        return data
    if isinstance(value, dict):
        raise TypeError("it must be a list of objects, or JSON Lines as str, not dict: pass [value]")
    return b"".join(_dump(item) + b"\n" for item in value)


def decode_csv(data: bytes) -> list[list[str]]:
    """Decode rows of strings."""
    text = data.decode("utf-8")
    # any newline= takes twice as long, and differs only for other ends of lines
    return list(csv.reader(io.StringIO(text, newline="") if "\r" in text else io.StringIO(text)))


def encode_csv(value: Any) -> bytes:
    """Encode rows of strings and numbers; a str is the text itself."""
    if isinstance(value, str):
        return value.encode("utf-8")
    rows = [list(row) if isinstance(row, (list, tuple)) else None for row in value]
    if any(row is None or not all(type(cell) in (str, int, float) for cell in row) for row in rows):
        raise TypeError("it must be a list of rows of strings or numbers, or csv as str")
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)  # type: ignore[arg-type]
    return text.getvalue().encode("utf-8")


def decode_yaml(data: bytes) -> Any:
    """Decode an object of plain types."""
    return library("yaml", "pyyaml", "a YAML field").safe_load(data)


def encode_yaml(value: Any) -> bytes:
    """Encode an object of plain types; a str is the text itself."""
    if isinstance(value, str):
        return value.encode("utf-8")
    text: str = library("yaml", "pyyaml", "a YAML field").safe_dump(value, allow_unicode=True, sort_keys=False)
    return text.encode("utf-8")


def decode_msgpack(data: bytes) -> Any:
    """Decode one MessagePack object."""
    return library("msgpack", "msgpack", "a MessagePack field").unpackb(data)


def encode_msgpack(value: Any) -> bytes:
    """Encode one MessagePack object."""
    return bytes(library("msgpack", "msgpack", "a MessagePack field").packb(value))


def decode_cbor(data: bytes) -> Any:
    """Decode one CBOR object; ValueError if more follows, which ``explode_records`` reads."""
    file = io.BytesIO(data)
    value = library("cbor2", "cbor2", "a CBOR field").CBORDecoder(file).decode()
    if file.tell() < len(data):
        raise mended(
            ValueError,
            f"its first object ends at byte {file.tell()} of {len(data)}",
            mend="explode_records('cbor') reads several",
            mend_cli="",
        )
    return value


def encode_cbor(value: Any) -> bytes:
    """Encode one CBOR object."""
    return bytes(library("cbor2", "cbor2", "a CBOR field").dumps(value))


# Files of many records, read one record after another.


def _lines(data: bytes) -> Iterator[Any]:
    """One object in each line; blank lines are left out."""
    return (decode_json(line) for line in io.BytesIO(data) if line.strip())


def _msgpack(data: bytes) -> Iterator[Any]:
    """Objects one after another."""
    unpacker = library("msgpack", "msgpack", "a MessagePack field").Unpacker(
        io.BytesIO(data), max_buffer_size=len(data)
    )
    place = 0
    for record in unpacker:
        place = unpacker.tell()
        yield record
    if place != len(data):
        raise ValueError(f"it is cut short in the object at byte {place}")


def _cbor(data: bytes) -> Iterator[Any]:
    """Objects one after another (RFC 8742)."""
    file = io.BytesIO(data)
    decoder = library("cbor2", "cbor2", "a CBOR field").CBORDecoder(file)
    while file.tell() < len(data):
        yield decoder.decode()


# By format: the extensions of its files, and its reader.
RECORDS: dict[str, tuple[tuple[str, ...], Callable[[bytes], Iterator[Any]]]] = {
    "jsonl": (("jsonl",), _lines),
    "msgpack": (("msgpack", "msg", "mp"), _msgpack),
    "cbor": (("cbor",), _cbor),
}
