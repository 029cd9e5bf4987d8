"""TFRecord files of ``tf.train.Example``.

A record is its length (8 bytes), the masked CRC32C of these, its bytes, and their masked CRC32C.
The framing is read here, since the libraries that do not need TensorFlow compare no checksums, and
read local files only. A file may be compressed, as by gzip.

The protobuf messages in records, also those of an LMDB, are defined here by their published
definitions: ``tf.train.Example`` of TensorFlow, and ``TensorProtos`` of Caffe2. TensorFlow and
Caffe2 are not needed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO

from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.io.compression import damage, unpacked
from wds_pipes.io.open import open_url
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import without_dots
from wds_pipes.tools.outputs import StorageOptions
from wds_pipes.tools.rows import Row
from wds_pipes.tools.sources import Run, Shard, found_files

_ENDINGS = (".tfrecord", ".tfrec")
_MOST = 1 << 31  # bytes of a record, which protobuf cannot exceed
_MASK = 0xA282EAD8


def shards(source: str, max_samples: int, storage_options: StorageOptions) -> list[Shard]:
    """Each file is a shard."""
    example()  # whether the libraries are installed
    found: dict[str, Shard] = {}
    for name, file in found_files(source, _ENDINGS, storage_options):
        stem = without_dots(re.sub(r"\.(tfrecords?|tfrec|gz)(?=[.-]|$)", "", name, flags=re.IGNORECASE))
        if stem in found:
            raise ValueError(f"{redact(found[stem].runs[0].file.url)} and {name} would both be {stem}.tar: rename one")
        found[stem] = Shard(f"{stem}.tar", (Run(file),), f"{stem}/")
    return list(found.values())


def rows(run: Run, storage_options: StorageOptions) -> Iterator[Row]:
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
                yield {name: _value(feature) for name, feature in sorted(message.features.feature.items())}
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


def _value(feature: Any) -> Any:
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
