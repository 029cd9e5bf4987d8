"""Streams whose MD5 is compared with that of an index, at their end."""

from __future__ import annotations

import hashlib
import io
import os
from typing import Any

from wds_pipes.io.remote.budget import UnreadError
from wds_pipes.io.remote.queue import RemoteShard

_CHUNK = 1 << 20


def _compare(found: str, md5: str) -> None:
    if found != md5:
        raise UnreadError(f"its MD5 is {found}, and the index says {md5}: some of its bytes are wrong")


class VerifiedFile(io.FileIO):
    """A local file whose MD5 is compared at its end. The stream may begin anywhere, and leave bytes
    out: these are read for the MD5 at the end.
    """

    def __init__(self, path: str, md5: str) -> None:
        super().__init__(path)
        self._md5, self._sum, self._summed = md5, hashlib.md5(usedforsecurity=False), 0

    def readinto(self, buffer: Any) -> int:
        start = self.tell()
        count = super().readinto(buffer)
        if start == self._summed:
            self._add(memoryview(buffer)[:count])
        if count == 0:
            while data := os.pread(self.fileno(), _CHUNK, self._summed):
                self._add(data)
            _compare(self._sum.hexdigest(), self._md5)
        return count

    def _add(self, data: Any) -> None:
        self._sum.update(data)
        self._summed += len(data)


class Verified(io.RawIOBase):
    """A stream whose MD5 is compared at its end, which confirms that it is complete.

    Args:
        raw: the stream.
        md5: the MD5 of the shard, in hexadecimal digits.
        before: the MD5 of the bytes before those of the stream; None: there are none.
    """

    def __init__(self, raw: RemoteShard, md5: str, before: Any = None) -> None:
        self._raw, self._md5, self._sum = raw, md5, before or hashlib.md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer)
        self._sum.update(memoryview(buffer)[:count])
        if count == 0:
            _compare(self._sum.hexdigest(), self._md5)
        return count

    def wait(self) -> None:
        """Wait for the first bytes."""
        self._raw.wait()

    def close(self) -> None:
        self._raw.close()
        super().close()
