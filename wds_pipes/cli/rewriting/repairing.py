"""``repair``: the whole samples of damaged shards, and a list of what was lost.

Samples are found as ``load_tar`` and ``group_by_key`` find them with ``on_error="skip"``: what is
next to damage, and may be incomplete, is lost. Each shard is read twice: after the first time,
``Joined`` says what becomes of keys that come again.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from wds_pipes.cli.look.describing import Decoders, fault_of, of_all_fields
from wds_pipes.cli.look.reading import Sample
from wds_pipes.cli.rewriting.pieces import LOST, Joined, Noted, Piece, split_piece, without_starts
from wds_pipes.cli.rewriting.spine import Reading, find_shards, plan, with_writable_keys
from wds_pipes.cli.shards import check_same, shard_facts, unchanged, write_indexes
from wds_pipes.core.stream import Stream
from wds_pipes.errors import ShardWarning
from wds_pipes.io.tasks.task import Facts, Job, Place, Task
from wds_pipes.io.urls import redact
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.tar.headers import MAX_SIZE
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tar.members import TarMember
from wds_pipes.tar.shard_file import write_shard


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


def _finish(place: Place, facts: list[Facts]) -> None:
    write_indexes(place, facts)
    lines = [json.dumps(entry) + "\n" for fact in facts for entry in fact["lost"]]
    place.write(LOST, "".join(lines).encode())


def _write(repair: Repair, task: Task, place: Place) -> Facts:
    shard, _ = task.arguments
    reading, shown = repair.reading, redact(shard.url)
    check_same(shard.url, shard.mark, reading.storage_options)
    first, noted = Noted(shown, reading.key_split), Noted(shown, reading.key_split)
    with _quiet() as first.warned:
        for _ in _pieces(reading, shard.url, first):
            pass
    joined = Joined(first, shown, drop_repeated=repair.drop_repeated)
    with _quiet() as noted.warned:
        whole = _whole(_pieces(reading, shard.url, noted), joined, of_all_fields() if repair.decode else None)
        samples = unchanged(
            with_writable_keys(whole, reading.key_split), {shard.url: shard.mark}, reading.storage_options
        )
        written = write_shard(place.at(task.name), samples, storage_options=place.storage_options)
    for warning in noted.warned:
        warnings.warn(without_starts(str(warning.message)), warning.category, stacklevel=2)
    found = {
        "read": len({piece.key for piece in noted.pieces if piece.came}),
        "joined": sum(len(starts) > 1 for starts in joined.kept.values()),
        "lost": noted.lost(),
        "odd_ends": noted.odd_ends,
    }
    return {**shard_facts(task.name, written), **found}


def _pieces(reading: Reading, url: str, noted: Noted) -> Iterator[tuple[Sample, Piece]]:
    """Read a shard, and yield the pieces of samples that come out."""
    opened = OpenShards(ShardList([url], empty_check=False, storage_options=reading.storage_options))
    grouped = GroupByKey(_Places(opened, noted), key_split=split_piece, on_error=noted.error)
    for sample in Stream(grouped):
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
