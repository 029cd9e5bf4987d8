"""Chooses one of the two packages of Lightning."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["HOSTS", "pl"]

HOSTS = ("lightning.pytorch", "pytorch_lightning")


def _host() -> Any:
    """Return the package whose Trainer will be used."""
    for name in sorted(HOSTS, key=lambda name: name not in sys.modules):
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
