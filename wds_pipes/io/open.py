"""Open a shard by URL: local files straight, everything else read ahead, from a cache if there is one."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_pipes.core.counts import NO_NETWORK, Network
from wds_pipes.errors import CacheError, ShardError, StateError
from wds_pipes.io.identity import identify_store, protocols_of, user_of
from wds_pipes.io.pipe import CommandOutput
from wds_pipes.io.remote.budget import Client, Reading, UnreadError
from wds_pipes.io.remote.file_systems import missing_package
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.remote.shard import RemoteShard
from wds_pipes.io.urls import at_home, clean, hide, local_path, redact

if TYPE_CHECKING:
    from wds_pipes.io.cache.shard_cache import ShardCache


def is_remote(url: str) -> bool:
    """Whether a shard comes from a store, and not from a disk, standard input or a command."""
    return url != "-" and not url.startswith("pipe:") and local_path(url) is None


class Opener:
    """Opens the shards of a pipe. It can be pickled and forked: what it holds open belongs to one process, and is made there when it is needed.

    Args:
        reading: how remote shards are read.
        cache: where they are kept on a disk; None: nowhere.
        verify: compare shards with their MD5, where it is known, when they were read from their beginning to their end.
        allow_pipe: run the commands of ``pipe:`` URLs.
        buffer_bytes: how much is read at once.
    """

    def __init__(
        self, reading: Reading | None = None, *, cache: ShardCache | None = None, verify: bool = True, allow_pipe: bool = False, buffer_bytes: int = 1 << 20
    ) -> None:
        self._reading = reading or Reading()
        self._cache = cache
        self._verify = verify
        self._allow_pipe = allow_pipe
        self._buffer_bytes = buffer_bytes
        self._stores: dict[tuple[str, ...], tuple[str, dict[str, str]]] = {}  # as the cache tells them apart, by protocols and user; in which environment
        self._asked: set[tuple[int, tuple[str, ...]]] = set()  # those from which something was fetched, by process
        self._clients: dict[int, Client] = {}  # by process; several threads may ask for that of theirs at once

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "_stores": {}, "_asked": set()}

    @property
    def client(self) -> Client:
        """The connections of this process."""
        client = self._clients.get(os.getpid())
        return client if client is not None else self._clients.setdefault(os.getpid(), Client(self._reading))

    @property
    def used(self) -> Network:
        """What this process has used of the network."""
        client = self._clients.get(os.getpid())
        return NO_NETWORK if client is None else Network(client.requests, client.retries, client.bytes_fetched, client.stalled)

    def stall_clock(self) -> Callable[[], float]:
        """Gives at each call for how many seconds readers of this process have waited for bytes of stores."""
        clients, process = self._clients, os.getpid()  # asking for it each time would cost as much as a tiny sample

        def stalled() -> float:
            client = clients.get(process)
            return 0.0 if client is None else client.stalled

        return stalled

    def open(self, url: str, start: int = 0, queue: ReadQueue | None = None, *, wait: bool = True) -> BinaryIO:
        """A buffered stream of what is stored at ``url``, from byte ``start`` on; ``"-"`` is standard input.

        Args:
            url: where it is.
            start: the first byte, for remote shards only; other streams stand at their beginning.
            queue: among what a remote shard is read; None: by itself.
            wait: return when the first bytes are there, so that it is known whether there are any.

        Raises:
            ShardError: it does not exist, may not be read, or its protocol is not known here.
        """
        try:
            if url == "-":
                return io.BufferedReader(io.FileIO(sys.stdin.fileno(), closefd=False), self._buffer_bytes)
            if url.startswith("pipe:"):
                return self._command(url)
            path = local_path(url)
            if path is not None:
                return open(at_home(path), "rb", buffering=self._buffer_bytes)
            return self._remote(url, start, queue, wait)
        except (ShardError, StateError, CacheError):
            raise
        except Exception as error:
            problem = self._problem(url, error)
        raise problem  # where no other error is handled, whose arguments may hold the URL

    def _problem(self, url: str, error: Exception) -> ShardError:
        """What keeps a shard from being opened, in words and without credentials."""
        shown, options = redact(url), self._reading.storage_options
        if isinstance(error, FileNotFoundError):
            message = f"shard {shown} does not exist. The working directory is {os.getcwd()}. Check its name."
        elif isinstance(error, PermissionError):
            message = f"shard {shown} may not be read: check its permissions."
        elif isinstance(error, ImportError):
            message = f"shard {shown} needs a package that is not installed ({hide(str(error), url, options)}): {missing_package(url)}."
        else:
            mend = ". Write a local path without '://'." if "Protocol not known" in str(error) else ""
            message = f"shard {shown} cannot be opened: {type(error).__name__}: {hide(str(error), url, options)}{mend}"
        problem = ShardError(message, url=shown)
        problem.__cause__ = clean(error, url, options)
        return problem

    def _command(self, url: str) -> BinaryIO:
        if not self._allow_pipe:
            raise ShardError(
                f"shard {redact(url)} would run a shell command: pass open_shards(allow_pipe=True) if you trust it, or read the command's output from '-'.",
                url=redact(url),
            )
        return io.BufferedReader(CommandOutput(url), self._buffer_bytes)

    def _remote(self, url: str, start: int, queue: ReadQueue | None, wait: bool) -> BinaryIO:
        size, md5 = getattr(url, "size", None), getattr(url, "md5", None) if self._verify else None
        if self._cache is not None:
            return self._cache.open(str(url), lambda start: self._fetch_stored(url, start, size), start=start, size=size, md5=md5, store=self._store(url))
        raw = self._fetch(url, start, queue, size, wait)
        return io.BufferedReader(raw if md5 is None or start else _Verified(raw, md5), self._buffer_bytes)

    def _store(self, url: str) -> str:
        """The store of a URL, for the cache. Until a process has fetched something, this follows the environment, as the file system that is made then does."""
        kind = _kind(url)
        found = self._stores.get(kind)
        if found is None or ((os.getpid(), kind) not in self._asked and found[1] != os.environ):
            found = self._stores[kind] = identify_store(url, self._reading.storage_options), dict(os.environ)
        return found[0]

    def _fetch_stored(self, url: str, start: int, size: int | None) -> RemoteShard:
        self._asked.add((os.getpid(), _kind(url)))
        return self._fetch(url, start, None, size, wait=False)

    def _fetch(self, url: str, start: int, queue: ReadQueue | None, size: int | None, wait: bool = True) -> RemoteShard:
        own = queue is None
        queue = queue or ReadQueue(self.client)
        shard: RemoteShard | None = None
        try:
            shard = RemoteShard(queue, str(url), start=start, size=size, whole_queue=own)
            if wait:
                shard.wait()
        except BaseException:
            if shard is not None:
                shard.close()  # else the queue would never go on to the next one
            elif own:
                queue.close()
            raise
        return shard


def _kind(url: str) -> tuple[str, ...]:
    """What of a URL says in which store it is."""
    return (*protocols_of(url), user_of(url))


class _Verified(io.RawIOBase):
    """A stream whose MD5 is compared when it ends, which vouches for that end."""

    end_is_vouched_for = True

    def __init__(self, raw: RemoteShard, md5: str) -> None:
        self._raw, self._md5, self._sum = raw, md5, hashlib.md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer)
        self._sum.update(memoryview(buffer)[:count])
        if count == 0 and self._sum.hexdigest() != self._md5:
            raise UnreadError(f"its MD5 is {self._sum.hexdigest()}, and the index says {self._md5}: some of its bytes are wrong")
        return count

    def wait(self) -> None:
        """Return when the first bytes are there."""
        self._raw.wait()

    def close(self) -> None:
        self._raw.close()
        super().close()


def open_url(url: str, *, storage_options: dict[str, Any] | None = None, buffer_bytes: int = 1 << 20) -> BinaryIO:
    """A buffered stream of the object at ``url``, from its beginning and with little read ahead; see ``Opener.open``."""
    return Opener(Reading(storage_options or {}, readahead_bytes=2 << 20, connections=2), buffer_bytes=buffer_bytes).open(url)
