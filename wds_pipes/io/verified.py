"""Streams whose MD5 is compared with that of an index, at their end."""

from __future__ import annotations

import hashlib
import io
import os
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
        self._md5, self._found, self._over = md5, list[str | OSError](), threading.Event()
        try:
            again = os.dup(self.fileno())  # the same file, whatever has its name now
        except OSError:
            self.close()
            raise
        self._thread = threading.Thread(target=_find_md5, args=(again, self._found, self._over), daemon=True)
        self._thread.start()

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        if count == 0:
            self._thread.join()
            for found in self._found:  # none in a forked process, which has no such thread
                if isinstance(found, OSError):
                    raise found
                _compare(found, self._md5)
        return count

    def close(self) -> None:
        if not self.closed:
            self._over.set()
        super().close()


def _find_md5(file: int, found: list[str | OSError], over: threading.Event) -> None:
    """Add to ``found`` the MD5 of a file, or why it cannot be read, unless it is ``over`` before.
    Close the descriptor.
    """
    md5, place = hashlib.md5(usedforsecurity=False), 0
    try:
        while not over.is_set():
            data = os.pread(file, 1 << 20, place)
            if not data:
                found.append(md5.hexdigest())
                return
            md5.update(data)
            place += len(data)
    except OSError as error:
        found.append(error)
    finally:
        os.close(file)


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
