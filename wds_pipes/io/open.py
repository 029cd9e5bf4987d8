"""Open a shard by URL: local files straight, everything else through fsspec."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any, BinaryIO

from wds_pipes.errors import ShardError
from wds_pipes.io.urls import local_path, redact

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}


def open_url(url: str, *, storage_options: dict[str, Any] | None = None, buffer_bytes: int = 1 << 20) -> BinaryIO:
    """A buffered binary stream of the object at ``url``; ``"-"`` is standard input.

    Raises:
        ShardError: it does not exist, may not be read, or its protocol is not known here.
    """
    try:
        if url == "-":
            return io.BufferedReader(io.FileIO(sys.stdin.fileno(), closefd=False), buffer_bytes)
        path = local_path(url)
        if path is not None:
            return open(path, "rb", buffering=buffer_bytes)
        return _open_remote(url, storage_options or {}, buffer_bytes)
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec says "not found" of whatever goes wrong with a web server, also where none answers
        if getattr(cause, "status", 404) != 404 or (isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)):
            raise _unopened(url, cause) from error
        here = f" The working directory is {os.getcwd()}." if local_path(url) is not None else ""
        raise ShardError(f"shard {redact(url)} does not exist.{here} Check its name.", url=redact(url)) from error
    except PermissionError as error:
        raise ShardError(f"shard {redact(url)} may not be read: check its permissions or your credentials.", url=redact(url)) from error
    except ShardError:
        raise
    except Exception as error:
        raise _unopened(url, error) from error


def _unopened(url: str, cause: BaseException | None) -> ShardError:
    shown = redact(url)
    reason = _URL.sub(lambda found: redact(found.group()), str(cause).replace(url, shown))  # a library may write the URL otherwise
    return ShardError(f"shard {shown} cannot be opened: {type(cause).__name__}: {reason}", url=shown)


def _open_remote(url: str, storage_options: dict[str, Any], buffer_bytes: int) -> BinaryIO:
    protocol = url.partition(":")[0]
    if protocol == "pipe":
        raise ShardError(f"shard {redact(url)} would run a shell command, which this package does not do. Read the command's output from '-'.", url=redact(url))
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as error:
        mend = f"pip install 'wds_pipes[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else "install the package that it names"
        raise ShardError(f"shard {redact(url)} needs a package that is not installed ({error}): {mend}.", url=redact(url)) from error
    except ValueError as error:
        raise ShardError(f"shard {redact(url)} cannot be opened: {error}. Write a local path without '://'.", url=redact(url)) from error
    return io.BufferedReader(fs.open(path, "rb"), buffer_bytes)
