"""CacheShards: keep remote shards on a local disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wds_pipes.core.chain import Chain
from wds_pipes.core.stage import Out, Stage, functional_name

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache


class CacheShards(Stage[Out]):
    """Keep remote shards on a local disk, for the ``open_shards`` after it (functional name:
    ``cache_shards``).

    A shard is stored while the reader streams it. Each shard is downloaded once for all workers and
    ranks of a machine. A complete file appears in one step, under a name that is a hash of the
    whole URL. When the files would exceed ``max_bytes``, those used least recently are removed, but
    never one that is open. Processes may be killed at any time: the next reader checks what was
    stored, and continues the download or starts it again. Local shards are read in place.
    ``wds-pipes cache`` shows and clears the directory. A resume in the middle of a shard that is
    not in the cache reads it from the store, from its position on, and stores nothing of it.

    Args:
        source: a pipe of shards: ``ShardList``, or a pipe of URLs.
        directory: the directory of the cache, on a local disk; it is created if it does not exist.
            Machines share one only through a file system that keeps locks (``flock``) between them.
            None: the value of the environment variable WDS_PIPES_CACHE_DIR.
        max_bytes: the size limit: an int, or a string such as ``"200GB"`` or ``"50GiB"``. None: the
            value of WDS_PIPES_CACHE_SIZE.
        verify: compare stored shards with the MD5s in an index, if it has them. A shard that
            differs is fetched again once.

    Raises:
        TypeError, ValueError: when the stage is built, if an argument is wrong, if the directory or
            the limit is neither given nor set in the environment, or after ``open_shards``.

    Checkpoint: nothing. A state that was saved without this step does not fit a pipeline with it.
    To add a cache to such a pipeline, use ``open_shards(cache=...)``, which is not a step of its
    own.
    """

    keeps_count = True
    scope = "item"

    def __init__(
        self,
        source: Stage[Out],
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        verify: bool = True,
    ) -> None:
        from wds_pipes.io.cache.shard_cache import ShardCache

        super().__init__(source)
        if any(functional_name(type(step)) == "open_shards" for step in Chain(source)):
            raise TypeError("cache_shards() stores shards that are not open yet: put it before open_shards()")
        self.cache: ShardCache = ShardCache(directory, max_bytes=max_bytes, verify=verify)

    def run(self) -> Iterator[Out]:
        assert self.source is not None
        yield from self.source.items


def as_cache(given: ShardCache | str | os.PathLike[str] | None) -> ShardCache | None:
    """Return a cache that was passed as such, or as its directory."""
    if isinstance(given, (str, os.PathLike)):
        from wds_pipes.io.cache.shard_cache import ShardCache

        return ShardCache(given)
    if given is not None and not hasattr(given, "max_bytes"):
        raise TypeError(f"cache is a directory or a ShardCache, not {given!r:.80}")
    return given
