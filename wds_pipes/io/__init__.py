"""Opening shards by URL. Nothing here needs torch."""

from wds_pipes.io.compression import decompress, detect
from wds_pipes.io.open import open_url
from wds_pipes.io.urls import expand, redact

__all__ = ["decompress", "detect", "expand", "open_url", "redact"]
