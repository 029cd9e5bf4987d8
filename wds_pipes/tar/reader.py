"""Read the members of a tar stream and its links, without tarfile, in large reads.

The formats are those of POSIX pax (IEEE Std 1003.1, "pax Interchange Format") and of GNU tar
("Basic Tar Format" and "Storing Sparse Files" in its manual).

Rules:
1. A header is trusted only if its checksum is right, and its size only if it is within
   ``max_member_bytes``.
2. The common header (regular file, short name, plain size) is parsed by ``plain_header``;
   everything rare in ``_rare``, ``TarSource`` and ``find_next``.
3. A place where members were lost (skipped damage, a cut) is yielded as a gap: a member without a
   name, so that the caller does not take half a sample for a whole one.
4. A tar ends with an end mark, two blocks of zeros, and any number of zeros after it: ``tar -b``
   writes records of any size. Without the mark it is cut. More than 256 MiB of zeros are an error,
   since a server may send zeros for ever.
5. Data after the zeros is damage, unless ``concatenated``: then archives are read one after
   another, whatever their padding.
6. After damage, reading continues at the next valid header: the size in a damaged one may be wrong,
   and is not used to pass over anything. A file whose real name may have been in a damaged extended
   header is passed over.
7. ``offset`` is always a place where reading can be resumed: the first header block of the next
   member.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.errors import DamagedShardError, SampleError, ShardError, ShardWarning, mended
from wds_pipes.io.compression import LargeWindowError, TrailingBytesError, damage, unreadable
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import (
    BLOCK,
    END_MARK,
    LINKS,
    MAX_HEADER_BYTES,
    NO_DATA,
    REGULAR,
    ZEROS,
    Damage,
    Extra,
    Sparse,
    compression_of,
    cut_member,
    is_header,
    no_tar,
    parse_header,
    plain_header,
)

_READ_PAST = 1 << 16  # up to this many bytes are skipped by reading, more by seeking
_MOST_ZEROS = 1 << 28  # between and after archives: a server may send zeros for ever
_JOINED: dict[str, Any] = {
    "mend": "If archives were joined, pass load_tar(concatenated=True). Otherwise, write or fetch it again.",
    "mend_cli": "If archives were joined, pass --concatenated to wds-pipes repair. Otherwise, write or fetch it again.",
}
_NAME = 100  # bytes of the name in a header
LEAST_SEARCHED = 1 << 28  # bytes that are searched for a header, or those of the largest member if that is more

logger = logging.getLogger("wds_pipes")


class TarSource:
    """A tar stream and its position.

    The reader of common members calls ``stream.read`` itself, which saves a call for each member.
    So ``position`` is right only on the rare paths, which begin by setting it.

    Args:
        stream: a binary stream whose ``read(n)`` returns n bytes, fewer only at its end.
        position: where it stands, in bytes from the start of the tar.
    """

    def __init__(self, stream: BinaryIO, position: int) -> None:
        self.stream = stream
        self.position = position

    def take(self, count: int, what: str, start: int) -> bytes:
        """Read the next ``count`` bytes; if there are fewer, Damage: ``what`` at ``start`` is
        cut.
        """
        data = self.stream.read(count)
        if len(data) != count:
            raise Damage(
                f"is cut inside {what}: {len(data)} of {count} bytes are there. Write or fetch it again",
                start,
                cut=True,
                data=start + BLOCK,
            )
        self.position += count
        return data

    def pass_over(self, size: int, name: str, start: int) -> None:
        """Skip the data of the member at ``start``, by seeking if that saves time."""
        left = size
        if size > _READ_PAST and self.stream.seekable():
            self.stream.seek(size - 1, 1)
            left = 1
        while left and (got := len(self.stream.read(min(left, 1 << 20)))):
            left -= got
        if left or len(self.stream.read(-size & 511)) != -size & 511:
            raise cut_member(name, size, start)
        self.position += size + (-size & 511)


def next_archive(
    source: TarSource, head: bytes, offset: int, extra: Extra | None, url: str, *, joined: bool
) -> bytes | None:
    """Examine what stands in place of a header. Bytes after the end of compressed data are a
    ShardWarning if the tar has ended before them, as ``tarfile`` reads it.

    Args:
        source: the stream, after ``head``.
        head: fewer bytes than a block, or zeros.
        offset: where it starts.
        extra: the extended headers before it, whose member is missing.
        url: the shard.
        joined: another archive may follow the end of one.

    Returns:
        The header of the next archive, which starts at the position of ``source``; None: the tar
        ends properly.
    """
    if extra is not None:
        how = "is cut" if len(head) < BLOCK else "ends"
        raise Damage(f"{how} after an extended header, before its member. Write or fetch it again", offset, cut=True)
    if len(head) < BLOCK:
        raise _cut(head, offset)
    while (head := _read_after(source, offset, url, joined=joined)) == ZEROS:
        source.position += BLOCK
        if source.position - offset > _MOST_ZEROS:
            what = f"has more than {_MOST_ZEROS} bytes of zeros, so its end was never filled, or a part of it is lost"
            raise Damage(what, offset, cut=joined, zeros=True, **_JOINED)
    zeros = source.position - offset
    if not head.strip(b"\0"):
        if zeros < len(END_MARK) or head:  # a tar has whole blocks
            raise Damage("is cut inside the zeros at its end. Write or fetch it again", offset, cut=True)
        return None
    following, at = head if len(head) == BLOCK and is_header(head) else None, source.position
    if following is None:
        source.position += len(head)
    if zeros < len(END_MARK):
        what = "has a lone block of zeros where a header is missing. Write or fetch it again"
        raise Damage(what, offset, head=following, zeros=True)
    if joined and following is not None:
        return following
    what = f"has data after its end-of-archive mark, at byte {at}, so a part of it may be lost"
    raise Damage(what, offset, head=following, zeros=True, joined=following is not None, **_JOINED)


def _read_after(source: TarSource, offset: int, url: str, *, joined: bool) -> bytes:
    """Read the block after one of zeros; none at the end. The zeros begin at ``offset``."""
    try:
        return source.stream.read(BLOCK)
    except TrailingBytesError as error:
        if joined or source.position - offset < len(END_MARK):
            raise
        what = f"shard {redact(url)} has ended, and {error}: they are not read"
        warnings.warn(mended(ShardWarning, what, mend="Write or fetch it again."), stacklevel=4)
        return b""


def _cut(rest: bytes, offset: int) -> Damage:
    """The damage of a stream that ends at ``offset`` with less than a header."""
    if offset == 0 and not rest:
        return Damage("is empty (0 bytes), not even an archive without members. Write or fetch it again", 0, cut=True)
    if not rest.strip(b"\0"):
        what = "is cut: it has no end-of-archive mark, and its last sample may be incomplete"
        return Damage(f"{what}. Write or fetch it again", offset, cut=True)
    if offset == 0 and (b"\0" not in rest or compression_of(rest)):  # in a header, a NUL follows the name
        return Damage(no_tar(rest), 0, cut=True, lost=True)
    what = f"is cut inside a header: {len(rest)} of {BLOCK} bytes are there"
    return Damage(f"{what}. Write or fetch it again", offset, cut=True)


def damage_of(error: Exception, offset: int) -> Damage:
    """The damage that an error of the stream means, after which it cannot be read."""
    if isinstance(error, EOFError):
        what = f"is cut short inside its compressed data ({error}). Write or fetch it again"
        return Damage(what, offset, error, cut=True)
    if isinstance(error, LargeWindowError):
        return Damage(f"cannot be decompressed: {error}", offset, error, cut=True, lost=True)
    if isinstance(error, (TrailingBytesError, *damage())):
        what = f"has damaged compressed data ({error}). Write or fetch it again"
    else:
        what = f"cannot be read on ({type(error).__name__}: {error}). Check that it can be reached and is whole"
    return Damage(what, offset, error, cut=True, lost=True)


def find_next(source: TarSource, found: Damage, offset: int, url: str, most: int) -> tuple[bytes | None, int]:
    """The next valid header after damage, or None at the end.

    Rule 6 of ``tar.reader``. A file whose real name may have been in a damaged extended header is
    passed over: its own header has another name, as of another sample. At most ``most`` bytes are
    searched, since a server may never end its response.

    Returns:
        The header, or what comes after such a file; and where it starts, or if there is none, how
        far blocks could be read (``offset``: not at all).
    """
    head = found.head
    try:
        if found.passed is not None:
            source.pass_over(found.passed, "that is too large", found.offset)
            head = source.stream.read(BLOCK)
            if len(head) < BLOCK:
                return None, offset
        most += source.position
        while head is None and source.position < most and len(block := source.stream.read(BLOCK)) == BLOCK:
            offset = source.position
            if is_header(block):
                head = block
            else:
                source.position += BLOCK
        if head is not None:
            offset = source.position
        while head is not None and not found.whole and _may_have_another_name(head):
            _, _, size = parse_header(head, offset)
            source.position = offset + BLOCK
            source.pass_over(size, "after damage", offset)
            offset = source.position
            head = source.stream.read(BLOCK) or None
    except ShardError:
        raise
    except unreadable() as error:
        what = f"{type(error).__name__}: {error}"
        logger.warning("shard %s, byte %d: it cannot be read on: %s.", redact(url), source.position, what)
        return None, offset
    except Damage as cut:
        logger.warning("shard %s, byte %d: it %s.", redact(url), cut.offset, cut.what)
        return None, offset
    return head, offset


def _may_have_another_name(head: bytes) -> bool:
    """Whether the name in the header of a file is one that stands for a name in an extended header:
    cut to its 100 bytes, or with question marks for what is not ASCII.
    """
    name, nul, _ = head[:_NAME].partition(b"\0")
    return len(head) == BLOCK and is_header(head) and head[156] in b"0\0S7" and (not nul or b"?" in name)


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


class TarReader:
    """Iterates over the regular files of a tar stream, in order, as TarMembers.

    Reads ustar, v7, GNU (long names, sizes above 8 GiB) and pax archives, sparse and contiguous
    members. Directories and devices are skipped, and so are links, the first of which is a
    ShardWarning. A place where members were lost is yielded as a member with an empty name.

    A tar ends with two blocks of zeros, and then zeros of any length. Without them it is cut. Data
    after them is damage, unless ``concatenated``.

    Limits: the extended headers of a member (name, attributes) may have at most 1 MiB, and so may
    the map of a sparse member. The size of a sparse member is its stored size plus its real size.

    Args:
        stream: a binary stream whose ``read(n)`` returns n bytes, fewer only at its end.
        url: the name of the stream in messages.
        offset: the position of the stream, in bytes from the start of the tar; a multiple of 512,
            where a header starts.
        want: decides by name whether the data of a member is read; other data is skipped, and is
            None.
        max_member_bytes: refuse a larger member before allocating memory for it.
        on_truncated: for a stream that is cut inside a header or a member, or before its
            end-of-archive mark: ``"raise"``, ``"warn"`` or ``"ignore"``. The cut member is never
            yielded.
        on_error: called with each ShardError; if it returns, reading continues at the next valid
            header. By default the error is raised.
        concatenated: read archives one after another (``cat``, ``tar -A``), whatever number of
            zeros is between them.
        on_link: called with each link, instead of the warning.
        on_end: called when the tar has ended properly, before the iteration ends; it may raise.
        named: yield TarMembers; otherwise plain tuples of the same four values, which saves a sixth
            of the time for tiny members.

    Raises:
        ShardError: from the iteration: not a tar, a wrong checksum, a member too large, a stream
            cut short, a read error.

    Attributes:
        offset: where to continue: a new reader of a stream at this position yields the members that
            this reader has not yielded.
        ended: whether no more can be read: the stream has ended, was cut or failed.
        damage: the damage that was met last; None: there was none, or the stream has its end mark.
        skipped: of the last member whose data was skipped: where its last header is, its stored
            size, and whether these stored bytes are its data (those of a sparse member are not).
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
        concatenated: bool = False,
        on_link: Callable[[Link], None] | None = None,
        on_end: Callable[[], None] | None = None,
        named: bool = True,
    ) -> None:
        self.url = url
        self.offset = offset
        self._source = TarSource(stream, offset)
        self._want = want
        self._max = max_member_bytes
        self._on_truncated = on_truncated
        self._on_error = on_error
        self._concatenated = concatenated
        self._on_link = on_link
        self._on_end = on_end
        self._named = named
        self.ended = False
        self.damage: Damage | None = None
        self.skipped = (0, 0, True)
        self._extra: Extra | None = None

    def __iter__(self) -> Iterator[TarMember]:
        """Yield the members; see the class."""
        # One function, since a call for each member would cost much of its time. Its steps:
        # 1. Parse a common header, and yield its member.
        # 2. Otherwise, the rare path: an end (``next_archive``) or an uncommon header (``_rare``).
        # 3. After damage: report it, find the next header, yield a gap, and start again.
        source = self._source
        read, pass_over, url, want, limit, named = (
            source.stream.read,
            source.pass_over,
            self.url,
            self._want,
            self._max,
            self._named,
        )
        new = tuple.__new__
        head: bytes | None = None
        while True:
            try:
                offset, extended = self.offset, False
                head = head or read(BLOCK)
                while True:
                    plain = None if extended else plain_header(head)
                    if plain is not None and plain[1] <= limit:
                        name, size = plain
                        padding = -size & 511
                        if want is None or want(name):
                            data: bytes | None = read(size)
                            if len(data) != size:  # type: ignore[arg-type]
                                raise cut_member(name, size, offset)
                            if padding and len(read(padding)) != padding:
                                raise cut_member(name, size, offset)
                        else:
                            data = None
                            pass_over(size, name, offset)
                            self.skipped = (offset, size, True)
                        member = (url, name, data, offset)
                        self.offset = offset = offset + BLOCK + size + padding
                        yield new(TarMember, member) if named else member  # type: ignore[misc]
                    else:
                        source.position = offset + len(head)
                        if len(head) < BLOCK or head == ZEROS:
                            head = next_archive(source, head, offset, self._extra, url, joined=self._concatenated)
                            if head is None:
                                if self._on_end is not None:
                                    self._on_end()
                                self.ended, self.damage = True, None
                                return
                            self.offset = offset = source.position
                            continue
                        rare = self._rare(head, offset)
                        offset, extended = source.position, self._extra is not None
                        if not extended:
                            self.offset = offset
                        if rare is not None:
                            yield rare
                    head = read(BLOCK)
            except Damage as damaged:
                found = damaged
            except ShardError:
                raise
            except unreadable() as error:
                found = damage_of(error, self.offset)
            place, head, self.damage = self.offset, None, found
            self._report(found)
            if not found.cut:
                head, self.offset = find_next(source, found, self.offset, url, max(limit, LEAST_SEARCHED))
                read = source.stream.read
            self.ended = head is None
            yield TarMember(url, "", None, place)
            if head is None:
                return

    def _rare(self, head: bytes, start: int) -> TarMember | None:
        """Handle an uncommon header: return its member, or None if it is not a regular file."""
        source = self._source
        name, kind, size = parse_header(head, start)
        if kind in b"xXgLK":
            extra = self._extra = self._extra or Extra(start)
            extra.size += size
            if extra.size > MAX_HEADER_BYTES:
                what = (
                    f"has extended headers of {extra.size} bytes, more than the "
                    f"{MAX_HEADER_BYTES} that a name and attributes may take"
                )
                raise Damage(f"{what}. Write or fetch it again, with shorter names", start, passed=size)
            padded = source.take(size + (-size & 511), "an extended header", start)
            content = padded[:size]
            if kind == 76 and b"\0" not in content and padded[size : size + 1] not in (b"", b"\0"):
                raise Damage("has a long name that is longer than its size. Write or fetch it again", start)
            self._extend(extra, kind, content, start)
            return None
        extra, self._extra = self._extra or Extra(start), None
        name, size = extra.apply(name, size, start)
        text = name.decode("utf-8", "surrogateescape")
        if kind == 77:  # M
            what = f"goes on with {text!r}, which begins in another volume (tar -M)"
            raise Damage(f"{what}. Pack the files again, in one volume", extra.start, passed=size, whole=True)
        if kind not in REGULAR and kind != 83:  # S: sparse
            if kind not in NO_DATA:
                source.pass_over(size, text, start)
            elif kind in LINKS and text:
                target = extra.target(head).decode("utf-8", "surrogateescape")
                self._report_link(Link(text, target, kind == 49, extra.start, start + BLOCK))
            return None
        if kind == 0 and text.endswith("/"):  # a directory of v7
            return None
        sparse = Sparse.old_gnu(head, source.take, start) if kind == 83 else extra.sparse()
        whole = size + sparse.size if sparse else size
        if whole > self._max:
            of = f"{sparse.size} bytes, of which {size} are stored" if sparse else f"{size} bytes"
            what = f"has a member {text!r} of {of}, more than max_member_bytes={self._max}"
            mend = "Raise that limit if the size is right."
            raise Damage(what, extra.start, passed=size, whole=True, mend=mend, mend_cli="")
        if not text or (self._want is not None and not self._want(text)):
            source.pass_over(size, text, start)
            self.skipped = (start, size, sparse is None and kind != 55)  # 7: contiguous
            return TarMember(self.url, text, None, extra.start) if text else None
        data = source.take(size, f"member {text!r}", start)
        source.take(-size & 511, f"member {text!r}", start)
        return TarMember(self.url, text, sparse.expand(data, start) if sparse else data, extra.start)

    def _extend(self, extra: Extra, kind: int, content: bytes, start: int) -> None:
        """Store the content of an extended header for the member after it."""
        if kind == 76:  # L: GNU long name
            extra.long_name = name = content.partition(b"\0")[0]
            if len(name) % BLOCK == 0 and (not name or len(name) + 1 < len(content)):
                raise Damage("has a long name that is cut by zeros. Write or fetch it again", start)
        elif kind == 75:  # K: GNU long name of the target of a link
            extra.long_target = content.partition(b"\0")[0]
        elif kind in b"xX":
            extra.read_pax(content, start)
        elif kind == 103:  # g: global
            said = Extra(start)
            said.read_pax(content, start)
            if any(key in (b"path", b"size") or key.startswith(b"GNU.sparse.") for key in said.pax):
                raise Damage(
                    "has a global pax header that names or sizes all its members, which makes no "
                    "sense. Write the shard again",
                    start,
                )
            if extra.start == start:
                self._extra = None

    def _report_link(self, link: Link) -> None:
        """Call ``on_link``; by default, it warns once."""
        if self._on_link is None:
            self._on_link = pass_link
            warnings.warn(link.describe(self.url), ShardWarning, stacklevel=4)
        else:
            self._on_link(link)

    def _report(self, found: Damage) -> None:
        """Raise or report damage, as the caller has chosen."""
        self._extra = None
        failed = found.lost and found.cause is not None  # the stream did, and not the tar
        error = (ShardError if failed else DamagedShardError)(
            f"shard {redact(self.url)}, byte {found.offset}: it {found.what}.",
            mend=found.mend,
            mend_cli=found.mend_cli,
            url=redact(self.url),
            offset=found.offset,
            joined=found.joined,
        )
        if found.cut and not found.lost and self._on_truncated != "raise":
            if self._on_truncated == "warn":
                warning = mended(ShardWarning, error.what, mend=error.mend, mend_cli=error.mend_cli)
                warnings.warn(warning, stacklevel=3)
            return
        if self._on_error is None:
            raise error from found.cause
        error.__cause__ = found.cause
        self._on_error(error)
