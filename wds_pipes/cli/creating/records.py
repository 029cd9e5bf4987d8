"""Samples that are to be written: their keys, and where the bytes of their fields are."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from wds_pipes.cli.creating.encoding import Encode
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError
from wds_pipes.io.range_runs import Range
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import identify, local_path, redact
from wds_pipes.tar.keys import split_key, without_dots

_SHOWN = 10
_REQUESTS, _AHEAD = 16, 64  # remote files that are read at a time, and samples that are read ahead


class Content(NamedTuple):
    """A file whose bytes are a field.

    Attributes:
        url: its path or URL.
        size: its size in bytes.
        mark: its time of modification in nanoseconds, or its ETag; "": not known.
    """

    url: str
    size: int
    mark: str

    @property
    def identity(self) -> str:
        """What distinguishes it from another file, independent of where its directory is."""
        name = os.path.basename(self.url) if local_path(self.url) is not None else identify(self.url)
        return f"{self.mark} {name}"


class Record(NamedTuple):
    """A sample: its key, and its fields by name, as bytes or as a file that has them."""

    key: str
    fields: dict[str, Content | bytes]

    def size_of(self, field: str) -> int:
        """The bytes of a field."""
        value = self.fields[field]
        return len(value) if isinstance(value, bytes) else value.size


class Problems:
    """What is wrong with the input: all of it is found before anything is written.

    Attributes:
        count: how many problems there are.
    """

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}
        self.count = 0

    def add(self, line: str) -> None:
        """Note a problem, with its mend."""
        self.count += 1
        if len(self._lines) < _SHOWN:
            self._lines[line.rstrip(".")] = None

    def check(self) -> None:
        """Raise SampleError if there are problems."""
        if self.count:
            left = self.count - len(self._lines)
            more = [f"and {plural(left, 'more problem')}"] * (left > 0)
            lines = "\n".join(f"  {line}" for line in [*self._lines, *more])
            raise SampleError(f"{plural(self.count, 'problem')} in the input, so nothing was written:\n{lines}")


def samples(
    records: Iterable[Record], storage_options: dict[str, Any] | None, encode: Encode | None = None
) -> Iterator[dict[str, Any]]:
    """Read samples, as ``TarWriter`` writes them; ``encode`` says what becomes of images.

    Raises:
        DecodeError: an image cannot be decoded.
        SampleError: a file was changed after it was listed.
        OSError: a file cannot be read; a ShardError for one in a store.
    """
    rest, reader = iter(records), RangeReader(storage_options, _REQUESTS)
    while ahead := list(islice(rest, _AHEAD)):
        remote = [
            value
            for record in ahead
            for value in record.fields.values()
            if isinstance(value, Content) and local_path(value.url) is None
        ]
        read = _read_remote(remote, reader) if remote else {}
        for record in ahead:
            sample: dict[str, Any] = {"__key__": record.key}
            for field, value in record.fields.items():
                if not isinstance(value, Content):
                    sample[field] = value
                else:
                    data = read[value.url] if value.url in read else _read_local(value, record.key)
                    if data is None or len(data) != value.size:
                        raise _changed(value, record.key)
                    sample[field] = data
            if encode is not None:
                files = {name: redact(value.url) for name, value in record.fields.items() if isinstance(value, Content)}
                sample = encode.apply(sample, files)
            yield sample


def _read_local(content: Content, key: str) -> bytes:
    with open(local_path(content.url) or content.url, "rb") as file:
        if str(os.fstat(file.fileno()).st_mtime_ns) != content.mark:
            raise _changed(content, key)
        return file.read(content.size + 1)


def _read_remote(contents: Sequence[Content], reader: RangeReader) -> dict[str, bytes | None]:
    """Read files of stores by their URLs; None: one is another than the listed one."""
    distinct = list({content.url: content for content in contents}.values())
    found: dict[str, bytes | None] = {content.url: b"" for content in distinct}
    whole = [content for content in distinct if content.size]
    with reader.read(Range(content.url, 0, content.size) for content in whole) as parts:
        for content, (data, _) in zip(whole, parts, strict=True):
            reported = reader.reported(content.url)
            etag = reported.validators.get("etag", content.mark)
            same = reported.size in (None, content.size) and (content.mark[:1] != '"' or etag == content.mark)
            found[content.url] = bytes(data) if same else None
    return found


def _changed(content: Content, key: str) -> SampleError:
    return SampleError(
        f"{redact(content.url)} was changed after it was listed: run the command again when no program writes it",
        key=key,
    )


_RULES = "pass --key-split first-dot if that is meant, or --key-split last-dot, which writes v1.0_a.jpg as v1_0_a.jpg"


class Grouping:
    """Groups files into samples.

    Args:
        key_split: ``"first-dot"``; ``"last-dot"``, with which the other dots of a name become
            underscores, since a key has no dots; None: as ``"first-dot"``, and names that were
            probably not meant so are problems.
        problems: takes what is wrong.
    """

    def __init__(self, key_split: str | None, problems: Problems) -> None:
        self._rule, self._problems = key_split or "first-dot", problems
        self._sure = key_split is not None
        self._found: dict[str, dict[str, Content | bytes]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._stems: dict[str, str] = {}

    def add(self, name: str, content: Content) -> str | None:
        """Add a file by its name relative to the source; return its key, or None if it has none."""
        parts = split_key(name, self._rule)
        if parts is None:
            self._problems.add(
                f"{name} belongs to no sample: it has no extension, which names its field, its name begins with a dot, "
                f"or it is in '__NAME__/'. Rename it, or leave it out with --ignore {name.rpartition('/')[2]!r}"
            )
            return None
        stem, field = parts
        key = without_dots(stem) if self._rule == "last-dot" else stem
        other = self._names.setdefault((key, field), name)
        if field in self._found.get(key, ()) and other == name:
            self._problems.add(f"{name} comes twice: name it once, since a key has one sample")
        elif other != name:
            self._problems.add(f"{other} and {name} are both field {field!r} of sample {key!r}: rename one of them")
        elif self._stems.setdefault(key, stem) != stem:
            self._problems.add(f"{self._stems[key]!r} and {stem!r} would both have the key {key!r}: rename one of them")
        else:
            self._found.setdefault(key, {})[field] = content
        return key

    def records(self) -> list[Record]:
        """The samples, in the order in which their first files were added."""
        records = [Record(key, fields) for key, fields in self._found.items()]
        if not self._sure:
            self._doubt(records)
        return records

    def _doubt(self, records: Iterable[Record]) -> None:
        """Find names with several dots of which the first does not end the key."""
        records = list(records)
        dotted = Counter(field for record in records for field in record.fields if "." in field)
        alone = len(records) == 1
        endings = Counter(field.rpartition(".")[2] for field in dotted)
        for record in records:
            for field in record.fields:
                if dotted[field] == 1 and (not alone or endings[field.rpartition(".")[2]] > 1):
                    self._problems.add(
                        f"{self._names[record.key, field]}: a key ends at the first dot of a name, so this would be "
                        f"field {field!r} of sample {record.key!r}, which no other sample has: {_RULES}"
                    )


LABEL = "cls"  # the field of a label
_INTEGER = re.compile("-?[0-9]+")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|nan", re.IGNORECASE)


def add_labels(records: Sequence[Record], labels: Sequence[str | None], problems: Problems) -> list[str]:
    """Add its label to each sample: the integer, or the number of the name.

    Returns:
        The sorted names of the classes, which is empty if labels are integers.

    Raises:
        ValueError: only some labels are numbers, or they are no integers.
    """
    found = [label for label in labels if label is not None]
    if found and len(found) < len(records):
        bare = records[labels.index(None)]
        problems.add(f"sample {bare.key!r} has no label, and others have: give it one")
    classes, of_names = _classes_of(found)
    for record, label in zip(records, labels, strict=True):
        if label is not None:
            record.fields[LABEL] = of_names[label]
    return classes


def _classes_of(labels: Iterable[str]) -> tuple[list[str], dict[str, bytes]]:
    """The names of the classes, and the field of each label."""
    found = sorted(set(labels))
    odd = [label for label in found if not _INTEGER.fullmatch(label)]
    if not odd:
        return [], {label: str(int(label)).encode() for label in found}
    if any(map(_NUMBER.fullmatch, found)):
        raise ValueError(
            f"some labels are numbers, and {odd[0]!r} is no integer: write integers, such as 3 and not 3.0, or names, "
            "and leave out samples without a label"
        )
    return found, {name: str(number).encode() for number, name in enumerate(found)}
