"""List the shards in a store that match a pattern or are in a directory."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from wds_pipes.errors import ShardError
from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.remote.file_systems import missing_package, protocols_of
from wds_pipes.io.remote.metadata import ask
from wds_pipes.io.remote.verdicts import judge
from wds_pipes.io.secret import clean, hide, words
from wds_pipes.io.urls import IPV6_HOST, redact

_MAGIC = re.compile(r"[*?\[]")


def list_shards(pattern: str, storage_options: dict[str, Any] | None, *, folder: bool = False) -> list[str]:
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
    names: list[str] = []
    known, problem = True, None
    try:
        names = ask(f"{pattern}*" if folder else pattern, storage_options, _names)
        if folder:
            names = [name for name in names if TAR_NAME.fullmatch(posixpath.basename(name))]
        known = bool(names) or ask(pattern, storage_options, lambda fs, path: bool(fs.ls(_fixed(path), detail=False)))
    except FileNotFoundError:
        known = False
    except Exception as error:
        problem = _problem(pattern, error, storage_options)
    if problem is not None:
        raise problem  # outside of the handlers: an error in its context could contain the URL
    if not names:
        missing = "" if known else f"its bucket or directory {redact(_fixed(pattern))!r} does not exist or is empty; "
        raise ValueError(
            f"no shard matches {redact(pattern)!r}: {missing}check the pattern, the bucket and the directory"
        )
    return names


def _names(fs: Any, path: str) -> list[str]:
    """The URLs that match a pattern, sorted."""
    if "https" in protocols_of(fs) and "**" not in path:
        return sorted(_linked(fs, path))
    if IPV6_HOST.search(path) is None:
        return [fs.unstrip_protocol(name) for name in sorted(fs.glob(path))]
    # fsspec would read the brackets of the address as a pattern.
    folder, _, base = path.rpartition("/")
    if _MAGIC.search(IPV6_HOST.sub("", folder)):
        raise ValueError("in the URL of an IPv6 address only the last part of the path can be a pattern")
    return sorted(name for name in fs.ls(f"{folder}/", detail=False) if fnmatchcase(posixpath.basename(name), base))


def _linked(fs: Any, path: str) -> Iterator[str]:
    """The URLs that match a pattern, of a web server whose pages list its directories. The glob of
    fsspec leaves out a page that does not come in time.
    """
    folder, _, base = path.rpartition("/")
    folders = [folder]
    if _MAGIC.search(IPV6_HOST.sub("", folder)):
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
    host = IPV6_HOST.search(pattern)
    found = _MAGIC.search(pattern, host.end() if host else 0)
    return pattern[: found.start() if found else None].rpartition("/")[0]


def _problem(url: str, error: Exception, storage_options: dict[str, Any] | None) -> ShardError:
    """The error for shards that cannot be listed, without credentials; it quotes its cause."""
    shown, story = redact(url), f"{type(error).__name__}: {hide(words(error), url, storage_options)}"
    if isinstance(error, ImportError):
        message = f"the shards {shown} need a package that is not installed ({story}): {missing_package(url)}."
    else:
        what, _, mend = judge(error, url.partition("://")[0]).advice.replace("be read", "be listed").partition(": ")
        message = f"the shards {shown} {what} ({story}): {mend or 'check the URL and the network'}."
    problem = ShardError(message, url=shown)
    cause = clean(error, url, storage_options, depth=1)
    problem.__cause__ = cause and cause.with_traceback(None)
    return problem
