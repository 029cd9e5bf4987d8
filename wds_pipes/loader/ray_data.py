"""ray_dataset: the samples of tar shards as a data set of Ray Data."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from wds_pipes.core.importing import library
from wds_pipes.core.suggest import checks_options
from wds_pipes.io.urls import Urls
from wds_pipes.tar.keys import KeySplit


@checks_options
def ray_dataset(
    urls: Urls,
    *,
    index: bool | str | os.PathLike[str] = True,
    fields: Iterable[str] | None = None,
    decode: Any = None,
    storage_options: dict[str, Any] | None = None,
    key_split: KeySplit = "first-dot",
    reading: dict[str, Any] | None = None,
) -> Any:
    """Return the samples of tar shards as a ``ray.data.Dataset``; needs ray.

    Rows are the dicts that ``group_by_key`` yields, with ``__key__``, ``__url__`` and the fields,
    whole and in the order of the shards. Ray Data itself keeps the order of blocks only if
    ``ray.data.DataContext.get_current().execution_options.preserve_order`` is true.

    With an index of offsets, shards are read in ranges of samples of about equal size, as many as
    Ray requests, and none larger than its blocks; the number of rows is known. Without one, a task
    reads a shard from its beginning to its end.

    Args:
        urls: the shards, as ``ShardList`` takes them, also by an ``index.json``. All machines of
            the cluster can read them.
        index: where the indexes of offsets are, as in ``IndexedShards``; False: there are none, as
            for compressed shards.
        fields: the fields to keep, such as ``["jpg", "cls"]``; None: all.
        decode: decode the samples as ``decode_by_ext`` does, as in ``IndexedShards``; None: fields
            stay bytes.
        storage_options: how to reach the storage, as fsspec takes it.
        key_split: as in ``group_by_key``.
        reading: options of ``ray.data.read_datasource``, such as ``{"override_num_blocks": 64}``.

    Raises:
        ValueError, TypeError: nothing matches, or an argument does not fit.
        ShardError: a shard has no index, or it is damaged. When the data set is read: a shard
            cannot be read, is damaged, or is another than the one that was indexed.
        SampleError: when the data set is read: the key of a sample comes again, apart from its
            other members.
    """
    data = library("ray.data", "'wds_pipes[ray]'", "ray_dataset()")
    from wds_pipes.loader.ray_source import How, ShardSource

    source = ShardSource(urls, How(index, fields, decode, storage_options, key_split))
    return data.read_datasource(source, **(reading or {}))
