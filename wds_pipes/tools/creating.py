"""Making shards of files, lists and tables (CSV, TSV, JSON lines and Parquet), and of data sets in
other formats: see ``sources`` and ``rows``.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from glob import has_magic
from hashlib import blake2b
from itertools import chain, islice, pairwise
from typing import Any, BinaryIO, Unpack, cast

import numpy as np

from wds_pipes.codecs.table import encode
from wds_pipes.core.options import check_choice
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, WdsError
from wds_pipes.io.compression import TAR_NAME, LargeWindowError, is_compressed_name, unpacked, unreadable
from wds_pipes.io.open import open_url
from wds_pipes.io.urls import is_below, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.encoded import Encoded, check_name, stored_size
from wds_pipes.tar.keys import without_dots
from wds_pipes.tar.writer import whole
from wds_pipes.tools.files import (
    LABEL,
    Content,
    Grouping,
    Problems,
    Record,
    add_labels,
    file_of,
    folders_in,
    of_classes,
    of_directory,
    packed,
    refuse_part,
    samples,
)
from wds_pipes.tools.jobs import Facts, Job, Place, Report, Task, fingerprint
from wds_pipes.tools.outputs import (
    REQUESTS,
    JobOptions,
    Running,
    StorageOptions,
    complete,
    content_of_classes,
    counted,
    shard_ends,
    shard_job,
    shard_limits,
    shard_task,
    split_numbers,
    splits_of,
    write_task,
)
from wds_pipes.tools.rows import (
    Columns,
    Row,
    add_chosen,
    add_field,
    check_known,
    columns_of,
    key_of,
    plain_value,
    sample_of,
)
from wds_pipes.tools.sources import (
    Database,
    Format,
    Parquet,
    Run,
    Saved,
    Shard,
    TFRecord,
    TorchRecord,
    check_columns,
    files_in_tar,
    found_files,
    parquet_file,
    read,
    rows_of,
)

_FOLDERS, _TABLES = ("files", "classes"), ("csv", "tsv", "jsonl", "parquet")
# What SOURCE may be with an option, besides those that are for all.
_FOR = {
    **dict.fromkeys(("--ignore", "--include", "--follow-symlinks"), _FOLDERS),
    "--key-split": (*_FOLDERS, "list"),
    "--root": ("list", *_TABLES),
    **dict.fromkeys(("--key", "--file", "--value", "--group"), _TABLES),
}
_AHEAD = 1024  # rows
_FROM_START = (0, 1)  # the first byte and line of a table
_MOST_OF_FIELD = 1 << 30  # characters
_TOGETHER = ("--file", "--group", "--root", "--shuffle", "--split")  # with these, a table is read as a whole
_ENDINGS = {f".{kind}": kind for kind in _TABLES} | {".ndjson": "jsonl", ".pq": "parquet"}


def create(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    kind: str | None = None,
    max_samples: int | None = None,
    max_bytes: int | str | None = None,
    shuffle: int | None = None,
    split: Mapping[str, float] | None = None,
    key_split: str | None = None,
    follow_symlinks: bool = False,
    ignore: Sequence[str] = (),
    include: Sequence[str] = (),
    key: str | None = None,
    files: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
    group: int | None = None,
    root: str | os.PathLike[str] | None = None,
    **options: Unpack[JobOptions],
) -> Report:
    """Make shards of files, lists and tables.

    All that is wrong with the input is reported at once, before anything is written. Only rows of
    tables are read when they are written, a few at a time: unless there is an option that needs the
    whole table first (``key`` and texts as ``values`` of ``cls``, of one file; ``files``,
    ``group``, ``shuffle``, ``split``), and then it is read into memory.

    Args:
        source: a directory, a list, a table, or ``-`` for standard input. A list or a table of
            text may be compressed: gz, bz2, xz or zst. Tables may be several files of one kind, by
            a pattern such as ``"data/*.jsonl.zst"``, or a directory with ``kind``. Their rows come
            in the order of the names of the files, and are numbered across them.
        dest: the directory to write to. It gets ``shard-000000.tar`` and so on, their offsets, and
            ``index.json``; with ``split``, a directory for each split.
        kind: what ``source`` is: ``"files"``: files of one name are a sample; ``"classes"``: its
            directories are classes (with these two it may also be a tar that is not compressed,
            in which tars are directories: nothing is unpacked); ``"list"``: lines with a path and
            maybe a label; ``"csv"``, ``"tsv"``, ``"jsonl"``, ``"parquet"``: a row is a sample: its
            field ``json``; bytes, and images and audio as Hugging Face stores them, are fields of
            their own, as ``convert`` makes them. None: files for a directory; by the extension of a
            file, else a list.
        max_samples: the maximum number of samples in a shard; None: 100,000.
        max_bytes: the maximum size of a shard, such as 268435456 or ``"256MB"``; None: 1 GiB. Of
            tables it is about the size of the values.
        shuffle: the seed of a random order, which depends on the keys and on nothing else; None:
            that of the source.
        split: divide by the hashes of the keys: the names of splits and their shares.
        key_split: which dot of a name ends the key: ``"first-dot"``; ``"last-dot"``; or
            ``"folder"``: the first directory is the key. With these two, other dots of a key become
            underscores. None: the first, and names that look otherwise are refused.
        follow_symlinks: also read what is outside of ``source``, where a link leads there.
        ignore: patterns of files to leave out.
        include: patterns of files to pack although they belong to shards.
        key: the column of the keys of a table; None: the number of the row. Of several files, the
            keys are not compared.
        files: columns of paths or URLs of files, ``"COLUMN"`` or ``"FIELD=COLUMN"``.
        values: columns of values, by their fields.
        group: so many rows are one sample, with the field ``jsonl``.
        root: where relative paths in a list or table begin; None: where it is.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or there is no sample.
        SampleError: the input is wrong.
        WdsError: a file or the store cannot be read, or has other outputs.
    """
    running, values = Running(dest, options), values or {}
    most, size = shard_limits(max_samples, max_bytes)
    if split:
        splits_of(split)  # whether they fit
    source, root = os.fspath(source), None if root is None else os.fspath(root)
    kind = _kind(source, kind)
    given = {
        **{"--ignore": ignore, "--include": include, "--follow-symlinks": follow_symlinks, "--key-split": key_split},
        **{"--root": root, "--key": key, "--file": files, "--value": values, "--group": group},
        **{"--shuffle": shuffle is not None, "--split": split},
    }
    _check_options(kind, given)
    if kind in _TABLES and _is_streamed(source, kind, given, running.storage_options):
        return _converted("create", kind, source, running, key=key, values=values, most=most, max_bytes=size)
    problems, storage_options = Problems(), running.storage_options
    if kind in _FOLDERS:
        links = "" if follow_symlinks else "pass --follow-symlinks to read what is there, or remove it"
        records, classes = _of_folder(
            source, kind, key_split, problems, storage_options, ignore=ignore, include=include, links=links
        )
    elif kind == "list":
        records, classes = of_list(source, root, key_split, problems, storage_options)
    else:
        pairs = [file.partition("=")[::2] if "=" in file else ("", file) for file in files]
        columns = Columns(key, tuple(values.items()), files=tuple(pairs))
        records, classes = of_table(source, kind, columns, problems, storage_options, root=root)
        records = grouped(records, group) if group else records
    job = job_of(records, running.place, problems, (most, size), classes=classes, shuffle=shuffle, shares=split)
    return running.run(job)


def _check_options(kind: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an option is not for such a source, or not without another."""
    for option, kinds in _FOR.items():
        if given[option] and kind not in kinds:
            raise ValueError(f"{option} is for {', '.join(kinds)}, and SOURCE is {kind}")
    if given["--group"] and (given["--key"] or given["--file"] or given["--value"]):
        raise ValueError("--group is for whole rows of a table, without --key, --file and --value")
    if given["--root"] and not given["--file"] and kind in _TABLES:
        raise ValueError("--root is where the paths of --file begin: name the column of paths, as in --file COLUMN")


def _is_streamed(source: str, kind: str, given: Mapping[str, Any], storage_options: StorageOptions) -> bool:
    """Whether the rows of a table are read when they are written, as those of several files are.

    Raises:
        ValueError: it may be several files, and an option needs the whole table.
    """
    together = [option for option, value in given.items() if value and option in _TOGETHER]
    several = source != "-" and _may_be_several(source)
    if several and together:
        raise ValueError(
            f"{together[0]} needs the whole table, and SOURCE may be several files: name one file, or pass it to the "
            "shards that are made without it, as in wds-pipes shuffle OLD NEW or wds-pipes split OLD NEW"
        )
    if several or together or given["--key"] or source == "-":
        return several
    label = given["--value"].get(LABEL)
    if label is None or kind != "parquet":
        return label is None
    return label in Parquet().classes(Run(file_of(source, storage_options)), storage_options)


def _of_folder(
    source: str,
    kind: str,
    key_split: str | None,
    problems: Problems,
    storage_options: StorageOptions,
    *,
    ignore: Sequence[str],
    include: Sequence[str],
    links: str,
) -> tuple[list[Record], list[str]]:
    """The samples of the files of a directory or a tar, and the names of the classes.

    Raises:
        SampleError: the tar has files that cannot be read where they are.
    """
    is_tar = _is_tar(source)
    if is_tar:
        found = files_in_tar(source, ignore, problems, storage_options)
        problems.check()
    else:
        found = packed(source, problems, storage_options, ignore=ignore, include=include, links=links)
    if kind == "files":
        return of_directory(found, key_split, problems)
    return of_classes(found, [] if is_tar else folders_in(source, ignore), key_split, problems)


def _kind(source: str, given: str | None) -> str:
    """Return what a source is; ``given``: what the caller says.

    Raises:
        ValueError: it does not exist, or is something else.
    """
    if source != "-" and "://" not in source and not os.path.exists(source) and not has_magic(source):
        raise ValueError(f"SOURCE {source!r} does not exist")
    kind = given or _guessed(source)
    if source == "-" and kind in _FOLDERS:
        raise ValueError(f"standard input is a list or a table, and --from {kind} reads a directory")
    is_one = kind in _TABLES or (kind in _FOLDERS and _is_tar(source))
    if os.path.exists(source) and os.path.isdir(source) is not (kind in _FOLDERS) and not is_one:
        what, reads = ("a directory", "a file") if os.path.isdir(source) else ("a file", "a directory")
        raise ValueError(f"SOURCE {source!r} is {what}, and --from {kind} reads {reads}")
    return kind


def _is_tar(source: str) -> bool:
    """Whether a source is named as a tar, and is no directory."""
    return TAR_NAME.fullmatch(source.rpartition("/")[2]) is not None and not os.path.isdir(source)


def _may_be_several(source: str) -> bool:
    """Whether tables may be several files: a directory or a pattern."""
    return source.endswith("/") or os.path.isdir(source) or (has_magic(source) and not os.path.exists(source))


def _guessed(source: str) -> str:
    """Return what a source is, if the caller does not say it."""
    if source == "-":
        raise ValueError("standard input may be anything: pass --from list, csv, tsv, jsonl or parquet")
    if _is_tar(source):
        raise ValueError(
            f"SOURCE {source!r} is a shard: wds-pipes reshard, sort and others write its samples. If it has files to "
            "pack, or tars of files as ImageNet, pass --from files, or --from classes"
        )
    name = source.partition("?")[0].rstrip("*")
    refuse_part(name)
    ending = os.path.splitext(os.path.splitext(name)[0] if is_compressed_name(name) else name)[1].lower()
    if os.path.isdir(source) or (not os.path.exists(source) and (source.endswith("/") or "." not in ending)):
        return "files"
    if ending == ".parquet" and is_compressed_name(name):
        raise ValueError(f"{source} is a compressed Parquet file, which is not read: decompress it")
    if ending == ".json":
        raise ValueError(f"{source} may be anything: pass --from jsonl if it is an object on each line")
    return _ENDINGS.get(ending, "list")


def job_of(
    records: Sequence[Record],
    place: Place,
    problems: Problems,
    limits: tuple[int, int],
    *,
    classes: Sequence[str] = (),
    shuffle: int | None = None,
    shares: Mapping[str, float] | None = None,
) -> Job:
    """Make the job that writes samples.

    Args:
        records: the samples, in order.
        place: the directory of the shards.
        problems: takes what is wrong with the samples.
        limits: the maximum number of samples in a shard, and its maximum size in bytes.
        classes: the names of the classes, for ``classes.json``.
        shuffle: the seed of a random order, which depends on the keys and on nothing else.
        shares: the names of splits and their shares: see ``split_by_key``.

    Raises:
        SampleError: there are problems.
        ValueError: there is no sample, or none in a split.
    """
    _check(records, problems)
    if not records:
        raise ValueError("the source has no samples, so there is nothing to write")
    if shuffle is not None:
        records = sorted(records, key=lambda record: (hash64(shuffle, hash_text(record.key)), record.key))
    tasks: list[Task] = []
    parts = _split(records, shares) if shares else {"": records}
    for name, part in parts.items():
        prefix = f"{name}/{name}" if name else "shard"
        sizes = np.fromiter(map(_size, part), np.int64, len(part))
        ends = [0, *shard_ends([sizes], *limits)]
        for number, (start, stop) in enumerate(pairwise(ends)):
            group = part[start:stop]
            size = whole(int(sizes[start:stop].sum()))
            says = f"{plural(len(group), 'sample')}, {plural(size, 'byte')}"
            tasks.append(shard_task(f"{prefix}-{number:06d}.tar", group, _fingerprint(group), says, len(group)))
    options = {
        "shuffle": shuffle,
        "split": dict(shares) if shares else None,
        "the list of classes": list(classes),
        "max_samples": limits[0],
        "max_bytes": limits[1],
    }
    names = content_of_classes(classes) if classes else None
    return shard_job("create", place, partial(_write, place.storage_options), tasks, options, classes=names)


def _write(storage_options: StorageOptions, task: Task, place: Place) -> Facts:
    found = samples(task.arguments, storage_options)
    return write_task(task, place, counted(task, complete(task.name, found, len(task.arguments))))


def _check(records: Sequence[Record], problems: Problems) -> None:
    seen: set[str] = set()
    for key, fields in records:
        if key in seen:
            problems.add(f"two samples have the key {key!r}: give each its own")
        seen.add(key)
        if not fields:
            problems.add(f"sample {key!r} has no fields, so it would not be in a shard: give it one, or leave it out")
        for field in fields:
            try:
                check_name(key, field)
            except SampleError as error:
                problems.add(str(error))
    problems.check()


def _split(records: Sequence[Record], shares: Mapping[str, float]) -> dict[str, list[Record]]:
    hashes = np.array([hash_text(record.key) for record in records], np.uint64)
    found = split_numbers(hashes, shares)
    return {name: [records[place] for place in places.tolist()] for name, places in found.items()}


def _size(record: Record) -> int:
    return sum(stored_size(record.key, field, record.size_of(field)) for field in record.fields)


def _fingerprint(records: Sequence[Record]) -> str:
    marks = [[key, [[field, *_mark(value)] for field, value in sorted(fields.items())]] for key, fields in records]
    return fingerprint(marks)


def _mark(value: Content | bytes) -> list[Any]:
    if isinstance(value, Content):
        return [value.size, value.identity]
    return [blake2b(value, digest_size=16).hexdigest()]


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
                f"line {number}: {redact(_join(base, path.strip()))} is no file that can be found",
                "Check the path, write a tab before a label that has blanks, or pass --root DIRECTORY if paths are "
                "relative to another one than that of the list",
            )
            continue
        key = grouping.add(_name(path.strip(), base), content)
        if key is not None and label and labels.setdefault(key, label[0].strip()) != label[0].strip():
            problems.add(f"line {number}: sample {key!r} has the labels {labels[key]!r} and {label[0].strip()!r}")
    records = grouping.records()
    return records, add_labels(records, [labels.get(record.key) for record in records], problems)


def of_table(
    source: str, kind: str, columns: Columns, problems: Problems, storage_options: StorageOptions, *, root: str | None
) -> tuple[list[Record], list[str]]:
    """The samples of a table, one for each row. Labels, which are values for the field ``cls``, are
    numbers of names as in ``of_list``.

    Returns:
        The samples, and the sorted names of the classes, which is empty if labels are integers.

    Raises:
        ValueError: the table has no such column, or is none.
    """
    base, records, labels = _base(source, root), list[Record](), list[str | None]()
    named = [*filter(None, [columns.key]), *(name for _, name in (*columns.files, *columns.values))]
    rows = enumerate(_rows(source, kind, storage_options), 1)
    while ahead := list(islice(rows, _AHEAD)):
        check_known(named if not records else (), ahead[0][1], redact(source))
        paths = list({str(row[column]) for _, row in ahead for _, column in columns.files if row.get(column)})
        found = dict(zip(paths, _contents(paths, source, base, storage_options), strict=True))
        for number, row in ahead:
            try:
                label = _label(row, dict(columns.values).get(LABEL))
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
    add_chosen(fields, row, [(name, column) for name, column in columns.values if name != LABEL], key)
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


class TextTable:
    """Tables of text. A shard begins at a row: of JSON Lines, at its byte and line.

    Attributes:
        kind: ``"csv"``, ``"tsv"`` or ``"jsonl"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shards(
        self, source: str, max_samples: int, storage_options: StorageOptions, max_bytes: int | None = None
    ) -> list[Shard]:
        """Divide the rows of files into shards: the rows are counted, and JSON is not parsed."""
        endings = (".jsonl", ".ndjson", ".json") if self.kind == "jsonl" else (f".{self.kind}",)
        shards: list[list[Run]] = []
        number, rows, room = 0, max_samples, 0
        for _, file in found_files(source, endings, storage_options):
            begins = True
            for start, size in self._starts(file.url, storage_options):
                if rows == max_samples or (rows and max_bytes is not None and size > room):
                    shards.append([])
                    rows, room, begins = 0, max_bytes or 0, True
                if begins:
                    shards[-1].append(Run(file, start, 0, number))
                run = shards[-1][-1]
                shards[-1][-1] = run._replace(records=(run.records or 0) + 1)
                number, rows, room, begins = number + 1, rows + 1, room - size, False
        return [Shard(f"shard-{place:06d}.tar", tuple(runs)) for place, runs in enumerate(shards)]

    def _starts(self, url: str, storage_options: StorageOptions) -> Iterator[tuple[Any, int]]:
        """Yield where each row begins, and about its size."""
        with _text(url, storage_options) as text:
            if self.kind != "jsonl":
                for number, row in enumerate(_separated(text, self.kind, url)):
                    yield number, sum(map(len, row.values()))
                return
            place = 0
            for number, line in enumerate(cast("BinaryIO", text.buffer), 1):
                if line.strip():
                    yield (place, number), len(line)
                place += len(line)

    def rows(self, run: Run, storage_options: StorageOptions) -> Iterator[Row]:
        """Read rows of a file."""
        start, skipped = (run.start, 0) if self.kind == "jsonl" else (_FROM_START, run.start)
        rows = _rows(run.file.url, self.kind, storage_options, start)
        yield from islice(rows, skipped, skipped + (run.records or 0))


def _rows(
    source: str, kind: str, storage_options: StorageOptions, start: tuple[int, int] = _FROM_START
) -> Iterator[Row]:
    """The rows of a table; ``start``: the byte where they begin, and the number of its line."""
    if kind == "parquet":
        with parquet_file(source, storage_options) as table:
            yield from rows_of(table.iter_batches(), 0, table.metadata.num_rows, source)
        return
    place, line = start
    with _text(source, storage_options, place) as text:
        yield from _json_lines(text, source, line) if kind == "jsonl" else _separated(text, kind, source)


def _json_lines(text: Iterable[str], source: str, first: int) -> Iterator[Row]:
    for number, line in enumerate(text, first):
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
    first = next(text, "")
    comma = "\t" if kind == "tsv" else ";" if ";" in first and "," not in first else ","
    table = csv.DictReader(chain([first], text), delimiter=comma, strict=True)
    try:
        check_columns(table.fieldnames or [], source)
        for row in iter(partial(_next_row, table), None):
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


def _next_row(table: csv.DictReader[str]) -> Row | None:
    """The next row of a table, or None. The limit of ``csv`` in the process stays as it is."""
    limit = csv.field_size_limit(_MOST_OF_FIELD)
    try:
        return next(table, None)
    finally:
        csv.field_size_limit(limit)


@contextmanager
def _text(source: str, storage_options: StorageOptions, skip: int = 0) -> Iterator[io.TextIOWrapper]:
    """The text of a file, after its first ``skip`` bytes."""
    owned = source != "-"
    file = open_url(source, storage_options=storage_options) if owned else sys.stdin.buffer
    text = io.TextIOWrapper(unpacked(file)[0] if owned else file, "utf-8-sig", newline="")
    try:
        if skip and text.buffer is file and file.seekable():
            file.seek(skip)
        else:
            while skip and (passed := len(text.buffer.read(min(skip, 1 << 20)))):
                skip -= passed
        yield text
    except unreadable() as error:
        if isinstance(error, WdsError) or getattr(error, "errno", None) is not None:
            raise  # of a store or a disk, not of a library that decompresses
        if isinstance(error, LargeWindowError):
            raise ValueError(f"{redact(source)} cannot be decompressed: {error}") from error
        raise ValueError(f"{redact(source)} is damaged, or was cut: {error}. Copy it again") from error
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "CP1252"
        raise ValueError(
            f"{redact(source)} is not UTF-8 text ({error.reason}): save a list or table as UTF-8, as with iconv -f "
            f"{encoding} -t UTF-8"
        ) from error
    finally:
        if not text.closed:  # as when the interpreter ends, and its reader was left half read
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


FORMATS: dict[str, Format] = {
    "tfrecord": TFRecord(),
    "parquet": Parquet(),
    "hf": Saved(),
    "lmdb": Database(),
    "torchrecord": TorchRecord(),
}
READERS: dict[str, Any] = {**FORMATS, **{kind: TextTable(kind) for kind in ("csv", "tsv", "jsonl")}}
_FIRST = 100  # records that decide what the columns are


def convert(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    kind: str,
    max_samples: int | None = None,
    key: str | None = None,
    values: Mapping[str, str] | None = None,
    **options: Unpack[JobOptions],
) -> Report:
    """Make shards of a data set in another format. Bytes, as of images, stay as they are.

    Args:
        source: files, a pattern, a directory or a database.
        dest: the directory to write to.
        kind: the format: ``"tfrecord"``, ``"parquet"``, ``"hf"`` (what
            ``dataset.save_to_disk()`` has written), ``"lmdb"`` or ``"torchrecord"``.
        max_samples: in a shard; None: 10,000. Not for TFRecord, of which each file is a shard.
        key: the column of the keys, in which dots become underscores; None: the number of the
            record, or the key of the LMDB.
        values: the fields that are written, and their columns; None: all columns.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or ``source`` is of another format.
        ModuleNotFoundError: a library is not installed.
        WdsError: a file or the store cannot be read, or has other outputs.
    """
    check_choice("kind", kind, *FORMATS)
    source = os.fspath(source)
    if kind == "tfrecord" and max_samples is not None:
        raise ValueError(
            "a TFRecord file does not say how many records it has, so each becomes one shard: leave --max-samples out, "
            "and divide the shards afterwards, with wds-pipes reshard"
        )
    running, values = Running(dest, options), values or {}
    most, _ = shard_limits(max_samples, None, usual=10_000)
    storage_options = running.storage_options
    is_list = source.partition("?")[0].lower().endswith((".txt", ".csv")) and not os.path.isdir(source)
    if kind == "torchrecord" and is_list:
        if key or values:
            raise ValueError("a list has a path and a label in each line: leave --key and --value out")
        problems = Problems()
        records, classes = of_list(source, None, None, problems, storage_options)
        return running.run(job_of(records, running.place, problems, (most, 1 << 60), classes=classes))
    return _converted("convert", kind, source, running, key=key, values=values, most=most)


def _converted(
    command: str,
    kind: str,
    source: str,
    running: Running,
    *,
    key: str | None,
    values: Mapping[str, str],
    most: int,
    max_bytes: int | None = None,
) -> Report:
    """Make shards of records, which are read when they are written."""
    reader, storage_options = READERS[kind], running.storage_options
    limits = {} if max_bytes is None else {"max_bytes": max_bytes}
    shards = reader.shards(source, most, storage_options, **limits)
    rows = chain.from_iterable(reader.rows(run, storage_options) for shard in shards for run in shard.runs)
    first = list(islice(rows, _FIRST))
    columns = columns_of(first, key, values, redact(source), bytes_in_json=command == "create")
    for number, row in enumerate(first if command == "create" else ()):
        Encoded(sample_of(row, f"{number:09d}", columns), None)  # before anything is written
    decided = {
        "from": kind,
        "max_samples": most,
        **limits,
        "key": key,
        "value": dict(values),
        "the list of columns": list(columns[2:]),
    }
    read_classes = getattr(reader, "classes", None)
    labels = {} if read_classes is None else read_classes(shards[0].runs[0], storage_options)
    label = values.get("cls") if values else next(iter(labels)) if len(labels) == 1 else None
    names = content_of_classes(labels[label]) if label in labels else None
    work = partial(_write_converted, kind, columns, storage_options)
    tasks = [_task_of(shard) for shard in shards]
    return running.run(shard_job(command, running.place, work, tasks, decided, classes=names))


def _task_of(shard: Shard) -> Task:
    records = sum(run.records or 0 for run in shard.runs)
    says = plural(records, "sample") if records else "all records of a file"
    marks = [[run.file.size, run.file.identity, str(run.start), run.number, run.records] for run in shard.runs]
    return shard_task(shard.name, shard, fingerprint(marks), says, records or 1)


def _write_converted(kind: str, columns: Columns, storage_options: StorageOptions, task: Task, place: Place) -> Facts:
    reader = READERS[kind]
    usual = getattr(reader, "as_sample", None) if columns.key is None and not columns.values else None
    found: Iterator[dict[str, Any]] = (
        sample_of(row, number, columns) if usual is None else {"__key__": number, **usual(row)}
        for number, row in read(reader, task.arguments, storage_options)
    )
    counts = [run.records for run in task.arguments.runs]
    if None not in counts:  # a TFRecord file does not say how many it has
        found = complete(task.name, found, sum(counts))
    return write_task(task, place, counted(task, found))
