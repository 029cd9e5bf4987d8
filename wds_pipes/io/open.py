"""Open a shard by URL: local files directly, remote ones with read-ahead and an optional cache."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_pipes.core.counts import NO_NETWORK, Meters, Network
from wds_pipes.errors import CacheError, ShardError, StateError, is_of_data
from wds_pipes.io.identity import identify_store, protocols_of, user_of
from wds_pipes.io.remote.budget import Client, Reading
from wds_pipes.io.urls import at_home, clean, hide, local_path, options_for, redact, with_variables
from wds_pipes.io.verified import Verified

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache
    from wds_pipes.io.remote.queue import ReadQueue, RemoteShard


_PATIENCE = 2.0  # seconds for a command to end after SIGTERM, when its output was closed


def is_remote(url: str) -> bool:
    """Whether a shard is in a store, and not a local file, standard input or a command's output."""
    return url != "-" and not url.startswith("pipe:") and local_path(url) is None


class Opener:
    """Opens the shards of a pipeline.

    It can be pickled and forked: each process opens its own connections when it needs them.

    Args:
        reading: how remote shards are read.
        cache: a cache of remote shards on a disk; None: no cache.
        verify: compare the MD5 of a shard that is read to its end, if it is known; a remote one
            must also be read from its beginning. None: of remote shards only.
        allow_pipe: run the commands of ``pipe:`` URLs.
        buffer_bytes: how many bytes are read at once. More would replace what the processor has in
            its caches: with 1 MiB, samples of 107 KB take 10 % longer.
    """

    def __init__(
        self,
        reading: Reading | None = None,
        *,
        cache: ShardCache | None = None,
        verify: bool | None = None,
        allow_pipe: bool = False,
        buffer_bytes: int = 1 << 15,
    ) -> None:
        self._reading = reading or Reading()
        self._cache = cache
        self._verify = verify
        self._allow_pipe = allow_pipe
        self._buffer_bytes = buffer_bytes
        # The identity of each store for the cache, and the environment at that time; None: a shard
        # was fetched from it.
        self._stores: dict[tuple[int | str, ...], tuple[str, dict[str, str] | None]] = {}
        self._clients: dict[int, Client] = {}  # by process; several threads may request theirs at once

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "_stores": {}}

    @property
    def client(self) -> Client:
        """The connections of this process."""
        client = self._clients.get(os.getpid())
        return client if client is not None else self._clients.setdefault(os.getpid(), Client(self._reading))

    @property
    def used(self) -> Network:
        """The network use of this process."""
        client = self._clients.get(os.getpid())
        return (
            NO_NETWORK
            if client is None
            else Network(client.requests, client.retries, client.bytes_fetched, client.stalled, client.hedged)
        )

    def open(
        self,
        url: str,
        start: int = 0,
        queue: ReadQueue | None = None,
        *,
        size: int | None = None,
        md5: str | None = None,
        wait: bool = True,
        meters: Meters | None = None,
    ) -> BinaryIO:
        """A buffered stream of the object at ``url``, from byte ``start`` on.

        Args:
            url: the URL or path; ``"-"`` is standard input.
            start: the first byte, for remote shards only; other streams start at their beginning.
            queue: the queue in which a remote shard is read; None: its own.
            size: how many bytes a remote shard must have; None: as many as it has.
            md5: what the shard is compared with; None: with nothing.
            wait: wait for the first bytes, so that an error of the store is raised here.
            meters: those of the chain that reads it; None: there is none, or ``queue`` has them.

        Raises:
            ShardError: it does not exist, may not be read, or its protocol is not known.
        """
        try:
            if url == "-":
                return io.BufferedReader(io.FileIO(_standard_input(), closefd=False), self._buffer_bytes)
            if url.startswith("pipe:") and not self._allow_pipe:
                raise ShardError(
                    "would run a shell command",
                    where=f"shard {redact(url)}",
                    mend="pass allow_pipe=True to open_shards() or open_url() if you trust it, or read the command's "
                    "output from '-'.",
                    mend_cli="read the command's output from '-'.",
                    url=redact(url),
                )
            if url.startswith("pipe:"):
                return io.BufferedReader(CommandOutput(url), self._buffer_bytes)
            path = local_path(url)
            if path is not None:
                return _open_local(at_home(path), self._buffer_bytes, md5 if self._verify else None)
            return self._remote(
                url, start, queue, size=size, md5=None if self._verify is False else md5, wait=wait, meters=meters
            )
        except (ShardError, StateError, CacheError):
            raise
        except Exception as error:
            problem = self.problem(url, error)
        raise problem  # outside of the handlers: an error in its context could contain the URL

    def open_stored(self, url: str) -> io.FileIO | None:
        """The file of a remote object in the cache; None: it is not stored there."""
        return None if self._cache is None else self._cache.open_stored(url, store=self._store(url))

    def problem(self, url: str, error: Exception) -> ShardError:
        """The error for a shard that cannot be opened, without credentials."""
        shown, options = redact(url), self._reading.storage_options
        if isinstance(error, FileNotFoundError):
            message = f"does not exist. The working directory is {os.getcwd()}. Check its name."
        elif isinstance(error, PermissionError):
            message = "may not be read: check its permissions."
        elif isinstance(error, ImportError):
            from wds_pipes.io.remote.file_systems import missing_package

            message = (
                f"needs a package that is not installed ({hide(str(error), url, options)}): {missing_package(url)}."
            )
        else:
            message = f"cannot be opened: {type(error).__name__}: {hide(str(error), url, options)}"
        of_data = isinstance(error, OSError) and not isinstance(error, ConnectionError) and is_of_data(error)
        missing = isinstance(error, FileNotFoundError)
        problem = ShardError(message, where=f"shard {shown}", url=shown, missing=missing, of_data=of_data)
        problem.__cause__ = clean(error, url, options)
        return problem

    def _remote(
        self,
        url: str,
        start: int,
        queue: ReadQueue | None,
        *,
        size: int | None,
        md5: str | None,
        wait: bool,
        meters: Meters | None,
    ) -> BinaryIO:
        if self._cache is not None:
            return self._cache.open(
                url,
                lambda start: self._fetch(url, start, None, size, wait=False, meters=meters),
                start=start,
                size=size,
                md5=md5,
                store=self._store(url),
            )
        raw = self._fetch(url, start, queue, size, wait=wait, meters=meters)
        return io.BufferedReader(raw if md5 is None or start else Verified(raw, md5), self._buffer_bytes)

    def _store(self, url: str, *, fetches: bool = False) -> str:
        """The identity of the store of a URL, for the cache.

        It follows changes of the environment until the process fetches from the store: then the
        file system is created, with the environment of that moment.
        """
        options = options_for(url, self._reading.storage_options)
        key: tuple[int | str, ...] = (os.getpid(), *protocols_of(url), user_of(url), bool(options))
        identity, environment = self._stores.get(key) or (identify_store(url, options), dict(os.environ))
        if environment is not None and environment != os.environ:
            identity, environment = identify_store(url, options), dict(os.environ)
        self._stores[key] = identity, None if fetches else environment
        return identity

    def _fetch(
        self, url: str, start: int, queue: ReadQueue | None, size: int | None, *, wait: bool, meters: Meters | None
    ) -> RemoteShard:
        from wds_pipes.io.remote.queue import ReadQueue, RemoteShard  # import asyncio, which local shards do not need

        if self._cache is not None:
            self._store(url, fetches=True)
        shard = RemoteShard(
            queue or ReadQueue(self.client, meters), url, start=start, size=size, whole_queue=queue is None
        )
        try:
            if wait:
                shard.wait()
        except BaseException:
            shard.close()  # otherwise the queue would never continue with the next shard
            raise
        return shard


class CommandOutput(io.RawIOBase):
    """The standard output of a shell command, as a stream that is not seekable.

    If the command fails, reading its end raises OSError.

    Args:
        url: ``pipe:`` followed by the command.
    """

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            url.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._name = redact(url).removeprefix("pipe:").strip()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None
        count = self._process.stdout.readinto(buffer)  # type: ignore[attr-defined]
        if not count and self._process.wait():
            raise OSError(f"the command {self._name} ended with status {self._process.returncode}")
        return int(count)

    def close(self) -> None:
        if not self.closed:
            assert self._process.stdout is not None
            self._process.stdout.close()
            if self._process.poll() is None:  # end it and every process that it started
                for sent in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(self._process.pid, sent)
                        self._process.wait(_PATIENCE)
                        break
            self._process.wait()
        super().close()


def _open_local(path: str, buffer_bytes: int, md5: str | None) -> BinaryIO:
    """Open a local file. An index may name a device or a pipe, which would be read for ever. So
    only the pipes of the shell's <(...) are read, which no index may name.
    """
    mode = os.stat(path).st_mode
    is_of_shell = stat.S_ISFIFO(mode) and path.startswith(("/dev/fd/", "/proc/self/fd/"))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_of_shell):
        raise ShardError(
            f"shard {redact(path)} is a device or a pipe, not a file: read it from standard input, which is '-'.",
            url=redact(path),
        )
    if not stat.S_ISREG(mode):
        return open(path, "rb", buffering=buffer_bytes)
    file = io.FileIO(path)
    # Not a method of a subclass: each read of a BufferedReader over one takes 40 ns more.
    file.check_same = partial(LocalVersion(path, file.fileno()).check, file.fileno())  # type: ignore[attr-defined]
    return io.BufferedReader(file if md5 is None else Verified(file, md5), buffer_bytes)


class LocalVersion:
    """What a local file is when it is opened: its size, inode and time of modification.

    Args:
        path: the file.
        descriptor: its descriptor.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._status = os.path.abspath(path), os.fstat(descriptor)

    def check(self, descriptor: int) -> None:
        """Raise ShardError if the file was written, cut or replaced since then. That it was removed
        is no error: all its bytes can still be read.
        """
        try:
            now = os.stat(self._path)
        except OSError:
            now = os.fstat(descriptor)
        then = self._status
        for what, before, after in (
            ("bytes", then.st_size, now.st_size),
            ("inode", then.st_ino, now.st_ino),
            ("time of modification", then.st_mtime_ns, now.st_mtime_ns),
        ):
            if before != after:
                url = redact(self._path)
                raise ShardError(
                    f"shard {url} was changed while it was read ({what} {before} became {after})",
                    mend="Write shards under new names, and start this epoch again.",
                    mend_cli="run the command again when no program writes it.",
                    url=url,
                )


def _standard_input() -> int:
    """The file descriptor of standard input."""
    import multiprocessing  # only here: it takes a while

    if multiprocessing.parent_process() is not None:
        raise ShardError(
            "standard input ('-') cannot be read in a worker process: pass num_workers=0, or write the bytes to "
            "a file, and name this file.",
            url="-",
        )
    try:
        return sys.stdin.fileno()
    except (OSError, ValueError, AttributeError) as error:  # replaced, closed, or None
        raise ShardError(
            "standard input ('-') has no file descriptor in this program: notebooks and test runners replace "
            "sys.stdin. Write the bytes to a file, and name this file.",
            url="-",
        ) from error


def open_url(url: str, *, storage_options: dict[str, Any] | None = None, allow_pipe: bool = False) -> BinaryIO:
    """A buffered stream of the object at ``url``, from its beginning.

    In ``url``, ``~`` and environment variables, ``${NAME}``, are replaced. The read-ahead is small
    (2 MiB). See ``Opener.open``. With ``allow_pipe``, the command of a ``pipe:`` URL is run in a
    shell, and the stream is its output.
    """
    reading = Reading(storage_options or {}, readahead_bytes=2 << 20, connections=2)
    return Opener(reading, allow_pipe=bool(allow_pipe)).open(with_variables(url))
