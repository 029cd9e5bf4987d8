"""The base of the first stages of pipelines that read shards: what identifies their data."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self

from wds_pipes.core.chain import Chain
from wds_pipes.core.lane import Lane
from wds_pipes.core.moved import BY_MD5, BY_SIZE, NAMES, Data
from wds_pipes.core.options import check_storage_options
from wds_pipes.core.running import Out
from wds_pipes.core.stage import Source
from wds_pipes.core.state import Grown
from wds_pipes.core.tolerant import OnError, check_on_error
from wds_pipes.io.packed import Packed
from wds_pipes.io.secret import origins_of
from wds_pipes.io.urls import identify, redact, relative_names
from wds_pipes.tar.index import Facts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]  # of ranges or samples, shape (samples,)


class ShardSource(Source[Out]):
    """The first stage of a chain, which reads a list of shards.

    Attributes:
        urls: the shards, in the order of the list.
        facts: what an index says of each; None: there is no index.
        samples: how many samples each shard has; None: unknown.
        storage_options: how to reach the storage.
        moved: the shards are those of a state that will be loaded, whatever their names.
        on_error: what the steps do with bad data, unless they say it.
    """

    divides = divides_shards = True
    shared: ClassVar[tuple[str, ...]] = ("urls", "facts", "samples", "storage_options")
    urls: Packed
    facts: Facts | None = None
    origins: list[str] | None = None  # if an index lists the shards: see wds_pipes.io.secret
    samples: Sequence[int] | None = None

    def __init__(self, seed: int, storage_options: dict[str, Any] | None, moved: bool, on_error: OnError) -> None:
        super().__init__(seed)
        self.on_error = check_on_error(on_error)
        self.storage_options, self.moved = check_storage_options(storage_options), bool(moved)

    def which_data(self) -> Data:
        return self._data

    @cached_property
    def _data(self) -> Data:
        urls = self.urls
        place = shortened_url(redact(urls[0]))
        return Data(fingerprint(urls), data_id(urls, self.facts), place, self.moved, len(urls))

    def number_of(self, url: str) -> str | None:
        number = self.urls.shown.number_of(url)
        return None if number is None else str(number)

    def with_growth(self, grown: Grown) -> Self:
        """Return this list, of which some epochs have only the first shards: see ``Source``."""
        again = copy.copy(self)
        again.grown = grown
        return again

    def first(self, count: int) -> Self:
        """Return the list of the first shards of this one, to read a state of them."""
        again = copy.copy(self)
        again.urls = Packed(islice(self.urls, count))
        if self.facts is not None:
            again.facts = Facts()
            again.facts.extend(islice(self.facts, count), [""] * count)
        again.samples = None if self.samples is None else self.samples[:count]
        for name in ("_data", "samples_fingerprint"):
            vars(again).pop(name, None)
        return again

    # The order of samples without reading. An epoch is divided by the ranges of ``epoch_shards``,
    # which need not be those of shards.

    def in_shards(self, numbers: Numbers, insides: Numbers, lane: Lane) -> tuple[Numbers, Numbers]:
        """Return which samples those of ranges are: the shard of each, and its number there.

        Args:
            numbers: the numbers of the ranges.
            insides: the number of each sample in its range.
            lane: a lane of the epoch.
        """
        return numbers, insides

    def in_ranges(self, shard: int, number: int, lane: Lane) -> list[tuple[int, int]]:
        """Return as which samples of ranges a sample of a shard comes: the inverse of
        ``in_shards``.
        """
        return [(shard, number)]

    def of_slice(self, places: Numbers, lane: Lane) -> tuple[Numbers, Numbers]:
        """Return as ``in_shards`` which samples are at places of the global order of an epoch."""
        raise NotImplementedError

    def places_in(self, shard: int, number: int, lane: Lane) -> list[int]:
        """Return at which places of the global order of an epoch a sample is: the inverse of
        ``of_slice``.
        """
        raise NotImplementedError

    def key_of(self, shard: int, number: int) -> str:
        """Return the key of a sample of a shard, from its tar.

        Raises:
            ValueError: there is no index.
            ShardError: the shard has no index of offsets.
        """
        raise NotImplementedError

    def numbers_of(self, key: str) -> list[int]:
        """Return the numbers among all samples of those with a key, by the indexes of keys; raise
        as ``key_of`` does.
        """
        raise NotImplementedError

    def size_shown(self) -> str:
        """Return how much there is to read, as the text of a pipeline shows it."""
        raise NotImplementedError

    def shown_options(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        patterns = options["urls"] if isinstance(options["urls"], (str, os.PathLike, list, tuple)) else list(self.urls)
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
    for texts in _packed(urls).changed(identify):
        digest.update(texts + b"\0")
    return digest.hexdigest()


def data_id(urls: Sequence[str], facts: Facts | None = None) -> str:
    """Return an id of a list of shards that stays the same if they are moved: see
    ``wds_pipes.core.moved.NAMES``.
    """
    urls = _packed(urls)
    # the directory that plain URLs have in common is the ``folder`` that ``changed`` changes
    names = urls.changed(lambda url: relative_names([url])[0]) if urls.plain else relative_names(urls)
    found = _digest(names, NAMES)
    if facts is not None and (md5s := facts.md5s()) is not None:
        return found + BY_MD5 + _digest(md5s, 7)
    if facts is not None and (sizes := facts.sizes()) is not None:
        return found + BY_SIZE + _digest(sizes, 7)
    return found


def _packed(urls: Iterable[str]) -> Packed:
    return urls if isinstance(urls, Packed) else Packed(urls)


def _digest(texts: Iterable[str | bytes], digits: int) -> str:
    """Return hexadecimal digits of texts with a NUL between them."""
    digest, between = blake2b(), b""
    for text in texts:
        digest.update(between + (text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text))
        between = b"\0"
    return digest.hexdigest()[:digits]


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
