"""IterDataPipe, from which all pipes come: that of torch, or a small one of our own where torch has none any more.

torch calls its DataPipes frozen. What this package needs of them is a registry of methods, so it can go on without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import IterableDataset

__all__ = ["IterDataPipe", "Wrapper", "torch_kinds"]

if TYPE_CHECKING:
    from torch.utils.data import IterDataPipe
    from torch.utils.data.datapipes import iter as torch_pipes
    from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper as Wrapper
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
    try:
        from torch.utils.data import IterDataPipe
        from torch.utils.data.datapipes import iter as torch_pipes
        from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper as Wrapper
    except ImportError:
        torch_pipes, Wrapper = None, ()

        class IterDataPipe(IterableDataset[T_co]):
            """An IterableDataset with methods that others add, each of which makes a pipe that reads from this one."""

            functions: ClassVar[dict[str, Callable[..., Any]]] = {}

            @classmethod
            def register_function(cls, name: str, function: Callable[..., Any]) -> None:
                """Make ``function(pipe, ...)`` a method of all pipes."""
                cls.functions[name] = function

            def reset(self) -> None:
                """What torch calls before each pass."""

            def __getattr__(self, name: str) -> Any:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name)

            def __dir__(self) -> list[str]:
                return [*super().__dir__(), *self.functions]


def torch_kinds(*names: str) -> tuple[type[IterDataPipe[Any]], ...]:
    """Classes of torch's pipes by their names; none where torch has no pipes."""
    return () if torch_pipes is None else tuple(getattr(torch_pipes, name) for name in names)
