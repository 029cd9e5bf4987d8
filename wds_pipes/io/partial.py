"""Local files that get their final name only when they are complete.

Rules:
1. Data is written to ``.NAME.partial`` in the same directory, which is renamed at the end.
2. The partial file is locked while it is open, so that two writers of one file exclude each other.
   A partial file of a killed process is no longer locked: the next writer of the same file
   overwrites it. File systems without flock(2) do not have this protection.
3. An error of the disk names the file by its final path.
"""

from __future__ import annotations

import contextlib
import errno
import os

from wds_pipes.io.locks import LockedFile, open_locked

_LARGE, _MOST_BLOCKS = 4096, 1024  # bytes of a block on average, for which a call with so many pays
_MODE = 0o666  # less the umask: others may read what is written, unlike the files of a cache


class PartialFile:
    """A file that is being written.

    Args:
        path: its final path.
        overwrite: replace an existing file at this path. Otherwise such a file is an error, here
            and in ``commit``.
        wait: wait until another writer of this file has finished, instead of raising
            BlockingIOError.

    Raises:
        FileExistsError: the path exists.
        BlockingIOError: another writer has the file open.
        OSError: it cannot be written.
    """

    def __init__(self, path: str, *, overwrite: bool = False, wait: bool = False) -> None:
        self._path, self._overwrite, self._process = path, overwrite, os.getpid()
        self._file: LockedFile | None = None  # closed when it is committed or discarded
        if not overwrite:
            refuse_existing(path)
        folder, name = os.path.split(path)
        self._partial = os.path.join(folder, f".{name}.partial")
        try:
            self._file = open_locked(self._partial, os.O_RDWR | os.O_CREAT, wait=wait, mode=_MODE, may_lack_locks=True)
        except BaseException:  # also a signal, at any moment: the file may be there, and is not known yet
            with contextlib.suppress(Exception):
                self._file = open_locked(self._partial, may_lack_locks=True)  # unless another writer has it
                self.discard()
            raise
        if self._file is None and not os.path.isdir(folder or "."):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self._file is None:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                "another writer has this file open: one at a time, or give each files of its own",
                path,
            )
        os.ftruncate(self._file.fd, 0)

    def __del__(self) -> None:
        # Nobody has got it: a signal came when it was opened, or it could not be.
        with contextlib.suppress(OSError, AttributeError):
            self.discard()

    @property
    def own(self) -> bool:
        """Whether this is the process that opened it; a forked one must leave it alone."""
        return self._process == os.getpid()

    def write(self, *blocks: bytes) -> int:
        """Append blocks without a buffer: the call that causes an error of the disk raises it.
        Large ones are not copied together before.
        """
        assert self._file is not None
        size, done, fd = sum(map(len, blocks)), 0, self._file.fd
        try:
            if 1 < len(blocks) <= _MOST_BLOCKS and size >= _LARGE * len(blocks):
                done = os.writev(fd, blocks)
            if done < size:
                data = memoryview(b"".join(blocks))  # one block alone is not copied
                while done < size:
                    done += os.write(fd, data[done:])
        except OSError as error:
            error.filename = self._path
            raise
        return done

    def commit(self) -> None:
        """Write the content to the disk (fsync), and give the file its final name."""
        assert self._file is not None
        put_in_place(self._file.fd, self._partial, self._path, overwrite=self._overwrite)
        self._file.close()

    def discard(self) -> None:
        """Remove the partial file, unless it was committed."""
        if self._file is None or self._file.fd < 0 or not self.own:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._partial)
        finally:
            self._file.close()


def put_in_place(fd: int, partial: str, path: str, *, overwrite: bool = True) -> None:
    """Write the content of an open file, ``partial``, to the disk (fsync), and rename it to
    ``path``. Whenever the process or the machine stops, ``path`` is the old file or the new one.

    Raises:
        FileExistsError: ``path`` exists, and ``overwrite`` is not set.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = path
        raise
    if not overwrite:
        refuse_existing(path)
    os.replace(partial, path)


def refuse_existing(path: str) -> None:
    """Raise FileExistsError if there is anything at ``path``."""
    if os.path.lexists(path):
        raise FileExistsError(
            errno.EEXIST, "there is such a file: pass overwrite=True to replace it, or write to another place", path
        )
