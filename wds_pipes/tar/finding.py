"""Find a member again that was read before: samples do not carry where they come from."""

from __future__ import annotations

import os
import stat
import time
from typing import Any

from wds_pipes.errors import ShardError
from wds_pipes.io.urls import at_home, local_path
from wds_pipes.tar.members import pass_link
from wds_pipes.tar.reader import TarReader

_BYTES = (bytes, bytearray, memoryview)
_SECONDS = 2.0  # how long a shard is searched


def offset_of(url: Any, key: Any, field: Any, data: Any) -> int | None:
    """Return where the headers of a member start, for the message of an error; None: not found.

    The shard is searched from its beginning, at most two seconds, for a member with this name and
    this content. A remote shard would have to be read again, and a compressed one decompressed, so
    they are not searched.

    Args:
        url: the shard, as in ``__url__``.
        key: the key of the sample.
        field: the field, in lower case.
        data: its bytes.
    """
    if not all(isinstance(text, str) for text in (url, key, field)) or not isinstance(data, _BYTES):
        return None
    path, length, ending, until = local_path(url), len(key), f".{field}", time.monotonic() + _SECONDS

    def want(name: str) -> bool:
        return name[:length] == key and name[length:].lower() == ending

    try:
        if path is None or not stat.S_ISREG(os.stat(path := at_home(path)).st_mode):
            return None
        with open(path, "rb") as stream:
            for member in TarReader(stream, url=url, want=want, on_truncated="ignore", on_link=pass_link):
                if member.name and member.data is not None and member.data == data:
                    return member.offset
                if time.monotonic() > until:
                    return None
    except (OSError, ValueError, ShardError):
        return None
    return None


def at_byte(offset: int | None) -> str:
    """Return what a message says of that place, as a sentence that begins with a blank."""
    return "" if offset is None else f" It starts at byte {offset} of the shard."
