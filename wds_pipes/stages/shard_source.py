"""The base of the first stages of pipelines that read shards: what identifies their data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.moved import BY_MD5, BY_SIZE, NAMES, Data
from wds_pipes.core.options import check_storage_options
from wds_pipes.core.running import Out
from wds_pipes.core.stage import Source
from wds_pipes.io.secret import origins_of
from wds_pipes.io.urls import identify, redact, relative_names
from wds_pipes.tar.index import ShardFacts

# a shard range: the number of the shard, its first sample, and the sample after the last; -1: to
# the end of the shard
ShardRange = tuple[int, int, int]


class ShardSource(Source[Out]):
    """The first stage of a chain, which reads a list of shards.

    Attributes:
        urls: the shards, in the order of the list.
        facts: what an index says of each; None: there is no index.
        samples: how many samples each shard has; None: unknown.
        storage_options: how to reach the storage.
        moved: the shards are those of a state that will be loaded, whatever their names.
    """

    divides = divides_shards = True
    shared = ("urls", "facts", "samples", "storage_options", "_numbers")
    urls: list[str]
    facts: list[ShardFacts] | None = None
    origins: list[str] | None = None  # if an index lists the shards: see wds_pipes.io.secret
    samples: list[int] | None = None

    def __init__(self, seed: int, storage_options: dict[str, Any] | None, moved: bool) -> None:
        super().__init__(seed)
        self.storage_options, self.moved = check_storage_options(storage_options), bool(moved)
        # The numbers of the shards by their URLs, added when one is first requested. As a whole: a
        # thread must not see a part of them.
        self._numbers: list[dict[str, str]] = []

    def which_data(self) -> Data:
        return self._data

    @cached_property
    def _data(self) -> Data:
        urls = self.urls
        place = shortened_url(redact(urls[0]))
        return Data(fingerprint(urls), data_id(urls, self.facts), place, self.moved, len(urls))

    def number_of(self, url: str) -> str | None:
        if not self._numbers:
            self._numbers.append(numbers_of(self.urls))
        return self._numbers[0].get(url)

    def size_shown(self) -> str:
        """Return how much there is to read, as the text of a pipeline shows it."""
        raise NotImplementedError

    def shown_options(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        patterns = options["urls"] if isinstance(options["urls"], (str, os.PathLike, list, tuple)) else self.urls
        return {**options, "urls": patterns}, f"({self.size_shown()})"

    @cached_property
    def samples_fingerprint(self) -> str | None:
        """16 hexadecimal digits that differ if the numbers of samples differ; None if these are not
        known.
        """
        return (
            None
            if self.samples is None
            else blake2b(",".join(map(str, self.samples)).encode(), digest_size=8).hexdigest()
        )


def fingerprint(urls: Iterable[str]) -> str:
    """Return 16 hexadecimal digits that differ for different lists of URLs. Credentials and
    signatures in the URLs do not matter.
    """
    digest = blake2b(digest_size=8)
    for url in urls:
        digest.update(identify(url).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def data_id(urls: Sequence[str], facts: Sequence[ShardFacts] | None = None) -> str:
    """Return an id of a list of shards that stays the same if they are moved: see
    ``wds_pipes.core.moved.NAMES``.
    """
    names = _digest(relative_names(urls), NAMES)
    if facts is None:
        return names
    if all(shard.md5 is not None for shard in facts):
        return names + BY_MD5 + _digest([str(shard.md5) for shard in facts], 7)
    if all(shard.size is not None for shard in facts):
        return names + BY_SIZE + _digest([f"{shard.size} {shard.samples}" for shard in facts], 7)
    return names


def numbers_of(urls: Sequence[str]) -> dict[str, str]:
    """Return the number of each shard by its URL as samples show it. If a URL comes several times,
    the first number counts.
    """
    return {redact(url): str(number) for number, url in reversed(list(enumerate(urls)))}


def _digest(texts: Iterable[str], digits: int) -> str:
    return blake2b("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:digits]


def shortened_url(url: str) -> str:
    """Return a URL in at most 200 characters, all of which can be written as JSON and printed."""
    url = url.encode("utf-8", "backslashreplace").decode()
    return url if len(url) <= 200 else f"...{url[-197:]}"


def allowed_origins(root: Source[Any]) -> list[str] | None:
    """The web servers that may get storage options for the shards of a chain with this first stage;
    None: all. See ``wds_pipes.io.secret``.
    """
    roots = [root]
    while any(one.branches for one in roots):
        roots = [each for one in roots for each in ([Chain(branch).root for branch in one.branches.values()] or [one])]
    known = [getattr(one, "origins", None) for one in roots]
    if all(origins is None for origins in known):
        return None
    named = (
        origins_of(getattr(one, "urls", ())) if origins is None else origins
        for origins, one in zip(known, roots, strict=True)
    )
    return sorted({origin for origins in named for origin in origins or ()})
