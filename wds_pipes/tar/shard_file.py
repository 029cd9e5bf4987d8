"""Write one whole shard with its offsets: what tasks do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wds_pipes.tar.digest import Md5
from wds_pipes.tar.index_formats import ShardFacts
from wds_pipes.tar.offsets import KEYS, OFFSETS, pack_keys, pack_offsets
from wds_pipes.tar.writer import TarWriter


def shard_files(name: str) -> tuple[str, ...]:
    """The names of the files that ``write_shard`` writes for a shard: its own, and those of its
    indexes of keys and of offsets.
    """
    return name, name + KEYS, name + OFFSETS


def write_shard(
    url: str,
    samples: Iterable[Mapping[str, Any]],
    *,
    md5: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> ShardFacts:
    """Write a shard, and where each of its samples begins; replace what is there. The shard
    appears when all of it is there.

    Args:
        url: the path or URL of an uncompressed shard.
        samples: as ``TarWriter`` writes them.
        md5: compute the MD5.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Returns:
        The number of samples, the size and the MD5 (None: it was not computed).

    Raises:
        SampleError: a sample cannot be written as it is.
        OSError: the shard cannot be written; a ShardError for a store.
    """
    keys, starts = [], []
    with TarWriter(url, overwrite=True, storage_options=storage_options) as writer:
        writer.digest = digest = Md5() if md5 else None
        for sample in samples:
            starts.append(writer.size)
            writer.write(sample)
            keys.append(sample["__key__"])
        writer.beside = {KEYS: pack_keys(keys), OFFSETS: pack_offsets([*starts, writer.size])}
    return ShardFacts(writer.samples, writer.stored, None if digest is None else digest.hexdigest())
