"""Rewriting shards one by one, each into one of the same name in another directory: filter, map,
join and dedup.

Rules of dedup:
1. The shards are read twice. First a hash of 16 bytes of each sample is written, a file for each
   shard.
2. Two contents have one hash of 128 bits with a probability that need not be considered (one in
   10^18 among 10^10 samples), so contents are not compared.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from wds_pipes.codecs.table import encode
from wds_pipes.core.counts import NothingKeptError
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, ShardWarning, StateError, for_commands, parts
from wds_pipes.io.compression import kind_of_name
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import Urls, hide, redact, words
from wds_pipes.stages.decode_by_ext import DecodeByExt
from wds_pipes.stages.fields import identity, read_names
from wds_pipes.stages.map_samples import OF_CODE
from wds_pipes.tar.encoded import check_name, stored_size
from wds_pipes.tar.index import base_name, exists, list_indexed, list_shards, make_opener, path_of, stale_keys
from wds_pipes.tar.keys import is_metadata, splitter, without_dots
from wds_pipes.tar.located import among, example_of, read_keys
from wds_pipes.tar.stored import NotStoredError, Stored, read_stored
from wds_pipes.tools.inputs import Inputs, Reader
from wds_pipes.tools.interrupts import Terminated
from wds_pipes.tools.jobs import Facts, Place, Report, Task, Work, check_plan, fingerprint
from wds_pipes.tools.outputs import (
    JobOptions,
    Running,
    StorageOptions,
    check_names,
    check_outputs,
    check_same,
    common_classes,
    complete,
    marks,
    marks_and_sizes,
    names_of,
    shard_job,
    shard_task,
    write_indexes,
    write_task,
)
from wds_pipes.tools.reading import Sample, ShardWalk, Source, fields_of
from wds_pipes.tools.selecting import find_tables, keys_where, unfulfilled


class Shard(NamedTuple):
    """A shard to rewrite.

    Attributes:
        url: its path or URL.
        name: the name of the shard that is written.
        mark: what distinguishes its content from another one.
        more: what else its output depends on, as a JSON value.
        size: its bytes as they are stored; 1: not known.
    """

    url: str
    name: str
    mark: str
    more: Any = None
    size: int = 1


class Reading(NamedTuple):
    """How shards are read; it is sent to other processes.

    Attributes:
        storage_options: how to reach the storage.
        key_split: as in ``group_by_key``.
        on_repeated_key: as in ``group_by_key``.
        fields: the fields that are read; None: all.
    """

    storage_options: StorageOptions
    key_split: str = "first-dot"
    on_repeated_key: str = "raise"
    fields: Sequence[str] | None = None


# Yields the samples to write of a shard: called with its samples, the shard, and the facts that the
# task reports, of which "left_out" counts the samples that are not written on purpose. It is sent
# to other processes.
Change = Callable[[Iterator[Sample], Shard, Facts], Iterator[Sample]]


def find_shards(urls: Urls, place: Place) -> list[Shard]:
    """Return the shards that URLs name, and the names of those to write: their own, or if two have
    the same, relative to the common directory of all.

    Raises:
        ValueError: nothing matches, a shard is named twice, two would get one name, or one would be
            replaced.
        ShardError: a shard does not exist, or a store cannot be listed.
    """
    found, facts = list_shards(urls, place.storage_options)
    for url in found:
        if url == "-" or url.startswith("pipe:"):
            raise ValueError(f"{redact(url)} has no name for the shard to write: write it to a file first")
    names = [_name(base_name(path_of(url))) for url in found]
    if len(set(names)) < len(names):
        names = [_name(name) for name in names_of(found)]
    check_names(found, names)
    check_outputs(found, [place.at(name) for name in names])
    known = marks_and_sizes(found, place.storage_options, facts)
    return [Shard(url, name, mark, size=size) for url, name, (mark, size) in zip(found, names, known, strict=True)]


def _name(name: str) -> str:
    """Return the name of the uncompressed shard that is written for a shard with this name."""
    if kind_of_name(name):
        name = name[: name.rindex(".")]
    return name if name.lower().endswith(".tar") else f"{name}.tar"


def rewrite(
    command: str,
    running: Running,
    shards: Sequence[Shard],
    work: Work,
    decided: Mapping[str, Any],
    *,
    finish: Callable[[Place, list[Facts]], None] = write_indexes,
    extras: Sequence[str] = (),
) -> Report:
    """Rewrite shards.

    Args:
        command: the name of the job.
        running: how it runs.
        shards: the shards.
        work: writes one, which is the argument of its task.
        decided: what the outputs depend on, as JSON values.
        finish: writes what belongs to the whole.
        extras: the files that ``finish`` writes beside the indexes.
    """
    tasks = [
        shard_task(
            shard.name, shard, fingerprint(shard.mark, shard.more, decided), f"of {redact(shard.url)}", shard.size
        )
        for shard in shards
    ]
    classes = common_classes([shard.url for shard in shards], running.storage_options)
    place = running.place
    return running.run(
        shard_job(command, place, work, tasks, decided, finish=finish, extras=extras, classes=classes, unit="B")
    )


def _write(change: Change, reading: Reading, task: Task, place: Place) -> Facts:
    """Read a shard as ``group_by_key`` does, and write what ``change`` makes of its samples."""
    if reading.fields is None and reading.key_split == "first-dot" and not is_remote(task.arguments.url):
        with suppress(NotStoredError):
            return _copy(change, reading, task, place)
    shard, facts = task.arguments, Facts(read=0, left_out=0)
    samples = change(with_writable_keys(samples_of(task, reading, facts), reading.key_split), shard, facts)
    samples = complete(task.name, samples, lambda: facts["read"] - facts["left_out"])
    written = write_task(task, place, samples)
    without = facts.pop("without_fields")
    return {**written, **facts, "read": facts["read"] + without, "left_out": facts["left_out"] + without}


def _copy(change: Change, reading: Reading, task: Task, place: Place) -> Facts:
    """Do what ``_write`` does; samples that ``change`` does not change are copied as bytes.

    Raises:
        NotStoredError: the shard has other samples than ``read_stored`` finds. Nothing is written.
    """
    shard, facts, last = task.arguments, Facts(read=0, left_out=0), list[tuple[Stored, Sample]]()

    def samples() -> Iterator[Sample]:
        for stored in stored_of(task, reading.storage_options):
            facts["read"] += 1
            last[:] = [(stored, stored.sample(shard.url))]
            yield dict(last[0][1])  # it may be changed in place

    def written() -> Iterator[Sample | Stored]:
        for made in change(samples(), shard, facts):
            stored, sample = last[0]
            # each value is the same object, and not only as large or equal
            values = zip(made.values(), sample.values(), strict=False)
            yield stored if [*made] == [*sample] and all(one is other for one, other in values) else made

    found = complete(task.name, written(), lambda: facts["read"] - facts["left_out"])
    return {**write_task(task, place, found), **facts}


def stored_of(task: Task, storage_options: StorageOptions) -> Iterator[Stored]:
    """Yield the samples of the shard of a task, whose size is that of the shard, as their bytes.

    Raises:
        NotStoredError: the shard has others than ``read_stored`` finds. It may come after samples.
        StateError: the shard was changed after it was listed.
    """
    shard = task.arguments
    check_same(shard.url, shard.mark, storage_options)
    with make_opener(storage_options).open(shard.url) as file:
        for stored in read_stored(file):
            yield stored
            task.advance(stored.size)
    check_same(shard.url, shard.mark, storage_options)


def samples_of(task: Task, reading: Reading, facts: Facts) -> Iterator[Sample]:
    """Yield the samples of the shard of a task, whose size is that of the shard. They are counted
    in the facts, as ``"read"``, and at the end those that have none of the fields that are read, as
    ``"without_fields"``: these may be all, as other shards may have the fields.

    Raises:
        StateError: the shard was changed after it was listed.
    """
    shard, options = task.arguments, reading.storage_options
    check_same(shard.url, shard.mark, options)
    source = Source([shard.url], options, reading.key_split, reading.fields, reading.on_repeated_key)
    try:
        for sample in source.read():
            facts["read"] += 1
            size = sum(stored_size(sample["__key__"], field, len(data)) for field, data in fields_of(sample))
            yield sample  # it is done when the next one is wanted
            task.advance(size)
        facts["without_fields"] = source.without_fields
    except NothingKeptError as error:
        facts["without_fields"] = error.samples
    check_same(shard.url, shard.mark, options)  # before what is made of the samples gets its name


def with_writable_keys(samples: Iterator[Sample], key_split: str) -> Iterator[Sample]:
    """Yield samples with keys that can be written: only with ``first-dot`` a key has no dots, which
    become underscores.
    """
    for sample in samples:
        if key_split != "first-dot":
            sample["__key__"] = without_dots(sample["__key__"])
        yield sample


BASIC = "basic"


@cache
def function_of(named: str) -> Callable[[Any], Any]:
    """Return a function. Its module is searched for in the current directory too.

    Raises:
        ValueError: it is named in another way, the module cannot be imported, or has no such
            function.
    """
    module, colon, name = named.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"a function is named as module:function, such as changes:smaller, not {named!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            found: Any = import_module(module)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # whatever a module raises
        mend = f". Name it {module[:-3]}:{name}, without .py" if module.endswith(".py") else ""
        raise ValueError(
            f"module {module!r} cannot be imported from the current directory, nor from what is installed: "
            f"{type(error).__name__}: {error}{mend}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module!r} has no function {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{named} is no function")
    return found  # type: ignore[no-any-return]


class Function:
    """A function of samples, which it may get decoded; it can be sent to other processes.

    Args:
        named: ``module:function``.
        decode: how samples are decoded for it: specs of ``decode_by_ext``, with commas, or
            ``basic``; None: they are not.

    Raises:
        ValueError: there is no such function, or a spec is unknown.

    Attributes:
        identity: its name, and a hash of the file of its module.
    """

    def __init__(self, named: str, decode: str | None) -> None:
        self.named, self._decode = named, decode
        function_of(named)
        path, code = getattr(sys.modules[named.partition(":")[0]], "__file__", None), ""
        if path:
            with open(path, "rb") as file:
                code = blake2b(file.read(), digest_size=16).hexdigest()
        self.identity = f"{named}, code {code}"
        _decoder(decode)  # whether the specs are known

    def of(self, sample: Sample) -> Any:
        """Return what the function returns for a sample. What it prints goes to standard error:
        standard output is for the report.

        Raises:
            SampleError: it has raised, or the sample cannot be decoded.
        """
        decoder = _decoder(self._decode)
        given = dict(sample) if decoder is None else decoder(sample)
        try:
            with redirect_stdout(sys.stderr):
                return function_of(self.named)(given)
        except Terminated:
            raise
        except (Exception, SystemExit) as error:
            key, url = named = identity(sample)
            what = f"raised {type(error).__name__} on {named.name()}: {hide(words(error))}".rstrip(": ")
            of_bytes = self._decode is None and isinstance(error, (TypeError, AttributeError))
            mend = ". Fields are bytes, which --decode basic decodes" if of_bytes else ""
            raise SampleError(f"{self.named} {what}{mend}", url=url, key=key) from error


@cache
def _decoder(specs: str | None) -> Callable[[Sample], Sample] | None:
    if specs is None:
        return None
    named = [spec for spec in specs.split(",") if spec != BASIC]
    return DecodeByExt(None, *named, on_error="raise").decoder()  # type: ignore[arg-type]


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

    def samples(self, samples: Iterator[Sample], shard: Shard, facts: Facts) -> Iterator[Sample]:
        """Yield the samples that are kept, with their kept fields."""
        passing = None if shard.more is None else self._passing(shard.more[0])
        facts["rows"] = len(passing or ())
        named = {"where": passing, "keys": self.only, "exclude": self.without}
        matched = dict.fromkeys(named, 0)
        absent = {*(self.kept_fields or ()), *self.left_fields}
        chosen = 0
        for sample in samples:
            key = sample["__key__"]
            absent.difference_update(sample)
            facts.setdefault("first_key", key)
            for name, keys in named.items():
                matched[name] += key in (keys or ())
            kept = {}
            if self._chosen(sample, passing):
                if chosen % self.every == 0:
                    kept = {name: data for name, data in sample.items() if self._keeps(name)}
                chosen += 1
            if all(is_metadata(name) for name in kept):
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

    def finish(self, place: Place, facts: Sequence[Facts]) -> None:
        """Write the indexes, and warn if fewer samples were found than keys were named.

        Raises:
            NothingKeptError: no sample of any shard has one of the fields that are kept.
            ValueError: no sample has one of the keys.
        """
        fields = self.kept_fields
        absent = [fact for fact in facts if set(fields or ()) <= set(fact.get("absent", ()))]
        if fields and len(absent) == len(facts) and any(fact["read"] for fact in facts):
            raise NothingKeptError(
                f"no sample has the field {', '.join(fields)}: correct --fields, and pass --overwrite"
            )
        first = next((fact["first_key"] for fact in facts if "first_key" in fact), None)
        for name, keys in {"keys": self.only or (), "exclude": self.without, "where": ()}.items():
            count = sum(fact["rows"] for fact in facts) if name == "where" else len(keys)
            found = sum(fact["matched"][name] for fact in facts)
            if count and not found and first is not None:  # there are samples
                such = f"one of {plural(count, 'key')} of --{name}, such as {min(keys)!r:.200}" if keys else ""
                raise ValueError(
                    f"no sample has {such or 'the key of a row that fulfils --where'}. {example_of(first, keys)}. "
                    f"Correct {'the keys' if keys else 'the table'}, and pass --overwrite"
                )
            if found < len(keys) and not fields:  # samples without these fields are not read
                warnings.warn(
                    f"{count - found:,} of {plural(count, 'key')} of --{name} belong to no sample",
                    ShardWarning,
                    stacklevel=2,
                )
        write_indexes(place, facts)


def _with_tables(
    shards: Sequence[Shard], where: str, metadata: str | None, storage_options: StorageOptions
) -> list[Shard]:
    """Return shards with the table of each, and what distinguishes its content."""
    # shards of one name have tables in directories, as what is written
    names = [shard.name.removesuffix(".tar") for shard in shards]
    apart = any("/" in name for name in names)
    urls = find_tables([shard.url for shard in shards], metadata, storage_options, names if apart else None)
    for url in urls:
        if not exists(url, storage_options):
            shown = redact(url)
            raise ShardError(f"table {shown} does not exist: write it, or pass --metadata", url=shown, missing=True)
    found = [list(pair) for pair in zip(urls, marks(urls, storage_options), strict=True)]
    with keys_where(where, urls, make_opener(storage_options)) as keys_of:
        if not any(keys_of(url) for url in urls):
            raise unfulfilled(where, urls)
    if len(found) == 1:  # one table for all
        found *= len(shards)
    return [shard._replace(more=table) for shard, table in zip(shards, found, strict=True)]


def filter(  # noqa: A001
    urls: Urls,
    dest: str | os.PathLike[str],
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
    if where is not None:
        shards = _with_tables(shards, where, metadata, running.storage_options)
    # a function sees all fields of a sample
    reading = Reading(running.storage_options, key_split, fields=None if keep is not None else kept)
    return rewrite("filter", running, shards, partial(_write, chosen.samples, reading), decided, finish=chosen.finish)


def _mapped(function: Function, skips: bool, samples: Iterator[Sample], shard: Shard, facts: Facts) -> Iterator[Sample]:
    """Yield the samples that a function returns.

    Args:
        function: the function.
        skips: leave out a sample on which it raises, or that cannot be decoded or written.
        samples: the samples of a shard.
        shard: the shard.
        facts: what is counted.
    """
    facts["skipped"] = 0
    for sample in samples:
        try:
            made = _made(function, sample)
        except SampleError as error:
            if not skips or isinstance(error.__cause__, (*OF_CODE, MemoryError)):
                raise
            facts["skipped"] += 1
            facts["left_out"] += 1
            facts.setdefault("first_error", for_commands(error))
        else:
            if made is None:
                facts["left_out"] += 1
            else:
                yield made


def _made(function: Function, sample: Sample) -> Sample | None:
    made = function.of(sample)
    if made is None:
        return None
    if not isinstance(made, Mapping):
        key, url = named = identity(sample)
        raise SampleError(
            f"{function.named} returned {type(made).__name__} for {named.name()}: let it return a "
            "dict of fields, or None to leave the sample out",
            url=url,
            key=key,
        ) from TypeError()
    encoded: Sample = {"__key__": sample["__key__"]}
    kept = sample if made.get("__key__", sample["__key__"]) == sample["__key__"] else {}
    for field, value in made.items():
        if field in kept and value is kept[field]:  # it was read from a shard, so it can be written
            encoded[field] = value
            continue
        try:
            if not is_metadata(str(field)):
                check_name(str(made.get("__key__", sample["__key__"])), field, known=isinstance(field, str))
            encoded[field] = value if is_metadata(str(field)) else encode(field, value)
        except Exception as error:
            key, url = named = identity(sample)
            why, mends = parts(error, words=words)
            raise SampleError(
                f"{function.named} returned field {field!r} for {named.name()}, which cannot be encoded: {hide(why)}",
                url=url,
                key=key,
                **mends,
            ) from error
    return encoded


def _check_skipped(place: Place, facts: list[Facts]) -> None:
    """Write the indexes.

    Raises:
        SampleError: all samples were skipped.
    """
    skipped = sum(fact["skipped"] for fact in facts)
    if skipped and skipped == sum(fact["read"] for fact in facts):
        first = next((fact["first_error"] for fact in facts if "first_error" in fact), "see the report")
        raise SampleError(f"all samples were skipped because of errors, so nothing is left. The first: {first}")
    write_indexes(place, facts)


def map(  # noqa: A001
    function: str,
    urls: Urls,
    dest: str | os.PathLike[str],
    *,
    decode: str | None = None,
    on_error: str = "raise",
    key_split: str = "first-dot",
    **options: Unpack[JobOptions],
) -> Report:
    """Write the samples that a function returns for those of shards.

    The function gets a sample as a dict with ``__key__``, ``__url__`` and its fields, and returns a
    dict of fields to write, or None to leave the sample out. It must return the same for the same
    sample, since a shard may be written twice.

    Args:
        function: ``"module:function"``; the module may be a file in the current directory.
        urls: the shards.
        dest: the directory to write to.
        decode: how samples are decoded for it, as by ``decode_by_ext``; None: fields are bytes.
        on_error: ``"skip"``: leave out a sample on which the function raises, or which cannot be
            decoded or encoded, and count it; ``"raise"``.
        key_split: as in ``group_by_key``.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or there is no such function.
        WdsError: a shard or the store cannot be read, or has other outputs; all were skipped.
    """
    check_choice("on_error", on_error, "raise", "skip")
    running, called = Running(dest, options), Function(function, decode)
    decided = {"the function": called.identity, "decode": decode, "on_error": on_error, "key_split": key_split}
    change = partial(_mapped, called, on_error == "skip")
    work = partial(_write, change, Reading(running.storage_options, key_split))
    return rewrite("map", running, find_shards(urls, running.place), work, decided, finish=_check_skipped)


_TOGETHER = 64  # samples of which the partners are read at a time
_MEMORY = 128 << 20  # for the indexes of partners, and again for their samples


class Partner:
    """A data set whose samples are found by their keys, with the indexes of keys and of offsets. It
    can be pickled.

    Args:
        url: its shards, as one text.
        storage_options: how to reach the storage.

    Attributes:
        shown: its shards, without credentials.
        mark: a hash that distinguishes its content from another one.

    Raises:
        ValueError: nothing matches.
        ShardError: a store cannot be listed; a shard has no index of offsets, or that of another
            shard.
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: StorageOptions) -> None:
        urls = list_indexed(url, True, storage_options).urls
        of_urls = dict(zip(urls, marks(urls, storage_options), strict=True))
        self._inputs = Inputs(urls, {}, frozenset(), of_urls, memory=_MEMORY, storage_options=storage_options)
        self._inputs.located.compare_ends()
        self.shown, self.mark = redact(str(url)), fingerprint(self._inputs.marks)
        self._numbers: dict[int, list[int]] = {}

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._inputs, _MEMORY)

    @cached_property
    def checked(self) -> bool:
        """Whether the indexes of keys were compared with the shards, which is done once.

        Raises:
            ShardError: an index is of another shard, so samples are not found that are there.
        """
        self._inputs.located.check_keys()
        return True

    def find(self, keys: Iterable[str]) -> None:
        """Find the samples that may have one of these keys, by the hashes of their keys: only these
        can be read then.
        """
        wanted = np.unique(np.fromiter((hash_text(key) for key in keys), np.uint64))
        located, self._numbers = self._inputs.located, {}
        for shard in located.with_samples:
            hashes, numbers = located.keys(shard)
            held = among(hashes, wanted)
            for hashed, number in zip(hashes[held].tolist(), numbers[held].tolist(), strict=True):
                self._numbers.setdefault(hashed, []).append(located.starts[shard] + number)

    def read(self, keys: Iterable[str]) -> dict[str, Sample]:
        """Return the samples with these keys.

        Raises:
            SampleError: two have one key.
            ShardError: an index of keys is of another shard.
        """
        wanted, found = set(keys), dict[str, Sample]()
        hashes = {number: hash_text(key) for key in wanted for number in self._numbers.get(hash_text(key), ())}
        places = sorted(hashes)
        for place, sample in zip(places, self._reader.read([np.array(places, np.int64)]), strict=True):
            key = sample["__key__"]
            if hash_text(key) != hashes[place]:
                raise stale_keys(sample["__url__"], key)
            if key in found:
                first, second = (redact(one["__url__"]) for one in (found[key], sample))
                raise SampleError(
                    f"two samples to join have the key {key!r}, in shards {first} and {second}: remove one first, "
                    "with wds-pipes dedup --by key",
                    url=second,
                    key=key,
                )
            if key in wanted:
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

    partners: Sequence[Partner]
    missing: str
    prefer: str | None
    storage_options: StorageOptions

    def samples(self, samples: Iterator[Sample], shard: Shard, facts: Facts) -> Iterator[Sample]:
        """Yield the samples with the fields of their partners."""
        facts["missing"] = 0
        keys = [found.key for found in ShardWalk(make_opener(self.storage_options), shard.url).samples()]
        for partner in self.partners:
            partner.find(keys)
        while block := list(islice(samples, _TOGETHER)):
            found = [partner.read(sample["__key__"] for sample in block) for partner in self.partners]
            for sample in block:
                others = [of.get(sample["__key__"]) for of in found]
                if None in others and self.partners[others.index(None)].checked:
                    facts["missing"] += 1
                    if self.missing == "raise":
                        raise self._missing(sample, others.index(None))
                    if self.missing == "drop":
                        facts["left_out"] += 1
                        continue
                for other in others:
                    self._add(sample, other or {})
                yield sample

    def _missing(self, sample: Sample, number: int) -> SampleError:
        key, url = sample["__key__"], redact(sample["__url__"])
        return SampleError(
            f"sample {key!r} of shard {url} is not in {self.partners[number].shown}: pass --missing drop or "
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
    urls: Urls,
    dest: str | os.PathLike[str],
    *,
    partners: Urls,
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
    running = Running(dest, options)
    shards = find_shards(urls, running.place)
    found = [Partner(url, running.storage_options) for url in items_of(partners)]
    decided = {
        "what --with names, as a hash,": [partner.mark for partner in found],
        "missing": missing,
        "prefer": prefer,
        "key_split": "first-dot",
    }
    change = Join(found, missing, prefer, running.storage_options).samples
    return rewrite("join", running, shards, partial(_write, change, Reading(running.storage_options)), decided)


KEY, CONTENT = "key", "content"
_ENDING = ".hashes"
_NONE = bytes(16)  # the hash of a sample without the field
_HASH = np.dtype([("high", ">u8"), ("low", ">u8")])


def _without_repeated(samples: Iterator[Sample], shard: Shard, facts: Facts) -> Iterator[Sample]:
    """Yield the samples that stay. With the shard come their number, and the numbers of others."""
    count, repeated = shard.more[0], frozenset(shard.more[1])
    for number, sample in enumerate(samples):
        if number in repeated:
            facts["left_out"] += 1
        else:
            yield sample
    if facts["read"] != count:
        raise StateError(f"shard {redact(shard.url)} has {facts['read']} samples, and had {count} when it was hashed")


def _hash(reading: Reading, by: str, task: Task, place: Place) -> Facts:
    """Write a hash of each sample of a shard."""
    found = bytearray()
    try:
        if reading.key_split != "first-dot" or is_remote(task.arguments.url):
            raise NotStoredError
        for stored in stored_of(task, reading.storage_options):
            values = zip(stored.fields, stored.values(), strict=True)
            found += _hash_of(stored.key, () if by == KEY else [(f, v) for f, v in values if by in (CONTENT, f)], by)
    except NotStoredError:
        found = _hash_members(reading, by, task)
    place.write(task.outputs[0], bytes(found))
    return {"samples": len(found) // 16}


def _hash_members(reading: Reading, by: str, task: Task) -> bytearray:
    """Return the hashes of the samples of a shard, also of one in which a key comes again."""
    shard = task.arguments
    check_same(shard.url, shard.mark, reading.storage_options)
    found, split = bytearray(), splitter(reading.key_split)

    def want(name: str) -> bool:
        return by == CONTENT or (by != KEY and (split(name) or ("", ""))[1].lower() == by)

    walk = ShardWalk(make_opener(reading.storage_options), shard.url, reading.key_split, want)
    first: dict[str, tuple[str, frozenset[str], bytes]] = {}  # of each key that is written: key, fields, hash
    for key, members, *_ in walk.samples():
        task.advance(members[-1].end - members[0].start)
        written = without_dots(key) if reading.key_split != "first-dot" else key
        hashed = _hash_of(written, [(one.field, one.data) for one in members if one.data is not None], by)
        found += hashed
        here = frozenset(member.field for member in members)
        before = first.get(written)
        if before is None:
            first[written] = key, here, hashed
        elif problem := _problem(written, hashed, (key, here), before):
            offset = members[0].start
            text = f"shard {redact(shard.url)}, byte {offset}: {problem}"
            raise SampleError(text, url=redact(shard.url), key=key, offset=offset)
    return found


def _problem(
    written: str, hashed: bytes, this: tuple[str, frozenset[str]], first: tuple[str, frozenset[str], bytes]
) -> str | None:
    """Return why a sample cannot be left out as one that comes again in its shard; None: it can.

    Args:
        written: the key that both are written with.
        hashed: its hash.
        this: its key and fields.
        first: key, fields and hash of the first one.
    """
    (key, fields), (other, before, first_hash) = this, first
    if key != other:
        return f"keys {other!r} and {key!r} would both be written as {written!r}: rename one of them"
    if not fields <= before:
        return (
            f"files of key {key!r} come again, with fields that did not come before, such as {min(fields - before)!r}: "
            "join pieces first, or leave out what is not clear, with wds-pipes repair SHARDS NEW --drop-repeated"
        )
    if hashed != first_hash or hashed == _NONE:
        return f"another sample has the key {key!r} before: keep the first, with --by key, or give them other keys"
    return None


def _hash_of(key: str, fields: Collection[tuple[str, bytes]], by: str) -> bytes:
    digest = blake2b(digest_size=16)
    if by == KEY:
        digest.update(key.encode("utf-8", "surrogateescape"))
        return digest.digest()
    for field, data in sorted(fields, key=itemgetter(0)):
        name = field.encode("utf-8", "surrogateescape")
        digest.update(b"%d %d " % (len(name), len(data)) + name)
        digest.update(data)
    return digest.digest() if fields else _NONE


def _repeated(shards: Sequence[Shard], hashes: Place) -> list[npt.NDArray[np.bool_]]:
    """Return for each sample of each shard whether its hash came before: of shape (samples,).

    Raises:
        ValueError: no sample has the field.
    """
    parts = [np.frombuffer(hashes.read(shard.name + _ENDING) or b"", _HASH) for shard in shards]
    found = np.concatenate([np.empty(0, _HASH), *parts])
    high, low = found["high"].astype(np.uint64), found["low"].astype(np.uint64)
    if len(found) and not (high.any() or low.any()):
        raise ValueError("no sample has the field of --by: name one that wds-pipes info shows, or 'content'")
    order = np.lexsort((low, high))  # it keeps the order of equal ones
    same = (high[order[1:]] == high[order[:-1]]) & (low[order[1:]] == low[order[:-1]])
    repeated = np.zeros(len(found), np.bool_)
    repeated[order[1:][same]] = True
    repeated[(high == 0) & (low == 0)] = False
    return np.split(repeated, np.cumsum([len(part) for part in parts])[:-1])


def dedup(
    urls: Urls,
    dest: str | os.PathLike[str],
    *,
    by: str = "key",
    key_split: str = "first-dot",
    **options: Unpack[JobOptions],
) -> Report:
    """Write shards in which each sample comes once: of equal ones the first stays.

    Args:
        urls: the shards; their order says which sample is the first.
        dest: the directory to write to. ``.wds-pipes/hashes`` in it has a hash of each sample.
        by: what is compared: ``"key"``; ``"content"``, all fields; or one field, such as ``"jpg"``.
            Samples without that field all stay.
        key_split: as in ``group_by_key``.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or no sample has the field.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    running, by = Running(dest, options), by.lower()  # as fields are
    place, decided = running.place, {"by": by, "key_split": key_split}
    if not running.overwrite:
        check_plan(place, "dedup", decided)
    shards = find_shards(urls, place)
    tasks = [
        Task(shard.name, (shard.name + _ENDING,), shard, fingerprint(shard.mark, decided), shard.size)
        for shard in shards
    ]
    reading = Reading(place.storage_options, key_split, "ignore")  # what comes again in a shard is compared too
    journal = Place(place.at(".wds-pipes"), place.storage_options)
    hashes, found = running.first_pass(journal, "hashes", partial(_hash, reading, by), tasks, dry_run=running.dry_run)
    if found:  # else only the names are wanted
        repeated = _repeated(shards, hashes)
        more = [[len(places), places.nonzero()[0].tolist()] for places in repeated]
        shards = [shard._replace(more=of) for shard, of in zip(shards, more, strict=True)]
    return rewrite("dedup", running, shards, partial(_write, _without_repeated, reading), decided)
