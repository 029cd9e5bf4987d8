"""``filter``: some of the samples of shards, or some of their fields."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from wds_pipes.cli.jobs import Options, Running, marks, runs, write_indexes
from wds_pipes.cli.options import dest, example, key_split, names_option, urls
from wds_pipes.cli.options import fields as fields_option
from wds_pipes.cli.options import metadata as metadata_option
from wds_pipes.cli.rewriting.mapping import Function, code_of, decoder_of
from wds_pipes.cli.rewriting.mapping import decode as decode_option
from wds_pipes.cli.rewriting.spine import Reading, Shard, find_shards, plan_rewrite, summed
from wds_pipes.core.counts import NothingKeptError
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, ShardWarning
from wds_pipes.io.tasks.task import Facts, Job, Place, fingerprint
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tar.views import example_of, read_keys
from wds_pipes.tools.reading import Sample
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
    storage_options: Options = None

    @property
    def fields(self) -> Sequence[str] | None:
        """The fields that are read: a function sees all of a sample."""
        return None if self.keep is not None else self.kept_fields

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


def _tables(shards: Sequence[Shard], where: str, metadata: str | None, storage_options: Options) -> list[list[str]]:
    """Return the table of each shard, and what distinguishes its content."""
    # shards of one name have tables in directories, as what is written
    names = [shard.name.removesuffix(".tar") for shard in shards]
    apart = any("/" in name for name in names)
    urls = find_tables([shard.url for shard in shards], metadata, storage_options, names if apart else None)
    try:
        found = [list(pair) for pair in zip(urls, marks(urls, storage_options), strict=True)]
    except ShardError as error:
        error.args = (str(error).replace("shard ", "table ", 1),)
        raise
    with keys_where(where, urls, make_opener(storage_options)) as keys_of:
        if not any(map(keys_of, urls)):
            raise unfulfilled(where, urls)
    return found if len(found) == len(shards) else [found[0] for _ in shards]


@click.command(
    name="filter",
    epilog=example(
        "wds-pipes filter 'raw/*.tar' good/ --where 'clip > 0.28 and width >= 256' -j 4\n"
        "wds-pipes filter 'raw/*.tar' good/ --exclude bad-keys.txt --fields jpg,cls\n"
        "wds-pipes filter 'raw/*.tar' good/ --keep rules:is_photo --decode rgb8"
    ),
)
@urls
@dest
@click.option(
    "--where", metavar="SQL", help="Samples whose row of metadata fulfils this; SQL as it stands after WHERE."
)
@metadata_option
@click.option("--keys", metavar="FILE", help="Samples whose key is in this file, which has a key on each line.")
@click.option("--exclude", metavar="FILE", help="Leave out samples whose key is in this file.")
@click.option("--keep", metavar="MODULE:FUNCTION", help="Samples for which this function returns true.")
@decode_option
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of what is left of each shard, samples 0, N, 2N and so on.",
)
@fields_option
@names_option("--drop-fields", "All fields but these.")
@key_split
@runs(summed)
def filter_(
    *,
    urls: Sequence[str],
    place: Place,
    running: Running,
    key_split: str,
    where: str | None,
    metadata: str | None,
    keys: str | None,
    exclude: str | None,
    keep: str | None,
    decode: str | None,
    every: int,
    fields: list[str] | None,
    drop_fields: list[str] | None,
) -> Job:
    """Write some of the samples of shards, or some of their fields, to the directory DEST.

    All conditions must hold. Each shard becomes one of the same name, uncompressed, with its
    offsets; index.json lists all of them. A shard of which no sample is left is a tar without
    samples: wds-pipes reshard makes even shards. A sample of which no field is left is left out.

    The function of --keep gets a sample as a dict of bytes with __key__ and __url__, or decoded
    with --decode; what is written are the bytes as they were. Its module may be a file in the
    current directory. If that file changes, the outputs are others, and --overwrite is needed.
    """
    if where is not None and (not where.strip() or where.startswith("@")):
        raise click.UsageError("--where is a condition such as 'clip > 0.28'; a file of keys is for --keys")
    if metadata and not where:
        raise click.UsageError("--metadata is for --where, a condition such as 'clip > 0.28'")
    if decode and not keep:
        raise click.UsageError("--decode is for the function of --keep")
    if fields and drop_fields:
        raise click.UsageError("--fields says what stays and --drop-fields what goes: pass one of the two")
    if not (where or keys or exclude or keep or fields or drop_fields or every > 1):
        raise click.UsageError(
            "say what to keep: --where, --keys, --exclude, --keep, --every (more than 1), --fields or --drop-fields"
        )
    storage_options = place.storage_options
    opener = make_opener(storage_options)
    only = None if keys is None else frozenset(read_keys(keys, opener))
    without = frozenset() if exclude is None else frozenset(read_keys(exclude, opener))
    shards = find_shards(urls, place, storage_options)
    chosen = Filter(
        where, only, without, None if keep is None else Function(keep, decode), every,
        None if fields is None else tuple(fields), frozenset(drop_fields or ()), storage_options,
    )  # fmt: skip
    decoder_of(decode)
    options = {
        "where": where,
        "metadata": None if metadata is None else redact(metadata),
        "keys": None if only is None else fingerprint(sorted(only)),
        "exclude": fingerprint(sorted(without)) if without else None,
        "keep": keep and f"{keep}, code {code_of(keep)}",
        "decode": decode,
        "every": every,
        "fields": None if fields is None else sorted(fields),
        "drop_fields": sorted(drop_fields or ()),
    }
    of_shards = None if where is None else _tables(shards, where, metadata, storage_options)
    return plan_rewrite(
        "filter", shards, place, chosen.samples, reading=Reading(storage_options, key_split), options=options,
        fields=chosen.fields, of_shards=of_shards, finish=partial(_finish, chosen),
    )  # fmt: skip
