"""The pieces of samples in a damaged shard: which are whole, which belong together, and what is
lost.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from wds_pipes.cli.look.reading import Sample
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardWarning
from wds_pipes.tar.keys import is_metadata, splitter
from wds_pipes.tar.members import ASTRAY, GAP, Link, reserved_name

LOST = "lost.jsonl"


@dataclass(slots=True)
class Piece:
    """Files of one key beside each other, none of which has the field of another one; or a damaged
    place.

    Attributes:
        start: its first byte.
        key: the key; None: it is a damaged place.
        fields: the fields.
        follows: whether it comes directly after another piece of its key.
        came: whether it came out, so that it is whole.
        why: why it is lost; None: it is not, or the damage near it says why.
    """

    start: int
    key: str | None
    fields: frozenset[str] = frozenset()
    follows: bool = False
    came: bool = False
    why: str | None = None


class Noted:
    """What is noted of a shard while it is read, and what was lost of it.

    The files of each piece go on under names of their own, so that it comes out, or does not, by
    itself.

    Args:
        name: the shard, for messages.
        key_split: as in ``group_by_key``.
    """

    def __init__(self, name: str, key_split: str) -> None:
        self._name, self._split = name, splitter(key_split)
        self.pieces: list[Piece] = []
        self._by_start: dict[int, Piece] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}  # the different sets of fields
        self._key: str | None = None  # of the piece that goes on
        self._fields = set[str]()  # that it has so far
        self.doubtful = False  # whether there is damage, or an end mark inside, which may be a zeroed page
        self._errors: list[Exception] = []
        self._files: list[dict[str, Any]] = []  # files of samples that are not written, as entries of the list
        self.odd_ends = 0  # 1: the shard may have been cut at its end
        self.warned: list[warnings.WarningMessage] = []  # while reading members, warnings of the end of the shard

    def error(self, error: Exception) -> str:
        """Note what was found, and say to go on."""
        self._errors.append(error)
        return "skip"

    def member(self, name: str, data: bytes | None, offset: int, end: int) -> str | None:
        """Note a member, or a place that is none; return the name under which it goes on, or None
        if it does not.
        """
        parts = self._split(name) if name else None
        if parts is not None:
            key, field = parts[0], parts[1].lower()
            if not is_metadata(field):
                return self._goes_on(key, field, offset)
            error = reserved_name(self._name, key, field, name, offset=offset)
            self._add_file(name, key, offset, end, str(error).partition(", or write the shard")[0])
            return None
        if name:
            return name
        self.doubtful = True
        if data in (GAP, ASTRAY):
            self._end_piece()
            why = str(self._errors.pop()) if self._errors else "members were lost there"
            self.pieces.append(Piece(offset, None, why=why))
        return name

    def _goes_on(self, key: str, field: str, offset: int) -> str:
        """Note a file of a sample; return a name that ``split_piece`` takes apart."""
        if key != self._key or field in self._fields:
            follows = key == self._key
            self._end_piece()
            self._key = key
            self.pieces.append(Piece(offset, key, follows=follows))
            self._by_start[offset] = self.pieces[-1]
        self._fields.add(field)
        return f"{self.pieces[-1].start}\0{field}\0{key}"

    def _end_piece(self) -> None:
        if self._key is not None:
            fields = frozenset(self._fields)
            self.pieces[-1].fields = self._sets.setdefault(fields, fields)
        self._key, self._fields = None, set()

    def link(self, link: Link) -> None:
        """Note a link."""
        parts = self._split(link.name)
        if parts is not None:
            self._add_file(link.name, parts[0], link.offset, link.end, link.describe(self._name))

    def _add_file(self, name: str, key: str, start: int, end: int, why: str) -> None:
        self._files.append({"shard": self._name, "start": start, "end": end, "key": key, "file": name, "why": why})

    def end(self, offset: int) -> None:
        """Note where the members of the shard end, and whether reading has warned of the end."""
        self._end_piece()
        if doubts := [one for one in self.warned if issubclass(one.category, ShardWarning)]:
            self.odd_ends = 1
            self.pieces.append(Piece(offset, None, why=" ".join(str(one.message) for one in doubts)))
            self.warned[:] = [one for one in self.warned if one not in doubts]

    def came(self, sample: Sample) -> Piece:
        """Note that a piece came out, and give it its key."""
        start, _, sample["__key__"] = sample["__key__"].partition("\0")
        piece = self._by_start[int(start)]
        piece.came = True
        return piece

    def lost(self) -> list[dict[str, Any]]:
        """Return what was lost, in the order of the shard."""
        lost, before, damage = list[dict[str, Any]](), None, None
        for piece, after in zip_longest(self.pieces, self.pieces[1:]):
            end = None if after is None else after.start
            why = piece.why
            if why is None and not piece.came:
                beside = next((one for one in (before, after) if one is not None and one.key is None), None)
                why = self._reason(piece, beside, damage)
            if why is not None:
                lost.append({"shard": self._name, "start": piece.start, "end": end, "key": piece.key, "why": why})
            before, damage = piece, piece if piece.key is None else damage
        return sorted([*lost, *self._files], key=lambda entry: entry["start"])

    def _reason(self, piece: Piece, beside: Piece | None, damage: Piece | None) -> str:
        """Return why a piece did not come out: the damage beside it, or the last one before."""
        named = f"'{piece.start}\\x00"  # as an error shows its key
        for error in self._errors:
            if named in str(error):
                return without_starts(str(error))
        if beside is not None:
            return f"it is next to the damage at byte {beside.start}, and may be incomplete"
        if damage is not None:
            return f"it comes after the damage at byte {damage.start}, and may be a file inside a file"
        return "it is next to a doubtful end mark, and may be incomplete"


def split_piece(name: str) -> tuple[str, str] | None:
    """Return the first byte and the key of a piece, as one key, and a field; None: it is the name
    of a file of no sample.
    """
    start, _, rest = name.partition("\0")
    field, nul, key = rest.partition("\0")
    return (f"{start}\0{key}", field) if nul else None


def without_starts(text: str) -> str:
    """Return a message without the first bytes of pieces in the keys that it shows."""
    return re.sub(r"\d+\\x00", "", text)


class Joined:
    """Which pieces of a shard become samples, where keys come again:

    1. If a piece of a key is lost, its sample is lost.
    2. Pieces of a key with different fields are joined.
    3. A piece whose fields have all come before is another sample, which is left out if that is
       asked for, and else is an error.
    4. If it also has other fields, or other pieces follow it, it is not clear which of them belong
       together, and all of them are lost.
    5. If there is damage, and most samples come in pieces, a sample that lacks some of the usual
       fields, and has no others, is lost too: a piece of it may have been in the damage.

    Args:
        noted: what was noted of the whole shard.
        shown: the shard, for messages.
        drop_repeated: whether samples whose keys came before are left out.

    Raises:
        SampleError: a sample has the key of another one, and is not left out.

    Attributes:
        lost: why pieces are lost that came out, by their first bytes.
        kept: the first bytes of those pieces that are joined, by their keys.
    """

    def __init__(self, noted: Noted, shown: str, *, drop_repeated: bool) -> None:
        self._shown, self._drops = shown, drop_repeated
        self.lost: dict[int, str] = {}
        self.kept: dict[str, list[int]] = {}
        of_key: dict[str, list[Piece]] = {}
        for piece in noted.pieces:
            if piece.key is not None:
                of_key.setdefault(piece.key, []).append(piece)
        for key, found in of_key.items():
            if len(found) > 1:
                self._join(key, found)
        if noted.doubtful and of_key:
            self._lose_halves(of_key)

    def _join(self, key: str, pieces: Sequence[Piece]) -> None:
        """Decide about the pieces of a key."""
        gone = next((piece for piece in pieces if not piece.came), None)
        if gone is not None:
            self._lose(pieces, f"the files of its key at byte {gone.start} are lost, and may be a piece of it")
            return
        kept, fields, dropped = [pieces[0]], pieces[0].fields, dict[int, str]()
        for piece in pieces[1:]:
            twice = sorted(piece.fields & fields)
            if twice and not self._drops:
                raise SampleError(
                    f"two samples of shard {self._shown} have the key {key!r} and field {twice[0]!r}: pass "
                    "--drop-repeated to keep the first one, where that is clear",
                    url=self._shown,
                    key=key,
                )
            # Beside each other, a smaller one may begin in the middle of the second sample.
            if piece.fields == fields if piece.follows else piece.fields <= fields:
                dropped[piece.start] = f"a sample with its key, and field {twice[0]!r}, came before"
            elif twice or dropped:
                self._lose(
                    pieces,
                    f"files of its key come again, at byte {piece.start} with other fields than before, so it is not "
                    "clear which of them belong together",
                )
                return
            else:
                kept.append(piece)
                fields |= piece.fields
        self.lost |= dropped
        self.kept[key] = [piece.start for piece in kept]

    def _lose(self, pieces: Sequence[Piece], why: str) -> None:
        self.lost.update((piece.start, why) for piece in pieces if piece.came and piece.start not in self.lost)

    def _lose_halves(self, of_key: Mapping[str, Sequence[Piece]]) -> None:
        """Lose samples that may lack a piece, if most samples come in pieces."""
        fields = {key: frozenset[str]().union(*(one.fields for one in pieces)) for key, pieces in of_key.items()}
        counts = Counter(fields.values())
        usual = max(counts, key=lambda names: (counts[names], len(names)))
        in_pieces = [
            usual not in {one.fields for one in of_key[key]} for key, names in fields.items() if names == usual
        ]
        if 2 * sum(in_pieces) <= len(in_pieces):
            return
        for key, pieces in of_key.items():
            if fields[key] < usual:
                what = ", ".join(sorted(usual - fields[key]))
                self._lose(pieces, f"it has no {what}, unlike most samples: a piece of it may be lost in the damage")
                self.kept.pop(key, None)


def lost_in_words(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """What was joined and lost, in words; nothing if these are not the facts of ``repair``."""
    facts = [fact for fact in facts if "lost" in fact]
    lost = [entry for fact in facts for entry in fact["lost"]]
    joined, odd_ends = sum(fact["joined"] for fact in facts), sum(fact["odd_ends"] for fact in facts)
    words = [f"{plural(joined, 'sample')} joined from pieces"] if joined else []
    if len(lost) > odd_ends:
        files = sum("file" in entry for entry in lost)
        samples = len({(one["shard"], one["key"]) for one in lost if one["key"] is not None and "file" not in one})
        places, shards = sum(one["key"] is None for one in lost) - odd_ends, len({one["shard"] for one in lost})
        counts = {"sample": samples, "single file": files, "damaged place": places}
        what = ", ".join(plural(count, noun) for noun, count in counts.items() if count)
        words.append(f"lost: {what}; in {plural(shards, 'shard')}, see {LOST}")
    if odd_ends:
        words.append(f"{plural(odd_ends, 'shard')} may have been cut at the end, see {LOST}")
    return words if lost or not facts else [*words, "nothing is lost"]
