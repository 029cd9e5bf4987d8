"""A mend of the ``Loader`` of torchdata.nodes. Nothing here imports torchdata."""

from __future__ import annotations

import sys
from typing import Any


def mend_loader() -> None:
    """Make the Loader of torchdata, if it is imported, forget at each reset the state it keeps.

    If a loaded state has no items left, the Loader (0.11, the last release) keeps the state that it
    had read before it noticed this, and returns it throughout the next epoch, so a second resume
    would repeat this epoch. No node can prevent this: the Loader does not ask the nodes again.
    """
    module = sys.modules.get("torchdata.nodes.loader")
    if module is None or module.LoaderIterator.reset.__module__ == __name__:
        return
    original = module.LoaderIterator.reset

    def reset(self: Any, initial_state: Any = None) -> None:
        self._cached_state_dict = None
        original(self, initial_state)

    module.LoaderIterator.reset = reset
