"""A stream whose MD5 is compared with that of an index, at its end."""

from __future__ import annotations

import hashlib
import io
import os
from typing import Any

from wds_pipes.io.remote.budget import UnreadError

_CHUNK = 1 << 20


class Verified(io.RawIOBase):
    """A stream whose MD5 is compared at its end, which confirms that it is complete.

    A local file may be read from anywhere, and bytes of it left out: these are read for the MD5 at
    the end.

    Args:
        raw: the stream: a RemoteShard, or a local file.
        md5: the MD5 of the shard, in hexadecimal digits.
        before: the MD5 of the bytes before those of the stream; None: there are none.
    """

    def __init__(self, raw: Any, md5: str, before: Any = None) -> None:
        self._raw, self._md5, self._sum = raw, md5, before or hashlib.md5(usedforsecurity=False)
        self._place = self._summed = 0  # of the stream: the next byte, and how many are in the MD5

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._raw.seekable())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = self._raw.seek(offset, whence)
        return self._place

    def readinto(self, buffer: Any) -> int:
        count: int = self._raw.readinto(buffer)
        if self._place == self._summed:
            self._add(memoryview(buffer)[:count])
        self._place += count
        if count == 0:
            while self.seekable() and (data := os.pread(self._raw.fileno(), _CHUNK, self._summed)):
                self._add(data)
            found = self._sum.hexdigest()
            if found != self._md5:
                raise UnreadError(f"its MD5 is {found}, and the index says {self._md5}: some of its bytes are wrong")
        return count

    def _add(self, data: Any) -> None:
        self._sum.update(data)
        self._summed += len(data)

    def wait(self) -> None:
        """Wait for the first bytes of a remote shard."""
        self._raw.wait()

    def check_same(self) -> None:
        """Raise ShardError if a local file is another than when it was opened."""
        if hasattr(self._raw, "check_same"):  # a remote shard is always one version
            self._raw.check_same()

    def close(self) -> None:
        self._raw.close()
        super().close()
