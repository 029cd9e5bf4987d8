"""Samples that are to be written: their keys, and where the bytes of their fields are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError
from wds_pipes.io.range_runs import Range
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import identify, local_path, redact

if TYPE_CHECKING:
    from wds_pipes.cli.creating.encoding import Encode

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
