"""Files to write, on a local disk or in a store, that get their final name when they are complete.

Rules:
1. A local file is a ``PartialFile``: data is written to ``.NAME.partial`` in the same directory,
   which is renamed at the end. An object of S3, GCS or Azure appears when its upload ends; if
   writing fails, the upload is aborted. In any other store that fsspec can write to, the data is
   written to ``.NAME.partial`` in the same directory and then moved.
2. A process that is killed may leave a ``.NAME.partial``, or parts of an upload that has no name.
   The next writer of the file replaces the former; a rule of the bucket removes the latter.
3. Errors of a store are shown without credentials.
4. The partial file is locked while it is open, so that two writers of one file exclude each other.
   A partial file of a killed process is no longer locked: the next writer of the same file
   overwrites it. File systems without flock(2) do not have this protection.
5. An error of the disk names the file by its final path.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NoReturn, TypeAlias, TypeVar

from wds_pipes.errors import ShardError, mended
from wds_pipes.io.locks import LockedFile, open_locked
from wds_pipes.io.urls import at_home, links_of, local_path, redact, restored, with_variables

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


logger = logging.getLogger("wds_pipes")

# The protocols of stores whose objects appear as a whole when an upload ends.
_WHOLE = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"))
_READ_ONLY = frozenset(("http", "https", "ais"))
_AT_ONCE = 1 << 20  # bytes that are given to the library of a store at a time
_PART_BYTES = 5 << 20  # the fewest that S3 takes
_PARTS = 1000  # of equal size; then parts grow, since an object of S3 has at most 10 000
_AGAIN_SECONDS = 0.5  # how long to wait at a time
_PATIENCE_SECONDS = 5.0  # how long to wait for a request before its upload is aborted

StorageOptions = dict[str, Any] | None
T = TypeVar("T")


def target_of(target: str | os.PathLike[str]) -> str:
    """The path or URL of a file to write, with ``~`` and environment variables replaced.

    Raises:
        ValueError: nothing can be written there.
    """
    name = at_home(with_variables(os.fspath(target)))
    path, whole = local_path(name), restored(name)
    if path == "":
        raise ValueError("a file to write needs a name, and this path is empty")
    if name == "-":
        raise mended(
            ValueError,
            "a file is not written to '-'",
            mend="for standard output pass the stream sys.stdout.buffer",
            mend_cli="name a file",
        )
    if whole != name:
        raise ValueError(f"a '/' is missing in {redact(whole)!r}, which a pathlib.Path shortens: pass the URL as a str")
    if path is not None:
        return path
    if name.startswith("pipe:") or len(links_of(name)) > 1 or name.partition(":")[0].lower() in _READ_ONLY:
        raise ValueError(
            f"nothing is written to {redact(name)!r}, for a command, a chain of protocols and a web server take no "
            "files that appear when they are complete: write to a local directory or to a store, such as s3://"
        )
    return name


def open_output(
    target: str, *, overwrite: bool = False, wait: bool = False, storage_options: StorageOptions = None
) -> OutputFile:
    """Open a file to write.

    Args:
        target: its path or URL, as ``target_of`` returns it.
        overwrite: replace an existing file.
        wait: wait for another writer of a local file.
        storage_options: options for fsspec.

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is not set.
        BlockingIOError: another writer has the local file open.
        OSError: it cannot be written; a ShardError for a store.
    """
    path = local_path(target)
    if path is not None:
        return PartialFile(path, overwrite=overwrite, wait=wait)
    return RemoteFile(target, overwrite=overwrite, storage_options=storage_options)


class RemoteFile:
    """A file of a store that is being written.

    Requests are made in other threads. A signal may end the wait for one at any moment, as Ctrl-C
    does; the request goes on, and ``discard`` waits for it. Otherwise the upload that it begins, or
    the part that it sends, would come after the upload was aborted.
    """

    def __init__(self, url: str, *, overwrite: bool = False, storage_options: StorageOptions = None) -> None:
        self._url, self._overwrite, self._options = url, overwrite, storage_options
        self._process, self._open = os.getpid(), False
        self._held: list[bytes] = []  # what is not in the stream yet
        self._held_bytes = 0
        self._request: Future[None] | None = None  # the last one
        try:
            from wds_pipes.io.remote.file_systems import file_system

            self._fs, self._path = file_system(url, storage_options)
            self._check()
            folder, _, name = self._path.rpartition("/")
            if url.partition("://")[0] in _WHOLE:
                self._written = self._path
            else:
                self._fs.makedirs(folder, exist_ok=True)
                self._written = f"{folder}/.{name}.partial"
            self._sent, self._part = 0, _part_bytes(self._fs, url)
            self._stream = self._fs.open(self._written, "wb", **({"block_size": self._part} if self._part else {}))
        except FileExistsError:
            raise
        except Exception as error:
            refuse(url, error, storage_options)
        self._open = True

    @property
    def own(self) -> bool:
        """Whether this is the process that opened it; a forked one must leave it alone."""
        return self._process == os.getpid()

    def write(self, *blocks: bytes) -> int:
        """Append blocks; they are sent in parts of some megabytes."""
        size = sum(map(len, blocks))
        self._held += map(bytes, blocks)
        self._held_bytes += size
        if self._held_bytes >= _AT_ONCE:
            self._do(self._write)
        return size

    def commit(self) -> None:
        """End the upload, so that the object appears."""
        self._do(self._end)

    def discard(self) -> None:
        """Abort the upload, unless it was committed."""
        if self._open and self.own and self._request is not None:
            wait([self._request], _PATIENCE_SECONDS)
        if not self._open or not self.own:
            return
        self._open = False
        abort(self._stream)
        if self._written != self._path and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._written)

    def _do(self, call: Callable[[], None]) -> None:
        """Make a request, and wait for it."""
        request = self._request = Future[None]()  # before its thread is there: a signal may come when it starts

        def make() -> None:
            try:
                call()
                request.set_result(None)
            except BaseException as error:
                request.set_exception(error)

        threading.Thread(target=make, daemon=True).start()
        while not wait([request], _AGAIN_SECONDS).done:  # for little at a time, so that signals are noticed
            pass
        try:
            request.result()
        except FileExistsError:
            raise
        except Exception as error:
            refuse(self._url, error, self._options)

    def _write(self) -> None:
        self._stream.write(b"".join(self._held))
        self._sent += self._held_bytes
        self._held, self._held_bytes = [], 0
        if self._part and self._sent // _PARTS > self._stream.blocksize:
            self._stream.blocksize = self._sent // _PARTS

    def _end(self) -> None:
        self._check()
        self._write()
        self._stream.close()
        if self._written != self._path:
            self._fs.mv(self._written, self._path)
        self._open = False

    def _check(self) -> None:
        if not self._overwrite:
            self._fs.invalidate_cache(self._fs._parent(self._path))
            if self._fs.exists(self._path):
                raise FileExistsError(
                    errno.EEXIST,
                    "there is such a file: pass overwrite=True to replace it, or write to another place",
                    redact(self._url),
                )


OutputFile: TypeAlias = PartialFile | RemoteFile  # a file that is being written


def _part_bytes(fs: Any, url: str) -> int | None:
    """The size of the first parts of an upload to S3, unless the user has chosen one. Those of s3fs
    have 50 MiB, of which it holds several copies.
    """
    usual = getattr(type(fs), "default_block_size", None)
    if url.partition("://")[0] not in ("s3", "s3a") or usual is None or fs.default_block_size != usual:
        return None
    return min(int(usual), _PART_BYTES)


def abort(stream: Any) -> None:
    """Abort the upload of a stream, if possible: closing it would store half a file."""
    discard = getattr(stream, "discard", None)  # of fsspec
    if not callable(discard):
        discard = getattr(stream, "terminate", None)  # of google-cloud-storage and smart_open
    if not callable(discard):
        return
    try:
        if not sys.is_finalizing():  # at exit, nothing can be sent any more
            discard()
    except Exception as error:
        logger.warning("the upload of a shard could not be aborted: %s: %s.", type(error).__name__, error)
    with contextlib.suppress(AttributeError):
        stream.closed = True  # bytes that are not uploaded yet must not be uploaded later


def exists(target: str, storage_options: StorageOptions = None) -> bool:
    """Whether there is a file of this name."""
    return size_of(target, storage_options) is not None


def size_of(target: str, storage_options: StorageOptions = None) -> int | None:
    """The size of a file in bytes; None: it does not exist."""
    path = local_path(target)
    if path is not None:
        try:
            return os.lstat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
    found = info_of(target, storage_options)
    return None if found is None else int(found.get("size") or 0)


def info_of(url: str, storage_options: StorageOptions, *, readable: bool = False) -> dict[str, Any] | None:
    """What a store says of a file, as fsspec does; None: it does not exist. Nothing, if the store
    cannot say anything.

    Args:
        url: the file.
        storage_options: options for fsspec.
        readable: return None too if it may not be read: a store that may not be listed says this
            of files that do not exist.

    Raises:
        ShardError: the store does not answer, or with an error; it never means that there is no
            such file.
    """

    def info(fs: Any, name: str) -> dict[str, Any]:
        try:
            return dict(fs.info(name))
        except NotImplementedError:
            return {}

    return asked(url, storage_options, info, readable=readable)


def asked(
    url: str,
    storage_options: StorageOptions,
    call: Callable[[Any, str], T],
    what: str = "read",
    *,
    readable: bool = False,
) -> T | None:
    """What ``call`` returns for a store and the name of a file in it; None: it does not exist.

    Raises:
        ShardError: the store does not answer, or with an error: it cannot be ``what``.
    """
    from wds_pipes.io.remote.metadata import ask
    from wds_pipes.io.remote.responses import judge

    try:
        return ask(url, storage_options, call)
    except Exception as error:
        verdict, failed = judge(error, url.partition("://")[0]), error
    if not (verdict.missing or (verdict.forbidden and readable)):
        refuse(url, failed, storage_options, what)  # outside of the handler: its context could hold the URL
    return None


def remove(target: str, storage_options: StorageOptions = None) -> None:
    """Remove a file, if it exists."""
    path = local_path(target)
    if path is None:  # fs.rm() would take "[" in a name for a pattern
        asked(target, storage_options, lambda fs, name: fs.rm_file(name), "removed")
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)


def read_small(target: str, storage_options: StorageOptions = None, *, most: int | None = None) -> bytes | None:
    """The content of a small file, at most its first ``most`` bytes; None: it does not exist."""
    path = local_path(target)
    if path is not None:
        try:
            with open(path, "rb") as file:
                return file.read(-1 if most is None else most)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(fs: Any, name: str) -> bytes:
        return bytes(fs.cat_file(name) if most is None else fs.read_block(name, 0, most))

    return asked(target, storage_options, read)


def write_small(target: str, content: bytes, storage_options: StorageOptions = None, *, overwrite: bool = True) -> None:
    """Write a file; it appears when it is complete.

    Raises:
        FileExistsError: it exists, and ``overwrite`` is not set.
    """
    output = open_output(target, overwrite=overwrite, wait=True, storage_options=storage_options)
    try:
        output.write(content)
        output.commit()
    finally:
        output.discard()


def refuse(url: str, error: Exception, storage_options: StorageOptions, what: str = "written") -> NoReturn:
    """Raise the ShardError for an error of a store, without credentials."""
    if isinstance(error, ShardError):
        raise error
    from wds_pipes.io.remote.file_systems import missing_package
    from wds_pipes.io.remote.responses import actual, judge
    from wds_pipes.io.urls import clean, hide, words

    shown = redact(url)
    found = actual(error)
    error = found if isinstance(found, Exception) else error
    story = f"{type(error).__name__}: {hide(words(error), url, storage_options).rstrip('.')}"
    verdict = judge(error, url.partition("://")[0])
    public = ("", "") if what in ("written", "removed") else verdict.public  # which is for readers
    if isinstance(error, ImportError):
        fault, mend = "needs a package that is not installed", missing_package(url)
    elif isinstance(error, FileNotFoundError):
        fault, mend = f"cannot be {what}", "check that its bucket or directory exists"
    else:
        fault = verdict.what.replace("be read", f"be {what}")
        mend = verdict.mend or "check the URL, the network and your permissions"
    problem = ShardError(
        f"{fault} ({story})",
        where=shown,
        mend=f"{mend}{public[0]}.",
        mend_cli=f"{mend}{public[1]}.",
        url=shown,
    )
    cause = clean(error, url, storage_options, depth=1)
    raise problem from (cause and cause.with_traceback(None))
