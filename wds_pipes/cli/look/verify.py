"""``wds-pipes verify``: checks shards, and says what mends them.

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
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import filterfalse, islice
from typing import Any, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from wds_pipes.cli.look.describing import fault_of, of_all_fields
from wds_pipes.cli.options import (
    FOUND,
    as_json,
    echo,
    echo_json,
    engine,
    example,
    executor_of,
    for_commands,
    in_one_line,
    key_split,
    storage_options,
    urls,
)
from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, WdsError, WorkerError
from wds_pipes.io.compression import unpacked
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.tasks.engines import without_interrupts
from wds_pipes.io.tasks.running import unfinished
from wds_pipes.io.tasks.task import Place
from wds_pipes.io.urls import redact
from wds_pipes.tar.grouping import Grouping, Member
from wds_pipes.tar.index import ShardFacts, folder_of, make_opener
from wds_pipes.tar.keys import is_metadata, splitter
from wds_pipes.tar.listing import exists, find_facts, list_shards
from wds_pipes.tar.members import Link, ReservedNameError
from wds_pipes.tar.offsets import KEYS, OFFSETS, beside, pack_keys, pack_offsets
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.scanning import Hashed, Scanned, readable

# The kinds of findings; the reference of the command line says what each means.
KINDS = (
    "damage",
    "sample",
    "reserved-name",
    "link",
    "duplicate-key",
    "undecodable",
    "some-fields",
    "dotted-name",
    "checksum",
    "stale-index",
)


@click.command(
    epilog=example("wds-pipes verify 'train-*.tar' -j 4\nwds-pipes verify --decode --json s3://bucket/train/index.json")
)
@urls
@click.option("--decode", is_flag=True, help="Also decode all fields; nothing that could run code.")
@click.option("--index", metavar="PATH", help="Compare with this index.json.  [default: the one beside the shards]")
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    type=click.Choice(KINDS),
    help="Leave out findings of a kind; repeatable.",
)
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="How many processes read shards."
)
@engine
@as_json
@key_split
@storage_options
def verify(
    *,
    urls: tuple[str, ...],
    decode: bool,
    index: str | None,
    ignored: tuple[str, ...],
    jobs: int,
    engine: str | None,
    as_json: bool,
    key_split: str,
    storage_options: Any,
) -> None:
    """Read shards to their ends and report what is wrong, with the shard, the key and the byte.

    It reports all damage that reading finds; keys that come twice, in a shard or in several; files
    that no sample can have: links, and names that are kept for metadata; shards of which no file
    makes a sample; fields that only some samples have; keys with dots; with --decode, fields that
    cannot be decoded; sizes and MD5s other than those of the index.json beside the shards; indexes
    of offsets and of keys that are of other shards. A note says what was not looked at.
    Bytes are those of the tar, after decompression.

    The exit code is 0 if nothing was found, 1 if something was, and 2 if the command was not called
    rightly.
    """
    with in_one_line():
        mends, progress = dict[str, None](), sys.stderr.isatty() and not as_json

        def show(finding: Finding) -> None:
            if not as_json:
                echo(" ".join(f"{finding.kind}: {finding.text}".split()))
            if finding.mend is not None:
                mends[finding.mend] = None  # it mends all findings of its kind

        def on_shard(number: int) -> None:
            if progress:
                click.echo(f"\r{number:,} shards read ", nl=False, err=True)

        options = Options(storage_options, key_split, decode)
        with executor_of(engine) as executor:
            jobs = jobs if executor is None else executor.width
            report = Report(ignored, show, on_shard)
            check(report, urls, options, index=index, jobs=jobs, executor=executor)
        if progress:
            click.echo(f"\r{'':30}\r", nl=False, err=True)
        total = sum(report.counts.values())
        if as_json:
            content = {
                "shards": report.shards,
                "samples": report.samples,
                "outside": report.outside,
                "counts": dict(report.counts),
                "findings": [finding._asdict() for finding in report.findings],
                "notes": sorted(report.notes),
            }
            echo_json(content)
        else:
            for note in sorted(report.notes):
                echo(f"note: {note}")
            commands = sorted(mends, key=lambda mend: _MENDING.index(mend.split()[1]))
            if len(commands) > 1:
                echo("These commands mend it, one after the other, each on what the one before has written:")
            for command in commands:
                echo(f"  -> {command}")
            hidden = total - len(report.findings)
            more = f", of which {hidden:,} are not shown" if hidden else ""
            outside = f"; {plural(report.outside, 'file')} of no sample" if report.outside else ""
            echo(
                f"{plural(report.shards, 'shard')}, {plural(report.samples, 'sample')}: "
                f"{plural(total, 'finding') if total else 'nothing is wrong'}{more}{outside}"
            )
        if total:
            raise SystemExit(FOUND)


_MENDING = ("repair", "dedup", "index")  # the order in which they may be run
_MOST_NAMED = 20  # findings of a kind about all shards that are reported; more are counted
_MOST_KEPT = 100_000  # findings of single shards that the report has; more are counted
_MOST_SETS = 10_000  # different sets of fields


_ENTRY = np.dtype([("hash", "<u8"), ("byte", "<u8"), ("shard", "<u4")])  # of a sample


@dataclass
class Report:
    """What was found in all shards.

    Attributes:
        ignored: kinds of findings to leave out.
        on_finding: called with each finding.
        on_shard: called with the number of shards that were read so far.
        findings: in the order of the shards, and then those about several.
        counts: how many there are of each kind.
        shards: how many were read.
        samples: how many samples they have.
        outside: how many files belong to no sample.
        notes: what could not be checked.
    """

    ignored: Collection[str] = ()
    on_finding: Callable[[Finding], None] = lambda finding: None
    on_shard: Callable[[int], None] = lambda number: None
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    shards: int = 0
    samples: int = 0
    outside: int = 0
    notes: set[str] = field(default_factory=set)

    def add(self, findings: Iterable[Finding], counts: Counter[str]) -> None:
        """Add what was found, and how much of it there is of each kind."""
        for finding in findings:
            if finding.kind not in self.ignored:
                self.on_finding(finding)
                if len(self.findings) < _MOST_KEPT:
                    self.findings.append(finding)
        self.counts += Counter({kind: count for kind, count in counts.items() if kind not in self.ignored})


def check(
    report: Report,
    urls: Sequence[str],
    options: Options,
    *,
    index: str | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
) -> None:
    """Check shards.

    Args:
        report: what is found is added to it.
        urls: the shards, or an ``index.json``.
        options: how they are checked.
        index: an ``index.json`` to compare with; None: the one in the directory of the shards, if
            there is one.
        jobs: how many processes read shards.
        executor: what reads ``jobs`` shards at a time; None: processes of this machine.

    Raises:
        ValueError: nothing matches, or ``index`` is damaged.
    """
    shards, facts = list_shards(list(urls), options.storage_options)
    options = options._replace(urls=tuple(urls))
    sets, compressed = dict[tuple[str, ...], FieldSet](), list[bool]()
    keys: list[npt.NDArray[Any]] = []
    known, missing = _known(shards, facts, index, options)
    report.notes |= {*_unfinished(shards, options), *_not_looked_at(known, options)}
    for number, checked in enumerate(_each(shards, known, options, jobs, executor)):
        report.add(checked.findings, checked.counts)
        report.on_shard(number + 1)
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
    if "duplicate-key" not in report.ignored:
        report.add(*_duplicates(keys, shards, compressed, options))
    for findings in (missing, *_field_findings(sets, options)):
        report.add(findings[:_MOST_NAMED], Counter(finding.kind for finding in findings))


def _known(
    shards: Sequence[str], facts: Iterable[ShardFacts] | None, index: str | None, options: Options
) -> tuple[list[ShardFacts | None], list[Finding]]:
    """Return what an index.json says of each shard (``facts``, if the shards come from one), and
    which directories have one that does not fit.
    """
    if facts is not None and index is None:
        return list(facts), []
    storage_options = options.storage_options
    if index is not None:
        return list(find_facts(shards, index, storage_options)), []
    found: dict[str, ShardFacts] = {}
    findings = []
    folders: dict[str, list[str]] = {}
    for url in shards:
        if url != "-" and not url.startswith("pipe:"):
            folders.setdefault(folder_of(url), []).append(url)
    for folder, members in folders.items():
        place = f"{folder}index.json"
        if exists(place, storage_options):
            try:
                found.update(zip(members, find_facts(members, place, storage_options), strict=True))
            except ValueError as error:  # it is damaged, or does not have one of them
                findings.append(Finding("checksum", str(error), redact(members[0])))
    return [found.get(url) for url in shards], findings


def _unfinished(shards: Sequence[str], options: Options) -> Iterator[str]:
    """Say of which directories shards are missing, since the job that writes them has not ended."""
    for folder in dict.fromkeys(folder_of(url) for url in shards if url != "-" and not url.startswith("pipe:")):
        with contextlib.suppress(Exception):  # a store that may not be listed, or a damaged plan: it is only a note
            found = unfinished(Place(folder or ".", options.storage_options or None))
            if found is not None:
                command, left, total = found
                yield (
                    f"{redact(folder) or 'the working directory'} is not finished: {left:,} of "
                    f"{plural(total, 'task')} of wds-pipes {command} are left. Run that command again"
                )


def _not_looked_at(known: Sequence[ShardFacts | None], options: Options) -> Iterator[str]:
    """Say what would show only in bytes that are not looked at."""
    without = sum(facts is None or facts.md5 is None for facts in known)
    if without:
        fields = "" if options.decode else ", and fields were not decoded (--decode)"
        yield (
            f"changed bytes inside of fields do not show: no MD5 of {plural(without, 'shard')} is known "
            f"(wds-pipes index writes them to an index.json){fields}"
        )


def _each(
    shards: Sequence[str],
    known: Sequence[ShardFacts | None],
    options: Options,
    jobs: int,
    executor: Executor | None,
) -> Iterator[Checked]:
    """Yield what was found in each shard, in order."""
    pairs = zip(shards, known, strict=True)
    if (executor is None and min(jobs, len(shards)) == 1) or "-" in shards:
        for url, facts in pairs:
            yield check_shard(url, facts, options)
        return
    # not forked: other threads of this process may hold locks
    spawn = multiprocessing.get_context("spawn")  # Ctrl-C ends these processes without a word
    pool = executor or ProcessPoolExecutor(
        min(jobs, len(shards)), spawn, signal.signal, (signal.SIGINT, signal.SIG_DFL)
    )

    def submit(count: int) -> list[Future[Checked]]:
        with without_interrupts():  # which a process that starts now inherits
            return [pool.submit(check_shard, url, facts, options) for url, facts in islice(pairs, count)]

    try:
        waiting = submit(2 * jobs)
        while waiting:
            yield waiting.pop(0).result()
            waiting += submit(1)
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
    for places in repeated(keys):
        if count < _MOST_NAMED:
            first, key = places[0], same_key(places, shards, opener, options.key_split, compressed)
            if key is None:  # two keys with one hash
                continue
            others = [place for place in places if place.shard != first.shard]
            where = ", ".join(f"{redact(shards[place.shard])} (byte {place.byte})" for place in others[:3])
            shown = redact(shards[first.shard])
            text = (
                f"shard {shown}, byte {first.byte}: key {key!r:.300} is also in {where}"
                f"{' and others' if len(others) > 3 else ''}. Rename one or, if they are the same sample, keep the "
                "first"
            )
            findings.append(Finding("duplicate-key", text, shown, key, first.byte, options.rewriting("dedup")))
        count += 1
    findings.sort(key=lambda finding: (finding.shard, finding.byte))
    return findings, Counter({"duplicate-key": count} if count else {})


def _field_findings(sets: dict[tuple[str, ...], FieldSet], options: Options) -> tuple[list[Finding], list[Finding]]:
    """Return the fields that begin inside of keys with dots, and those that only some samples
    have.
    """
    total = sum(seen.count for seen in sets.values())
    counts: Counter[str] = Counter()
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


class Sample(NamedTuple):
    """A sample: the number of its shard, and its first byte there."""

    shard: int
    byte: int


def repeated(kept: Sequence[npt.NDArray[Any]]) -> Iterator[list[Sample]]:
    """Yield the samples of each key that several shards have, in the order of the shards."""
    entries = np.concatenate([np.empty(0, _ENTRY), *kept])
    entries = entries[np.lexsort((entries["byte"], entries["shard"], entries["hash"]))]
    hashes = entries["hash"]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])  # where an entry has the hash of the next one
    for run in np.split(same, np.flatnonzero(np.diff(same) > 1) + 1) if same.size else ():
        found = entries[run[0] : run[-1] + 2]
        if (found["shard"] != found["shard"][0]).any():
            yield [Sample(int(one["shard"]), int(one["byte"])) for one in found]


def same_key(
    places: Sequence[Sample], urls: Sequence[str], opener: Opener, key_split: str, compressed: Sequence[bool]
) -> str | None:
    """Return the key of samples whose keys have one hash, if the first two have the same; None:
    they have not, or cannot be read.
    """
    first = places[0]
    other = next(place for place in places if place.shard != first.shard)
    try:
        keys = {
            _key_at(opener, urls[place.shard], place.byte, key_split, compressed=compressed[place.shard])
            for place in (first, other)
        }
    except ShardError:
        return None
    return keys.pop() if len(keys) == 1 else None


def _key_at(opener: Opener, url: str, byte: int, key_split: str, *, compressed: bool) -> str | None:
    """Return the key of the sample that starts at a byte of a shard."""
    with readable(url), opener.open(url, 0 if compressed else byte) as raw:
        stream = unpacked(raw)[0] if compressed else raw
        if compressed:
            left = byte
            while left and (data := stream.read(min(left, 1 << 20))):
                left -= len(data)
        elif not is_remote(url):  # it starts at its beginning
            stream.seek(byte)
        member = next(iter(TarReader(stream, url=url, offset=byte, want=lambda name: False)), None)
    parts = splitter(key_split)(member.name) if member is not None else None
    return None if parts is None else parts[0]


MOST_OF_A_KIND = 100  # findings of a shard that are kept; more are counted


class Finding(NamedTuple):
    """What is wrong.

    Attributes:
        kind: one of ``KINDS`` of the command.
        text: what is wrong, and where, in a sentence.
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


class Options(NamedTuple):
    """How shards are checked; it is sent to other processes.

    Attributes:
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.
        decode: whether fields are decoded.
        urls: the shards as they were named, for the commands that mend.
    """

    storage_options: dict[str, Any]
    key_split: str
    decode: bool
    urls: tuple[str, ...] = ()

    def rewriting(self, command: str, *more: str) -> str:
        """Return a command that writes the shards anew, into a directory that the user names."""
        return shlex.join(["wds-pipes", command, *map(redact, self.urls), "NEW", *more, *self._key_split()])

    def repairing(self) -> str:
        """Return the command that mends all that ``repair`` can."""
        return self.rewriting("repair", "--drop-repeated", *(["--decode"] if self.decode else []))

    def indexing(self, shard: str, *more: str) -> str:
        """Return a command that writes an index of a shard."""
        return shlex.join(["wds-pipes", "index", redact(shard), *more, *self._key_split()])

    def _key_split(self) -> list[str]:
        return ["--key-split", self.key_split] if self.key_split != "first-dot" else []


@dataclass
class FieldSet:
    """The samples of a shard that have the same fields: how many, and which is the first."""

    count: int
    shard: str
    key: str
    byte: int


@dataclass
class Checked:
    """What was found in a shard.

    Attributes:
        url: the shard, without credentials.
        findings: at most ``MOST_OF_A_KIND`` of each kind.
        counts: how many there are of each kind.
        samples: its samples.
        compressed: whether it is compressed.
        entries: the hashes of the keys of its samples, and their first bytes: shape (samples,).
        sets: its samples by the names of their fields.
        outside: how many files belong to no sample.
        notes: what could not be checked.
    """

    url: str
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    compressed: bool = False
    entries: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, _ENTRY))
    sets: dict[tuple[str, ...], FieldSet] = field(default_factory=dict)
    outside: int = 0
    notes: set[str] = field(default_factory=set)

    def add(self, finding: Finding) -> None:
        """Add a finding, and count it."""
        self.counts[finding.kind] += 1
        if self.counts[finding.kind] <= MOST_OF_A_KIND:
            self.findings.append(finding)


def check_shard(url: str, known: ShardFacts | None, options: Options) -> Checked:
    """Read a shard to its end, and return what was found.

    Args:
        url: the shard.
        known: what an ``index.json`` says of it; None: there is none.
        options: how it is checked.
    """
    return _Check(url, known, options).run()


class _Check:
    def __init__(self, url: str, known: ShardFacts | None, options: Options) -> None:
        self._url, self._known, self._options = url, known, options
        self._found = Checked(redact(url))
        self._split = splitter(options.key_split)
        self._sets: dict[frozenset[str], FieldSet] = {}
        self._decoders = of_all_fields()

    def run(self) -> Checked:
        found, opener = self._found, make_opener(self._options.storage_options)
        scanned = Scanned()
        hashed = self._read(opener, scanned)
        found.samples, found.outside = len(scanned.keys), scanned.outside
        if not found.samples:  # so there is nothing to repair, as in a file that is no tar
            found.findings = [one._replace(mend=None) if one.kind == "damage" else one for one in found.findings]
        found.entries = np.zeros(len(scanned.keys), _ENTRY)
        found.entries["hash"] = np.fromiter(map(hash_text, scanned.keys), np.uint64, len(scanned.keys))
        found.entries["byte"] = scanned.starts
        found.sets = {tuple(sorted(names)): seen for names, seen in self._sets.items()}
        self._compare_facts(hashed)
        if not found.compressed and not found.counts["damage"]:
            self._compare_indexes(opener, scanned)
        return found

    def _report(self, error: WdsError) -> None:
        found = self._found
        byte, key = getattr(error, "offset", None), getattr(error, "key", None)
        kind = "sample" if isinstance(error, SampleError) else "damage"
        if isinstance(error, ReservedNameError):
            kind = "reserved-name"
        found.add(Finding(kind, for_commands(str(error)), found.url, key, byte, self._options.repairing()))

    def _read(self, opener: Opener, scanned: Scanned) -> Hashed | None:
        """Read the shard; return what was read if all of it was, and its MD5 is wanted."""
        found, known = self._found, self._known
        try:
            with readable(self._url), opener.open(self._url) as raw:
                hashed = None
                if known is not None and known.md5 is not None:
                    hashed = Hashed(raw, threading.Event())
                stored = raw if hashed is None else io.BufferedReader(hashed, 1 << 20)
                stream, kind = unpacked(stored)
                found.compressed = bool(kind)
                reader = TarReader(
                    stream,
                    url=self._url,
                    on_error=self._report,
                    on_link=self._add_link,
                    named=False,
                )

                def note(sample: dict[str, Any]) -> None:
                    scanned.keys.append(sample["__key__"])
                    scanned.starts.append(grouping.start)

                grouping = Grouping(self._options.key_split, report=self._report, lose=note)
                for sample in grouping.samples(self._members(reader), self._url):
                    note(sample)
                    self._add_sample(sample, grouping.start)
                scanned.outside = grouping.outside
                why = grouping.why_none(self._url)
                if why is not None and not found.counts["damage"]:
                    found.add(Finding("sample", for_commands(why), found.url, None, grouping.first_outside[1]))
                scanned.end = reader.offset
                while hashed is not None and stored.read(1 << 20):
                    pass
                return hashed
        except ShardError as error:
            if error.missing and self._options.urls == (self._url,):
                raise  # its name is wrong; of several, one may be lost
            found.add(Finding("damage", str(error), found.url, None, getattr(error, "offset", None)))
        return None

    def _add_link(self, link: Link) -> None:
        parts, found = self._split(link.name), self._found
        if parts is not None:
            found.add(Finding("link", link.describe(self._url), found.url, parts[0], link.offset))

    def _members(self, reader: TarReader) -> Iterator[Member]:
        """Yield the members of the shard, without their data."""
        decode = self._options.decode
        for url, name, data, start in reader:
            if decode and name and data is not None:
                self._decode(name, data, start)
            yield url, name, None, start

    def _add_sample(self, sample: dict[str, Any], start: int) -> None:
        key, fields = sample["__key__"], frozenset(filterfalse(is_metadata, sample))
        seen = self._sets.setdefault(fields, FieldSet(0, self._found.url, key, start))
        seen.count += 1

    def _decode(self, name: str, data: bytes, start: int) -> None:
        """Decode a member, and add what its decoder raises."""
        parts, found = self._split(name), self._found
        if parts is None:
            return
        key, of = parts[0], parts[1].lower()
        why = fault_of(self._decoders, of, data, found.notes.add)
        if why is not None:
            text = f"shard {found.url}, byte {start}: field {of!r} of sample {key!r} cannot be decoded: {why}"
            found.add(Finding("undecodable", text, found.url, key, start, self._options.repairing()))

    def _compare_facts(self, hashed: Hashed | None) -> None:
        """Compare the shard with its entry in an index.json."""
        found, known = self._found, self._known
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
                f"shard {found.url} is not the one of its index: {'; '.join(wrong)}. Fetch or write it again; only if "
                "it was changed on purpose, index it again"
            )
            found.add(Finding("checksum", text, found.url))

    def _compare_indexes(self, opener: Opener, scanned: Scanned) -> None:
        """Compare the indexes beside the shard with where its samples are."""
        if self._url == "-" or self._url.startswith("pipe:"):
            return
        where = ["--offsets-to", "DIRECTORY"] if is_remote(self._url) else ["--offsets"]
        shown, mend = self._found.url, self._options.indexing(self._found.url, *where)
        indexes = {OFFSETS: pack_offsets([*scanned.starts, scanned.end]), KEYS: pack_keys(scanned.keys)}
        for ending, right in indexes.items():
            place = beside(self._url, ending)
            content = self._content(opener, place)
            if content is not None and content != right:
                text = f"index {redact(place)} is not of shard {shown}"
                self._found.add(Finding("stale-index", text, shown, None, None, mend))

    def _content(self, opener: Opener, place: str) -> bytes | None:
        """Return the content of an index; None: there is none."""
        try:
            with opener.open(place) as stream:
                return stream.read()
        except ShardError as error:
            if not error.missing:
                self._found.notes.add(f"index {redact(place)} cannot be read, and was not compared")
        return None
