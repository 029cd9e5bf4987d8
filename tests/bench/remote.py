"""How fast remote shards come: against a server that gives each connection 50 MB/s and answers
after 50 ms, and against webdataset there.

    python tests/bench/remote.py [--s3] [--data MB]      needs nginx and its echo module; --s3: also
    Ceph behind the same nginx; takes some minutes

Each figure is of a process of its own: MB/s of ``load_tar().group_by_key()`` from the first request
to the last sample, against the model of a link (an ordered shard: k * cap / (1 + latency * cap /
range); several shards: k * cap) and against webdataset (which has a connection in each worker;
where the link does not allow five times that, the bar is nine tenths of what it allows); processor
seconds per GB, without those that a small shard takes in the same way; and how far the memory grew.
Exits with 1 if a bar is missed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from bars import beside_bar, exit_if_missed, in_new_process, processor_seconds

RATE_MB, LATENCY = 50, 0.05


def measure(job) -> None:
    """Read what ``job`` says, and print the figures as JSON."""
    name, urls, k, workers = job["reader"], job["urls"], job["connections"], job["workers"]
    if name == "webdataset":
        import webdataset

        source = webdataset.WebDataset([f"pipe:curl -s {url}" for url in urls], shardshuffle=False, empty_check=False)
        items = (
            webdataset.WebLoader(source.map(volume), batch_size=None, num_workers=workers)
            if workers
            else source.map(volume)
        )
    else:
        import fsspec

        import wds_pipes as wp

        fsspec.get_filesystem_class(urls[0].partition(":")[0])  # its libraries are not what reading takes
        pipe = (
            wp.ShardList(urls)
            .open_shards(connections=max(1, k // max(1, workers)), storage_options=job["options"])
            .load_tar()
            .group_by_key()
        )
        pipe = pipe.interleave_shards(len(urls) // max(1, workers)) if len(urls) > 1 else pipe
        pipe = pipe.map_samples(volume)
        items = wp.PipeLoader(pipe.batch_samples(64, collate="list"), num_workers=workers) if workers else pipe
    before, idle = memory(fresh=True), processor_seconds()
    count = sum(sum(item) if isinstance(item, list) else item for item in items)
    end, grew = time.time(), memory() - before
    if workers and name != "webdataset":
        items.close()
    print(json.dumps({"bytes": count, "end": end, "cpu": processor_seconds() - idle, "grew_mb": grew}))


def volume(sample) -> int:
    """How many bytes of data a sample has."""
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))


def memory(*, fresh: bool = False) -> float:
    """The most MB that this process has had; ``fresh``: from now on."""
    if fresh:
        Path("/proc/self/clear_refs").write_text("5")
    return next(
        int(line.split()[1]) / 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def once(web, job) -> dict:
    """``measure`` in a new process; the time counts from when ``web`` got the first request."""
    start = time.time()
    found = in_new_process(__file__, job, AWS_EC2_METADATA_DISABLED="true")
    first = min(request.started for request in web.requests() if request.started > start)
    return {**found, "mb_per_s": found["bytes"] / 1e6 / (found["end"] - first)}


def run(web, tiny, *, times=3, **job) -> dict:
    """The best figures of three runs, since what else the machine does can only worsen them;
    ``tiny``: shards that take nothing but the beginning.
    """
    job = {"workers": 0, "options": {}, **job}
    begin = (
        min(once(web, {**job, "urls": tiny[: max(1, job["workers"])]})["cpu"] for _ in range(times)) if times > 1 else 0
    )
    runs = [once(web, job) for _ in range(times)]
    return {
        "mb_per_s": max(run["mb_per_s"] for run in runs),
        "cpu_s_per_gb": min(run["cpu"] - begin for run in runs) / runs[0]["bytes"] * 1e9,
        "grew_mb": max(run["grew_mb"] for run in runs),
    }


def report(title: str, found: dict, model: float, peer: float, most: float) -> None:
    """Print the figures of a run beside their bars; ``most``: how many times webdataset's
    connections ours are.
    """
    print(f"  {title}: {found['mb_per_s']:.0f} MB/s; " + "; ".join([
        beside_bar("of the model", found["mb_per_s"] / model, 0.9, least=True),
        beside_bar("times webdataset", found["mb_per_s"] / peer, min(5, 0.9 * most), least=True),
        beside_bar("CPU s/GB", found["cpu_s_per_gb"], 1.2),
        beside_bar("memory grew, MB", found["grew_mb"], 128),
    ]), flush=True)  # fmt: skip


def compare(name, web, urls, peers, options) -> None:
    """All figures of a server: of a large shard, 16 smaller ones and two tiny ones, by their
    URLs and those for webdataset.
    """
    one, several, tiny = urls[0], urls[1:17], urls[17:]
    for k in (4, 8, 16):
        chunk = min((64 << 20) // k, 16 << 20)
        peer_one = run(web, tiny, reader="webdataset", urls=peers[:1], connections=1, times=1)["mb_per_s"]
        ordered = k * RATE_MB / (1 + LATENCY * RATE_MB * 1e6 / chunk)
        for workers in (0, 2):
            if not workers:
                found = run(web, tiny, reader="ours", urls=[one], connections=k, options=options)
                report(f"{name}, one shard, k = {k}", found, ordered, peer_one, ordered / RATE_MB)
            found = run(web, tiny, reader="ours", urls=several[:k], connections=k, options=options, workers=workers)
            peer = run(web, tiny, reader="webdataset", urls=peers[1 : k + 1], connections=1, workers=workers, times=1)[
                "mb_per_s"
            ]
            report(f"{name}, {k} shards, {workers} workers", found, k * RATE_MB, peer, k / max(1, workers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", action="store_true")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--data", type=int, default=800, help="MB of the one shard; several have an eighth of it each")
    asked = parser.parse_args()
    if asked.job:
        measure(json.load(sys.stdin))
        return
    from servers import Servers, paced_web

    from wds_pipes.testing import make_shards

    with paced_web(RATE_MB, LATENCY) as web:
        directory = Path(web.directory)
        fields = {"bin": lambda rng, _: rng.randbytes(100_000)}
        [big] = make_shards(directory / "big", shards=1, samples=asked.data * 10, fields=fields)
        [small] = make_shards(directory / "small", shards=1, samples=asked.data * 10 // 8, fields=fields)
        for number in range(16):
            os.link(small, directory / f"s-{number:02d}.tar")
        tiny = make_shards(directory / "tiny", shards=2, samples=1)
        names = [
            os.path.relpath(big, directory),
            *(f"s-{number:02d}.tar" for number in range(16)),
            *(os.path.relpath(path, directory) for path in tiny),
        ]
        urls = [f"{web.url}/{name}" for name in names]
        compare("HTTP", web, urls, urls, {})
        if asked.s3:
            with Servers() as servers:
                s3 = servers.s3
                for number, path in enumerate([big, *[small] * 16, *tiny]):
                    s3.put(names[number], Path(path).read_bytes())
                with paced_web(RATE_MB, LATENCY, upstream=s3.direct.endpoint) as slow:
                    options = {**s3.storage_options, "endpoint_url": slow.endpoint}
                    there = [f"{s3.url}/{name}" for name in names]
                    peers = [f"{slow.endpoint}/{s3.url.removeprefix('s3://')}/{name}" for name in names]
                    compare("S3", slow, there, peers, options)
    exit_if_missed()


if __name__ == "__main__":
    main()
