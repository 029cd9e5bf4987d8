"""IterDataPipe, the base class of all pipes: torch's, or a small replacement if torch no longer has
one.

torch calls its DataPipes frozen. This package also works without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import IterableDataset

__all__ = ["IterDataPipe", "torch_kinds"]

if TYPE_CHECKING:
    from torch.utils.data.datapipes import iter as torch_pipes
    from torch.utils.data.datapipes.datapipe import IterDataPipe
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
    try:
        from torch.utils.data.datapipes import iter as torch_pipes
        from torch.utils.data.datapipes.datapipe import IterDataPipe
    except ImportError:
        torch_pipes = None

        class IterDataPipe(IterableDataset[T_co]):
            """An IterableDataset whose methods make pipes that read from it."""

            functions: ClassVar[dict[str, Callable[..., Any]]] = {}  # of other packages

            def reset(self) -> None:
                """Do nothing; torch calls this before each iteration."""

            def __getattr__(self, name: str) -> Any:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name)


def torch_kinds(*names: str) -> tuple[type[IterDataPipe[Any]], ...]:
    """Return classes of torch's pipes by their names; none if torch has no pipes."""
    return () if torch_pipes is None else tuple(getattr(torch_pipes, name) for name in names)
