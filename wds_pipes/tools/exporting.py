"""Writing a file in another format of each shard.

Rules of the columns of Parquet and TFRecord:
1. The extension of a field says whether it is text, integers or bytes.
2. A field of integers is a column of integers if all of them would be written as the same bytes
   again: ``7``, but not ``007`` or a 7 with the end of a line. Else it is a column of text, or of
   bytes if it is no text.
3. The first samples of a shard that have the field decide. A later one that does not fit is an
   error. Shards may differ.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, Unpack, cast

from wds_pipes.codecs.table import ROWS
from wds_pipes.core.counts import NothingKeptError
from wds_pipes.core.importing import library
from wds_pipes.core.options import check_choice
from wds_pipes.core.order import hash_text
from wds_pipes.errors import SampleError
from wds_pipes.io.outputs import OutputFile, open_output
from wds_pipes.io.urls import Urls, redact
from wds_pipes.stages.fields import read_names
from wds_pipes.tar.index import folder_of, list_shards
from wds_pipes.tools.jobs import Facts, Job, Place, Report, Task, fingerprint
from wds_pipes.tools.looking import exact_integer, write_lines
from wds_pipes.tools.outputs import (
    JobOptions,
    Running,
    StorageOptions,
    check_names,
    classes_of,
    marks_and_sizes,
    names_of,
)
from wds_pipes.tools.reading import Sample, fields_of
from wds_pipes.tools.rewriting import Reading, Shard, samples_of
from wds_pipes.tools.rows import is_text
from wds_pipes.tools.sources import framed, masked_crc, packed

ENDINGS = {"jsonl": ".jsonl", "parquet": ".parquet", "tfrecord": ".tfrecord", "imagefolder": ".txt"}


def export(
    urls: Urls,
    dest: str | os.PathLike[str],
    *,
    kind: str,
    fields: Sequence[str] | None = None,
    label: str | None = None,
    key_split: str = "first-dot",
    **options: Unpack[JobOptions],
) -> Report:
    """Write shards in another format: a file for each shard, with its name.

    Args:
        urls: the shards.
        dest: the directory to write to.
        kind: the format: ``"jsonl"``, ``"parquet"``, ``"tfrecord"`` or ``"imagefolder"``.
        fields: only these fields; a sample that has none of them is left out.
        label: the field of the class, for ``"imagefolder"``; None: ``cls``.
        key_split: as in ``group_by_key``.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit.
        ModuleNotFoundError: a library is not installed.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    check_choice("kind", kind, *ENDINGS)
    if fields is not None:
        read_names("fields", fields)  # refuses a text
    running = Running(dest, options)
    if label is not None and kind != "imagefolder":
        raise ValueError("--label is for --to imagefolder")
    label, storage_options = (label or "cls").lower(), running.storage_options
    if kind == "tfrecord":
        masked_crc(packed({}))  # whether the libraries are installed
    elif kind == "parquet":
        library("pyarrow.parquet", "pyarrow", "parquet", extra="parquet")
    shards, known = list_shards(urls, storage_options)
    found = marks_and_sizes(shards, storage_options, known)
    classes = {}
    if kind == "imagefolder":
        classes = {folder: _read_classes(folder, storage_options) for folder in dict.fromkeys(map(folder_of, shards))}
    tasks = []
    outputs = [_TAR.sub("", name) + ENDINGS[kind] for name in names_of(shards)]
    check_names(shards, outputs)
    for url, output, (mark, size) in zip(shards, outputs, found, strict=True):
        if kind == "imagefolder" and output.startswith("images/"):
            raise ValueError(
                f"the list {output} of {redact(url)} would be among the images: export each directory by itself, into "
                "a directory of its own"
            )
        shard = Shard(url, output, mark, classes.get(folder_of(url)))
        tasks.append(Task(output, (output,), shard, fingerprint(mark, shard.more), size, f"of {redact(url)}"))
    decided = {"to": kind, "fields": fields, "label": label, "key_split": key_split}
    reading = Reading(storage_options, key_split, fields=fields)
    work, finish = partial(_write, kind, label, reading), partial(_finish, kind, fields, outputs)
    lists = "images" if kind == "imagefolder" else ""
    return running.run(Job("export", running.place, work, tasks, decided, finish, unit="B", lists=lists))


_TAR = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz)$", re.IGNORECASE)
_FILES = 16  # that are written at a time
_GROUP_BYTES = 64 << 20  # of a row group of Parquet, before compression, and of the samples that come first
_TEXTS = frozenset(("txt", "text", "transcript", "html", "htm", "json", "jsn", "jsonl"))
_INTEGERS = frozenset(extension for extension, row in ROWS.items() if row.decode is int)


def _finish(kind: str, fields: Sequence[str] | None, names: Sequence[str], place: Place, facts: list[Facts]) -> None:
    """Check what only all files together show.

    Raises:
        NothingKeptError: no sample of any shard has one of the fields that are written.
        SampleError: two images have one name: two shards have a sample of one key and class.
    """
    if any(fact["without_fields"] for fact in facts) and not any(fact["samples"] for fact in facts):
        raise NothingKeptError(
            f"no sample has the field {', '.join(fields or ())}: correct --fields, and pass --overwrite"
        )
    seen: dict[int, str] = {}
    for name in names if kind == "imagefolder" else ():
        for line in (place.read(name) or b"").splitlines():
            path = line.partition(b"\t")[0]
            before = seen.setdefault(hash_text(path.decode("utf-8", "surrogateescape")), name)
            if before != name:
                shown = path.decode("utf-8", "replace")
                raise SampleError(
                    f"{before} and {name} both have {shown}, so one of the two is lost: export them into different "
                    "directories"
                )


def _write(kind: str, label: str, reading: Reading, task: Task, place: Place) -> Facts:
    """Write what is made of a shard."""
    fields, facts = reading.fields, Facts(read=0)
    if kind == "imagefolder" and fields is not None and label not in fields:
        reading = reading._replace(fields=[*fields, label])
    samples = samples_of(task, reading, facts)
    with _Stream(place.at(task.name), place.storage_options) as stream:
        if kind == "jsonl":
            base = redact(task.arguments.url).partition("?")[0].rpartition("/")[2]
            write_lines(({**sample, "__url__": base} for sample in samples), cast(BinaryIO, stream), {})
        elif kind == "parquet":
            _write_parquet(samples, stream, fields)
        elif kind == "tfrecord":
            _write_tfrecord(samples, stream)
        else:
            for line in _write_images(samples, label, task.arguments.more, place):
                stream.write(line.encode("utf-8", "surrogateescape"))
        stream.commit()
    return {"without_fields": facts["without_fields"], "samples": facts["read"]}


class _Stream(io.RawIOBase):
    """A file that appears when it is committed, as a stream."""

    def __init__(self, target: str, storage_options: StorageOptions) -> None:
        self._file: OutputFile = open_output(target, overwrite=True, wait=True, storage_options=storage_options)
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._file.write(content)
        self._written += len(content)
        return len(content)

    def tell(self) -> int:
        return self._written

    def commit(self) -> None:
        """Give the file its name."""
        self._file.commit()

    def close(self) -> None:
        self._file.discard()
        super().close()


def _kind(field: str, group: list[Sample]) -> str:
    """What the column of a field is, by the samples that come first, as Arrow names it."""
    extension = field.rpartition(".")[2]
    if extension not in _INTEGERS:
        return "string" if extension in _TEXTS else "binary"
    values = [sample[field] for sample in group if field in sample]
    if not values:
        return "string"  # as text, the values of other files stay what they are
    if all(exact_integer(data) is not None for data in values):
        return "int64"
    return "string" if all(map(is_text, values)) else "binary"


def _write_tfrecord(samples: Iterable[Sample], stream: _Stream) -> None:

    kinds: dict[str, str] = {}
    for group in _groups(samples):
        kinds |= {name: _kind(name, group) for name in _fields(group) if name not in kinds}
        for sample in group:
            stream.write(framed(packed(_row(sample, kinds))))


def _write_parquet(samples: Iterable[Sample], stream: _Stream, fields: Sequence[str] | None) -> None:
    arrow = library("pyarrow", "pyarrow", "parquet", extra="parquet")
    parquet = library("pyarrow.parquet", "pyarrow", "parquet", extra="parquet")
    groups = _groups(samples)
    first = next(groups, [])
    kinds = {name: _kind(name, first) for name in (_fields(first) if fields is None else fields)}
    schema = arrow.schema([("__key__", "string"), *kinds.items()])
    texts = [name for name in schema.names if name not in kinds or kinds[name] == "string"]  # others hardly repeat
    with parquet.ParquetWriter(arrow.PythonFile(stream, mode="w"), schema, use_dictionary=texts) as writer:
        for group in chain([first], groups):
            rows = [_row(sample, kinds) for sample in group]
            try:
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            except arrow.ArrowInvalid as error:
                shown = redact(group[0]["__url__"])
                raise SampleError(
                    f"shard {shown}: keys and fields of text must be UTF-8: {error}. Leave the field out with --fields",
                    url=shown,
                ) from error


def _fields(group: Iterable[Sample]) -> list[str]:
    return sorted({name for sample in group for name, _ in fields_of(sample)})


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples in groups of some megabytes."""
    group, size = [], 0
    for sample in samples:
        group.append(sample)
        size += sum(len(data) for _, data in fields_of(sample))
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _row(sample: Sample, kinds: dict[str, str]) -> dict[str, Any]:
    """The key and the fields of a sample; fields of integers are integers, others are bytes."""
    key = sample["__key__"]
    row: dict[str, Any] = {"__key__": key.encode("utf-8", "surrogateescape")}
    for field, data in fields_of(sample):
        if field not in kinds:
            raise _unfit(
                sample,
                f"sample {key!r} has field {field!r}, which the first samples do not have: name the columns, as in "
                f"--fields {','.join([*kinds, field])}",
            )
        row[field] = exact_integer(data) if kinds[field] == "int64" else data
        if row[field] is None:
            raise _unfit(
                sample,
                f"field {field!r} of sample {key!r} is {data!r:.80}, and the first samples have integers in it: leave "
                "it out with --fields, or divide the shard with wds-pipes reshard --max-bytes 64MB",
            )
    return row


def _unfit(sample: Sample, what: str) -> SampleError:
    """The error for a sample that a format cannot hold, without the credentials in its URL."""
    shown = redact(sample["__url__"])
    return SampleError(f"shard {shown}: {what}", key=sample["__key__"], url=shown)


def _write_images(samples: Iterable[Sample], label: str, classes: Sequence[str] | None, place: Place) -> Iterator[str]:
    """Write the fields of samples as files, and yield the lines of their list. If a sample cannot
    be written, no file is left.
    """
    of_path: dict[str, str] = {}  # keys
    try:
        # a disk makes many files certain in about the time of one
        with ThreadPoolExecutor(_FILES) as pool:
            writing = deque[Future[None]]()
            for sample in samples:
                name, files = _files_of(sample, label, classes)
                for path, data in files.items():
                    key, other = sample["__key__"], of_path.setdefault(path, sample["__key__"])
                    if other != key:
                        raise _unfit(
                            sample, f"samples {other!r} and {key!r} would both be {path}: give one another key"
                        )
                    writing.append(pool.submit(place.write, path, data))
                    yield f"{path}\t{name}\n"
                while len(writing) > _FILES:
                    writing.popleft().result()
            for one in writing:
                one.result()
    except Exception:
        for path in of_path:
            place.remove(path)
        raise


def _files_of(sample: Sample, label: str, classes: Sequence[str] | None) -> tuple[str, dict[str, bytes]]:
    """The class of a sample, and the paths and contents of its files."""
    key = sample["__key__"]
    fields = {field: data for field, data in fields_of(sample) if field != label}
    if label not in sample or not fields:
        what = (
            f"field {label!r}, which names its class: name it with --label" if fields else "other fields than its class"
        )
        raise _unfit(sample, f"sample {key!r} has no {what}")
    name = _class(sample[label], classes, label, sample)
    inside = key.removeprefix(f"{name}/")
    parts = [*inside.split("/"), name]
    bad = any(part in ("", ".", "..") for part in parts) or "/" in name or name.startswith(".")
    if bad or any(control in name + key for control in "\0\t\n\r"):
        raise _unfit(
            sample,
            f"sample {key!r} of class {name!r} would not be a file in the directory of its class: write it with "
            "wds-pipes get",
        )
    return name, {f"images/{name}/{inside}.{field}": data for field, data in fields.items()}


def _class(data: bytes, classes: Sequence[str] | None, label: str, sample: Sample) -> str:
    text = data.decode("utf-8", "surrogateescape").strip()
    if classes is None:
        return text
    number = int(text) if text.isascii() and text.isdecimal() else len(classes)
    if number >= len(classes):
        raise _unfit(
            sample,
            f"field {label!r} of sample {sample['__key__']!r} is {text!r:.80}, and classes.json has the names of "
            f"{len(classes):,} classes, from 0 on: mend or remove it",
        )
    return classes[number]


def _read_classes(folder: str, storage_options: StorageOptions) -> list[str] | None:
    """The names of the classes of the shards in a directory; None: not known."""
    content = classes_of(folder, storage_options)
    if content is None:
        return None
    try:
        names = json.loads(content)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"classes.json of the shards in {redact(folder)} is no list of names: mend or remove it")
    return names
