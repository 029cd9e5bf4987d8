"""Files of many records, read one record after another: JSON Lines, MessagePack, CBOR, Parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from wds_pipes.codecs.names import MAX_DECODED_BYTES, TOO_LARGE
from wds_pipes.core.importing import library

_ROWS = 64  # of a Parquet file that are in memory at a time, at most, beside its pages


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
    cbor2 = library("cbor2", "cbor2", "a CBOR field")
    file = io.BytesIO(data)
    decoder = cbor2.CBORDecoder(file)
    while file.tell() < len(data):
        yield decoder.decode()


def _parquet(data: bytes) -> Iterator[Any]:
    """Rows as dicts of Python's values, in the order of the file; at most MAX_DECODED_BYTES."""
    parquet = library("pyarrow.parquet", "pyarrow", "a Parquet field")
    file = parquet.ParquetFile(io.BytesIO(data), pre_buffer=False)
    facts, names = file.metadata, file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"it has several columns {twice[0]!r}, which no dict can hold: rename them")
    groups = [facts.row_group(number).total_byte_size for number in range(facts.num_row_groups)]
    if sum(groups) > MAX_DECODED_BYTES:
        raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))
    # A page of a few bytes may repeat a large value in each row.
    rows = max(1, min(_ROWS, MAX_DECODED_BYTES // max([1, *groups])))
    # Without threads: those of pyarrow do not survive a fork.
    size = 0
    for batch in file.iter_batches(rows, use_threads=False):
        size += batch.nbytes
        if size > MAX_DECODED_BYTES:
            raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))
        yield from batch.to_pylist()


# By format: the extensions of its files, and its reader.
RECORDS: dict[str, tuple[tuple[str, ...], Callable[[bytes], Iterator[Any]]]] = {
    "jsonl": (("jsonl",), _lines),
    "msgpack": (("msgpack", "msg", "mp"), _msgpack),
    "cbor": (("cbor",), _cbor),
    "parquet": (("parquet",), _parquet),
}
