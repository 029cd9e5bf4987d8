"""Shorten tracebacks: show the lines of the caller, without the frames in between.

Rules:
1. An error is shortened where it leaves the package: in the iterators of pipes and loaders, where
   these are built, and where a state is loaded. Its message, notes, causes and attributes stay as
   they are.
2. Frames of this package and of the libraries that it calls are left out up to the first frame of
   other code, such as a function of the caller. After that frame, only the frames of this package
   are left out.
3. If there is no other code, an error of this package needs no frames, since its message says what
   happened and where. Other errors keep the innermost frames.
4. With WDS_PIPES_FULL_TRACEBACK=1 in the environment, which workers inherit, nothing is left out.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from wds_pipes.errors import WdsError

FULL = "WDS_PIPES_FULL_TRACEBACK"

Failed = TypeVar("Failed", bound=BaseException)
Options = ParamSpec("Options")
Result = TypeVar("Result")

_PYTHONS = os.path.dirname(os.__file__) + os.sep

# The other packages that this package calls by itself: any further code that it calls belongs to
# the caller.
_LIBRARIES = frozenset(
    (
        *(
            "torch",
            "torchdata",
            "numpy",
            "PIL",
            "braceexpand",
            "fsspec",
            "s3fs",
            "aiobotocore",
            "botocore",
            "aioitertools",
            "gcsfs",
            "google",
            "aiohttp",
        ),
        *("requests", "urllib3", "msgpack", "cbor2", "safetensors", "yaml"),
    )
)


def shorten(error: Failed) -> Failed:
    """Return ``error`` itself, to be raised again. Its traceback, and the tracebacks of the errors
    that led to it, lose the frames that their reader does not need.
    """
    if not _full():
        for each in causes(error, contexts=True):
            least = 1 if each is not error else 0 if isinstance(error, WdsError) else 2
            each.__traceback__ = _linked(
                _of_callers(each.__traceback__) or _frames(each.__traceback__)[::-1][:least][::-1]
            )
    return error


def shortened(function: Callable[Options, Result]) -> Callable[Options, Result]:
    """Return a wrapper of ``function`` that shortens the errors it raises."""

    @functools.wraps(function)
    def short(*args: Options.args, **options: Options.kwargs) -> Result:
        try:
            return function(*args, **options)
        except Exception as error:
            shorten(error)
            raise error  # all frames: set WDS_PIPES_FULL_TRACEBACK=1

    return short


def in_words(error: BaseException) -> str:
    """Return the lines of the caller's code in the tracebacks of ``error`` and of the errors that
    led to it, to be sent to another process. The result is empty if no line helps.
    """
    if _full():
        return "".join(traceback.format_exception(error))
    parts = []
    for each in causes(error, contexts=True):
        if found := _of_callers(each.__traceback__):
            said = [] if each is error else traceback.format_exception_only(each)
            parts.append("".join([*traceback.format_tb(_linked(found)), *said]))
    if not parts and not isinstance(error, WdsError):
        parts = traceback.format_tb(_linked(_frames(error.__traceback__)[-2:]))
    return "".join(parts)


def _full() -> bool:
    return os.environ.get(FULL, "0") not in ("", "0")


def causes(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on, each once, since some are raised ``from`` themselves.
    With ``contexts``, yield all errors that its traceback shows.
    """
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is one for one in seen):
        yield each
        seen.append(each)
        each = each.__cause__ or (each.__context__ if contexts and not each.__suppress_context__ else None)


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    """Return the entries of a traceback."""
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _of_callers(trace: TracebackType | None) -> list[TracebackType]:
    """Return the entries of a traceback that rule 2 keeps."""
    found: list[TracebackType] = []
    for each in _frames(trace):
        package = str(each.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package != "wds_pipes" and (
            found or not (package in _LIBRARIES or _is_pythons(each.tb_frame.f_code.co_filename))
        ):
            found.append(each)
    return found


def _is_pythons(path: str) -> bool:
    """Return whether a file belongs to Python's standard library."""
    return path.startswith(("<frozen ", _PYTHONS)) and "-packages" not in path


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    """Return entries as a new traceback, since other errors may share the old one."""
    made: TracebackType | None = None
    for each in reversed(entries):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made
