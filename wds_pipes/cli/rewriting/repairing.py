"""``repair``: the whole samples of damaged shards, and a list of what was lost.

Samples are found as ``load_tar`` and ``group_by_key`` find them with ``on_error="skip"``: what is
next to damage, and may be incomplete, is lost.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from wds_pipes.cli.look.decoders import fault_of, of_all_fields
from wds_pipes.cli.look.reading import Sample
from wds_pipes.cli.rewriting.spine import Reading, find_shards, plan, summed, with_writable_keys
from wds_pipes.cli.shards import check_same, shard_facts, write_indexes
from wds_pipes.core.stream import Stream
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardWarning
from wds_pipes.io.tasks.task import Facts, Job, Place, Report, Task
from wds_pipes.io.urls import redact
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.tar.headers import MAX_SIZE
from wds_pipes.tar.keys import is_metadata, splitter
from wds_pipes.tar.members import ASTRAY, GAP, Link, TarMember, reserved_name
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


@dataclass
class _Found:
    """A sample that came out: its key, and why it is not written; None: it is."""

    key: str
    why: str | None = None


class _Noted:
    """What is noted of a shard while it is read, and what was lost of it.

    Args:
        name: the shard, for messages.
        key_split: as in ``group_by_key``.
        drop_repeated: whether samples whose key came before are left out.
    """

    def __init__(self, name: str, key_split: str, *, drop_repeated: bool) -> None:
        self._name, self._split, self._drops = name, splitter(key_split), drop_repeated
        self._places: list[tuple[int, str | None]] = []  # first bytes, and the keys; None: a damaged place
        self._key: str | None = None  # of the sample that goes on
        self._fields = set[str]()  # that it has so far
        self._repeated: dict[int, str] = {}  # by the first byte: why a sample with the key of its neighbour is lost
        self._errors: list[Exception] = []
        self._damage: dict[int, str] = {}  # by the first byte of the place
        self._found: deque[_Found] = deque()
        self._files: list[dict[str, Any]] = []  # files of samples that are not written, as entries of the list
        self.odd_ends = 0  # 1: the shard may have been cut at its end
        self.warned: list[warnings.WarningMessage] = []  # while reading members, warnings of the end of the shard

    def error(self, error: Exception) -> str:
        """Note what was found, and say to go on."""
        self._errors.append(error)
        return "skip"

    def member(self, name: str, data: bytes | None, offset: int, end: int) -> bool:
        """Note a member, or a place that is none; return whether it is read."""
        parts = self._split(name) if name else None
        if parts is not None:
            key, field = parts[0], parts[1].lower()
            if not is_metadata(field):
                return self._goes_on(key, field, offset)
            error = reserved_name(self._name, key, field, name, offset=offset)
            self._add_file(name, key, offset, end, str(error).partition(", or write the shard")[0])
            return False
        if not name and data in (GAP, ASTRAY):
            self._key = None
            self._places.append((offset, None))
            self._damage[offset] = str(self._errors.pop()) if self._errors else "members were lost there"
        return True

    def _goes_on(self, key: str, field: str, offset: int) -> bool:
        """Note a file of a sample; return whether it is read. If the sample has the field, another
        sample with its key begins.

        Raises:
            SampleError: one does, and it is not left out.
        """
        if key != self._key:
            self._key, self._fields = key, {field}
            self._places.append((offset, key))
        elif field in self._fields:
            self._repeated[offset] = _repeats(self._name, key, field, drops=self._drops)
            self._fields = {field}
            self._places.append((offset, key))
        else:
            self._fields.add(field)
        return self._places[-1][0] not in self._repeated

    def link(self, link: Link) -> None:
        """Note a link."""
        parts = self._split(link.name)
        if parts is not None:
            self._add_file(link.name, parts[0], link.offset, link.end, link.describe(self._name))

    def _add_file(self, name: str, key: str, start: int, end: int, why: str) -> None:
        self._files.append({"shard": self._name, "start": start, "end": end, "key": key, "file": name, "why": why})

    def end(self, offset: int) -> None:
        """Note where the members of the shard end, if reading has warned of the end."""
        if doubts := [one for one in self.warned if issubclass(one.category, ShardWarning)]:
            self.odd_ends = 1
            self._places.append((offset, None))
            self._damage[offset] = " ".join(str(one.message) for one in doubts)
            self.warned[:] = [one for one in self.warned if one not in doubts]

    def came(self, key: str) -> _Found:
        """Note that a sample came out."""
        self._found.append(_Found(key))
        return self._found[-1]

    def lost(self) -> list[dict[str, Any]]:
        """Return what was lost, in the order of the shard."""
        lost, last = list[dict[str, Any]](), len(self._places) - 1
        for number, (start, key) in enumerate(self._places):
            end = None if number == last else self._places[number + 1][0]
            why: str | None
            if key is None:
                why = self._damage[start]
            elif start in self._repeated:
                why = self._repeated[start]
            elif self._found and self._found[0].key == key:
                why = self._found.popleft().why
            else:
                why = self._reason(number, start, end)
            if why is not None:
                lost.append({"shard": self._name, "start": start, "end": end, "key": key, "why": why})
        return sorted([*lost, *self._files], key=lambda entry: entry["start"])

    def _reason(self, number: int, start: int, end: int | None) -> str:
        """Return why a sample did not come out."""
        for error in self._errors:
            offset = getattr(error, "offset", None)
            if offset is not None and start <= offset and (end is None or offset <= end):
                return str(error)
        beside = [byte for byte, key in self._places[max(0, number - 1) : number + 2] if key is None]
        if beside:
            return f"it is next to the damage at byte {beside[0]}, and may be incomplete"
        before = [byte for byte, key in self._places[:number] if key is None]
        return f"it comes after the damage at byte {before[-1] if before else start}, and may be a file inside a file"


def _repeats(shard: str, key: str, field: str, *, drops: bool) -> str:
    """Return why a sample is left out whose key and field came before.

    Raises:
        SampleError: it is not left out.
    """
    if not drops:
        raise SampleError(
            f"two samples of shard {shard} have the key {key!r} and field {field!r}: pass --drop-repeated to keep "
            "the first one",
            url=shard,
            key=key,
        )
    return f"a sample with its key, and field {field!r}, came before"


class _Places(LoadTar):
    """Reads the members of one shard, and notes where samples and damaged places begin."""

    def __init__(self, source: OpenShards, noted: _Noted) -> None:
        super().__init__(source, max_member_bytes=MAX_SIZE, on_error=noted.error)
        self._noted, self.on_link = noted, noted.link

    def run(self) -> Iterator[TarMember]:
        for member in super().run():
            _, name, data, offset = member
            if self._noted.member(name, data, offset, self.bytes_so_far):
                yield member
        self._noted.end(self.bytes_read)


class _AgainError(Exception):
    """Keys come again in a shard, so it is read once more."""


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
        samples = sum(entry["key"] is not None for entry in lost) - files
        places, shards = len(lost) - samples - files - odd_ends, len({entry["shard"] for entry in lost})
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
    again: Counter[str] | None = None
    while True:
        one = _Shard(repair, redact(shard.url), again)
        try:
            with _quiet() as one.noted.warned:
                samples = with_writable_keys(one.samples(shard.url), repair.reading.key_split)
                written = write_shard(place.at(task.name), samples, storage_options=place.storage_options)
        except _AgainError:
            again = one.pieces
            continue
        for warning in one.noted.warned:
            warnings.warn(warning.message, stacklevel=2)
        noted = one.noted
        found = {"read": one.read, "joined": one.joined, "lost": noted.lost(), "odd_ends": noted.odd_ends}
        return {**shard_facts(task.name, written), **found}


class _Shard:
    """The repair of one shard.

    Args:
        repair: how it is done.
        shown: the shard, for messages.
        again: how often each key comes, if some come again; None: it is not known.
    """

    def __init__(self, repair: Repair, shown: str, again: Counter[str] | None) -> None:
        self._repair, self._shown, self._again = repair, shown, again
        self.noted = _Noted(shown, repair.reading.key_split, drop_repeated=repair.drop_repeated)
        self.pieces = Counter[str]()  # how many there are of each key
        self.joined = 0
        self._decoders = of_all_fields() if repair.decode else None

    @property
    def read(self) -> int:
        """How many whole samples the shard has."""
        return len(self.pieces)

    def samples(self, url: str) -> Iterator[Sample]:
        """Yield the samples to write.

        Raises:
            _AgainError: keys come again, which is not known; ``pieces`` then has how often.
            SampleError: a sample has the key of another one.
        """
        reading, noted = self._repair.reading, self.noted
        opened = OpenShards(ShardList([url], storage_options=reading.storage_options))
        grouped = GroupByKey(
            _Places(opened, noted), key_split=reading.key_split, on_repeated_key="ignore", on_error=noted.error
        )
        found = iter(Stream(grouped))
        for sample, entries in self._joined(found) if self._again else self._alone(found):
            if (why := self._fault(sample)) is None:
                yield sample
            for entry in entries:
                entry.why = entry.why or why

    def _alone(self, found: Iterator[Sample]) -> Iterator[tuple[Sample, list[_Found]]]:
        """Yield samples whose keys come once."""
        for sample in found:
            key = sample["__key__"]
            if key in self.pieces:
                self.pieces.update([key, *(rest["__key__"] for rest in found)])
                raise _AgainError
            self.pieces[key] = 1
            yield sample, [self.noted.came(key)]

    def _joined(self, found: Iterator[Sample]) -> Iterator[tuple[Sample, list[_Found]]]:
        """Yield samples when their last piece has come."""
        held: dict[str, tuple[Sample, list[_Found]]] = {}
        assert self._again is not None
        for sample in found:
            key = sample["__key__"]
            self.pieces[key] += 1
            whole, entries = held.setdefault(key, (sample, []))
            entries.append(self.noted.came(key))
            if len(entries) > 1:
                twice = next((name for name in sample if not is_metadata(name) and name in whole), None)
                if twice is None:
                    whole.update(sample)
                    self.joined += 1
                else:
                    entries.pop().why = _repeats(self._shown, key, twice, drops=self._repair.drop_repeated)
            if self.pieces[key] == self._again[key]:
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
