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
    found: dict[str, str] = {}
    shards = []
    for name, file in found_files(source, _ENDINGS, storage_options):
        stem = without_dots(re.sub(r"\.(tfrecords?|tfrec|gz)(?=[.-]|$)", "", name, flags=re.IGNORECASE))
        if stem in found:
            raise ValueError(f"{found[stem]} and {name} would both be {stem}.tar: rename one of them")
        found[stem] = name
        shards.append(Shard(f"{stem}.tar", (Run(file),), f"{stem}/"))
    return shards


def rows(run: Run, storage_options: Options) -> Iterator[Row]:
    """Read the records of a file."""
    from wds_pipes.io.open import open_url

    message, shown = example()(), redact(run.file.url)
    damaged: tuple[type[Exception], ...] = (EOFError, *damage())
    with open_url(run.file.url, storage_options=storage_options) as raw:
        try:
            for byte, data in records(decompressed(raw), shown):
                try:
                    message.ParseFromString(data)
                except Exception as error:
                    raise SampleError(
                        f"{shown}, byte {byte}: the record is no tf.train.Example ({error}): other records cannot be "
                        "converted",
                        url=shown,
                        offset=byte,
                    ) from error
                if message.feature_lists:
                    raise SampleError(
                        f"{shown}, byte {byte}: the record is a tf.train.SequenceExample, whose lists of features are "
                        "not converted: write them as features of a tf.train.Example",
                        url=shown,
                        offset=byte,
                    )
                yield {name: _value(feature) for name, feature in sorted(message.features.feature.items())}
        except damaged as error:
            raise SampleError(f"{shown} cannot be decompressed: {error}: write or fetch it again", url=shown) from error


def records(stream: BinaryIO, shown: str) -> Iterator[tuple[int, bytes]]:
    """Read the records of a TFRecord file, each with the byte where it begins.

    Raises:
        SampleError: it is cut or damaged.
    """
    byte = 0
    while head := _read(stream, 12):
        if len(head) < 12 or masked_crc(head[:8]) != head[8:]:
            what = "it is cut there" if len(head) < 12 else "the checksum of a length is wrong"
            kind = "or it is no TFRecord file" if byte == 0 else "write or fetch it again"
            raise SampleError(f"{shown}, byte {byte}: {what}, {kind}", url=shown, offset=byte)
        (size,) = struct.unpack("<Q", head[:8])
        if size > _MOST:
            raise SampleError(f"{shown}, byte {byte}: a record of {size:,} bytes is too large", url=shown, offset=byte)
        data, check = _read(stream, size), _read(stream, 4)
        if len(check) < 4 or masked_crc(data) != check:
            what = "it is cut in this record" if len(check) < 4 else "the checksum of this record is wrong"
            raise SampleError(f"{shown}, byte {byte}: {what}: write or fetch it again", url=shown, offset=byte)
        yield byte, data
        byte += size + 16


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


def decompressed(raw: BinaryIO) -> BinaryIO:
    """The stream itself, or that of the bytes that are compressed in it."""
    first = raw.peek(12)[:12]  # type: ignore[attr-defined]
    if len(first) < 12 or masked_crc(first[:8]) == first[8:]:
        return raw  # a length may look like the beginning of a compressed file
    return unpacked(raw)[0]


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    while data and len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _value(feature: Any) -> Any:
    """The value of a feature; a list if there is not exactly one."""
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    return values[0] if len(values) == 1 else values
