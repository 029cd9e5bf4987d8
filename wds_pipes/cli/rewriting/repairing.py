"""``repair``: the whole samples of damaged shards, and a list of what was lost.

Samples are found as ``load_tar`` and ``group_by_key`` find them with ``on_error="skip"``: what is
next to damage, and may be incomplete, is lost. Each shard is read twice: after the first time,
``Joined`` says what becomes of keys that come again.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import click

from wds_pipes.cli.jobs import Running, check_same, runs, unchanged, write_indexes, write_task
from wds_pipes.cli.options import dest, example, key_split, urls
from wds_pipes.cli.rewriting.spine import Reading, find_shards, plan, summed, with_writable_keys
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError
from wds_pipes.io.compression import unpacked
from wds_pipes.io.tasks.task import Facts, Job, Place, Report, Task
from wds_pipes.io.urls import redact
from wds_pipes.tar.grouping import Grouping, Member
from wds_pipes.tar.headers import MAX_SIZE
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.keys import is_metadata, splitter
from wds_pipes.tar.members import Link, reserved_name
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.scanning import readable
from wds_pipes.tools.describing import Decoders, fault_of, of_all_fields
from wds_pipes.tools.reading import Sample


class Repair(NamedTuple):
    """How shards are repaired; it is sent to other processes.

    Attributes:
        reading: how they are read.
        drop_repeated: leave out a sample whose key came before in the shard.
        decode: leave out samples with a field that cannot be decoded.
        concatenated: shards may be several archives, one after another.
    """

    reading: Reading
    drop_repeated: bool
    decode: bool
    concatenated: bool


def _finish(place: Place, facts: list[Facts]) -> None:
    write_indexes(place, facts)
    lines = [json.dumps(entry) + "\n" for fact in facts for entry in fact["lost"]]
    place.write(LOST, "".join(lines).encode())


def _write(repair: Repair, task: Task, place: Place) -> Facts:
    shard, _ = task.arguments
    reading, shown = repair.reading, redact(shard.url)
    check_same(shard.url, shard.mark, reading.storage_options)
    first, noted = Noted(shown, reading.key_split), Noted(shown, reading.key_split)
    with _quiet():
        for _ in _pieces(repair, shard.url, first):
            pass
    joined = Joined(first, shown, drop_repeated=repair.drop_repeated)
    with _quiet():
        whole = _whole(_pieces(repair, shard.url, noted), joined, of_all_fields() if repair.decode else None)
        samples = unchanged(
            with_writable_keys(whole, reading.key_split), {shard.url: shard.mark}, reading.storage_options
        )
        written = write_task(task, place, samples)
    found = {
        "read": len({piece.key for piece in noted.pieces if piece.came}),
        "joined": sum(len(starts) > 1 for starts in joined.kept.values()),
        "lost": noted.lost(),
    }
    return {**written, **found}


def _pieces(repair: Repair, url: str, noted: Noted) -> Iterator[tuple[Sample, Piece]]:
    """Read a shard, and yield the pieces of samples that come out."""
    with readable(url), make_opener(repair.reading.storage_options).open(url) as raw:
        reader = TarReader(
            unpacked(raw)[0],
            url=url,
            max_member_bytes=MAX_SIZE,
            on_error=noted.error,
            on_link=noted.link,
            concatenated=repair.concatenated,
            named=False,
        )
        for sample in Grouping(split_piece, report=noted.error).samples(noted.members(reader), url):
            yield sample, noted.came(sample)


def _whole(found: Iterable[tuple[Sample, Piece]], joined: Joined, decoders: Decoders | None) -> Iterator[Sample]:
    """Yield the samples to write, each when its last piece has come.

    Args:
        found: the pieces.
        joined: which of them become samples.
        decoders: a sample with a field that these cannot decode is left out; None: none is.
    """
    held: dict[str, tuple[Sample, list[Piece]]] = {}
    for sample, piece in found:
        piece.why = joined.lost.get(piece.start)
        if piece.why is not None:
            continue
        key = sample["__key__"]
        whole, pieces = held.setdefault(key, (sample, []))
        whole.update(sample)
        pieces.append(piece)
        if piece.start == joined.kept.get(key, [piece.start])[-1]:
            del held[key]
            why = None if decoders is None else _fault(whole, decoders)
            if why is None:
                yield whole
            for one in pieces:
                one.why = why


def _fault(sample: Sample, decoders: Decoders) -> str | None:
    """Return why a field cannot be decoded; None: all can."""
    for field, data in sample.items():
        if not is_metadata(field) and (why := fault_of(decoders, field, data)) is not None:
            return f"field {field!r} cannot be decoded: {why}"
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
        self.damaged = False  # whether there is damage
        self._errors: list[Exception] = []
        self._files: list[dict[str, Any]] = []  # files of samples that are not written, as entries of the list

    def error(self, error: Exception) -> None:
        """Note what was found; reading goes on."""
        self._errors.append(error)

    def members(self, reader: TarReader) -> Iterator[Member]:
        """Yield the members of the shard under the names with which they go on."""
        for url, name, data, offset in reader:
            known = self._member(name, offset, reader.offset)
            if known is not None:
                yield url, known, data, offset
        self._end_piece()

    def _member(self, name: str, offset: int, end: int) -> str | None:
        """Note a member, or a gap; return the name under which it goes on, or None if it does
        not.
        """
        parts = self._split(name) if name else None
        if parts is not None:
            key, field = parts[0], parts[1].lower()
            if not is_metadata(field):
                return self._goes_on(key, field, offset)
            error = reserved_name(self._name, key, field, name, offset=offset)
            self._add_file(name, key, offset, end, str(error).partition(", or write the shard")[0])
            return None
        if not name:
            self.damaged = True
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

    def came(self, sample: Sample) -> Piece:
        """Note that a piece came out, and give it its key."""
        start, _, sample["__key__"] = sample["__key__"].partition("\0")
        piece = self._by_start[int(start)]
        piece.came = True
        return piece

    def lost(self) -> list[dict[str, Any]]:
        """Return what was lost, in the order of the shard."""
        lost, before = list[dict[str, Any]](), None
        for piece, after in zip_longest(self.pieces, self.pieces[1:]):
            end = None if after is None else after.start
            why = piece.why
            if why is None and not piece.came:
                beside = next((one for one in (before, after) if one is not None and one.key is None), None)
                why = self._reason(piece, beside)
            if why is not None:
                lost.append({"shard": self._name, "start": piece.start, "end": end, "key": piece.key, "why": why})
            before = piece
        return sorted([*lost, *self._files], key=lambda entry: entry["start"])

    def _reason(self, piece: Piece, beside: Piece | None) -> str:
        """Return why a piece did not come out: what is wrong with it, or the damage beside it."""
        named = f"'{piece.start}\\x00"  # as an error shows its key
        for error in self._errors:
            if named in str(error):
                return without_starts(str(error))
        where = "" if beside is None else f" at byte {beside.start}"
        return f"it is next to the damage{where}, and may be incomplete"


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
        if noted.damaged and of_key:
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


def _summed(report: Report) -> str:
    """What was written, joined and lost, in words."""
    facts = report.facts.values()
    lost = [entry for fact in facts for entry in fact["lost"]]
    joined = sum(fact["joined"] for fact in facts)
    words = [f"{plural(joined, 'sample')} joined from pieces"] if joined else []
    if lost:
        files = sum("file" in entry for entry in lost)
        samples = len({(one["shard"], one["key"]) for one in lost if one["key"] is not None and "file" not in one})
        places, shards = sum(one["key"] is None for one in lost), len({one["shard"] for one in lost})
        counts = {"sample": samples, "single file": files, "damaged place": places}
        what = ", ".join(plural(count, noun) for noun, count in counts.items() if count)
        words.append(f"lost: {what}; in {plural(shards, 'shard')}, see {LOST}")
    return "; ".join([summed(report), *words, *([] if lost else ["nothing is lost"])])


@click.command(
    epilog=example("wds-pipes repair damaged.tar mended/\nwds-pipes repair 'raw/*.tar' mended/ --decode -j 4")
)
@urls
@dest
@click.option("--decode", is_flag=True, help="Also leave out samples with a field that cannot be decoded.")
@click.option("--drop-repeated", is_flag=True, help="Leave out a sample whose key and fields came before in its shard.")
@click.option("--concatenated", is_flag=True, help="Shards may be several archives, one after another (cat, tar -A).")
@key_split
@runs(_summed)
def repair(
    *,
    urls: Sequence[str],
    place: Place,
    running: Running,
    key_split: str,
    decode: bool,
    drop_repeated: bool,
    concatenated: bool,
) -> Job:
    """Write the whole samples of damaged shards to the directory DEST, and list what was lost.

    Each shard becomes one of the same name, uncompressed. What was lost is in DEST/lost.jsonl, a
    line for each sample, each damaged place and each file that no sample can have (a link, or a
    name that is kept for metadata): the shard, its bytes from start to end (of the tar, after
    decompression; null: to the end), the key if there is one, and why. A sample next to damage is
    lost too, since it may be incomplete; so is the last one of a shard that is cut.

    Members of one sample that are apart from each other, as in a tar that is not sorted, are
    joined; they are held in memory until the last one. If one of these pieces is lost, so is the
    sample. If files of a key come again, --drop-repeated keeps the first sample; where it is not
    clear which files belong together, all of the key are lost.

    With --key-split last-dot, dots in keys become underscores, so that all readers find the keys.
    wds-pipes verify says which shards need repair.
    """
    options = {
        "key_split": key_split,
        "drop_repeated": drop_repeated,
        "decode": decode,
        "concatenated": concatenated,
    }
    work = partial(_write, Repair(Reading(place.storage_options, key_split), drop_repeated, decode, concatenated))
    shards = find_shards(urls, place, place.storage_options)
    return plan("repair", shards, place, work, options, finish=_finish, extras=[LOST])
