"""Functions that the command line names as ``module:function``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from importlib import import_module
from typing import Any

from wds_pipes.errors import SampleError
from wds_pipes.io.secret import hide, words
from wds_pipes.stages.decode_by_ext import DecodeByExt
from wds_pipes.stages.fields import identity

BASIC = "basic"


@cache
def function_of(named: str) -> Callable[[Any], Any]:
    """Return a function. Its module is searched for in the current directory too.

    Raises:
        ValueError: it is named in another way, the module cannot be imported, or has no such
            function.
    """
    module, colon, name = named.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"a function is named as module:function, such as changes:smaller, not {named!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            found: Any = import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module raises
        raise ValueError(
            f"module {module!r} cannot be imported from the current directory, nor from what is installed: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module!r} has no function {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{named} is no function")
    return found  # type: ignore[no-any-return]


def call(named: str, value: Any) -> Any:
    """Call a function. What it prints goes to standard error: standard output is for the report.

    Raises:
        RuntimeError: it ends the process, as sys.exit does.
        Exception: whatever it raises.
    """
    try:
        with redirect_stdout(sys.stderr):
            return function_of(named)(value)
    except SystemExit as error:
        raise RuntimeError("it called sys.exit: let it raise an error, or return") from error


@dataclass(frozen=True)
class Function:
    """A function of samples, which it may get decoded; it can be sent to other processes.

    Attributes:
        named: ``module:function``.
        decode: how samples are decoded for it.
    """

    named: str
    decode: str | None

    @cached_property
    def _decoder(self) -> Any:
        return decoder_of(self.decode)

    def of(self, sample: dict[str, Any]) -> Any:
        """Return what the function returns for a sample.

        Raises:
            SampleError: it has raised, or the sample cannot be decoded.
        """
        given = dict(sample) if self._decoder is None else self._decoder(sample)
        try:
            return call(self.named, given)
        except Exception as error:
            key, url = named = identity(sample)
            what = f"raised {type(error).__name__} on {named.name()}: {hide(words(error))}".rstrip(": ")
            raise SampleError(f"{self.named} {what}", url=url, key=key) from error


def code_of(named: str) -> str:
    """Return a hash of the file of a function's module; "": it has none."""
    function_of(named)
    path = getattr(sys.modules[named.partition(":")[0]], "__file__", None)
    if not path:
        return ""
    with open(path, "rb") as file:
        return blake2b(file.read(), digest_size=16).hexdigest()


def decoder_of(specs: str | None) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return what decodes samples; ``specs`` are those of ``decode_by_ext``, with commas, or
    ``basic``. None: nothing is decoded.

    Raises:
        ValueError: a spec is unknown.
    """
    if specs is None:
        return None
    return DecodeByExt(None, *(spec for spec in specs.split(",") if spec != BASIC)).decoder()  # type: ignore[arg-type]
