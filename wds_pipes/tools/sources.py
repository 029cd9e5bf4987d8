"""A data set of another format: its files, and how its records are divided into shards.

Rules:
1. Where the files say how many records they have, a shard has ``max_samples`` of them, whatever
   file they are in. A TFRecord file does not say it: it becomes one shard.
2. The records are not read before the tasks run, besides the first ones, which decide what the
   fields are: see ``rows``.

Parquet files, and data sets that Hugging Face ``datasets`` has saved to a disk, in Arrow files.

Images and audio are in them as ``{"bytes": ..., "path": ...}``: see ``rows``.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, islice
from typing import Any, BinaryIO, NamedTuple, Protocol

from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError, StateError, WdsError
from wds_pipes.io.compression import unreadable
from wds_pipes.io.expand import expand
from wds_pipes.io.outputs import refuse
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import below, local_path, redact
from wds_pipes.tools.files import Content, Problems, file_of, is_in, listed
from wds_pipes.tools.outputs import StorageOptions, names_of
from wds_pipes.tools.rows import Numbers, Row

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


def first_rows(reader: Format, shards: Sequence[Shard], count: int, storage_options: StorageOptions) -> list[Row]:
    """The first records of a data set."""
    runs = chain.from_iterable(shard.runs for shard in shards)
    return list(islice(chain.from_iterable(reader.rows(run, storage_options) for run in runs), count))


_ROWS = 64  # that are converted to Python objects at a time


class Parquet:
    """Parquet files."""

    def shards(self, source: str, max_samples: int, storage_options: StorageOptions) -> list[Shard]:
        """Divide the rows of files into shards; only their ends are read."""
        files = []
        for _, file in found_files(source, (".parquet",), storage_options):
            with parquet_file(file.url, storage_options) as table:
                files.append((file, table.metadata.num_rows))
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
