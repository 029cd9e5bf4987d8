"""The data sets that LitData's ``optimize`` writes: chunks of items, whose types are in the index.

An item is the sizes of its values, and then the values; of ``TokensLoader`` it is one array. A
chunk may also be the same in frames of zstd (``LDFZ01``), or have its items in a table of Arrow at
its end (``LDARW01``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.cli.converting.chunks import (
    Chunk,
    check_count,
    check_order,
    exactly,
    opened_chunk,
    pieces,
    read_index,
    records,
    shards_of,
    understood,
)
from wds_pipes.cli.converting.litdata_types import decoder
from wds_pipes.cli.converting.rows import is_file
from wds_pipes.cli.converting.source import Options, Row, Run, Shard
from wds_pipes.core.importing import library
from wds_pipes.errors import SampleError
from wds_pipes.io.compression import decompress_bytes, detect
from wds_pipes.io.urls import redact

_WRITER = "litdata.optimize"
_LOADERS = ("PyTreeLoader", "TokensLoader")
_FRAMES, _TABLE = b"LDFZ01\0\0", b"LDARW01\0"
_MOST = 1 << 31  # bytes of an item, decompressed
_DICTS = ("builtins.dict", "collections.OrderedDict")
_LISTS = ("builtins.list", "builtins.tuple")


class Layout(NamedTuple):
    """What the items are.

    Attributes:
        types: the types of their values.
        tree: how the values are put together.
        tokens: an item is one array, without its size.
        alone: each item is compressed by itself.
    """

    types: tuple[str, ...]
    tree: dict[str, Any]
    tokens: bool
    alone: bool


def shards(source: str, max_samples: int, storage_options: Options) -> list[Shard]:
    """Divide the items into shards; only the index is read."""
    url, index = read_index(source, _WRITER, storage_options)
    shown = redact(url)
    with understood(url, _WRITER):
        config, listed = index["config"], index["chunks"]
        loader = config.get("item_loader") or _LOADERS[0]
    if loader not in _LOADERS or config.get("encryption"):
        what = "an encrypted data set" if config.get("encryption") else f"a data set for {loader}"
        mend = "use --from parquet" if loader == "ParquetLoader" else "read it with litdata, and write it without"
        raise ValueError(f"{shown} is of {what}, which is not read: {mend}")
    with understood(url, _WRITER):
        types = tuple(config["data_format"])
        tree = json.loads(config["data_spec"])[1]
        tokens = loader == "TokensLoader" or any(chunk.get("dim") is not None for chunk in listed)
        layout = Layout(types, tree, tokens, config.get("compression_level") == "sample")
        _item(tree, iter(types))
        compression = config.get("compression") or ""
        chunks = [
            Chunk(
                chunk["filename"],
                int(chunk["chunk_size"]),
                layout,
                _kind(compression) if f".{compression}." in chunk["filename"] else "",
            )
            for chunk in listed
        ]
    for name in types:
        try:
            decoder(name)
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"{shown} has values of type {name!r}, which only litdata reads: write the data set again without them"
            ) from error
    return shards_of(source, [[chunk] for chunk in chunks], max_samples, storage_options)


def _kind(compression: str) -> str:
    name = compression.partition(":")[0]
    return "zst" if name == "zstd" else name


def rows(run: Run, storage_options: Options) -> Iterator[Row]:
    """Read items."""
    chunk: Chunk = run.start
    with opened_chunk(run, storage_options) as stream:
        begin, end = b"", b""
        if not chunk.kind:
            begin = stream.read(8)
            stream.seek(max(0, run.file.size - 12))
            end = stream.read(12)
            stream.seek(0)
        if end[4:] == _TABLE:
            yield from _of_table(stream, run, *struct.unpack("<I", end[:4]))
            return
        layout: Layout = chunk.layout
        decoders = [decoder(name) for name in layout.types]
        for byte, data in _of_frames(stream, run) if begin == _FRAMES else records(stream, run):
            try:
                # litdata does not compress all that it says, and no size begins like a frame
                item = _decompressed(data, _MOST) if layout.alone and detect(data) == "zst" else data
                if layout.tokens:
                    values = [item]
                else:
                    sizes = struct.unpack_from(f"<{len(decoders)}I", item)
                    values = pieces(item, 4 * len(decoders), sizes)
                decoded = [decode(value) for decode, value in zip(decoders, values, strict=True)]
                columns = list(_columns(_item(layout.tree, iter(decoded))))
                row = dict(columns)
                if len(row) < len(columns):
                    raise ValueError("two of its values have one name")
            except Exception as error:
                shown = redact(run.file.url)
                raise SampleError(
                    f"{shown}, byte {byte}: the item has no such values as index.json says ({error}): copy both again",
                    url=shown,
                    offset=byte,
                ) from error
            yield row


def _of_table(stream: BinaryIO, run: Run, size: int) -> Iterator[Row]:
    """Read the items in a table of Arrow, which is at the end of a file."""
    from wds_pipes.cli.converting.tables import rows_of

    arrow = library("pyarrow", "pyarrow", "this data set of LitData", extra="parquet")
    if size + 12 > run.file.size:
        raise ValueError("the table at its end is damaged")
    stream.seek(run.file.size - 12 - size)
    table = exactly(stream, size)
    if table.startswith(b"ARROW1"):
        file = arrow.ipc.open_file(table)
        batches = [file.get_batch(place) for place in range(file.num_record_batches)]
    else:
        batches = list(arrow.ipc.open_stream(table))
    check_count(sum(batch.num_rows for batch in batches), run.start)
    yield from rows_of(batches, run.start.record, run.records, run.file.url)


def _of_frames(stream: BinaryIO, run: Run) -> Iterator[tuple[int, bytes]]:
    """Read items that are compressed in frames, each with the byte where its frame begins."""
    _, version, _, count, _, frames = struct.unpack("<8s2H3I", exactly(stream, 24))
    if version != 1:
        raise ValueError(f"its frames are of version {version}, which is not known")
    check_count(count, run.start)
    offsets = struct.unpack(f"<{count + 1}I", exactly(stream, 4 * (count + 1)))
    check_order(offsets)
    listed = list(struct.iter_unpack("<2IQ2I", exactly(stream, 24 * frames)))
    first, stop = run.start.record, run.start.record + (run.records or 0)
    done = 0
    for begin, number, byte, size, whole in listed:
        if begin != done or begin + number > count:
            raise ValueError("the table of its frames is damaged")
        done += number
        if done > first and begin < stop:
            stream.seek(byte)
            data = _decompressed(exactly(stream, size), whole)
            sizes = [offsets[place + 1] - offsets[place] for place in range(begin, done)]
            for place, item in enumerate(pieces(data, 0, sizes), begin):
                if first <= place < stop:
                    yield byte, item
    if done != count:
        raise ValueError("the table of its frames is damaged")


def _decompressed(data: bytes, most: int) -> bytes:
    found = decompress_bytes(data, "zst", most)
    if found is None:
        raise ValueError(f"it has more than {most:,} bytes, decompressed")
    return found


def _item(tree: dict[str, Any], values: Iterator[Any]) -> Any:
    """An item of its values, as a tree of dicts and lists says.

    Raises:
        ValueError: the tree has something else, or other values.
    """
    item = _part(tree, values)
    if next(values, _item) is not _item:
        raise ValueError("an item has more values than data_spec says")
    return item


def _part(tree: dict[str, Any], values: Iterator[Any]) -> Any:
    if tree["type"] is None:
        try:
            return next(values)
        except StopIteration:
            raise ValueError("an item has fewer values than data_spec says") from None
    found = [_part(child, values) for child in tree["children_spec"]]
    if tree["type"] in _DICTS:
        return dict(zip(map(str, json.loads(tree["context"])), found, strict=True))
    if tree["type"] in _LISTS:
        return found
    raise ValueError(f"items are put together by {tree['type']}, which is not known")


def _columns(item: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The columns of an item: those of an inner dict or list too if there are files or arrays in
    it.
    """
    if isinstance(item, (dict, list)) and (not name or _has_bytes(item)) and not is_file(item):
        for key, value in item.items() if isinstance(item, dict) else enumerate(item):
            yield from _columns(value, f"{name}.{key}" if name else str(key))
    else:
        yield name or "value", item


def _has_bytes(item: Any) -> bool:
    if isinstance(item, (dict, list)):
        return any(map(_has_bytes, item.values() if isinstance(item, dict) else item))
    return isinstance(item, bytes) or hasattr(item, "dtype")
