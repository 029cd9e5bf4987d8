"""Shows samples and pipelines: as short text, and as HTML in notebooks."""

from wds_pipes.display.samples import View, show

__all__ = ["View", "show"]
