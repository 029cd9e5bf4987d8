"""TFRecord files, LMDB databases of keys and bytes, and those of Caffe2's ``TensorProtos``, which
TorchRecord writes.

A TFRecord file has records of ``tf.train.Example``. A record is its length (8 bytes), the masked
CRC32C of these, its bytes, and their masked CRC32C. The framing is read here, since the libraries
that do not need TensorFlow compare no checksums, and read local files only. A file may be
compressed, as by gzip.

The protobuf messages in records and databases are defined here by their published definitions:
``tf.train.Example`` of TensorFlow, and ``TensorProtos`` of Caffe2. TensorFlow and Caffe2 are not
needed.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any, BinaryIO

import numpy as np

from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.io.compression import damage, unpacked
from wds_pipes.io.open import open_url
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import without_dots
from wds_pipes.tools.files import file_of
from wds_pipes.tools.outputs import StorageOptions
from wds_pipes.tools.rows import KEY, Row, extension_of, is_text
from wds_pipes.tools.sources import Run, Shard, found_files, local_only

_ENDINGS = (".tfrecord", ".tfrec")
_MOST = 1 << 31  # bytes of a record, which protobuf cannot exceed
_MASK = 0xA282EAD8
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


class TFRecord:
    """TFRecord files of ``tf.train.Example``."""

    def shards(self, source: str, max_samples: int, storage_options: StorageOptions) -> list[Shard]:
        """Each file is a shard."""
        example()  # whether the libraries are installed
        found: dict[str, Shard] = {}
        for name, file in found_files(source, _ENDINGS, storage_options):
            stem = without_dots(re.sub(r"\.(tfrecords?|tfrec|gz)(?=[.-]|$)", "", name, flags=re.IGNORECASE))
            if stem in found:
                raise ValueError(
                    f"{redact(found[stem].runs[0].file.url)} and {name} would both be {stem}.tar: rename one"
                )
            found[stem] = Shard(f"{stem}.tar", (Run(file),), f"{stem}/")
        return list(found.values())

    def rows(self, run: Run, storage_options: StorageOptions) -> Iterator[Row]:
        """Read the records of a file."""
        message, byte = example()(), 0
        decode_error = library("google.protobuf.message", "protobuf", "TFRecord", extra="convert").DecodeError
        with open_url(run.file.url, storage_options=storage_options) as raw:
            try:
                stream, _ = unpacked(raw)
                while (data := _record(stream)) is not None:
                    message.ParseFromString(data)
                    if message.feature_lists:
                        raise ValueError("it is a tf.train.SequenceExample, whose lists of features are not converted")
                    yield {name: _feature_value(feature) for name, feature in sorted(message.features.feature.items())}
                    byte += len(data) + 16
            except (ValueError, EOFError, *damage(), decode_error) as error:
                shown = redact(run.file.url)
                raise SampleError(
                    f"{shown}, byte {byte}: no record of tf.train.Example can be read there: {error}",
                    url=shown,
                    offset=byte,
                ) from error


def _record(stream: BinaryIO) -> bytes | None:
    """The next record of a TFRecord file; None at its end.

    Raises:
        ValueError: it is cut or damaged.
    """
    head = stream.read(12)
    if not head:
        return None
    if len(head) == 12 and masked_crc(head[:8]) != head[8:]:
        raise ValueError("the checksum of a length is wrong, or it is no TFRecord file")
    if (size := int.from_bytes(head[:8], "little")) > _MOST:
        raise ValueError(f"a record of {size:,} bytes is too large")
    data, check = stream.read(size), stream.read(4)
    if len(check) < 4:
        raise ValueError("the file is cut: write or fetch it again")
    if masked_crc(data) != check:
        raise ValueError("the checksum of the record is wrong: write or fetch the file again")
    return data


def framed(data: bytes) -> bytes:
    """A record as it is in a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


def masked_crc(data: bytes) -> bytes:
    """The checksum of bytes, as TFRecord files have it."""
    crc = library("google_crc32c", "google-crc32c", "TFRecord", extra="convert").value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def packed(fields: dict[str, Any]) -> bytes:
    """An Example of fields, which are bytes or integers; the same bytes for the same fields."""
    message = example()()
    for name, value in fields.items():
        feature = message.features.feature[name]
        (feature.int64_list if isinstance(value, int) else feature.bytes_list).value.append(value)
    return bytes(message.SerializeToString(deterministic=True))


def _feature_value(feature: Any) -> Any:
    """The value of a feature; a list if there is not exactly one."""
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    return values[0] if len(values) == 1 else values


# proto3 packs repeated numbers, as the definitions say. A tf.train.SequenceExample is an Example
# that also has lists of features.
_EXAMPLE = """
name: "wds_pipes/example.proto" package: "wds_pipes" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".wds_pipes.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".wds_pipes.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".wds_pipes.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".wds_pipes.Feature" }
  }
  field {
    name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".wds_pipes.Features.FeatureEntry"
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".wds_pipes.Features" }
  field { name: "feature_lists" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
}
"""
_TENSORS = """
name: "wds_pipes/tensors.proto" package: "wds_pipes" syntax: "proto3"
message_type {
  name: "TensorProto"
  field { name: "dims" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
  field { name: "data_type" number: 2 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "float_data" number: 3 label: LABEL_REPEATED type: TYPE_FLOAT }
  field { name: "int32_data" number: 4 label: LABEL_REPEATED type: TYPE_INT32 }
  field { name: "byte_data" number: 5 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "string_data" number: 6 label: LABEL_REPEATED type: TYPE_BYTES }
  field { name: "name" number: 7 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "double_data" number: 9 label: LABEL_REPEATED type: TYPE_DOUBLE }
  field { name: "int64_data" number: 10 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "TensorProtos"
  field { name: "protos" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".wds_pipes.TensorProto" }
}
"""


@cache
def example() -> Any:
    """The class of ``tf.train.Example``."""
    return _message(_EXAMPLE, "Example")


@cache
def tensor_protos() -> Any:
    """The class of Caffe2's ``TensorProtos``."""
    return _message(_TENSORS, "TensorProtos")


def _message(definition: str, name: str) -> Any:
    descriptors, pools, factory, texts = (
        library(f"google.protobuf.{module}", "protobuf", "this format", extra="convert")
        for module in ("descriptor_pb2", "descriptor_pool", "message_factory", "text_format")
    )
    pool = pools.DescriptorPool()
    pool.Add(texts.Parse(definition, descriptors.FileDescriptorProto()))
    return factory.GetMessageClass(pool.FindMessageTypeByName(f"wds_pipes.{name}"))


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
