"""What group_by_key says of the samples of a shard: too many, too few, in pieces, incomplete.

The number of samples is known from ``samples_per_shard`` or an index. It is judged only where
nothing was lost at damage that the caller chose to skip.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, ShardWarning
from wds_pipes.io.urls import redact
from wds_pipes.stages.shard_ref import ShardRef
from wds_pipes.tar import members
from wds_pipes.tar.keys import is_metadata
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
    """Return the error for members whose shard cannot be found, although its number of samples is
    known.
    """
    return TypeError(
        f"group_by_key() got members of {redact(url)}, which is not one of the shards that open_shards() yielded "
        "last, so it is not known which samples of the shard to yield. A step between open_shards() and "
        "group_by_key() changes the url of members, or mixes several shards: put it after group_by_key(). A step "
        "that opens shards itself must yield members whose url is the ShardRef."
    )


def field_twice(sample: dict[str, Any], field: str, name: str, offset: int) -> SampleError:
    """Return the error for a field that comes again as member ``name``, or that is reserved."""
    url, key = sample["__url__"], sample["__key__"]
    if is_metadata(field):
        return members.reserved_name(url, key, field, name, offset=offset)
    return members.field_twice(url, key, field, name, offset=offset)


def no_member(item: object) -> TypeError:
    """Return the error for an item that is no member of a tar."""
    return TypeError(
        f"group_by_key() takes the members of tars, and its source gave {item!r:.200}: put .load_tar() before it"
    )


def key_again(sample: dict[str, Any], offset: int) -> SampleError:
    """Return the error for a key that was seen before in this shard."""
    url, key = redact(sample["__url__"]), sample["__key__"]
    message = (
        f"key {key!r} comes again in shard {url} at byte {offset}, apart "
        "from its other members, so that its sample is in pieces. Join them with: wds-pipes repair SHARD NEW (or "
        "unpack it, and pack it with tar --sort=name), or pass on_repeated_key='ignore' to take the pieces as samples. "
        "(A resume from here on does not see what came before.)"
    )
    return SampleError(message, url=url, key=key, offset=offset)


def report_repeated(sample: dict[str, Any], offset: int, choice: str) -> None:
    """Raise, warn of or ignore a key that was seen before in this shard."""
    if choice == "raise":
        raise key_again(sample, offset)
    if choice == "warn":
        warnings.warn(str(key_again(sample, offset)), ShardWarning, stacklevel=3)


def last_lacks(sample: dict[str, Any], missing: Sequence[str]) -> str:
    """Return the warning for the last sample of a shard that lacks fields."""
    return (
        f"the last sample of shard {redact(sample['__url__'])}, {sample['__key__']!r}, "
        f"has no {', '.join(missing)}, unlike all samples before it. If it "
        "should have it, the end of the shard is damaged (a zeroed page looks like "
        "its end): fetch the shard again."
    )


def check_order(source: Stage[Any]) -> None:
    """Raise TypeError if a step takes the members of samples apart, between ``load_tar`` and
    ``group_by_key``.
    """
    names = [functional_name(type(step)) for step in reversed(Chain(source).steps)]
    names = names[: names.index("load_tar")] if "load_tar" in names else []
    if found := next((name for name in names if name in ("shuffle_buffer", "interleave_shards")), None):
        raise TypeError(f"{found}() takes the members of a sample apart: put it after group_by_key()")
