"""How fast remote shards come: against a server that gives each connection 50 MB/s and answers after 50 ms, and against webdataset there.

    python tests/bench/remote.py [--s3] [--data MB]      needs nginx and its echo module; --s3: also Ceph behind the same nginx; takes some minutes

Each figure is of a process of its own: MB/s of ``load_tar().group_by_key()`` from the first request to the last sample, against the model of a link (an ordered
shard: k * cap / (1 + latency * cap / range); several shards: k * cap), processor seconds per GB, and how far the memory grew. Exits with 1 if a bar is missed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RATE_MB, LATENCY = 50, 0.05
MISSED = []


def measure(job) -> None:
    """Read what ``job`` says, and print the figures as JSON."""
    name, urls, k, workers = job["reader"], job["urls"], job["connections"], job["workers"]
    if name == "webdataset":
        import webdataset

        source = webdataset.WebDataset([f"pipe:curl -s {url}" for url in urls], shardshuffle=False, empty_check=False)
        items = webdataset.WebLoader(source.map(volume), batch_size=None, num_workers=workers) if workers else source.map(volume)
    else:
        import fsspec

        import wds_pipes as wp

        fsspec.get_filesystem_class(urls[0].partition(":")[0])  # its libraries are not what reading takes
        pipe = wp.ShardList(urls).open_shards(connections=max(1, k // max(1, workers)), storage_options=job["options"]).load_tar().group_by_key()
        pipe = pipe.interleave_shards(len(urls) // max(1, workers)) if len(urls) > 1 else pipe
        pipe = pipe.map_samples(volume)
        items = wp.PipeLoader(pipe.batch_samples(16, collate="list"), num_workers=workers) if workers else pipe
    before, idle, start = memory(), processor(), time.perf_counter()
    count = sum(sum(item) if isinstance(item, list) else item for item in items)
    seconds = time.perf_counter() - start
    if workers and name != "webdataset":
        items.close()
    cpu = processor() - idle
    print(json.dumps({"mb_per_s": count / 1e6 / seconds, "cpu_s_per_gb": cpu / count * 1e9, "grew_mb": memory() - before}))


def volume(sample) -> int:
    """How many bytes of data a sample has."""
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))


def processor() -> float:
    """Seconds of processors that this process and its workers have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def memory() -> float:
    """Most MB that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(**job) -> dict:
    """``measure`` in a new process; the best of three, since what else the machine does can only slow it down."""
    job = {"workers": 0, "options": {}, **job}
    runs = []
    for _ in range(job.pop("times", 3)):
        done = subprocess.run(
            [sys.executable, __file__, "--job", json.dumps(job)], capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT}
        )
        if done.returncode:
            sys.exit(done.stderr)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return max(runs, key=lambda run: run["mb_per_s"])


def bar(what: str, value: float, bound: float, *, least: bool = False) -> str:
    """A figure beside its bar."""
    met = value >= bound if least else value <= bound
    if not met:
        MISSED.append(what)
    return f"{what} {value:.2f} ({'at least' if least else 'at most'} {bound:g}){'' if met else ' MISSED'}"


def report(title: str, found: dict, model: float, peer: float) -> None:
    """Print the figures of a run beside their bars."""
    print(f"  {title}: {found['mb_per_s']:.0f} MB/s; " + "; ".join([
        bar("of the model", found["mb_per_s"] / model, 0.9, least=True),
        bar("times webdataset", found["mb_per_s"] / peer, 5, least=True),
        bar("CPU s/GB", found["cpu_s_per_gb"], 1.2),
        bar("memory grew, MB", found["grew_mb"], 128),
    ]), flush=True)  # fmt: skip


def compare(name, one, several, peers, options) -> None:
    """All figures of a server: ``one`` shard, ``several`` of them, and their URLs for webdataset."""
    for k in (4, 8, 16):
        chunk = min((64 << 20) // k, 16 << 20)
        peer_one = run(reader="webdataset", urls=peers[:1], connections=1, times=1)["mb_per_s"]
        ordered = k * RATE_MB / (1 + LATENCY * RATE_MB * 1e6 / chunk)
        for workers in (0, 2):
            if not workers:
                found = run(reader="ours", urls=[one], connections=k, options=options)
                report(f"{name}, one shard, k = {k}", found, ordered, peer_one)
            found = run(reader="ours", urls=several[:k], connections=k, options=options, workers=workers)
            peer = run(reader="webdataset", urls=peers[1 : k + 1], connections=1, workers=workers, times=1)["mb_per_s"]
            report(f"{name}, {k} shards, {workers} workers", found, k * RATE_MB, peer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--data", type=int, default=800, help="MB of the one shard; several have an eighth of it each")
    asked = parser.parse_args()
    if asked.job:
        measure(json.loads(asked.job))
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
        names = [os.path.relpath(big, directory), *(f"s-{number:02d}.tar" for number in range(16))]
        urls = [f"{web.url}/{name}" for name in names]
        compare("HTTP", urls[0], urls[1:], urls, {})
        if asked.s3:
            with Servers() as servers:
                s3 = servers.s3
                for number, path in enumerate([big, *[small] * 16]):
                    s3.put(names[number], Path(path).read_bytes())
                with paced_web(RATE_MB, LATENCY, upstream=s3.direct.endpoint) as slow:
                    options = {**s3.storage_options, "endpoint_url": slow.endpoint}
                    there = [f"{s3.url}/{name}" for name in names]
                    peers = [f"{slow.endpoint}/{s3.url.removeprefix('s3://')}/{name}" for name in names]
                    compare("S3", there[0], there[1:], peers, options)
    if MISSED:
        sys.exit(f"missed {len(MISSED)} bars")


ENVIRONMENT = {"AWS_EC2_METADATA_DISABLED": "true"}

if __name__ == "__main__":
    main()
