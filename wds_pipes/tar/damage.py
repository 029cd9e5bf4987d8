"""The rare paths of reading a tar stream: its end, what damage is, and where reading continues
(rules 4 to 6 of ``tar.reader``).
"""

from __future__ import annotations

import logging
from typing import Any, BinaryIO

from wds_pipes.errors import ShardError
from wds_pipes.io.compression import damage, unreadable
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK, ZEROS, Damage, Extra, cut_member, is_header, no_tar, parse_header

_READ_PAST = 1 << 16  # up to this many bytes are skipped by reading, more by seeking
_MARK = 2 * BLOCK  # bytes of zeros that end an archive
_RECORD = 20 * BLOCK  # at most so many more follow
_MOST_ZEROS = 1 << 28  # between archives: a server may send zeros for ever
_JOINED: dict[str, Any] = {
    "mend": "If archives were joined, pass load_tar(concatenated=True). Otherwise, write or fetch it again.",
    "mend_cli": "If archives were joined, pass --concatenated to wds-pipes repair. Otherwise, write or fetch it again.",
}
_NAME = 100  # bytes of the name in a header
LEAST_SEARCHED = 1 << 28  # bytes that are searched for a header, or those of the largest member if that is more

logger = logging.getLogger("wds_pipes")


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
                data=start + BLOCK,
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


def next_archive(source: TarSource, head: bytes, offset: int, extra: Extra | None, *, joined: bool) -> bytes | None:
    """Examine what stands in place of a header.

    Args:
        source: the stream, after ``head``.
        head: fewer bytes than a block, or zeros.
        offset: where it starts.
        extra: the extended headers before it, whose member is missing.
        joined: another archive may follow the end of one.

    Returns:
        The header of the next archive, which starts at the position of ``source``; None: the tar
        ends properly.
    """
    if extra is not None:
        how = "is cut" if len(head) < BLOCK else "ends"
        raise Damage(f"{how} after an extended header, before its member. Write or fetch it again", offset, cut=True)
    if len(head) < BLOCK:
        raise _cut(head, offset)
    most = _MOST_ZEROS if joined else _MARK + _RECORD
    while (head := source.stream.read(BLOCK)) == ZEROS:
        source.position += BLOCK
        if source.position - offset > most:
            what = f"has more than {most} bytes of zeros, so its end was never filled, or a part of it is lost"
            raise Damage(what, offset, cut=joined, zeros=True, **_JOINED)
    zeros = source.position - offset
    if not head.strip(b"\0"):
        if zeros < _MARK or head:  # a tar has whole blocks
            raise Damage("is cut inside the zeros at its end. Write or fetch it again", offset, cut=True)
        return None
    following, at = head if len(head) == BLOCK and is_header(head) else None, source.position
    if following is None:
        source.position += len(head)
    if zeros < _MARK:
        what = "has a lone block of zeros where a header is missing. Write or fetch it again"
        raise Damage(what, offset, head=following, zeros=True)
    if joined and following is not None:
        return following
    what = f"has data after its end-of-archive mark, at byte {at}, so a part of it may be lost"
    raise Damage(what, offset, head=following, zeros=True, **_JOINED)


def _cut(rest: bytes, offset: int) -> Damage:
    """The damage of a stream that ends at ``offset`` with less than a header."""
    if offset == 0 and not rest:
        return Damage("is empty (0 bytes), not even an archive without members. Write or fetch it again", 0, cut=True)
    if not rest.strip(b"\0"):
        what = "is cut: it has no end-of-archive mark, and its last sample may be incomplete"
        return Damage(f"{what}. Write or fetch it again", offset, cut=True)
    if offset == 0 and b"\0" not in rest:  # in a header, a NUL follows the name
        return Damage(no_tar(rest), 0, cut=True, lost=True)
    what = f"is cut inside a header: {len(rest)} of {BLOCK} bytes are there"
    return Damage(f"{what}. Write or fetch it again", offset, cut=True)


def damage_of(error: Exception, offset: int) -> Damage:
    """The damage that an error of the stream means, after which it cannot be read."""
    if isinstance(error, EOFError):
        what = f"is cut short inside its compressed data ({error}). Write or fetch it again"
        return Damage(what, offset, error, cut=True)
    if isinstance(error, damage()):
        what = f"has damaged compressed data ({error}). Write or fetch it again"
    else:
        what = f"cannot be read on ({type(error).__name__}: {error}). Check that it can be reached and is whole"
    return Damage(what, offset, error, cut=True, lost=True)


def find_next(source: TarSource, found: Damage, offset: int, url: str, most: int) -> tuple[bytes | None, int]:
    """The next valid header after damage, or None at the end.

    Rule 6 of ``tar.reader``. A file whose real name may have been in a damaged extended header is
    passed over: its own header has another name, as of another sample. At most ``most`` bytes are
    searched, since a server may never end its response.

    Returns:
        The header, or what comes after such a file; and where it starts, or if there is none, how
        far blocks could be read (``offset``: not at all).
    """
    head = found.head
    try:
        if found.passed is not None:
            source.pass_over(found.passed, "that is too large", found.offset)
            head = source.stream.read(BLOCK)
            if len(head) < BLOCK:
                return None, offset
        most += source.position
        while head is None and source.position < most and len(block := source.stream.read(BLOCK)) == BLOCK:
            offset = source.position
            if is_header(block):
                head = block
            else:
                source.position += BLOCK
        if head is not None:
            offset = source.position
        while head is not None and not found.whole and _may_have_another_name(head):
            _, _, size = parse_header(head, offset)
            source.position = offset + BLOCK
            source.pass_over(size, "after damage", offset)
            offset = source.position
            head = source.stream.read(BLOCK) or None
    except ShardError:
        raise
    except unreadable() as error:
        what = f"{type(error).__name__}: {error}"
        logger.warning("shard %s, byte %d: it cannot be read on: %s.", redact(url), source.position, what)
        return None, offset
    except Damage as cut:
        logger.warning("shard %s, byte %d: it %s.", redact(url), cut.offset, cut.what)
        return None, offset
    return head, offset


def _may_have_another_name(head: bytes) -> bool:
    """Whether the name in the header of a file is one that stands for a name in an extended header:
    cut to its 100 bytes, or with question marks for what is not ASCII.
    """
    name, nul, _ = head[:_NAME].partition(b"\0")
    return len(head) == BLOCK and is_header(head) and head[156] in b"0\0S7" and (not nul or b"?" in name)
