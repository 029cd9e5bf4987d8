"""A data set of another format: its files, and how its records are divided into shards.

Rules:
1. Where the files say how many records they have, a shard has ``max_samples`` of them, whatever
   file they are in. A TFRecord file does not say it: it becomes one shard.
2. The records are not read before the tasks run, besides the first ones, which decide what the
   fields are: see ``rows``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple, Protocol

from wds_pipes.cli.converting.rows import Row
from wds_pipes.cli.creating.records import Content, Problems, file_of, listed
from wds_pipes.cli.jobs import Options, names_of
from wds_pipes.errors import SampleError, StateError, WdsError
from wds_pipes.io.compression import unreadable
from wds_pipes.io.expand import expand
from wds_pipes.io.outputs import refuse
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import local_path, redact

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

    def shards(self, source: str, max_samples: int, storage_options: Options) -> list[Shard]:
        """Divide a data set into shards."""

    def rows(self, run: Run, storage_options: Options) -> Iterator[Row]:
        """Read records: their values by the names of columns."""


def found_files(source: str, endings: Sequence[str], storage_options: Options) -> list[tuple[str, Content]]:
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
def opened(url: str, storage_options: Options) -> Iterator[BinaryIO]:
    """A file from which any bytes can be read.

    Raises:
        SampleError: what was done with it failed, since it is cut or damaged.
    """
    path = local_path(url)
    with readable(url, storage_options):
        file = open(path, "rb") if path is not None else io.BufferedReader(_Remote(url, storage_options), _READ)
        with file as stream:
            yield stream


class _Remote(io.RawIOBase):
    """A file of a store, of which ranges are read."""

    def __init__(self, url: str, storage_options: Options) -> None:
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
def readable(url: str, storage_options: Options = None) -> Iterator[None]:
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


def read(reader: Format, shard: Shard, storage_options: Options) -> Iterator[tuple[str, Row]]:
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


def first_rows(reader: Format, shards: Sequence[Shard], count: int, storage_options: Options) -> list[Row]:
    """The first records of a data set."""
    runs = chain.from_iterable(shard.runs for shard in shards)
    return list(islice(chain.from_iterable(reader.rows(run, storage_options) for run in runs), count))
