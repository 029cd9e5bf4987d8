"""Streams whose MD5 is compared with that of an index, at their end."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from typing import Any

from wds_pipes.io.remote.budget import UnreadError
from wds_pipes.io.remote.shard import RemoteShard


def _compare(found: str, md5: str) -> None:
    if found != md5:
        raise UnreadError(f"its MD5 is {found}, and the index says {md5}: some of its bytes are wrong")


class VerifiedFile(io.FileIO):
    """A local file whose MD5 is compared at its end. A thread reads all of it meanwhile: the stream
    itself may begin anywhere, and leave bytes out.
    """

    def __init__(self, path: str, md5: str) -> None:
        super().__init__(path)
        self._md5, self._found, self._over = md5, list[str](), threading.Event()
        self._thread = threading.Thread(target=_find_md5, args=(path, self._found, self._over), daemon=True)
        self._thread.start()

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        if count == 0:
            self._thread.join()
            for found in self._found:  # none in a forked process, which has no such thread
                _compare(found, self._md5)
        return count

    def close(self) -> None:
        if not self.closed:
            self._over.set()
        super().close()


def _find_md5(path: str, found: list[str], over: threading.Event) -> None:
    """Add the MD5 of a file to ``found``, if it can be read before it is ``over``."""
    md5 = hashlib.md5(usedforsecurity=False)
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        while not over.is_set():
            data = file.read(1 << 20)
            if not data:
                found.append(md5.hexdigest())
                return
            md5.update(data)


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
        if count == 0:
            _compare(self._sum.hexdigest(), self._md5)
        return count

    def wait(self) -> None:
        """Wait for the first bytes."""
        self._raw.wait()

    def close(self) -> None:
        self._raw.close()
        super().close()
