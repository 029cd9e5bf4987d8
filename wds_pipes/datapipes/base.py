"""IterDataPipe, the base class of all pipes: torch's, or a small replacement if torch no longer has
one.

torch calls its DataPipes frozen. This package needs only their registry of methods, so it also
works without them.
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
            """An IterableDataset with registered methods; each makes a pipe that reads from this
            one.
            """

            functions: ClassVar[dict[str, Callable[..., Any]]] = {}

            @classmethod
            def register_function(cls, name: str, function: Callable[..., Any]) -> None:
                """Make ``function(pipe, ...)`` a method of all pipes."""
                cls.functions[name] = function

            def reset(self) -> None:
                """Do nothing; torch calls this before each iteration."""

            def __getattr__(self, name: str) -> Any:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name)

            def __dir__(self) -> list[str]:
                return [*super().__dir__(), *self.functions]


def torch_kinds(*names: str) -> tuple[type[IterDataPipe[Any]], ...]:
    """Return classes of torch's pipes by their names; none if torch has no pipes."""
    return () if torch_pipes is None else tuple(getattr(torch_pipes, name) for name in names)
