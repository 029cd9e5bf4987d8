"""What a resume of ``shuffle_buffer(10_000)`` over images of 107 KB costs, with indexes of offsets
and without, in one run.

    python tests/bench/resume.py [--local]      writes 2.2 GB to a temporary directory, and removes
    it; needs nginx and its echo module, or --local; takes some minutes

An epoch is cut at 10, 50 and 90 %, and each state is loaded by a new process, from local files and
from a server that gives each connection 50 MB/s and answers after 50 ms. The figures: the time to
the first batch of 64 after ``import``; the bytes that were read for it, by the pipeline and by the
server; the size of the state; and the time until as many samples have come as the shuffle held, to
show what the reads one by one cost later. Exits with 1 if a bar is missed.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time

from bars import bar, exit_if_missed, in_new_process

RATE_MB, LATENCY = 50, 0.05
SHARDS, SAMPLES, SIZE, BATCH, BYTES = 20, 1000, 10_000, 64, 107_000
BLOCK = 1 << 20
CUTS = {"10 %": 32, "50 %": 152, "90 %": 280}  # batches


def pipeline(urls, offsets):
    import wds_pipes as wp

    counts = {"index": f"{os.path.dirname(urls[0])}/index.json"} if offsets else {"samples_per_shard": SAMPLES}
    pipe = wp.ShardList(urls, shuffle=True, seed=1, **counts).open_shards().load_tar().group_by_key()
    return pipe.shuffle_buffer(SIZE).batch_samples(BATCH, collate="list")


def measure(job) -> None:
    """Resume as ``job`` says, and print the figures as JSON."""
    import fsspec

    from wds_pipes.core.chain import Chain

    pipeline(job["urls"], job["offsets"])  # what takes time to import does not count
    fsspec.get_filesystem_class("http")
    start, begun = time.perf_counter(), time.time()
    resumed = pipeline(job["urls"], job["offsets"])
    resumed.load_state_dict(job["state"])
    items = iter(resumed)
    first = next(items)
    seconds, until = time.perf_counter() - start, time.time()
    read = Chain(resumed._stream._live()._running).bytes_so_far
    size, keys = len(json.dumps(resumed.state_dict())), [sample["__key__"] for sample in first]
    for _ in itertools.islice(items, SIZE // BATCH):
        pass
    window = time.perf_counter() - start
    times = {"seconds": seconds, "begun": begun, "until": until, "window": window}
    print(json.dumps({**times, "read": read, "size": size, "keys": keys}))


def states_of(urls):
    """The states at the cuts."""
    source, found = pipeline(urls, True), {}
    for number, _ in zip(range(1, max(CUTS.values()) + 1), source, strict=False):
        if number in CUTS.values():
            found[number] = source.state_dict()
    return found


def compare(where, urls, states, web, most_seconds) -> None:
    for name, cut in CUTS.items():
        runs, sent = {}, {}
        for offsets in (True, False):
            job = {"urls": urls, "offsets": offsets, "state": states[cut]}
            tries = [in_new_process(__file__, job) for _ in range(3 if offsets else 1)]
            runs[offsets] = run = min(tries, key=lambda run: run["seconds"])
            if web is not None:
                time.sleep(1)  # the server writes its log
                now = [request for request in web.requests() if run["begun"] < request.started < run["until"]]
                sent[offsets] = len(now), sum(request.sent for request in now if request.ended < run["until"] + 0.1)
        new, old = runs[True], runs[False]
        assert new["keys"] == old["keys"]
        print(f"{where}, cut at {name}: first batch after {new['seconds']:.3f} s (without {old['seconds']:.2f} s)")
        print(f"  {new['read'] / 1e6:.1f} MB read for it (without {old['read'] / 1e6:.0f} MB)")
        if web is not None:
            print(f"  the server: {sent[True][0]} requests begun, {sent[True][1] / 1e6:.1f} MB sent until then")
        print(f"  {SIZE} samples more: {new['window']:.1f} s (without {old['window']:.1f} s)")
        bar("seconds", new["seconds"], most_seconds)
        bar("bytes read", new["read"], BATCH * (BYTES + 2048) + BLOCK)
        bar("bytes of the state over those without an index", new["size"] / old["size"], 1.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", action="store_true")
    parser.add_argument("--local", action="store_true", help="without the server")
    asked = parser.parse_args()
    if asked.job:
        measure(json.load(sys.stdin))
        return
    from wds_pipes.tar import index_shards
    from wds_pipes.testing import make_shards

    blob = os.urandom(BYTES)
    with tempfile.TemporaryDirectory() as temporary:
        fields = {"jpg": lambda rng, number: b"%010d" % number + blob[10:], "cls": lambda rng, number: number % 10}
        urls = make_shards(temporary, shards=SHARDS, samples=SAMPLES, fields=fields)
        index_shards(urls, os.path.join(temporary, "index.json"), offsets=True)
        states = states_of(urls)
        compare("local", urls, states, None, 0.1)
        if not asked.local:
            from servers import paced_web

            with paced_web(RATE_MB, LATENCY) as web:
                for name in os.listdir(temporary):
                    os.link(os.path.join(temporary, name), os.path.join(web.directory, name))
                there = [f"{web.url}/{os.path.basename(url)}" for url in urls]
                compare("HTTP", there, states_of_web(states, there), web, 1.0)
    exit_if_missed()


def states_of_web(states, urls):
    """The states of the same shards at other URLs."""
    moved = {}
    for cut, state in states.items():
        source = pipeline(urls, True)
        source.load_state_dict(state, moved=True)
        moved[cut] = source.state_dict()
    return moved


if __name__ == "__main__":
    main()
