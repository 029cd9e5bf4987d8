"""Random reads from a server that gives each connection 50 MB/s and answers after 50 ms.

    python tests/bench/remote_random.py [DIRECTORY]      needs nginx and its echo module; writes
    about 220 MB there (default: a temporary directory), takes two minutes

Images of 107 KB in tars:
1. A SampleList in runs of 64 neighbours against the stream of the whole shards, both with 8
   connections.
2. Single samples in random order, against the model of a link: k * size / (latency + size / cap).
3. Batches of 64 single samples, with 8 connections, while 1 % of the requests stall for two
   seconds: the 99th percentile of their times against the median.

Best figures of three runs, since what else the machine does can only worsen them. Exits with 1 if
a bar is missed.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from bars import bar, exit_if_missed
from data import images
from servers import paced_web
from servers.faults import faults_of

import wds_pipes as wp
from wds_pipes.tar import index_shards

RATE_MB, LATENCY, RUNS = 50, 0.05, 3


def volume(sample) -> int:
    """How many bytes of data a sample has."""
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))


def fetched(urls: list[str], connections: int, **order) -> float:
    """MB/s of a SampleList; the first run also reads the indexes."""
    samples = wp.SampleList(urls, **order)
    return max(rate(lambda: samples.fetch_samples(connections=connections)) for _ in range(RUNS))


def rate(items) -> float:
    """MB/s of what an iterable yields, from the request of the first."""
    start = time.perf_counter()
    count = sum(map(volume, items()))
    return count / 1e6 / (time.perf_counter() - start)


def apart(count: int, samples: int) -> list[int]:
    """Samples in random order, no two of them neighbours."""
    choose = random.Random(count)
    return [2 * choose.randrange(samples // 2) for _ in range(count)]


def stalls(urls: list[str], endpoint: str, batches: int) -> None:
    with faults_of(endpoint) as proxy:
        data = wp.IndexedShards([url.replace(endpoint, proxy.endpoint) for url in urls])
        data.__getitems__(apart(64, len(data)))  # how long requests usually wait is known after 20
        proxy.rules({"match": r"GET .*\.tar$", "prob": 0.01, "latency": 2}, seed=1)
        took = []
        for number in range(batches):
            numbers = apart(64, len(data))[:: -1 if number % 2 else 1]
            start = time.perf_counter()
            data.__getitems__(numbers)
            took.append(time.perf_counter() - start)
        stalled = sum("latency" in request.faults for request in proxy.stats())
        used = data._open()._files.network
        print(
            f"{batches} batches of 64, of {used.requests} requests {stalled} stalled, {used.hedged} made again; ",
            end="",
        )
        print(
            f"median {statistics.median(took):.3f} s, worst {', '.join(f'{each:.2f}' for each in sorted(took)[-5:])} s"
        )
        bar("P99 of a batch over the median", statistics.quantiles(took, n=100)[98] / statistics.median(took), 2.0)
        bar("second requests for each request", used.hedged / used.requests, 0.05)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, paced_web(RATE_MB, LATENCY) as web:
        paths = images(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
        index_shards(paths, offsets=True)
        for path in paths:
            for ending in ("", ".idx"):
                os.symlink(f"{path}{ending}", Path(web.directory) / f"{Path(path).name}{ending}")
        urls = [f"{web.url}/{Path(path).name}" for path in paths]
        data = wp.IndexedShards(urls)
        samples, size = len(data), volume(data[0]) / 1e6

        stream = max(rate(wp.ShardList(urls).open_shards(connections=8).load_tar().group_by_key) for _ in range(RUNS))
        runs = fetched(urls, 8, shuffle=True, block_samples=64)
        print(f"all {samples} samples of {size * 1000:.0f} KB: {stream:.0f} MB/s as a stream, {runs:.0f} MB/s in runs")
        bar("runs of 64 over the stream", runs / stream, 0.8, least=True)

        for k in (8, 16, 32, 64):
            found = fetched(urls, k, where=apart(100 * k, samples))
            print(f"single samples, {k} connections: {found:.0f} MB/s")
            bar("of the model", found / (k * size / (LATENCY + size / RATE_MB)), 0.9, least=True)
        stalls(urls, web.url, 300)
    exit_if_missed()


if __name__ == "__main__":
    main()
