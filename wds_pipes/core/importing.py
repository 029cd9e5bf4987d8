"""Imports of optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def library(name: str, package: str, what: str, *, extra: str | None = None) -> Any:
    """Import the module ``name``. If it is missing, the error says what to install: the package, or
    the extra of this package that has it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        install = package if extra is None else f"'wds_pipes[{extra}]'"
        raise ModuleNotFoundError(f"{what} needs the {package} package: pip install {install}") from error
