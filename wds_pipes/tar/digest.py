"""The MD5 of bytes that are being written, computed in a thread."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future
from typing import Any

from wds_pipes.io.threads import DaemonThreads

_MOST = 4  # blocks that wait


class Md5:
    """An MD5 that is computed while the next bytes are read and written, which takes about as long.

    It is meant for large blocks: for each, the threads wait for the GIL.
    """

    def __init__(self) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._threads = DaemonThreads(1)
        self._calls: deque[Future[Any]] = deque()

    def update(self, data: bytes) -> None:
        """Add bytes at the end."""
        if len(self._calls) == _MOST:
            self._calls.popleft().result()
        self._calls.append(self._threads.submit(self._md5.update, data))

    def hexdigest(self) -> str:
        """The MD5 of all bytes so far, as 32 hexadecimal digits."""
        while self._calls:
            self._calls.popleft().result()
        return self._md5.hexdigest()
