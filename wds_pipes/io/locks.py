"""Files of this user that are locked while they are open.

They are locked with flock(2): the kernel drops the lock when the process ends, however that
happens. A lock belongs to an open file description, so two openings of a file in one process
exclude each other too. A forked child shares the descriptions that it inherits, and would keep the
lock after its parent has died. So each child closes them at once.

Other users may be able to write to the directory. So only regular files are opened that belong to
this user, to root or to the owner of the directory: no links, which could lead anywhere; no pipes,
which could block this process; and no data of other users.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
import weakref

from wds_pipes.errors import CacheError

# Held while a file is opened or closed and during a fork, so that a child knows all files that it
# inherits.
_guard = threading.RLock()
_open: weakref.WeakSet[LockedFile] = weakref.WeakSet()

logger = logging.getLogger("wds_pipes")

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_LIMIT_SECONDS = 120.0  # how long to wait for a process that does not write to the file that it has locked
_SILENT_SECONDS = 5.0  # after which a wait is reported
_LONGEST_PAUSE = 0.05  # seconds until the lock is tried again


def open_own(path: str, flags: int, mode: int = 0o600) -> int:
    """A descriptor of the regular file at ``path``; ``mode``: the permissions of a new file.

    Raises:
        CacheError: it is not a regular file, or it belongs to another user.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _foreign(path, "is no regular file") from error
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _foreign(path, "is no regular file")
        if found.st_uid not in (os.geteuid(), 0) and found.st_uid != os.stat(os.path.dirname(path) or ".").st_uid:
            raise _foreign(path, f"belongs to another user (uid {found.st_uid})")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _foreign(path: str, what: str) -> CacheError:
    return CacheError(
        f"{path} {what}: remove it, and give each user a directory that only this user may write.",
        path=path,
    )


class LockedFile:
    """An open descriptor and its lock.

    Attributes:
        fd: the descriptor; -1 when it is closed.
    """

    fd = -1

    def __init__(self, path: str, flags: int, mode: int) -> None:
        with _guard:
            self.fd = open_own(path, flags, mode)
            _open.add(self)

    @property
    def size(self) -> int:
        """The current size of the file in bytes."""
        return os.fstat(self.fd).st_size

    @property
    def removed(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        """Unlock and close the file. Closing again does nothing."""
        with _guard:
            if self.fd >= 0:
                with contextlib.suppress(OSError):  # where files cannot be locked
                    # Also for a child between its fork and its exec.
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
                self._drop()

    def __del__(self) -> None:
        if self.fd >= 0:  # nobody has got it: a signal came when it was opened
            self._drop()

    def _drop(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)


def open_locked(
    path: str,
    flags: int = os.O_RDONLY,
    *,
    shared: bool = False,
    wait: bool = False,
    mode: int = 0o600,
    may_lack_locks: bool = False,
) -> LockedFile | None:
    """Open and lock the file at ``path``; ``mode``: the permissions of a new file, less the umask.
    With ``may_lack_locks``, it is not locked if its file system has no locks.

    The result is None if the file does not exist, or if it is locked and ``wait`` is not set. A
    file that was removed or replaced during the wait is not returned: the file that ``path`` names
    now is tried instead.

    Raises:
        TimeoutError: the process that has locked it has written nothing to it for two minutes.
    """
    while True:
        try:
            file = LockedFile(path, flags, mode)
        except FileNotFoundError:
            return None
        try:
            operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
            if wait:
                _wait(file, operation, path)
            else:
                fcntl.flock(file.fd, operation)
            if os.path.samestat(os.stat(path), os.fstat(file.fd)):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            return None
        except BaseException as error:
            if may_lack_locks and isinstance(error, OSError) and error.errno in _NO_LOCKS:
                return file
            file.close()
            raise
        file.close()


def _wait(file: LockedFile, operation: int, path: str) -> None:
    """Lock a file as soon as no other process has locked it."""
    begin = since = time.monotonic()
    seen, pause, is_reported = (0, 0), 0.001, False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file.fd, operation)
            return
        status, now = os.fstat(file.fd), time.monotonic()
        if (found := (status.st_size, status.st_mtime_ns)) != seen:
            seen, since = found, now
        if now - since > _LIMIT_SECONDS:
            what = f"{_holder(status.st_ino)} has it locked, and has not written to it for {now - since:.0f} s"
            raise TimeoutError(errno.ETIMEDOUT, f"{what}: end that process, or let it go on", path)
        if not is_reported and now - begin > _SILENT_SECONDS:
            is_reported = True
            logger.warning("%s has %s locked, and is waited for.", _holder(status.st_ino), path)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _holder(inode: int) -> str:
    """The process that has locked a file, as far as Linux says it: see proc_locks(5)."""
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}") and int(fields[4]) > 0:
                return f"process {fields[4]}"
    return "another process"


def _in_child() -> None:
    for file in list(_open):
        if file.fd >= 0:
            file._drop()  # do not unlock it: that would unlock it for the parent too
    _open.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_in_child)
