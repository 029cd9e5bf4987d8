"""What ``wds-pipes export`` writes: a file of each shard.

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
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from wds_pipes.cli.converting.imagefolder import check_lists, read_classes, unfit, write_images
from wds_pipes.cli.converting.rows import is_text
from wds_pipes.cli.shards import check_names, marks, names_of, unchanged
from wds_pipes.codecs.table import ROWS
from wds_pipes.codecs.text import exact_integer
from wds_pipes.core.counts import NothingKeptError
from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.io.outputs import OutputFile, open_output
from wds_pipes.io.tasks.task import Facts, Job, Place, Task, fingerprint
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import list_shards
from wds_pipes.tar.index_formats import folder_of
from wds_pipes.tar.keys import is_metadata

if TYPE_CHECKING:
    from wds_pipes.cli.look.reading import Source

_ENDINGS = {"jsonl": ".jsonl", "parquet": ".parquet", "tfrecord": ".tfrecord", "imagefolder": ".txt"}
_TAR = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz)$", re.IGNORECASE)
_GROUP_BYTES = 64 << 20  # of a row group of Parquet, before compression, and of the samples that come first
_TEXTS = frozenset(("txt", "text", "transcript", "html", "htm", "json", "jsn", "jsonl"))
_INTEGERS = frozenset(extension for extension, row in ROWS.items() if row.decode is int)

Options = dict[str, Any] | None
Sample = dict[str, Any]


class Export(NamedTuple):
    """How shards are written; it is sent to other processes.

    Attributes:
        kind: the format.
        fields: those that are written; None: all.
        label: the field of the class, for imagefolder.
        key_split: as in ``group_by_key``.
        storage_options: how to reach the shards.
    """

    kind: str
    fields: tuple[str, ...] | None
    label: str
    key_split: str
    storage_options: Options


def plan(
    urls: Sequence[str],
    place: Place,
    kind: str,
    *,
    fields: tuple[str, ...] | None,
    label: str,
    key_split: str,
    storage_options: Options,
) -> Job:
    """Make the job that writes shards in another format.

    Raises:
        ValueError: there are no shards, one is named twice, or two have one name.
        ShardError: a shard does not exist.
    """
    if kind == "tfrecord":
        from wds_pipes.cli.converting.tfrecord import masked_crc, packed

        masked_crc(packed({}))  # whether the libraries are installed
    elif kind == "parquet":
        library("pyarrow.parquet", "pyarrow", "parquet", extra="parquet")
    shards, known = list_shards(list(urls), storage_options)
    found = marks(shards, storage_options, known)
    classes = {}
    if kind == "imagefolder":
        classes = {folder: read_classes(folder, storage_options) for folder in dict.fromkeys(map(folder_of, shards))}
    tasks = []
    outputs = [_TAR.sub("", name) + _ENDINGS[kind] for name in names_of(shards)]
    check_names(shards, outputs)
    for url, output, mark in zip(shards, outputs, found, strict=True):
        if kind == "imagefolder" and output.startswith("images/"):
            raise ValueError(
                f"the list {output} of {redact(url)} would be among the images: export each directory by itself, into "
                "a directory of its own"
            )
        names = classes.get(folder_of(url))
        tasks.append(Task(output, (output,), (url, mark, names), fingerprint(mark, names)))
    options = {"to": kind, "fields": fields, "label": label, "key_split": key_split}
    work = partial(write, Export(kind, fields, label, key_split, storage_options))
    finish = partial(_finish, kind, fields, [task.name for task in tasks])
    return Job("export", place, work, tasks, options, finish, lists="images" if kind == "imagefolder" else "")


def _finish(kind: str, fields: Sequence[str] | None, names: Sequence[str], place: Place, facts: list[Facts]) -> None:
    """Check what only all files together show.

    Raises:
        NothingKeptError: no sample of any shard has one of the fields that are written.
        SampleError: two images have one name.
    """
    if any(fact["without_fields"] for fact in facts) and not any(fact["samples"] for fact in facts):
        raise NothingKeptError(
            f"no sample has the field {', '.join(fields or ())}: correct --fields, and pass --overwrite"
        )
    if kind == "imagefolder":
        check_lists(names, place)


def write(export: Export, task: Task, place: Place) -> Facts:
    """Write what is made of a shard."""
    from wds_pipes.cli.look.reading import Source

    url, mark, classes = task.arguments
    fields, facts = export.fields, {"samples": 0}
    if export.kind == "imagefolder" and fields is not None and export.label not in fields:
        fields = (*fields, export.label)
    source = Source([url], export.storage_options or {}, export.key_split, fields)
    samples = unchanged(_kept(source, facts), {url: mark}, export.storage_options)
    with _Stream(place.at(task.outputs[0]), place.storage_options) as stream:
        if export.kind == "jsonl":
            from wds_pipes.cli.look.output import write_lines

            base = redact(url).partition("?")[0].rpartition("/")[2]
            write_lines(({**sample, "__url__": base} for sample in samples), cast(BinaryIO, stream), {})
        elif export.kind == "parquet":
            _write_parquet(samples, stream, export.fields)
        elif export.kind == "tfrecord":
            _write_tfrecord(samples, stream)
        else:
            for line in write_images(samples, export.label, classes, place):
                stream.write(line.encode("utf-8", "surrogateescape"))
        stream.commit()
    return {"without_fields": source.without_fields, **facts}


def _kept(source: Source, facts: dict[str, int]) -> Iterator[Sample]:
    """Yield and count the samples of a shard; none, if none has a field to keep: other shards may
    have it.
    """
    try:
        for sample in source.read():
            facts["samples"] += 1
            yield sample
    except NothingKeptError as error:
        facts["without_fields"] = error.samples


class _Stream(io.RawIOBase):
    """A file that appears when it is committed, as a stream."""

    def __init__(self, target: str, storage_options: Options) -> None:
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
    from wds_pipes.cli.converting.tfrecord import framed, packed

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
    with parquet.ParquetWriter(arrow.PythonFile(stream, mode="w"), schema) as writer:
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
    return sorted({name for sample in group for name in sample if not is_metadata(name)})


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples in groups of some megabytes."""
    group, size = [], 0
    for sample in samples:
        group.append(sample)
        size += sum(len(data) for field, data in sample.items() if not is_metadata(field))
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _row(sample: Sample, kinds: dict[str, str]) -> dict[str, Any]:
    """The key and the fields of a sample; fields of integers are integers, others are bytes."""
    key = sample["__key__"]
    row: dict[str, Any] = {"__key__": key.encode("utf-8", "surrogateescape")}
    for field, data in sample.items():
        if is_metadata(field):
            continue
        if field not in kinds:
            raise unfit(
                sample,
                f"sample {key!r} has field {field!r}, which the first samples do not have: name the columns, as in "
                f"--fields {','.join([*kinds, field])}",
            )
        row[field] = exact_integer(data) if kinds[field] == "int64" else data
        if row[field] is None:
            raise unfit(
                sample,
                f"field {field!r} of sample {key!r} is {data!r:.80}, and the first samples have integers in it: leave "
                "it out with --fields, or divide the shard with wds-pipes reshard --max-bytes 64MB",
            )
    return row
