"""Shows samples and pipelines: as short text, and as HTML in notebooks."""

# ``samples``: samples and batches; ``text``: one value; ``pictures``: small pictures, also for the
# pages of ``wds_pipes.browse``; ``graph``: pipelines; ``states``: states in words.

from wds_pipes.display.samples import View, show

__all__ = ["View", "show"]
