"""Some of the samples of shards, or some of their fields."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from wds_pipes.core.counts import NothingKeptError
from wds_pipes.core.options import check_count
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, ShardWarning
from wds_pipes.io.urls import redact
from wds_pipes.stages.fields import read_names
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tar.listing import exists
from wds_pipes.tar.views import example_of, read_keys
from wds_pipes.tools.engines import Facts
from wds_pipes.tools.jobs import Place, Report, fingerprint
from wds_pipes.tools.mapping import Function
from wds_pipes.tools.outputs import JobOptions, Running, StorageOptions, marks, write_indexes
from wds_pipes.tools.reading import Sample
from wds_pipes.tools.rewriting import Reading, Shard, changed_by, find_shards, rewrite
from wds_pipes.tools.selecting import find_tables, keys_where, unfulfilled


@dataclass(frozen=True)
class Filter:
    """Which samples and fields are kept; all conditions must hold.

    Attributes:
        where: a condition over the table of metadata of each shard.
        only: the keys of which one must be that of the sample; None: any.
        without: keys that are left out.
        keep: a function that says whether a sample is kept.
        every: of the samples of a shard that are left, numbers 0, every, 2 every, ... are kept.
        kept_fields: the fields that are kept; None: all.
        left_fields: fields that are left out.
        storage_options: how to reach the tables.
    """

    where: str | None = None
    only: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    keep: Function | None = None
    every: int = 1
    kept_fields: tuple[str, ...] | None = None
    left_fields: frozenset[str] = frozenset()
    storage_options: StorageOptions = None

    def samples(self, samples: Iterator[Sample], shard: str, of_shard: Any, facts: Facts) -> Iterator[Sample]:
        """Yield the samples that are kept, with their kept fields."""
        passing = None if of_shard is None else self._passing(of_shard[0])
        facts["rows"] = len(passing or ())
        named = {"where": passing, "keys": self.only, "exclude": self.without}
        matched = dict.fromkeys(named, 0)
        absent = {*(self.kept_fields or ()), *self.left_fields}

        def read() -> Iterator[Sample]:
            try:
                yield from samples
            except NothingKeptError as error:  # other shards may have the fields: see ``_finish``
                facts["read"] += error.samples
                facts["left_out"] += error.samples

        chosen = 0
        for sample in read():
            absent.difference_update(sample)
            facts.setdefault("first_key", key := sample["__key__"])
            for name, keys in named.items():
                matched[name] += key in (keys or ())
            kept = {}
            if self._chosen(sample, passing):
                if chosen % self.every == 0:
                    kept = {name: data for name, data in sample.items() if self._keeps(name)}
                chosen += 1
            if all(map(is_metadata, kept)):
                facts["left_out"] += 1
            else:
                yield kept
        facts["matched"] = matched
        if absent:
            facts["absent"] = sorted(absent)

    def _keeps(self, field: str) -> bool:
        return is_metadata(field) or (
            field not in self.left_fields and (self.kept_fields is None or field in self.kept_fields)
        )

    def _chosen(self, sample: Sample, passing: frozenset[str] | None) -> bool:
        key = sample["__key__"]
        return (
            (passing is None or key in passing)
            and (self.only is None or key in self.only)
            and key not in self.without
            and (self.keep is None or bool(self.keep.of(sample)))
        )

    def _passing(self, table: str) -> frozenset[str]:
        assert self.where is not None
        with keys_where(self.where, [table], make_opener(self.storage_options)) as keys_of:
            return frozenset(keys_of(table))


def _finish(chosen: Filter, place: Place, facts: Sequence[Facts]) -> None:
    """Write the indexes, and warn if fewer samples were found than keys were named.

    Raises:
        NothingKeptError: no sample of any shard has one of the fields that are kept.
        ValueError: no sample has one of the keys.
    """
    fields = chosen.kept_fields
    absent = [fact for fact in facts if set(fields or ()) <= set(fact.get("absent", ()))]
    if fields and len(absent) == len(facts) and any(fact["read"] for fact in facts):
        raise NothingKeptError(f"no sample has the field {', '.join(fields)}: correct --fields, and pass --overwrite")
    named = {"keys": chosen.only or (), "exclude": chosen.without, "where": ()}
    first = next((fact["first_key"] for fact in facts if "first_key" in fact), None)
    for name, keys in named.items():
        count = sum(fact["rows"] for fact in facts) if name == "where" else len(keys)
        found = sum(fact["matched"][name] for fact in facts)
        if count and not found and first is not None:  # there are samples
            such = f"one of {plural(count, 'key')} of --{name}, such as {min(keys)!r:.200}" if keys else ""
            raise ValueError(
                f"no sample has {such or 'the key of a row that fulfils --where'}. {example_of(first, keys)}. Correct "
                f"{'the keys' if keys else 'the table'}, and pass --overwrite"
            )
        if found < len(keys) and not chosen.kept_fields:  # samples without these fields are not read
            warnings.warn(
                f"{count - found:,} of {plural(count, 'key')} of --{name} belong to no sample",
                ShardWarning,
                stacklevel=2,
            )
    write_indexes(place, facts)


def _tables(
    shards: Sequence[Shard], where: str, metadata: str | None, storage_options: StorageOptions
) -> list[list[str]]:
    """Return the table of each shard, and what distinguishes its content."""
    # shards of one name have tables in directories, as what is written
    names = [shard.name.removesuffix(".tar") for shard in shards]
    apart = any("/" in name for name in names)
    urls = find_tables([shard.url for shard in shards], metadata, storage_options, names if apart else None)
    for url in urls:
        if not exists(url, storage_options):
            error = ShardError(f"table {redact(url)} does not exist: write it, or pass --metadata", url=redact(url))
            error.missing = True
            raise error
    found = [list(pair) for pair in zip(urls, marks(urls, storage_options), strict=True)]
    with keys_where(where, urls, make_opener(storage_options)) as keys_of:
        if not any(map(keys_of, urls)):
            raise unfulfilled(where, urls)
    return found if len(found) == len(shards) else [found[0] for _ in shards]


def filter(  # noqa: A001
    urls: str | Sequence[str],
    dest: str,
    *,
    where: str | None = None,
    metadata: str | None = None,
    keys: str | None = None,
    exclude: str | None = None,
    keep: str | None = None,
    decode: str | None = None,
    every: int = 1,
    fields: Sequence[str] | None = None,
    drop_fields: Sequence[str] | None = None,
    key_split: str = "first-dot",
    **options: Unpack[JobOptions],
) -> Report:
    """Write some of the samples of shards, or some of their fields. All conditions must hold.

    Args:
        urls: the shards.
        dest: the directory to write to.
        where: samples whose row of metadata fulfils this; SQL as it stands after WHERE.
        metadata: the table for ``where``, or a directory of tables; None: beside the shards.
        keys: samples whose key is in this file, which has a key on each line.
        exclude: leave out samples whose key is in this file.
        keep: samples for which this function, ``"module:function"``, returns true.
        decode: how samples are decoded for it, as by ``decode_by_ext``; None: fields are bytes.
        every: of what is left of each shard, samples 0, N, 2N and so on.
        fields: only these fields.
        drop_fields: all fields but these.
        key_split: as in ``group_by_key``.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or no sample fulfils them.
        WdsError: a shard, a table or the store cannot be read, or has other outputs.
    """
    running = Running(dest, options)
    check_count("every", every)
    if where is not None and (not where.strip() or where.startswith("@")):
        raise ValueError("--where is a condition such as 'clip > 0.28'; a file of keys is for --keys")
    if metadata and not where:
        raise ValueError("--metadata is for --where, a condition such as 'clip > 0.28'")
    if decode and not keep:
        raise ValueError("--decode is for the function of --keep")
    if fields and drop_fields:
        raise ValueError("--fields says what stays and --drop-fields what goes: pass one of the two")
    if not (where or keys or exclude or keep or fields or drop_fields or every > 1):
        raise ValueError(
            "say what to keep: --where, --keys, --exclude, --keep, --every (more than 1), --fields or --drop-fields"
        )
    opener = make_opener(running.storage_options)
    only = None if keys is None else frozenset(read_keys(keys, opener))
    without = frozenset() if exclude is None else frozenset(read_keys(exclude, opener))
    shards = find_shards(urls, running.place)
    function = None if keep is None else Function(keep, decode)
    kept = None if fields is None else read_names("fields", fields)
    left = frozenset(read_names("drop_fields", drop_fields)) if drop_fields else frozenset[str]()
    chosen = Filter(where, only, without, function, every, kept, left, running.storage_options)
    decided = {
        "where": where,
        "metadata": None if metadata is None else redact(metadata),
        "keys": None if only is None else fingerprint(sorted(only)),
        "exclude": fingerprint(sorted(without)) if without else None,
        "keep": function and function.identity,
        "decode": decode,
        "every": every,
        "fields": None if kept is None else sorted(kept),
        "drop_fields": sorted(left),
        "key_split": key_split,
    }
    of_shards = None if where is None else _tables(shards, where, metadata, running.storage_options)
    # a function sees all fields of a sample
    reading = Reading(running.storage_options, key_split, fields=None if keep is not None else kept)
    work, finish = changed_by(chosen.samples, reading), partial(_finish, chosen)
    return running.run(rewrite("filter", shards, running.place, work, decided, of_shards=of_shards, finish=finish))
