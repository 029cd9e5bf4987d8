"""Local files that get their name only when they are complete.

Rules:
1. What is written goes to ``.NAME.partial`` beside the file, which is renamed at the end.
2. The partial file is locked while it is open, so that two writers of one file exclude each other. One that a killed process left has no lock any more:
   the next writer of the same file writes over it. File systems without flock(2) have no such protection.
"""

from __future__ import annotations

import contextlib
import errno
import os

from wds_pipes.io.locks import LockedFile, open_locked

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class PartialFile:
    """A file that is being written.

    Args:
        path: the name that it gets at the end.
        overwrite: replace a file of that name. Otherwise it is refused, here and at the end.
        wait: wait for another writer of this file, instead of refusing.

    Raises:
        FileExistsError: there is such a file.
        BlockingIOError: another writer has it.
        OSError: it cannot be written.
    """

    def __init__(self, path: str, *, overwrite: bool = False, wait: bool = False) -> None:
        self._path, self._overwrite, self._process = path, overwrite, os.getpid()
        self._check()
        folder, name = os.path.split(path)
        self._partial = os.path.join(folder, f".{name}.partial")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock: LockedFile | None = None
        try:
            self._lock = open_locked(self._partial, flags, wait=wait)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._fd = os.open(self._partial, flags | os.O_CLOEXEC, 0o666)
        else:
            if self._lock is None and not os.path.isdir(folder or "."):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if self._lock is None:
                raise BlockingIOError(errno.EWOULDBLOCK, "another writer has this file open: one at a time, or give each files of its own", path)
            self._fd = self._lock.fd
        os.ftruncate(self._fd, 0)

    @property
    def own(self) -> bool:
        """Whether this is the process that opened it; a forked one must leave it alone."""
        return self._process == os.getpid()

    def write(self, data: bytes) -> int:
        """Add ``data``, without a buffer: an error of the disk belongs to what was just written."""
        done = os.write(self._fd, data)
        while done < len(data):
            done += os.write(self._fd, memoryview(data)[done:])
        return done

    def commit(self) -> None:
        """Give the file its name; what it holds is on the disk then."""
        os.fsync(self._fd)
        self._check()
        os.replace(self._partial, self._path)
        self._close()

    def discard(self) -> None:
        """Remove what was written, unless it has its name already."""
        if self._fd < 0 or not self.own:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._partial)
        finally:
            self._close()

    def _check(self) -> None:
        if not self._overwrite and os.path.lexists(self._path):
            raise FileExistsError(errno.EEXIST, "there is such a file: pass overwrite=True to replace it, or write to another place", self._path)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if self._lock is not None:
            self._lock.close()
        else:
            os.close(fd)
