"""The members of a tar, and the places where samples are doubtful."""

from __future__ import annotations

from typing import NamedTuple

from wds_pipes.errors import ShardError
from wds_pipes.io.urls import redact

# The data of a member without a name: what that member means.
GAP = None  # members were lost
ASTRAY = b"astray"  # members were lost, and the following ones may be inside another member
MARK = b"mark"  # an end mark before another archive: it may be a zeroed page
# The end of the shard, without an end mark or with too much after it: the shard may be cut.
END = b"end"
EMPTY = b"empty"  # a shard without members (yielded by load_tar if the number of samples is known)


class TarMember(NamedTuple):
    """A regular file of a tar.

    Attributes:
        url: the shard that contains it.
        name: its name; ``""`` for a place that is not a file, such as a gap where members were
            lost.
        data: its bytes; None if they were not requested. Of a member without a name: what it means.
        offset: where its headers start in the (decompressed) tar, in bytes.
    """

    url: str
    name: str
    data: bytes | None
    offset: int


def half_sample(url: str, key: str, offset: int, place: bytes) -> ShardError:
    """The error for a sample next to a doubtful place that differs from its neighbours.

    The place is a ``MARK`` or an ``END`` at ``offset``.
    """
    what = "may be a zeroed page" if place == MARK else "is not a proper end"
    message = (
        f"shard {redact(url)}, byte {offset}: it may be damaged there. What looks like the "
        f"end of an archive {what}, and the sample beside it, {key!r}, may be "
        "half a sample: its fields differ from those of the samples before it in this shard, "
        "or no sample comes before it. Write or fetch it again."
    )
    return ShardError(message, url=redact(url), offset=offset)
