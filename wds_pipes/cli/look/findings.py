"""Check many shards, and what only all of them together show.

Of each sample, 20 bytes are kept: the 64-bit hash of its key, its shard and its first byte. At the
end the keys that come again are read from the shards, so two keys with one hash are not reported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.cli.look.checking import Checked, FieldSet, Finding, Options, check_shard
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, WorkerError
from wds_pipes.io.compression import unpacked
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.tasks.engines import without_interrupts
from wds_pipes.io.tasks.journal import unfinished
from wds_pipes.io.tasks.task import Place
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import exists, find_facts, is_index, list_shards
from wds_pipes.tar.index_formats import ShardFacts, folder_of, make_opener
from wds_pipes.tar.keys import splitter
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.scanning import readable

_MOST_NAMED = 20  # findings of a kind about all shards that are reported; more are counted
_MOST_KEPT = 100_000  # findings of single shards that the report has; more are counted
_MOST_SETS = 10_000  # different sets of fields


_ENTRY = np.dtype([("hash", "<u8"), ("byte", "<u8"), ("shard", "<u4")])  # of a sample


@dataclass
class Report:
    """What was found in all shards.

    Attributes:
        findings: in the order of the shards, and then ``of_all``.
        of_all: those that ``on_shard`` was not called with.
        counts: how many there are of each kind.
        shards: how many were read.
        samples: how many samples they have.
        outside: how many files belong to no sample.
        notes: what could not be checked.
    """

    findings: list[Finding] = field(default_factory=list)
    of_all: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    shards: int = 0
    samples: int = 0
    outside: int = 0
    notes: set[str] = field(default_factory=set)

    def add(self, findings: Iterable[Finding], counts: Counter[str]) -> None:
        """Add what was found in all shards together."""
        kept = list(findings)
        self.findings += kept
        self.of_all += kept
        self.counts += counts


def verify(
    urls: Sequence[str],
    options: Options,
    *,
    index: str | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    ignored: Collection[str] = (),
    on_shard: Callable[[Checked], None] = lambda checked: None,
) -> Report:
    """Check shards.

    Args:
        urls: the shards, or an ``index.json``.
        options: how they are checked.
        index: an ``index.json`` to compare with; None: the one in the directory of the shards, if
            there is one.
        jobs: how many processes read shards.
        executor: what reads ``jobs`` shards at a time; None: processes of this machine.
        ignored: kinds of findings to leave out.
        on_shard: called with what was found in each shard, in order.

    Raises:
        ValueError: nothing matches, or ``index`` is damaged.
    """
    shards, facts = list_shards(list(urls), options.storage_options)
    named = index or next((url for url in urls if is_index(url)), None)
    options = options._replace(urls=tuple(urls), index_url=named)
    report, sets, compressed = Report(), dict[tuple[str, ...], FieldSet](), list[bool]()
    keys: list[npt.NDArray[Any]] = []
    known, missing = _known(shards, facts, index, options)
    report.notes |= {*_unfinished(shards, options), *_not_looked_at(known, options)}
    for number, checked in enumerate(_each(shards, known, options, jobs, executor)):
        on_shard(checked)
        kept = [finding for finding in checked.findings if finding.kind not in ignored]
        report.findings += kept[: max(0, _MOST_KEPT - len(report.findings))]
        report.counts += Counter({kind: count for kind, count in checked.counts.items() if kind not in ignored})
        report.shards, report.samples = number + 1, report.samples + checked.samples
        report.outside += checked.outside
        report.notes |= checked.notes
        compressed.append(checked.compressed)
        keys.append(entries_of(number, checked.hashes, checked.starts))
        for names, seen in checked.sets.items():
            if names in sets:
                sets[names].count += seen.count
            elif len(sets) < _MOST_SETS:
                sets[names] = seen
            else:
                report.notes.add(f"there are more than {_MOST_SETS:,} sets of fields, and not all were compared")
    if "duplicate-key" not in ignored:
        report.add(*_duplicates(keys, shards, compressed, options))
    for findings in (missing, *_field_findings(sets, options)):
        if findings and findings[0].kind not in ignored:
            report.add(findings[:_MOST_NAMED], Counter({findings[0].kind: len(findings)}))
    return report


def in_order(mends: Iterable[str]) -> list[str]:
    """Return commands that mend, in the order in which they may be run."""
    return sorted(mends, key=lambda mend: ("repair", "dedup", "index").index(mend.split()[1]))


def _known(
    shards: Sequence[str], facts: Sequence[ShardFacts] | None, index: str | None, options: Options
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
                text = str(error).partition(" Make one with")[0]
                mend = options.counting(members[0])
                findings.append(Finding("checksum", text, redact(members[0]), None, None, mend))
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
    spawn = multiprocessing.get_context("spawn")
    pool = executor or ProcessPoolExecutor(min(jobs, len(shards)), spawn, initializer=_end_at_interrupts)

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


def _end_at_interrupts() -> None:
    """Let Ctrl-C end a process that reads shards, without a word: the command says it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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


def entries_of(shard: int, hashes: npt.NDArray[np.uint64], starts: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """What is kept of a shard: hashes of keys and first bytes, each of shape (samples,)."""
    entries = np.empty(len(hashes), _ENTRY)
    entries["hash"], entries["byte"], entries["shard"] = hashes, starts, shard
    return entries


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
