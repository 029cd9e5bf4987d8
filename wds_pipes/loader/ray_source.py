"""The source of ``ray_dataset``: tasks of Ray Data that read shards, or ranges of their samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ray.data import DataContext, Datasource
from ray.data._internal.delegating_block_builder import DelegatingBlockBuilder
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from wds_pipes.core.stream import Stream
from wds_pipes.indexed import IndexedShards, decode_specs
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import Urls, redact
from wds_pipes.stages import DecodeByExt, GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.stages.fields import read_names
from wds_pipes.tar.index import is_index, list_indexed, list_shards
from wds_pipes.tar.keys import KeySplit, is_metadata
from wds_pipes.tar.located import Located

_CONNECTIONS = 8
_BLOCK_BYTES = 128 << 20


class How(NamedTuple):
    """How shards are read: see ``ray_dataset``."""

    index: Any
    fields: Any
    decode: Any
    storage_options: dict[str, Any] | None
    key_split: KeySplit


class _Part(NamedTuple):
    """What a task reads: samples ``start`` to ``stop`` of a shard; None: to its end, as a stream.

    ``samples`` and ``size`` are None if they are not known.
    """

    url: str
    start: int
    stop: int | None
    samples: int | None
    size: int | None


class ShardSource(Datasource):  # type: ignore[misc]
    """The samples of shards, for ``ray.data.read_datasource``."""

    def __init__(self, urls: Urls, how: How) -> None:
        super().__init__()
        self._how = how
        self._shards = list(_streams(urls, how) if how.index is False else _indexed(urls, how))
        _reader(how, self._shards[0])  # checks the arguments here, and not on the cluster

    def get_name(self) -> str:
        """Return its name in plans of Ray Data."""
        return "WdsPipes"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return the size of all shards, if it is known."""
        sizes = [shard.size for shard in self._shards if shard.size is not None]
        return sum(sizes) if len(sizes) == len(self._shards) else None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[Any]:
        """Return the tasks: at least one for each shard, and of about equal size."""
        context = data_context or DataContext.get_current()
        most = context.target_max_block_size or _BLOCK_BYTES
        total = self.estimate_inmemory_data_size() or 0
        of_a_task = max(1, min(most, total // max(1, parallelism)))
        return [
            ReadTask(
                partial(_blocks, self._how, part, most),
                BlockMetadata(
                    num_rows=part.samples, size_bytes=part.size, input_files=(redact(part.url),), exec_stats=None
                ),
                per_task_row_limit=per_task_row_limit,
            )
            for shard in self._shards
            for part in _cut(shard, of_a_task)
        ]


def _streams(urls: Urls, how: How) -> Iterator[_Part]:
    """Yield the shards, each of which is read from its beginning to its end."""
    shards, facts = list_shards(urls, how.storage_options)
    for number, url in enumerate(shards):
        samples, size, _ = (None, None, None) if facts is None else facts[number]
        yield _Part(url, 0, None, samples, size)


def _indexed(urls: Urls, how: How) -> Iterator[_Part]:
    """Yield the shards, whose samples are found by their offsets."""
    listed = list_indexed(urls, how.index, how.storage_options)
    files = RangeReader(how.storage_options, _CONNECTIONS)
    located = Located(listed.urls, listed.folder, files, how.storage_options, _CONNECTIONS, counts=listed.counts)
    for number, url in enumerate(listed.urls):
        samples = located.starts[number + 1] - located.starts[number]
        size = None if listed.facts is None else listed.facts[number].size
        yield _Part(url, 0, samples, samples, located.offsets(number)[-1] if size is None else size)


def _cut(shard: _Part, size: int) -> Iterator[_Part]:
    """Yield parts of a shard of at most about this size."""
    if shard.stop is None or not shard.size:
        yield shard
        return
    count = max(1, min(-(-shard.size // size), shard.stop))
    for number in range(count):
        start, stop = shard.stop * number // count, shard.stop * (number + 1) // count
        yield _Part(shard.url, start, stop, stop - start, shard.size // count)


def _blocks(how: How, part: _Part, most: int) -> Iterator[Any]:
    """Read a part, on the cluster."""
    builder = DelegatingBlockBuilder()
    for sample in _reader(how, part)():
        builder.add(sample)
        if builder.get_estimated_memory_usage() >= most:
            yield builder.build()
            builder = DelegatingBlockBuilder()
    if builder.num_rows():
        yield builder.build()


def _reader(how: How, part: _Part) -> Callable[[], Iterator[dict[str, Any]]]:
    """Return what reads the samples of a part."""
    if part.stop is not None:
        beside = how.index is True or is_index(os.fspath(how.index))
        data = IndexedShards([part.url], **{**how._asdict(), "index": True if beside else how.index})
        return lambda: iter(data[part.start : part.stop])
    shards = OpenShards(ShardList([part.url]), storage_options=how.storage_options)
    samples = Stream(GroupByKey(LoadTar(shards), key_split=how.key_split))
    fields = None if how.fields is None else {name.lower() for name in read_names("fields", how.fields)}
    specs = decode_specs(how.decode)
    decode = None if specs is None else DecodeByExt(None, *specs).decoder()  # type: ignore[arg-type]

    def read() -> Iterator[dict[str, Any]]:
        for sample in samples:
            if fields is not None:
                sample = {name: data for name, data in sample.items() if name in fields or is_metadata(name)}
            yield sample if decode is None else decode(sample)

    return read
