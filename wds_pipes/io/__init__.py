"""Opening shards by URL. Nothing here needs torch."""

# The modules:
# - ``urls``: which objects URLs identify, and what messages leave out; ``expand`` and
#   ``listing``: URLs that stand for several shards; ``packed``: many URLs in little memory;
#   ``identity``: which store a URL leads to; ``once``: one rank requests lists for all.
# - ``open``: opens a shard. ``remote``: reads from stores ahead; ``cache``: keeps remote shards on
#   a disk; ``compression``: compressed shards; ``versions``: whether a shard has changed;
#   ``verified``: whether it has the MD5 of its index.
# - ``ranges``: ranges of bytes of many files.
# - ``outputs``: files that appear when they are complete; ``locks``: files that one
#   process uses at a time.
# - ``threads``: blocking calls that may never return.

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
