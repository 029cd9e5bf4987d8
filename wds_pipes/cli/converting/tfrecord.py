"""TFRecord files of ``tf.train.Example``.

A record is its length (8 bytes), the masked CRC32C of these, its bytes, and their masked CRC32C.
The framing is read here, since the libraries that do not need TensorFlow compare no checksums, and
read local files only. A file may be compressed, as by gzip.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

from wds_pipes.cli.converting.messages import example
from wds_pipes.cli.converting.source import Options, Row, Run, Shard, found_files
from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.io.compression import damage, unpacked
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import without_dots

_ENDINGS = (".tfrecord", ".tfrec")
_MOST = 1 << 31  # bytes of a record, which protobuf cannot exceed
_MASK = 0xA282EAD8


def shards(source: str, max_samples: int, storage_options: Options) -> list[Shard]:
    """Each file is a shard."""
    example()  # whether the libraries are installed
    found: dict[str, Shard] = {}
    for name, file in found_files(source, _ENDINGS, storage_options):
        stem = without_dots(re.sub(r"\.(tfrecords?|tfrec|gz)(?=[.-]|$)", "", name, flags=re.IGNORECASE))
        if stem in found:
            raise ValueError(f"{redact(found[stem].runs[0].file.url)} and {name} would both be {stem}.tar: rename one")
        found[stem] = Shard(f"{stem}.tar", (Run(file),), f"{stem}/")
    return list(found.values())


def rows(run: Run, storage_options: Options) -> Iterator[Row]:
    """Read the records of a file."""
    from wds_pipes.io.open import open_url

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
