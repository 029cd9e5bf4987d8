"""Data sets of other formats: their files, how their records are divided into shards, and what
reads them.

Rules:
1. Where the files say how many records they have, a shard has ``max_samples`` of them, whatever
   file they are in. A TFRecord file does not say it: it becomes one shard.
2. The records are not read before the tasks run, besides the first ones, which decide what the
   fields are: see ``rows``.

The formats:
- Parquet files, and data sets that Hugging Face ``datasets`` has saved to a disk, in Arrow files.
  Images and audio are in them as ``{"bytes": ..., "path": ...}``: see ``rows``.
- TFRecord files of ``tf.train.Example``. A record is its length (8 bytes), the masked CRC32C of
  these, its bytes, and their masked CRC32C. The framing is read here, since the libraries that do
  not need TensorFlow compare no checksums, and read local files only. A file may be compressed, as
  by gzip.
- LMDB databases of keys and bytes, and those of Caffe2's ``TensorProtos``, which TorchRecord
  writes.

The protobuf messages in records and databases are defined here by their published definitions:
``tf.train.Example`` of TensorFlow, and ``TensorProtos`` of Caffe2. TensorFlow and Caffe2 are not
needed.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, groupby
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError, StateError, WdsError
from wds_pipes.io.compression import TAR_NAME, damage, unpacked, unreadable
from wds_pipes.io.expand import expand
from wds_pipes.io.open import open_url
from wds_pipes.io.outputs import refuse
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import below, local_path, redact
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.keys import without_dots
from wds_pipes.tar.reader import TarReader
from wds_pipes.tools.files import Content, Problems, file_of, is_chosen, is_in, listed
from wds_pipes.tools.outputs import StorageOptions, names_of
from wds_pipes.tools.rows import KEY, Numbers, Row, extension_of, is_text

_MOST_IN_TAR = 1 << 50  # bytes of a file in a tar: its data is not read where files are listed
_READ = 1 << 20  # bytes that are read at once from a store


class Run(NamedTuple):
    """Records of a file, one after the other.

    Attributes:
        file: the file.
        start: where the first of them is, in the words of the format.
        records: how many there are; None: all to the end of the file.
        number: the number of the first one in the data set, or in the file if ``records`` is None.
    """

    file: Content
    start: Any = 0
    records: int | None = None
    number: int = 0


class Shard(NamedTuple):
    """A shard to be written.

    Attributes:
        name: its name.
        runs: its records.
        prefix: what the keys begin with, if they are numbers.
    """

    name: str
    runs: tuple[Run, ...]
    prefix: str = ""


class Format(Protocol):
    """A module that reads a format."""

    def shards(self, source: str, max_samples: int, storage_options: StorageOptions) -> list[Shard]:
        """Divide a data set into shards."""

    def rows(self, run: Run, storage_options: StorageOptions) -> Iterator[Row]:
        """Read records: their values by the names of columns."""


def found_files(source: str, endings: Sequence[str], storage_options: StorageOptions) -> list[tuple[str, Content]]:
    """The files of a directory with these endings, or those that a path or pattern names, with
    their names relative to their common directory.

    Raises:
        ValueError: there are none.
        ShardError: one does not exist.
    """
    path = local_path(source)
    if source.endswith("/") or (path is not None and os.path.isdir(path)):
        problems = Problems()
        links = f"name such files by a pattern, 'SOURCE/*{endings[0]}'"
        everything = list(listed(source, (), links, problems, storage_options))
        problems.check()
        files = [
            (name, file)
            for name, file in everything
            if any(ending in os.path.basename(name).lower() for ending in endings)
        ]
        if not files:
            raise ValueError(f"there is no file *{' or *'.join(endings)} in {redact(source)}: check the directory")
        return files
    urls = expand([source], storage_options)
    return [(name, file_of(url, storage_options)) for name, url in zip(names_of(urls), urls, strict=True)]


def local_only(source: str, what: str) -> str:
    """The local path of a source that is read by mapping its files into memory.

    Raises:
        ValueError: it is not local.
    """
    path = local_path(source)
    if path is None:
        raise ValueError(f"{what} is read from a local disk: copy {redact(source)} there, and name the copy")
    return path


@contextmanager
def opened(url: str, storage_options: StorageOptions) -> Iterator[BinaryIO]:
    """A file from which any bytes can be read.

    Raises:
        SampleError: what was done with it failed, since it is cut or damaged.
    """
    path = local_path(url)
    with readable(url, storage_options):
        if url == "-":
            file: Any = io.BytesIO(sys.stdin.buffer.read())
        else:
            file = open(path, "rb") if path is not None else io.BufferedReader(_Remote(url, storage_options), _READ)
        with file:
            yield file


class _Remote(io.RawIOBase):
    """A file of a store, of which ranges are read."""

    def __init__(self, url: str, storage_options: StorageOptions) -> None:
        self._url, self._at, self._size = url, 0, file_of(url, storage_options).size
        self._reader = RangeReader(storage_options, 1)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._at + len(buffer))
        if stop <= self._at:
            return 0
        part, start = self._reader.read_one(self._url, self._at, stop, self._size)
        buffer[: stop - self._at] = part[self._at - start : stop - start]
        count, self._at = stop - self._at, stop
        return count


class _Part(_Remote):
    """A part of a file that is open."""

    def __init__(self, stream: BinaryIO, start: int, size: int) -> None:
        self._stream, self._start, self._at, self._size = stream, start, 0, size

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._at)
        data = self._stream.read(min(len(buffer), max(0, self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def files_in_tar(
    source: str, ignore: Sequence[str], problems: Problems, storage_options: StorageOptions
) -> list[tuple[str, Content]]:
    """The files in a tar that is not compressed, and in the tars in it, where they are: nothing is
    unpacked. The name of an inner tar, without its extension, is a directory, as in ImageNet, whose
    inner tars are classes.

    Raises:
        ShardError: a tar is damaged, or compressed.
    """
    whole, found = file_of(source, storage_options), list[tuple[str, Content]]()
    with opened(source, storage_options) as outer, opened(source, storage_options) as again:
        for name, size, start in _members(outer, redact(source), 0, ignore, problems):
            if TAR_NAME.fullmatch(os.path.basename(name)) is None:
                found.append((name, whole._replace(size=size, start=start)))
                continue
            part, folder = io.BufferedReader(_Part(again, start, size)), name.rpartition(".tar")[0] or name
            for inner, of_inner, at in _members(part, f"{redact(source)}, {name}", start, ignore, problems):
                if TAR_NAME.fullmatch(os.path.basename(inner)) is not None:
                    problems.add(f"{name} has a tar, {inner}: tars are read in a tar, but not in a tar in a tar")
                found.append((f"{folder}/{inner}", whole._replace(size=of_inner, start=at)))
    return found


def _members(
    stream: Any, url: str, start: int, ignore: Sequence[str], problems: Problems
) -> Iterator[tuple[str, int, int]]:
    """The files in a tar that begins at ``start``: their names, sizes, and where their bytes
    begin.
    """
    reader = TarReader(stream, url=url, want=lambda name: False, max_member_bytes=_MOST_IN_TAR)
    for member in reader:
        header, size, plain = reader.skipped
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        name = "/".join(parts)
        if ".." in parts or (is_chosen(name, ignore) and not plain):
            why = "has '..' in its name" if plain else "is stored in parts (a sparse file)"
            problems.add(f"{member.name!r:.300} of {url} {why}: unpack the tar, and name the directory")
        elif is_chosen(name, ignore):
            yield name, size, start + header + BLOCK


@contextmanager
def readable(url: str, storage_options: StorageOptions = None) -> Iterator[None]:
    """Make a SampleError of what libraries raise if a file is cut or damaged."""
    try:
        yield
    except WdsError:
        raise
    except Exception as error:
        if not isinstance(error, (ValueError, NotImplementedError, *unreadable())):  # pyarrow raises any of them
            raise
        if local_path(url) is None and isinstance(error, OSError):
            refuse(url, error, storage_options, "read")
        told = str(error).strip().rstrip(".")
        raise SampleError(f"{redact(url)} cannot be read: {told}: write or fetch it again", url=redact(url)) from error


def divided(files: Iterable[tuple[Content, int]], max_samples: int, name: str = "shard") -> list[Shard]:
    """Divide the records of files, each with how many it has, into shards of ``max_samples``, whose
    names begin with ``name``.
    """
    shards: list[list[Run]] = []
    number = 0
    for file, count in files:
        done = 0
        while done < count:
            room = max_samples - number % max_samples
            if room == max_samples:
                shards.append([])
            taken = min(room, count - done)
            shards[-1].append(Run(file, done, taken, number))
            done, number = done + taken, number + taken
    return [Shard(f"{name}-{place:06d}.tar", tuple(runs)) for place, runs in enumerate(shards)]


def read(reader: Format, shard: Shard, storage_options: StorageOptions) -> Iterator[tuple[str, Row]]:
    """Read the records of a shard, with the key of each by its number.

    Raises:
        StateError: a file was changed after it was listed.
    """
    for run in shard.runs:
        if local_path(run.file.url) is None or not os.path.isdir(run.file.url):
            now = file_of(run.file.url, storage_options)
            if (now.size, now.mark) != (run.file.size, run.file.mark):
                raise StateError(
                    f"{redact(run.file.url)} was changed after it was listed: run the command again when no program "
                    "writes it"
                )
        for number, row in enumerate(reader.rows(run, storage_options), run.number):
            yield f"{shard.prefix}{number:09d}", row


_ROWS = 64  # that are converted to Python objects at a time


class Parquet:
    """Parquet files."""

    def shards(
        self, source: str, max_samples: int, storage_options: StorageOptions, max_bytes: int | None = None
    ) -> list[Shard]:
        """Divide the rows of files into shards; only their ends are read. With ``max_bytes``, a
        shard has at most as many rows as are so long on average.
        """
        files, size = [], 0
        for _, file in found_files(source, (".parquet",), storage_options):
            with parquet_file(file.url, storage_options) as table:
                files.append((file, table.metadata.num_rows))
                size += sum(table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups))
        if max_bytes is not None and size:
            max_samples = min(max_samples, max(1, max_bytes * sum(rows for _, rows in files) // size))
        return divided(files, max_samples)

    def rows(self, run: Run, storage_options: StorageOptions) -> Iterator[Row]:
        """Read rows of a file."""
        with parquet_file(run.file.url, storage_options) as table:
            counts = [table.metadata.row_group(group).num_rows for group in range(table.metadata.num_row_groups)]
            passed = sum(end <= run.start for end in accumulate(counts))  # groups before the first row
            batches = table.iter_batches(batch_size=_ROWS, row_groups=list(range(passed, len(counts))))
            yield from rows_of(batches, run.start - sum(counts[:passed]), run.records, run.file.url)

    def classes(self, run: Run, storage_options: StorageOptions) -> dict[str, list[str]]:
        """The names of the classes of columns that have numbers of classes."""
        with parquet_file(run.file.url, storage_options) as table:
            return _classes(table.schema_arrow)


class Saved:
    """A data set that ``datasets`` has saved to a disk."""

    def shards(self, source: str, max_samples: int, storage_options: StorageOptions) -> list[Shard]:
        """Divide the rows into shards, those of each split by themselves."""
        folder = local_only(source, "a saved data set")
        if not os.path.isfile(os.path.join(folder, "dataset_dict.json")):
            return divided(self._files(folder, folder), max_samples)
        return [
            shard
            for name in _names(folder, "dataset_dict.json", "splits")
            for shard in divided(self._files(below(folder, name), folder), max_samples, f"{name}/{name}")
        ]

    def _files(self, folder: str, source: str) -> Iterator[tuple[Any, int]]:
        for name in _names(folder, "state.json", "_data_files"):
            file = file_of(below(folder, name))
            if not is_in(os.path.realpath(file.url), source):
                raise ValueError(
                    f"{file.url} is a link out of SOURCE, or below one: copy the data set with its files (cp -rL), and "
                    "name the copy"
                )
            with _arrow(file.url) as batches:
                yield file, sum(batch.num_rows for batch in batches)

    def rows(self, run: Run, storage_options: StorageOptions) -> Iterator[Row]:
        """Read rows of a file."""
        with _arrow(run.file.url) as batches:
            yield from rows_of(batches, run.start, run.records, run.file.url)

    def classes(self, run: Run, storage_options: StorageOptions) -> dict[str, list[str]]:
        """The names of the classes of columns that have numbers of classes."""
        with _arrow(run.file.url) as batches:
            return _classes(batches.schema)


def _names(folder: str, file: str, of: str) -> list[str]:
    """The names of splits or files in a list of a JSON file."""
    path = os.path.join(folder, file)
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        names = [str(one["filename"] if isinstance(one, dict) else one) for one in content[of]]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder} has no {file} of a data set: name the directory that dataset.save_to_disk() has written, or its "
            "Parquet files with --from parquet"
        ) from error
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} has no names in {of!r} ({error}): save the data set again") from error
    if content.get("_indices_data_files"):
        raise ValueError(f"{folder} has a selection of its rows beside them: load it, and save it with a new version")
    return names


def check_columns(names: Sequence[str], source: str) -> None:
    """Raise SampleError if two columns of a table have one name: one of them would be lost."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SampleError(f"{redact(source)} has two columns {twice!r}: rename one of them", url=redact(source))


def _classes(schema: Any) -> dict[str, list[str]]:
    """What the features of Hugging Face say of columns of labels."""
    known = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (known.get("info") or {}).get("features") or {}
    return {name: one["names"] for name, one in features.items() if one.get("_type") == "ClassLabel" and "names" in one}


def rows_of(batches: Any, skip: int, count: int | None, url: str) -> Iterator[Row]:
    """Read ``count`` rows of Arrow's batches, after the first ``skip``."""
    left = count or 0
    for batch in batches:
        check_columns(batch.schema.names, url)
        part = batch.slice(min(skip, batch.num_rows), left)
        skip, left = max(0, skip - batch.num_rows), left - part.num_rows
        for start in range(0, part.num_rows, _ROWS):
            some = part.slice(start, _ROWS)
            some.validate(full=True)  # offsets that are damaged would be read anywhere in memory
            yield from values_of(some)
        if not left:
            return


def values_of(batch: Any) -> list[Row]:
    """Return the rows of a batch. Times in nanoseconds, which Python does not have, are text, and
    durations numbers. Tensors are arrays, and lists of numbers are ``Numbers``.
    """
    arrow = library("pyarrow", "pyarrow", "parquet", extra="parquet")
    types, columns = arrow.types, []
    for column in batch.columns:
        if getattr(column.type, "unit", "") == "ns":
            column = column.cast(arrow.int64() if types.is_duration(column.type) else arrow.string())
        columns.append(column)
    rows: list[Row] = arrow.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
    for field, column in zip(batch.schema, columns, strict=True):
        tensors = isinstance(column.type, arrow.FixedShapeTensorType) and len(column)
        arrays, numbers = column.to_numpy_ndarray() if tensors else (), _numbers(types, field)
        for place, row in enumerate(rows if tensors or numbers else ()):
            if row[field.name] is not None:
                row[field.name] = Numbers(row[field.name], *numbers) if numbers else arrays[place]
    return rows


def _numbers(types: Any, field: Any) -> tuple[Any, tuple[int, ...] | None] | None:
    """The dtype of the numbers in a column of lists, and the lengths of the inner lists, which is
    None if they may differ; None: it is another column.
    """
    kind, sizes = field.type, list[int | None]()
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        sizes.append(kind.list_size if types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    if not sizes or not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    about = field.metadata or {}
    if about.get(b"ARROW:extension:name", b"").startswith(b"datasets.features."):  # Array2D to Array5D
        sizes = json.loads(about[b"ARROW:extension:metadata"])[0]
    inner = tuple(size for size in sizes[1:] if size is not None)
    return kind.to_pandas_dtype(), inner if len(inner) == len(sizes) - 1 else None


@contextmanager
def parquet_file(url: str, storage_options: StorageOptions) -> Iterator[Any]:
    """A Parquet file; ``-`` is standard input."""
    parquet = library("pyarrow.parquet", "pyarrow", "parquet", extra="parquet")
    with opened(url, storage_options) as stream:
        yield parquet.ParquetFile(stream)


@contextmanager
def _arrow(path: str) -> Iterator[Any]:
    arrow = library("pyarrow", "pyarrow", "a saved data set", extra="parquet")
    with readable(path), arrow.memory_map(path) as mapped, arrow.ipc.open_stream(mapped) as batches:
        yield batches


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
