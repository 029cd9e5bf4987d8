"""CacheShards: keep remote shards on a local disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wds_pipes.core.stage import Stage

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache


class CacheShards(Stage[str]):
    """Let ``open_shards`` behind it keep remote shards on a local disk (functional name: ``cache_shards``).

    Shards stream to the reader while they are stored; each is downloaded once for all workers and ranks of a machine. Complete files appear at once, under
    names that are hashes of the whole URL; those used least recently go when there would be more than ``max_bytes``, but never one that is open. Processes may
    be killed at any time: what was stored is checked, and gone on with or fetched again. Local shards are read where they are. ``wds-pipes cache`` shows
    and clears the directory. A resume in the middle of a shard that is not there reads it from the store, from its position on, and stores nothing of it.

    Args:
        source: a pipe of URLs.
        directory: where, on a local disk; made if it is not there. None: what the environment variable WDS_PIPES_CACHE_DIR says.
        max_bytes: how much is kept: an int, or a string such as ``"200GB"`` or ``"50GiB"``. None: what WDS_PIPES_CACHE_SIZE says.
        verify: compare stored shards with the MD5 that an index tells; a wrong one is fetched again once.

    Raises:
        TypeError, ValueError: when built: an argument is wrong, or the directory or the limit is neither given nor in the environment.

    Checkpoint: nothing. To give a cache to a pipeline whose state is to be loaded, use ``open_shards(cache=...)`` instead, which is no step of its own.
    """

    keeps_count = True
    holds_nothing = True

    def __init__(self, source: Stage[Any], directory: str | os.PathLike[str] | None = None, *, max_bytes: int | str | None = None, verify: bool = True) -> None:
        from wds_pipes.io.cache.shard_cache import ShardCache

        super().__init__(source)
        self.cache: ShardCache = ShardCache(directory, max_bytes=max_bytes, verify=verify)

    def run(self) -> Iterator[str]:
        assert self.source is not None
        yield from self.source.items
