"""The base of the first stages of pipelines that read shards: what identifies their data. And
ShardRef: a shard to read, and what is known of it before it is opened; the URL of members.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self

from wds_pipes.core.chain import Chain
from wds_pipes.core.lane import Lane, ShardRanges
from wds_pipes.core.moved import BY_MD5, BY_SIZE, NAMES, Data
from wds_pipes.core.options import check_storage_options
from wds_pipes.core.stage import Order, Out, Source
from wds_pipes.core.state import Grown
from wds_pipes.core.tolerant import OnError, check_on_error
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError
from wds_pipes.io.packed import Packed
from wds_pipes.io.urls import identify, origins_of, redact, relative_names
from wds_pipes.tar.index import Facts, stale_offset

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]  # of ranges or samples, shape (samples,)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ShardRef:
    """A shard to read: its URL, and what is known of it before it is opened.

    ``ShardList`` yields these. ``str(ref)`` and ``os.fspath(ref)`` are the URL, so ``open(ref)``
    and ``pathlib.Path(ref)`` work with local shards. A ShardRef is not a str: a step that changes
    the URL must keep the rest, or samples could come twice, and damaged shards could pass::

        ShardList(urls).map(lambda ref: ref.with_url(ref.url.replace("s3://bucket", "/data")))

    It cannot be changed, it can be pickled, and two of them are equal if all their values are. To
    compare one with a str is an error: compare ``ref.url``.

    Attributes:
        url: the URL or path, with credentials if it has any.
        size: the stored size in bytes; None: unknown.
        md5: the MD5 of the stored bytes in hexadecimal digits, in lower case; None: unknown.
        start: the number of the first sample to yield.
        stop: the number of the sample after the last one to yield; None: all samples, whose number
            is unknown.
        of: how many samples the shard has; None: unknown.
        begin: the byte at which the sample before ``start`` begins, to read from there; None:
            unknown, or not needed.
        end: the byte at which sample ``stop`` begins; None: unknown, or not needed.
        draw: which of the times that the shard comes in an epoch this is; None: it comes once. See
            ``wds_pipes.core.occurrences``.
    """

    url: str
    size: int | None = None
    md5: str | None = None
    start: int = 0
    stop: int | None = None
    of: int | None = None
    begin: int | None = None
    end: int | None = None
    draw: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise TypeError(f"the url of a ShardRef must be a str, not {type(self.url).__name__}: write str(path)")
        if (self.stop is None) is not (self.of is None) or (self.start and self.stop is None):
            raise ValueError("start, stop and of describe a range of samples together: pass all of them, or none")
        if self.stop is not None and not 0 <= self.start <= self.stop <= (self.of or 0):
            raise ValueError(f"samples {self.start} to {self.stop} are not a range of the {self.of} samples of a shard")

    def with_url(self, url: str | os.PathLike[str]) -> ShardRef:
        """Return a reference to the same shard at another URL or path: to a copy with the same
        bytes. The other values are kept.
        """
        return replace(self, url=os.fspath(url))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            raise TypeError(f"a ShardRef is not a str: compare ref.url with {redact(other)!r:.200}")
        return astuple(self) == astuple(other) if isinstance(other, ShardRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.url)  # as of the str, so that looking for one among str is an error, too

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        """Return the values that are known, with the URL as messages show it."""
        named = [(field.name, getattr(self, field.name), field.default) for field in fields(self)[1:]]
        known = [f"{name}={value!r}" for name, value, default in named if value != default]
        return f"ShardRef({', '.join([repr(redact(self.url)), *known])})"


class ShardUrl(str):
    """The URL of the members of a shard of which more is known, such as its number of samples: a
    str that also has the ShardRef, so that ``group_by_key`` knows which samples to yield, whatever
    is in between.
    """

    __slots__ = ("ref",)
    ref: ShardRef

    @classmethod
    def of(cls, ref: ShardRef) -> str:
        """Return the URL of the members of a shard: a plain str if the number of samples is unknown
        and the shard comes once in an epoch.
        """
        if ref.stop is None and ref.draw is None:
            return ref.url
        url = cls(ref.url)
        url.ref = ref
        return url


def ref_of(url: str | ShardRef) -> ShardRef:
    """Return what is known of the shard of a member with this URL."""
    return url if isinstance(url, ShardRef) else getattr(url, "ref", None) or ShardRef(url)


def check_more(ref: ShardRef, offset: int) -> None:
    """Check that a shard may have a sample at ``offset``, after all samples that ``ref`` means:
    ``ref`` must not mean its last ones, and must not know another place.

    Raises:
        ShardError: the shard has more samples than are known, or the index of offsets is that of
            another shard.
    """
    if ref.end not in (None, offset):
        raise stale_offset(ref.url, ref.end)
    if ref.stop == ref.of:
        url = redact(ref.url)
        said = f"the {ref.of} that samples_per_shard or the index says"
        raise ShardError(f"shard {url} has more samples than {said}, from byte {offset} on.", url=url, offset=offset)


def check_enough(ref: ShardRef, number: int) -> None:
    """Check that a shard that ended after ``number`` samples had all that ``ref`` means.

    Raises:
        ShardError: it had fewer.
    """
    if ref.stop is not None and number < ref.stop:
        url = redact(ref.url)
        raise ShardError(
            f"shard {url} has only {plural(number, 'sample')}, and samples_per_shard or "
            f"the index says {ref.of}. Correct it, or make the index again.",
            url=url,
        )


class ShardSource(Order, Source[Out]):
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
    origins: list[str] | None = None  # if an index lists the shards: see wds_pipes.io.urls
    samples: Sequence[int] | None = None

    def __init__(
        self, seed: int | None, storage_options: dict[str, Any] | None, moved: bool, on_error: OnError
    ) -> None:
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
        """Return this list, some epochs of which have only its first shards: ``Order.grown``."""
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

    def samples_after(self, taken: Numbers, lane: Lane) -> tuple[Numbers, Numbers]:
        """Return the samples that a lane reads after these numbers of others: the shard of each,
        and its number there.
        """
        raise NotImplementedError

    def in_ranges(self, shard: int, number: int, lane: Lane) -> list[tuple[int, int]]:
        """Return as which samples of ranges a sample of a shard comes in the epoch of a lane: the
        number of each range, and the number of the sample there.
        """
        return [(shard, number)]

    def before(self, number: int, inside: int, lane: Lane) -> list[int]:
        """Return of each time that a lane reads a sample of a range, as ``in_ranges`` names it, how
        many others it reads before.
        """
        return ShardRanges.of(lane.shards or ()).before(number, inside)

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
        """Return the options as the text of a pipeline shows them, and the text after the first of
        them.
        """
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
    None: all. See ``wds_pipes.io.urls``.
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
