"""How messages name a sample."""

from __future__ import annotations

from typing import Any, NamedTuple

from wds_pipes.io.urls import redact


class Identity(NamedTuple):
    """The key of a sample and the URL of its shard, as messages show them; None where unknown."""

    key: str | None
    url: str | None

    def name(self, joint: str = "of") -> str:
        """Return ``sample 'k' of shard a.tar``, without what is unknown."""
        name = "a sample" if self.key is None else f"sample {self.key!r}"
        return name if self.url is None else f"{name} {joint} shard {self.url}"


def identity(sample: Any) -> Identity:
    """Return the identity of a sample, which may be no dict."""
    if not isinstance(sample, dict):
        return Identity(None, None)
    key, url = sample.get("__key__"), sample.get("__url__")
    return Identity(key, redact(url) if isinstance(url, str) else None)
