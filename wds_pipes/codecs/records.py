"""Files of many records, read one record after another: JSON Lines, MessagePack, CBOR."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from wds_pipes.core.importing import library


def _lines(data: bytes) -> Iterator[Any]:
    """One object in each line; blank lines are left out."""
    return (json.loads(line) for line in io.BytesIO(data) if line.strip())


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
