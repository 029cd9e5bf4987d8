"""Tests in the same process must not find what a trainer has left."""

import pytest
from torch.utils.data import DataLoader

NAMES = ("__init__", "__setattr__", "__delattr__")


def with_subclasses(kind):
    return [kind, *(other for direct in kind.__subclasses__() for other in with_subclasses(direct))]


@pytest.fixture(autouse=True)
def _loaders_as_they_were():
    """Lightning wraps methods of DataLoader, and leaves the wrappers there after an error."""
    kept = {
        kind: {name: vars(kind)[name] for name in NAMES if name in vars(kind)} for kind in with_subclasses(DataLoader)
    }
    yield
    for kind, methods in kept.items():
        for name in NAMES:
            if name in methods:
                setattr(kind, name, methods[name])
            elif name in vars(kind):
                delattr(kind, name)
