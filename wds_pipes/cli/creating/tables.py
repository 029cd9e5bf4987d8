"""Samples of tables: lists of paths with labels, CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec
from itertools import chain, islice
from typing import IO, Any, cast

from wds_pipes.cli.creating.labels import LABEL, classes_of
from wds_pipes.cli.creating.names import Grouping
from wds_pipes.cli.creating.records import Content, Problems, Record
from wds_pipes.cli.shards import check_complete
from wds_pipes.core.importing import library
from wds_pipes.core.suggest import nearest
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError
from wds_pipes.io.urls import is_below, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.keys import without_dots

_REQUESTS, _AHEAD = 16, 1024
_MOST_OF_FIELD = 1 << 30  # characters

Options = dict[str, Any] | None


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


def of_list(
    source: str, root: str | None, key_split: str | None, problems: Problems, storage_options: Options
) -> tuple[list[Record], list[str]]:
    """The samples of a list: lines with a path or URL, and a label after a tab or the last blank.
    The label is the field ``cls``: the integer, or if not all are integers, the number of the name.

    Returns:
        The samples, and the sorted names of the classes, which is empty if labels are integers.
    """
    base, grouping = _base(source, root), Grouping(key_split, problems)
    labels: dict[str, str] = {}
    lines: list[tuple[int, str, str | None]] = []
    whole: dict[int, str] = {}  # lines in which a blank may also be one of the path, by their numbers
    with _text(source, storage_options) as text:
        for number, line in enumerate(text, 1):
            if line := line.strip():
                path, *rest = line.rsplit("\t", 1) if "\t" in line else line.rsplit(None, 1)
                if rest and "\t" not in line:
                    whole[number] = line
                lines.append((number, path.strip(), rest[0].strip() if rest else None))
    contents = _contents([path for _, path, _ in lines], source, base, storage_options)
    for (number, path, label), content in zip(lines, contents, strict=True):
        if content is None and number in whole:
            [content] = _contents([whole[number]], source, base, storage_options)
            path, label = (path, label) if content is None else (whole[number], None)
        if content is None:
            problems.add(
                f"line {number}: {redact(_join(base, path))} is no file that can be found: check the path, write a tab "
                "before a label that has blanks, or pass --root DIRECTORY if paths are relative to another one than "
                "that of the list"
            )
            continue
        key = grouping.add(_name(path, base), content)
        if key is not None and label is not None and labels.setdefault(key, label) != label:
            problems.add(f"line {number}: sample {key!r} has the labels {labels[key]!r} and {label!r}")
    records = grouping.records()
    if labels and len(labels) < len(records):
        bare = next(record.key for record in records if record.key not in labels)
        problems.add(f"sample {bare!r} has no label, and others have: write 'PATH LABEL' in each line, or in none")
    classes, of_names = classes_of(labels.values())
    for record in records:
        if (label := labels.get(record.key)) is not None:
            record.fields[LABEL] = of_names[label]
    return records, classes


def of_table(
    source: str, kind: str, columns: Columns, problems: Problems, storage_options: Options
) -> tuple[list[Record], list[str]]:
    """The samples of a table, one for each row. Labels, which are values for the field ``cls``, are
    numbers of names as in ``of_list``.

    Returns:
        The samples, and the sorted names of the classes, which is empty if labels are integers.

    Raises:
        ValueError: the table has no such column, or is none.
    """
    from wds_pipes.cli.converting.rows import by_content, encode_list, plain_value
    from wds_pipes.codecs.encoding import NoEncoderError

    base, records = _base(source, columns.root), list[Record]()
    numbers: list[int] = []  # the rows of the records
    labels: dict[int, str] = {}  # by the row
    unlabelled: list[int] = []  # rows
    rows, number = enumerate(_rows(source, kind, columns, storage_options), 1), 0
    while ahead := list(islice(rows, _AHEAD)):
        for number, row in ahead:
            for name, column in columns.files:
                if isinstance(row.get(column), (bytes, dict, list)):
                    bare = isinstance(row[column], bytes)
                    mend = f"pass --value {name or 'jpg'}={column}" if bare else "write it with wds-pipes convert"
                    raise ValueError(
                        f"row {number} of {redact(source)} has no path in column {column!r}, but "
                        f"{type(row[column]).__name__}: {mend}"
                    )
        wanted = [str(row[column]) for _, row in ahead for _, column in columns.files if row.get(column)]
        found = dict(zip(wanted, _contents(wanted, source, base, storage_options), strict=True))
        for number, row in ahead:
            fields: dict[str, Content | bytes] = {}
            before = problems.count
            for name, column in columns.files:
                if not row.get(column):
                    continue
                path = str(row[column])
                content, label = found[path], name or path.rpartition("/")[2].rpartition(".")[2].lower()
                if content is None:
                    problems.add(
                        f"row {number}: {redact(_join(base, path))} cannot be found: check the path, or pass --root "
                        "DIRECTORY if paths are relative to another one than that of the table"
                    )
                elif not name and "." not in path.rpartition("/")[2]:
                    problems.add(f"row {number}: {path} has no extension: name its field, as in --file jpg={column}")
                elif label in fields:
                    problems.add(f"row {number}: two files are field {label!r}: name them, as in --file jpg={column}")
                else:
                    fields[label] = content
            values: dict[str, Any] = {name: row.get(column) for name, column in columns.values.items()}
            if not columns.values and not columns.files:
                values["json"] = row if kind != "parquet" else plain_value(row)
            for name, value in values.items():
                if name == LABEL and isinstance(value, (str, int)) and not isinstance(value, bool):
                    labels[number] = str(value).strip()
                    if not labels[number]:
                        problems.add(f"row {number} has no label in column {columns.values[LABEL]!r}: give it one")
                elif name == LABEL and value is None:
                    unlabelled.append(number)
                elif value is not None:
                    try:
                        data = encode_list(name, value)
                        name = by_content(name, data)
                        if name in fields:
                            problems.add(f"row {number}: two values are field {name!r}: name one of them otherwise")
                        fields[name] = data
                    except NoEncoderError as error:
                        raise ValueError(
                            f"--value {name}={columns.values.get(name)}: there is no encoder for a field {name!r} and "
                            f"{type(value).__name__}. The end of its name says how it is written, such as {name}.txt"
                        ) from error
                    except Exception as error:
                        problems.add(f"row {number}: field {name!r} cannot be encoded: {error}")
            key = f"{number - 1:09d}" if columns.key is None else row.get(columns.key)
            key = key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else key
            if key is None or key == "":
                problems.add(f"row {number} has no key in column {columns.key!r}: give it one")
            elif not isinstance(key, (str, int)):
                problems.add(
                    f"row {number} has the key {key!r:.80} in column {columns.key!r}: keys are texts or integers"
                )
            elif problems.count == before:  # else its sample would have further problems
                records.append(Record(without_dots(str(key)), fields))
                numbers.append(number)
    if labels and unlabelled:
        problems.add(
            f"row {unlabelled[0]} has no label in column {columns.values[LABEL]!r}, and others have: give it one"
        )
    if not problems.count:  # which are an error
        check_complete(redact(source), "row", number, len(records))
    classes, of_names = classes_of(labels.values())
    for number, record in zip(numbers, records, strict=True):
        if labels.get(number):
            record.fields[LABEL] = of_names[labels[number]]
    return records, classes


def grouped(records: Sequence[Record], count: int) -> list[Record]:
    """Samples of ``count`` rows each, as JSON lines, with the keys of their first rows."""
    groups = (records[start : start + count] for start in range(0, len(records), count))
    return [
        Record(group[0].key, {"jsonl": b"".join(cast("bytes", row.fields["json"]) + b"\n" for row in group)})
        for group in groups
    ]


def _rows(source: str, kind: str, columns: Columns, storage_options: Options) -> Iterator[dict[str, Any]]:
    named = [*([columns.key] if columns.key else []), *(name for _, name in columns.files), *columns.values.values()]
    if kind == "parquet":
        pyarrow = library("pyarrow.parquet", "pyarrow", "parquet")
        with _bytes(source, storage_options) as file:
            content = file.read()  # its footer is at the end
        try:
            table = pyarrow.ParquetFile(io.BytesIO(content))
        except ValueError as error:  # pyarrow.ArrowInvalid
            raise ValueError(f"{redact(source)} is no Parquet file: {error}") from error
        check_columns(table.schema_arrow.names, source)
        _check(named, table.schema_arrow.names, source)
        from wds_pipes.cli.converting.tables import values_of

        for batch in table.iter_batches():
            yield from values_of(batch)
        return
    with _text(source, storage_options) as text:
        if kind == "jsonl":
            checked = False
            for number, line in enumerate(text, 1):
                if line.strip():
                    try:
                        row = json.loads(line, object_pairs_hook=_object)
                        if not isinstance(row, dict):
                            raise ValueError("it is no object")
                    except ValueError as error:
                        raise ValueError(f"line {number} of {redact(source)} is no JSON object: {error}") from error
                    if not checked:
                        _check(named, row, source)
                        checked = True
                    yield row
            return
        lines, comma = _separated(text, kind)
        csv = _csv_of_long_fields()
        table, start = csv.reader(lines, delimiter=comma, strict=True), 1  # start: the first line of a row
        try:
            names: list[str] = next(table, [])
            # Spreadsheets write columns without names at the end of each line.
            unnamed = [place for place, name in enumerate(names) if not name][1:]
            kept = [place for place in range(len(names)) if place not in unnamed]
            check_columns(list(filter(None, names)), source)
            _check(named, names, source)
            start = table.line_num + 1
            for values in table:
                if values and len(values) != len(names):
                    raise ValueError(
                        f"line {start} of {redact(source)} has {plural(len(values), 'column')}, and the first line "
                        f"has {len(names)}: mend it, with quotes around a value that has a {comma!r}"
                    )
                if lost := [values[place] for place in unnamed if values and values[place]]:
                    raise ValueError(
                        f"line {start} of {redact(source)} has {lost[0]!r:.80} in a column without a name, and there "
                        "are several of these: name it in the first line"
                    )
                if kind == "tsv" and (table.line_num > start or any("\t" in value for value in values)):
                    raise ValueError(
                        f"line {start} of {redact(source)} has a value in quotes that has a tab or goes on to the next "
                        "line: if its quote is one of the text, remove it, else write the table as CSV"
                    )
                if values:
                    yield {names[place]: values[place] for place in kept}
                start = table.line_num + 1
        except csv.Error as error:
            more = f", in the row that begins there and goes on to line {table.line_num}" * (table.line_num > start)
            raise ValueError(f"line {start} of {redact(source)} is no {kind.upper()}: {error}{more}") from error


def _csv_of_long_fields() -> Any:
    """The C module of csv, with a limit of its own: that of ``csv`` is for the whole process."""
    spec: Any = find_spec("_csv")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.field_size_limit(_MOST_OF_FIELD)
    return module


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; ValueError if two of its values have one name: one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} comes twice in it")
    return found


def _separated(text: Iterable[str], kind: str) -> tuple[Iterator[str], str]:
    """The lines of a table, and what separates its columns: spreadsheets write semicolons into CSV
    where commas are in numbers.
    """
    lines = iter(text)
    first = next(lines, "")
    comma = "\t" if kind == "tsv" else ";" if ";" in first and "," not in first else ","
    return chain([first], lines), comma


def check_columns(names: Sequence[str], source: str) -> None:
    """Raise SampleError if two columns of a table have one name: one of them would be lost."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SampleError(f"{redact(source)} has two columns {twice!r}: rename one of them", url=redact(source))


def _check(named: list[str], known: Any, source: str) -> None:
    for name in named:
        if name not in known:
            near = nearest(name, known)
            mean = f". Did you mean {near!r}?" if near else f"; it has: {', '.join(map(str, known))}"
            raise ValueError(f"{redact(source)} has no column {name!r}{mean}")


@contextmanager
def _bytes(source: str, storage_options: Options) -> Iterator[IO[bytes]]:
    path = local_path(source)
    if source == "-":
        yield sys.stdin.buffer
    elif path is not None:
        with open(path, "rb") as file:
            yield file
    else:
        from wds_pipes.io.open import open_url

        with open_url(source, storage_options=storage_options) as stream:
            yield stream


@contextmanager
def _text(source: str, storage_options: Options) -> Iterator[IO[str]]:
    with _bytes(source, storage_options) as file:
        buffered = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
        text = io.TextIOWrapper(buffered, "utf-8-sig", newline="")
        try:
            yield text
        except UnicodeDecodeError as error:
            if b"\0" in error.object and error.object[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise ValueError(
                    f"{redact(source)} is no text, and a list or table is: name one, or a directory of files"
                ) from error
            known = "UTF-16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "WINDOWS-1252"
            raise ValueError(
                f"{redact(source)} is not UTF-8 text ({error.reason}): save it as UTF-8, as with iconv -f {known} -t "
                "UTF-8"
            ) from error
        finally:
            text.detach()  # closing is up to the owner


def _contents(names: list[str], source: str, base: str, storage_options: Options) -> list[Content | None]:
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
        path = local_path(url)
        if path is not None:
            try:
                status = os.stat(path)
            except OSError:
                return None
            return Content(path, status.st_size, str(status.st_mtime_ns)) if os.path.isfile(path) else None
        size, mark, _ = version_of(url, storage_options)
        return None if size is None else Content(url, size, mark or "")

    if len(inside) == len(urls):
        return [look(url) for url in urls]
    with ThreadPoolExecutor(_REQUESTS) as pool:
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
