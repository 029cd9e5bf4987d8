"""The index of DALI for a shard, which is a text: ``X.idx`` for ``X.tar``, version 1.2.

The first line is ``v1.2 SAMPLES``. Each other line is a sample: for each of its files the
extension, the byte where the data begins, the size, and the name, all separated by blanks. The
samples are those of DALI: other than in ``group_by_key``, a file without a dot in its name is a
sample too, and so are those under ``__name__/``.

DALI's own program, wds2idx, writes the same bytes, with two exceptions. Its offsets of long GNU
names are wrong where it calls GNU tar. Files of v7 tars are missing where it does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from wds_pipes.errors import ShardError
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK

_BLANK = re.compile(r"[ \t\n\v\f\r]")  # where DALI ends a word


class Component(NamedTuple):
    """A file of a shard: its name, where its data begins, and the size; ``plain``: these bytes are
    the file.
    """

    name: str
    start: int
    size: int
    plain: bool = True


def pack_dali(components: Sequence[Component], url: str) -> bytes:
    """Return an index of DALI with the files of a shard.

    Raises:
        ShardError: DALI cannot open such a shard: a name contains a blank or ends in a dot, a
            member is sparse, or there are no samples.
    """
    shown, lines, key = redact(url), list[list[str]](), ""
    for name, start, size, plain in components:
        stem, extension = _take_apart(name)
        if not stem or stem[-1] == "/":
            continue
        if not plain or not extension or _BLANK.search(name):
            what = (
                "is sparse or contiguous"
                if not plain
                else "has no extension after its dot"
                if not extension
                else "has a blank in its name"
            )
            raise ShardError(
                f"shard {shown} can have no index of DALI: member {name!r} at byte {start - BLOCK} {what}, and an "
                "index of DALI has no place for that. Write the shard again, with another name, or without --dali",
                url=shown,
                offset=start - BLOCK,
            )
        if not lines or stem != key:
            lines.append([])
            key = stem
        lines[-1].append(f"{extension} {start} {size} {name}")
    if not lines:
        raise ShardError(f"shard {shown} can have no index of DALI: it has no samples, which DALI refuses", url=shown)
    text = "".join(f"{line}\n" for line in (f"v1.2 {len(lines)}", *map(" ".join, lines)))
    return text.encode("utf-8", "surrogateescape")


def _take_apart(name: str) -> tuple[str, str]:
    """Return the name of a sample and an extension, as DALI does, also where there is no dot."""
    dot = name.find(".", name.rfind("/") + 1)
    return name[:dot], name[dot + 1 :]
