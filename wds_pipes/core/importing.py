"""Imports of optional packages."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_imported: dict[str, Any] = {}


def library(name: str, package: str, what: str, *, extra: str | None = None) -> Any:
    """Import the module ``name``. If it is missing, the error says what to install: the package, or
    the extra of this package that has it.
    """
    module = _imported.get(name)
    if module is not None and sys.modules.get(name) is module:  # a tenth of the time of import_module
        return module
    try:
        module = _imported[name] = import_module(name)
        return module
    except ModuleNotFoundError as error:
        install = package if extra is None else f"'wds_pipes[{extra}]'"
        raise ModuleNotFoundError(f"{what} needs the {package} package: pip install {install}") from error
