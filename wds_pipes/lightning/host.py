"""Chooses one of the two packages of Lightning."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["HOSTS", "pl"]

HOSTS = ("lightning.pytorch", "pytorch_lightning")


def _host() -> Any:
    """Return the package whose Trainer will be used."""
    for name in HOSTS:
        if name in sys.modules:
            return sys.modules[name]
    for name in HOSTS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise ModuleNotFoundError("wds_pipes.lightning needs Lightning: pip install 'wds_pipes[lightning]'")


if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = _host()
