"""Check shards, and say what mends them.

Shards are checked one by one, and then what only all of them together show. Of each sample, 20
bytes are kept: the 64-bit hash of its key, its shard and its first byte. At the end the keys that
come again are read from the shards, so two keys with one hash are not reported.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, WdsError, WorkerError, command_over, for_commands
from wds_pipes.io.compression import unpacked
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import Urls, redact
from wds_pipes.tar.grouping import GroupedShard, Grouping, Member, SuspectSampleError
from wds_pipes.tar.index import (
    KEYS,
    OFFSETS,
    ShardFacts,
    beside,
    exists,
    find_facts,
    folder_of,
    list_shards,
    make_opener,
    pack_keys,
    pack_offsets,
)
from wds_pipes.tar.indexing import Hashed, readable
from wds_pipes.tar.keys import splitter
from wds_pipes.tar.reader import Link, ReservedNameError, TarReader
from wds_pipes.tools.jobs import Place, unfinished, without_interrupts
from wds_pipes.tools.looking import fault_of, of_all_fields
from wds_pipes.tools.progress import Units
from wds_pipes.tools.progress import progress as shown_progress
from wds_pipes.tools.reading import ShardWalk, facts_beside, fields_of, is_stream, sizes_of

_MOST_NAMED = 20  # findings of a kind about all shards that are reported; more are counted
_MOST_OF_A_KIND = 100  # findings of a shard that are kept; more are counted
_MOST_KEPT = 100_000  # findings of single shards that the report has; more are counted
_MANY_PARTS = 8  # of keys with dots, in one sample
_MOST_SETS = 10_000  # different sets of fields
_ENTRY = np.dtype([("hash", "<u8"), ("byte", "<u8"), ("shard", "<u4")])  # of a sample
_MENDING = ("repair", "dedup", "index")  # the order in which they may be run


class Finding(NamedTuple):
    """What is wrong.

    Attributes:
        kind: such as ``"damage"``: one of the kinds that ``wds-pipes verify`` lists.
        text: what is wrong, and where, in a sentence; what to do, in words of the command line.
        shard: the URL, without credentials; None: it is about several shards.
        key: the key of the sample; None: it is not about one.
        byte: the place in the (decompressed) tar; None: there is none.
        mend: a command that mends it; None: the text says what to do.
    """

    kind: str
    text: str
    shard: str | None = None
    key: str | None = None
    byte: int | None = None
    mend: str | None = None


@dataclass
class VerifyReport:
    """What was found in shards.

    Attributes:
        findings: in the order of the shards, and then those about several; at most 100 of a kind
            and shard, and 100,000 in all.
        counts: how many there are of each kind.
        shards: how many were read.
        samples: how many samples they have.
        outside: how many files belong to no sample.
        notes: what could not be checked.
    """

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    shards: int = 0
    samples: int = 0
    outside: int = 0
    notes: set[str] = field(default_factory=set)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        lists = {"findings": [finding._asdict() for finding in self.findings], "notes": sorted(self.notes)}
        counts = {"outside": self.outside, "counts": dict(self.counts)}
        return {"shards": self.shards, "samples": self.samples, **counts, **lists}

    def lines(self) -> Iterator[str]:
        """Return the notes, the commands that mend what was found, and a summary, as lines."""
        for note in sorted(self.notes):
            yield f"note: {note}"
        # a command mends all findings of its kind, and those of the same command with fewer options
        mends = {finding.mend: set(finding.mend.split()) for finding in self.findings if finding.mend is not None}
        mends = {mend: words for mend, words in mends.items() if not any(words < others for others in mends.values())}
        commands = sorted(mends, key=lambda mend: _MENDING.index(mend.split()[1]))
        if len(commands) > 1:
            yield "These commands mend it, one after the other, each on what the one before has written:"
        for command in commands:
            yield f"  -> {command}"
        total = self.counts.total()
        hidden = total - len(self.findings)
        more = f", of which {hidden:,} are not shown" if hidden else ""
        outside = f"; {plural(self.outside, 'file')} of no sample" if self.outside else ""
        yield (
            f"{plural(self.shards, 'shard')}, {plural(self.samples, 'sample')}: "
            f"{plural(total, 'finding') if total else 'nothing is wrong'}{more}{outside}"
        )


def verify(
    urls: Urls,
    *,
    decode: bool = False,
    index: str | None = None,
    ignore: Collection[str] = (),
    jobs: int = 1,
    executor: Executor | None = None,
    key_split: str = "first-dot",
    concatenated: bool = False,
    storage_options: dict[str, Any] | None = None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    progress: bool | None = False,
) -> VerifyReport:
    """Read shards to their ends and report what is wrong, with the shard, the key and the byte.

    Args:
        urls: the shards, or an ``index.json``.
        decode: also decode all fields; nothing that could run code.
        index: an ``index.json`` to compare with; None: the one in the directory of the shards, if
            there is one. If ``urls`` names the directory, all shards of this one must be there.
        ignore: kinds of findings to leave out.
        jobs: how many processes read shards.
        executor: what reads ``jobs`` shards at a time; None: processes of this machine.
        key_split: as in ``group_by_key``.
        concatenated: as in ``load_tar``.
        storage_options: how to reach the storage.
        on_finding: called with each finding.
        progress: True: show a progress bar, which needs tqdm; None: a line each minute.

    Raises:
        ValueError: nothing matches, or ``index`` is damaged.
        ShardError: the only shard does not exist, or ``index`` cannot be read.
        WorkerError: a process that read shards died.
    """
    report = VerifyReport()
    shards, facts = list_shards(urls, storage_options)
    options = Options(storage_options, key_split, decode, concatenated, tuple(map(str, items_of(urls))))
    checked, sets, missing = list[Checked](), dict[tuple[str, ...], FieldSet](), list[Finding]()

    def add(findings: Iterable[Finding], counts: Counter[str]) -> None:
        for finding in findings:
            if finding.kind not in ignore:
                on_finding(finding)
                if len(report.findings) < _MOST_KEPT:
                    report.findings.append(finding)
        report.counts.update({kind: count for kind, count in counts.items() if kind not in ignore})

    def unusable(shard: str, error: ValueError) -> None:
        missing.append(Finding("checksum", for_commands(error), redact(shard)))

    if index is not None:
        facts = find_facts(shards, index, storage_options)
    elif facts is None:
        missing.extend(_not_there(shards, options))
    known = list(facts or facts_beside(shards, storage_options, unusable))
    report.notes.update(_unfinished(shards, options))
    if without := sum(each.md5 is None for each in known):
        fields = "" if decode else ", and fields were not decoded (--decode)"
        report.notes.add(
            f"changed bytes inside of fields do not show: no MD5 of {plural(without, 'shard')} is known "
            f"(wds-pipes index writes them to an index.json){fields}"
        )
    sizes = [None] * len(shards) if progress is False else sizes_of(shards, known, storage_options)
    parts = {str(number): size or 1 for number, size in enumerate(sizes)}
    with shown_progress(sum(parts.values()), "B", show=progress) as advance:
        units = Units(advance, parts)
        for number, found in enumerate(_each(shards, known, options, jobs, executor, units=units)):
            add(found.findings, found.counts)
            report.shards, report.samples = report.shards + 1, report.samples + found.samples
            report.outside += found.outside
            report.notes |= found.notes
            for names, seen in found.sets.items():
                if names in sets:
                    sets[names].count += seen.count
                elif len(sets) < _MOST_SETS:
                    sets[names] = seen
                else:
                    report.notes.add(f"there are more than {_MOST_SETS:,} sets of fields, and not all were compared")
            checked.append(Checked(compressed=found.compressed, entries=found.entries))
            units.end(str(number))
    if "duplicate-key" not in ignore:
        add(*_duplicates(checked, shards, options))
    for findings in (missing, *_field_findings(sets, options)):
        add(findings[:_MOST_NAMED], Counter(finding.kind for finding in findings))
    return report


class Options(NamedTuple):
    """How shards are checked; it is sent to other processes.

    Attributes:
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.
        decode: whether fields are decoded.
        concatenated: as in ``load_tar``.
        urls: the shards as they were named, for the commands that mend.
    """

    storage_options: dict[str, Any] | None
    key_split: str
    decode: bool
    concatenated: bool
    urls: tuple[str, ...]

    def mending(self, command: str, shards: Iterable[str], *arguments: str) -> str:
        """Return a command that mends ``shards``, whose credentials are left out."""
        split = ["--key-split", self.key_split] if self.key_split != "first-dot" else []
        joined = ["--concatenated"] if self.concatenated and command != "dedup" else []
        return command_over(command, map(redact, shards), *arguments, *split, *joined)

    def repairing(self, *, repeated: bool = False) -> str:
        """Return the command that mends all that ``repair`` can, and writes to NEW. ``repeated``:
        also samples whose keys come again, of which it keeps the first.
        """
        options = [*(["--drop-repeated"] if repeated else []), *(["--decode"] if self.decode else [])]
        return self.mending("repair", self.urls, "NEW", *options)


def _not_there(shards: Iterable[str], options: Options) -> Iterator[Finding]:
    """Find the shards that a directory lacks, and its ``index.json`` lists. If shards are named
    otherwise than by their directory, those that are not named do not matter.
    """
    there = set(shards)
    for folder in sorted({f"{item.rstrip('/')}/" for item in options.urls}.intersection(map(folder_of, there))):
        index = f"{folder}index.json"
        with contextlib.suppress(ValueError):  # it is damaged, which is a finding of its own
            listed = list_shards(index, options.storage_options)[0] if exists(index, options.storage_options) else ()
            for url in listed:
                if url not in there and folder_of(url) == folder and not exists(url, options.storage_options):
                    text = f"shard {redact(url)} does not exist, and {redact(index)} lists it. Fetch or write it again"
                    yield Finding("checksum", text, redact(url))


def _unfinished(shards: Iterable[str], options: Options) -> Iterator[str]:
    """Say of which directories shards are missing, since the job that writes them has not ended."""
    for folder in dict.fromkeys(folder_of(url) for url in shards if not is_stream(url)):
        with contextlib.suppress(Exception):  # a store that may not be listed, or a damaged plan: it is only a note
            if found := unfinished(Place(folder or ".", options.storage_options or None)):
                command, left, total = found
                yield (
                    f"{redact(folder) or 'the working directory'} is not finished: {left:,} of "
                    f"{plural(total, 'task')} of wds-pipes {command} are left. Run that command again"
                )


def _each(
    shards: Sequence[str],
    known: Sequence[ShardFacts],
    options: Options,
    jobs: int,
    executor: Executor | None,
    *,
    units: Units,
) -> Iterator[Checked]:
    """Yield what was found in each shard, in order. Of shards that this process reads, the bytes
    are counted as they are read.
    """
    jobs = min(jobs, len(shards))
    if "-" in shards or (executor is None and jobs == 1):
        reaches = (partial(units.reach, str(number)) for number in range(len(shards)))
        yield from map(check_shard, shards, known, repeat(options), reaches)
        return
    # not forked: other threads of this process may hold locks
    spawn = multiprocessing.get_context("spawn")  # Ctrl-C ends these processes without a word
    pool = executor or ProcessPoolExecutor(jobs, spawn, signal.signal, (signal.SIGINT, signal.SIG_DFL))
    waiting = deque[Future[Checked]]()
    try:
        for url, facts in zip(shards, known, strict=True):
            with without_interrupts():  # which a process that starts now inherits
                waiting.append(pool.submit(check_shard, url, facts, options))
            if len(waiting) > 2 * jobs:
                yield waiting.popleft().result()
        yield from (each.result() for each in waiting)
    except BrokenProcessPool as error:
        raise WorkerError(
            "a process that read shards died, maybe because memory is short: try again with fewer, -j 1"
        ) from error
    finally:
        if executor is None:
            pool.shutdown(cancel_futures=True)


def _duplicates(
    checked: Sequence[Checked], shards: Sequence[str], options: Options
) -> tuple[list[Finding], Counter[str]]:
    """Return the keys that several shards have, and how many there are."""
    opener, count, findings = make_opener(options.storage_options), 0, list[Finding]()

    def key_at(place: npt.NDArray[Any]) -> str | None:
        byte, number = int(place["byte"]), int(place["shard"])
        start = 0 if checked[number].compressed else byte
        walk = ShardWalk(opener, shards[number], options.key_split, concatenated=options.concatenated, start=start)
        with contextlib.suppress(ShardError), contextlib.closing(walk.members()) as members:
            parts = next((splitter(options.key_split)(name) for _, name, _, begin in members if begin == byte), None)
            return parts and parts[0]
        return None

    for places in _repeated(checked):
        if count < _MOST_NAMED:
            first, others = places[0], places[places["shard"] != places[0]["shard"]]
            key = key_at(first)
            if key is None or key != key_at(others[0]):  # two keys with one hash
                continue
            where = ", ".join(f"{redact(shards[place['shard']])} (byte {place['byte']})" for place in others[:3])
            shown, byte = redact(shards[first["shard"]]), int(first["byte"])
            text = (
                f"shard {shown}, byte {byte}: key {key!r:.300} is also in {where}"
                f"{' and others' if len(others) > 3 else ''}. Rename one or, if they are the same sample, keep the "
                "first"
            )
            mend = options.mending("dedup", options.urls, "NEW")
            findings.append(Finding("duplicate-key", text, shown, key, byte, mend))
        count += 1
    findings.sort(key=lambda finding: (finding.shard, finding.byte))
    return findings, Counter({"duplicate-key": count} if count else {})


def _repeated(checked: Sequence[Checked]) -> Iterator[npt.NDArray[Any]]:
    """Yield the entries of each key that several shards have, in the order of the shards."""
    entries = np.concatenate([np.empty(0, _ENTRY), *(found.entries for found in checked)])
    entries["shard"] = np.repeat(np.arange(len(checked)), [len(found.entries) for found in checked])
    entries = entries[np.lexsort((entries["byte"], entries["shard"], entries["hash"]))]
    hashes = entries["hash"]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])  # where an entry has the hash of the next one
    for run in np.split(same, np.flatnonzero(np.diff(same) > 1) + 1) if same.size else ():
        found = entries[run[0] : run[-1] + 2]
        if (found["shard"] != found["shard"][0]).any():
            yield found


def _field_findings(sets: dict[tuple[str, ...], FieldSet], options: Options) -> tuple[list[Finding], list[Finding]]:
    """Return the fields that begin inside of keys with dots, and those that only some samples
    have.
    """
    total, counts = sum(seen.count for seen in sets.values()), Counter[str]()
    for names, seen in sets.items():
        counts.update(dict.fromkeys(names, seen.count))
    dotted, some = dict[str, Finding](), list[Finding]()
    whole: dict[tuple[str, ...], FieldSet] = {}  # the sets without such fields
    mend = options._replace(key_split="last-dot").repairing()
    for names, seen in sets.items():
        trapped = _trapped(names, counts, total)
        for name in trapped:
            text = (
                f"shard {seen.shard}, byte {seen.byte}: sample {seen.key!r} has field {name!r}, which looks like the "
                f"end of a key with a dot (in {plural(counts[name], 'sample')}). Read with --key-split "
                "last-dot, or write keys without dots"
            )
            dotted.setdefault(name, Finding("dotted-name", text, seen.shard, seen.key, seen.byte, mend))
        if not trapped:
            whole[names] = seen
    for name, count in sorted(counts.items()):
        lacking = 2 * count > total  # then the samples without it are the odd ones
        odd = next((seen for names, seen in whole.items() if (name in names) is not lacking), None)
        if count < total and name not in dotted and odd is not None:
            text = (
                f"shard {odd.shard}, byte {odd.byte}: sample {odd.key!r} is the first "
                f"{'without' if lacking else 'with'} field {name!r}, which {count:,} of {plural(total, 'sample')} "
                "have. If that is meant, pass --ignore some-fields"
            )
            some.append(Finding("some-fields", text, odd.shard, odd.key, odd.byte))
    return [dotted[name] for name in sorted(dotted)], some


def _trapped(names: Sequence[str], counts: Counter[str], total: int) -> list[str]:
    """Return the fields of a sample that look like the end of a key, a dot and a field.

    Few samples have such a field. What is before its last dot is the end of a key if all fields of
    the sample are so, or if other fields of the sample have the same endings without it; or if one
    sample has very many of them, as all of one key up to the first dot.
    """
    plain = {name for name in names if "." not in name}
    rare = [name for name in names if "." in name and 2 * counts[name] <= total]
    if not plain and len({name.rpartition(".")[0] for name in names if "/" not in name}) >= _MANY_PARTS:
        return list(names)
    if not plain:
        return rare if len(rare) == len(names) else []
    ends: dict[str, set[str]] = {}
    for name in rare:
        begin, _, end = name.rpartition(".")
        ends.setdefault(begin, set()).add(end)
    return rare if len(plain) > 1 and ends and all(of == plain for of in ends.values()) else []


@dataclass
class FieldSet:
    """The samples of a shard that have the same fields: how many, and which is the first."""

    count: int
    shard: str
    key: str
    byte: int


@dataclass
class Checked(VerifyReport):
    """What was found in one shard.

    Attributes:
        compressed: whether it is compressed.
        entries: the hashes of the keys of its samples, and their first bytes: shape (samples,).
        sets: its samples by the names of their fields.
    """

    compressed: bool = False
    entries: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, _ENTRY))
    sets: dict[tuple[str, ...], FieldSet] = field(default_factory=dict)


def check_shard(
    url: str, known: ShardFacts, options: Options, reach: Callable[[int], object] = lambda place: None
) -> Checked:
    """Read a shard to its end, and return what was found.

    Args:
        url: the shard.
        known: what an ``index.json`` says of it.
        options: how it is checked.
        reach: called with how many bytes of the (decompressed) tar were read.
    """
    check = _Check(url, known, options)
    check.read(reach)
    check.compare()
    return check.found


class _Check:
    """Checks one shard.

    Attributes:
        found: what was found.
    """

    def __init__(self, url: str, known: ShardFacts, options: Options) -> None:
        self._url, self._known, self._options = url, known, options
        self._shown, self.found = redact(url), Checked()
        self._opener, self._split = make_opener(options.storage_options), splitter(options.key_split)
        self._decoders = of_all_fields()
        self._keys, self._starts = list[str](), list[int]()  # of the samples
        self._end = 0  # of the last one
        self._hashed: Hashed | None = None  # the whole shard, if its MD5 is wanted
        self._joined = False  # whether it may be several archives

    def _add(
        self, kind: str, text: str, *, key: str | None = None, byte: int | None = None, mend: str | None = None
    ) -> None:
        """Count a finding, and keep it if there are not many of its kind."""
        self.found.counts[kind] += 1
        if self.found.counts[kind] <= _MOST_OF_A_KIND:
            self.found.findings.append(Finding(kind, text, self._shown, key, byte, mend))

    def _report(self, error: WdsError) -> None:
        kind = "sample" if isinstance(error, SampleError) else "damage"
        if isinstance(error, ReservedNameError):
            kind = "reserved-name"
        key, byte = getattr(error, "key", None), getattr(error, "offset", None)
        self._joined = self._joined or getattr(error, "joined", False)
        mend = self._options.repairing(repeated=kind == "sample")
        self._add(kind, for_commands(error), key=key, byte=byte, mend=mend)

    def _suspect(self, error: SuspectSampleError) -> bool:
        mend = "If it should have them, fetch or write the shard again. wds-pipes repair leaves this sample out"
        self._add("sample", f"{error.what}. {mend}", key=error.key, byte=error.offset)  # type: ignore[attr-defined]
        return False

    def _add_link(self, link: Link) -> None:
        parts = self._split(link.name)
        if parts is not None:
            self._add("link", link.describe(self._url), key=parts[0], byte=link.offset)

    def read(self, reach: Callable[[int], object]) -> None:
        """Read the shard to its end; ``reach``: as of ``check_shard``."""
        sets: dict[frozenset[str], FieldSet] = {}

        def note(sample: dict[str, Any]) -> None:
            self._keys.append(sample["__key__"])
            self._starts.append(shard.start)

        found, shard = self.found, GroupedShard(self._url)
        grouping = Grouping(self._options.key_split, report=self._report, lose=note, suspect=self._suspect)
        try:
            with readable(self._url), self._opener.open(self._url) as raw:
                hashed = None if self._known.md5 is None else Hashed(raw, threading.Event())
                stored = raw if hashed is None else io.BufferedReader(hashed, 1 << 20)
                stream, kind = unpacked(stored)
                found.compressed = bool(kind)
                reader = TarReader(
                    stream,
                    url=self._url,
                    on_error=self._report,
                    on_link=self._add_link,
                    concatenated=self._options.concatenated,
                    named=False,
                )
                for sample in grouping.samples(self._members(reader), shard):
                    note(sample)
                    reach(reader.offset)
                    fields = frozenset(name for name, _ in fields_of(sample))
                    first = FieldSet(0, self._shown, sample["__key__"], shard.start)
                    sets.setdefault(fields, first).count += 1
                self._end, found.outside = reader.offset, shard.outside
                warning = grouping.why_none(shard)
                if warning is not None and not found.counts["damage"]:
                    self._add("sample", for_commands(warning), byte=shard.first_outside[1])
                while hashed is not None and stored.read(1 << 20):
                    pass
                self._hashed = hashed
        except ShardError as error:
            if error.missing and self._options.urls == (self._url,):
                raise  # its name is wrong; of several, one may be lost
            self._add("damage", for_commands(error), byte=error.offset)  # type: ignore[attr-defined]
        found.samples, found.sets = len(self._keys), {tuple(sorted(names)): seen for names, seen in sets.items()}
        if self._joined:  # without --concatenated, repair loses the samples beside each joint
            found.findings = [one._replace(mend=None) for one in found.findings]
        if not found.samples:  # so there is nothing to repair, as in a file that is no tar
            found.findings = [one._replace(mend=None) if one.kind == "damage" else one for one in found.findings]
        found.entries = np.zeros(found.samples, _ENTRY)
        found.entries["hash"] = np.fromiter(map(hash_text, self._keys), np.uint64, found.samples)
        found.entries["byte"] = self._starts

    def _members(self, reader: TarReader) -> Iterator[Member]:
        """Yield the members of the shard, without their data."""
        for url, name, data, start in reader:
            parts = self._split(name) if self._options.decode and name and data is not None else None
            if parts is not None:
                key, of = parts[0], parts[1].lower()
                why = fault_of(self._decoders, of, data or b"", self.found.notes.add)
                if why is not None:
                    text = f"shard {self._shown}, byte {start}: field {of!r} of sample {key!r} cannot be decoded: {why}"
                    self._add("undecodable", text, key=key, byte=start, mend=self._options.repairing())
            yield url, name, None, start

    def compare(self) -> None:
        """Compare the shard with its entry in an index.json, and with the indexes beside it."""
        found, known, hashed, wrong = self.found, self._known, self._hashed, list[str]()
        whole = not found.counts["damage"]
        if hashed is not None and known.size not in (None, hashed.size):
            wrong.append(f"it has {hashed.size:,} bytes, and the index says {known.size:,}")
        elif hashed is not None and (digest := hashed.hexdigest()) != known.md5:
            wrong.append(f"its MD5 is {digest}, and the index says {known.md5}")
        if known.samples not in (None, found.samples) and whole:
            wrong.append(f"it has {found.samples:,} samples, and the index says {known.samples:,}")
        if wrong:
            self._add(
                "checksum",
                f"shard {self._shown} is not the one of its index: {'; '.join(wrong)}. Fetch or write it again; only "
                "if it was changed on purpose, index it again",
            )
        if not found.compressed and whole and not is_stream(self._url):
            self._compare_beside(OFFSETS, pack_offsets([*self._starts, self._end]))
            self._compare_beside(KEYS, pack_keys(self._keys))

    def _compare_beside(self, ending: str, right: bytes) -> None:
        """Compare an index beside the shard, if there is one, with what it should be."""
        place = beside(self._url, ending)
        try:
            with self._opener.open(place) as stream:
                same = stream.read() == right
        except ShardError as error:
            if not error.missing:
                self.found.notes.add(f"index {redact(place)} cannot be read, and was not compared")
            return
        if not same:
            where = ["--offsets-to", "DIRECTORY"] if is_remote(self._url) else ["--offsets"]
            mend = self._options.mending("index", [self._url], *where)
            self._add("stale-index", f"index {redact(place)} is not of shard {self._shown}", mend=mend)
