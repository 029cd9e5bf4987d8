"""Read one sample of a shard from its bytes, which an index of offsets has found."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from struct import error as struct_error
from typing import Any
from zlib import adler32

from wds_pipes.errors import ShardError, ShardWarning
from wds_pipes.io.ranges import Part
from wds_pipes.tar.headers import BLOCK, FIELDS, Sizes, Sums
from wds_pipes.tar.keys import KeySplit, is_metadata, split_key, splitter
from wds_pipes.tar.members import END, MARK, Link, pass_link, reserved_name
from wds_pipes.tar.reader import TarReader

# How many bytes after a sample are read with it: the headers of the next one, with a name of up to
# 500 bytes. Of a local file, more are looked at.
AFTER, _MOST_AFTER = 3 * BLOCK, 32 * BLOCK
_SIZES, _SUMS = Sizes(), Sums()  # caches
_EXTENDED = (b"x", b"g", b"L", b"K")  # kinds of extended headers
_NAME = 99  # bytes of a name in FIELDS
_MOST_NAMES = 4096  # so that hostile names do not fill the memory


class SampleParser:
    """Makes samples of bytes of a tar, the same as ``group_by_key`` makes.

    Args:
        fields: the fields to keep, in lower case; None: all.
        key_split: as in ``group_by_key``.
        stale: makes the error for a shard that does not fit its index; it takes the URL of the
            shard and what is wrong.
    """

    def __init__(
        self, fields: Container[str] | None, key_split: KeySplit, stale: Callable[[str, str], ShardError]
    ) -> None:
        self._fields, self._split, self._stale = fields, splitter(key_split), stale
        self._key_split, self._by_stem = key_split, key_split == "first-dot"
        # a cache: from a field as it is written, with the zeros after it, to its name in lower case
        self._names: dict[bytes, str] = {}
        self._linked: set[str] = set()  # the shards of which a link was reported
        self._begins = "", 0  # a shard, and a byte of it where a sample is known to begin

    @functools.cached_property
    def _checker(self) -> SampleParser:
        return SampleParser(frozenset(), self._key_split, self._stale)

    def parse(
        self, part: Part, start: int, stop: int, url: str, shown: str, *, before: int | None = None
    ) -> dict[str, Any]:
        """Return a sample of a shard.

        Args:
            part: bytes of the shard, up to ``AFTER`` after ``stop``.
            start: the byte of the first header of the sample.
            stop: that of the next one, or the end of the last one.
            url: the shard.
            shown: its URL for messages, and for the sample.
            before: where the sample before it begins, -1 if it is the first one. If ``part`` has
                these bytes, that one must end at ``start``. None: this is not checked.

        Raises:
            ShardError: the bytes are damaged, or are not one whole sample, so that the index is of
                another shard.
            SampleError: a file has a field name that is kept for metadata.
        """
        data, base = part
        at, end = start - base, stop - base
        if end > len(data):
            raise self._stale(url, f"it ends at byte {base + len(data)}, inside a sample at byte {start}")
        sample: dict[str, Any] = {"__key__": "", "__url__": shown}
        key, stem = "", b""
        unpack, names, kept, by_stem, length = FIELDS.unpack_from, self._names, self._fields, self._by_stem, 0
        while at < end:
            # A common header is parsed here; TarReader parses all others.
            try:
                short, last, digits, after_size, checksum, kind, prefix = unpack(data, at)
                size = _SIZES[digits]
                if (
                    last
                    or prefix
                    or after_size & 223
                    or (kind != 48 and kind != 0)  # noqa: PLR1714 - a set is slower
                    or adler32(data[at : at + BLOCK]) & 0xFFFF != _SUMS[checksum]
                ):
                    break
                # most names are the key and a field that is known: they are not decoded
                field = None
                if length:
                    field = names.get(short[length:]) if short[:length] == stem else None
                elif by_stem:  # as ``first-dot`` splits a name: a field that is known has no "/"
                    first, _, rest = short.partition(b".")
                    if first and first[-1] != 47 and first[:2] != b"__" and rest in names and 0 not in first:
                        sample["__key__"] = key = first.decode()
                        field, stem = names[rest], first + b"."
                        length = len(stem)
                if field is None and (name := short[: short.index(0)].decode())[-1:] == "/":
                    break
            except (ValueError, IndexError, struct_error):
                break
            begin = at + BLOCK
            at = begin + size + (-size & 511)
            if at > end:
                name = short.partition(b"\0")[0].decode()
                raise self._stale(url, f"member {name!r} at byte {base + begin - BLOCK} is not inside one sample")
            if field is None or field in sample:
                name = short.partition(b"\0")[0].decode()
                key = self._add(sample, name, data[begin : begin + size], (url, start))
                if by_stem and key:
                    stem = f"{key}.".encode()
                    length = len(stem)
            elif kept is None or field in kept:
                sample[field] = data[begin : begin + size]
        if at < end:
            following = name_of(data[end : end + BLOCK])
            for name, content in self._all_members(data[at:end], following, url, base + at):
                key = self._add(sample, name, content, (url, start))
        if not key:
            raise self._stale(url, f"from byte {start} on it has no sample")
        if before is not None and self._begins != (url, start):
            self._check_begin(part, before, start, key, url)
        head = data[end : end + BLOCK]
        # only the name of a file with such a header can have this key
        if (
            head.startswith(key.encode("utf-8", "surrogateescape"))
            or head[156:157] in _EXTENDED
            or head[345:346] not in (b"\0", b"")
        ):
            name = _first_name(data[end : end + _MOST_AFTER])
            parts = self._split(name) if name else None
            if parts is not None and parts[0] == key:
                what = f"sample {key!r} goes on at byte {stop}, after its end, or the index is of another key_split"
                raise self._stale(url, what)
        self._begins = url, stop
        return sample

    def _check_begin(self, part: Part, before: int, start: int, key: str, url: str) -> None:
        """Check that the sample ``key`` begins at byte ``start``; see ``before`` of ``parse``."""
        data, base = part
        if before < 0:
            if start and not base:
                check_head(data[:start], url, self._split, self._stale)
        elif before >= base and self._checker.parse(part, before, start, url, url)["__key__"] == key:
            raise self._stale(url, f"sample {key!r} begins before byte {start}")

    def check_last(self, part: Part, stop: int, url: str) -> None:
        """Check that the end of the archive follows the last sample of a shard, which ends at byte
        ``stop``.

        Raises:
            ShardError: it does not, so that the index is of another shard.
        """
        data, base = part
        if data[stop - base : stop - base + BLOCK].strip(b"\0"):
            raise self._stale(url, f"it has more samples, and its samples should end at byte {stop}")

    def _add(self, sample: dict[str, Any], name: str, content: bytes, where: tuple[str, int]) -> str:
        """Add a member to a sample, which begins at ``where``; return the key of the sample, which
        is "" before its first member.
        """
        key: str = sample["__key__"]
        parts, (url, start) = self._split(name), where
        if parts is None:
            return key
        if not key:
            sample["__key__"] = parts[0]
        elif parts[0] != key:
            raise self._stale(url, f"from byte {start} on it has samples {key!r} and {parts[0]!r}, not one")
        if len(self._names) > _MOST_NAMES:
            self._names.clear()
        field = parts[1].lower()
        if is_metadata(field):
            raise reserved_name(url, parts[0], field, name, offset=start, begins=True)
        stem, rest = (f"{parts[0]}.".encode("utf-8", "surrogateescape"), parts[1].encode("utf-8", "surrogateescape"))
        self._names[rest.ljust(_NAME - len(stem), b"\0")] = field
        if field in sample:
            raise self._stale(url, f"from byte {start} on, sample {parts[0]!r} has field {field!r} twice")
        if self._fields is None or field in self._fields:
            sample[field] = content
        return parts[0]

    def _all_members(self, data: bytes, following: str | None, url: str, offset: int) -> Iterator[tuple[str, bytes]]:
        def warn(link: Link) -> None:
            if url not in self._linked:  # once, and not for each sample
                self._linked.add(url)
                warnings.warn(link.describe(url), ShardWarning, stacklevel=5)

        reader = TarReader(io.BytesIO(data), url=url, offset=offset, on_truncated="ignore", doubts=True, on_link=warn)
        try:
            for member in reader:
                if member.name:
                    yield member.name, member.data or b""
                elif member.data not in (MARK, END):
                    raise self._stale(url, f"from byte {offset} on it has no whole sample")
        except ShardError as error:
            raise self._stale(url, str(error)) from error
        # zeros are the end of an archive, which another one may follow
        if reader.offset < offset + len(data) and following is None:
            raise self._stale(url, f"the sample from byte {offset} on ends at byte {reader.offset}")


def name_of(header: bytes) -> str | None:
    """Return the name in the header of a file; None for any other bytes. A name that an extended
    header holds is "".
    """
    if len(header) < BLOCK or adler32(header) & 0xFFFF != _SUMS[header[148:156]]:
        return None
    if header[156] not in b"0\0":
        return ""
    return header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _first_name(data: bytes) -> str:
    """Return the name of the first file in bytes of a tar, which may be cut after its headers; "":
    there is none.
    """
    names: list[str] = []
    for _ in TarReader(
        io.BytesIO(data),
        want=names.append,  # type: ignore[arg-type]  # it returns None: no file is wanted
        on_truncated="ignore",
        on_error=lambda error: None,
        on_link=pass_link,
    ):
        break
    return names[0] if names else ""


def check_head(
    data: bytes,
    url: str,
    split: Callable[[str], tuple[str, str] | None],
    stale: Callable[[str, str], ShardError],
) -> None:
    """Check that what is before the first sample of a shard is none.

    Args:
        data: the bytes of the shard up to that sample.
        url: the shard.
        split: the function of ``key_split``.
        stale: as in ``SampleParser``.

    Raises:
        ShardError: a sample begins there, so that the index is of another shard.
    """
    for member in TarReader(io.BytesIO(data), url=url, want=lambda name: False, on_truncated="ignore"):
        if not member.name or split(member.name) is not None:  # without a name: it goes on after these bytes
            raise stale(url, f"a sample begins before byte {len(data)}")


def first_name(
    sample: tuple[Part, int, int, str, str], rules: Sequence[KeySplit], stale: Callable[[str, str], ShardError]
) -> str:
    """Return the name of the first file of a sample by one of some rules; ``sample`` is what
    ``SampleParser.parse`` takes.
    """
    names: list[str] = []

    def note(name: str) -> tuple[str, str] | None:
        if all(split_key(name, rule) is None for rule in rules):
            return None
        names.append(name)
        return "\1", str(len(names))  # all files are fields of one sample

    (data, base), _, stop, *_ = sample
    # without what follows: that would be a part of the sample by this rule, too
    SampleParser(frozenset(), note, stale).parse((data[: stop - base], base), *sample[1:])
    return names[0]
