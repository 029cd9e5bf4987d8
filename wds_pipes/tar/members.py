"""What a tar is walked to: its members, and the places where samples are in doubt."""

from __future__ import annotations

from typing import NamedTuple

from wds_pipes.errors import ShardError
from wds_pipes.io.urls import redact

# What a member without a name stands for, by its data.
GAP = None  # members were lost
ASTRAY = b"astray"  # members were lost, and what follows may lie inside another member
MARK = b"mark"  # an end mark, after which another archive follows: it may be a zeroed page
END = b"end"  # the end of the shard, without an end mark or with too much after it: it may have been cut
EMPTY = b"empty"  # a shard without a member (given by load_tar, where the number of samples is known)


class TarMember(NamedTuple):
    """A regular file of a tar.

    Attributes:
        url: the shard it came from.
        name: its name; ``""`` for a gap, a place where members were lost.
        data: its bytes; None if they were not wanted. Of a member without a name: what it stands for.
        offset: where its headers start in the (decompressed) tar, in bytes.
    """

    url: str
    name: str
    data: bytes | None
    offset: int


def half_sample(url: str, key: str, offset: int, place: bytes) -> ShardError:
    """The error for a sample beside a doubtful place (``MARK`` or ``END``) at ``offset`` that is not like its neighbours."""
    what = "may be a zeroed page" if place == MARK else "is no proper end"
    message = (
        f"shard {redact(url)}, byte {offset}: it may be damaged there. What looks like the end of an archive {what}, and the sample beside it, {key!r}, may be "
        "half a sample: it has not the same fields as the samples before it in this shard, or no sample comes before it. Write or fetch it again."
    )
    return ShardError(message, url=redact(url), offset=offset)
