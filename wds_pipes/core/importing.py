"""Imports that wait for another package, and imports of optional packages.

A module of this package can be imported as soon as another package is. So ``import wds_pipes`` does
not have to import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


def after_import(name: str, then: str) -> None:
    """Import module ``then`` when ``name`` has been imported; immediately, if it is already
    imported.
    """
    if sys.modules.get(name) is not None:  # None in sys.modules blocks the import
        import_module(then)
    elif not any(
        isinstance(finder, _Finder) and (finder.name, finder.then) == (name, then) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finds one module, through the other finders, and is removed when the module has been
    imported.
    """

    def __init__(self, name: str, then: str) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path:
            spec = (
                None
                if isinstance(finder, _Finder) or not hasattr(finder, "find_spec")
                else finder.find_spec(name, path, target)
            )
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """The loader that was found; it also imports a second module after its own."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        # a caller of find_spec() that does not import the module may read its data or its source
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # inspect.getsource() and others use it to find the source
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        import_module(self._finder.then)


def library(name: str, package: str, what: str, *, extra: str | None = None) -> Any:
    """Import the module ``name``. If it is missing, the error says what to install: the package, or
    the extra of this package that has it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        install = package if extra is None else f"'wds_pipes[{extra}]'"
        raise ModuleNotFoundError(f"{what} needs the {package} package: pip install {install}") from error
