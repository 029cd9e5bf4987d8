"""The first of several samples with one key, content or field.

The shards are read twice. First a hash of 16 bytes of each sample is written, a file for each
shard. Two contents have one hash of 128 bits with a probability that need not be considered (one in
10^18 among 10^10 samples), so contents are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from wds_pipes.errors import SampleError, StateError
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.keys import splitter, without_dots
from wds_pipes.tools.engines import Facts, Task
from wds_pipes.tools.jobs import Job, Place, Report, check_plan, fingerprint, run
from wds_pipes.tools.outputs import JobOptions, Running, check_same, of_first_pass
from wds_pipes.tools.reading import Found, Sample, ShardWalk
from wds_pipes.tools.rewriting import Reading, Shard, changed_by, find_shards, rewrite

KEY, CONTENT = "key", "content"
_FOLDER, _ENDING = ".wds-pipes/hashes", ".hashes"
_NONE = bytes(16)  # the hash of a sample without the field
_HASH = np.dtype([("high", ">u8"), ("low", ">u8")])


def _without_repeated(samples: Iterator[Sample], shard: str, of_shard: Any, facts: Facts) -> Iterator[Sample]:
    """Yield the samples that stay; ``of_shard``: their number, and the numbers of others."""
    count, repeated = of_shard[0], frozenset(of_shard[1])
    for number, sample in enumerate(samples):
        if number in repeated:
            facts["left_out"] += 1
        else:
            yield sample
    if facts["read"] != count:
        raise StateError(f"shard {redact(shard)} has {facts['read']} samples, and had {count} when it was hashed")


def _hash(reading: Reading, by: str, task: Task, place: Place) -> Facts:
    shard, _ = task.arguments
    check_same(shard.url, shard.mark, reading.storage_options)
    found, split = bytearray(), splitter(reading.key_split)

    def want(name: str) -> bool:
        return by == CONTENT or (by != KEY and (split(name) or ("", ""))[1].lower() == by)

    walk = ShardWalk(make_opener(reading.storage_options), shard.url, reading.key_split, want)
    first: dict[str, tuple[str, frozenset[str], bytes]] = {}  # of each key that is written: key, fields, hash
    for key, members, *_ in walk.samples():
        sample = Found(without_dots(key) if reading.key_split != "first-dot" else key, members)  # as it is written
        hashed = _hash_of(sample, by)
        found += hashed
        here = frozenset(member.field for member in members)
        before = first.get(sample.key)
        if before is None:
            first[sample.key] = key, here, hashed
        elif problem := _problem(sample.key, hashed, (key, here), before):
            offset = members[0].start
            text = f"shard {redact(shard.url)}, byte {offset}: {problem}"
            raise SampleError(text, url=redact(shard.url), key=key, offset=offset)
    place.write(task.outputs[0], bytes(found))
    return {"samples": len(found) // 16}


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


def _hash_of(sample: Found, by: str) -> bytes:
    digest = blake2b(digest_size=16)
    if by == KEY:
        digest.update(sample.key.encode("utf-8", "surrogateescape"))
        return digest.digest()
    members = [member for member in sample.members if member.data is not None]
    for member in sorted(members, key=lambda member: member.field):
        name, data = member.field.encode("utf-8", "surrogateescape"), member.data or b""
        digest.update(b"%d %d " % (len(name), len(data)) + name)
        digest.update(data)
    return digest.digest() if members else _NONE


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
    urls: str | Sequence[str],
    dest: str,
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
        Task(shard.name, (shard.name + _ENDING,), (shard, None), fingerprint(shard.mark, decided)) for shard in shards
    ]
    reading = Reading(place.storage_options, key_split, "ignore")  # what comes again in a shard is compared too
    hidden = of_first_pass(Place(place.at(_FOLDER), place.storage_options), tasks)
    hashes = Job("dedup (hashes)", hidden, partial(_hash, reading, by), tasks, decided)
    if not running.dry_run:
        running.first_pass(hashes)
    hashed = not running.dry_run or run(hashes, overwrite=True, dry_run=True).complete
    # without hashes, only for its names
    of_shards = (
        [[len(places), places.nonzero()[0].tolist()] for places in _repeated(shards, hidden)] if hashed else None
    )
    work = changed_by(_without_repeated, reading)
    return running.run(rewrite("dedup", shards, place, work, decided, of_shards=of_shards))
