"""Whether a shard is still the one that was read before, without reading it."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from wds_pipes.errors import ShardError
from wds_pipes.io.identity import OF_CONTENT
from wds_pipes.io.outputs import info_of
from wds_pipes.io.urls import at_home, local_path, redact

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
    """Return the version of a shard. Of one that does not exist, nothing is known.

    Raises:
        ShardError: the store does not answer, or with an error; or it is a directory of a store.
    """
    path = local_path(url)
    if path is not None:
        try:
            status = os.stat(at_home(path))
        except OSError:
            return Version()
        settled = abs(time.time() - status.st_mtime) > _COARSE_SECONDS
        return Version(status.st_size, str(status.st_mtime_ns), settled)
    found = info_of(url, storage_options)
    if found is None:
        return Version()
    if found.get("type") == "directory":
        shown = redact(url)
        what = f"{shown} is a directory: to read the shards in it, pass it with '/' at its end"
        raise ShardError(what, url=shown, missing=True)
    etag, size = next((str(found[name]) for name in OF_CONTENT if found.get(name)), ""), found.get("size")
    # a weak ETag is the same for another content that means the same
    return Version(size if isinstance(size, int) else None, etag or None, etag[:2] not in ("", "W/"))
