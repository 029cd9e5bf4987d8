"""The MD5 of bytes that are being written, computed in a thread."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from typing import Any

from wds_pipes.io.threads import DaemonThreads

# Bytes that are hashed at a time. Smaller amounts would cost more in waiting for the GIL.
_AT_ONCE = 1 << 20


class Md5:
    """An MD5 that is computed while the next bytes are read and written.

    An MD5 takes about as long as reading and writing the bytes. At most two times ``_AT_ONCE``
    bytes wait for it, or two larger blocks.
    """

    def __init__(self) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._threads = DaemonThreads(1)
        self._blocks: list[bytes] = []
        self._size = 0
        self._running: Future[Any] | None = None

    def update(self, data: bytes) -> None:
        """Add bytes at the end."""
        self._blocks.append(data)
        self._size += len(data)
        if self._size >= _AT_ONCE:
            joined = b"".join(self._blocks)
            self._blocks, self._size = [], 0
            self._wait()
            self._running = self._threads.submit(self._md5.update, joined)

    def hexdigest(self) -> str:
        """The MD5 of all bytes so far, as 32 hexadecimal digits."""
        self._wait()
        self._md5.update(b"".join(self._blocks))
        self._blocks, self._size = [], 0
        return self._md5.hexdigest()

    def _wait(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None
