"""The end of a tar: whether it is a proper one, or another archive follows (rule 4 of
``tar.reader``).
"""

from __future__ import annotations

import warnings

from wds_pipes.errors import ShardWarning
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK, ZEROS, Damage, is_header, no_tar
from wds_pipes.tar.members import END, MARK
from wds_pipes.tar.source import TarSource

RECORD = 20 * BLOCK  # archives end at a multiple of this
_LARGE = 1 << 20  # or at a multiple of a power of two up to this (tar -b 2048)
_MOST_AFTER = 1 << 28  # bytes after an end that are searched for another archive: a server may send zeros for ever


def examine_end(
    source: TarSource, head: bytes, offset: int, *, url: str, extended: bool, warn: bool
) -> tuple[bytes | None, bytes | None]:
    """Examine what may be the end of a tar.

    Args:
        source: the stream, after ``head``.
        head: what was read at ``offset`` instead of a header: fewer bytes than a block, or zeros.
        offset: where ``head`` starts.
        url: the name of the stream in warnings.
        extended: whether extended headers come before it, whose member is missing.
        warn: warn of an end that may be a cut.

    Returns:
        The doubt (MARK or END), or None; and the header of the next archive, which starts at the
        position of ``source``, or None.
    """
    if extended:
        how = "is cut" if len(head) < BLOCK else "ends"
        raise Damage(f"{how} after an extended header, before its member. Write or fetch it again", offset, cut=True)
    if len(head) < BLOCK:
        return _without_mark(source, head, offset, url, warn), None
    return _after_mark(source, offset, url, warn)


def _without_mark(source: TarSource, rest: bytes, offset: int, url: str, warn: bool) -> bytes:
    """Examine a stream that ends before a whole header; return the doubt (END)."""
    if offset == 0 and not rest:
        raise Damage("is empty (0 bytes), not even an archive without members. Write or fetch it again", 0, cut=True)
    if rest.strip(b"\0"):
        if offset == 0 and b"\0" not in rest:  # in a header, a NUL follows the name
            raise Damage(no_tar(rest), 0, cut=True, lost=True)
        raise Damage(
            f"is cut inside a header: {len(rest)} of {BLOCK} bytes are there. Write or fetch it again",
            offset,
            cut=True,
        )
    if not getattr(getattr(source.stream, "raw", None), "end_is_vouched_for", True):
        what = (
            "ends without an end-of-archive mark, and its server reported neither its length "
            "nor its end: it may have been cut there"
        )
        raise Damage(f"{what}. Write it with that mark, or have the server send Content-Length", offset, cut=True)
    if warn:
        warnings.warn(
            f"shard {redact(url)} has no end-of-archive mark at byte {offset}: it may have been cut there.",
            ShardWarning,
            stacklevel=3,
        )
    return END


def _after_mark(source: TarSource, offset: int, url: str, warn: bool) -> tuple[bytes | None, bytes | None]:
    """Examine what follows a block of zeros at ``offset``: see ``examine_end``."""
    while (head := source.stream.read(BLOCK)) == ZEROS:
        _pass_block(source, offset)
    end = source.position
    while len(head) == BLOCK and not is_header(head):
        head = source.stream.read(BLOCK)
        _pass_block(source, offset)
    # An archive ends here, or after two blocks of zeros.
    usual = offset + 2 * BLOCK + (-(offset + 2 * BLOCK) % RECORD)
    if len(head) == BLOCK:
        if source.position == offset + BLOCK:
            raise Damage(
                "has a lone block of zeros where a header is missing. Write or fetch it again", offset, head=head
            )
        if source.position > end or end % RECORD or end > usual + RECORD:
            what = f"has a hole: what looks like its end is not, for members come again at byte {source.position}"
            why = f"another archive starts at a multiple of {RECORD} bytes, right after the zeros"
            raise Damage(f"{what}, and {why}. Write or fetch it again", offset, head=head)
        return MARK, head
    if source.position > end or head:
        warnings.warn(
            f"shard {redact(url)} has bytes after its end, from byte {end} on: they are ignored.",
            ShardWarning,
            stacklevel=3,
        )
        return END, None
    if end > offset + 2 * BLOCK and end != usual:
        _odd_zeros(offset, end, usual, url, warn)
    return None, None


def _pass_block(source: TarSource, offset: int) -> None:
    """Count a block after an end mark at ``offset``."""
    source.position += BLOCK
    if source.position - offset > _MOST_AFTER:
        what = f"goes on for more than {_MOST_AFTER} bytes after what may be its end, without another archive"
        raise Damage(f"{what}. Write or fetch it again", offset, cut=True, soft=True)


def _odd_zeros(offset: int, end: int, usual: int, url: str, warn: bool) -> None:
    """Report an archive whose zeros at the end go from ``offset`` to ``end``, not to ``usual``."""
    what = f"has {end - offset} bytes of zeros at its end, where archives have {2 * BLOCK} or, here, {usual - offset}"
    what = f"{what}: perhaps they hide members, or space was reserved and not filled"
    if end > usual + RECORD and end - offset >= min(end & -end, _LARGE) + 2 * BLOCK:
        raise Damage(
            f"{what}. Write or fetch it again, with records of {RECORD} bytes (tar -b 20)",
            offset,
            cut=True,
            soft=True,
        )
    if warn:
        why = f"unless it was written in records of another size than {RECORD} bytes"
        warnings.warn(f"shard {redact(url)} {what}, {why}.", ShardWarning, stacklevel=4)
