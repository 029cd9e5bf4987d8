"""Read one sample of a shard from its bytes, which an index of offsets has found."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

from wds_pipes.errors import SampleError, ShardError, ShardWarning
from wds_pipes.io.ranges import LocalFile, Part
from wds_pipes.tar.grouping import GroupedShard, Grouping, Member
from wds_pipes.tar.headers import BLOCK, END_MARK, plain_header
from wds_pipes.tar.keys import KeySplit, splitter, wants
from wds_pipes.tar.reader import Link, ReservedNameError, TarReader, pass_link

# How many bytes after a sample are read with it: the headers of the next one, with a name of up to
# 500 bytes. Of a local file, more are looked at.
AFTER, _MOST_AFTER = 3 * BLOCK, 32 * BLOCK
# The kind and the first byte of the ustar prefix of a header whose name is where all names begin;
# or there is none. One slice and one look-up for both save 3 % of the time of a tiny sample.
_PLAIN_NAME, _KIND_AND_PREFIX = frozenset((b"0\0", b"\0\0", b"")), slice(156, 346, 345 - 156)
_NOTHING = frozenset[str]().__contains__  # wants no file; a call of it is quicker than of a function of Python


class SampleParser:
    """Makes samples of bytes of a tar, the same as ``group_by_key`` makes.

    Args:
        fields: the fields to keep, in lower case; None: all.
        key_split: as in ``group_by_key``.
        stale: makes the error for a shard that does not fit its index; it takes the URL of the
            shard and what is wrong.

    Attributes:
        begins: a shard, and a byte of it where a sample is known to begin.
    """

    def __init__(
        self, fields: Collection[str] | None, key_split: KeySplit, stale: Callable[[str, str], ShardError]
    ) -> None:
        self._split, self._stale, self._key_split = splitter(key_split), stale, key_split
        self._want = wants(fields, key_split)
        self._grouping = Grouping(key_split, fields=fields, on_repeated_key="ignore")
        # by other rules, a name such as ./0/a has another key than its first bytes
        self._key_begins_name = key_split in ("first-dot", "last-dot")
        self._linked: set[str] = set()  # the shards of which a link was reported
        self.begins = "", 0

    def parse(
        self,
        part: Part,
        start: int,
        stop: int,
        url: str,
        shown: str,
        *,
        before: int | None = None,
        last: bool = False,
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
            last: whether it is the last one, after which the end of the archive must follow.

        Raises:
            ShardError: the bytes are damaged, or are not one whole sample, so that the index is of
                another shard.
            SampleError: a file has a field name that is kept for metadata.
        """
        data, base = part
        end = stop - base
        if end > len(data):
            raise self._stale(url, f"it ends at byte {base + len(data)}, inside a sample at byte {start}")
        previous = None
        if before is not None and (before >= base or base == 0) and self.begins != (url, start):
            # before the sample itself, so that a local file is read in order
            previous = self._key_before(part, before, start, url)
        try:
            members = self._members(part, start, stop, url, self._want, last=last)
            found = list(self._grouping.samples(members, GroupedShard(shown)))
        except ReservedNameError:
            raise
        except SampleError as error:
            raise self._stale(url, str(error)) from error
        if not found:
            raise self._stale(url, f"from byte {start} on it has no sample")
        if len(found) > 1:
            first, second, *_ = (sample["__key__"] for sample in found)
            raise self._stale(url, f"from byte {start} on it has samples {first!r} and {second!r}, not one")
        sample = found[0]
        key: str = sample["__key__"]
        if previous is not None and (previous == key or before == -1):
            which = "a sample" if before == -1 else f"sample {key!r}"
            raise self._stale(url, f"{which} begins before byte {start}")
        self.check_after(key, data, end, url, stop, last=last)
        self.begins = url, stop
        return sample

    def check_after(self, key: str, data: bytes | LocalFile, end: int, url: str, stop: int, *, last: bool) -> None:
        """Check what follows a sample of a shard.

        Args:
            key: the key of the sample.
            data: bytes of the shard, up to ``AFTER`` after the sample.
            end: where the sample ends in them.
            url: the shard.
            stop: where the sample ends in the shard.
            last: whether it is the last one.

        Raises:
            ShardError: the sample goes on, or samples follow the last one.
        """
        head, begin = data[end : end + BLOCK], key if self._key_begins_name else ""
        if head[_KIND_AND_PREFIX] not in _PLAIN_NAME or head.startswith(begin.encode("utf-8", "surrogateescape")):
            name = first_name(data[end : end + _MOST_AFTER])
            parts = self._split(name) if name else None
            if parts is not None and parts[0] == key:
                what = f"sample {key!r} goes on at byte {stop}, after its end, or keys of the index end at another dot"
                raise self._stale(url, what)
        if last and head.strip(b"\0"):
            raise self._stale(url, f"it has more samples, and its samples should end at byte {stop}")

    def _key_before(self, part: Part, before: int, start: int, url: str) -> str | None:
        """Return the key of the last file between two bytes of a shard, of those in a sample; None:
        there is none.
        """
        for _, name, _, _ in reversed(self._members(part, max(before, 0), start, url, _NOTHING)):
            parts = self._split(name)
            if parts is not None:
                return parts[0]
        return None

    def _members(
        self,
        part: Part,
        start: int,
        stop: int,
        url: str,
        want: Callable[[str], bool] | None,
        *,
        last: bool = False,
    ) -> list[Member]:
        """Return the members between two bytes of a shard, with the data of those that ``want``
        names; None: of all. ``last``: they are those of the last sample.
        """
        data, base = part
        at, end = start - base, stop - base
        found: list[Member] = []
        while at < end:
            begin = at + BLOCK
            plain = plain_header(data[at:begin])
            if plain is None:
                return [*found, *self._all_members(data[at:end], url, base + at, stop, last=last)]
            name, size = plain
            after = begin + size + (-size & 511)
            if after > end:
                raise self._stale(url, f"member {name!r} at byte {base + at} is not inside one sample")
            content = data[begin : begin + size] if want is None or want(name) else None
            found.append((url, name, content, base + at))
            at = after
        return found

    def _all_members(self, data: bytes, url: str, offset: int, stop: int, *, last: bool) -> Iterator[Member]:
        """Yield members with any headers. Zeros after them are the end of an archive, before the
        next one; after those of the last sample, members are lost.
        """
        reader = TarReader(
            io.BytesIO(data),
            url=url,
            offset=offset,
            want=self._want,
            on_truncated="ignore",
            on_link=functools.partial(self._warn_of_link, url),
            concatenated=True,
            named=False,
        )
        end = offset
        try:
            for member in reader:
                if member[1]:
                    end = reader.offset
                    yield member
        except ShardError as error:
            raise self._stale(url, str(error)) from error
        if reader.offset != stop and (
            last or stop - reader.offset < len(END_MARK) or data[end - offset :].strip(b"\0")
        ):
            raise self._stale(url, f"the sample from byte {offset} on ends at byte {end}, and not at {stop}")

    def _warn_of_link(self, url: str, link: Link) -> None:
        if url not in self._linked:  # once, and not for each sample
            self._linked.add(url)
            warnings.warn(link.describe(url), ShardWarning, stacklevel=5)


def first_name(data: bytes) -> str:
    """Return the name of the first file in bytes of a tar, which may be cut after its headers; "":
    there is none.
    """
    names: list[str] = []

    def note(name: str) -> bool:
        """Note the name of a file, of which the data may be cut, and want no data."""
        names.append(name)
        return False

    for _ in TarReader(
        io.BytesIO(data),
        want=note,
        on_truncated="ignore",
        on_error=lambda error: None,
        on_link=pass_link,
    ):
        break
    return names[0] if names else ""
