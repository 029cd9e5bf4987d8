"""LoadTar: open shards to the members of their tars."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.lane import LaneFacts
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.running import Mark
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import read_count
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.errors import ShardError, ShardWarning, StateError
from wds_pipes.io.compression import KINDS, unreadable
from wds_pipes.io.urls import hide, redact
from wds_pipes.stages.open_shards import Shard
from wds_pipes.stages.shard_list import PartOfShard
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.members import EMPTY, TarMember
from wds_pipes.tar.reader import TarReader


class LoadTar(Tolerant[TarMember]):
    """Open shards to the regular files in their tars (functional name: ``load_tar``).

    Gives a ``TarMember(url, name, data, offset)`` for each, ``data`` as bytes. Reads ustar, v7, GNU and pax archives, whole-shard gz, bz2, xz and zst by
    content; checks every header's checksum; never passes a truncated shard off as a whole one. Another archive may follow in a shard at a multiple of 10 240
    bytes. A member's extended headers (its name and attributes) take at most 1 MiB. A sparse member counts with its stored and its real size together.

    Args:
        source: a pipe of open shards: ``open_shards()``.
        max_member_bytes: refuse a larger member before taking memory for it.
        on_truncated: for a shard that is cut inside a header or a member: ``"raise"``, ``"warn"`` (ShardWarning) or ``"ignore"``. The cut member is not given,
            and ``group_by_key`` drops its sample. A shard that only lacks its end-of-archive mark is a ShardWarning here, and ``group_by_key`` gives its last
            sample only if that is like the samples before it. A shard with zeros for more than 10 240 bytes after its usual end is cut as well: it may have
            been preallocated and never filled. Fewer, or zeros up to a whole record of a power of two up to 1 MiB (``tar -b 2048``), are a ShardWarning where
            they are neither two blocks nor end at a multiple of 10 240 bytes: they may hide samples.
        on_error: for damage: ``"raise"``, or ``"skip"``: count it, search the next valid header and go on there. A lost place is given as a member with
            an empty name, by which ``group_by_key`` drops the samples around it, since they may be incomplete. Where the size in a damaged header leads to
            another header, the walk goes on there. Otherwise the next header may lie inside another member, such as a tar in the tar; then ``group_by_key``
            drops every further sample of the shard with a field that no sample before the damage had.
        max_errors: with ``"skip"``, how many damaged places an epoch may have; None: any number.

    Raises:
        ShardError: from the iteration, with ``.url`` and ``.offset``: no tar, a wrong checksum, a member too large, a shard cut short, a read error.

    Checkpoint: the byte where the next member's headers start, and the compression. A resume seeks there: it reads nothing again in a plain shard that can
    be sought; a compressed shard is decompressed from its start.
    """

    @dataclass(slots=True)
    class At:
        offset: int = 0
        compression: str = ""
        damaged: int = 0

    keeps_count = True
    gives = "members"
    error_kind = ShardError
    counter = "damaged"

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
        on_error: str = "raise",
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        self.max_member_bytes = check_count("max_member_bytes", max_member_bytes)
        self.on_truncated = check_choice("on_truncated", on_truncated, "raise", "warn", "ignore")
        self.want: Callable[[str], bool] | None = None  # these two are set by a group_by_key that reads from here
        self.named = True
        self.doubts = False  # set by a group_by_key that reads from here, or from a stage after this one
        self.leave = False  # set by it when the wanted samples of a shard have come
        self._reader: TarReader | None = None
        self._shard: Shard | None = None  # while running, the one that is read
        self._before: Mark | None = None  # while running, the position of the source to resume at
        self.bytes_read = 0  # while running, of the shards that are done
        self._began = 0  # at this byte of its shard
        self._damage_at = -1  # while running, where the last damage of this shard begins

    def run(self) -> Iterator[TarMember]:
        at, source = self.at, self.source
        assert source is not None
        while True:
            self._before = source.mark()
            shard = next(source.items, None)
            if shard is None:
                self._before = None
                return
            if not isinstance(shard, Shard):
                raise TypeError(f"load_tar() takes open shards, and its source gave {hide(repr(shard)):.200}: put .open_shards() before it")
            try:
                resumed = at.offset > 0
                try:
                    stream, at.compression = shard.tar(at.offset, at.compression if resumed else None)
                except ShardError as error:
                    shard.refuse(error)
                    at.offset, at.compression = 0, ""
                    continue
                self._began, self._shard = at.offset, shard
                self._reader = TarReader(
                    stream,
                    url=shard.url,
                    offset=at.offset,
                    want=self.want,
                    max_member_bytes=self.max_member_bytes,
                    on_truncated=self.on_truncated,
                    on_error=self._damaged,
                    doubts=self.doubts,
                    named=self.named,
                )
                if isinstance(shard.url, PartOfShard):
                    empty = not resumed
                    for member in self._reader:
                        empty = False
                        yield member
                        if self.leave:
                            break
                    if empty and self.doubts:  # group_by_key knows how many samples there should be
                        yield TarMember(shard.url, "", EMPTY, 0)
                else:
                    yield from self._reader
            except ModuleNotFoundError as error:  # not the shard's fault, so never skipped
                raise ShardError(f"shard {redact(shard.url)} cannot be read: {error}", url=redact(shard.url)) from error
            except unreadable() as error:
                url = redact(shard.url)
                broken = ShardError(f"shard {url} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.", url=url, offset=at.offset)
                shard.doubt(broken)
                self.skip(broken)
            finally:
                shard.close()
            self.bytes_read = self.bytes_so_far
            self._reader, self._shard, self._damage_at, at.offset, at.compression = None, None, -1, 0, ""
            self.leave = False

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        super().start(0 if self.at.compression else self.at.offset, ahead=ahead)

    @property
    def bytes_so_far(self) -> int:
        """How many bytes of (decompressed) tars were read since this started."""
        return self.bytes_read + (self._reader.offset - self._began if self._reader is not None else 0)

    def _damaged(self, error: ShardError) -> None:
        self._shard.doubt(error)  # type: ignore[union-attr]
        offset, url = getattr(error, "offset", None), getattr(error, "url", None)
        if self.on_error == "raise" and offset == self._began > 0 and error.__cause__ is None:
            # Where the position came from a shard as it is now, the header was read already.
            raise StateError(
                f"the state stands at byte {offset} of shard {url}, and no member starts there: the shard was changed or damaged since, or the "
                f"state is damaged. ({error})"
            )
        self.skip(error)
        self._damage_at = self._reader.offset  # type: ignore[union-attr]

    def refuse(self, error: ShardError, *, cut: bool) -> None:
        """Raise or count what ``group_by_key`` found out about a doubtful place; ``cut``: the end of a shard."""
        if cut and self.on_truncated == "warn":
            warnings.warn(str(error), ShardWarning, stacklevel=2)
        elif not cut or self.on_truncated == "raise":
            self.skip(error)

    def mark(self) -> Mark:
        at, reader = self.at, self._reader
        assert self.source is not None
        if reader is not None and reader.ended:
            return (0, "", at.damaged), self.source.mark()
        return (at.offset if reader is None else reader.offset, at.compression, at.damaged), self._before or self.source.mark()

    def mark_at(self, offset: int) -> Mark:
        """The position before the member at ``offset``, which was given last; if that is a gap, its damage will be met again."""
        at = self.at
        return (offset, at.compression, at.damaged if offset != self._damage_at else at.damaged - 1), self._before
