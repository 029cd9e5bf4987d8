"""Functions that the command line names as ``module:function``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from hashlib import blake2b
from importlib import import_module
from typing import Any

from wds_pipes.core.suggest import nearest
from wds_pipes.stages.decode_by_ext import DecodeByExt

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
    if module.endswith(".py"):
        raise ValueError(f"a module is named without its ending: {module.removesuffix('.py')}:{name}, not {named}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            found: Any = import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module raises
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {module!r}: it is a file {module.replace('.', '/')}.py in the current directory, "
                "or installed"
            ) from error
        raise ValueError(f"module {module!r} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = nearest(part, [known for known in vars(found) if known[:1] != "_"])
            raise ValueError(f"{module!r} has no function {name!r}" + (f". Did you mean {near!r}?" if near else ""))
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
