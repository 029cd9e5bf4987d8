"""Data sets of MosaicML streaming (MDS), by its library.

The library finds the records and decodes their columns, except for those of bytes and images: their
bytes are taken as they are. Columns of pickles are refused, since they can run code.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

from wds_pipes.cli.converting.source import Options, Row, Run, Shard, divided, file_of, local_only
from wds_pipes.core.importing import library
from wds_pipes.io.urls import redact

# Encodings whose bytes are those of a file.
_MDS_RAW = frozenset(("bytes", "jpeg", "png"))


class Mds:
    """A directory of MDS shards with their ``index.json``."""

    def shards(self, source: str, max_samples: int, storage_options: Options) -> list[Shard]:
        """Divide the records into shards; only the index is read."""
        _mds()
        folder = local_only(source, "MDS")
        files = []
        for entry in _index(folder, "shards"):
            if entry.get("format") != "mds":
                raise ValueError(f"{redact(folder)} has a shard of format {entry.get('format')!r}, and not mds")
            unsafe = [name for name, of in zip(entry["column_names"], entry["column_encodings"]) if of == "pkl"]
            if unsafe:
                raise ValueError(
                    f"column {unsafe[0]!r} of {folder} is a pickle, which can run code: write the data set again "
                    "without it"
                )
            if entry.get("zip_data") is not None:
                raise ValueError(f"{folder} is compressed: decompress it first, by reading it with streaming")
            files.append((file_of(os.path.join(folder, entry["raw_data"]["basename"])), entry["samples"]))
        return divided(files, max_samples)

    def rows(self, run: Run, storage_options: Options) -> Iterator[Row]:
        """Read records."""
        shard, encodings = _mds()
        folder, base = os.path.split(run.file.url)
        entry = next(entry for entry in _index(folder, "shards") if entry["raw_data"]["basename"] == base)
        reader = shard.reader_from_json(folder, "", entry)
        for place in range(run.start, run.start + (run.records or 0)):
            row, data, byte = {}, reader.get_sample_data(place), 0
            sizes = []
            for size in reader.column_sizes:
                if not size:
                    (size,), byte = struct.unpack_from("<I", data, byte), byte + 4
                sizes.append(size)
            for name, encoding, size in zip(reader.column_names, reader.column_encodings, sizes, strict=True):
                content = data[byte : byte + size]
                row[name] = content if encoding in _MDS_RAW else encodings.mds_decode(encoding, content)
                byte += size
            yield row


def _mds() -> tuple[Any, Any]:
    return (
        library("streaming.base.format", "mosaicml-streaming", "MDS"),
        library("streaming.base.format.mds.encodings", "mosaicml-streaming", "MDS"),
    )


def _index(folder: str, name: str) -> Any:
    """The list in the index of a data set."""
    try:
        with open(os.path.join(folder, "index.json"), encoding="utf-8") as file:
            return json.load(file)[name]
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{folder} has no index.json that lists {name}: name the directory of a data set") from error
