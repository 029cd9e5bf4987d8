"""What is in shards, in figures, and what is installed and used for what."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median_low
from typing import Any

from wds_pipes.codecs.images import decoders_in_use
from wds_pipes.core.words import bytes_shown, plural
from wds_pipes.errors import ShardError
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import Opener
from wds_pipes.io.urls import Urls, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.index import ShardFacts, make_opener
from wds_pipes.tar.listing import find_facts, is_index
from wds_pipes.tools.looking import Describer
from wds_pipes.tools.progress import progress as shown_progress
from wds_pipes.tools.reading import Found, ShardWalk, shards_of

_SHARDS, _SAMPLES = 8, 256  # that are read without whole=True; the samples of each shard
_DESCRIBED = 32  # samples of each shard whose data is read
_KEPT = 10_000  # sizes of a field, of which the median is taken


def info(
    urls: Urls,
    *,
    whole: bool = False,
    key_split: str = "first-dot",
    storage_options: dict[str, Any] | None = None,
    progress: bool | None = False,
) -> Summary:
    """Return what is in shards: samples, fields with types and sizes, and where the bytes go.

    Args:
        urls: the shards, or an ``index.json``.
        whole: read all shards to their ends. Otherwise at most 256 samples of each of 8 shards are
            read, and samples are estimated unless an index counts them.
        key_split: as in ``group_by_key``.
        storage_options: how to reach the storage.
        progress: True: show a progress bar, which needs tqdm; None: a line each 30 seconds.

    Raises:
        ValueError: nothing matches.
        ShardError: a shard cannot be read, or is damaged.
    """
    return Summary(urls, storage_options, key_split, whole=whole, progress=progress)


def codecs() -> dict[str, str]:
    """Return the package that decodes each image format, with its version."""
    return {name: f"{package} {_version(package)}" for name, package in decoders_in_use().items()}


def codec_lines() -> Iterator[str]:
    """Return ``codecs()``, and what resizes images, as lines."""
    formats = codecs()
    width = max(map(len, formats))
    for name, package in formats.items():
        instead = "" if package.startswith("pillow") else ", or pillow what it cannot"
        yield f"{name:{width}}  {package}{instead}"
    yield f"{'size=':{width}}  torch {_version('torch')} for RGB, pillow {_version('pillow')} for the rest"
    if formats["JPEG"].startswith("pillow"):
        yield "JPEG is decoded in less time, to the same pixels, with: pip install 'wds_pipes[images]'"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


@dataclass
class Field:
    """What was seen of a field: the first of its sizes, all their bytes, and what it is."""

    samples: int = 0
    total: int = 0
    least: int = MAX_SIZE
    most: int = 0
    sizes: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, size: int) -> None:
        """Count a field of this size."""
        self.samples += 1
        self.total += size
        self.least, self.most = min(self.least, size), max(self.most, size)
        if len(self.sizes) < _KEPT:
            self.sizes.append(size)

    @property
    def median(self) -> int:
        """The median of the sizes; above 10,000 samples, that of the first 10,000."""
        return median_low(self.sizes)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        sizes = {"min": self.least, "median": self.median, "max": self.most}
        return {
            "samples": self.samples, "bytes": self.total, **sizes, "types": dict(self.kinds), "example": self.example
        }  # fmt: skip


class Summary:
    """Shards in figures, as ``info`` returns them.

    Attributes:
        shards: the shards.
        samples: how many samples they have.
        exact: whether this number is exact; otherwise it is estimated.
        indexed: whether an index says it.
        sizes: the bytes of each shard; None: not known.
        fields: what was seen of each field.
        parts: the bytes of data, headers, padding, pax headers and others that were read.
        compressions: how many of the shards that were read are compressed, by the format.
        outside: how many files belong to no sample.
        read_shards: how many shards were read.
        read_samples: how many samples were read.
    """

    def __init__(
        self, urls: Urls, storage_options: dict[str, Any] | None, key_split: str, *, whole: bool, progress: bool | None
    ) -> None:
        self.shards = shards_of(urls, storage_options)
        self._options, self._split, self._whole = storage_options, key_split, whole
        self._describer = Describer(most_text=60)
        self.fields: dict[str, Field] = {}
        self.read_samples = self.outside = 0
        self.parts = Counter[str](data=0, headers=0, padding=0, pax=0, other=0)
        self._ended: dict[str, int] = {}  # the samples of each of these shards
        self.compressions = Counter[str]()
        facts = [ShardFacts()] * len(self.shards)
        with contextlib.suppress(ValueError, ShardError, OSError):  # there is no index, or not of these shards
            indexes = [url for url in items_of(urls) if is_index(str(url))]
            facts = list(find_facts(self.shards, indexes or True, self._options))
        with ThreadPoolExecutor(16) as pool:
            self.sizes = list(pool.map(self._size, self.shards, facts))
        count = len(self.shards)
        chosen = range(count) if whole else sorted({place * count // _SHARDS for place in range(_SHARDS)})
        self.read_shards = len(chosen)
        opener = make_opener(storage_options, readahead_bytes=8 << 20, connections=4)
        with shown_progress(len(chosen), "shard", show=progress) as advance:
            for number in chosen:
                self._read_shard(opener, number)
                advance(1)
        # if a shard that was read to its end has another number of samples, the index is old
        self.indexed = all(
            known.samples is not None and self._ended.get(url, known.samples) == known.samples
            for url, known in zip(self.shards, facts, strict=True)
        )
        self.exact = self.indexed or len(self._ended) == len(self.shards)
        self.samples = sum(known.samples or 0 for known in facts) if self.indexed else self._estimate()

    def _size(self, url: str, known: ShardFacts) -> int | None:
        return version_of(url, self._options).size if known.size is None else known.size

    def _read_shard(self, opener: Opener, number: int) -> None:
        deep = True
        walk = ShardWalk(opener, self.shards[number], self._split, lambda name: deep)
        count = at = 0
        for sample in walk.samples():
            count += 1
            deep = count < _DESCRIBED
            at = self._add(sample, at)
            if not self._whole and count == _SAMPLES:
                break
        self.read_samples += count
        self.outside += walk.outside
        if walk.compression:
            self.compressions[walk.compression] += 1
        if walk.ended:
            size = self.sizes[number]
            self._ended[self.shards[number]] = count
            end = walk.bytes if walk.compression or size is None else size
            self.parts["other"] += max(0, end - at)

    def _add(self, sample: Found, at: int) -> int:
        """Add a sample; ``at`` is the end of the one before. Return its end."""
        parts = self.parts
        for member in sample.members:
            found = self.fields.setdefault(member.field, Field())
            found.add(member.size)
            padding = -member.size & (BLOCK - 1)
            parts["other"] += member.start - at
            parts["data"] += member.size
            parts["padding"] += padding
            parts["headers"] += BLOCK
            parts["pax"] += member.end - member.start - BLOCK - member.size - padding
            at = member.end
            if member.data is not None:
                described = self._describer.describe(member.field, member.data)
                found.kinds[described.kind] += 1
                found.example = found.example or described.text
        return at

    def _estimate(self) -> int:
        """Return the number of samples, which is not exact if a shard was not read to its end."""
        known = sum(self._ended.values())
        if self.exact:
            return known
        if self.compressions:  # the bytes of a sample as they are stored are not known
            return known * len(self.shards) // len(self._ended) if self._ended else 0
        taken = self.parts.total()
        return round(sum(size or 0 for size in self.sizes) * self.read_samples / taken) if taken else 0

    @property
    def bytes(self) -> int | None:
        """The size of all shards; None: that of some is not known."""
        sizes = [size for size in self.sizes if size is not None]
        return sum(sizes) if len(sizes) == len(self.sizes) else None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "shards": len(self.shards),
            "samples": self.samples,
            "samples_exact": self.exact,
            "bytes": self.bytes,
            "index": self.indexed,
            "read": {"shards": self.read_shards, "samples": self.read_samples},
            "fields": {name: seen.as_dict() for name, seen in sorted(self.fields.items())},
            "parts": dict(self.parts),
            "outside": self.outside,
            "compressions": dict(self.compressions),
        }

    def lines(self) -> Iterator[str]:
        """Return the figures as lines of text."""
        about = "" if self.exact else "about "
        size = "of unknown size" if self.bytes is None else bytes_shown(self.bytes)
        source = " (counted by an index)" if self.indexed else ""
        yield f"{plural(len(self.shards), 'shard')}, {about}{plural(self.samples, 'sample')}{source}, {size}"
        if len(self._ended) < len(self.shards):
            yield (
                f"read: {plural(self.read_samples, 'sample')} of {plural(self.read_shards, 'shard')}, the first of "
                f"which is {redact(self.shards[0])}; --all reads all of them"
            )
        if self.compressions:
            kinds = ", ".join(f"{count:,} by {kind}" for kind, count in sorted(self.compressions.items()))
            yield f"compressed shards: {kinds}; the sizes below are of what they unpack to"
        yield ""
        yield from self._table()
        yield ""
        whole = self.parts.total() or 1
        names = {"pax": "pax headers and long names", "other": "end and others"}
        yield "bytes: " + ", ".join(f"{names.get(name, name)} {part / whole:.1%}" for name, part in self.parts.items())
        if self.outside:
            yield f"{plural(self.outside, 'file')} of no sample, which readers leave out"

    def _table(self) -> Iterator[str]:
        rows = [("FIELD", "SAMPLES", "MIN", "MEDIAN", "MAX", "TYPE", "EXAMPLE")]
        for name, seen in sorted(self.fields.items(), key=lambda item: (-item[1].samples, item[0])):
            kind = " or ".join(kind for kind, _ in seen.kinds.most_common(2)) + (" ..." if len(seen.kinds) > 2 else "")
            share = seen.samples / self.read_samples
            part = f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"
            sizes = map(bytes_shown, (seen.least, seen.median, seen.most))
            rows.append((name[:40] or "(empty)", part, *sizes, kind, seen.example))  # type: ignore[arg-type]
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
        for row in rows:
            cells = [f"{text:<{width}}" for text, width in zip(row, widths, strict=False)]
            yield "  ".join([*cells, row[-1]]).rstrip()
