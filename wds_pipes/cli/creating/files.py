"""Samples of a directory: files with one name and several extensions, or directories that are
classes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

from wds_pipes.cli.creating.records import Content, Grouping, Problems, Record
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError
from wds_pipes.io.outputs import exists, refuse
from wds_pipes.io.remote.file_systems import file_system
from wds_pipes.io.remote.metadata import ask
from wds_pipes.io.urls import local_path, redact
from wds_pipes.io.versions import version_of

_REQUESTS = 16
_OF_PAGE = re.compile(r"[?#]")  # in links that sort a page
_OF_SHARDS = ("*.tar", "*.tar.*", "*.tgz", "*.idx", "index.json", "classes.json")
Options = dict[str, Any] | None


@dataclass
class Files:
    """Which files of a directory are packed.

    Attributes:
        ignore: patterns of files that are left out.
        include: patterns of files that are packed although they belong to shards.
        links: as in ``listed``.
        of_shards: the files that were left out since they belong to shards.
    """

    ignore: Sequence[str] = ()
    include: Sequence[str] = ()
    links: str = ""
    of_shards: list[str] = field(default_factory=list)

    def chosen(self, source: str, problems: Problems, storage_options: Options) -> Iterator[tuple[str, Content]]:
        """The files that are packed; ValueError if there are only shards."""
        found = False
        for name, content in listed(source, self.ignore, self.links, problems, storage_options):
            if _matches(name, _OF_SHARDS) and not _matches(name, self.include):
                self.of_shards.append(name)
            else:
                found = True
                yield name, content
        if self.of_shards and not found:
            raise ValueError(
                f"SOURCE has shards, such as {self.of_shards[0]}: wds-pipes reshard and others write their samples. If "
                "they are the files to pack, pass --include '*.tar'"
            )

    def note(self) -> str | None:
        """Say what was left out; None: nothing."""
        if not self.of_shards:
            return None
        left, first = plural(len(self.of_shards), "file"), self.of_shards[0]
        return (
            f"note: {left} of shards left out, such as {first}: pass --include {os.path.basename(first)!r} to pack it"
        )


def of_directory(
    source: str, key_split: str | None, files: Files, problems: Problems, storage_options: Options
) -> list[Record]:
    """The samples of a directory and those below: files whose names differ only in what follows
    the key. They are sorted by their names. Hidden files are left out.
    """
    grouping = Grouping(key_split, problems)
    for name, content in files.chosen(source, problems, storage_options):
        grouping.add(name, content)
    return sorted(grouping.records())


def of_classes(
    source: str, key_split: str | None, files: Files, problems: Problems, storage_options: Options
) -> tuple[list[Record], list[str]]:
    """The samples of a directory whose directories are classes, as torchvision's ImageFolder reads
    it; each gets a field ``cls``, the number of its class.

    Returns:
        The samples, and the sorted names of the classes.
    """
    grouping, of_key = Grouping(key_split, problems), {}
    for name, content in files.chosen(source, problems, storage_options):
        label, slash, _ = name.partition("/")
        if not slash:
            problems.add(
                f"{name} is in no directory of a class: move it, leave it out with --ignore {name!r}, or write without "
                "classes: --from files"
            )
        elif (key := grouping.add(name, content)) is not None:
            of_key[key] = label
    records, classes = sorted(grouping.records()), sorted(set(of_key.values()))
    for name in _folders(source):
        if name not in classes and not (_matches(name, files.ignore) or _matches(f"{name}/x", files.ignore)):
            problems.add(
                f"{name} is the directory of a class, and has no samples, so that other classes would have other "
                f"numbers where it has some: leave it out with --ignore {name!r}, or add samples"
            )
    for record in records:
        if "cls" in record.fields:
            problems.add(f"sample {record.key!r} has a field 'cls' already: write without classes, --from files")
        record.fields["cls"] = str(classes.index(of_key[record.key])).encode()
    return records, classes


def _folders(source: str) -> list[str]:
    """The directories in a directory of this machine; a store has none without files."""
    path = local_path(source)
    if path is None:
        return []
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def hint_of_classes(records: Sequence[Record]) -> str | None:
    """Say that directories may be classes, if each has several samples of one file; None: no."""
    folders = Counter(record.key.rpartition("/")[0] for record in records)
    flat = all(len(record.fields) == 1 and record.key.count("/") == 1 for record in records)
    if not flat or len(folders) < 2 or min(folders.values()) < 2:
        return None
    shown = next(iter(folders))
    return (
        f"note: the files are in directories such as {shown}/, and their samples have no labels. If these are classes, "
        "pass --from classes"
    )


def is_in(path: str, folder: str) -> bool:
    """Whether a path without links is that of a directory, or of something in it."""
    folder = os.path.realpath(folder)
    return os.path.commonpath([folder, path]) == folder


def listed(
    source: str, ignore: Sequence[str], links: str, problems: Problems, storage_options: Options
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
        if not (name.startswith(".") or "/." in name) and not (ignore and _matches(name, ignore)):
            yield name, content


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
        if entry.name.startswith("."):
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


def _remote(source: str, storage_options: Options) -> Iterator[tuple[str, Content]]:

    linked = source.startswith(("http://", "https://"))
    try:
        fs, path = file_system(source, storage_options)
        path = path.rstrip("/")
        if linked:
            entries: dict[str, Any] = {name: {} for name in _linked(path, storage_options)}
        else:
            entries = ask(source, storage_options, lambda fs, _: dict(fs.find(path, detail=True)))
    except Exception as error:
        refuse(source, error, storage_options, "listed")
    start = len(path) + 1
    files = [name for name in entries if name[start:] and name[-1] != "/"]
    if not files:
        raise ValueError(f"there are no files in {redact(source)}: check the URL")
    found = {unquote(name[start:]) if linked else name[start:]: name for name in files}
    names = sorted(found, key=lambda name: name.split("/"))  # the order of a disk
    if linked:
        with ThreadPoolExecutor(_REQUESTS) as pool:
            yield from zip(names, pool.map(lambda name: file_of(found[name], storage_options), names), strict=True)
        return
    for name in names:
        entry = entries[found[name]]
        mark = str(entry.get("ETag") or entry.get("etag") or entry.get("mtime") or "")
        yield name, Content(fs.unstrip_protocol(found[name]), int(entry["size"] or 0), mark)


def _linked(url: str, storage_options: Options) -> Iterator[str]:
    """The files in a directory of a web server, and in those below: what its pages link to. The
    ``find`` of fsspec leaves out a page that cannot be read.
    """
    for entry in ask(f"{url}/", storage_options, lambda fs, path: fs.ls(path, detail=True)):
        found = str(entry["name"]).rstrip("/")
        name = found[len(url) + 1 :]
        if not found.startswith(f"{url}/") or name in (".", "..") or _OF_PAGE.search(name):
            continue
        if entry["type"] == "directory":
            yield from _linked(found, storage_options)
        else:
            yield found


def file_of(url: str, storage_options: Options = None) -> Content:
    """What is known of a file.

    Raises:
        ShardError: it does not exist, the store does not answer, or does not tell its size.
    """
    size, mark, _ = version_of(url, storage_options)
    if size is None:
        shown = redact(url)
        if local_path(url) is None and exists(url, storage_options):
            raise ShardError(f"{shown} is on a server that does not tell its size: copy it to a disk first", url=shown)
        error = ShardError(f"{shown} cannot be found: check the path or URL, and --storage-options", url=shown)
        error.missing = True
        raise error
    return Content(url, size, mark or "")
