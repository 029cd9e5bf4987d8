"""MDS, the format of Mosaic's Streaming: shards of samples with typed columns.

A sample is the sizes of the columns that have no fixed one, and then the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from wds_pipes.cli.converting.chunks import (
    Chunk,
    as_file,
    opened_chunk,
    parts,
    pieces,
    pixels,
    read_index,
    records,
    shards_of,
    understood,
)
from wds_pipes.cli.converting.source import Options, Row, Run, Shard
from wds_pipes.errors import SampleError
from wds_pipes.io.urls import redact

_WRITER = "MDSWriter"
# Numbers: by the number of their type in an array, and with their letters in struct.
_NUMBERS = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_LETTERS = dict(zip(_NUMBERS.values(), "BbHheIifQqd", strict=True))


class Layout(NamedTuple):
    """The columns of a shard: their names, encodings and fixed sizes."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    def columns(self) -> Iterator[tuple[str, str]]:
        """Each name and its encoding."""
        return zip(self.names, self.encodings, strict=True)


def shards(source: str, max_samples: int, storage_options: Options) -> list[Shard]:
    """Divide the samples into shards; only the index is read."""
    url, index = read_index(source, _WRITER, storage_options)
    with understood(url, _WRITER):
        others = [entry["format"] for entry in index["shards"] if entry["format"] != "mds"]
    if others:
        raise ValueError(f"{redact(url)} lists shards of format {others[0]}, and not mds: use wds-pipes create")
    with understood(url, _WRITER):
        found = [_forms(entry) for entry in index["shards"]]
    for name, encoding in dict.fromkeys(column for forms in found for column in forms[0].layout.columns()):
        try:
            _decoder(encoding)
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"{redact(url)} has column {name!r} of type {encoding!r}, which is not known: write the data set again "
                "without it"
            ) from error
    return shards_of(source, found, max_samples, storage_options)


def _forms(entry: dict[str, Any]) -> list[Chunk]:
    """The files that a shard may be in: as it is, and compressed."""
    if entry["version"] != 2:
        raise ValueError(f"version {entry['version']}")
    layout = Layout(tuple(entry["column_names"]), tuple(entry["column_encodings"]), tuple(entry["column_sizes"]))
    if len(set(layout.names)) < max(map(len, layout)):
        raise ValueError("the columns have not one name, one encoding and one size each")
    if any(size is not None and size < 1 for size in layout.sizes):
        raise ValueError("the size of a column is less than 1")
    compression = (entry["compression"] or "").partition(":")[0]
    kinds = {"raw_data": "", "zip_data": "zst" if compression == "zstd" else compression}
    return [
        Chunk(str(entry[form]["basename"]), int(entry["samples"]), layout, kind, int(entry[form]["bytes"]))
        for form, kind in kinds.items()
        if form == "raw_data" or entry[form]
    ]


def rows(run: Run, storage_options: Options) -> Iterator[Row]:
    """Read samples."""
    layout: Layout = run.start.layout
    decoders = [_decoder(encoding) for encoding in layout.encodings]
    varying = struct.Struct(f"<{sum(not size for size in layout.sizes)}I")
    with opened_chunk(run, storage_options) as stream:
        for byte, data in records(stream, run):
            try:
                given = iter(varying.unpack_from(data))
                values = pieces(data, varying.size, [size or next(given) for size in layout.sizes])
                row = {name: decode(value) for name, decode, value in zip(layout.names, decoders, values, strict=True)}
            except Exception as error:
                shown = redact(run.file.url)
                raise SampleError(
                    f"{shown}, byte {byte}: the sample has no such columns as index.json says ({error}): copy both "
                    "again",
                    url=shown,
                    offset=byte,
                ) from error
            yield row


def _decoder(encoding: str) -> Callable[[bytes], Any]:
    """The function that decodes a column, but no images.

    Raises:
        LookupError, ValueError: there is none.
    """
    name, _, given = encoding.partition(":")
    if name == "ndarray":
        kind, _, shape = given.partition(":")
        if kind and kind not in _LETTERS:
            raise KeyError(kind)
        return partial(_array, kind, tuple(map(int, shape.split(","))) if shape else None)
    if encoding in _LETTERS:
        return partial(_number, struct.Struct(f"<{_LETTERS[encoding]}"))
    return _DECODERS[encoding]


def _number(of: struct.Struct, data: bytes) -> Any:
    return of.unpack(data)[0]


def _array(kind: str, shape: tuple[int, ...] | None, data: bytes) -> Any:
    import numpy as np

    at = 0
    if not kind:
        kind, at = _NUMBERS[data[0]], 1
    if shape is None:
        head = data[at]
        count, of = head >> 2, "BHIQ"[head % 4]
        shape = struct.unpack_from(f"<{count}{of}", data, at + 1)
        at += 1 + struct.calcsize(f"<{count}{of}")
    return np.frombuffer(data[at:], kind).reshape(shape)


def _files(ending: str, at: int, data: bytes) -> list[Any]:
    return [as_file(part, ending) for part in parts(data, at)]


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": partial(_number, struct.Struct("<q")),
    "str_int": int,
    "str_float": float,
    "str_decimal": bytes.decode,  # which JSON's numbers may not hold
    "json": json.loads,
    "jpeg": partial(as_file, ending="jpg"),
    "png": partial(as_file, ending="png"),
    "pil": pixels,
    "pkl": partial(as_file, ending="pkl"),  # as it is: it is never loaded
    "jpeg_array": partial(_files, "jpg", 0),
    "jpegarray": partial(_files, "jpg", 0),
    "list[jpeg]": partial(_files, "jpg", 4),
    "list[png]": partial(_files, "png", 4),
    "list[pil]": lambda data: [pixels(part) for part in parts(data, 4)],
}
