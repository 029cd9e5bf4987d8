"""Files of this user that carry a lock as long as they are open: flock(2), which the kernel drops with the process, however that ends.

A lock belongs to what was opened, so two files that are opened in one process exclude each other too. A forked child shares what it inherits and would keep
it locked when its parent has died: so each child closes that at once.

Others may be able to write to the directory. So only regular files are opened that belong to this user, to root or to the owner of the directory: no links,
which could lead anywhere, no pipes, which could keep this process waiting, and no bytes of other users.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import weakref

from wds_pipes.errors import CacheError

_guard = threading.RLock()  # held where files are opened and closed, and by a fork, so that a child knows all that it inherits
_open: weakref.WeakSet[LockedFile] = weakref.WeakSet()


def open_own(path: str, flags: int) -> int:
    """A descriptor of the regular file at ``path``, which is made for this user alone.

    Raises:
        CacheError: something else is there, or it belongs to somebody else.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _foreign(path, "is no regular file") from error
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _foreign(path, "is no regular file")
        if found.st_uid not in (os.geteuid(), 0) and found.st_uid != os.stat(os.path.dirname(path)).st_uid:
            raise _foreign(path, f"belongs to another user (uid {found.st_uid})")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _foreign(path: str, what: str) -> CacheError:
    return CacheError(f"{path} in the cache {what}: remove it, and give each user a cache directory that only this user may write.", path=path)


class LockedFile:
    """An open descriptor and its lock.

    Attributes:
        fd: the descriptor; -1 when it is closed.
    """

    def __init__(self, path: str, flags: int) -> None:
        self.fd = -1
        with _guard:
            self.fd = open_own(path, flags)
            _open.add(self)

    @property
    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self.fd).st_size

    @property
    def removed(self) -> bool:
        """Whether no path names it any more."""
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        """Unlock and close; again: nothing."""
        with _guard:
            if self.fd >= 0:
                try:
                    fcntl.flock(self.fd, fcntl.LOCK_UN)  # for a child too that is between its fork and its exec
                finally:
                    self._drop()

    def _drop(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)


def open_locked(path: str, flags: int = os.O_RDONLY, *, shared: bool = False, wait: bool = False) -> LockedFile | None:
    """The file at ``path``, open and locked; None if there is none, or if others have it and ``wait`` is not set.

    A file that was removed or replaced while this waited is not what ``path`` names any more, and is never returned.
    """
    while True:
        try:
            file = LockedFile(path, flags)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.stat(path), os.fstat(file.fd)):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.close()


def _in_child() -> None:
    for file in list(_open):
        if file.fd >= 0:
            file._drop()  # without unlocking, which would unlock it for the parent
    _open.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_in_child)
