"""Check one shard: damage, names, keys, fields, checksums and its indexes."""

from __future__ import annotations

import io
import shlex
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.cli.look.describing import fault_of, of_all_fields
from wds_pipes.cli.options import for_commands
from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, ShardWarning, WdsError
from wds_pipes.io.compression import unpacked
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.urls import redact
from wds_pipes.tar.index_formats import ShardFacts, folder_of, make_opener
from wds_pipes.tar.keys import splitter
from wds_pipes.tar.members import Link, ReservedNameError
from wds_pipes.tar.offsets import KEYS, OFFSETS, beside, pack_keys, pack_offsets
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.scanning import Hashed, Member, Rules, Scanned, find_samples, readable

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
        index_url: the ``index.json`` that was named.
    """

    storage_options: dict[str, Any]
    key_split: str
    decode: bool
    urls: tuple[str, ...] = ()
    index_url: str | None = None

    def rewriting(self, command: str, *more: str) -> str:
        """Return a command that writes the shards anew, into a directory that the user names."""
        new = "NEW" if "NEW" not in self.urls else "NEWER"
        return shlex.join(["wds-pipes", command, *map(_argument, self.urls), new, *more, *self._key_split()])

    def repairing(self) -> str:
        """Return the command that mends all that ``repair`` can."""
        return self.rewriting("repair", "--drop-repeated", *(["--decode"] if self.decode else []))

    def indexing(self, shard: str, *more: str) -> str:
        """Return a command that writes an index of a shard."""
        return shlex.join(["wds-pipes", "index", _argument(shard), *more, *self._key_split()])

    def counting(self, shard: str) -> str | None:
        """Return a command that writes the ``index.json`` of a shard, and of those beside it; None:
        it is not on this machine.
        """
        if is_remote(shard):
            return None
        folder = redact(folder_of(shard)) or "."
        listed = self.index_url is None or self.index_url in self.urls
        index = f"{folder.removesuffix('.')}index.json" if self.index_url is None else redact(self.index_url)
        shards = [folder] if listed else map(_argument, self.urls)
        return shlex.join(["wds-pipes", "index", *shards, "-o", index, "--force", *self._key_split()])

    def _key_split(self) -> list[str]:
        return ["--key-split", self.key_split] if self.key_split != "first-dot" else []


def _argument(url: str) -> str:
    """Return a shard as an argument of a command, without credentials."""
    return f"./{url}" if url.startswith("-") and url != "-" else redact(url)


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
        hashes: of the keys of its samples: uint64, shape (samples,).
        starts: the first byte of each: uint64, shape (samples,).
        sets: its samples by the names of their fields.
        outside: how many files belong to no sample.
        notes: what could not be checked.
    """

    url: str
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    compressed: bool = False
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    starts: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
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
        self._last: tuple[set[str], FieldSet] | None = None  # the fields of the sample before
        self._decoders = of_all_fields()
        self._outside: tuple[str, int] | None = None  # the first file of no sample, and where it is

    def run(self) -> Checked:
        found, opener = self._found, make_opener(self._options.storage_options)
        scanned = Scanned()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ShardWarning)
            hashed = self._read(opener, scanned)
        for warning in caught:
            if issubclass(warning.category, ShardWarning):
                found.add(Finding("end", str(warning.message), found.url, None, None, self._options.repairing()))
        found.samples, found.outside = len(scanned.keys), scanned.outside
        if self._outside is not None and not found.samples and not found.counts["damage"]:
            name, start = self._outside
            text = (
                f"shard {found.url}, byte {start}: {name!r:.300} is the first of {plural(found.outside, 'file')}, of "
                "which none makes a sample: name them KEY.FIELD, such as 0001.jpg, or pass --key-split"
            )
            found.add(Finding("sample", text, found.url, None, start))
        if not found.samples:  # so there is nothing to repair, as in a file that is no tar
            found.findings = [one._replace(mend=None) if one.kind == "damage" else one for one in found.findings]
        found.hashes = np.fromiter(map(hash_text, scanned.keys), np.uint64, len(scanned.keys))
        found.starts = np.array(scanned.starts, np.uint64)
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
                    doubts=True,
                    on_link=self._add_link,
                    named=False,
                )
                rules = Rules(self._options.key_split, "raise")
                find_samples(
                    scanned, self._members(reader), rules, self._url, report=self._report, on_sample=self._add_sample
                )
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
        decode = self._options.decode
        for _, name, data, start in reader:
            if decode and name and data is not None:
                self._decode(name, data, start)
            if name and self._split(name) is None:
                self._outside = self._outside or (name, start)
            yield name, start, start, 0, True, None if name else data

    def _add_sample(self, key: str, start: int, fields: set[str]) -> None:
        if self._last is not None and self._last[0] == fields:
            self._last[1].count += 1
            return
        names = frozenset(fields)
        seen = self._sets.get(names)
        if seen is None:
            seen = self._sets[names] = FieldSet(0, self._found.url, key, start)
        seen.count += 1
        self._last = fields, seen

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
            mend = None if found.counts["damage"] else self._options.counting(self._url)
            found.add(Finding("checksum", text, found.url, None, None, mend))

    def _compare_indexes(self, opener: Opener, scanned: Scanned) -> None:
        """Compare the indexes beside the shard with where its samples are."""
        if self._url == "-" or self._url.startswith("pipe:"):
            return
        indexes = {OFFSETS: pack_offsets([*scanned.starts, scanned.end]), KEYS: pack_keys(scanned.keys)}
        for ending, right in indexes.items():
            place = beside(self._url, ending)
            content = self._content(opener, place)
            if content is not None and content != right:
                self._stale(f"index {redact(place)} is not of shard {self._found.url}")

    def _stale(self, text: str) -> None:
        found = self._found
        where = ["--offsets-to", "DIRECTORY"] if is_remote(self._url) else ["--offsets"]
        found.add(Finding("stale-index", text, found.url, None, None, self._options.indexing(found.url, *where)))

    def _content(self, opener: Opener, place: str) -> bytes | None:
        """Return the content of an index; None: there is none."""
        try:
            with opener.open(place) as stream:
                return stream.read()
        except ShardError as error:
            if not error.missing:
                self._found.notes.add(f"index {redact(place)} cannot be read, and was not compared")
        except OSError:  # a directory has its name
            pass
        return None
