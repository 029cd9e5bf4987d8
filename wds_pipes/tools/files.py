"""Samples that are to be written: their keys, and where the bytes of their fields are; their
labels; and samples of the files of a directory.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeGuard

from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, ShardWarning
from wds_pipes.io.outputs import asked, exists
from wds_pipes.io.ranges import Part, Range, RangeReader
from wds_pipes.io.urls import identify, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.keys import split_key, without_dots
from wds_pipes.tools.outputs import REQUESTS, StorageOptions

_SHOWN = 10


class Content(NamedTuple):
    """A file whose bytes are a field, or a part of a file.

    Attributes:
        url: its path or URL.
        size: its size in bytes.
        mark: its time of modification in nanoseconds, or its ETag; "": not known.
        start: where the bytes begin, of a member of a tar; 0: they are the whole file.
    """

    url: str
    size: int
    mark: str
    start: int = 0

    @property
    def identity(self) -> str:
        """What distinguishes it from another file, independent of where its directory is."""
        name = os.path.basename(self.url) if local_path(self.url) is not None else identify(self.url)
        return f"{self.mark} {name}" + (f" {self.start}" if self.start else "")


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
        self._lines: dict[str, str] = {}  # with the mends
        self.count = 0

    def add(self, line: str, mend: str = "") -> None:
        """Note a problem. A mend that several problems may have is shown once, after all."""
        self.count += 1
        if len(self._lines) < _SHOWN:
            self._lines[line.rstrip(".")] = mend

    def check(self) -> None:
        """Raise SampleError if there are problems."""
        if self.count:
            left = self.count - len(self._lines)
            more = [f"and {plural(left, 'more problem')}"] * (left > 0)
            mends = dict.fromkeys(filter(None, self._lines.values()))
            lines = "\n".join(f"  {line}" for line in [*self._lines, *more, *mends])
            raise SampleError(f"{plural(self.count, 'problem')} in the input, so nothing was written:\n{lines}")


def samples(records: Sequence[Record], storage_options: StorageOptions) -> Iterator[dict[str, Any]]:
    """Read samples, as ``TarWriter`` writes them. Files of stores are requested ahead.

    Raises:
        SampleError: a file was changed after it was listed.
        OSError: a file cannot be read; a ShardError for one in a store.
    """
    reader = RangeReader(storage_options, REQUESTS)
    remote = (value for record in records for value in record.fields.values() if _is_remote(value))
    with reader.read(Range(content.url, content.start, content.start + content.size) for content in remote) as parts:
        for record in records:
            sample: dict[str, Any] = {"__key__": record.key}
            for field, value in record.fields.items():
                if not isinstance(value, Content):
                    sample[field] = value
                    continue
                data = _of_store(value, reader, parts) if _is_remote(value) else _read_local(value)
                if data is None:
                    raise SampleError(
                        f"{redact(value.url)} was changed after it was listed: run the command again when no program "
                        "writes it",
                        key=record.key,
                    )
                sample[field] = data
            yield sample


def _is_remote(value: Content | bytes) -> TypeGuard[Content]:
    """Whether it is a file in a store that has bytes to read."""
    return isinstance(value, Content) and value.size > 0 and local_path(value.url) is None


def _read_local(content: Content) -> bytes | None:
    """The bytes of a file; None: it is another than the listed one."""
    if not content.size and local_path(content.url) is None:
        return b""
    with open(local_path(content.url) or content.url, "rb") as file:
        same = str(os.fstat(file.fileno()).st_mtime_ns) == content.mark
        file.seek(content.start)
        data = file.read(content.size + (not content.start))  # one more, if the file is longer now
        return data if same and len(data) == content.size else None


def _of_store(content: Content, reader: RangeReader, parts: Iterator[Part]) -> bytes | None:
    """The next part that was requested; None: the file is another than the listed one."""
    part, begin = next(parts)
    data = part[content.start - begin : content.start - begin + content.size]
    reported = reader.reported(content.url)
    etag = reported.validators.get("etag", content.mark)
    same = (content.start or reported.size in (None, content.size)) and (
        content.mark[:1] != '"' or etag == content.mark
    )
    return data if same and len(data) == content.size else None


_RULES = (
    "A key ends at the first dot of a name: pass --key-split first-dot if that is meant, or --key-split last-dot, "
    "which writes v1.0_a.jpg as v1_0_a.jpg"
)
_NO_SAMPLE = (
    "A file of a sample has an extension, which names its field, does not begin with a dot, and is not in '__NAME__/': "
    "rename the file, or leave it out with --ignore 'PATTERN'"
)


class Grouping:
    """Groups files into samples.

    Args:
        key_split: ``"first-dot"``; ``"last-dot"`` or ``"folder"``, with which the other dots of a
            key become underscores; None: as ``"first-dot"``, and names that were probably not meant
            so are problems.
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
            self._problems.add(f"{name} belongs to no sample", _NO_SAMPLE)
            return None
        stem, field = parts
        key = stem if self._rule == "first-dot" else without_dots(stem)
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
                    name = self._names[record.key, field]
                    what = (
                        f"{name} would be field {field!r} of sample {record.key!r}, and no other sample has this field"
                    )
                    self._problems.add(what, _RULES)


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


_OF_SHARDS = ("*.tar", "*.tar.*", "*.tgz", "*.idx", "index.json", "classes.json")
_OF_ROWS = ("*.parquet", "*.pq")
_PART = re.compile(r"(.*\.(?:tar|tgz)(?:\.\w+)?)[._-](?:part\w*|\d{2,})", re.IGNORECASE | re.DOTALL)
# What other systems write beside files, and into archives; it is left out as hidden files are.
_LEFT_BEHIND = frozenset(("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx"))


def packed(
    source: str,
    problems: Problems,
    storage_options: StorageOptions,
    *,
    ignore: Sequence[str] = (),
    include: Sequence[str] = (),
    links: str = "",
) -> list[tuple[str, Content]]:
    """The files of a directory that are packed. A warning names those of shards, which are not.

    Args:
        source: the directory.
        problems: as in ``listed``.
        storage_options: how to reach the directory.
        ignore: patterns of files that are left out.
        include: patterns of files that are packed although they belong to shards.
        links: as in ``listed``.

    Raises:
        ValueError: there are only shards, only tables, or the parts of an archive.
    """
    found, of_shards = list[tuple[str, Content]](), list[str]()
    for name, content in listed(source, ignore, links, problems, storage_options):
        if _matches(name, _OF_SHARDS) and not _matches(name, include):
            of_shards.append(name)
        else:
            found.append((name, content))
    if of_shards and not found:
        refuse_part(of_shards[0])
        raise ValueError(
            f"SOURCE has shards, such as {of_shards[0]}: wds-pipes reshard and others write their samples. If they are "
            "the files to pack, pass --include '*.tar'"
        )
    if of_shards:
        warnings.warn(
            f"{plural(len(of_shards), 'file')} of shards left out, such as {of_shards[0]}: pass --include "
            f"{os.path.basename(of_shards[0])!r} to pack it",
            ShardWarning,
            stacklevel=4,  # where ``create`` was called
        )
    if found and not include and all(_matches(name, _OF_ROWS) for name, _ in found):
        raise ValueError(
            f"SOURCE has Parquet files, such as {found[0][0]}: wds-pipes convert --from parquet makes samples of their "
            "rows. If each file is a sample, pass --include '*.parquet'"
        )
    return found


def refuse_part(name: str) -> None:
    """Raise ValueError if a file is a part of a tar that was divided, such as ``x.tar.part00``."""
    if part := _PART.fullmatch(name):
        raise ValueError(f"{name} is a part of a tar: join the parts first, as in cat {part[1]}?* > {part[1]}")


def of_directory(
    files: Iterable[tuple[str, Content]], key_split: str | None, problems: Problems
) -> tuple[list[Record], list[str]]:
    """The samples of files: those whose names differ only in what follows the key. They are sorted
    by their names. There are no classes.
    """
    grouping = Grouping(key_split, problems)
    for name, content in files:
        grouping.add(name, content)
    return sorted(grouping.records()), []


def of_classes(
    files: Iterable[tuple[str, Content]], folders: Iterable[str], key_split: str | None, problems: Problems
) -> tuple[list[Record], list[str]]:
    """The samples of files in directories that are classes, as torchvision's ImageFolder reads
    them; each gets a field ``cls``, the number of its class.

    Returns:
        The samples, and the sorted names of the classes.
    """
    grouping, of_key = Grouping(key_split, problems), {}
    for name, content in files:
        label, slash, _ = name.partition("/")
        if not slash:
            problems.add(
                f"{name} is in no directory of a class: move it, leave it out with --ignore {name!r}, or write without "
                "classes: --from files"
            )
        elif (key := grouping.add(name, content)) is not None:
            of_key[key] = label
    records, classes = sorted(grouping.records()), sorted(set(of_key.values()))
    for name in folders:
        if name not in classes:
            problems.add(
                f"{name} is the directory of a class, and has no samples, so that other classes would have other "
                f"numbers where it has some: leave it out with --ignore {name!r}, or add samples"
            )
    for record in records:
        if LABEL in record.fields:
            problems.add(f"sample {record.key!r} has a field 'cls' already: write without classes, --from files")
        record.fields[LABEL] = str(classes.index(of_key[record.key])).encode()
    return records, classes


def folders_in(source: str, ignore: Sequence[str]) -> list[str]:
    """The directories in a directory of this machine; a store has none without files."""
    path = local_path(source)
    if path is None:
        return []
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not _is_hidden(entry.name))
    return [name for name in names if not (_matches(name, ignore) or _matches(f"{name}/x", ignore))]


def is_in(path: str, folder: str) -> bool:
    """Whether a path without links is that of a directory, or of something in it."""
    folder = os.path.realpath(folder)
    return os.path.commonpath([folder, path]) == folder


def listed(
    source: str, ignore: Sequence[str], links: str, problems: Problems, storage_options: StorageOptions
) -> Iterator[tuple[str, Content]]:
    """The files in a directory and those below, in the order of their names relative to it.

    Args:
        source: the directory.
        ignore: patterns of names that are left out.
        links: what to do about a symbolic link out of the directory, which is a problem; "": such
            links are followed, as those inside of it are.
        problems: what is wrong is added to it.
        storage_options: how to reach the directory.
    """
    path = local_path(source)
    found = _local(path, "", links, problems, ()) if path is not None else _remote(source, storage_options)
    for name, content in found:
        if is_chosen(name, ignore):
            yield name, content


def is_chosen(name: str, ignore: Sequence[str]) -> bool:
    """Whether a file is read: it is not hidden, nor left out by a pattern."""
    return not any(map(_is_hidden, name.split("/"))) and not (ignore and _matches(name, ignore))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LEFT_BEHIND


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("/")[2], pattern) for pattern in patterns)


def _local(
    folder: str, prefix: str, links: str, problems: Problems, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, Content]]:
    status = os.stat(folder)
    if (status.st_dev, status.st_ino) in above:
        problems.add(f"{folder} is a link to a directory that contains it: remove the link")
        return
    above = (*above, (status.st_dev, status.st_ino))
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if _is_hidden(entry.name):
            continue
        name = prefix + entry.name
        if links and entry.is_symlink() and not is_in(os.path.realpath(entry.path), entry.path[: -len(name)]):
            problems.add(f"{entry.path} is a link out of SOURCE, to {os.path.realpath(entry.path)}: {links}")
        elif entry.is_dir():
            yield from _local(entry.path, f"{name}/", links, problems, above)
        elif entry.is_file():
            status = entry.stat()
            yield name, Content(entry.path, status.st_size, str(status.st_mtime_ns))
        else:
            problems.add(f"{entry.path} is neither a file nor a directory, or a link to nothing: remove it")


def _remote(source: str, storage_options: StorageOptions) -> Iterator[tuple[str, Content]]:

    if source.startswith(("http://", "https://")):
        raise ValueError(f"{redact(source)} is on a web server, which lists no files: name them in a list, --from list")
    found = asked(source, storage_options, _found, "listed")
    if not found:
        raise ValueError(f"there are no files in {redact(source)}: check the URL")
    yield from sorted(found, key=lambda pair: pair[0].split("/"))  # the order of a disk


def _found(fs: Any, path: str) -> list[tuple[str, Content]]:
    """The files below a directory of a store, with their names in it."""
    found, start = list[tuple[str, Content]](), len(path.rstrip("/")) + 1
    for name, entry in fs.find(path.rstrip("/"), detail=True).items():
        if name[start:] and name[-1] != "/":
            mark = str(entry.get("ETag") or entry.get("etag") or entry.get("mtime") or "")
            found.append((name[start:], Content(fs.unstrip_protocol(name), int(entry["size"] or 0), mark)))
    return found


def file_of(url: str, storage_options: StorageOptions = None) -> Content:
    """What is known of a file.

    Raises:
        ShardError: it does not exist, the store does not answer, or does not tell its size.
    """
    size, mark, _ = version_of(url, storage_options)
    if size is None:
        shown = redact(url)
        if local_path(url) is None and exists(url, storage_options):
            raise ShardError(f"{shown} is on a server that does not tell its size: copy it to a disk first", url=shown)
        what = f"{shown} cannot be found: check the path or URL, and --storage-options"
        raise ShardError(what, url=shown, missing=True)
    return Content(url, size, mark or "")
