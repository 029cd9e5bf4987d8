"""Parquet files, and data sets that Hugging Face ``datasets`` has saved to a disk, in Arrow files.

Images and audio are in them as ``{"bytes": ..., "path": ...}``: see ``rows``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from wds_pipes.cli.converting.rows import Numbers
from wds_pipes.cli.converting.source import (
    Options,
    Row,
    Run,
    Shard,
    divided,
    found_files,
    local_only,
    opened,
    readable,
)
from wds_pipes.cli.creating.files import file_of, is_in
from wds_pipes.cli.creating.tables import check_columns
from wds_pipes.core.importing import library
from wds_pipes.core.words import listed
from wds_pipes.io.urls import below, redact

# A file of a data set of Hugging Face.
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)-[0-9]{5}-of-[0-9]{5}\.parquet")
_ROWS = 64  # that are converted to Python objects at a time


class Parquet:
    """Parquet files."""

    def shards(self, source: str, max_samples: int, storage_options: Options) -> list[Shard]:
        """Divide the rows of files into shards; only their ends are read."""
        files, found = [], found_files(source, (".parquet",), storage_options)
        if named := [name for name, _ in found if "=" in name.rpartition("/")[0]]:
            raise ValueError(
                f"{named[0]} is in a directory that is the value of a column, which its rows do not have: write the "
                "columns into the files, as with pyarrow.dataset.dataset(SOURCE, partitioning='hive').to_batches()"
            )
        splits = {split[1] for name, _ in found if (split := _SPLIT.fullmatch(name.rpartition("/")[2]))}
        if len(splits) > 1:
            raise ValueError(
                f"{redact(source)} has the splits {listed(sorted(splits))}, which would be mixed: convert one after "
                f"the other, such as 'SOURCE/{min(splits)}-*.parquet'"
            )
        for _, file in found:
            with _parquet(file.url, storage_options) as table:
                files.append((file, table.metadata.num_rows))
        return divided(files, max_samples)

    def rows(self, run: Run, storage_options: Options) -> Iterator[Row]:
        """Read rows of a file."""
        with _parquet(run.file.url, storage_options) as table:
            skip, groups = run.start, list[int]()
            for group in range(table.metadata.num_row_groups):
                count = table.metadata.row_group(group).num_rows
                if not groups and skip >= count:
                    skip -= count
                else:
                    groups.append(group)
            batches = table.iter_batches(batch_size=_ROWS, row_groups=groups)
            yield from rows_of(batches, skip, run.records, run.file.url)

    def classes(self, run: Run, storage_options: Options) -> dict[str, list[str]]:
        """The names of the classes of columns that have numbers of classes."""
        with _parquet(run.file.url, storage_options) as table:
            return _classes(table.schema_arrow)


class Saved:
    """A data set that ``datasets`` has saved to a disk."""

    def shards(self, source: str, max_samples: int, storage_options: Options) -> list[Shard]:
        """Divide the rows into shards, those of each split by themselves."""
        folder = local_only(source, "a saved data set")
        splits = _names(os.path.join(folder, "dataset_dict.json"), "splits", lambda name: name)
        if splits is None:
            return divided(self._files(folder, folder), max_samples)
        return [
            shard
            for name in splits
            for shard in divided(self._files(below(folder, name), folder), max_samples, f"{name}/{name}")
        ]

    def _files(self, folder: str, source: str) -> Iterator[tuple[Any, int]]:
        names = _names(os.path.join(folder, "state.json"), "_data_files", lambda entry: entry["filename"])
        if names is None:
            raise ValueError(
                f"{folder} has no state.json of a data set: name the directory that dataset.save_to_disk() has "
                "written, or its Parquet files with --from parquet"
            )
        if _selects(os.path.join(folder, "state.json")):
            raise ValueError(
                f"{folder} has a selection of its rows beside them, as old versions of datasets saved it: load it and "
                "save it again with a new version"
            )
        for name in names:
            file = file_of(below(folder, name))
            if not is_in(os.path.realpath(file.url), source):
                raise ValueError(
                    f"{file.url} is a link out of SOURCE, or below one: copy the data set with its files (cp -rL), and "
                    "name the copy"
                )
            with _arrow(file.url) as batches:
                yield file, sum(batch.num_rows for batch in batches)

    def rows(self, run: Run, storage_options: Options) -> Iterator[Row]:
        """Read rows of a file."""
        with _arrow(run.file.url) as batches:
            yield from rows_of(batches, run.start, run.records, run.file.url)

    def classes(self, run: Run, storage_options: Options) -> dict[str, list[str]]:
        """The names of the classes of columns that have numbers of classes."""
        with _arrow(run.file.url) as batches:
            return _classes(batches.schema)


def _classes(schema: Any) -> dict[str, list[str]]:
    """What the features of Hugging Face say of columns of labels."""
    known = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (known.get("info") or {}).get("features") or {}
    return {name: one["names"] for name, one in features.items() if one.get("_type") == "ClassLabel" and "names" in one}


def rows_of(batches: Any, skip: int, count: int | None, url: str) -> Iterator[Row]:
    """Read ``count`` rows of Arrow's batches, after the first ``skip``."""
    left = count or 0
    for batch in batches:
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        check_columns(batch.schema.names, url)
        batch, skip = batch.slice(skip, left), 0
        left -= batch.num_rows
        for start in range(0, batch.num_rows, _ROWS):
            part = batch.slice(start, _ROWS)
            part.validate(full=True)  # offsets that are damaged would be read anywhere in memory
            yield from values_of(part)
        if not left:
            return


def values_of(batch: Any) -> list[Row]:
    """Return the rows of a batch. Times in nanoseconds, which Python does not have, are text, and
    durations numbers. Tensors are arrays, and lists of numbers are ``Numbers``.
    """
    arrow = library("pyarrow", "pyarrow", "parquet", extra="parquet")
    columns = []
    for column in batch.columns:
        if arrow.types.is_duration(column.type) and column.type.unit == "ns":
            column = column.cast(arrow.int64())
        elif (arrow.types.is_timestamp(column.type) or arrow.types.is_time64(column.type)) and column.type.unit == "ns":
            column = column.cast(arrow.string())
        columns.append(column)
    rows: list[Row] = arrow.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
    for field, column in zip(batch.schema, columns, strict=True):
        name = field.name
        if isinstance(column.type, arrow.FixedShapeTensorType):
            for row, tensor in zip(rows, column.to_numpy_ndarray() if len(column) else (), strict=True):
                row[name] = None if row[name] is None else tensor
        elif (numbers := _numbers(arrow.types, field)) is not None:
            for row in rows:
                row[name] = None if row[name] is None else Numbers(row[name], *numbers)
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
def _parquet(url: str, storage_options: Options) -> Iterator[Any]:
    parquet = library("pyarrow.parquet", "pyarrow", "parquet", extra="parquet")
    with opened(url, storage_options) as stream:
        yield parquet.ParquetFile(stream)


@contextmanager
def _arrow(path: str) -> Iterator[Any]:
    arrow = library("pyarrow", "pyarrow", "a saved data set", extra="parquet")
    with readable(path), arrow.memory_map(path) as mapped, arrow.ipc.open_stream(mapped) as batches:
        yield batches


def _names(path: str, of: str, name: Callable[[Any], Any]) -> list[str] | None:
    """The names in a list of a JSON file; None: there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            names = list(map(name, json.load(file)[of]))
        if not all(isinstance(one, str) for one in names):
            raise TypeError("they are no strings")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} has no names in {of!r} ({error}): save the data set again") from error
    return names


def _selects(path: str) -> bool:
    """Whether a state says that only some rows are of the data set, as old versions saved it."""
    with open(path, encoding="utf-8") as file:
        return bool(json.load(file).get("_indices_data_files"))
