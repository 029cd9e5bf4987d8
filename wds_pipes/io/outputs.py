"""Files to write, on a local disk or in a store, that get their final name when they are complete.

Rules:
1. A local file is a ``PartialFile``. An object of S3, GCS or Azure appears when its upload ends; if
   writing fails, the upload is aborted. In any other store that fsspec can write to, the data is
   written to ``.NAME.partial`` in the same directory and then moved.
2. A process that is killed may leave a ``.NAME.partial``, or parts of an upload that has no name.
   The next writer of the file replaces the former; a rule of the bucket removes the latter.
3. Errors of a store are shown without credentials.
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
from wds_pipes.io.partial import PartialFile
from wds_pipes.io.urls import at_home, links_of, local_path, redact, restored, with_variables

logger = logging.getLogger("wds_pipes")

# The protocols of stores whose objects appear as a whole when an upload ends.
_WHOLE = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"))
_READ_ONLY = frozenset(("http", "https", "ais"))
_AT_ONCE = 1 << 20  # bytes that are given to the library of a store at a time
_PART_BYTES = 5 << 20  # the fewest that S3 takes
_PARTS = 1000  # of equal size; then parts grow, since an object of S3 has at most 10 000
_AGAIN_SECONDS = 0.5  # how long to wait at a time
_PATIENCE_SECONDS = 5.0  # how long to wait for a request before its upload is aborted

Options = dict[str, Any] | None
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
    target: str, *, overwrite: bool = False, wait: bool = False, storage_options: Options = None
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

    def __init__(self, url: str, *, overwrite: bool = False, storage_options: Options = None) -> None:
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


def exists(target: str, storage_options: Options = None) -> bool:
    """Whether there is a file of this name."""
    return size_of(target, storage_options) is not None


def size_of(target: str, storage_options: Options = None) -> int | None:
    """The size of a file in bytes; None: it does not exist."""
    path = local_path(target)
    if path is not None:
        try:
            return os.lstat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
    found = info_of(target, storage_options)
    return None if found is None else int(found.get("size") or 0)


def info_of(url: str, storage_options: Options, *, readable: bool = False) -> dict[str, Any] | None:
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
    storage_options: Options,
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
    from wds_pipes.io.remote.verdicts import judge

    try:
        return ask(url, storage_options, call)
    except Exception as error:
        verdict, failed = judge(error, url.partition("://")[0]), error
    if not (verdict.missing or (verdict.forbidden and readable)):
        refuse(url, failed, storage_options, what)  # outside of the handler: its context could hold the URL
    return None


def remove(target: str, storage_options: Options = None) -> None:
    """Remove a file, if it exists."""
    path = local_path(target)
    if path is None:  # fs.rm() would take "[" in a name for a pattern
        asked(target, storage_options, lambda fs, name: fs.rm_file(name), "removed")
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)


def read_small(target: str, storage_options: Options = None, *, most: int | None = None) -> bytes | None:
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


def write_small(target: str, content: bytes, storage_options: Options = None, *, overwrite: bool = True) -> None:
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


def refuse(url: str, error: Exception, storage_options: Options, what: str = "written") -> NoReturn:
    """Raise the ShardError for an error of a store, without credentials."""
    if isinstance(error, ShardError):
        raise error
    from wds_pipes.io.remote.file_systems import missing_package
    from wds_pipes.io.remote.verdicts import actual, judge
    from wds_pipes.io.secret import clean, hide, words

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
