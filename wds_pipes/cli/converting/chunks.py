"""Files of records after a table of their places, which an ``index.json`` lists: the shards of MDS,
and the chunks of LitData, which are made like them.

A file begins with the number of its records, the byte where each begins, and the byte where the
last one ends, of 4 bytes each. It may be compressed as a whole. The libraries that write them are
not needed: they would decode images, and import torch and the clients of all stores.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.cli.converting.source import Options, Run, Shard, divided, opened
from wds_pipes.cli.creating.records import Content
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.compression import KINDS, decompress
from wds_pipes.io.outputs import read_small
from wds_pipes.io.urls import below, local_path, redact
from wds_pipes.io.versions import version_of

_REQUESTS = 16
_LARGE = 1 << 26  # what is read at once: a size may be wrong


class Chunk(NamedTuple):
    """What an index says of a file.

    Attributes:
        name: its name in the data set.
        records: how many it has.
        layout: what they are, in the words of the format.
        kind: its compression, as ``decompress`` takes it; "": it is not compressed.
        size: its size in bytes; None: not known.
        record: the first record of a run.
    """

    name: str
    records: int
    layout: Any
    kind: str = ""
    size: int | None = None
    record: int = 0


def read_index(source: str, writer: str, storage_options: Options) -> tuple[str, Any]:
    """The URL and the content of the index of a data set.

    Raises:
        ValueError: there is none.
    """
    url = os.path.join(source, "index.json")
    content = read_small(url, storage_options)
    if content is None:
        path = local_path(source)
        inside = sorted(os.listdir(path)) if path is not None and os.path.isdir(path) else []
        found = [name for name in inside if os.path.isfile(os.path.join(source, name, "index.json"))]
        such = f". It is in {', '.join(found)}: convert each of them" if found else ""
        raise ValueError(f"{redact(source)} has no index.json: name the directory that {writer} has written{such}")
    with understood(url, writer):
        return url, json.loads(content)


@contextmanager
def understood(url: str, writer: str) -> Iterator[None]:
    """Say that an index is none, if it has not what is read of it."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{redact(url)} is no index that {writer} has written ({told}): copy it again, or choose another --from"
        ) from error


def shards_of(
    source: str, chunks: Sequence[Sequence[Chunk]], max_samples: int, storage_options: Options
) -> list[Shard]:
    """Divide the records of files into shards; of the forms of each file, the first that exists is
    read.

    Raises:
        ShardError: a file does not exist.
        StateError: it has another size than the index says.
        ValueError: it is compressed in a way that is not read.
    """

    def find(forms: Sequence[Chunk]) -> tuple[Content, Chunk]:
        for chunk in forms:
            url = below(source, chunk.name)
            size, mark, _ = version_of(url, storage_options)
            if size is None:
                continue
            if chunk.size not in (None, size):
                raise StateError(
                    f"{redact(url)} has {plural(size, 'byte')}, and index.json says {chunk.size:,}: one of them is cut "
                    "or of another data set, so copy both again"
                )
            if chunk.kind not in ("", *KINDS):
                raise ValueError(
                    f"{redact(url)} is compressed as {chunk.kind}, which is not read, but {', '.join(KINDS)} are: "
                    f"decompress it to {os.path.join(redact(source), forms[0].name)}"
                )
            if not chunk.kind and size < 4 * chunk.records:  # else they may be too many to list
                raise StateError(
                    f"{redact(url)} has {plural(size, 'byte')}, and index.json says {plural(chunk.records, 'record')}: "
                    "one of them is cut or of another data set, so copy both again"
                )
            return Content(url, size, mark or ""), chunk
        url = redact(os.path.join(source, forms[-1].name))
        raise ShardError(f"{url} does not exist, and index.json lists it: copy it there", url=url)

    with ThreadPoolExecutor(_REQUESTS) as pool:
        found = list(pool.map(find, chunks))
    known = {file.url: chunk for file, chunk in found}
    return divided(
        [(file, chunk.records) for file, chunk in found],
        max_samples,
        start=lambda file, record: known[file.url]._replace(record=record),
    )


@contextmanager
def opened_chunk(run: Run, storage_options: Options) -> Iterator[BinaryIO]:
    """The file of a run, decompressed; it can seek if it is not compressed. A ValueError becomes
    the error of a file that cannot be read.
    """
    with opened(run.file.url, storage_options) as stream:
        yield decompress(stream, run.start.kind) if run.start.kind else stream


def records(stream: BinaryIO, run: Run) -> Iterator[tuple[int, bytes]]:
    """Read records, each with the byte where it begins.

    Raises:
        ValueError: the file is cut or damaged, or of another index.
    """
    chunk: Chunk = run.start
    check_count(int.from_bytes(exactly(stream, 4), "little"), chunk)
    table = exactly(stream, 4 * (chunk.records + 1))
    offsets = struct.unpack(f"<{chunk.records + 1}I", table)
    at = 4 + len(table)
    check_order((at, *offsets))
    if not chunk.kind and offsets[-1] != run.file.size:
        raise ValueError(f"its records end at byte {offsets[-1]:,}, and it has {plural(run.file.size, 'byte')}")
    begin = offsets[chunk.record]
    if chunk.kind:
        while at < begin:
            at += len(exactly(stream, min(_LARGE, begin - at)))
    else:
        stream.seek(begin)
    for place in range(chunk.record, chunk.record + (run.records or 0)):
        yield offsets[place], exactly(stream, offsets[place + 1] - offsets[place])
    if chunk.kind and chunk.record + (run.records or 0) == chunk.records and stream.read(1):  # or its checksum is wrong
        raise ValueError("there are bytes after its last record")


def check_order(offsets: Sequence[int]) -> None:
    """Raise ValueError if the bytes where records begin are not in their order."""
    if any(begin > end for begin, end in pairwise(offsets)):
        raise ValueError("the table of its records is damaged")


def check_count(found: int, chunk: Chunk) -> None:
    """Raise ValueError if a file has not as many records as its index says."""
    if found != chunk.records:
        raise ValueError(
            f"it has {plural(found, 'record')}, and index.json says {chunk.records:,}: one of them is damaged or of "
            "another data set"
        )


def exactly(stream: BinaryIO, size: int) -> bytes:
    """The next bytes of a stream.

    Raises:
        ValueError: there are not so many.
    """
    data = stream.read(min(size, _LARGE))
    while len(data) < size and (more := stream.read(min(size - len(data), _LARGE))):
        data += more
    if len(data) < size:
        raise ValueError("it is cut")
    return data


def as_file(data: bytes, ending: str) -> dict[str, Any]:
    """Bytes of a known type, as the rows of other formats have them."""
    return {"bytes": data, "path": f".{ending}"}


def pixels(data: bytes) -> Any:
    """The array of a picture that is stored as its width, its height, its mode and its pixels."""
    import numpy as np
    from PIL import Image

    width, height, size = struct.unpack_from("<3I", data)
    mode, content = data[12 : 12 + size].decode(), data[12 + size :]
    if width * height > 8 * len(content):  # Pillow takes the memory before it compares them
        raise ValueError(f"a picture of {width} x {height} pixels has {plural(len(content), 'byte')}")
    return np.array(Image.frombytes(mode, (width, height), content))


def parts(data: bytes, at: int = 0) -> list[bytes]:
    """The values in a list: from byte ``at`` on their number, their sizes, and their bytes."""
    (count,) = struct.unpack_from("<I", data, at)
    sizes = struct.unpack_from(f"<{count}I", data, at + 4)
    return pieces(data, at + 4 + 4 * count, sizes)


def pieces(data: bytes, at: int, sizes: Sequence[int]) -> list[bytes]:
    """Values one after another, from byte ``at`` to the end.

    Raises:
        ValueError: they end elsewhere.
    """
    if at + sum(sizes) != len(data):
        raise ValueError(f"its values have {plural(at + sum(sizes), 'byte')}, and it has {len(data):,}")
    found = []
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found
