"""LoadTar: read the members of the tars in open shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO

from wds_pipes.core.lane import LaneFacts
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.running import END, Mark
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import read_count
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import ShardError, ShardWarning, StateError
from wds_pipes.io.compression import KINDS, unreadable
from wds_pipes.io.open import is_remote
from wds_pipes.io.secret import hide
from wds_pipes.io.urls import redact
from wds_pipes.stages.shard import Shard
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.members import EMPTY, GAP, Link, TarMember
from wds_pipes.tar.members import END as SHARD_END
from wds_pipes.tar.offsets import stale_offset
from wds_pipes.tar.reader import TarReader


class LoadTar(Tolerant[TarMember]):
    """Read the regular files in the tars of open shards (functional name: ``load_tar``).

    Yields a ``TarMember(url, name, data, offset)`` for each file, with ``data`` as bytes. Reads
    ustar, v7, GNU and pax archives. Shards compressed as a whole (gz, bz2, xz, zst) are recognized
    by content. The checksum of every header is checked, and a truncated shard never passes for a
    whole one. Further archives may follow in a shard, each at a multiple of 10 240 bytes. The
    extended headers of a member (its name and attributes) may take at most 1 MiB. For
    ``max_member_bytes``, the size of a sparse member is the sum of its stored and its real size.
    Links have no data: they are skipped, and the first one of a shard is a ShardWarning.

    Args:
        source: a pipe of open shards: ``open_shards()``.
        max_member_bytes: refuse a larger member before memory is allocated for it.
        on_truncated: what to do with a shard that is cut inside a header or a member: ``"raise"``,
            ``"warn"`` (ShardWarning) or ``"ignore"``. The cut member is not yielded, and
            ``group_by_key`` drops its sample. A shard that only lacks its end-of-archive mark is a
            ShardWarning here, and ``group_by_key`` yields its last sample only if it is like the
            samples before it. An archive usually ends with two blocks of zeros, or with zeros up to
            the next multiple of 10 240 bytes. Any other number of zeros at the end of a shard is a
            ShardWarning, since they may hide samples. More than 10 240 bytes of zeros after the
            usual end count as a cut, since the file may have been preallocated and never filled;
            this does not hold for zeros that fill one record of a power of two up to 1 MiB
            (``tar -b 2048``).
        on_error: what to do at a damaged place: ``"raise"``, or ``"skip"`` to count it, search for
            the next valid header and continue there. A place where members were lost is yielded as
            a member with an empty name, so that ``group_by_key`` drops the samples next to it,
            which may be incomplete. Unless the next header is where the size in a damaged one leads
            to, it may lie inside another member, such as a tar in the tar. ``group_by_key`` then
            drops every further sample of the shard that has a field which no sample before the
            damage had.
        max_errors: with ``"skip"``, how many damaged places an epoch may have; None: no limit.

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
    gives = "members"
    error_kind = ShardError
    counter = "damaged"
    tallies = ("damaged",)

    @property
    def may_lose(self) -> bool:
        return self.on_truncated != "raise" or super().may_lose

    def problem(self, at: Any) -> str | None:
        if at.offset % BLOCK:
            return f"the headers of a tar start at multiples of {BLOCK} bytes"
        if at.offset > MAX_SIZE:
            return "no tar is so large"
        return f"the compressions are {', '.join(KINDS)}" if at.compression not in ("", *KINDS) else None

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        offset = read_count(entry.get("offset", 0), "'offset'")
        return f"byte {offset:,}"

    def __init__(
        self,
        source: Stage[Any],
        *,
        max_member_bytes: int = 4 << 30,
        on_truncated: str = "raise",
        on_error: OnError = "raise",
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        self.max_member_bytes = check_count("max_member_bytes", max_member_bytes)
        self.on_truncated = check_choice("on_truncated", on_truncated, "raise", "warn", "ignore")
        # this and `named` are set by a group_by_key that reads from this stage
        self.want: Callable[[str], bool] | None = None
        self.named = True
        self.doubts = False  # set by a group_by_key anywhere after this stage
        self.on_link: Callable[[Link], None] | None = None  # as in TarReader; set by a subclass
        self.leave = False  # set by group_by_key when it has all requested samples of a shard
        self._reader: TarReader | None = None
        self._shard: Shard | None = None  # while running, the shard that is being read
        self._before: Mark | None = None  # while running, the position of the source to resume at
        self.bytes_read = 0  # while running, of the shards that were read to their end
        self._began = 0  # while running, the byte of the shard where reading started
        self._damage_at = -1  # while running, where the last damage of this shard begins
        # while running, where the part of this shard begins, if what is before it is not read
        self._part = 0

    def run(self) -> Iterator[TarMember]:
        at, source = self.at, self.source
        assert source is not None
        skipped: Shard | None = None  # the shard of a state, if it cannot be opened
        while True:
            self._before = source.mark()
            if skipped is not None:  # the position of group_by_key is not one in the next shard
                yield TarMember(skipped.url, "", GAP, MAX_SIZE)
            shard = next(source.items, END)
            if shard is END:
                self._before = None
                return
            if not isinstance(shard, Shard):
                raise TypeError(
                    f"load_tar() takes open shards, and its source gave {hide(repr(shard)):.200}: "
                    "put .open_shards() before it"
                )
            try:
                resumed = at.offset > 0
                skipped = shard if resumed and self.doubts else None
                self._part = 0 if resumed else shard.ref.begin or 0
                try:
                    stream, at.compression = self._open(shard)
                except ShardError as error:
                    shard.refuse(error)
                    at.offset, at.compression = 0, ""
                    continue
                self._began, self._shard, skipped = at.offset or self._part, shard, None
                self._reader = TarReader(
                    stream,
                    url=shard.url,
                    offset=self._began,
                    want=self.want,
                    max_member_bytes=self.max_member_bytes,
                    on_truncated=self.on_truncated,
                    on_error=self._damaged,
                    doubts=self.doubts,
                    on_link=self.on_link,
                    named=self.named,
                )
                members = iter(self._reader)
                if resumed and not self.named:  # group_by_key saves where a member begins
                    first = next(members, None)
                    if first is None or (not first[1] and first[2] == SHARD_END):
                        raise self._no_member("it ends there")
                    members = chain([first], members)
                if shard.ref.of is not None:
                    empty = not resumed
                    for member in members:
                        empty = False
                        yield member
                        if self.leave:
                            break
                    if empty and self.doubts:  # group_by_key knows how many samples there should be
                        yield TarMember(shard.url, "", EMPTY, 0)
                else:
                    yield from members
            except ModuleNotFoundError as error:
                # a missing package is not the fault of the shard, so this is never skipped
                raise ShardError(f"shard {redact(shard.url)} cannot be read: {error}", url=redact(shard.url)) from error
            except ShardError:
                raise
            except unreadable() as error:
                url = redact(shard.url)
                broken = ShardError(
                    f"shard {url} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.",
                    url=url,
                    offset=at.offset,
                )
                shard.doubt(broken)
                self.skip(broken)
            finally:
                shard.close()
            self.bytes_read = self.bytes_so_far
            self._reader, self._shard, self._damage_at, at.offset, at.compression = None, None, -1, 0, ""
            self.leave = False

    def _open(self, shard: Shard) -> tuple[BinaryIO, str]:
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

    def _damaged(self, error: ShardError) -> None:
        self._shard.doubt(error)  # type: ignore[union-attr]
        offset = getattr(error, "offset", None)
        skips = self.skips(error)
        if offset == self._part > 0 and error.__cause__ is None:
            raise stale_offset(self._shard.url, self._part) from error  # type: ignore[union-attr]
        if not skips and offset == self._began > 0 and error.__cause__ is None:
            # If the shard were unchanged, this header would have been valid when the state was
            # saved.
            raise self._no_member(str(error))
        if not skips:
            raise error
        self.count_skip(error)
        self._damage_at = self._reader.offset  # type: ignore[union-attr]

    def _no_member(self, why: str) -> StateError:
        """Return the error for a state at a byte of this shard where no member starts."""
        return StateError(
            f"the state stands at byte {self._began} of shard {redact(self._shard.url)}, and no member starts "  # type: ignore[union-attr]
            f"there: the shard was changed or damaged since, or the state or the index of offsets is damaged. ({why})"
        )

    def refuse(self, error: ShardError, *, cut: bool) -> None:
        """Raise, warn of or count the doubtful sample that ``group_by_key`` found; ``cut``: at the
        end of a shard.
        """
        if cut and self.on_truncated == "warn":
            warnings.warn(str(error), ShardWarning, stacklevel=2)
        elif not cut or self.on_truncated == "raise":
            self.skip(error)

    def mark(self) -> Mark:
        at, reader = self.at, self._reader
        assert self.source is not None
        if reader is not None and reader.ended:
            return (0, "", at.damaged), self.source.mark()
        return (
            at.offset if reader is None or reader.offset == self._part else reader.offset,
            at.compression,
            at.damaged,
        ), self._before or self.source.mark()

    def mark_at(self, offset: int) -> Mark:
        """Return the position before the member at ``offset``, which was yielded last. If it is a
        gap, a resume meets its damage again.
        """
        at = self.at
        if self._part and offset == self._part:  # the beginning of this part, as it is also read without an index
            return (0, "", at.damaged), self._before
        return (offset, at.compression, at.damaged if offset != self._damage_at else at.damaged - 1), self._before
