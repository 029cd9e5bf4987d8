"""The samples of one data set with the fields that others have under the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Unpack

import numpy as np

from wds_pipes.core.options import check_choice
from wds_pipes.core.order import hash_text
from wds_pipes.errors import SampleError
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tar.listing import list_indexed
from wds_pipes.tar.located import Located
from wds_pipes.tar.offsets import stale_keys
from wds_pipes.tar.views import among
from wds_pipes.tools.engines import Facts
from wds_pipes.tools.jobs import Report, fingerprint
from wds_pipes.tools.outputs import JobOptions, Running, StorageOptions, marks
from wds_pipes.tools.reading import CONNECTIONS, Sample, ShardWalk
from wds_pipes.tools.rewriting import Reading, changed_by, find_shards, rewrite

_TOGETHER = 64  # samples of which the partners are read at a time


class Partner:
    """A data set whose samples are found by their keys, with the indexes of keys and of offsets.

    Args:
        url: its shards, as one text.
        storage_options: how to reach the storage.

    Raises:
        ValueError: nothing matches.
        ShardError: a store cannot be listed.
    """

    def __init__(self, url: str, storage_options: StorageOptions) -> None:
        from wds_pipes.indexed import IndexedShards  # imports torch

        self.urls = list_indexed(url, True, storage_options).urls
        self._data = IndexedShards(self.urls, storage_options=storage_options, connections=CONNECTIONS)
        self._options = storage_options

    @cached_property
    def _located(self) -> Located:
        files = RangeReader(self._options, CONNECTIONS)
        return Located(self.urls, None, files, self._options, CONNECTIONS)

    def check_indexed(self) -> None:
        """Raise ShardError if a shard has no index of offsets, or that of another shard."""
        self._located.compare_ends()

    @cached_property
    def checked(self) -> bool:
        """Whether the indexes of keys were compared with the shards, which is done once.

        Raises:
            ShardError: an index is of another shard, so samples are not found that are there.
        """
        self._located.check_keys()
        return True

    def numbers(self, keys: Iterable[str]) -> dict[int, list[int]]:
        """Return the numbers of the samples that may have one of these keys, by the hashes of their
        keys.
        """
        wanted = np.unique(np.fromiter(map(hash_text, keys), np.uint64))
        found: dict[int, list[int]] = {}
        for shard in self._located.with_samples:
            hashes, numbers = self._located.keys(shard)
            held = among(hashes, wanted)
            for hashed, number in zip(hashes[held].tolist(), numbers[held].tolist(), strict=True):
                found.setdefault(hashed, []).append(self._located.starts[shard] + number)
        return found

    def read(self, keys: Sequence[str], numbers: dict[int, list[int]]) -> dict[str, Sample]:
        """Return the samples with these keys; ``numbers``: as ``numbers`` returns them.

        Raises:
            SampleError: two have one key.
            ShardError: an index of keys is of another shard.
        """
        wanted, found = set(keys), dict[str, Sample]()
        hashes = {number: hashed for hashed in map(hash_text, wanted) for number in numbers.get(hashed, ())}
        places = sorted(hashes)
        for place, sample in zip(places, self._data.__getitems__(places), strict=True):
            key = sample["__key__"]
            if hash_text(key) != hashes[place]:
                raise stale_keys(sample["__url__"], key)
            if key not in wanted:
                continue
            if key in found:
                first, second = (redact(one["__url__"]) for one in (found[key], sample))
                raise SampleError(
                    f"two samples to join have the key {key!r}, in shards {first} and {second}: remove one first, "
                    "with wds-pipes dedup --by key",
                    url=second,
                    key=key,
                )
            found[key] = sample
        return found


@dataclass(frozen=True)
class Join:
    """Which fields samples get.

    Attributes:
        partners: the data sets that have them.
        missing: what becomes of a sample without a partner: ``"raise"``, ``"drop"``, ``"keep"``.
        prefer: of two fields of one name, which is kept: ``"first"``, ``"last"``; None: it is an
            error.
        storage_options: how to reach the shards.
    """

    partners: tuple[str, ...]
    missing: str
    prefer: str | None
    storage_options: StorageOptions

    @cached_property
    def _partners(self) -> list[Partner]:
        return [Partner(url, self.storage_options) for url in self.partners]

    def samples(self, samples: Iterator[Sample], shard: str, of_shard: Any, facts: Facts) -> Iterator[Sample]:
        """Yield the samples with the fields of their partners."""
        facts["missing"] = 0
        keys = [found.key for found in ShardWalk(make_opener(self.storage_options), shard).samples()]
        numbers = [partner.numbers(keys) for partner in self._partners]
        while block := list(islice(samples, _TOGETHER)):
            keys = [sample["__key__"] for sample in block]
            found = [partner.read(keys, of) for partner, of in zip(self._partners, numbers, strict=True)]
            for sample in block:
                others = [of.get(sample["__key__"]) for of in found]
                if None in others and self._partners[others.index(None)].checked:
                    facts["missing"] += 1
                    if self.missing == "raise":
                        raise self._missing(sample, others.index(None))
                    if self.missing == "drop":
                        facts["left_out"] += 1
                        continue
                for other in others:
                    if other is not None:
                        self._add(sample, other)
                yield sample

    def _missing(self, sample: Sample, number: int) -> SampleError:
        key, url = sample["__key__"], redact(sample["__url__"])
        return SampleError(
            f"sample {key!r} of shard {url} is not in {redact(self.partners[number])}: pass --missing drop or "
            "--missing keep if that is meant",
            url=url,
            key=key,
        )

    def _add(self, sample: Sample, other: Sample) -> None:
        for name, data in other.items():
            if is_metadata(name):
                continue
            if name in sample and self.prefer is None:
                key, url = sample["__key__"], redact(sample["__url__"])
                raise SampleError(
                    f"sample {key!r} of shard {url} has field {name!r}, and so has that of "
                    f"{redact(other['__url__'])}: pass --prefer first or --prefer last",
                    url=url,
                    key=key,
                )
            if name not in sample or self.prefer == "last":
                sample[name] = data


def join(
    urls: str | Sequence[str],
    dest: str,
    *,
    partners: Sequence[str],
    missing: str = "raise",
    prefer: str | None = None,
    **options: Unpack[JobOptions],
) -> Report:
    """Write samples with the fields that other data sets have for their keys.

    Args:
        urls: the shards whose samples, names and order stay.
        dest: the directory to write to.
        partners: the other data sets, each as its shards, a directory or an ``index.json``. They
            may be sharded and ordered in any way, and need indexes of offsets and keys.
        missing: for a sample whose key another data set does not have: ``"raise"``; ``"drop"``:
            leave it out; ``"keep"``: write it without.
        prefer: which field is kept if several have one name: ``"first"``, ``"last"``; None: that is
            an error.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit.
        WdsError: a shard, an index or the store cannot be read, or has other outputs.
    """
    check_choice("missing", missing, "raise", "drop", "keep")
    if prefer is not None:
        check_choice("prefer", prefer, "first", "last")
    running, contents = Running(dest, options), []
    shards = find_shards(urls, running.place)
    for partner in partners:
        found = Partner(partner, running.storage_options)
        contents.append(fingerprint(marks(found.urls, running.storage_options)))
        found.check_indexed()
    join = Join(tuple(partners), missing, prefer, running.storage_options)
    decided = {
        "what --with names, as a hash,": contents,
        "missing": missing,
        "prefer": prefer,
        "key_split": "first-dot",
    }
    work = changed_by(join.samples, Reading(running.storage_options))
    return running.run(rewrite("join", shards, running.place, work, decided))
