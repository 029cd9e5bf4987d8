"""ShardCache: the user's settings of the cache."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import BinaryIO

from wds_pipes.core.options import checks_options
from wds_pipes.errors import mended
from wds_pipes.io.cache.files import CacheDirectory, CacheFacts
from wds_pipes.io.cache.stream import CachedStream, RequestFrom
from wds_pipes.io.urls import redact

_SIZE = re.compile(r"(?i)\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*")


def parse_size(size: int | str) -> int:
    """``"200GB"``, ``"50GiB"``, ``"1.5 TB"`` or a number as bytes.

    Raises:
        TypeError: it is neither an int nor a string.
        ValueError: it is not a size, or less than 1 byte.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"a size is an int or a string such as '200GB', not {size!r}")
    if isinstance(size, str):
        parts = _SIZE.fullmatch(size)
        if parts is None or (parts[3] and not parts[2]):
            raise ValueError(f"{size!r} is not a size: write bytes, or a number with a unit such as 200GB or 50GiB")
        size = int(float(parts[1]) * (1024 if parts[3] else 1000) ** " kmgtp".index(parts[2].lower() or " "))
    if size < 1:
        raise ValueError(f"a size must be at least 1 byte, not {size}")
    return size


def cache_path(directory: str | os.PathLike[str] | None) -> str:
    """``directory``, or else the value of WDS_PIPES_CACHE_DIR, as an absolute path.

    Raises:
        ValueError: neither is given.
        TypeError: it is not a path.
    """
    directory = directory if directory is not None else os.environ.get("WDS_PIPES_CACHE_DIR") or None
    if directory is None:
        raise mended(
            ValueError,
            "the cache needs a directory",
            mend="pass directory='DIRECTORY', or set WDS_PIPES_CACHE_DIR",
            mend_cli="pass --directory DIRECTORY, or set WDS_PIPES_CACHE_DIR",
        )
    path = os.fspath(directory)
    if not isinstance(path, str):
        raise TypeError(f"the directory of the cache must be a string or a path, not {path!r}")
    return os.path.abspath(os.path.expanduser(path))


def cache_limit(max_bytes: int | str | None) -> int:
    """``max_bytes``, or else the value of WDS_PIPES_CACHE_SIZE, in bytes.

    Raises:
        ValueError: neither is given, or it is not a size.
        TypeError: it is neither an int nor a string.
    """
    limit = max_bytes if max_bytes is not None else os.environ.get("WDS_PIPES_CACHE_SIZE") or None
    if limit is None:
        raise ValueError(
            "the cache needs a limit, in bytes: pass max_bytes='200GB' to cache_shards() or ShardCache(), or set "
            "WDS_PIPES_CACHE_SIZE"
        )
    return parse_size(limit)


class ShardCache:
    """Store remote shards in a local directory while they are read.

    All processes of the machine share the directory. When the stored shards would exceed
    ``max_bytes``, the least recently used ones are removed. A shard that is open in any process is
    never removed, so the cache exceeds its limit only by open shards. A stored shard is used
    without asking the store again: write changed data to a new URL.

    Args:
        directory: its path, on a local disk; created if it does not exist. None: the value of
            WDS_PIPES_CACHE_DIR.
        max_bytes: the limit: an int, or a string such as ``"200GB"`` or ``"50GiB"``. None: the
            value of WDS_PIPES_CACHE_SIZE.
        verify: check the MD5 of a shard if it is known.

    Raises:
        ValueError: the directory or the limit is missing or invalid.
        TypeError: an argument has the wrong type.
    """

    @checks_options
    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        verify: bool = True,
    ) -> None:
        if not isinstance(verify, bool):
            raise TypeError(f"verify must be True or False, not {verify!r}")
        self.directory = cache_path(directory)
        self.max_bytes = cache_limit(max_bytes)
        self.verify = verify

    def __repr__(self) -> str:
        return f"ShardCache({self.directory!r}, max_bytes={self.max_bytes}, verify={self.verify})"

    def open(
        self,
        url: str,
        fetch: RequestFrom,
        *,
        start: int = 0,
        size: int | None = None,
        md5: str | None = None,
        store: str = "",
    ) -> BinaryIO:
        """A buffered binary stream of the shard at ``url``, positioned at byte ``start``.

        Only one thread may read the stream. Until the shard is stored, a read waits for its bytes,
        and a seek to its end waits for its size. If the shard is not stored and ``start`` is not 0,
        it is read directly from the store: it is not stored, and the stream is not seekable.

        Args:
            url: the name of the shard.
            fetch: called with an offset, it requests the shard from that byte on and does not wait
                for the response. It makes its own retries. It may be called in another thread.
            start: the first byte to read.
            size: the expected size in bytes, if it is known.
            md5: the expected MD5 in hexadecimal digits, if it is known.
            store: identifies the store that ``url`` leads to, such as the endpoint of S3, if the
                same URL can name objects in different stores.

        Raises:
            ShardError: here or while reading: the size or the checksum is wrong, twice; the shard
                changed while it was read.
            CacheError: the directory cannot be used.
            Exception: whatever ``fetch`` and its streams raise, here or while reading.
        """
        entry = CacheDirectory(self.directory).entry(url, store)
        expected = CacheFacts(redact(url), size, md5=md5.lower() if md5 is not None and self.verify else None)
        stream = CachedStream(self.directory, self.max_bytes, entry, fetch, expected)
        try:
            stream.begin(start)
        except BaseException:
            stream.close()
            raise
        return io.BufferedReader(stream, 1 << 20)

    def open_stored(self, url: str, *, store: str = "") -> io.FileIO | None:
        """The file of the shard at ``url`` if all of it is stored; otherwise None. The cache may
        remove it while it is open.

        Raises:
            CacheError: the directory cannot be used.
        """
        found = CacheDirectory(self.directory).entry(url, store).open_whole(CacheFacts(redact(url)))
        if found is None:
            return None
        with contextlib.closing(found[0]) as whole:
            with contextlib.suppress(OSError):
                os.utime(whole.fd)
            return io.FileIO(os.dup(whole.fd))
