"""Check shards, and say what mends them.

Shards are checked one by one, and then what only all of them together show. Of each sample, 20
bytes are kept: the 64-bit hash of its key, its shard and its first byte. At the end the keys that
come again are read from the shards, so two keys with one hash are not reported.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import shlex
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, WdsError, WorkerError
from wds_pipes.io.compression import unpacked
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import Urls, redact
from wds_pipes.tar.grouping import Grouping, Member
from wds_pipes.tar.index import ShardFacts, folder_of, make_opener
from wds_pipes.tar.keys import splitter
from wds_pipes.tar.listing import exists, find_facts, list_shards
from wds_pipes.tar.members import Link, ReservedNameError
from wds_pipes.tar.offsets import KEYS, OFFSETS, beside, pack_keys, pack_offsets
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.scanning import Hashed, Scanned, readable
from wds_pipes.tools.describing import fault_of, of_all_fields
from wds_pipes.tools.engines import without_interrupts
from wds_pipes.tools.findings import Finding, VerifyReport
from wds_pipes.tools.jobs import Place, unfinished
from wds_pipes.tools.progress import progress
from wds_pipes.tools.reading import ShardWalk, fields_of

_MOST_NAMED = 20  # findings of a kind about all shards that are reported; more are counted
_MOST_OF_A_KIND = 100  # findings of a shard that are kept; more are counted
_MOST_KEPT = 100_000  # findings of single shards that the report has; more are counted
_MOST_SETS = 10_000  # different sets of fields
_ENTRY = np.dtype([("hash", "<u8"), ("byte", "<u8"), ("shard", "<u4")])  # of a sample


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
    show: bool | None = False,
) -> VerifyReport:
    """Read shards to their ends and report what is wrong, with the shard, the key and the byte.

    Args:
        urls: the shards, or an ``index.json``.
        decode: also decode all fields; nothing that could run code.
        index: an ``index.json`` to compare with; None: the one in the directory of the shards, if
            there is one.
        ignore: kinds of findings to leave out.
        jobs: how many processes read shards.
        executor: what reads ``jobs`` shards at a time; None: processes of this machine.
        key_split: as in ``group_by_key``.
        concatenated: as in ``load_tar``.
        storage_options: how to reach the storage.
        on_finding: called with each finding.
        show: whether progress is shown on standard error: True: a bar, which needs tqdm; None: a
            line each 30 seconds.

    Raises:
        ValueError: nothing matches, or ``index`` is damaged.
        ShardError: the only shard does not exist, or ``index`` cannot be read.
        WorkerError: a process that read shards died.
    """
    report = VerifyReport()
    shards, facts = list_shards(urls, storage_options)
    options = Options(storage_options, key_split, decode, concatenated, tuple(map(str, items_of(urls))))
    sets, compressed, keys = dict[tuple[str, ...], FieldSet](), list[bool](), list[npt.NDArray[Any]]()

    def add(findings: Iterable[Finding], counts: Counter[str]) -> None:
        for finding in findings:
            if finding.kind not in ignore:
                on_finding(finding)
                if len(report.findings) < _MOST_KEPT:
                    report.findings.append(finding)
        report.counts.update({kind: count for kind, count in counts.items() if kind not in ignore})

    if index is not None:
        facts = find_facts(shards, index, storage_options)
    known, missing = (list(facts), []) if facts is not None else _known(shards, options)
    report.notes.update(_unfinished(shards, options))
    without = sum(each is None or each.md5 is None for each in known)
    if without:
        fields = "" if decode else ", and fields were not decoded (--decode)"
        report.notes.add(
            f"changed bytes inside of fields do not show: no MD5 of {plural(without, 'shard')} is known "
            f"(wds-pipes index writes them to an index.json){fields}"
        )
    with progress(len(shards), "shard", show=show) as advance:
        for number, checked in enumerate(_each(shards, known, options, jobs, executor)):
            add(checked.findings, checked.counts)
            report.shards, report.samples = number + 1, report.samples + checked.samples
            report.outside += checked.outside
            report.notes |= checked.notes
            compressed.append(checked.compressed)
            keys.append(checked.entries.copy())  # one that came from Ray is read-only
            keys[-1]["shard"] = number
            for names, seen in checked.sets.items():
                if names in sets:
                    sets[names].count += seen.count
                elif len(sets) < _MOST_SETS:
                    sets[names] = seen
                else:
                    report.notes.add(f"there are more than {_MOST_SETS:,} sets of fields, and not all were compared")
            advance(1)
    if "duplicate-key" not in ignore:
        add(*_duplicates(keys, shards, compressed, options))
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

    def mending(self, command: str, *arguments: str) -> str:
        """Return a command that mends shards."""
        split = ["--key-split", self.key_split] if self.key_split != "first-dot" else []
        joined = ["--concatenated"] if self.concatenated and command != "dedup" else []
        return shlex.join(["wds-pipes", command, *arguments, *split, *joined])

    def repairing(self) -> str:
        """Return the command that mends all that ``repair`` can, and writes to NEW."""
        decode = ["--decode"] if self.decode else []
        return self.mending("repair", *map(redact, self.urls), "NEW", "--drop-repeated", *decode)


def _folders(shards: Sequence[str]) -> dict[str, list[str]]:
    """Return the directories of shards, each with its shards."""
    folders: dict[str, list[str]] = {}
    for url in shards:
        if url != "-" and not url.startswith("pipe:"):
            folders.setdefault(folder_of(url), []).append(url)
    return folders


def _known(shards: Sequence[str], options: Options) -> tuple[list[ShardFacts | None], list[Finding]]:
    """Return what the index.json beside each shard says of it, and which of them do not fit."""
    found, findings = dict[str, ShardFacts](), list[Finding]()
    for folder, members in _folders(shards).items():
        place = f"{folder}index.json"
        if exists(place, options.storage_options):
            try:
                found.update(zip(members, find_facts(members, place, options.storage_options), strict=True))
            except ValueError as error:  # it is damaged, or does not have one of them
                findings.append(Finding("checksum", str(error), redact(members[0])))
    return [found.get(url) for url in shards], findings


def _unfinished(shards: Sequence[str], options: Options) -> Iterator[str]:
    """Say of which directories shards are missing, since the job that writes them has not ended."""
    for folder in _folders(shards):
        with contextlib.suppress(Exception):  # a store that may not be listed, or a damaged plan: it is only a note
            found = unfinished(Place(folder or ".", options.storage_options or None))
            if found is not None:
                command, left, total = found
                yield (
                    f"{redact(folder) or 'the working directory'} is not finished: {left:,} of "
                    f"{plural(total, 'task')} of wds-pipes {command} are left. Run that command again"
                )


def _each(
    shards: Sequence[str],
    known: Sequence[ShardFacts | None],
    options: Options,
    jobs: int,
    executor: Executor | None,
) -> Iterator[Checked]:
    """Yield what was found in each shard, in order."""
    if "-" in shards or (executor is None and min(jobs, len(shards)) == 1):
        yield from map(check_shard, shards, known, repeat(options))
        return
    # not forked: other threads of this process may hold locks
    spawn = multiprocessing.get_context("spawn")  # Ctrl-C ends these processes without a word
    pool = executor or ProcessPoolExecutor(
        min(jobs, len(shards)), spawn, signal.signal, (signal.SIGINT, signal.SIG_DFL)
    )
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
    keys: Sequence[npt.NDArray[Any]], shards: Sequence[str], compressed: Sequence[bool], options: Options
) -> tuple[list[Finding], Counter[str]]:
    """Return the keys that several shards have, and how many there are."""
    opener, count = make_opener(options.storage_options), 0
    findings: list[Finding] = []

    def key_at(place: npt.NDArray[Any]) -> str | None:
        byte, number = int(place["byte"]), int(place["shard"])
        start = 0 if compressed[number] else byte
        walk = ShardWalk(opener, shards[number], options.key_split, concatenated=options.concatenated, start=start)
        with contextlib.suppress(ShardError), contextlib.closing(walk.members()) as members:
            parts = next((splitter(options.key_split)(name) for _, name, _, begin in members if begin == byte), None)
            return parts and parts[0]
        return None

    for places in _repeated(keys):
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
            findings.append(
                Finding(
                    "duplicate-key", text, shown, key, byte, options.mending("dedup", *map(redact, options.urls), "NEW")
                )
            )
        count += 1
    findings.sort(key=lambda finding: (finding.shard, finding.byte))
    return findings, Counter({"duplicate-key": count} if count else {})


def _repeated(kept: Sequence[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    """Yield the entries of each key that several shards have, in the order of the shards."""
    entries = np.concatenate([np.empty(0, _ENTRY), *kept])
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
    traps: dict[str, FieldSet] = {}
    whole: dict[tuple[str, ...], FieldSet] = {}  # the sets without such fields
    for names, seen in sets.items():
        trapped = _trapped(names, counts, total)
        for name in trapped:
            traps.setdefault(name, seen)
        if not trapped:
            whole[names] = seen
    dotted = []
    for name, seen in sorted(traps.items()):
        text = (
            f"shard {seen.shard}, byte {seen.byte}: sample {seen.key!r} has field {name!r}, which looks like the end "
            f"of a key with a dot (in {plural(counts[name], 'sample')}). Read with key_split='last-dot' (--key-split "
            "last-dot), or write keys without dots"
        )
        mend = options._replace(key_split="last-dot").repairing()
        dotted.append(Finding("dotted-name", text, seen.shard, seen.key, seen.byte, mend))
    some = []
    for name, count in sorted(counts.items()):
        lacking = 2 * count > total  # then the samples without it are the odd ones
        odd = [seen for names, seen in whole.items() if (name in names) is not lacking]
        if count == total or name in traps or not odd:
            continue
        seen = odd[0]
        text = (
            f"shard {seen.shard}, byte {seen.byte}: sample {seen.key!r} is the first "
            f"{'without' if lacking else 'with'} field {name!r}, which {count:,} of {plural(total, 'sample')} have. "
            "If that is meant, pass --ignore some-fields"
        )
        some.append(Finding("some-fields", text, seen.shard, seen.key, seen.byte))
    return dotted, some


def _trapped(names: Sequence[str], counts: Counter[str], total: int) -> list[str]:
    """Return the fields of a sample that look like the end of a key, a dot and a field.

    Few samples have such a field. What is before its last dot is the end of a key if all fields of
    the sample are so, or if other fields of the sample have the same endings without it.
    """
    plain = {name for name in names if "." not in name}
    rare = [name for name in names if "." in name and 2 * counts[name] <= total]
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


def check_shard(url: str, known: ShardFacts | None, options: Options) -> Checked:
    """Read a shard to its end, and return what was found.

    Args:
        url: the shard.
        known: what an ``index.json`` says of it; None: there is none.
        options: how it is checked.
    """
    check = _Check(url, known, options)
    check.run()
    return check.found


class _Check:
    def __init__(self, url: str, known: ShardFacts | None, options: Options) -> None:
        self._url, self._known, self._options = url, known, options
        self._shown, self.found, self._scanned = redact(url), Checked(), Scanned()
        self._opener, self._split = make_opener(options.storage_options), splitter(options.key_split)
        self._sets: dict[frozenset[str], FieldSet] = {}
        self._decoders = of_all_fields()

    def run(self) -> None:
        found, scanned = self.found, self._scanned
        hashed = self._read()
        found.samples, found.outside = len(scanned.keys), scanned.outside
        if not found.samples:  # so there is nothing to repair, as in a file that is no tar
            found.findings = [one._replace(mend=None) if one.kind == "damage" else one for one in found.findings]
        found.entries = np.zeros(len(scanned.keys), _ENTRY)
        found.entries["hash"] = np.fromiter(map(hash_text, scanned.keys), np.uint64, len(scanned.keys))
        found.entries["byte"] = scanned.starts
        found.sets = {tuple(sorted(names)): seen for names, seen in self._sets.items()}
        self._compare_facts(hashed)
        if not found.compressed and not found.counts["damage"] and self._url != "-" and self._url[:5] != "pipe:":
            self._compare_indexes()

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
        self._add(kind, str(error), key=key, byte=byte, mend=self._options.repairing())

    def _read(self) -> Hashed | None:
        """Read the shard; return what was read if all of it was, and its MD5 is wanted."""
        found, known, scanned = self.found, self._known, self._scanned

        def note(sample: dict[str, Any]) -> None:
            scanned.keys.append(sample["__key__"])
            scanned.starts.append(grouping.start)

        grouping = Grouping(self._options.key_split, report=self._report, lose=note)
        try:
            with readable(self._url), self._opener.open(self._url) as raw:
                hashed = Hashed(raw, threading.Event()) if known is not None and known.md5 is not None else None
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
                for sample in grouping.samples(self._members(reader), self._url):
                    note(sample)
                    fields = frozenset(name for name, _ in fields_of(sample))
                    first = FieldSet(0, self._shown, sample["__key__"], grouping.start)
                    self._sets.setdefault(fields, first).count += 1
                scanned.outside, scanned.end = grouping.outside, reader.offset
                why = grouping.why_none(self._url)
                if why is not None and not found.counts["damage"]:
                    self._add("sample", why, byte=grouping.first_outside[1])
                while hashed is not None and stored.read(1 << 20):
                    pass
                return hashed
        except ShardError as error:
            if error.missing and self._options.urls == (self._url,):
                raise  # its name is wrong; of several, one may be lost
            self._add("damage", str(error), byte=error.offset)  # type: ignore[attr-defined]
        return None

    def _add_link(self, link: Link) -> None:
        parts = self._split(link.name)
        if parts is not None:
            self._add("link", link.describe(self._url), key=parts[0], byte=link.offset)

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

    def _compare_facts(self, hashed: Hashed | None) -> None:
        """Compare the shard with its entry in an index.json."""
        found, known = self.found, self._known
        if known is None:
            return
        wrong = []
        if hashed is not None:
            if known.size not in (None, hashed.size):
                wrong.append(f"it has {hashed.size:,} bytes, and the index says {known.size:,}")
            elif (digest := hashed.md5.hexdigest()) != known.md5:
                wrong.append(f"its MD5 is {digest}, and the index says {known.md5}")
        if known.samples not in (None, found.samples) and not found.counts["damage"]:
            wrong.append(f"it has {found.samples:,} samples, and the index says {known.samples:,}")
        if wrong:
            text = (
                f"shard {self._shown} is not the one of its index: {'; '.join(wrong)}. Fetch or write it again; only "
                "if it was changed on purpose, index it again"
            )
            self._add("checksum", text)

    def _compare_indexes(self) -> None:
        """Compare the indexes beside the shard with where its samples are."""
        scanned, opener = self._scanned, self._opener
        where = ["--offsets-to", "DIRECTORY"] if is_remote(self._url) else ["--offsets"]
        mend = self._options.mending("index", self._shown, *where)
        indexes = {OFFSETS: pack_offsets([*scanned.starts, scanned.end]), KEYS: pack_keys(scanned.keys)}
        for ending, right in indexes.items():
            place = beside(self._url, ending)
            try:
                with opener.open(place) as stream:
                    same = stream.read() == right
            except ShardError as error:
                same = True
                if not error.missing:
                    self.found.notes.add(f"index {redact(place)} cannot be read, and was not compared")
            if not same:
                self._add("stale-index", f"index {redact(place)} is not of shard {self._shown}", mend=mend)
