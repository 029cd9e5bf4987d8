"""The indexes of offsets of a list of shards, of which some may have none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from wds_pipes.errors import ShardError
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import RangeReader
from wds_pipes.tar.index_formats import Options, ShardFacts
from wds_pipes.tar.located import Located
from wds_pipes.tar.offsets import MissingIndexError

_CONNECTIONS = 8


class ShardOffsets:
    """Where the samples of shards begin. An index is read when it is needed, and only then is it
    known whether there is one.

    It can be pickled; each process reads the indexes that it needs.

    Args:
        urls: the shards.
        facts: what another index says of each: the number of its samples, and its size.
        folder: a directory where the indexes may be, instead of beside the shards; None: none.
        storage_options: how to reach the storage.
    """

    def __init__(
        self, urls: Sequence[str], facts: Sequence[ShardFacts], folder: str | None, storage_options: Options
    ) -> None:
        self._urls = urls
        files, counts = RangeReader(storage_options, _CONNECTIONS), [shard.samples or 0 for shard in facts]
        places = dict.fromkeys((folder, None))
        self._places = [
            Located(urls, place, files, storage_options, _CONNECTIONS, counts=counts, facts=facts) for place in places
        ]
        self._without: set[int] = set()

    def of(self, shard: int) -> Sequence[int] | None:
        """Return where the samples of a shard begin, and the end of the last one; None: it has no
        index.

        Raises:
            ShardError: the index cannot be read, is damaged, or is of other samples.
        """
        url = self._urls[shard]
        if url == "-" or url.startswith("pipe:"):
            return None
        for place in () if shard in self._without else self._places:
            try:
                return place.offsets(shard)
            except MissingIndexError:
                continue
            except ShardError as error:
                # a store may not tell whether what may not be listed is there
                if isinstance(error.__cause__ and error.__cause__.__cause__, PermissionError):
                    continue
                raise
        self._without.add(shard)
        return None

    def read_all(self, shards: Iterable[int]) -> bool:
        """Read the indexes of several shards, and return whether all have one."""
        shards = list(dict.fromkeys(shards))
        if any(is_remote(self._urls[shard]) for shard in shards):
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                return all(offsets is not None for offsets in pool.map(self.of, shards))
        return all(self.of(shard) is not None for shard in shards)

    def stale(self, url: str, what: str) -> ShardError:
        """Return the error for a shard that does not fit its index."""
        return self._places[0].stale(url, what)
