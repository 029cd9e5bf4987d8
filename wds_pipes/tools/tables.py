"""Samples of tables: lists of paths with labels, CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import IO, cast

from wds_pipes.codecs.table import encode
from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.io.open import open_url
from wds_pipes.io.urls import is_below, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.keys import without_dots
from wds_pipes.tools.files import LABEL, Content, Grouping, Problems, Record, add_labels
from wds_pipes.tools.outputs import REQUESTS, StorageOptions
from wds_pipes.tools.rows import Row, add_chosen, add_field, check_known, key_of, plain_value
from wds_pipes.tools.sources import check_columns, opened, values_of

_AHEAD = 1024  # rows
_MOST_OF_FIELD = 1 << 30  # characters


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what.

    Attributes:
        key: the column of the keys; None: the number of the row is the key.
        files: the columns of paths or URLs of files, by their fields; "": the extension of the file
            is the field.
        values: the columns of values, by their fields.
        root: the directory of relative paths; None: that of the table.
    """

    key: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    root: str | None = None

    @property
    def names(self) -> list[str]:
        """Those that are named."""
        return [*([self.key] if self.key else []), *(name for _, name in self.files), *self.values.values()]


def of_list(
    source: str, root: str | None, key_split: str | None, problems: Problems, storage_options: StorageOptions
) -> tuple[list[Record], list[str]]:
    """The samples of a list: lines with a path or URL, and a label after a tab or the last blank.
    The label is the field ``cls``: the integer, or the number of the name.

    Returns:
        The samples, and the sorted names of the classes, which is empty if labels are integers.
    """
    base, grouping = _base(source, root), Grouping(key_split, problems)
    labels: dict[str, str] = {}
    with _text(source, storage_options) as text:
        lines = {number: line.strip() for number, line in enumerate(text, 1) if line.strip()}
    pairs = [line.rsplit("\t" if "\t" in line else None, 1) for line in lines.values()]
    contents = _contents([pair[0].strip() for pair in pairs], source, base, storage_options)
    for (number, line), (path, *label), content in zip(lines.items(), pairs, contents, strict=True):
        if content is None and label and "\t" not in line:  # the blank may be one of the path
            [content] = _contents([line], source, base, storage_options)
            path, label = (path, label) if content is None else (line, [])
        if content is None:
            problems.add(
                f"line {number}: {redact(_join(base, path.strip()))} is no file that can be found: check the path, "
                "write a tab before a label that has blanks, or pass --root DIRECTORY if paths are relative to another "
                "one than that of the list"
            )
            continue
        key = grouping.add(_name(path.strip(), base), content)
        if key is not None and label and labels.setdefault(key, label[0].strip()) != label[0].strip():
            problems.add(f"line {number}: sample {key!r} has the labels {labels[key]!r} and {label[0].strip()!r}")
    records = grouping.records()
    return records, add_labels(records, [labels.get(record.key) for record in records], problems)


def of_table(
    source: str, kind: str, columns: Columns, problems: Problems, storage_options: StorageOptions
) -> tuple[list[Record], list[str]]:
    """The samples of a table, one for each row. Labels, which are values for the field ``cls``, are
    numbers of names as in ``of_list``.

    Returns:
        The samples, and the sorted names of the classes, which is empty if labels are integers.

    Raises:
        ValueError: the table has no such column, or is none.
    """
    base, records, labels = _base(source, columns.root), list[Record](), list[str | None]()
    rows = enumerate(_rows(source, kind, storage_options), 1)
    while ahead := list(islice(rows, _AHEAD)):
        check_known(columns.names if not records else (), ahead[0][1], redact(source))
        paths = list({str(row[column]) for _, row in ahead for _, column in columns.files if row.get(column)})
        found = dict(zip(paths, _contents(paths, source, base, storage_options), strict=True))
        for number, row in ahead:
            try:
                label = _label(row, columns.values.get(LABEL))
                records.append(_record(row, f"{number - 1:09d}", columns, base, found))
                labels.append(label)
            except SampleError as error:
                problems.add(f"row {number}: {error}")
    return records, add_labels(records, labels, problems)


def _record(row: Row, number: str, columns: Columns, base: str, found: Mapping[str, Content | None]) -> Record:
    """The sample of a row, without its label.

    Raises:
        SampleError: it has no such sample.
    """
    key = number if columns.key is None else without_dots(key_of(row.get(columns.key), columns.key, number))
    fields: dict[str, Content | bytes] = {}
    for name, column in columns.files:
        path = row.get(column)
        if isinstance(path, (bytes, dict, list)):
            raise SampleError(
                f"column {column!r} has no path, but {type(path).__name__}: pass --value {name or 'jpg'}={column} for "
                "bytes, or write the table with wds-pipes convert"
            )
        if path:
            content, extension = found[str(path)], os.path.splitext(str(path))[1][1:].lower()
            if content is None:
                raise SampleError(
                    f"{redact(_join(base, str(path)))} cannot be found: check the path, or pass --root DIRECTORY if "
                    "paths are relative to another one than that of the table"
                )
            if not name and not extension:
                raise SampleError(f"{path} has no extension: name its field, as in --file jpg={column}")
            add_field(fields, name or extension, content, column, key)
    add_chosen(fields, row, [(name, column) for name, column in columns.values.items() if name != LABEL], key)
    if not columns.values and not columns.files:
        fields["json"] = encode("json", plain_value(row))
    return Record(key, fields)


def _label(row: Row, column: str | None) -> str | None:
    value = None if column is None else row.get(column)
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).strip():
        raise SampleError(f"column {column!r} has no label, but {value!r:.80}: give it a text or an integer")
    return str(value).strip()


def grouped(records: Sequence[Record], count: int) -> list[Record]:
    """Samples of ``count`` rows each, as JSON lines, with the keys of their first rows."""
    groups = (records[start : start + count] for start in range(0, len(records), count))
    return [
        Record(group[0].key, {"jsonl": b"".join(cast("bytes", row.fields["json"]) + b"\n" for row in group)})
        for group in groups
    ]


def _rows(source: str, kind: str, storage_options: StorageOptions) -> Iterator[Row]:
    if kind == "parquet":
        pyarrow = library("pyarrow.parquet", "pyarrow", "parquet")
        with opened(source, storage_options) if source != "-" else io.BytesIO(sys.stdin.buffer.read()) as file:
            table = pyarrow.ParquetFile(file)
            check_columns(table.schema_arrow.names, source)
            for batch in table.iter_batches():
                yield from values_of(batch)
        return
    with _text(source, storage_options) as text:
        yield from _json_lines(text, source) if kind == "jsonl" else _separated(text, kind, source)


def _json_lines(text: Iterable[str], source: str) -> Iterator[Row]:
    for number, line in enumerate(text, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {redact(source)} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of {redact(source)} is no JSON object")
            yield row


def _separated(text: Iterator[str], kind: str, source: str) -> Iterator[Row]:
    """The rows of CSV or TSV. Spreadsheets separate columns by semicolons where commas are in
    numbers.
    """
    csv.field_size_limit(_MOST_OF_FIELD)
    first = next(text, "")
    comma = "\t" if kind == "tsv" else ";" if ";" in first and "," not in first else ","
    table = csv.DictReader(chain([first], text), delimiter=comma, strict=True)
    try:
        check_columns(table.fieldnames or [], source)
        for row in table:
            wrong = None
            if None in row or None in row.values():
                wrong = f"not as many columns as the first line, {len(table.fieldnames or [])}"
            elif kind == "tsv" and any("\t" in value or "\n" in value for value in row.values()):
                wrong = "a value in quotes that has a tab or several lines"
            if wrong:
                raise ValueError(f"line {table.line_num} of {redact(source)} ends a row that has {wrong}: mend it")
            yield row
    except csv.Error as error:
        raise ValueError(f"line {table.reader.line_num} of {redact(source)} is no {kind.upper()}: {error}") from error


@contextmanager
def _text(source: str, storage_options: StorageOptions) -> Iterator[IO[str]]:

    owned = source != "-"
    file = open_url(source, storage_options=storage_options) if owned else sys.stdin.buffer
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    try:
        yield text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{redact(source)} is not UTF-8 text ({error.reason}): save a list or table as UTF-8, as with iconv -f "
            "UTF-16 -t UTF-8"
        ) from error
    finally:
        text.detach()
        if owned:
            file.close()


def _contents(names: list[str], source: str, base: str, storage_options: StorageOptions) -> list[Content | None]:
    """What is known of the files that a list or table names; None: there is none.

    Raises:
        ValueError: one is on this machine, the list is elsewhere, and no --root says that it may be
            read.
    """
    urls = [_join(base, name) for name in names]
    inside = [path for url in urls if (path := local_path(url)) is not None]
    if local_path(source) is None:
        for path in inside:
            if local_path(base) is None or not is_below(os.path.relpath(path, base)):
                raise ValueError(
                    f"{redact(source)} names {path}, a file of this machine, and such a list names only what is in "
                    "--root DIRECTORY: pass the directory that it may read, or name a copy of the list on a disk"
                )

    def look(url: str) -> Content | None:
        (size, mark, _), path = version_of(url, storage_options), local_path(url)
        if size is None or (path is not None and not os.path.isfile(path)):
            return None
        return Content(path or url, size, mark or "")

    if len(inside) == len(urls):
        return [look(url) for url in urls]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(look, urls))


def _base(source: str, root: str | None) -> str:
    """The directory of relative paths."""
    return root if root is not None else "" if source == "-" else source.rpartition("/")[0]


def _join(base: str, path: str) -> str:
    return path if not base or local_path(path) != path or path.startswith("/") else f"{base.rstrip('/')}/{path}"


def _name(path: str, base: str) -> str:
    """The name of a file that gives its key: relative to the directory, without a scheme."""
    name = path.removeprefix(f"{base.rstrip('/')}/") if base else path
    name = name.partition("?")[0].partition("://")[2] if local_path(name) is None else name
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))
