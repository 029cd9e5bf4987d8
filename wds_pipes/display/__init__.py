"""Shows samples and pipelines: as short text, and as HTML in notebooks."""

# ``samples``: samples and batches; ``text``: one value; ``pictures``: small pictures, also for the
# pages of ``wds_pipes.browse``; ``graph``: pipelines; ``states``: states in words.

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wds_pipes.display.samples import View, show

__all__ = ["View", "show"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from wds_pipes.display import samples  # imports numpy and the chains, which text does not need

    return getattr(samples, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
