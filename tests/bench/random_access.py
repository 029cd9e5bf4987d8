"""Random access with IndexedShards, against wids and against the stream, in one run.

    python tests/bench/random_access.py [DIRECTORY]      needs nginx and its echo module; writes
    about 450 MB there (default: a temporary directory), takes two minutes

1. ``data[i]`` at random places, raw bytes, against wids without its decoding: on tiny samples and
   on images of 107 KB; and ``__getitems__`` of 64 neighbours against 64 times ``[i]``. wids is as
   fast on tiny samples, and twice as fast on images: it maps shards into memory, and compares
   nothing when it reads. Here each read checks the headers before and after the sample, so that an
   index of another shard is an error, and a shard that was cut is no end of the process (SIGBUS).
2. A server that answers after 50 ms: the requests for an isolated sample, counted there, and the
   round trips of one ``__getitems__`` of 64 with 32 connections: the most requests of which each
   began when the one before had ended.

Rounds alternate; the figures are medians of their ratios. Exits with 1 if a bar is missed.
"""

import os
import random
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import wids
from bars import bar, directory, exit_if_missed, in_turn, median_ratio
from peers.data import images, tiny
from servers import paced_web

import wds_pipes as wp
from wds_pipes.tar import index_shards

ROUNDS, SAMPLES = 7, 6400


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def times_as_long(one, other) -> float:
    """How many times as long as ``one`` ``other`` takes."""
    took = in_turn({run: partial(seconds, run) for run in (one, other)}, ROUNDS)
    return median_ratio(took[other], took[one])


def access(name: str, urls: list[str], index: str, least: float, least_together: float) -> None:
    data, peer = wp.IndexedShards(urls), wids.ShardListDataset(index, transformations=[])
    places = random.Random(1)
    numbers = [places.randrange(len(data)) for _ in range(SAMPLES)]
    assert {key: value for key, value in data[7].items() if key[:2] != "__"} == {
        key.lstrip("."): value if isinstance(value, bytes) else value.getvalue()
        for key, value in peer[7].items()
        if key[:2] != "__"
    }

    def ours() -> None:
        for number in numbers:
            data[number]

    def theirs() -> None:
        for number in numbers:
            peer[number]

    def together() -> None:
        for start in numbers[:100]:
            data.__getitems__(range(start % (len(data) - 64), start % (len(data) - 64) + 64))

    def one_by_one() -> None:
        for start in range(0, SAMPLES, 64):
            [data[number] for number in numbers[start : start + 64]]

    print(f"{name}: {seconds(ours) / SAMPLES * 1e6:.1f} us for a sample")
    bar("wids over ours", times_as_long(ours, theirs), least, least=True)
    bar(
        "64 times [i] over __getitems__ of 64 neighbours",
        times_as_long(together, one_by_one),
        least_together,
        least=True,
    )


def far(paths: list[str]) -> None:
    with paced_web(50, 0.05) as web:
        for path in paths:
            for ending in ("", ".idx"):
                os.symlink(f"{path}{ending}", Path(web.directory) / f"{Path(path).name}{ending}")
        data = wp.IndexedShards([f"{web.url}/{Path(path).name}" for path in paths], connections=32)
        places = random.Random(1)
        numbers = places.sample(range(0, len(data), 2), 40)
        before = len(web.requests())
        for number in numbers:
            data[number]
        bar("requests for an isolated sample", (len(web.requests()) - before) / len(numbers), 1)
        trips = []
        for _ in range(ROUNDS):
            before = len(web.requests())
            data.__getitems__(places.sample(range(0, len(data), 2), 64))
            trips.append(round_trips(web.requests()[before:]))
        bar("round trips of __getitems__ of 64", statistics.median(trips), 3)


def round_trips(requests) -> int:
    """The most of these requests of which each began when the one before had ended."""
    count, end = 0, 0.0
    for request in sorted(requests, key=lambda request: request.ended):
        if request.started >= end:
            count, end = count + 1, request.ended
    return count


def main() -> None:
    warnings.simplefilter("ignore")
    with directory() as place:
        for name, urls, least in (("tiny", tiny(place), (0.8, 1.5)), ("images", images(place), (0.4, 1.0))):
            index = str(Path(urls[0]).parent / "index.json")
            index_shards(urls, index, offsets=True)
            access(name, urls, index, *least)
            if name == "images":
                far(urls)
    exit_if_missed()


if __name__ == "__main__":
    main()
