"""The whole samples of damaged shards, and a list of what was lost.

Members are read as ``load_tar`` reads them with ``on_error="skip"``: what is next to damage, and
may be incomplete, is lost. Neighbouring files of one key, none of which has the field of another
one, are a piece of a sample. Each shard is read twice: after the first time, ``decide`` says which
pieces become samples:

1. If a piece of a key is lost, its sample is lost.
2. Pieces of a key with different fields are joined.
3. A piece whose fields have all come before is another sample, which is left out if that is asked
   for, and else is an error.
4. If it also has other fields, or other pieces follow it, it is not clear which of them belong
   together, and all of them are lost.
5. The last piece of a shard is lost if it is suspect by rule 4 of ``tar.grouping``: zeros may be in
   place of its other members.
6. If there is damage, and most samples come in pieces, a sample that lacks some of the usual
   fields, and has no others, is lost too: a piece of it may have been in the damage.

Where the size of a member is more than the shard has, either the size is wrong, or the shard is
cut. Then reading goes on at the next valid header after the header of this member. What is found
may be files of a tar inside of the member. It is lost if the shard has no end mark, so that it is
cut; and up to a place with zeros, as at the end of such a tar. Where the data of the member begins
with a header, it is a tar itself, and no more is read; nor if archives may be joined.

Where a header follows directly on a damaged one, the member of the damaged one may be a tar itself.
What follows is lost in the same way.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple, Unpack, cast

from wds_pipes.errors import SampleError, ShardError, for_commands
from wds_pipes.io.compression import unpacked
from wds_pipes.io.urls import Urls, redact
from wds_pipes.tar.grouping import Usual, suspect_sample
from wds_pipes.tar.headers import BLOCK, MAX_SIZE, Damage, is_header
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.indexing import Hashed, readable
from wds_pipes.tar.keys import is_metadata, splitter
from wds_pipes.tar.reader import Link, TarReader, TarSource, find_next
from wds_pipes.tools.jobs import Facts, Place, Report, Task
from wds_pipes.tools.looking import Decoders, fault_of, of_all_fields
from wds_pipes.tools.outputs import (
    JobOptions,
    Running,
    StorageOptions,
    changed,
    check_same,
    unchanged,
    write_indexes,
    write_task,
)
from wds_pipes.tools.reading import Sample, facts_beside, fields_of, not_compared
from wds_pipes.tools.rewriting import find_shards, rewrite, with_writable_keys

_LOST = "lost.jsonl"


_INSIDE = "it may be a file of a tar inside of a member before it, the header of which is damaged or has a wrong size"
_PARTS = 1 << 26  # bytes that are read at a time
_MOST_WALKS = 10  # over a shard: a hostile one may have many sizes that are wrong


class Repair(NamedTuple):
    """How shards are repaired; it is sent to other processes.

    Attributes:
        storage_options: how to reach them.
        key_split: as in ``group_by_key``.
        drop_repeated: leave out a sample whose key came before in the shard.
        decode: leave out samples with a field that cannot be decoded.
        concatenated: shards may be several archives, one after another.
    """

    storage_options: StorageOptions
    key_split: str
    drop_repeated: bool
    decode: bool
    concatenated: bool


@dataclass
class Piece:
    """Files of one key beside each other, none of which has the field of another one.

    Attributes:
        start: its first byte.
        key: the key.
        follows: whether it comes directly after another piece of its key.
        why: why it is lost; None: it is not.
        fields: the names of the fields.
        data: the fields, until they are used.
    """

    start: int
    key: str
    follows: bool = False
    why: str | None = None
    fields: frozenset[str] = frozenset()
    data: dict[str, bytes] = field(default_factory=dict)


# What is lost besides pieces, as entries of the list: damaged places, whose end is not known, and
# files that no sample can have.
Others = list[dict[str, Any]]


def _finish(place: Place, facts: list[Facts]) -> None:
    write_indexes(place, facts)
    lines = [json.dumps(entry) + "\n" for fact in facts for entry in fact["lost"]]
    place.write(_LOST, "".join(lines).encode())


def _write(repair: Repair, task: Task, place: Place) -> Facts:
    shard, options = task.arguments, repair.storage_options
    check_same(shard.url, shard.mark, options)
    found: list[Piece] = []
    others: Others = []
    sets: dict[frozenset[str], frozenset[str]] = {}  # the different sets of fields
    usual, missing = Usual(), list[str]()
    passed = 0  # bytes
    with _quiet():
        walk = _Walk(repair, shard.url, hashes=shard.more is not None)
        for piece in _pieces(walk, others):
            missing = usual.missing(piece.data)
            usual.add(piece.data)
            names = frozenset(piece.data)
            task.advance(piece.start - passed)
            passed = piece.start
            piece.fields, piece.data = sets.setdefault(names, names), {}
            found.append(piece)
        if missing and walk.damage is None:
            last = found[-1]
            last.why = last.why or suspect_sample(shard.url, last.key, missing, offset=last.start).what
        read = len({piece.key for piece in found if piece.why is None})
        damaged = any(entry["key"] is None for entry in others)
        joined = _decide(found, redact(shard.url), drop_repeated=repair.drop_repeated, damaged=damaged)
        samples = with_writable_keys(_whole(repair, shard.url, found, joined), repair.key_split)
        written = write_task(task, place, unchanged(samples, {shard.url: shard.mark}, options))
    if walk.md5 is not None and walk.md5 != shard.more and not damaged:
        written["other_md5"] = walk.md5
    return {**written, "read": read, "joined": len(joined), "lost": _lost(found, others, redact(shard.url))}


def _pieces(walk: _Walk, others: Others) -> Iterator[Piece]:
    """Read a shard, and yield its pieces when all their files have come; note what else is lost."""
    split, shown = splitter(walk.repair.key_split), redact(walk.url)
    piece: Piece | None = None
    beside: str | None = None  # why the next piece is lost
    doubtful: list[Piece] = []  # they may be inside of a member
    inside = False  # whether a header follows directly on a damaged one
    for name, data, offset in walk.members():
        ended: Piece | None = None
        key, field = (split(name) if name else None) or (None, "")
        field = field.lower()
        if not name:
            why = for_commands(walk.errors.pop()) if walk.errors else "members were lost there"
            others.append({"start": offset, "key": None, "why": why})
            if walk.damage is not None:
                if walk.damage.zeros:
                    _lose(doubtful, _INSIDE)
                    doubtful.clear()
                inside = (inside and not walk.damage.zeros) or walk.offset == walk.damage.offset + BLOCK
            beside = f"it is next to the damage at byte {offset}, and may be incomplete"
            ended, piece = piece, None
            if ended is not None:
                ended.why = ended.why or beside
        elif key is not None and is_metadata(field):
            why = (
                f"sample {key!r} of shard {shown} has the reserved field name {field!r} (byte {offset}): names "
                f"that begin and end with two underscores are kept for metadata. Rename the file {name!r}"
            )
            others.append({"start": offset, "end": walk.offset, "key": key, "file": name, "why": why})
        elif key is not None:
            if piece is None or piece.key != key or field in piece.data:
                ended, piece = piece, Piece(offset, key, piece is not None and piece.key == key, beside)
                beside = None
                if walk.begin or inside:
                    doubtful.append(piece)
            piece.data[field] = data or b""
        if ended is not None:
            yield ended
    if piece is not None:
        yield piece
    if walk.damage is not None:
        _lose(doubtful, _INSIDE)
    for link in walk.links:
        if (parts := split(link.name)) is not None:
            why = link.describe(shown)
            others.append({"start": link.offset, "end": link.end, "key": parts[0], "file": link.name, "why": why})


class _Stream:
    """A tar stream that takes no more memory than it has bytes, whatever the size in a header is.

    Attributes:
        ahead: a header that was read already, and is read again.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.ahead = stream, b""
        self.seek, self.seekable = stream.seek, stream.seekable

    def read(self, count: int) -> bytes:
        if self.ahead:
            data, self.ahead = self.ahead, b""
            return data
        if count <= _PARTS:
            return self._stream.read(count)
        parts = bytearray()
        while len(parts) < count and (part := self._stream.read(min(count - len(parts), _PARTS))):
            parts += part
        return bytes(parts)


class _Walk:
    """One walk over the members of a shard, also over those after a member whose size is more than
    the shard has.

    Args:
        repair: how it is read.
        url: the shard.
        hashes: compute its MD5.

    Attributes:
        errors: the damage that was met, and not yet taken from here.
        links: the links.
        begin: where reading has begun the last time, after such a member; 0: there was none.
        md5: of a shard that has its end mark, in hexadecimal digits; None: it was not computed.
    """

    def __init__(self, repair: Repair, url: str, *, hashes: bool = False) -> None:
        self.repair, self.url, self._hashes = repair, url, hashes
        self.errors: list[ShardError] = []
        self.links: list[Link] = []
        self.md5: str | None = None
        self._reader: TarReader | None = None
        self.begin = 0

    @property
    def offset(self) -> int:
        """The byte after the member that was yielded last."""
        return 0 if self._reader is None else self._reader.offset

    @property
    def damage(self) -> Damage | None:
        """The damage that was met last; None: there was none, or the shard has its end mark."""
        return None if self._reader is None else self._reader.damage

    def members(self) -> Iterator[tuple[str, bytes | None, int]]:
        """Yield the name of each member, its data and where it starts; without a name: members were
        lost there.
        """
        data_begins: int | None = None  # of the member whose size is more than the shard has
        for _ in range(_MOST_WALKS):
            with readable(self.url), make_opener(self.repair.storage_options).open(self.url) as raw:
                hashed = Hashed(raw, threading.Event()) if self._hashes else None
                stored = raw if hashed is None else io.BufferedReader(hashed, 1 << 20)
                stream = _Stream(unpacked(stored)[0])
                if data_begins is not None and not self._find_header(stream, data_begins):
                    return
                self._reader = TarReader(
                    cast(BinaryIO, stream),
                    url=self.url,
                    offset=self.begin,
                    max_member_bytes=MAX_SIZE,
                    on_error=self.errors.append,
                    on_link=self.links.append,
                    concatenated=self.repair.concatenated,
                    named=False,
                )
                for _, name, data, offset in self._reader:
                    yield name, data, offset
                found = self._reader.damage
                data_begins = None if found is None or self.repair.concatenated else found.data
                if found is None and hashed is not None:
                    while stored.read(1 << 20):
                        pass
                    self.md5 = hashed.hexdigest()
            if data_begins is None:
                return

    def _find_header(self, stream: _Stream, begin: int) -> bool:
        """Begin at the next valid header after byte ``begin``, and return whether there is one, and
        none at ``begin``.
        """
        source = TarSource(cast(BinaryIO, stream), 0)
        source.pass_over(begin, "", 0)
        first = stream.read(BLOCK)
        source.position += BLOCK
        if len(first) < BLOCK or is_header(first):
            return False
        head, self.begin = find_next(source, Damage("", begin), begin, self.url, MAX_SIZE)
        stream.ahead = head or b""
        return head is not None


def _whole(repair: Repair, url: str, found: Iterable[Piece], joined: Mapping[str, Sequence[Piece]]) -> Iterator[Sample]:
    """Read a shard again, and yield the samples to write, each when its last piece has come.

    Args:
        repair: how it is read.
        url: the shard.
        found: the pieces that came the first time.
        joined: the pieces of the samples that have several.
    """
    decoders = of_all_fields() if repair.decode else None
    by_start = {piece.start: piece for piece in found}
    held: dict[str, Sample] = {}
    for piece in _pieces(_Walk(repair, url), []):
        known = by_start.get(piece.start)
        if known is None:
            raise changed(url)
        if known.why is not None:
            continue
        sample = held.setdefault(piece.key, {"__key__": piece.key, "__url__": url})
        sample.update(piece.data)
        pieces = joined.get(piece.key, [known])
        if known is pieces[-1]:
            del held[piece.key]
            why = None if decoders is None else _fault(sample, decoders)
            _lose(pieces, why)
            if why is None:
                yield sample


def _fault(sample: Sample, decoders: Decoders) -> str | None:
    """Return why a field cannot be decoded; None: all can."""
    for name, data in fields_of(sample):
        if (why := fault_of(decoders, name, data)) is not None:
            return f"field {name!r} cannot be decoded: {why}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what is logged of damage, which the list of what was lost says."""
    logger = logging.getLogger("wds_pipes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _lost(pieces: Sequence[Piece], others: Others, shown: str) -> Others:
    """What was lost of a shard, in its order, as entries of the list."""
    lost: Others = [
        {"start": piece.start, "key": piece.key, "why": piece.why} for piece in pieces if piece.why is not None
    ]
    starts = {piece.start for piece in pieces} | {entry["start"] for entry in others if "file" not in entry}
    ends = dict(zip_longest(sorted(starts), sorted(starts)[1:]))  # a piece ends where the next one begins
    return [
        {"shard": shown, "start": entry["start"], "end": ends.get(entry["start"]), **entry}
        for entry in sorted(lost + others, key=lambda entry: entry["start"])
    ]


def _decide(found: Iterable[Piece], shown: str, *, drop_repeated: bool, damaged: bool) -> dict[str, list[Piece]]:
    """Decide which pieces become samples: note at the others why they are lost, and return those
    that are joined, by their keys.

    Args:
        found: all pieces of a shard.
        shown: the shard, for messages.
        drop_repeated: whether samples whose keys came before are left out.
        damaged: whether there is damage.

    Raises:
        SampleError: a sample has the key of another one, and is not left out.
    """
    of_key: dict[str, list[Piece]] = {}
    for piece in found:
        of_key.setdefault(piece.key, []).append(piece)
    kept = {key: _joined(pieces, shown, drop_repeated) for key, pieces in of_key.items() if len(pieces) > 1}
    if damaged and of_key:
        _lose_halves(of_key)
    return {key: pieces for key, pieces in kept.items() if len(pieces) > 1 and pieces[0].why is None}


def _joined(pieces: Sequence[Piece], shown: str, drop_repeated: bool) -> list[Piece]:
    """Decide about the pieces of a key, and return those that are its sample."""
    gone = next((piece for piece in pieces if piece.why is not None), None)
    if gone is not None:
        _lose(pieces, f"the files of its key at byte {gone.start} are lost, and may be a piece of it")
        return []
    kept, fields, dropped = [pieces[0]], pieces[0].fields, list[Piece]()
    for piece in pieces[1:]:
        twice = sorted(piece.fields & fields)
        if twice and not drop_repeated:
            raise SampleError(
                f"two samples of shard {shown} have the key {piece.key!r} and field {twice[0]!r}: pass "
                "--drop-repeated to keep the first one, where that is clear",
                url=shown,
                key=piece.key,
            )
        # Beside each other, a smaller one may begin in the middle of the second sample.
        if piece.fields == fields if piece.follows else piece.fields <= fields:
            dropped.append(piece)
        elif twice or dropped:
            _lose(
                pieces,
                f"files of its key come again, at byte {piece.start} with other fields than before, so it is not clear "
                "which of them belong together",
            )
            return []
        else:
            kept.append(piece)
            fields |= piece.fields
    for piece in dropped:
        piece.why = f"a sample with its key, and field {min(piece.fields & fields)!r}, came before"
    return kept


def _lose(pieces: Sequence[Piece], why: str | None) -> None:
    for piece in pieces:
        piece.why = piece.why or why


def _lose_halves(of_key: Mapping[str, Sequence[Piece]]) -> None:
    """Lose samples that may lack a piece, if most samples come in pieces."""
    fields = {key: frozenset[str]().union(*(one.fields for one in pieces)) for key, pieces in of_key.items()}
    counts = Counter(fields.values())
    usual = max(counts, key=lambda names: (counts[names], len(names)))
    in_pieces = [usual not in {one.fields for one in of_key[key]} for key, names in fields.items() if names == usual]
    if 2 * sum(in_pieces) <= len(in_pieces):
        return
    for key, pieces in of_key.items():
        if fields[key] < usual:
            what = ", ".join(sorted(usual - fields[key]))
            _lose(pieces, f"it has no {what}, unlike most samples: a piece of it may be lost in the damage")


def repair(
    urls: Urls,
    dest: str | os.PathLike[str],
    *,
    decode: bool = False,
    drop_repeated: bool = False,
    concatenated: bool = False,
    key_split: str = "first-dot",
    **options: Unpack[JobOptions],
) -> Report:
    """Write the whole samples of damaged shards, and list what was lost, in ``lost.jsonl``.

    Of a shard without damage whose MD5 is another one than the ``index.json`` beside it says, the
    facts have this MD5 as ``"other_md5"``: bytes of its fields are changed, and they are written.

    Args:
        urls: the shards.
        dest: the directory to write to.
        decode: also leave out samples with a field that cannot be decoded.
        drop_repeated: leave out a sample whose key and fields came before in its shard.
        concatenated: shards may be several archives, one after another.
        key_split: as in ``group_by_key``.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    running = Running(dest, options)
    decided = {"key_split": key_split, "drop_repeated": drop_repeated, "decode": decode, "concatenated": concatenated}
    how = Repair(running.storage_options, key_split, drop_repeated, decode, concatenated)
    shards, work = find_shards(urls, running.place), partial(_write, how)
    known = facts_beside([shard.url for shard in shards], running.storage_options, not_compared)
    shards = [shard._replace(more=facts.md5) for shard, facts in zip(shards, known, strict=True)]
    return rewrite("repair", running, shards, work, decided, finish=_finish, extras=[_LOST])
