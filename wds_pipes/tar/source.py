"""A tar stream and its position, read in blocks of 512 bytes."""

from __future__ import annotations

from typing import BinaryIO

from wds_pipes.tar.headers import Damage, cut_member

_READ_PAST = 1 << 16  # up to this many bytes are skipped by reading, more by seeking


class TarSource:
    """A tar stream and its position.

    The reader of common members calls ``stream.read`` itself, which saves a call for each member.
    So ``position`` is right only on the rare paths, which begin by setting it.

    Args:
        stream: a binary stream whose ``read(n)`` returns n bytes, fewer only at its end.
        position: where it stands, in bytes from the start of the tar.
    """

    def __init__(self, stream: BinaryIO, position: int) -> None:
        self.stream = stream
        self.position = position

    def take(self, count: int, what: str, start: int) -> bytes:
        """Read the next ``count`` bytes; if there are fewer, Damage: ``what`` at ``start`` is
        cut.
        """
        data = self.stream.read(count)
        if len(data) != count:
            raise Damage(
                f"is cut inside {what}: {len(data)} of {count} bytes are there. Write or fetch it again",
                start,
                cut=True,
            )
        self.position += count
        return data

    def pass_over(self, size: int, name: str, start: int) -> None:
        """Skip the data of the member at ``start``, by seeking if that saves time."""
        left = size
        if size > _READ_PAST and self.stream.seekable():
            self.stream.seek(size - 1, 1)
            left = 1
        while left and (got := len(self.stream.read(min(left, 1 << 20)))):
            left -= got
        if left or len(self.stream.read(-size & 511)) != -size & 511:
            raise cut_member(name, size, start)
        self.position += size + (-size & 511)
