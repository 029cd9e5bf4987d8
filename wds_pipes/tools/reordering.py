"""Writing samples in another order, or into other shards: reshard, concat, split, shuffle, sort and
mix.

Rules of sorting:
1. A first pass writes the values of each input shard to a file, sorted, with the numbers of their
   samples in the shard. The files are merged, so only the values of one shard are in memory.
2. Values are all numbers or all texts. Texts are compared by their code points. Samples with equal
   values keep their order.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import IO, Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from wds_pipes.codecs.table import Decoding
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.order import Permutation, hash64, order_of_samples
from wds_pipes.core.words import bytes_shown, plural
from wds_pipes.errors import SampleError
from wds_pipes.io.cache.shard_cache import parse_size
from wds_pipes.io.compression import kind_of_name
from wds_pipes.io.expand import items_of
from wds_pipes.io.outputs import exists, open_output, target_of
from wds_pipes.io.urls import Urls, local_path, redact
from wds_pipes.stages.fields import identity
from wds_pipes.stages.proportions import TURNS, turns, whole_weights
from wds_pipes.tar.encoded import Encoded
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.index import list_shards, stale_keys
from wds_pipes.tar.located import KeyRange, split_by_key
from wds_pipes.tar.stored import Stored
from wds_pipes.tar.writer import write_shard
from wds_pipes.tools.inputs import Copy, Inputs, Reader, open_inputs
from wds_pipes.tools.jobs import Facts, Place, Report, Task, check_plan, fingerprint
from wds_pipes.tools.outputs import (
    JobOptions,
    Running,
    StorageOptions,
    check_outputs,
    common_classes,
    complete,
    counted,
    marks,
    shard_ends,
    shard_facts,
    shard_job,
    shard_limits,
    shard_task,
    split_numbers,
    splits_of,
    unchanged,
    write_task,
)
from wds_pipes.tools.reading import Sample, Source

_MOST_OPEN = 64  # files that are merged at a time
_BLOCK = 1 << 13

Line = list[Any]  # a value, and the number of its sample
_encode = json.JSONEncoder(separators=(",", ":")).encode  # ``json.dumps`` would make an encoder for each line


# The numbers of samples in some order: those that cannot be computed are listed (int64).
Order = range | Permutation | npt.NDArray[np.int64]

_BLOCK_SAMPLES = 1 << 15  # samples whose places are computed at a time


class ReorderOptions(JobOptions, total=False):
    """Options of the functions that write samples in another order, or into other shards.

    Attributes:
        max_samples: the maximum number of samples in a shard; None: 100,000.
        max_bytes: the maximum size of a shard, such as 268435456 or ``"256MB"``; None: 1 GiB.
        shards: write so many shards of equal numbers of samples instead.
        memory: what each process may need besides the program itself, such as ``"64MB"``; by
            default 256 MB.
        md5: compute the MD5 of each shard.
    """

    max_samples: int | None
    max_bytes: int | str | None
    shards: int | None
    memory: int | str
    md5: bool


class Part(NamedTuple):
    """Some places of an order: those from ``start`` on, before ``stop``. A listed order has only
    these.
    """

    order: Order
    start: int
    stop: int

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers of the samples, in blocks."""
        order = self.order
        for start in range(self.start, self.stop, _BLOCK_SAMPLES):
            places = np.arange(start, min(start + _BLOCK_SAMPLES, self.stop))
            if isinstance(order, range):
                yield places
            else:
                yield order.numbers_at(places) if isinstance(order, Permutation) else order[places]


# Returns the order of each split by its name, or one without a name. It gets the samples, how first
# passes run, where they write, and how many bytes may be held.
Orders = Callable[[Inputs, Running, Place, int], Mapping[str, Order]]


def _reorder(
    command: str,
    urls: Urls,
    dest: str | os.PathLike[str],
    options: ReorderOptions,
    orders: Orders,
    *,
    decided: Mapping[str, Any],
    of_sample: int = 0,
    keys: bool = False,
    one_by_one: bool = False,
    named: Sequence[str] | None = None,
) -> Report:
    """Write the samples of shards in an order.

    Args:
        command: the name of the job.
        urls: the shards.
        dest: the directory to write to.
        options: see ``ReorderOptions``.
        orders: the orders.
        decided: what decides about the orders, as JSON values; ``"shares"``: those of the splits.
        of_sample: how many bytes of memory an order takes for each sample.
        keys: indexes of keys are needed.
        one_by_one: samples are read one by one, so the shards must not be compressed.
        named: what the shards were named by, if it is not ``urls``.

    Raises:
        ValueError: the options do not fit; a shard would replace an input, or be one of the next
            run.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    running, shards = Running(dest, options, ReorderOptions), options.get("shards")
    given = [os.fspath(url) for url in items_of(urls)]
    for name in ("max_samples", "max_bytes"):
        if shards is not None and options.get(name) is not None:
            option = name.replace("_", "-")
            raise ValueError(
                f"--shards says how many shards there are, so --{option} would be ignored: pass one of the two"
            )
    if shards is not None:
        check_count("shards", shards)
    most, size = shard_limits(options.get("max_samples"), options.get("max_bytes"))
    memory, place = parse_size(options.get("memory", "256MB")), running.place
    decided = {**decided, **({"md5": True} if options.get("md5") else {})}
    planned = {**decided, "max_samples": most, "max_bytes": size, "shards": shards}
    if not running.overwrite:
        check_plan(place, command, planned)
    with running.beside_outputs() as hidden:
        inputs = open_inputs(given, hidden, running, memory=memory // 8, keys=keys)
        if one_by_one and inputs.compressed:
            raise ValueError(
                f"{redact(min(inputs.compressed))} is compressed, so its samples cannot be read in any order: write "
                "uncompressed shards first, with wds-pipes reshard"
            )
        if (needed := 2 * of_sample * inputs.count) > memory:  # an order takes half of the memory at most
            raise ValueError(
                f"the order of {plural(inputs.count, 'sample')} needs {plural(needed, 'byte')}, more than --memory, "
                f"which is {bytes_shown(memory)}: pass --memory {-(-needed // 10**6)}MB"
            )
        tasks: list[Task] = []
        identity = fingerprint(inputs.marks, decided)
        for split, order in orders(inputs, running, hidden, memory // 2).items():
            prefix = f"{split}/{split}" if split else "shard"
            for number, (start, stop) in enumerate(pairwise([0, *_ends(inputs, order, most, size, shards)])):
                mark, says = fingerprint(identity, split, start, stop), plural(stop - start, "sample")
                part = Part(order, start, stop)
                if isinstance(order, np.ndarray):
                    part = Part(order[start:stop], 0, stop - start)
                tasks.append(shard_task(f"{prefix}-{number:06d}.tar", part, mark, says, stop - start))
    if not tasks:
        raise ValueError(
            "there is no sample to write: a data set has none, and with --exhausted stop the mixture ends where one "
            "has no more"
        )
    check_outputs(inputs.urls, [place.at(task.name) for task in tasks], given if named is None else named)
    work, classes = partial(_write, inputs, memory // 2, decided), common_classes(inputs.urls, place.storage_options)
    return running.run(shard_job(command, place, work, tasks, planned, classes=classes))


def _ends(inputs: Inputs, order: Order, max_samples: int, max_bytes: int, shards: int | None) -> Iterable[int]:
    """Where the shards of samples in an order end."""
    count = order.count if isinstance(order, Permutation) else len(order)
    if shards is not None:
        if shards > count:
            raise ValueError(f"--shards {shards} is more than there are samples, {count}: write fewer shards")
        return [count * number // shards for number in range(1, shards + 1)]

    def sizes() -> Iterator[npt.NDArray[np.int64]]:
        for numbers in Part(order, 0, count).blocks():
            if isinstance(order, range):
                found = inputs.extents(numbers)
                yield found.stops - found.starts
            else:
                yield inputs.blocks[numbers].astype("i8") * BLOCK

    return shard_ends(sizes(), max_samples, max_bytes)


def _write(inputs: Inputs, memory: int, options: Mapping[str, Any], task: Task, place: Place) -> Facts:
    """Write a shard, of a split if the options have shares."""
    part, shares = task.arguments, options.get("shares")
    with contextlib.closing(Reader(inputs, memory)) as reader:
        samples = counted(task, complete(task.name, reader.copy(part.blocks()), part.stop - part.start))
        if shares is not None:
            samples = _of_split(samples, split_by_key(shares)[task.name.partition("/")[0]])
        return write_task(task, place, with_own_keys(samples), md5="md5" in options)


def _of_split(samples: Iterable[Copy], split: KeyRange) -> Iterator[Copy]:
    """Yield samples, and check that their keys, which an index says, are those of a split.

    Raises:
        ShardError: the index is of another shard.
    """
    for copy in samples:
        if copy.sample.key not in split:
            raise stale_keys(copy.url, copy.sample.key)
        yield copy


def with_own_keys(samples: Iterable[Copy]) -> Iterator[Encoded | Stored]:
    """Yield samples of one shard, and check that each has a key of its own.

    Raises:
        SampleError: two have the same.
    """
    seen: dict[str, str] = {}
    for url, sample in samples:
        key = sample.key
        if key in seen:
            raise SampleError(
                f"two samples of one shard would have the key {key!r}, one of {seen[key]} and one of {url}: leave one "
                "out with wds-pipes dedup, or give them other keys with wds-pipes map",
                key=key,
            )
        seen[key] = url
        yield sample


def sorted_numbers(
    by: str | None, inputs: Inputs, running: Running, hidden: Place, memory: int
) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples in the order of their values.

    Args:
        by: the field, with ``:`` and a path for a value in it; None: the keys.
        inputs: the samples.
        running: how the first pass is run.
        hidden: where it writes.
        memory: how many bytes of samples are held.

    Raises:
        ShardError: a shard cannot be read; a sample has no such value.
        ValueError: some values are numbers, and others are texts.
    """
    starts = inputs.located.starts
    tasks = [
        Task(f"{shard:06d}", (f"{shard:06d}",), shard, fingerprint(mark, by), starts[shard + 1] - starts[shard])
        for shard, mark in enumerate(inputs.marks)
    ]
    place, facts = running.first_pass(
        hidden, "values", partial(_write_values, inputs, by, memory), tasks, unit="sample"
    )
    kinds = {fact["kind"]: number for number, fact in enumerate(facts) if fact["kind"]}
    if len(kinds) > 1:
        (one, first), (other, second) = kinds.items()
        here, there = redact(inputs.urls[first]), redact(inputs.urls[second])
        raise ValueError(
            f"{by} is a {one} in {here} and a {other} in {there}: sort by a field that is the same kind of value in "
            "all samples"
        )
    with tempfile.TemporaryDirectory() as temporary:
        files = [_local(place, task.name, temporary) for task in tasks]
        starts = inputs.located.starts
        lines = _merged(list(zip(files, starts, strict=False)), temporary)
        return np.fromiter((number for _, number in lines), np.int64, inputs.count)


def _local(place: Place, name: str, temporary: str) -> str:
    """The path of a file of the first pass; one in a store is copied to a temporary directory."""
    path = local_path(place.at(name))
    if path is None:
        path = os.path.join(temporary, name)
        with open(path, "wb") as file:
            file.write(place.read(name) or b"")
    return path


def _write_values(inputs: Inputs, by: str | None, memory: int, task: Task, place: Place) -> Facts:
    """Write the sorted values of a shard; return of which kind they are."""
    starts, values = inputs.located.starts, _Values(by)
    reader = Reader(inputs, memory // 4, values.fields)
    part = Part(range(inputs.count), starts[task.arguments], starts[task.arguments + 1])
    with contextlib.closing(reader):
        lines = sorted(
            [values.of(sample), number] for number, sample in enumerate(counted(task, reader.read(part.blocks())))
        )
        output = open_output(place.at(task.name), overwrite=True, wait=True, storage_options=place.storage_options)
        try:
            for text in _texts(lines):
                output.write(text)
            output.commit()
        finally:
            output.discard()
    return {"kind": values.kind}


class _Values:
    """Finds the value by which a sample is sorted.

    Args:
        by: the field, with ``:`` and a path for a value in it; None: the key.

    Attributes:
        fields: which fields are needed.
        kind: of the values so far: "number", "text", or None.
    """

    def __init__(self, by: str | None) -> None:
        name, _, path = (by or "").partition(":")
        self._by, self._field, self._path = by, name.lower(), path.split(".") if path else []
        self.fields = frozenset([self._field] if by else [])
        self.kind: str | None = None
        decoding = Decoding((), allow_pickle=False, max_image_pixels=1)
        self._decode = decoding.decoder(self._field) if by else None

    def of(self, sample: Sample) -> str | float:
        """Return the value of a sample.

        Raises:
            SampleError: it has none, or of another kind than those before.
        """
        if self._by is None:
            return str(sample["__key__"])
        if self._field not in sample:
            mend = "name another field, or leave the sample out with wds-pipes filter"
            raise self._error(sample, f"has no field {self._field!r}: {mend}")
        try:
            value = sample[self._field] if self._decode is None else self._decode(sample[self._field])
        except Exception as error:
            raise self._error(sample, f"has a field {self._field!r} that cannot be decoded: {error}") from error
        for name in self._path:
            if not isinstance(value, dict) or name not in value:
                raise self._error(
                    sample,
                    f"has no value {self._by!r}: name another value, or leave the sample out with wds-pipes filter",
                )
            value = value[name]
        if not isinstance(value, (str, int, float)) or (isinstance(value, float) and math.isnan(value)):
            raise self._error(
                sample,
                f"has a value {self._by!r} that is neither a text nor a number: {value!r:.80}. Name a value in JSON as "
                "FIELD:NAME, such as json:width",
            )
        kind = "text" if isinstance(value, str) else "number"
        if kind != (self.kind or kind):
            raise self._error(sample, f"has a {kind} as {self._by!r}, and samples before it a {self.kind}")
        self.kind = kind
        return value

    @staticmethod
    def _error(sample: Sample, what: str) -> SampleError:
        key, url = named = identity(sample)
        return SampleError(f"{named.name()} {what}", key=key, url=url)


def _merged(files: Sequence[tuple[str, int]], temporary: str) -> Iterator[Line]:
    """Yield the lines of sorted files in order; a number is added to the places in each."""
    files = list(files)
    while len(files) > _MOST_OPEN:
        group, files = files[:_MOST_OPEN], files[_MOST_OPEN:]
        files.append((_spill(_merged(group, temporary), temporary), 0))
    with contextlib.ExitStack() as stack:
        opened = [(stack.enter_context(open(path, encoding="ascii")), start) for path, start in files]
        yield from heapq.merge(*(_lines(file, start) for file, start in opened))


def _lines(file: IO[str], start: int) -> Iterator[Line]:
    for text in file:
        value, place = json.loads(text)
        yield [value, start + place]


def _spill(lines: Iterable[Line], temporary: str) -> str:
    """Write lines to a temporary file, and return its path."""
    descriptor, path = tempfile.mkstemp(dir=temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(_texts(lines))
    except OSError as error:
        error.filename = path
        raise
    return path


def _texts(lines: Iterable[Line]) -> Iterator[bytes]:
    lines = iter(lines)
    while block := list(islice(lines, _BLOCK)):
        yield b"".join(_encode(line).encode("ascii") + b"\n" for line in block)


def is_weighted(text: str) -> bool:
    """Whether this is ``URLS=WEIGHT``."""
    url, equals, weight = text.rpartition("=")
    try:
        float(weight)
    except ValueError:
        return False
    return bool(url and equals)


def weights_of(given: Sequence[str]) -> dict[str, int]:
    """Read data sets with weights: their URLs, and their weights as whole numbers.

    Raises:
        ValueError: one is not written as ``URLS=WEIGHT``.
    """
    found: dict[str, float] = {}
    for text in given:
        url, _, weight = text.rpartition("=")
        if not is_weighted(text):
            raise ValueError(f"a data set is written as URLS=WEIGHT, such as 'web/*.tar=0.7', not {text!r:.200}")
        if url in found:
            raise ValueError("a data set is named twice: name it once, with the sum of its weights")
        found[url] = float(weight)
    return whole_weights(list(found), list(found.values()))


def mixed_numbers(firsts: Sequence[int], weights: Sequence[int], exhausted: str) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples of several data sets, mixed.

    Args:
        firsts: the number of the first sample of each data set, and that of all samples.
        weights: one for each.
        exhausted: "stop" where the one that comes next has no more samples; "drop": the others
            continue, and their proportions start anew.
    """
    counts = [stop - start for start, stop in pairwise(firsts)]

    def numbers() -> Iterator[int]:
        drawn, live = [0] * len(counts), list(range(len(counts)))
        while live:
            hashes = [hash64(TURNS, source) for source in live]
            for turn in turns([weights[source] for source in live], hashes, [0] * len(live)):
                source = live[turn]
                if drawn[source] == counts[source]:
                    break
                yield firsts[source] + drawn[source]
                drawn[source] += 1
            live.remove(source)
            if exhausted == "stop":
                return

    return np.fromiter(numbers(), np.int64)


def reshard(urls: Urls, dest: str | os.PathLike[str], **options: Unpack[ReorderOptions]) -> Report:
    """Write the samples of shards, in their order, into shards of another size.

    Args:
        urls: the shards, which may be compressed.
        dest: the directory to write to.
        options: the sizes, and how the job runs: see ``ReorderOptions`` and ``JobOptions``.

    Raises:
        ValueError: the options do not fit.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    return _reorder("reshard", urls, dest, options, lambda inputs, *_: {"": range(inputs.count)}, decided={})


def concat(
    urls: Urls,
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    md5: bool = False,
    storage_options: StorageOptions = None,
) -> Report:
    """Write the samples of shards, in their order, into one shard, with its offsets beside it.

    Args:
        urls: the shards, which may be compressed; ``-`` is standard input.
        output: the shard to write.
        overwrite: replace an existing file.
        md5: compute the MD5 of the shard.
        storage_options: how to reach a store: a dict of options for fsspec.

    Raises:
        ValueError: ``output`` exists, or is no name of a shard.
        WdsError: a shard cannot be read.
    """
    target, storage_options = target_of(output), storage_options or None
    shards, known = list_shards(urls, storage_options)
    if "*" in target or target.endswith("/") or os.path.isdir(local_path(target) or ""):
        raise ValueError(f"OUTPUT is the shard to write, not {redact(target)!r}: name a file")
    if kind_of_name(target):
        raise ValueError(f"only uncompressed shards have offsets: write .tar, not {redact(target)!r}")
    check_outputs(shards, [target])
    files = [url for url in shards if url != "-" and not url.startswith("pipe:")]
    before = dict(zip(files, marks(files, storage_options, known), strict=True))
    if not overwrite and exists(target, storage_options):
        raise ValueError(f"{redact(target)} exists: pass --overwrite to replace it, or another name")
    read = unchanged(Source(shards, storage_options or {}).read(), before, storage_options)
    samples = with_own_keys(Copy(redact(sample["__url__"]), Encoded(sample, None)) for sample in read)
    facts = write_shard(target, samples, md5=md5, storage_options=storage_options)
    shown = redact(target)
    return Report("concat", shown, 1, written=[shown], facts={shown: shard_facts(shown, facts)})


def split(
    urls: Urls, dest: str | os.PathLike[str], *, shares: dict[str, float], **options: Unpack[ReorderOptions]
) -> Report:
    """Divide the samples of shards by the hashes of their keys, such as into train and val.

    Args:
        urls: the shards.
        dest: the directory to write to: a directory in it for each split.
        shares: the splits and their shares, such as ``{"train": 0.9, "val": 0.1}``.
        options: the sizes, and how the job runs: see ``ReorderOptions`` and ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or a split would have no sample.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    splits_of(shares)  # whether they fit

    def orders(inputs: Inputs, *_: object) -> dict[str, Order]:
        return dict(split_numbers(inputs.hashes(), shares))

    return _reorder("split", urls, dest, options, orders, decided={"shares": shares}, of_sample=24, keys=True)


def shuffle(urls: Urls, dest: str | os.PathLike[str], *, seed: int = 0, **options: Unpack[ReorderOptions]) -> Report:
    """Write the samples of all shards in a random order, which depends only on the seed and the
    number of samples.

    Args:
        urls: the shards, uncompressed.
        dest: the directory to write to.
        seed: another seed is another order.
        options: the sizes, and how the job runs: see ``ReorderOptions`` and ``JobOptions``.

    Raises:
        ValueError: the options do not fit.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """

    def orders(inputs: Inputs, *_: object) -> dict[str, Order]:
        return {"": order_of_samples(inputs.count, seed, 0)}

    return _reorder("shuffle", urls, dest, options, orders, decided={"seed": seed}, of_sample=4, one_by_one=True)


def sort(
    urls: Urls, dest: str | os.PathLike[str], *, by: str | None = None, **options: Unpack[ReorderOptions]
) -> Report:
    """Write the samples of all shards in the order of their keys, or of a field.

    Args:
        urls: the shards, uncompressed.
        dest: the directory to write to.
        by: the field, or a value in its JSON, such as ``"json:width"``; None: the key.
        options: the sizes, and how the job runs: see ``ReorderOptions`` and ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or values are of several kinds.
        WdsError: a shard or the store cannot be read, or has other outputs; a sample has no such
            value.
    """

    def orders(inputs: Inputs, running: Running, hidden: Place, memory: int) -> dict[str, Order]:
        return {"": sorted_numbers(by, inputs, running, hidden, memory)}

    return _reorder("sort", urls, dest, options, orders, decided={"by": by}, of_sample=12, one_by_one=True)


def mix(
    sources: Sequence[str], dest: str | os.PathLike[str], *, exhausted: str = "stop", **options: Unpack[ReorderOptions]
) -> Report:
    """Mix the samples of several data sets in exact proportions, as the step ``mix`` does.

    Args:
        sources: the data sets with their weights, such as ``["web/*.tar=0.7", "books/*.tar=0.3"]``.
        dest: the directory to write to.
        exhausted: when the data set that comes next has no more samples: ``"stop"``; ``"drop"``: go
            on with the others.
        options: the sizes, and how the job runs: see ``ReorderOptions`` and ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or there is no sample.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    check_choice("exhausted", exhausted, "stop", "drop")
    if is_weighted(str(dest)):
        raise ValueError(f"DEST is the directory to write to, and {str(dest)!r} has a weight: name one at the end")
    weights, each = weights_of(sources), []
    for url in weights:
        shards, known = list_shards(url, options.get("storage_options"))
        if known is not None:
            marks(shards, options.get("storage_options"), known)  # whether they are those of the index
        each.append(shards)

    def orders(inputs: Inputs, *_: object) -> dict[str, Order]:
        numbers = [0, *accumulate(len(shards) for shards in each)]
        firsts = [inputs.located.starts[number] for number in numbers]
        return {"": mixed_numbers(firsts, list(weights.values()), exhausted)}

    decided = {"the list of weights": list(weights.values()), "exhausted": exhausted}
    given = [url for shards in each for url in shards]
    return _reorder("mix", given, dest, options, orders, decided=decided, of_sample=12, named=list(weights))
