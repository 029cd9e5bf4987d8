"""A remote shard whose MD5 is compared with that of an index, at its end."""

from __future__ import annotations

import hashlib
import io
from typing import Any

from wds_pipes.io.remote.budget import UnreadError
from wds_pipes.io.remote.shard import RemoteShard


class Verified(io.RawIOBase):
    """A stream whose MD5 is compared at its end, which confirms that it is complete."""

    end_is_vouched_for = True

    def __init__(self, raw: RemoteShard, md5: str) -> None:
        self._raw, self._md5, self._sum = raw, md5, hashlib.md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer)
        self._sum.update(memoryview(buffer)[:count])
        if count == 0 and (found := self._sum.hexdigest()) != self._md5:
            raise UnreadError(f"its MD5 is {found}, and the index says {self._md5}: some of its bytes are wrong")
        return count

    def wait(self) -> None:
        """Wait for the first bytes."""
        self._raw.wait()

    def close(self) -> None:
        self._raw.close()
        super().close()
