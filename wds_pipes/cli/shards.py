"""What all commands that write shards do with them: an index of each directory, and the summary.

The facts of a task that writes a shard are ``{"shard": name, "samples": n, "size": bytes, "md5":
digest}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wds_pipes.tar.index_file import Entry, write_index
from wds_pipes.tar.index_formats import ShardFacts

if TYPE_CHECKING:
    from wds_pipes.io.tasks.task import Facts, Place, Report

_INDEX = "index.json"


def shard_facts(name: str, facts: ShardFacts) -> Facts:
    """What a task reports of a shard that it has written."""
    return {"shard": name, **facts._asdict()}


def index_names(shards: Sequence[str]) -> tuple[str, ...]:
    """The names of the indexes that ``write_indexes`` writes for shards: one in each directory."""
    return tuple(dict.fromkeys(_index_of(name) for name in shards))


def write_indexes(place: Place, facts: Sequence[Facts]) -> None:
    """Write an index of the shards of each directory."""
    indexes: dict[str, dict[str, Entry]] = {}
    for fact in facts:
        entry = Entry(ShardFacts(fact["samples"], fact["size"], fact["md5"]))
        indexes.setdefault(_index_of(fact["shard"]), {})[place.at(fact["shard"])] = entry
    for index, entries in indexes.items():
        write_index(place.at(index), entries, storage_options=place.storage_options)


def summary(report: Report) -> str:
    """How many shards, samples and bytes a job has written, in words."""
    from wds_pipes.core.words import plural

    facts = report.facts.values()
    samples, size = sum(fact["samples"] for fact in facts), sum(fact["size"] for fact in facts)
    return f"{plural(len(facts), 'shard')}, {plural(samples, 'sample')}, {plural(size, 'byte')}"


def _index_of(shard: str) -> str:
    folder = shard.rpartition("/")[0]
    return f"{folder}/{_INDEX}" if folder else _INDEX
