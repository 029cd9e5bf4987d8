"""The members of a tar, its links, and the errors of single members."""

from __future__ import annotations

from typing import NamedTuple

from wds_pipes.errors import SampleError
from wds_pipes.io.urls import redact


class TarMember(NamedTuple):
    """A regular file of a tar.

    Attributes:
        url: the shard that contains it.
        name: its name; ``""`` for a gap, where members were lost.
        data: its bytes; None if they were not requested, and for a gap.
        offset: where its headers start in the (decompressed) tar, in bytes.
    """

    url: str
    name: str
    data: bytes | None
    offset: int


class Link(NamedTuple):
    """A link in a tar. It has no data, so it is no member.

    Attributes:
        name: its name.
        target: the name of the file that it is a link to.
        hard: whether it is a hard link; otherwise it is a symbolic one.
        offset: where its headers start, in bytes.
        end: where they end.
    """

    name: str
    target: str
    hard: bool
    offset: int
    end: int

    def describe(self, url: str) -> str:
        """Say which shard has this link, and what to do."""
        kind, option = ("hard", "--hard-dereference") if self.hard else ("symbolic", "--dereference")
        return (
            f"shard {redact(url)}, byte {self.offset}: {self.name!r} is a {kind} link to {self.target!r:.300}, so "
            f"it has no data and is skipped. Pack the files again, with: tar {option}"
        )


def pass_link(link: Link) -> None:
    """Pass over a link silently, as ``on_link`` of a TarReader: another reader warns of it."""


class ReservedNameError(SampleError):
    """A file of a sample has a field name that is kept for metadata."""


class RepeatedKeyError(SampleError):
    """A key comes again in a shard, apart from its other members."""


_JOIN = "Join them with: wds-pipes repair SHARD NEW (or unpack it, and pack it with tar --sort=name)"


def repeated_key(url: str, key: str, *, offset: int) -> RepeatedKeyError:
    """Return the error for a key that comes again at ``offset``."""
    url = redact(url)
    return RepeatedKeyError(
        f"key {key!r} comes again in shard {url} at byte {offset}, apart from its other members, so that its sample is "
        "in pieces",
        mend=f"{_JOIN}, or pass on_repeated_key='ignore', to take the pieces as samples. (A resume from here on does "
        "not see what came before.)",
        mend_cli=f"{_JOIN}, or pass --on-repeated-key ignore to wds-pipes index, to take the pieces as samples.",
        url=url,
        key=key,
        offset=offset,
    )


def reserved_name(url: str, key: str, field: str, name: str, *, offset: int) -> ReservedNameError:
    """Return the error for the file ``name``, whose field name is kept for metadata, at
    ``offset``.
    """
    url = redact(url)
    return ReservedNameError(
        f"sample {key!r} of shard {url} has the reserved field name {field!r} (byte {offset}): names that begin and "
        f"end with two underscores are kept for metadata. Rename the file {name!r}, or write the shard without it: "
        "wds-pipes repair SHARD NEW",
        url=url,
        key=key,
        offset=offset,
    )


def field_twice(url: str, key: str, field: str, name: str, *, offset: int) -> SampleError:
    """Return the error for a field that a sample has again, as the file ``name`` at ``offset``."""
    url = redact(url)
    return SampleError(
        f"sample {key!r} of shard {url} has field {field!r} twice (again at byte {offset}, as {name!r}). Rename or "
        "remove one, or keep the first: wds-pipes repair SHARD NEW --drop-repeated",
        url=url,
        key=key,
        offset=offset,
    )
