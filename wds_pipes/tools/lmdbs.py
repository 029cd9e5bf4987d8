"""LMDB databases of keys and bytes, and those of Caffe2's ``TensorProtos``, which TorchRecord
writes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np

from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.tar.keys import without_dots
from wds_pipes.tools.files import file_of
from wds_pipes.tools.outputs import StorageOptions
from wds_pipes.tools.rows import KEY, Row, extension_of, is_text
from wds_pipes.tools.sources import Run, Shard, local_only
from wds_pipes.tools.tfrecord import tensor_protos

_DATA = "data.mdb"
# The fields of a TensorProto with its data, by its type, and their types in numpy.
_FLOAT, _BYTE, _STRING, _FLOAT16 = 1, 3, 4, 12
_NUMBERS = {
    _FLOAT: ("float_data", "float32"),
    2: ("int32_data", "int32"),
    _BYTE: ("int32_data", "uint8"),
    5: ("int32_data", "bool"),
    6: ("int32_data", "uint8"),
    7: ("int32_data", "int8"),
    8: ("int32_data", "uint16"),
    9: ("int32_data", "int16"),
    10: ("int64_data", "int64"),
    _FLOAT16: ("int32_data", "float16"),  # as their bits
    13: ("double_data", "float64"),
}


class Database:
    """A database of keys and bytes: its key is the key of a sample, and its value is a field."""

    def shards(self, source: str, max_samples: int, storage_options: StorageOptions) -> list[Shard]:
        """Divide the entries into shards; only the keys are read."""
        return _divided([local_only(source, "an LMDB")], max_samples)

    def rows(self, run: Run, storage_options: StorageOptions) -> Iterator[Row]:
        """Read entries."""
        for key, value in _entries(run):
            yield {"key": key, "value": value}

    @staticmethod
    def as_sample(row: Row) -> Row:
        """A row as a sample, if no columns are named."""
        key, value = row["key"].decode("utf-8", "surrogateescape"), row["value"]
        field = extension_of(value) or ("txt" if is_text(value) else "bin")
        return {KEY: without_dots(key), field: value}


class TorchRecord:
    """A directory of databases ``db0``, ``db1`` and so on, or one of them, of ``TensorProtos``."""

    def shards(self, source: str, max_samples: int, storage_options: StorageOptions) -> list[Shard]:
        """Divide the entries into shards, in the order of the databases and of their numbers."""
        tensor_protos()  # whether the library is installed
        folder = local_only(source, "a TorchRecord")
        parts = [name for name in os.listdir(folder) if re.fullmatch(r"db\d+", name)] if os.path.isdir(folder) else []
        paths = [os.path.join(folder, name) for name in sorted(parts, key=lambda name: int(name[2:]))]
        return _divided(paths or [folder], max_samples)

    def rows(self, run: Run, storage_options: StorageOptions) -> Iterator[Row]:
        """Read entries: their tensors by name, or by number."""
        message = tensor_protos()()
        for key, value in _entries(run):
            try:
                message.ParseFromString(value)
                if not message.protos:
                    raise ValueError("it has no tensors")
                row = {proto.name or str(place): _value(proto) for place, proto in enumerate(message.protos)}
                if len(row) < len(message.protos):
                    raise ValueError("two of its tensors have one name")
                yield row
            except Exception as error:
                raise SampleError(
                    f"{run.file.url}, key {key!r:.80}: the value is no TensorProtos ({error}): convert it with --from "
                    "lmdb",
                    key=key.decode("utf-8", "replace"),
                ) from error

    @staticmethod
    def as_sample(row: Row) -> Row:
        """A row as a sample, if no columns are named: the fields of a picture and its class, which
        TorchRecord writes, are ``jpg`` and the like, or ``npy``, and ``cls``.
        """
        named = {name: _field(value) for name, value in row.items()}
        kinds = [kind for kind, _ in named.values()]
        plain = all(name.isdecimal() for name in row)
        fields = {
            kind if plain and kinds.count(kind) == 1 else f"{name.lower()}.{kind}": data
            for name, (kind, data) in named.items()
        }
        if len(fields) < len(row):
            raise SampleError(f"tensors {', '.join(row)} would be {len(fields)} fields: name them with --value")
        return fields


def _divided(paths: Sequence[str], max_samples: int) -> list[Shard]:
    begun, number = list[Run](), 0
    for path in paths:
        file = file_of(os.path.join(path, _DATA) if os.path.isdir(path) else path)
        with _cursor(file.url) as cursor:
            keys = (key for key in cursor.iternext(values=False) if not key.startswith(b"__"))
            for place, key in enumerate(keys):
                if not place or not number % max_samples:
                    begun.append(Run(file, key, 0, number))
                number += 1
    ends = [*(run.number for run in begun[1:]), number]
    runs = [run._replace(records=end - run.number) for run, end in zip(begun, ends, strict=False)]
    shards = groupby(runs, lambda run: run.number // max_samples)
    return [Shard(f"shard-{place:06d}.tar", tuple(group)) for place, group in shards]


def _entries(run: Run) -> Iterator[tuple[bytes, bytes]]:
    """Read entries; those whose keys begin with ``__`` are no samples, and left out."""
    left = run.records or 0
    with _cursor(run.file.url) as cursor:
        cursor.set_key(run.start)
        for key, value in cursor.iternext(keys=True, values=True):
            if not left:
                return
            if not key.startswith(b"__"):
                yield key, value
                left -= 1


@contextmanager
def _cursor(path: str) -> Iterator[Any]:
    lmdb = library("lmdb", "lmdb", "LMDB", extra="convert")
    try:
        opened = lmdb.open(path, subdir=False, readonly=True, lock=False)
    except lmdb.Error as error:
        raise ValueError(f"{path} is no LMDB: {error}") from error
    try:
        with opened:
            # The end of the file is mapped, and reading what is not there would end the process.
            size, whole = os.path.getsize(path), (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
            if size < whole:
                raise SampleError(
                    f"{path} has {size:,} bytes, and says that it has {whole:,}: it is cut, so copy it again; if the "
                    "original has no more, make a compact copy of it: mdb_copy -c",
                    url=path,
                )
            with opened.begin() as transaction, transaction.cursor() as cursor:
                yield cursor
    except lmdb.Error as error:
        raise SampleError(f"{path} is damaged: {error}: copy the database again", url=path) from error


def _value(proto: Any) -> Any:
    """The value of a TensorProto: bytes, a list of bytes, an integer or an array."""
    kind, shape = proto.data_type or _FLOAT, tuple(proto.dims)
    if kind == _BYTE and proto.byte_data:
        data, area = proto.byte_data, math.prod(shape)
        if extension_of(data) is None and len(shape) == 2 and len(data) == 3 * area:
            shape = (shape[1], shape[0], 3)  # the size of a picture is first its width, and it has three colours
        elif extension_of(data) is not None or len(shape) < 2 or len(data) != area:
            return data
        return np.frombuffer(data, np.uint8).reshape(shape)
    if kind == _STRING:
        return proto.string_data[0] if len(proto.string_data) == 1 else list(proto.string_data)
    field, of = _NUMBERS[kind]
    if kind == _FLOAT16:
        array = np.array(proto.int32_data, np.uint16).view(np.float16)
    else:
        array = np.array(getattr(proto, field)).astype(of)
    if math.prod(shape) == array.size:
        array = array.reshape(shape)
    return int(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind in "iu" else array


def _field(value: Any) -> tuple[str, Any]:
    """The extension of a field of a value, and what is written."""
    if isinstance(value, bytes):
        if re.fullmatch(rb"\s*-?\d{1,18}\s*", value):
            return "cls", value.strip()
        return extension_of(value) or ("txt" if is_text(value) else "bin"), value
    if isinstance(value, list):
        return "json", [item.decode("utf-8", "backslashreplace") for item in value]
    return ("cls" if isinstance(value, int) else "npy"), value
