"""LMDB databases of keys and bytes, and those of Caffe2's ``TensorProtos``, which TorchRecord
writes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from wds_pipes.cli.converting.messages import tensor_protos
from wds_pipes.cli.converting.rows import KEY, extension_of, is_text
from wds_pipes.cli.converting.source import (
    Options,
    Row,
    Run,
    Shard,
    divided,
    local_only,
)
from wds_pipes.cli.creating.files import file_of
from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.tar.keys import without_dots

_DATA = "data.mdb"
_FIRST = 16  # entries, by which it is known whether they are databases, and the size of these
_DATABASE_BYTES = 48
# The fields of a TensorProto with its data, by its type, and their types in numpy.
_FLOAT, _INT32, _BYTE, _STRING, _BOOL, _FLOAT16 = 1, 2, 3, 4, 5, 12
_NUMBERS = {
    _FLOAT: ("float_data", "float32"),
    _INT32: ("int32_data", "int32"),
    _BOOL: ("int32_data", "bool"),
    6: ("int32_data", "uint8"),
    7: ("int32_data", "int8"),
    8: ("int32_data", "uint16"),
    9: ("int32_data", "int16"),
    10: ("int64_data", "int64"),
    _FLOAT16: ("int32_data", "uint16"),  # as their bits
    13: ("double_data", "float64"),
}


class Database:
    """A database of keys and bytes: its key is the key of a sample, and its value is a field."""

    def shards(self, source: str, max_samples: int, storage_options: Options) -> list[Shard]:
        """Divide the entries into shards; only the keys are read."""
        return _divided([local_only(source, "an LMDB")], max_samples)

    def rows(self, run: Run, storage_options: Options) -> Iterator[Row]:
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

    def shards(self, source: str, max_samples: int, storage_options: Options) -> list[Shard]:
        """Divide the entries into shards, in the order of the databases and of their numbers."""
        tensor_protos()  # whether the library is installed
        folder = local_only(source, "a TorchRecord")
        parts = [name for name in os.listdir(folder) if re.fullmatch(r"db\d+", name)] if os.path.isdir(folder) else []
        paths = [os.path.join(folder, name) for name in sorted(parts, key=lambda name: int(name[2:]))]
        return _divided(paths or [folder], max_samples)

    def rows(self, run: Run, storage_options: Options) -> Iterator[Row]:
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
    starts: dict[str, list[bytes]] = {}
    files, before = [], 0
    for path in paths:
        file = file_of(os.path.join(path, _DATA) if os.path.isdir(path) else path)
        found, count = [], 0
        with _cursor(file.url) as cursor:
            for key in cursor.iternext(keys=True, values=False):
                if not key.startswith(b"__"):
                    # a shard ends where the number of all entries says, so one may begin here
                    if not count or not (before + count) % max_samples:
                        found.append(key)
                    count += 1
        starts[file.url] = found
        files.append((file, count))
        before += count
    shards = divided(files, max_samples)
    return [
        shard._replace(runs=tuple(run._replace(start=starts[run.file.url].pop(0)) for run in shard.runs))
        for shard in shards
    ]


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
        opened = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=True, max_dbs=1)
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
                _check_unnamed(opened, transaction, path)
                yield cursor
    except lmdb.Error as error:
        raise SampleError(f"{path} is damaged: {error}: copy the database again", url=path) from error


def _check_unnamed(opened: Any, transaction: Any, path: str) -> None:
    """Raise ValueError if entries are databases of their own, by the first of them."""
    lmdb = library("lmdb", "lmdb", "LMDB", extra="convert")
    with transaction.cursor() as cursor:
        for key, value in islice(cursor, _FIRST):
            if len(value) == _DATABASE_BYTES:
                try:
                    opened.open_db(key, transaction, create=False)
                except lmdb.Error:  # it is a value
                    continue
                raise ValueError(
                    f"{path} has databases with names, such as {key.decode('utf-8', 'replace')!r}, which are not "
                    "converted: copy the entries of one to an LMDB of their own, without a name"
                )


def _value(proto: Any) -> Any:
    """The value of a TensorProto: bytes, a list of bytes, an integer or an array."""
    import numpy as np

    kind, shape = proto.data_type or _FLOAT, tuple(proto.dims)
    if kind == _BYTE and proto.byte_data:
        data = proto.byte_data
        size = math.prod(shape)
        if extension_of(data) is None and len(shape) == 2 and len(data) == 3 * size:
            # the size of a picture is first its width, and it has three colours
            return np.frombuffer(data, np.uint8).reshape(shape[1], shape[0], 3)
        if extension_of(data) is None and len(shape) > 1 and len(data) == size:
            return np.frombuffer(data, np.uint8).reshape(shape)
        return data
    if kind == _STRING:
        return proto.string_data[0] if len(proto.string_data) == 1 else list(proto.string_data)
    field, of = ("int32_data", "uint8") if kind == _BYTE else _NUMBERS[kind]
    array = np.array(getattr(proto, field), "uint32" if kind == _FLOAT16 else None).astype(of)
    if kind == _FLOAT16:
        array = array.view(np.float16)
    if math.prod(shape) == array.size:
        array = array.reshape(shape)
    return int(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind in "iu" else array


def _field(value: Any) -> tuple[str, Any]:
    if isinstance(value, bytes):
        if (extension := extension_of(value)) is not None:
            return extension, value
        number = re.fullmatch(rb"\s*-?\d{1,18}\s*", value)
        return ("cls", value.strip()) if number else ("txt" if is_text(value) else "bin", value)
    if isinstance(value, int):
        return "cls", value
    return (
        ("json", [item.decode("utf-8", "backslashreplace") for item in value])
        if isinstance(value, list)
        else (
            "npy",
            value,
        )
    )
