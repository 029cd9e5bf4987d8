"""Whether a shard is still the one that was read before, without reading it."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from wds_pipes.io.urls import at_home, local_path

# A file that is written twice in this time may keep its time of modification: clocks of file
# systems are coarse.
_COARSE_SECONDS = 2.0


class Version(NamedTuple):
    """What is known of the present content of a shard.

    Attributes:
        size: its size in bytes; None: not known.
        mark: the time of modification of a local file in nanoseconds, the ETag of an object in a
            store; None: not known.
        sure: whether another content has another mark.
    """

    size: int | None = None
    mark: str | None = None
    sure: bool = False


def version_of(url: str, storage_options: dict[str, Any] | None) -> Version:
    """Return the version of a shard. If it cannot be requested, nothing is known; reading the
    shard then says why.
    """
    path = local_path(url)
    try:
        if path is not None:
            status = os.stat(at_home(path))
            settled = abs(time.time() - status.st_mtime) > _COARSE_SECONDS
            return Version(status.st_size, str(status.st_mtime_ns), settled)
        from wds_pipes.io.remote.file_systems import file_system

        fs, name = file_system(url, storage_options)
        fs.invalidate_cache(fs._parent(name))  # a listing may be old
        found = fs.info(name)
    except Exception:
        return Version()
    etag, size = str(found.get("ETag") or found.get("etag") or ""), found.get("size")
    # a weak ETag is the same for another content that means the same
    return Version(size if isinstance(size, int) else None, etag or None, etag[:2] not in ("", "W/"))
