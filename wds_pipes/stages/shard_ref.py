"""ShardRef: a shard to read, and what is known of it before it is opened; the URL of members."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, fields, replace

from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError
from wds_pipes.io.urls import redact
from wds_pipes.tar.offsets import stale_offset


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
    """

    url: str
    size: int | None = None
    md5: str | None = None
    start: int = 0
    stop: int | None = None
    of: int | None = None
    begin: int | None = None
    end: int | None = None

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
    """The URL of the members of a shard whose number of samples is known: a str that also has the
    ShardRef, so that ``group_by_key`` knows which samples to yield, whatever is in between.
    """

    __slots__ = ("ref",)
    ref: ShardRef

    @classmethod
    def of(cls, ref: ShardRef) -> str:
        """Return the URL of the members of a shard: a plain str if its number of samples is
        unknown.
        """
        if ref.stop is None:
            return ref.url
        url = cls(ref.url)
        url.ref = ref
        return url


def same_shard(one: str | ShardRef, other: str | ShardRef) -> bool:
    """Whether two members with these URLs are of the same range of a shard."""
    return one is other or (
        type(one) is type(other) and one == other and getattr(one, "ref", None) == getattr(other, "ref", None)
    )


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
