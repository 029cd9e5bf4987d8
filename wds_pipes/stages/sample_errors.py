"""What group_by_key says of the samples of a shard: too many, too few, misspelt fields.

The number of samples is known from ``samples_per_shard`` or an index. It is judged only where
nothing was lost at damage that the caller chose to skip.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.core.suggest import nearest
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError
from wds_pipes.io.urls import redact
from wds_pipes.stages.shard_ref import ShardRef
from wds_pipes.tar.offsets import stale_offset


def check_more(ref: ShardRef, offset: int) -> None:
    """Check that a shard may have a sample at ``offset``, after all samples that ``ref`` means:
    ``ref`` must not mean its last ones, and must not know another place.

    Raises:
        ShardError: the shard has more samples than are known, or the index of offsets is that of
            another shard.
    """
    if ref.end not in (None, offset):
        raise stale_offset(ref.url, ref.end)
    if ref.stop == ref.of:
        url = redact(ref.url)
        said = f"the {ref.of} that samples_per_shard or the index says"
        raise ShardError(f"shard {url} has more samples than {said}, from byte {offset} on.", url=url, offset=offset)


def check_enough(ref: ShardRef, number: int) -> None:
    """Check that a shard that ended after ``number`` samples had all that ``ref`` means.

    Raises:
        ShardError: it had fewer.
    """
    if ref.stop is not None and number < ref.stop:
        url = redact(ref.url)
        raise ShardError(
            f"shard {url} has only {plural(number, 'sample')}, and samples_per_shard or "
            f"the index says {ref.of}. Correct it, or make the index again.",
            url=url,
        )


def unknown_shard(url: str) -> TypeError:
    """Return the error for members that do not know their shard, although its number of samples is
    known.
    """
    return TypeError(
        f"group_by_key() got members of {redact(url)} without the ShardRef of their shard, so it is not known which of "
        "its samples to yield. A step between open_shards() and group_by_key() changes the url of members: let it "
        "return member._replace(data=...), or put it after group_by_key(). A step that opens shards itself must yield "
        "members whose url is the ShardRef."
    )


def check_order(source: Stage[Any]) -> None:
    """Raise TypeError if a step takes the members of samples apart, between ``load_tar`` and
    ``group_by_key``.
    """
    names = [functional_name(type(step)) for step in reversed(Chain(source).steps)]
    names = names[: names.index("load_tar")] if "load_tar" in names else []
    if found := next((name for name in names if name in ("shuffle_buffer", "interleave_shards")), None):
        raise TypeError(f"{found}() takes the members of a sample apart: put it after group_by_key()")


def tell_misspelt(fields: Collection[str], seen: Collection[str]) -> None:
    """Warn of each field to keep that no sample had, if a field of nearly the same name was left
    out.

    Args:
        fields: the fields to keep.
        seen: all fields of the samples.
    """
    left_out = set(seen).difference(fields)
    for field in sorted(set(fields).difference(seen)):
        if (meant := nearest(field, left_out)) is not None:
            warnings.warn(
                f"no sample had {field!r} of group_by_key(fields=...). Did you mean {meant!r}, which is left out?",
                stacklevel=3,
            )
