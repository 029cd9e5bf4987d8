"""The errors and warnings of this package.

WdsError
  ShardError        a shard cannot be opened, read or parsed; an OSError (.url .offset)
    DamagedShardError   it is cut or damaged; a tarfile.ReadError
  SampleError       one sample is bad; a ValueError                     (.url .key .offset)
    DecodeError     one field of it cannot be decoded                   (.field)
    MissingFieldError   it lacks a field; a KeyError
  StateError        a checkpoint does not fit this pipeline; a RuntimeError
  WorkerError       a worker process died or returned nothing in time
  CacheError        the local cache cannot be used                      (.path)

ShardWarning        a shard is odd but was read to its end

Every message says what happened, where, and what to do. The facts are also attributes (None if
unknown). All errors can be pickled, so a worker process can send them to its parent.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

_MOST_TEXT = 4000  # characters of a message: a longer one is shown without its middle


class WdsError(Exception):
    """The base of all errors of this package."""

    def __init__(self, message: str, **facts: Any) -> None:
        if len(message) > _MOST_TEXT:  # a name in a shard, or what a library says, can be that long
            message = f"{message[: _MOST_TEXT // 2]} ... {message[-_MOST_TEXT // 2 :]}"
        super().__init__(message)
        self._facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self._facts), {"__notes__": list(getattr(self, "__notes__", []))}


def _rebuild(kind: type[WdsError], message: str, facts: dict[str, Any]) -> WdsError:
    return kind(message, **facts)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on; each once, since some are ``from`` themselves."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is one for one in seen):
        yield each
        seen.append(each)
        each = each.__cause__


class ShardError(WdsError, OSError):
    """A shard cannot be opened, read or parsed. Also an OSError.

    Attributes:
        url: the shard, without credentials.
        offset: the byte in the (decompressed) tar stream where it happened.
        missing: True if it is known not to exist.
        of_data: False if it is not the fault of this shard, such as an unknown protocol, expired
            credentials or a store that cannot be reached: ``on_error="skip"`` does not skip it.
    """

    missing = False
    of_data = True

    def __init__(self, message: str, *, url: str | None = None, offset: int | None = None) -> None:
        super().__init__(message, url=url, offset=offset)


class DamagedShardError(ShardError, tarfile.ReadError):
    """A shard is cut or damaged. Also a ``tarfile.ReadError``."""


class SampleError(WdsError, ValueError):
    """One sample is bad. Also a ValueError.

    Attributes:
        url: its shard, without credentials.
        key: its key.
        offset: the byte in the (decompressed) tar stream where the bad member starts.
    """

    def __init__(
        self, message: str, *, url: str | None = None, key: str | None = None, offset: int | None = None, **more: Any
    ) -> None:
        super().__init__(message, url=url, key=key, offset=offset, **more)


class DecodeError(SampleError):
    """One field of a sample cannot be decoded.

    Attributes:
        field: the field's name, such as ``"jpg"``.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        key: str | None = None,
        field: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, url=url, key=key, offset=offset, field=field)


class MissingFieldError(SampleError, KeyError):
    """A sample lacks a field. Also a KeyError."""

    __str__ = Exception.__str__  # that of KeyError is a repr


class StateError(WdsError, RuntimeError):
    """A checkpoint does not fit this pipeline, a pipeline's state cannot be known, or an iterator
    was replaced. Also a RuntimeError.
    """


class WorkerError(WdsError):
    """A worker process died, returned nothing for ``timeout_seconds``, or cannot send a batch.

    A worker may die because memory is short. The state of the loader remains valid.
    """


class CacheError(WdsError):
    """The local cache of remote shards cannot be used.

    Its directory cannot be written to, or contains files that do not belong to a cache.

    Attributes:
        path: the file or directory.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message, path=path)


class ShardWarning(UserWarning):
    """A shard is odd (no end-of-archive mark, bytes after its end) but was read to its end, or a
    writer was not closed.
    """
