"""Read one sample of a shard from its bytes, which an index of offsets has found."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Container, Iterator
from struct import error as struct_error

from wds_pipes.errors import ShardError
from wds_pipes.tar.headers import BLOCK, FIELDS, Sizes, Sums
from wds_pipes.tar.keys import KeySplit, splitter
from wds_pipes.tar.members import END, MARK
from wds_pipes.tar.reader import TarReader

_SIZES, _SUMS = Sizes(), Sums()  # caches


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

    def parse(self, data: memoryview, following: memoryview, url: str, shown: str, offset: int) -> dict[str, object]:
        """Return the sample that ``data`` is.

        Args:
            data: from the first header of the sample to that of the next one, or to the end of the
                last one.
            following: the 512 bytes after them; fewer at the end of the shard.
            url: the shard.
            shown: its URL for messages, and for the sample.
            offset: the byte at which ``data`` begins.

        Raises:
            ShardError: the bytes are damaged, or are not one whole sample, so that the index is of
                another shard.
        """
        sample: dict[str, object] = {}
        key, fields = "", self._fields
        name = name_of(following)
        for member, content in self._members(data, name, url, offset):
            parts = self._split(member)
            if parts is None:
                continue
            if not sample:
                key = parts[0]
                sample = {"__key__": key, "__url__": shown}
            elif parts[0] != key:
                raise self._stale(url, f"from byte {offset} on it has samples {key!r} and {parts[0]!r}, not one")
            field = parts[1].lower()
            if field in sample:
                raise self._stale(url, f"from byte {offset} on, sample {key!r} has field {field!r} twice")
            if fields is None or field in fields:
                sample[field] = content
        if not sample:
            raise self._stale(url, f"from byte {offset} on it has no sample")
        if name and (parts := self._split(name)) is not None and parts[0] == key:
            raise self._stale(url, f"sample {key!r} goes on at byte {offset + len(data)}, after its end")
        return sample

    def _members(self, data: memoryview, following: str | None, url: str, offset: int) -> list[tuple[str, bytes]]:
        """Return the names and contents of the members: the common ones are parsed here, all others
        by TarReader.
        """
        members: list[tuple[str, bytes]] = []
        at, end = 0, len(data)
        while at < end:
            try:
                head = data[at : at + BLOCK]
                short, last, digits, after_size, checksum, kind, prefix = FIELDS.unpack(head)
                size = _SIZES[digits]
                if (
                    last
                    or prefix
                    or after_size & 223
                    or kind not in (0, 48)
                    or zlib.adler32(head) & 0xFFFF != _SUMS[checksum]
                    or (name := short[: short.index(0)].decode())[-1] == "/"
                ):
                    break
            except (ValueError, IndexError, struct_error):
                break
            begin = at + BLOCK
            at = begin + size + (-size & 511)
            if at > end:
                raise self._stale(url, f"member {name!r} at byte {offset + begin - BLOCK} is not inside one sample")
            members.append((name, bytes(data[begin : begin + size])))
        else:
            return members
        return list(self._all_members(data, following, url, offset))

    def _all_members(
        self, data: memoryview, following: str | None, url: str, offset: int
    ) -> Iterator[tuple[str, bytes]]:
        reader = TarReader(io.BytesIO(data), url=url, offset=offset, on_truncated="ignore", doubts=True)
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


def name_of(header: bytes | memoryview) -> str | None:
    """Return the name in the header of a file; None for any other bytes. A name that an extended
    header holds is "".
    """
    if len(header) < BLOCK or zlib.adler32(header) & 0xFFFF != _SUMS[bytes(header[148:156])]:
        return None
    if header[156] not in b"0\0":
        return ""
    return bytes(header[:100]).partition(b"\0")[0].decode("utf-8", "surrogateescape")
