"""Walk the members of a tar stream: our own header walk over large reads.

The formats are those of POSIX pax (IEEE Std 1003.1, "pax Interchange Format") and of GNU tar ("Basic Tar Format" and "Storing Sparse Files" in its manual).

Rules:
1. A header is believed only if its checksum fits, and its size only if it is within ``max_member_bytes``.
2. The common header (regular, short name, plain size) is read inline in ``_walk``; everything rare goes through ``_rare``.
3. A hole in the stream (damage that was skipped, a cut) is given as a gap member, so that nobody takes half a sample for a whole one.
4. ``offset`` is always where the walk can be taken up again: the first header block of the next member.
"""

from __future__ import annotations

import logging
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from struct import error as struct_error
from typing import BinaryIO, NamedTuple

from wds_pipes.errors import ShardError, ShardWarning
from wds_pipes.io.compression import damage, unreadable
from wds_pipes.io.urls import redact

logger = logging.getLogger("wds_pipes")

BLOCK = 512
MAX_HEADER_BYTES = 1 << 20  # of all extended headers of a member: names, attributes, the map of a sparse file
MAX_SIZE = 1 << 60  # a larger one cannot be meant
_ZEROS = bytes(BLOCK)
_REGULAR = b"0\x007"  # regular, the same in v7, contiguous
_NO_DATA = b"123456"  # links, devices, directories: whatever their size says
_READ_PAST = 1 << 16  # fewer bytes than this are read over rather than sought over
# Of a header: 99 bytes of the name and the 100th, 11 digits of the size and the byte behind them, the checksum, the type, the first byte of the ustar prefix.
_FIELDS = Struct("99sB24x11sB12x8sB188xB166x")


class _Sums(dict[bytes, int]):
    """For a checksum field, what the low half of adler32 of a whole valid header is: 1 + the sum of its bytes, modulo 65521."""

    def __missing__(self, checksum: bytes) -> int:
        if len(self) > 8192:
            self.clear()
        stored = _number(checksum)
        # the checksum takes its own field for eight spaces
        self[checksum] = value = -1 if stored is None else (1 + stored - 256 + sum(checksum)) % 65521
        return value


class _Sizes(dict[bytes, int]):
    """For the digits of a size field, the size."""

    def __missing__(self, digits: bytes) -> int:
        if len(self) > 8192:
            self.clear()
        size = _number(digits) if digits[0] < 128 else None
        if size is None:
            raise ValueError(digits)
        self[digits] = size
        return size


# These two are caches: most headers repeat a few of the values.
_SIZES, _SUMS = _Sizes(), _Sums()


class TarMember(NamedTuple):
    """A regular file of a tar.

    Attributes:
        url: the shard it came from.
        name: its name; ``""`` for a gap, a place where members were lost.
        data: its bytes; None if they were not wanted, and for a gap.
        offset: where its headers start in the (decompressed) tar, in bytes.
    """

    url: str
    name: str
    data: bytes | None
    offset: int


class TarReader:
    """The regular files of a tar stream, in order, as TarMember.

    Reads ustar, v7, GNU (long names, sizes above 8 GiB) and pax archives, sparse and contiguous members, archives one after another, and shards without an
    end-of-archive mark (with a ShardWarning). Directories, links and devices are passed over.

    Args:
        stream: a binary stream whose ``read(n)`` gives n bytes unless it ends.
        url: what messages call it.
        offset: where the stream stands, in bytes from the start of the tar; a multiple of 512, where a header starts.
        want: tells by name whose data to read; of others the data is passed over and given as None.
        max_member_bytes: refuse a larger member before taking memory for it.
        on_truncated: for a stream that is cut inside a header or a member: ``"raise"``, ``"warn"`` or ``"ignore"``. The cut member is never given.
        on_error: called with each ShardError; if it returns, the walk goes on at the next valid header. By default it raises.
        named: give TarMembers; otherwise plain tuples of the same four values, which saves a sixth of the time for tiny members.

    Raises:
        ShardError: from the iteration: not a tar, a wrong checksum, a member too large, a stream cut short, a read error.

    Attributes:
        offset: where to go on: a new reader with a stream that stands there gives what this one has not given yet.
        ended: nothing can be read on: the stream was cut or broke.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        url: str = "<stream>",
        offset: int = 0,
        want: Callable[[str], bool] | None = None,
        max_member_bytes: int = 4 << 30,
        on_truncated: str = "raise",
        on_error: Callable[[ShardError], None] | None = None,
        named: bool = True,
    ) -> None:
        self.url = url
        self.offset = offset
        self._stream = stream
        self._want = want
        self._max = max_member_bytes
        self._on_truncated = on_truncated
        self._on_error = on_error
        self._named = named
        self.ended = False
        self._here = offset  # where the stream stands; kept only on the rare paths
        self._extra: _Extra | None = None

    def __iter__(self) -> Iterator[TarMember]:
        """Give the members; see the class."""
        read, url, want, limit, named = self._stream.read, self.url, self._want, self._max, self._named
        new, adler, fields, sizes, sums = tuple.__new__, zlib.adler32, _FIELDS.unpack, _SIZES, _SUMS
        head: bytes | None = None
        while True:
            try:
                offset, extended = self.offset, False
                head = head or read(BLOCK)
                while True:
                    plain = False
                    try:
                        short, last, digits, behind, checksum, kind, prefix = fields(head)
                        size = sizes[digits]
                        plain = (
                            # a short name, no ustar prefix, NUL or space behind the size, no extended header before
                            not (last or prefix or behind & 223 or extended)
                            and (kind == 48 or kind == 0)  # noqa: PLR1714 - a set is slower
                            and size <= limit
                            and adler(head) & 0xFFFF == sums[checksum]
                            and (name := short[: short.index(0)].decode())[-1] != "/"
                        )
                    except (ValueError, IndexError, struct_error):
                        pass
                    if plain:
                        padding = -size & 511
                        if want is None or want(name):
                            data: bytes | None = read(size)
                            if len(data) != size:  # type: ignore[arg-type]
                                raise _cut_member(name, size, offset)
                            if padding:
                                read(padding)
                        else:
                            data = None
                            self._pass_over(size, name, offset)
                        member = (url, name, data, offset)
                        self.offset = offset = offset + BLOCK + size + padding
                        yield new(TarMember, member) if named else member  # type: ignore[misc]
                    else:
                        self._here = offset + len(head)
                        if len(head) < BLOCK:
                            self._at_end(head, offset)
                            return
                        if head == _ZEROS:
                            head = self._after_mark(offset)
                            if head is None:
                                return
                            offset = self.offset
                            continue
                        rare = self._rare(head, offset)
                        offset, extended = self._here, self._extra is not None
                        if not extended:
                            self.offset = offset
                        if rare is not None:
                            yield rare
                    head = read(BLOCK)
            except _Damage as damaged:
                found = damaged
            except EOFError as error:
                found = _Damage(f"is cut short inside its compressed data ({error}). Write or fetch it again", self.offset, error, cut=True)
            except damage() as error:
                found = _Damage(f"has damaged compressed data ({error}). Write or fetch it again", self.offset, error, cut=True, lost=True)
            except OSError as error:
                what = f"cannot be read on ({type(error).__name__}: {error}). Check that it can be reached and is whole"
                found = _Damage(what, self.offset, error, cut=True, lost=True)
            gap = self._report(found)
            head = None if found.cut else self._go_on(found)
            self.ended = head is None
            yield gap
            if head is None:
                return

    def _rare(self, head: bytes, start: int) -> TarMember | None:
        """What a header that is not common leads to: a member, or None for everything that is no regular file."""
        header = _parse(head, start)
        kind, size = header.kind, header.size
        if kind in b"xXgLK":
            extra = self._extra = self._extra or _Extra(start)
            extra.size += size
            if extra.size > MAX_HEADER_BYTES:
                raise _Damage(f"has extended headers of {extra.size} bytes, more than {MAX_HEADER_BYTES}. Write or fetch it again", start)
            content = self._take(size + (-size & 511), "an extended header", start)[:size]
            self._extend(extra, kind, content, start)
            return None
        extra, self._extra = self._extra or _Extra(start), None
        name, size = extra.apply(header, start)
        text = name.decode("utf-8", "surrogateescape")
        if kind not in _REGULAR and kind != 83:  # S: sparse
            if kind not in _NO_DATA:
                self._pass_over(size, text, start)
            return None
        if kind == 0 and text.endswith("/"):  # a directory of v7
            return None
        sparse = _Sparse.old_gnu(head, self._take, start) if kind == 83 else extra.sparse()
        real_size = sparse.size if sparse else size
        if max(size, real_size) > self._max:
            what = f"has a member {text!r} of {max(size, real_size)} bytes, more than max_member_bytes={self._max}. Raise that limit if the size is right"
            raise _Damage(what, extra.start, passed=size)
        if not text or (self._want is not None and not self._want(text)):
            self._pass_over(size, text, start)
            return TarMember(self.url, text, None, extra.start) if text else None
        data = self._take(size, f"member {text!r}", start)
        self._take(-size & 511, None, start)
        return TarMember(self.url, text, sparse.expand(data, start) if sparse else data, extra.start)

    def _extend(self, extra: _Extra, kind: int, content: bytes, start: int) -> None:
        """Keep what an extended header says for the member behind it."""
        if kind == 76:  # L: GNU long name
            extra.long_name = content.partition(b"\0")[0]
        elif kind in b"xX":
            extra.read_pax(content, start)
        elif kind == 103:  # g: global
            said = _Extra(start)
            said.read_pax(content, start)
            if any(key in (b"path", b"size") or key.startswith(b"GNU.sparse.") for key in said.pax):
                raise _Damage("has a global pax header that names or sizes all its members, which makes no sense. Write the shard again", start)
            if extra.start == start:
                self._extra = None

    def _take(self, count: int, what: str | None, start: int) -> bytes:
        """The next bytes; if there are fewer, ``what`` at ``start`` is cut, unless it is None."""
        data = self._stream.read(count)
        if len(data) != count and what is not None:
            raise _Damage(f"is cut inside {what}: {len(data)} of {count} bytes are there. Write or fetch it again", start, cut=True)
        self._here += count
        return data

    def _pass_over(self, size: int, name: str, start: int) -> None:
        """Go past the data of the member at ``start``; by seeking where that saves reading."""
        left = size
        if size > _READ_PAST and self._stream.seekable():
            self._stream.seek(size - 1, 1)
            left = 1
        while left and (got := len(self._stream.read(min(left, 1 << 20)))):
            left -= got
        if left:
            raise _cut_member(name, size, start)
        self._stream.read(-size & 511)
        self._here += size + (-size & 511)

    def _at_end(self, rest: bytes, offset: int) -> None:
        """The stream has ended with fewer bytes than a header."""
        if self._extra is not None:
            raise _Damage("is cut behind an extended header, before its member. Write or fetch it again", offset, cut=True)
        if offset == 0 and not rest:
            raise _Damage("is empty (0 bytes), not even an archive without members. Write or fetch it again", 0, cut=True)
        if rest.strip(b"\0"):
            if offset == 0 and b"\0" not in rest:  # a name is followed by NUL
                raise _Damage(_no_tar(rest), 0, cut=True, lost=True)
            raise _Damage(f"is cut inside a header: {len(rest)} of {BLOCK} bytes are there. Write or fetch it again", offset, cut=True)
        if not getattr(getattr(self._stream, "raw", None), "end_is_vouched_for", True):
            what = "ends without an end-of-archive mark, and its server told neither its length nor its end: it may have been cut there"
            raise _Damage(f"{what}. Write it with that mark, or have the server send Content-Length", offset, cut=True)
        if self._on_truncated != "ignore":
            warnings.warn(f"shard {redact(self.url)} has no end-of-archive mark at byte {offset}: it may have been cut there.", ShardWarning, stacklevel=2)

    def _after_mark(self, offset: int) -> bytes | None:
        """Behind an end-of-archive mark at ``offset``: the header of an archive that follows, or None."""
        if self._extra is not None:
            raise _Damage("ends behind an extended header, before its member. Write or fetch it again", offset, cut=True)
        while (head := self._stream.read(BLOCK)) == _ZEROS:
            self._here += BLOCK
        end = self._here
        while len(head) == BLOCK and not _is_header(head):
            head = self._stream.read(BLOCK)
            self._here += BLOCK
        if len(head) == BLOCK:
            if self._here == offset + BLOCK:
                raise _Damage("has a lone block of zeros where a header is missing. Write or fetch it again", offset, head=head)
            if self._here > end:
                what = f"has a hole: what looks like its end is not, for members come again at byte {self._here}. Write or fetch it again"
                raise _Damage(what, offset, head=head)
            self.offset = self._here
            return head
        if self._here > end or head:
            warnings.warn(f"shard {redact(self.url)} has bytes after its end, from byte {end} on: they are ignored.", ShardWarning, stacklevel=2)
        return None

    def _report(self, found: _Damage) -> TarMember:
        """Raise or count what was found, by the caller's choice; the gap to give if the walk goes on."""
        self._extra = None
        error = ShardError(f"shard {redact(self.url)}, byte {found.offset}: it {found.what}.", url=redact(self.url), offset=found.offset)
        if found.cut and not found.lost and self._on_truncated != "raise":
            if self._on_truncated == "warn":
                warnings.warn(str(error), ShardWarning, stacklevel=3)
        elif self._on_error is None:
            raise error from found.cause
        else:
            error.__cause__ = found.cause
            self._on_error(error)
        return TarMember(self.url, "", None, self.offset)

    def _go_on(self, found: _Damage) -> bytes | None:
        """The next valid header behind damage, or None at the end."""
        if found.head is not None:
            self.offset = self._here
            return found.head
        try:
            if found.passed is not None:
                self._pass_over(found.passed, "that is too large", found.offset)
            while len(head := self._stream.read(BLOCK)) == BLOCK:
                self.offset = self._here
                if found.passed is not None or _is_header(head):
                    return head
                self._here += BLOCK
        except unreadable() as error:
            logger.warning("shard %s, byte %d: it cannot be read on: %s: %s.", redact(self.url), self._here, type(error).__name__, error)
        except _Damage as cut:
            logger.warning("shard %s, byte %d: it %s.", redact(self.url), cut.offset, cut.what)
        return None


class _Damage(Exception):  # noqa: N818 - it becomes a ShardError
    """Something is wrong at ``offset``; ``what`` continues a sentence about the shard.

    ``cut``: nothing can be read behind it, since the stream was cut or, if ``lost``, broke. Otherwise the walk can go on at ``head``, a header that was read
    already, or behind the ``passed`` bytes of a member, or at the next valid header.
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
    ) -> None:
        super().__init__(what)
        self.what, self.offset, self.cause, self.cut, self.lost, self.head, self.passed = what, offset, cause, cut, lost, head, passed


def _cut_member(name: str, size: int, offset: int) -> _Damage:
    return _Damage(f"is cut inside member {name!r} of {size} bytes. Write or fetch it again", offset, cut=True)


class _Header(NamedTuple):
    """What a header block says by itself."""

    name: bytes
    kind: int
    size: int


def _parse(head: bytes, offset: int) -> _Header:
    """A header block, checked."""
    if not _is_header(head):
        raise _Damage(_no_tar(head) if offset == 0 else "has no valid header here: the checksum does not fit. Write or fetch it again", offset)
    name = head[:100].partition(b"\0")[0]
    prefix = head[345:500].partition(b"\0")[0]
    if prefix and head[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    size = _number(head[124:136])
    if size is None or size > MAX_SIZE:
        raise _Damage("has a header with an unreadable size. Write or fetch it again", offset)
    return _Header(name, head[156], size)


def _is_header(head: bytes) -> bool:
    """Whether the checksum of a block fits; of unsigned bytes or, as some old programs wrote it, of signed ones."""
    stored = _number(head[148:156])
    unsigned = sum(head) - sum(head[148:156]) + 256
    if stored == unsigned:
        return True
    return stored is not None and stored == unsigned - 256 * sum(byte > 127 for byte in head[:148] + head[156:])


def _number(text: bytes) -> int | None:
    """A number field: octal digits, or base 256 where the first bit is set (GNU); None if it is neither or negative."""
    if text[0] == 0x80:
        return int.from_bytes(text[1:], "big")
    digits = text.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def _no_tar(head: bytes) -> str:
    """What a stream that starts with ``head`` may be instead of a tar."""
    start = head.lstrip()[:64].lower()
    if start.startswith(b"<"):
        guess = "it looks like a web page or an error answer of a server; check the URL and the credentials"
    elif start.startswith(b"pk\3\4"):
        guess = "it looks like a zip file, so check the URL"
    elif start.startswith((b"{", b"version https://git-lfs")):
        guess = "it looks like a text file, perhaps a pointer to the data; check how it was fetched"
    else:
        guess = "check the URL, and that it is one"
    return f"is not a tar: its first bytes are {head[:24]!r}; {guess}"


@dataclass(slots=True)
class _Sparse:
    """The map of a sparse member: (offset, count) of the pieces that are stored, in a file of ``size`` bytes. ``inline``: the map starts the data."""

    size: int
    pieces: list[tuple[int, int]]
    inline: bool = False

    @classmethod
    def old_gnu(cls, head: bytes, take: Callable[[int, str, int], bytes], start: int) -> _Sparse:
        """From an old GNU sparse header at ``start`` and the blocks behind it."""
        size = _number(head[483:495])
        pieces = _pieces(head[386:482])
        extended, taken = head[482], 0
        while extended:
            block = take(BLOCK, "a sparse map", start)
            pieces += _pieces(block[:504])
            extended, taken = block[504], taken + BLOCK
            if taken > MAX_HEADER_BYTES:
                raise _Damage(f"has a sparse map of more than {MAX_HEADER_BYTES} bytes. Write or fetch it again", start)
        return cls(size or 0, pieces)

    def expand(self, data: bytes, offset: int) -> bytes:
        """The file that the stored pieces make."""
        try:
            pieces = self.pieces
            if self.inline:
                count, _, rest = data.partition(b"\n")
                *numbers, _ = rest.split(b"\n", 2 * int(count))
                if len(numbers) != 2 * int(count):
                    raise ValueError("it is shorter than it says")
                pieces = list(zip(map(int, numbers[::2]), map(int, numbers[1::2]), strict=True))
                length = len(count) + 1 + sum(len(number) + 1 for number in numbers)
                data = data[length + (-length & 511) :]
            whole, taken = bytearray(self.size), 0
            for place, count_ in pieces:
                if place < 0 or count_ < 0 or place + count_ > self.size or taken + count_ > len(data):
                    raise ValueError("a piece lies outside of the file")
                whole[place : place + count_] = data[taken : taken + count_]
                taken += count_
        except (ValueError, OverflowError) as error:
            raise _Damage(f"has a sparse member whose map does not fit ({error}). Write or fetch it again", offset, error) from error
        return bytes(whole)


def _pieces(block: bytes) -> list[tuple[int, int]]:
    """The entries of an old GNU sparse map; an empty one ends it."""
    pieces = []
    for place in range(0, len(block), 24):
        start, count = _number(block[place : place + 12]), _number(block[place + 12 : place + 24])
        if start is None or count is None or not block[place]:
            break
        pieces.append((start, count))
    return pieces


@dataclass(slots=True)
class _Extra:
    """What extended headers, the first of them at ``start`` and of ``size`` bytes together, said of the member behind them."""

    start: int
    size: int = 0
    long_name: bytes | None = None
    pax: dict[bytes, bytes] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    def read_pax(self, content: bytes, offset: int) -> None:
        """Take in the records of a pax header: length, space, key, equals sign, value, newline."""
        content, place = content.rstrip(b"\0"), 0
        while place < len(content):
            space = content.find(b" ", place, place + 8)
            digits = content[place : max(space, place)]
            end = place + int(digits) if digits.isdigit() else place
            key, equals, value = content[space + 1 : end].partition(b"=")
            if end <= place or not equals or value[-1:] != b"\n" or end > len(content):
                raise _Damage("has a pax header that cannot be read. Write or fetch it again", offset)
            if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
                self.pieces.append(value[:-1])
            self.pax[key] = value[:-1]
            place = end

    def apply(self, header: _Header, offset: int) -> tuple[bytes, int]:
        """Name and stored size of the member with ``header``."""
        name = self.pax.get(b"GNU.sparse.name") or self.pax.get(b"path") or self.long_name or header.name
        return name, self._integer(b"size", header.size, offset)

    def sparse(self) -> _Sparse | None:
        """The sparse map of pax formats 0.0, 0.1 and 1.0; None for a plain member."""
        major = self.pax.get(b"GNU.sparse.major", b"0")
        if major == b"1":
            return _Sparse(self._integer(b"GNU.sparse.realsize", 0, self.start), [], inline=True)
        if major == b"0" and b"GNU.sparse.size" not in self.pax:
            return None
        numbers = self.pax[b"GNU.sparse.map"].split(b",") if b"GNU.sparse.map" in self.pax else self.pieces
        if major != b"0" or len(numbers) % 2 or not all(number.isdigit() and len(number) < 20 for number in numbers):
            raise _Damage("has a sparse map that cannot be read. Write or fetch it again", self.start)
        size = self._integer(b"GNU.sparse.size", 0, self.start)
        return _Sparse(size, list(zip(map(int, numbers[::2]), map(int, numbers[1::2]), strict=True)))

    def _integer(self, key: bytes, default: int, offset: int) -> int:
        text = self.pax.get(key)
        if not text:
            return default
        if not text.isdigit() or len(text) > 18:
            raise _Damage(f"has a pax header with {key.decode()}={text[:40]!r}. Write or fetch it again", offset)
        return int(text)
