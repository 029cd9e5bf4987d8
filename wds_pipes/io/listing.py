"""List the shards in a store that match a pattern or are in a directory."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.outputs import asked
from wds_pipes.io.remote.file_systems import protocols_of
from wds_pipes.io.urls import redact

_MAGIC = re.compile(r"[*?\[]")


def list_matching(pattern: str, storage_options: dict[str, Any] | None, *, folder: bool = False) -> list[str]:
    """The URLs of the shards in a store that match a pattern, sorted.

    With ``folder``, ``pattern`` is a directory, which ends in ``/``: the result is the tars in it.

    Raises:
        ValueError: no shard matches, or the store has no listing.
        ShardError: the store cannot be listed.
    """
    if pattern.startswith("ais://"):
        raise ValueError(
            f"{redact(pattern)!r}: ais:// cannot be listed; name the shards, as in 'ais://bucket/x-{{000..099}}.tar'"
        )
    names = asked(f"{pattern}*" if folder else pattern, storage_options, _names, "listed") or []
    if folder:
        names = [name for name in names if TAR_NAME.fullmatch(posixpath.basename(name))]
    if not names:
        known = asked(pattern, storage_options, lambda fs, path: fs.ls(_fixed(path), detail=False), "listed")
        why = ", is empty, or has no page of type text/html" if pattern.startswith("http") else " or is empty"
        missing = "" if known else f"its bucket or directory {redact(_fixed(pattern))!r} does not exist{why}; "
        raise ValueError(
            f"no shard matches {redact(pattern)!r}: {missing}check the pattern, the bucket and the directory"
        )
    return names


def _names(fs: Any, path: str) -> list[str]:
    """The URLs that match a pattern, sorted."""
    if "https" in protocols_of(fs) and "**" not in path:
        return sorted(_linked(fs, path))
    return [fs.unstrip_protocol(name) for name in sorted(fs.glob(path))]


def _linked(fs: Any, path: str) -> Iterator[str]:
    """The URLs that match a pattern, of a web server whose pages list its directories. The glob of
    fsspec leaves out a page that does not come in time.
    """
    folder, _, base = path.rpartition("/")
    folders = [folder]
    if _MAGIC.search(folder):
        folders = [name.rstrip("/") for name in _linked(fs, folder) if name.endswith("/")]
    for each in folders:
        try:
            names = fs.ls(f"{each}/", detail=False)
        except FileNotFoundError:
            continue
        for name in names:
            link = name.removeprefix(f"{each}/").rstrip("/")
            if link != name.rstrip("/") and "/" not in link and fnmatchcase(link, base.replace("?", "[?]")):
                yield name


def _fixed(pattern: str) -> str:
    """The directories of a pattern before its first wildcard."""
    return _MAGIC.split(pattern, maxsplit=1)[0].rpartition("/")[0]
