"""Damage of a tar: which errors mean it, and where reading continues after it."""

from __future__ import annotations

import logging

from wds_pipes.errors import ShardError
from wds_pipes.io.compression import damage, unreadable
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK, Damage, is_header, parse_header
from wds_pipes.tar.source import TarSource

_NAME = 100  # bytes of the name in a header
LEAST_SEARCHED = 1 << 28  # bytes that are searched for a header, or those of the largest member if that is more

logger = logging.getLogger("wds_pipes")


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
