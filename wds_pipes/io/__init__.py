"""Opening shards by URL. Nothing here needs torch."""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from wds_pipes.io.compression import decompress, detect
from wds_pipes.io.expand import expand
from wds_pipes.io.urls import redact

if _TYPE_CHECKING:
    from wds_pipes.io.open import open_url

__all__ = ["decompress", "detect", "expand", "open_url", "redact"]

if not _TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        if name == "open_url":  # imports asyncio, which reading and writing tars does not need
            from wds_pipes.io.open import open_url

            return open_url
        raise AttributeError(f"module 'wds_pipes.io' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
