"""LoadTar: read the members of the tars in open shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.core.lane import LaneFacts
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.stage import END, Mark, OpensAnywhere, SamplePlace, Stage
from wds_pipes.core.state import read_count
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.compression import KINDS, unreadable
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import hide, redact
from wds_pipes.stages.open_shards import OpenedShard
from wds_pipes.stages.shard_source import ShardRef, ShardUrl, check_enough
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.index import stale_offset
from wds_pipes.tar.reader import TarMember, TarReader


class OpenTar(NamedTuple):
    """A tar that is read.

    Attributes:
        ref: the shard.
        members: its members from the position on; None: this is the shard of the state that was
            loaded, and was skipped since it cannot be opened.
        resumed: whether reading begins at the member of a state.
        part: the byte where the requested part of the shard begins, if what is before it is not
            read, otherwise 0.
        offset: the byte where reading begins.
    """

    ref: ShardRef
    members: Iterator[TarMember] | None
    resumed: bool = False
    part: int = 0
    offset: int = 0


class LoadTar(OpensAnywhere, Tolerant[TarMember]):
    """Read the regular files in the tars of open shards (functional name: ``load_tar``).

    Yields a ``TarMember(url, name, data, offset)`` for each file, with ``data`` as bytes. Reads
    ustar, v7, GNU and pax archives. Shards compressed as a whole (gz, bz2, xz, zst) are recognized
    by content. The checksum of every header is checked, and a truncated shard never passes for a
    whole one. The extended headers of a member (its name and attributes) may take at most 1 MiB.
    For ``max_member_bytes``, the size of a sparse member is the sum of its stored and its real
    size. Links have no data: they are skipped, and the first one of a shard is a ShardWarning.

    A shard ends with two blocks of zeros, its end-of-archive mark, and then zeros of any length (up
    to 256 MiB). Without the mark it is cut. Data after the zeros is damage, unless
    ``concatenated``.

    Args:
        source: a pipe of open shards: ``open_shards()``.
        max_member_bytes: refuse a larger member before memory is allocated for it.
        on_truncated: what to do with a shard that is cut inside a header or a member, or before its
            end-of-archive mark: ``"raise"``, ``"warn"`` (ShardWarning) or ``"ignore"``. The cut
            member is not yielded, and ``group_by_key`` drops the last sample, which may be
            incomplete.
        on_error: what to do at a damaged place: ``"raise"``, or ``"skip"`` to count it, search for
            the next valid header and continue there; None: as ``ShardList(on_error=...)`` says. A
            place where members were lost is yielded as a member with an empty name, so that
            ``group_by_key`` drops the samples next to it, which may be incomplete. If the header of
            a member that is itself a tar is damaged, its members follow.
        max_errors: with ``"skip"``, how many damaged places an epoch may have; None: no limit.
        concatenated: shards may be several archives, one after another, with any number of zeros
            between them and at the end: joined by ``cat`` or ``tar -A``, or ``.tar.gz`` parts.
            Then zeros in the middle of a shard are taken for the end of an archive. If they are
            damage, a sample may lack members.

    Raises:
        ShardError: during iteration, with ``.url`` and ``.offset``: the shard is not a tar, a
            checksum is wrong, a member is too large, the shard is cut short, or it cannot be read.

    Checkpoint: the byte where the headers of the next member start, and the compression. A resume
    seeks to this byte. So it reads nothing again in an uncompressed shard that can seek; a
    compressed shard is decompressed from its start.
    """

    @dataclass(slots=True)
    class At:
        offset: int = 0
        compression: str = ""
        damaged: int = 0

    keeps_count = True
    scope = "window"
    _foreseen = True
    gives = "members"
    error_kind = ShardError
    counter = "damaged"
    tallies = ("damaged",)

    @property
    def may_lose(self) -> bool:
        return self.on_truncated != "raise" or super().may_lose

    def at_sample(self, at: Any, place: SamplePlace) -> Any:
        return self.At(offset=place.offset, damaged=at.damaged)

    def problem(self, at: Any) -> str | None:
        if at.offset % BLOCK:
            return f"the headers of a tar start at multiples of {BLOCK} bytes"
        if at.offset > MAX_SIZE:
            return "no tar is so large"
        return f"the compressions are {', '.join(KINDS)}" if at.compression not in ("", *KINDS) else None

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        offset = read_count(entry.get("offset", 0), repr("offset"))
        return f"byte {offset:,}" if offset or lane.url is not None else None

    def __init__(
        self,
        source: Stage[Any],
        *,
        max_member_bytes: int = 4 << 30,
        on_truncated: str = "raise",
        on_error: OnError | None = None,
        max_errors: int | None = None,
        concatenated: bool = False,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        self.max_member_bytes = check_count("max_member_bytes", max_member_bytes)
        self.on_truncated = check_choice("on_truncated", on_truncated, "raise", "warn", "ignore")
        self.concatenated = bool(concatenated)
        self._reader: TarReader | None = None
        self._shard: OpenedShard | None = None  # while running, the shard that is being read
        self._before: Mark | None = None  # while running, the position of the source to resume at
        self.bytes_read = 0  # while running, of the shards that were read to their end
        self._began = 0  # while running, the byte of the shard where reading started
        # while running, where the part of this shard begins, if what is before it is not read
        self._part = 0

    def run(self) -> Iterator[TarMember]:
        for tar in self.tars():
            members = tar.members
            if members is None:  # a position of group_by_key is not one in the next shard
                yield TarMember(ShardUrl.of(tar.ref), "", None, MAX_SIZE)
                continue
            first = next(members, None)
            if first is not None:
                yield first
                yield from members
            elif not tar.resumed:
                check_enough(tar.ref, 0)

    def tars(self, want: Callable[[str], bool] | None = None, *, named: bool = True) -> Generator[OpenTar]:
        """Yield the tars of a running stage, each with a reader of its members after the position.
        The position moves with the reader.

        ``run`` reads these, or, in place of the items of this stage, a ``group_by_key`` right after
        it, which saves the position of a member by ``mark_at``.

        Args:
            want: as in ``TarReader``.
            named: as in ``TarReader``; False: the URLs of members are plain, and a state stands
                before a member.
        """
        at, source = self.at, self.source
        while True:
            self._before = source.mark()
            shard = next(source.items, END)
            if shard is END:
                self._before = None
                return
            if not isinstance(shard, OpenedShard):
                raise TypeError(
                    f"load_tar() takes open shards, and its source gave {hide(repr(shard)):.200}: "
                    "put .open_shards() before it"
                )
            resumed = at.offset > 0
            self._part = 0 if resumed else shard.ref.begin or 0
            try:
                stream = self._begin(shard)
                if stream is not None:
                    self._began, self._shard = at.offset or self._part, shard
                    self._reader = TarReader(
                        stream,
                        url=ShardUrl.of(shard.ref) if named else shard.url,
                        offset=self._began,
                        want=want,
                        max_member_bytes=self.max_member_bytes,
                        on_truncated=self.on_truncated,
                        on_error=self._damaged,
                        concatenated=self.concatenated,
                        on_end=shard.check_same,
                        named=named,
                    )
                    members = iter(self._reader)
                    if resumed and not named:
                        first = next(members, None)
                        if first is None or (not first[1] and self._reader.ended):
                            raise self.no_member("it ends there")
                        members = chain([first], members)
                    yield OpenTar(shard.ref, members, resumed, self._part, self._began)
            finally:
                shard.close()
            self.bytes_read = self.bytes_so_far
            self._reader, self._shard, at.offset, at.compression = None, None, 0, ""
            if resumed and stream is None:
                self._before = source.mark()
                yield OpenTar(shard.ref, None, resumed=True)

    def _begin(self, shard: OpenedShard) -> BinaryIO | None:
        """Return the tar in a shard, at the position; None: it cannot be opened, and is skipped."""
        url = redact(shard.url)
        try:
            stream, self.at.compression = self._open(shard)
            return stream
        except ShardError as error:
            shard.refuse(error)
        except ModuleNotFoundError as error:
            # a missing package is not the fault of the shard, so this is never skipped
            raise ShardError(f"shard {url} cannot be read: {error}", url=url) from error
        except unreadable() as error:
            broken = ShardError(
                f"shard {url} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.",
                url=url,
                offset=self.at.offset,
            )
            shard.doubt(broken)
            self.skip(broken)
        return None

    def _open(self, shard: OpenedShard) -> tuple[BinaryIO, str]:
        """Return the tar in a shard as a stream at the position or the beginning of its part, and
        its compression.
        """
        offset, part = self.at.offset, self._part
        if not part:
            return shard.tar(offset, self.at.compression if offset else None)
        try:
            stream, compression = shard.tar(part, "" if is_remote(shard.url) else None)
        except StateError as error:  # it ends before
            raise stale_offset(shard.url, part) from error
        if compression:
            raise stale_offset(shard.url, part)
        return stream, compression

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        super().start(0 if self.at.compression else self.at.offset, ahead=ahead)

    @property
    def bytes_so_far(self) -> int:
        """How many bytes of (decompressed) tars were read since the stage was started."""
        return self.bytes_read + (self._reader.offset - self._began if self._reader is not None else 0)

    def check_same(self) -> None:
        """Raise ShardError if the shard that is read is a local file that was changed meanwhile."""
        if self._shard is not None:
            self._shard.check_same()

    def _damaged(self, error: ShardError) -> None:
        self.check_same()
        self._shard.doubt(error)  # type: ignore[union-attr]
        offset = getattr(error, "offset", None)
        skips = self.skips(error)
        if offset == self._part > 0 and error.__cause__ is None:
            raise stale_offset(self._shard.url, self._part) from error  # type: ignore[union-attr]
        if not skips and offset == self._began > 0 and error.__cause__ is None:
            # If the shard were unchanged, this header would have been valid when the state was
            # saved.
            raise self.no_member(str(error))
        if not skips:
            raise error
        self.count_skip(error)

    def no_member(self, why: str) -> StateError:
        """Return the error for a state at a byte of this shard where no member starts."""
        return StateError(
            f"the state stands at byte {self._began} of shard {redact(self._shard.url)}, and no member starts "  # type: ignore[union-attr]
            f"there: the shard was changed or damaged since, or the state or the index of offsets is damaged. ({why})"
        )

    def mark(self) -> Mark:
        at, reader = self.at, self._reader
        if reader is not None and reader.ended:
            return (0, "", at.damaged), self.source.mark()
        return (
            at.offset if reader is None or reader.offset == self._part else reader.offset,
            at.compression,
            at.damaged,
        ), self._before or self.source.mark()

    def mark_at(self, offset: int) -> Mark:
        """Return the position before the member at ``offset``, which was read last."""
        at = self.at
        if self._part and offset == self._part:  # the beginning of this part, as it is also read without an index
            return (0, "", at.damaged), self._before
        return (offset, at.compression, at.damaged), self._before
