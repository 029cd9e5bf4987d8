"""``wds-pipes bench``: measures where the time goes between a store and a pipeline."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wds_pipes.cli.options import echo, example, in_one_line, storage_options
from wds_pipes.core.words import plural
from wds_pipes.io.urls import redact

if TYPE_CHECKING:
    from wds_pipes.core.stage import Stage
    from wds_pipes.io.open import Opener

_CONNECTIONS = (1, 2, 4, 8, 16, 32)
_GAIN = 1.15  # a change is worth it if it reads at least this many times as fast
_SAME = 0.8  # a pipe with this share of the link's rate counts as as fast as the link: the measurement is short


class _Seen(NamedTuple):
    """A measurement: MB (10^6 bytes) per second, samples per second, and the shares of the time in
    which the process computed and waited for bytes.
    """

    mb: float
    samples: float
    computed: float
    stalled: float


@click.command(epilog=example("wds-pipes bench 's3://bucket/train-{000..011}.tar'"))
@click.argument("urls", nargs=-1, required=True)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="How long each measurement takes."
)
@click.option("--connections", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at a time.")
@click.option(
    "--readahead-mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="How many MiB are requested ahead, at most.",
)
@storage_options
def bench(
    urls: tuple[str, ...],
    seconds: float,
    connections: int,
    readahead_mib: int,
    storage_options: dict[str, Any],
) -> None:
    """Measure the speed of the link to a store and of a pipeline, and report what would help.

    URLS are the shards, with {000..011} or * in quotes. They are read repeatedly, so local shards
    mostly come from the memory of the machine.
    """
    with in_one_line():
        from wds_pipes.io.expand import expand
        from wds_pipes.io.open import is_remote
        from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList

        shards = expand(urls, storage_options)
        remote = is_remote(shards[0])
        echo(f"{plural(len(shards), 'shard')}, the first: {redact(shards[0])}")
        link, enough = _link(shards, seconds, storage_options, readahead_mib << 20) if remote else (0.0, connections)

        opened = OpenShards(
            ShardList(shards),
            storage_options=storage_options,
            connections=connections,
            readahead_bytes=readahead_mib << 20,
        )
        own = _watch(GroupByKey(LoadTar(opened)), opened.opener, seconds)
        echo(
            f"a pipeline in one process, connections={connections}: {own.mb:,.0f} MB/s, {own.samples:,.0f} samples/s; "
            f"it computed {own.computed:.0%} of the time, and waited for bytes {own.stalled:.0%}"
        )
        echo(f"-> {_advice(own, link, connections, enough)}")


def _link(shards: list[str], seconds: float, options: dict[str, Any], readahead: int) -> tuple[float, int]:
    """Return the maximum rate of the link in MB per second, and how many connections it needs."""
    from wds_pipes.io.open import Opener
    from wds_pipes.io.remote.budget import Reading

    waits, opener = [], Opener(Reading(options, readahead, 1))
    for turn in range(5):
        start = time.perf_counter()
        opener.open(shards[turn % len(shards)]).close()
        waits.append(time.perf_counter() - start)
    echo(
        f"first byte after {statistics.median(waits[1:]) * 1e3:.0f} ms (the first request of all: "
        f"{waits[0] * 1e3:.0f} ms)"
    )
    best, enough = 0.0, 1
    for count in _CONNECTIONS:
        rate = _raw(shards, seconds / 2, Opener(Reading(options, readahead, count)))
        echo(f"{count:>3} connection{'s' if count > 1 else ' '}: {rate:,.0f} MB/s")
        if rate < best * _GAIN:
            return max(best, rate), enough
        best, enough = rate, count
    return best, enough


def _raw(shards: list[str], seconds: float, opener: Opener) -> float:
    """Return the MB per second that arrive, whether or not they were read from the streams."""
    from wds_pipes.io.remote.queue import ReadQueue

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


def _watch(chain: Stage[Any], opener: Opener, seconds: float) -> _Seen:
    """Measure a pipeline."""
    from wds_pipes.core.stream import Stream

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
    return _Seen(
        taken / passed / 1e6,
        samples / passed,
        (time.thread_time() - busy) / passed,
        (opener.used.stall_seconds - before) / passed,
    )


def _advice(own: _Seen, link: float, connections: int, enough: int) -> str:
    """Return what limits a pipeline, and what would help."""
    if own.computed > _SAME:
        return (
            "the process computes all the time: PipeLoader(num_workers=...) uses more of the "
            f"{os.cpu_count() or 1} cores"
        )
    if link and own.mb >= link * _SAME:
        return (
            "the pipeline is as fast as the link: cache_shards() keeps shards that are read in "
            "more than one epoch on a local disk"
        )
    if enough > connections:
        return f"the link transfers more with connections={enough}; so may interleave_shards({enough})"
    return (
        "no bottleneck found: neither the link nor the processor is used fully. Measure longer "
        "(--seconds), or with more shards"
    )
