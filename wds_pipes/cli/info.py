"""``wds-pipes info``: what is in shards, or what is installed and used for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from wds_pipes.cli.look.describing import Describer
from wds_pipes.cli.look.reading import Found, ShardWalk, shards_of
from wds_pipes.cli.options import as_json, echo, echo_json, example, in_one_line, key_split, storage_options
from wds_pipes.core.words import bytes_shown, plural
from wds_pipes.errors import ShardError
from wds_pipes.io.open import Opener
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.urls import redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.index import Facts
from wds_pipes.tar.listing import find_facts, is_index


@click.command(
    epilog=example("wds-pipes info 'train-{000000..000011}.tar'\nwds-pipes info --all --json s3://bucket/train/")
)
@click.argument("urls", nargs=-1)
@click.option("--all", "whole", is_flag=True, help="Read all shards to their ends, without which some are looked into.")
@as_json
@click.option("--codecs", is_flag=True, help="Show what decodes each image format, and what resizes images.")
@key_split
@storage_options
def info(
    *, urls: tuple[str, ...], whole: bool, as_json: bool, codecs: bool, key_split: str, storage_options: Any
) -> None:
    """Show what is in shards: samples, fields with types and sizes, and where the bytes go.

    URLS are paths or URLs of shards, with {000..011} or * in quotes, or an index.json. Without
    --all, at most 256 samples of each of 8 shards are read, and samples are estimated unless an
    index (wds-pipes index) counts them. With --codecs, URLS are left out.
    """
    with in_one_line():
        if codecs:
            if urls:
                raise ValueError("--codecs is about what is installed: leave out URLS")
            _show_codecs()
            return
        if not urls:
            raise ValueError("name shards, such as 'train-*.tar', or pass --codecs")

        summary = Summary(urls, storage_options, key_split, whole=whole)
        if as_json:
            echo_json(summary.as_dict())
        for line in () if as_json else summary.lines():
            echo(line)


def _show_codecs() -> None:
    from wds_pipes.codecs.images import decoders_in_use

    formats = decoders_in_use()
    width = max(map(len, formats))
    for name, package in formats.items():
        instead = ", or pillow what it cannot" if package != "pillow" else ""
        echo(f"{name:{width}}  {package} {_version(package)}{instead}")
    echo(f"{'size=':{width}}  torch {_version('torch')} for RGB, pillow {_version('pillow')} for the rest")
    if formats["JPEG"] == "pillow":
        echo("JPEG is decoded in less time, to the same pixels, with: pip install 'wds_pipes[images]'")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


_SHARDS, _SAMPLES = 8, 256  # that are read without --all; the samples of each shard
_DESCRIBED = 32  # samples of each shard whose data is read
_KEPT = 10_000  # sizes of a field, of which the median is taken


@dataclass
class Field:
    """What was seen of a field: in how many samples, its bytes, and what it is."""

    samples: int = 0
    total: int = 0
    least: int = 0
    most: int = 0
    sizes: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, size: int) -> None:
        """Count a field of this size."""
        self.least = size if not self.samples else min(self.least, size)
        self.most = max(self.most, size)
        self.samples += 1
        self.total += size
        if len(self.sizes) < _KEPT:
            self.sizes.append(size)

    @property
    def median(self) -> int:
        """The median of the sizes; above 10,000 samples, that of the first 10,000."""
        return sorted(self.sizes)[(len(self.sizes) - 1) // 2]


class Summary:
    """Shards in figures.

    Args:
        urls: the shards, or an ``index.json``.
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.
        whole: read all shards to their ends; otherwise some samples of some shards.
    """

    def __init__(self, urls: Sequence[str], storage_options: dict[str, Any], key_split: str, *, whole: bool) -> None:
        self.shards = shards_of(urls, storage_options)
        self._options, self._split, self._whole = storage_options, key_split, whole
        self._describer = Describer(most_text=60)
        self.fields: dict[str, Field] = {}
        self.read_shards = self.read_samples = self.outside = 0
        self.parts = Counter[str](data=0, headers=0, padding=0, pax=0, other=0)
        self._ended: dict[str, int] = {}  # the samples of each of these shards
        self.compressions = Counter[str]()
        facts = self._facts(urls)
        self.sizes = self._sizes(facts)
        count = len(self.shards)
        chosen = range(count) if whole else sorted({place * count // _SHARDS for place in range(_SHARDS)})
        opener = Opener(Reading(storage_options, readahead_bytes=8 << 20, connections=4))
        for number in chosen:
            self._read_shard(opener, number)
        counts = None if facts is None else [known.samples for known in facts]
        # if a shard that was read to its end has another number of samples, the index is old
        self.indexed = counts is not None and all(
            count is not None and self._ended.get(url, count) == count
            for url, count in zip(self.shards, counts, strict=True)
        )
        if self.indexed:
            self.samples, self.exact = sum(known.samples or 0 for known in facts or ()), True
        else:
            self.samples, self.exact = self._estimate()

    def _facts(self, urls: Sequence[str]) -> Facts | None:
        index: Any = [url for url in urls if is_index(url)] or True
        try:
            return find_facts(self.shards, index, self._options)
        except (ValueError, ShardError, OSError):  # there is none, or it is not of these shards
            return None

    def _sizes(self, facts: Facts | None) -> list[int | None]:
        if facts is not None and all(known.size is not None for known in facts):
            return [known.size for known in facts]
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda url: version_of(url, self._options).size, self.shards))

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
        self.read_shards, self.read_samples = self.read_shards + 1, self.read_samples + count
        self.outside += len(walk.outside)
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

    def _estimate(self) -> tuple[int, bool]:
        """Return the number of samples, and whether it is exact."""
        if len(self._ended) == len(self.shards):
            return sum(self._ended.values()), True
        total = sum(size or 0 for size in self.sizes)
        taken = sum(self.parts.values())
        if self.compressions:  # the bytes of a sample as they are stored are not known
            known = len(self._ended)
            return (sum(self._ended.values()) * len(self.shards) // known if known else 0), False
        return round(total * self.read_samples / taken) if taken else 0, False

    @property
    def bytes(self) -> int | None:
        """The size of all shards; None: that of some is not known."""
        sizes = [size for size in self.sizes if size is not None]
        return sum(sizes) if len(sizes) == len(self.sizes) else None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        fields = {
            name: {
                "samples": seen.samples,
                "bytes": seen.total,
                "min": seen.least,
                "median": seen.median,
                "max": seen.most,
                "types": dict(seen.kinds),
                "example": seen.example,
            }
            for name, seen in sorted(self.fields.items())
        }
        return {
            "shards": len(self.shards),
            "samples": self.samples,
            "samples_exact": self.exact,
            "bytes": self.bytes,
            "index": self.indexed,
            "read": {"shards": self.read_shards, "samples": self.read_samples},
            "fields": fields,
            "parts": dict(self.parts),
            "outside": self.outside,
            "compressions": dict(self.compressions),
        }

    def lines(self) -> list[str]:
        """Return the figures as text."""
        about = "" if self.exact else "about "
        size = "of unknown size" if self.bytes is None else bytes_shown(self.bytes)
        source = " (counted by an index)" if self.indexed else ""
        lines = [f"{plural(len(self.shards), 'shard')}, {about}{plural(self.samples, 'sample')}{source}, {size}"]
        if len(self._ended) < len(self.shards):
            lines.append(
                f"read: {plural(self.read_samples, 'sample')} of {plural(self.read_shards, 'shard')}, the first of "
                "which is " + redact(self.shards[0]) + "; --all reads all of them"
            )
        if self.compressions:
            kinds = ", ".join(f"{count:,} by {kind}" for kind, count in sorted(self.compressions.items()))
            lines.append(f"compressed shards: {kinds}; the sizes below are of what they unpack to")
        return [*lines, "", *self._table(), "", *self._places()]

    def _table(self) -> list[str]:
        heads = ("FIELD", "SAMPLES", "MIN", "MEDIAN", "MAX", "TYPE", "EXAMPLE")
        rows = [heads]
        shown = sorted(self.fields.items(), key=lambda item: (-item[1].samples, item[0]))
        for name, seen in shown:
            kinds = [kind for kind, _ in seen.kinds.most_common(2)]
            kind = " or ".join(kinds) + (" ..." if len(seen.kinds) > 2 else "")
            share = seen.samples / self.read_samples
            part = f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"
            sizes = map(bytes_shown, (seen.least, seen.median, seen.most))
            rows.append((name[:40] or "(empty)", part, *sizes, kind, seen.example))  # type: ignore[arg-type]
        widths = [max(len(row[place]) for row in rows) for place in range(len(heads) - 1)]
        lines = ["  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths)), row[-1]]) for row in rows]
        return [line.rstrip() for line in lines]

    def _places(self) -> list[str]:
        whole = sum(self.parts.values()) or 1
        names = {"pax": "pax headers and long names", "other": "end and others"}
        parts = ", ".join(f"{names.get(name, name)} {count / whole:.1%}" for name, count in self.parts.items())
        lines = [f"bytes: {parts}"]
        if self.outside:
            lines.append(f"{plural(self.outside, 'file')} of no sample, which readers leave out")
        return lines
