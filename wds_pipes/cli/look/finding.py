"""Find one sample, by its number or its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wds_pipes.cli.look.reading import Sample, Source, located_of
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError
from wds_pipes.tar.offsets import MissingIndexError

_SLOW = "reading the shards from the beginning"
_QUICKER = f"no index: {_SLOW}. An index is quicker: wds-pipes index SHARDS --offsets"


def find_sample(
    wanted: int | str, urls: Sequence[str], options: dict[str, Any], key_split: str, say: Callable[[str], None]
) -> Sample:
    """Return the sample with a number or a key.

    Args:
        wanted: the number, counted over all shards; or the key.
        urls: the shards.
        options: how to reach the storage.
        key_split: as in ``group_by_key``.
        say: is called with a line if the shards are read from the beginning.

    Raises:
        ValueError: there is no such sample.
        SampleError: the indexes say that several samples have the key.
        ShardError: a shard or an index cannot be read, or is damaged.
    """
    source = Source(urls, options, key_split)
    if source.indexed is not None:
        if isinstance(wanted, str):
            try:
                return source.by_key(wanted)
            except ValueError as error:
                if isinstance(error.__cause__, ShardError) or "no sample" not in str(error):
                    raise
                located_of(urls, options).check_keys()
                raise ValueError(_missing(wanted, source.indexed.count)) from error
            except MissingIndexError:  # an index of another program has offsets, and no keys
                pass
        elif wanted < source.indexed.count:
            return next(source.slice(wanted, wanted + 1))
        else:
            located_of(urls, options).compare_ends()
            raise ValueError(_missing(wanted, source.indexed.count))
    say(_QUICKER if key_split == "first-dot" else f"indexes are not used with --key-split {key_split}: {_SLOW}")
    count = 0
    for number, sample in enumerate(source.read()):
        if wanted in (number, sample["__key__"]):
            return sample
        count = number + 1
    raise ValueError(_missing(wanted, count))


def _missing(wanted: int | str, count: int) -> str:
    if isinstance(wanted, int):
        return f"there is no sample {wanted:,}: there are {count:,}, from 0 on. If it is a key, pass --key"
    return f"no sample has the key {wanted!r:.300}, of {plural(count, 'sample')}. wds-pipes ls lists the keys"
