"""The end of a tar: whether it is a proper one, or another archive follows (rules 4 and 5 of
``tar.reader``).
"""

from __future__ import annotations

from wds_pipes.tar.headers import BLOCK, ZEROS, Damage, Extra, is_header, no_tar
from wds_pipes.tar.source import TarSource

_MARK = 2 * BLOCK  # bytes of zeros that end an archive
_RECORD = 20 * BLOCK  # at most so many more follow
_MOST_ZEROS = 1 << 28  # between archives: a server may send zeros for ever
_JOINED = (
    "If archives were joined, pass load_tar(concatenated=True) (wds-pipes repair --concatenated). Otherwise, write or "
    "fetch it again"
)


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
            raise Damage(f"{what}. {_JOINED}", offset, cut=joined)
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
        raise Damage(what, offset, head=following)
    if joined and following is not None:
        return following
    what = f"has data after its end-of-archive mark, at byte {at}, so a part of it may be lost"
    raise Damage(f"{what}. {_JOINED}", offset, head=following)


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
