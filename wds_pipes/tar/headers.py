"""The headers of a tar: their fields, checksums, extended headers, and the maps of sparse files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from struct import error as struct_error
from typing import Any
from zlib import adler32

BLOCK = 512
# For all extended headers of a member: names, attributes, the map of a sparse file.
MAX_HEADER_BYTES = 1 << 20
MAX_SIZE = 1 << 60  # a larger size is an error
ZEROS = bytes(BLOCK)
END_MARK = bytes(2 * BLOCK)  # ends an archive
REGULAR = b"0\x007"  # regular, the same in v7, contiguous
# Links, devices, directories: they have no data, whatever their size field says.
NO_DATA = b"123456"
LINKS = b"12"  # hard, symbolic
# The fields of a header: 99 bytes of the name and its 100th, 11 digits of the size and the byte
# after them, the checksum, the type, the first byte of the ustar prefix.
FIELDS = Struct("99sB24x11sB12x8sB188xB166x")


_COMPRESSED = {b"\x04\x22\x4d\x18": "lz4", b"\x5d\0\0": "lzma", b"7z\xbc\xaf\x27\x1c": "7z", b"LZIP": "lzip"}
_COMPRESSED |= {b"\x1f\x9d": "compress", b"\x89LZO": "lzop"}


class Sums(dict[bytes, int]):
    """For a checksum field, the low half of adler32 of a whole valid header.

    That is 1 + the sum of its bytes, modulo 65521.
    """

    def __missing__(self, checksum: bytes) -> int:
        if len(self) > 8192:
            self.clear()
        stored = _number(checksum)
        # the checksum counts its own field as eight spaces
        self[checksum] = value = -1 if stored is None else (1 + stored - 256 + sum(checksum)) % 65521
        return value


class Sizes(dict[bytes, int]):
    """The size for the digits of a size field."""

    def __missing__(self, digits: bytes) -> int:
        if len(self) > 8192:
            self.clear()
        size = _number(digits) if digits[0] < 128 else None
        if size is None:
            raise ValueError(digits)
        self[digits] = size
        return size


# These two are caches: most headers repeat a few of the values.
SIZES, SUMS = Sizes(), Sums()


def plain_header(
    head: bytes,
    fields: Callable[[bytes], tuple[Any, ...]] = FIELDS.unpack,
    sizes: Sizes = SIZES,
    sums: Sums = SUMS,
    adler: Callable[[bytes], int] = adler32,
) -> tuple[str, int] | None:
    """Parse the common header: a regular file with a short name and a plain size.

    This is called for each member, so what it uses are defaults, which are found faster.

    Returns:
        The name and the size; None: it is another header, or no valid one, for ``parse_header``.
    """
    try:
        short, last, digits, after_size, checksum, kind, prefix = fields(head)
        if (
            # a long name, a ustar prefix, or neither NUL nor space after the size
            last
            or prefix
            or after_size & 223
            or (kind != 48 and kind != 0)  # noqa: PLR1714 - a set is slower
            or adler(head) & 0xFFFF != sums[checksum]
        ):
            return None
        name = short[: short.index(0)].decode()
        return None if name[-1] == "/" else (name, sizes[digits])
    except (ValueError, IndexError, struct_error):
        return None


class Damage(Exception):  # noqa: N818 - it becomes a ShardError
    """Damage at ``offset``; ``what`` continues a sentence about the shard.

    ``cut``: nothing can be read after it, since the stream was cut or, if ``lost``, failed. Without
    ``cut``, the walk continues at one of these places: at ``head``, a header that was read already;
    after the ``passed`` bytes of a member; or at the next valid header. ``whole``: the member with
    its headers is sound and is passed, so the next header is that of another one. ``data``: where
    the data begins whose size is more than the stream has; None: it was not that. ``zeros``: there
    are zeros, as at the end of an archive. ``joined``: another archive may begin after its end.
    ``mend`` and ``mend_cli``: the remedies, if they are no part of ``what``.
    """

    def __init__(
        self,
        what: str,
        offset: int,
        cause: Exception | None = None,
        *,
        cut: bool = False,
        lost: bool = False,
        head: bytes | None = None,
        passed: int | None = None,
        whole: bool = False,
        data: int | None = None,
        zeros: bool = False,
        joined: bool = False,
        mend: str = "",
        mend_cli: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.offset, self.cause, self.cut, self.lost = what, offset, cause, cut, lost
        self.head, self.passed, self.whole, self.data, self.zeros = head, passed, whole, data, zeros
        self.joined, self.mend, self.mend_cli = joined, mend, mend_cli


def cut_member(name: str, size: int, offset: int) -> Damage:
    """The damage of a shard that ends inside the member whose last header is at ``offset``."""
    what = f"is cut inside member {name!r} of {size} bytes. Write or fetch it again"
    return Damage(what, offset, cut=True, data=offset + BLOCK)


def parse_header(head: bytes, offset: int) -> tuple[bytes, int, int]:
    """Check a header block, and return what it says without extended headers: the name, the kind
    and the size.
    """
    if not is_header(head):
        what = (
            no_tar(head)
            if offset == 0
            else "has no valid header here: the checksum does not fit. Write or fetch it again"
        )
        raise Damage(what, offset)
    name = head[:100].partition(b"\0")[0]
    prefix = head[345:500].partition(b"\0")[0]
    if prefix and head[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    size = _number(head[124:136])
    if size is None or size > MAX_SIZE:
        raise Damage("has a header with an unreadable size. Write or fetch it again", offset)
    return name, head[156], size


def is_header(head: bytes) -> bool:
    """Whether the checksum of a block is right.

    It is the sum of unsigned bytes or, from some old programs, of signed ones.
    """
    stored = _number(head[148:156])
    unsigned = sum(head) - sum(head[148:156]) + 256
    if stored == unsigned:
        return True
    return stored is not None and stored == unsigned - 256 * sum(byte > 127 for byte in head[:148] + head[156:])


def _number(text: bytes) -> int | None:
    """The value of a number field; None if it is invalid or negative.

    It has octal digits, or base 256 if its first bit is set (GNU).
    """
    if text[0] == 0x80:
        return int.from_bytes(text[1:], "big")
    digits = text.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def no_tar(head: bytes) -> str:
    """The message for a stream that starts with ``head`` and is not a tar, with a guess what it
    is.
    """
    start = head.lstrip()[:64].lower()
    if start.startswith(b"<"):
        guess = "it looks like a web page or an error response of a server; check the URL and the credentials"
    elif start.startswith(b"pk\3\4"):
        guess = "it looks like a zip file, so check the URL"
    elif kind := compression_of(head):
        guess = f"it looks compressed with {kind}, which is not read: compress it with gzip, bzip2, xz or zstd"
    elif start.startswith((b"{", b"version https://git-lfs")):
        guess = "it looks like a text file, perhaps a pointer to the data; check how it was fetched"
    else:
        guess = "check the URL, and that it is one"
    return f"is not a tar: its first bytes are {head[:24]!r}; {guess}"


def compression_of(head: bytes) -> str:
    """Return the compression, of those that are not read, of a stream that starts with ``head``;
    empty: none.
    """
    return next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), "")


@dataclass(slots=True)
class Sparse:
    """The map of a sparse member: (offset, count) of the pieces stored of a file of ``size`` bytes.

    ``inline``: the map is at the start of the member's data.
    """

    size: int
    pieces: list[tuple[int, int]]
    inline: bool = False

    @classmethod
    def old_gnu(cls, head: bytes, take: Callable[[int, str, int], bytes], start: int) -> Sparse:
        """Read the map from an old GNU sparse header at ``start`` and the blocks after it."""
        size = _number(head[483:495])
        pieces = _pieces(head[386:482])
        extended, taken = head[482], 0
        while extended:
            block = take(BLOCK, "a sparse map", start)
            pieces += _pieces(block[:504])
            extended, taken = block[504], taken + BLOCK
            if taken > MAX_HEADER_BYTES:
                raise Damage(f"has a sparse map of more than {MAX_HEADER_BYTES} bytes. Write or fetch it again", start)
        return cls(size or 0, pieces)

    def expand(self, data: bytes, offset: int) -> bytes:
        """The file with the stored pieces at their places and zeros elsewhere."""
        try:
            pieces, taken = _inline_map(data) if self.inline else (self.pieces, 0)
            whole, stored = io.BytesIO(), memoryview(data)  # getvalue() does not copy
            if self.size:
                whole.seek(self.size - 1)
                whole.write(b"\0")
            for place, count in pieces:
                if place + count > self.size or taken + count > len(data):
                    raise ValueError("a piece lies outside of the file")
                whole.seek(place)
                whole.write(stored[taken : taken + count])
                taken += count
        except ValueError as error:
            raise Damage(
                f"has a sparse member whose map does not fit ({error}). Write or fetch it again", offset, error
            ) from error
        return whole.getvalue()


def _inline_map(data: bytes) -> tuple[list[tuple[int, int]], int]:
    """The map at the start of a sparse member's data (pax 1.0), and the offset of the pieces.

    The map has one number per line: the number of pieces, then the offset and the length of each.
    """
    numbers: list[int] = []
    place, wanted = 0, 1
    while len(numbers) < wanted:
        end = data.find(b"\n", place, min(place + 20, MAX_HEADER_BYTES))
        if end < 0 or not data[place:end].isdigit():
            raise ValueError(f"no number ends at byte {place} of it, or it is longer than {MAX_HEADER_BYTES} bytes")
        numbers.append(int(data[place:end]))
        wanted, place = 1 + 2 * numbers[0], end + 1
        if 2 * wanted > MAX_HEADER_BYTES:
            raise ValueError(f"it has {numbers[0]} pieces, more than {MAX_HEADER_BYTES} bytes can tell")
    return list(zip(numbers[1::2], numbers[2::2], strict=True)), place + (-place & 511)


def _pieces(block: bytes) -> list[tuple[int, int]]:
    """The entries of an old GNU sparse map; an empty entry ends it."""
    pieces = []
    for place in range(0, len(block), 24):
        start, count = _number(block[place : place + 12]), _number(block[place + 12 : place + 24])
        if start is None or count is None or not block[place]:
            break
        pieces.append((start, count))
    return pieces


@dataclass(slots=True)
class Extra:
    """The content of the extended headers before a member.

    The first of them is at ``start``; together they have ``size`` bytes.
    """

    start: int
    size: int = 0
    long_name: bytes | None = None
    long_target: bytes | None = None
    pax: dict[bytes, bytes] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    def read_pax(self, content: bytes, offset: int) -> None:
        """Add the records of a pax header: length, space, key, equals sign, value, newline."""
        stored, content, place = len(content), content.rstrip(b"\0"), 0
        if stored and len(content) % BLOCK == 0 and stored > len(content):
            raise Damage("has a pax header that is cut by zeros. Write or fetch it again", offset)
        while place < len(content):
            space = content.find(b" ", place, place + 8)
            digits = content[place : max(space, place)]
            end = place + int(digits) if digits.isdigit() else place
            key, equals, value = content[space + 1 : end].partition(b"=")
            if (
                end <= place
                or not equals
                or value[-1:] != b"\n"
                or end > len(content)
                or (key in (b"path", b"GNU.sparse.name") and b"\0" in value)
            ):
                raise Damage("has a pax header that cannot be read. Write or fetch it again", offset)
            if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
                self.pieces.append(value[:-1])
            self.pax[key] = value[:-1]
            place = end

    def apply(self, name: bytes, size: int, offset: int) -> tuple[bytes, int]:
        """The name and the stored size of the member whose header has these ones."""
        name = self.pax.get(b"GNU.sparse.name") or self.pax.get(b"path") or self.long_name or name
        return name, self._integer(b"size", size, offset)

    def target(self, head: bytes) -> bytes:
        """The name of the file that the link with the header block ``head`` is a link to."""
        return self.pax.get(b"linkpath") or self.long_target or head[157:257].partition(b"\0")[0]

    def sparse(self) -> Sparse | None:
        """The sparse map of pax formats 0.0, 0.1 and 1.0; None for a plain member."""
        major = self.pax.get(b"GNU.sparse.major", b"0")
        if major == b"1":
            return Sparse(self._integer(b"GNU.sparse.realsize", 0, self.start), [], inline=True)
        if major == b"0" and b"GNU.sparse.size" not in self.pax:
            return None
        numbers = self.pax[b"GNU.sparse.map"].split(b",") if b"GNU.sparse.map" in self.pax else self.pieces
        if major != b"0" or len(numbers) % 2 or not all(number.isdigit() and len(number) < 20 for number in numbers):
            raise Damage("has a sparse map that cannot be read. Write or fetch it again", self.start)
        size = self._integer(b"GNU.sparse.size", 0, self.start)
        return Sparse(size, list(zip(map(int, numbers[::2]), map(int, numbers[1::2]), strict=True)))

    def _integer(self, key: bytes, default: int, offset: int) -> int:
        text = self.pax.get(key)
        if not text:
            return default
        if not text.isdigit() or len(text) > 18:
            raise Damage(f"has a pax header with {key.decode()}={text[:40]!r}. Write or fetch it again", offset)
        return int(text)
