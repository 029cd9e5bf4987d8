"""Measure where the time goes between a store and a pipeline."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.stream import Stream
from wds_pipes.core.words import plural
from wds_pipes.io.expand import expand
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.urls import Urls, redact
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.tar.index import make_opener

_CONNECTIONS = (1, 2, 4, 8, 16, 32)
_GAIN = 1.15  # a change is worth it if it reads at least this many times as fast
_SAME = 0.8  # a pipe with this share of the link's rate counts as as fast as the link: the measurement is short


@dataclass
class Speed:
    """What was measured.

    Attributes:
        first_bytes: the seconds to the first byte of each of some requests to a store.
        link: MB (10^6 bytes) per second of a store, by the number of connections.
        enough: how many connections the link needs; 0: the shards are local.
        mb: MB per second of a pipeline in one process.
        samples: its samples per second.
        computed: the share of the time in which the process computed.
        stalled: the share of the time in which it waited for bytes.
        advice: what would help.
    """

    first_bytes: list[float] = field(default_factory=list)
    link: dict[int, float] = field(default_factory=dict)
    enough: int = 0
    mb: float = 0.0
    samples: float = 0.0
    computed: float = 0.0
    stalled: float = 0.0
    advice: str = ""


def bench(
    urls: Urls,
    *,
    seconds: float = 5.0,
    connections: int = 8,
    readahead_bytes: int = 64 << 20,
    storage_options: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Speed:
    """Measure the speed of the link to a store and of a pipeline, and report what would help.

    Args:
        urls: the shards. They are read repeatedly, so local shards mostly come from the memory of
            the machine.
        seconds: how long each measurement takes.
        connections: requests at a time.
        readahead_bytes: how much is requested ahead, at most.
        storage_options: how to reach the storage.
        say: called with each result, in words, as soon as it is there.

    Raises:
        ValueError: nothing matches, or the shards hold no samples.
        ShardError: a shard cannot be read.
    """
    shards, found = expand(urls, storage_options), Speed()
    say(f"{plural(len(shards), 'shard')}, the first: {redact(shards[0])}")
    if is_remote(shards[0]):
        _measure_link(
            found, shards, seconds / 2, {"storage_options": storage_options, "readahead_bytes": readahead_bytes}, say
        )
    opened = OpenShards(
        ShardList(shards), storage_options=storage_options, connections=connections, readahead_bytes=readahead_bytes
    )
    _measure_pipeline(found, GroupByKey(LoadTar(opened)), opened.opener, seconds)
    say(
        f"a pipeline in one process, connections={connections}: {found.mb:,.0f} MB/s, {found.samples:,.0f} samples/s; "
        f"it computed {found.computed:.0%} of the time, and waited for bytes {found.stalled:.0%}"
    )
    found.advice = _advice(found, connections)
    say(f"-> {found.advice}")
    return found


def _measure_link(
    found: Speed, shards: list[str], seconds: float, options: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Measure the link with more and more connections, until more of them do not help."""
    opener = make_opener(**options, connections=1)
    for turn in range(5):
        start = time.perf_counter()
        opener.open(shards[turn % len(shards)]).close()
        found.first_bytes.append(time.perf_counter() - start)
    usual, first = statistics.median(found.first_bytes[1:]) * 1e3, found.first_bytes[0] * 1e3
    say(f"first byte after {usual:.0f} ms (the first request of all: {first:.0f} ms)")
    best = 0.0
    for count in _CONNECTIONS:
        opener = make_opener(**options, connections=count)
        found.link[count] = rate = _rate(shards, seconds, opener)
        say(f"{count:>3} connection{'s' if count > 1 else ' '}: {rate:,.0f} MB/s")
        if rate < best * _GAIN:
            return
        best, found.enough = rate, count


def _rate(shards: list[str], seconds: float, opener: Opener) -> float:
    """Return the MB per second that arrive, whether or not they were read from the streams."""
    buffer, start = bytearray(1 << 20), time.perf_counter()
    while True:
        queue = ReadQueue(opener.client)
        try:
            streams = [opener.open(shards[0], 0, queue)]
            streams += [opener.open(shard, 0, queue, wait=False) for shard in shards[1:16]]
            for stream in streams:
                with stream:
                    while stream.readinto(buffer):  # type: ignore[attr-defined]
                        if (passed := time.perf_counter() - start) > seconds:
                            return opener.used.bytes_fetched / passed / 1e6
        finally:
            queue.close()


def _measure_pipeline(found: Speed, chain: Stage[Any], opener: Opener, seconds: float) -> None:
    taken = samples = 0
    stream, passed = Stream(chain), 0.0
    start, busy, before = time.perf_counter(), time.thread_time(), opener.used.stall_seconds
    while passed <= seconds:
        known = samples
        for sample in stream:
            samples += 1
            taken += sum(len(value) for value in sample.values() if isinstance(value, bytes))
            passed = time.perf_counter() - start
            if passed > seconds:
                break
        if samples == known:
            raise ValueError("these shards hold no samples")
    found.mb, found.samples = taken / passed / 1e6, samples / passed
    found.computed = (time.thread_time() - busy) / passed
    found.stalled = (opener.used.stall_seconds - before) / passed


def _advice(found: Speed, connections: int) -> str:
    """Return what limits the pipeline, and what would help."""
    if found.computed > _SAME:
        cores = os.cpu_count() or 1
        return f"the process computes all the time: PipeLoader(num_workers=...) uses more of the {cores} cores"
    if found.link and found.mb >= max(found.link.values()) * _SAME:
        return (
            "the pipeline is as fast as the link: cache_shards() keeps shards that are read in "
            "more than one epoch on a local disk"
        )
    if found.enough > connections:
        return f"the link transfers more with connections={found.enough}; so may interleave_shards({found.enough})"
    return (
        "no bottleneck found: neither the link nor the processor is used fully. Measure longer "
        "(--seconds), or with more shards"
    )
