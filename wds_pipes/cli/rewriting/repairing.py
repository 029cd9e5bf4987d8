"""``repair``: the whole samples of damaged shards, and a list of what was lost.

Samples are found as ``load_tar`` and ``group_by_key`` find them with ``on_error="skip"``: what is
next to damage, and may be incomplete, is lost. A shard in which keys come again is read twice:
``Joined`` says what becomes of them.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from wds_pipes.cli.look.decoders import fault_of, of_all_fields
from wds_pipes.cli.look.reading import Sample
from wds_pipes.cli.rewriting.pieces import Joined, Noted, Piece, split_piece, without_starts
from wds_pipes.cli.rewriting.spine import Reading, find_shards, plan, summed, with_writable_keys
from wds_pipes.cli.shards import check_same, shard_facts, unchanged, write_indexes
from wds_pipes.core.stream import Stream
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardWarning
from wds_pipes.io.tasks.task import Facts, Job, Place, Report, Task
from wds_pipes.io.urls import redact
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.tar.headers import MAX_SIZE
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tar.members import TarMember
from wds_pipes.tar.shard_file import write_shard

LOST = "lost.jsonl"


class Repair(NamedTuple):
    """How shards are repaired; it is sent to other processes.

    Attributes:
        reading: how they are read.
        drop_repeated: leave out a sample whose key came before in the shard.
        decode: leave out samples with a field that cannot be decoded.
    """

    reading: Reading
    drop_repeated: bool
    decode: bool


class _Places(LoadTar):
    """Reads the members of one shard, and notes them."""

    def __init__(self, source: OpenShards, noted: Noted) -> None:
        super().__init__(source, max_member_bytes=MAX_SIZE, on_error=noted.error)
        self._noted, self.on_link = noted, noted.link

    def run(self) -> Iterator[TarMember]:
        for url, name, data, offset in super().run():
            known = self._noted.member(name, data, offset, self.bytes_so_far)
            if known is not None:
                yield TarMember(url, known, data, offset)
        self._noted.end(self.bytes_read)


class _AgainError(Exception):
    """Keys come again in a shard, so it is read once more."""


def _come_again(pieces: Iterable[Piece]) -> bool:
    """Whether a piece came out whose key another one has."""
    counts = Counter(piece.key for piece in pieces)
    return any(piece.came and counts[piece.key] > 1 for piece in pieces)


def plan_repair(urls: Sequence[str], place: Place, repair: Repair) -> Job:
    """Make the job of ``repair``.

    Raises:
        ValueError: nothing matches.
        ShardError: a shard is missing.
    """
    options = {
        "key_split": repair.reading.key_split,
        "drop_repeated": repair.drop_repeated,
        "decode": repair.decode,
    }
    shards = find_shards(urls, place, repair.reading.storage_options)
    return plan("repair", shards, place, partial(_write, repair), options, finish=_finish, extras=[LOST])


def summed_repair(report: Report) -> str:
    """What was written and lost, in words."""
    lost = [entry for fact in report.facts.values() for entry in fact["lost"]]
    words, joined = [summed(report)], sum(fact["joined"] for fact in report.facts.values())
    if joined:
        words.append(f"{plural(joined, 'sample')} joined from pieces")
    odd_ends = sum(fact.get("odd_ends", 0) for fact in report.facts.values())
    if len(lost) > odd_ends:
        files = sum("file" in entry for entry in lost)
        samples = len({(one["shard"], one["key"]) for one in lost if one["key"] is not None and "file" not in one})
        places, shards = sum(one["key"] is None for one in lost) - odd_ends, len({one["shard"] for one in lost})
        counts = [plural(samples, "sample")] if samples or not files else []
        what = " and ".join([*counts, *([f"{plural(files, 'file')} of samples"] if files else [])])
        damage = f", and what was in {plural(places, 'damaged place')}," if places else ""
        words.append(f"lost are {what}{damage} in {plural(shards, 'shard')}, see {LOST}")
    if odd_ends:
        words.append(f"{plural(odd_ends, 'shard')} may have been cut at the end, see {LOST}")
    if not lost:
        words.append("nothing is lost")
    return "; ".join(words)


def _finish(place: Place, facts: list[Facts]) -> None:
    write_indexes(place, facts)
    lines = [json.dumps(entry) + "\n" for fact in facts for entry in fact["lost"]]
    place.write(LOST, "".join(lines).encode())


def _write(repair: Repair, task: Task, place: Place) -> Facts:
    shard, _ = task.arguments
    check_same(shard.url, shard.mark, repair.reading.storage_options)
    joined: Joined | None = None
    while True:
        one = _Shard(repair, redact(shard.url), joined)
        try:
            with _quiet() as one.noted.warned:
                samples = with_writable_keys(one.samples(shard.url), repair.reading.key_split)
                samples = unchanged(samples, {shard.url: shard.mark}, repair.reading.storage_options)
                written = write_shard(place.at(task.name), samples, storage_options=place.storage_options)
        except _AgainError:
            joined = Joined(one.noted, one.shown, drop_repeated=repair.drop_repeated)
            continue
        for warning in one.noted.warned:
            warnings.warn(without_starts(str(warning.message)), warning.category, stacklevel=2)
        found = {"read": one.read, "joined": one.joined, "lost": one.noted.lost(), "odd_ends": one.noted.odd_ends}
        return {**shard_facts(task.name, written), **found}


class _Shard:
    """The repair of one shard.

    Args:
        repair: how it is done.
        shown: the shard, for messages.
        joined: which pieces become samples, if keys come again; None: it is not known whether any
            do.
    """

    def __init__(self, repair: Repair, shown: str, joined: Joined | None) -> None:
        self._repair, self.shown, self._joined = repair, shown, joined
        self.noted = Noted(shown, repair.reading.key_split)
        self.joined = 0  # samples of several pieces
        self._decoders = of_all_fields() if repair.decode else None

    @property
    def read(self) -> int:
        """How many keys came out."""
        return len({piece.key for piece in self.noted.pieces if piece.came})

    def samples(self, url: str) -> Iterator[Sample]:
        """Yield the samples to write.

        Raises:
            _AgainError: keys come again, which was not known.
        """
        opened = OpenShards(ShardList([url], empty_check=False, storage_options=self._repair.reading.storage_options))
        grouped = GroupByKey(_Places(opened, self.noted), key_split=split_piece, on_error=self.noted.error)
        found = ((sample, [self.noted.came(sample)]) for sample in Stream(grouped))
        for sample, pieces in self._alone(found) if self._joined is None else self._whole(found, self._joined):
            if (why := self._fault(sample)) is None:
                yield sample
            for piece in pieces:
                piece.why = why
        if self._joined is None and _come_again(self.noted.pieces):
            raise _AgainError

    def _alone(self, found: Iterable[tuple[Sample, list[Piece]]]) -> Iterator[tuple[Sample, list[Piece]]]:
        """Yield samples until a key comes again; read to the end of the shard."""
        keys, again = set[str](), False
        for sample, pieces in found:
            again = again or sample["__key__"] in keys
            keys.add(sample["__key__"])
            if not again:
                yield sample, pieces

    def _whole(
        self, found: Iterable[tuple[Sample, list[Piece]]], joined: Joined
    ) -> Iterator[tuple[Sample, list[Piece]]]:
        """Yield samples when their last piece has come."""
        held: dict[str, tuple[Sample, list[Piece]]] = {}
        for sample, [piece] in found:
            piece.why = joined.lost.get(piece.start)
            if piece.why is not None:
                continue
            key = sample["__key__"]
            starts = joined.kept.get(key, [piece.start])
            whole, pieces = held.setdefault(key, (sample, []))
            whole.update(sample)
            pieces.append(piece)
            if piece.start == starts[-1]:
                self.joined += len(starts) > 1
                yield held.pop(key)

    def _fault(self, sample: Sample) -> str | None:
        """Return why a field cannot be decoded; None: all can, or it is not asked."""
        if self._decoders is None:
            return None
        for field, data in sample.items():
            if not is_metadata(field) and (why := fault_of(self._decoders, field, data)) is not None:
                return f"field {field!r} cannot be decoded: {why}"
        return None


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Keep back what the stages log of damage, which the list of what was lost says, and collect
    warnings.
    """
    logger = logging.getLogger("wds_pipes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ShardWarning)
            yield warned
    finally:
        logger.setLevel(before)
