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

``sentence`` makes the message of its parts. Where the command line has another remedy than Python,
the error has both, ``mend`` and ``mend_cli``, and so have errors of Python and warnings that
``mended`` makes.
"""

from __future__ import annotations

import errno
import shlex
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # what the process or the machine has too few of

E = TypeVar("E", bound=BaseException)

_MOST_TEXT = 4000  # characters of a message: a longer one is shown without its middle


def sentence(what: str, mend: str = "", where: str = "") -> str:
    """Return the message of an error.

    Args:
        what: what happened. Without ``where``, it also says where.
        mend: what to do; a sentence of its own if it begins with a capital.
        where: the subject of ``what``, such as ``"shard a.tar"``.
    """
    what = f"{where} {what}" if where else what
    if not mend:
        return what
    return f"{what.rstrip('.')}{'. ' if mend[0].isupper() else ': '}{mend}"


def mended(kind: Callable[[str], E], what: str, *, mend: str, mend_cli: str | None = None) -> E:
    """Return an error of Python, or a warning, that carries its remedy as ``WdsError`` does.

    Args:
        kind: its class.
        what: what happened, and where.
        mend: what to do, in words of Python.
        mend_cli: the same in words of the command line; None: in the same words.
    """
    error = kind(sentence(what, mend))
    vars(error).update(what=what, where="", mend=mend, mend_cli=mend_cli)
    return error


def for_commands(error: BaseException) -> str:
    """Return the message of an error or a warning, with its remedy in words of the command line."""
    mend = getattr(error, "mend_cli", None)
    return str(error) if mend is None else sentence(error.what, mend, error.where)  # type: ignore[attr-defined]


def command_over(command: str, shards: Iterable[str], *arguments: str) -> str:
    """Return a command over shards as a shell takes it: none of them looks like an option."""
    return shlex.join(
        ["wds-pipes", command, *(f"./{url}" if url.startswith("-") else url for url in shards), *arguments]
    )


def how_to_repair(error: BaseException) -> str:
    """How the command line keeps the samples before damage and after it; empty for other errors."""
    url = getattr(error, "url", None)
    if not isinstance(error, DamagedShardError) or not getattr(error, "offset", None) or url in (None, "-"):
        return ""
    return f" To keep its whole samples: {command_over('repair', [url], 'NEW')}"


def parts(
    error: BaseException, mend: str = "", mend_cli: str | None = None, *, words: Callable[[BaseException], str] = str
) -> tuple[str, dict[str, Any]]:
    """What happened, for an error that is raised from this one, and its remedies: those of this one
    and what else to do.

    Args:
        error: the cause.
        mend: what else to do, in words of Python.
        mend_cli: the same in words of the command line; None: in the same words.
        words: what returns the message of an error without remedies.
    """
    mend_cli = mend if mend_cli is None else mend_cli
    if not hasattr(error, "mend_cli"):
        return words(error), {"mend": mend, "mend_cli": mend_cli}
    own = vars(error)
    own_cli = own["mend"] if own["mend_cli"] is None else own["mend_cli"]
    return sentence(own["what"], where=own["where"]), {
        "mend": sentence(own["mend"], mend) if own["mend"] else mend,
        "mend_cli": sentence(own_cli, mend_cli) if own_cli else mend_cli,
    }


class WdsError(Exception):
    """The base of all errors of this package.

    Attributes:
        what: what happened; with an empty ``where``, also where. Of most errors, it is the whole
            message.
        where: the subject of ``what``.
        mend: what to do, if it is no part of ``what``.
        mend_cli: the same in words of the command line; None: in the same words.
    """

    def __init__(
        self, what: str, *, where: str = "", mend: str = "", mend_cli: str | None = None, **facts: Any
    ) -> None:
        if len(what) > _MOST_TEXT:  # a name in a shard, or what a library says, can be that long
            what = f"{what[: _MOST_TEXT // 2]} ... {what[-_MOST_TEXT // 2 :]}"
        super().__init__(sentence(what, mend, where))
        self.what, self.where, self.mend, self.mend_cli = what, where, mend, mend_cli
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), vars(self)  # all facts, notes, and what was set later


def _rebuild(kind: type[WdsError], args: tuple[Any, ...]) -> WdsError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on; each once, since some are ``from`` themselves."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is one for one in seen):
        yield each
        seen.append(each)
        each = each.__cause__


def is_of_data(error: BaseException) -> bool:
    """Whether an error may be the fault of one shard or sample. Missing permissions and too many
    open files are not: the same would happen to the others.
    """
    is_short = isinstance(error, OSError) and error.errno in _SHORT
    return not (is_short or isinstance(error, PermissionError)) and bool(getattr(error, "of_data", True))


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

    def __init__(self, what: str, *, url: str | None = None, offset: int | None = None, **words: Any) -> None:
        super().__init__(what, url=url, offset=offset, **words)


class DamagedShardError(ShardError, tarfile.ReadError):
    """A shard is cut or damaged. Also a ``tarfile.ReadError``.

    Attributes:
        joined: whether it may be several archives, one after another.
    """

    joined = False


class SampleError(WdsError, ValueError):
    """One sample is bad. Also a ValueError.

    Attributes:
        url: its shard, without credentials.
        key: its key.
        offset: the byte in the (decompressed) tar stream where the bad member starts.
    """

    def __init__(
        self, what: str, *, url: str | None = None, key: str | None = None, offset: int | None = None, **more: Any
    ) -> None:
        super().__init__(what, url=url, key=key, offset=offset, **more)


class DecodeError(SampleError):
    """One field of a sample cannot be decoded.

    Attributes:
        field: the field's name, such as ``"jpg"``.
    """

    def __init__(
        self,
        what: str,
        *,
        url: str | None = None,
        key: str | None = None,
        field: str | None = None,
        offset: int | None = None,
        **words: Any,
    ) -> None:
        super().__init__(what, url=url, key=key, offset=offset, field=field, **words)


class MissingFieldError(SampleError, KeyError):
    """A sample lacks a field. Also a KeyError."""

    __str__ = Exception.__str__  # that of KeyError is a repr


class StateError(WdsError, RuntimeError):
    """A checkpoint does not fit this pipeline, a pipeline's state cannot be known, or an iterator
    was replaced. Also a RuntimeError.
    """


class WorkerError(WdsError):
    """A worker process died, returned nothing for ``timeout_seconds``, or cannot send a batch.

    A worker may die because memory is short. To continue, load the state that the loader has:
    ``loader.load_state_dict(loader.state_dict())``. ``iter(loader)`` alone begins the next epoch.
    """


class CacheError(WdsError):
    """The local cache of remote shards cannot be used.

    Its directory cannot be written to, or contains files that do not belong to a cache.

    Attributes:
        path: the file or directory.
    """

    def __init__(self, what: str, *, path: str | None = None, **words: Any) -> None:
        super().__init__(what, path=path, **words)


class ShardWarning(UserWarning):
    """A shard is odd (no end-of-archive mark, bytes after its end) but was read to its end, or a
    writer was not closed.
    """
