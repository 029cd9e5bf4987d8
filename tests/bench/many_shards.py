"""Read many small shards in one epoch, and watch that nothing adds up: descriptors, sockets,
memory, tasks; and the requests before the first batch.

python tests/bench/many_shards.py --shards 10000 [--interleave 4]
"""

import argparse
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support"))

import psutil
from pipelines import keys_of
from remote import content, tasks
from servers import nginx

import wds_pipes as wp
from wds_pipes.testing import make_shards

LATENCY = 0.05


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--interleave", type=int, default=0)
    options = parser.parse_args()
    process, rows = psutil.Process(), []
    with tempfile.TemporaryDirectory() as directory, nginx() as web:
        (path,) = make_shards(directory, shards=1, samples=options.samples)
        data = content(path)
        names = [f"{number:06d}.tar" for number in range(options.shards)]
        for name in names:
            with open(f"{web.directory}/{name}", "wb") as file:
                file.write(data)
        pipe = wp.ShardList([f"{web.url}/{name}" for name in names]).open_shards().load_tar().group_by_key()
        pipe = pipe.interleave_shards(options.interleave) if options.interleave else pipe
        start = time.monotonic()
        for number, _ in enumerate(pipe):
            if number % (options.shards * options.samples // 10) == options.shards * options.samples // 20:
                sockets = sum(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections())
                rows.append(
                    (
                        number // options.samples,
                        process.num_fds(),
                        sockets,
                        process.memory_info().rss / 1e6,
                        len(tasks()),
                        process.num_threads(),
                    )
                )
                print(
                    ("shard {:6}  {:3} descriptors  {:3} sockets  {:6.1f} MB  {:3} tasks  {:3} threads").format(
                        *rows[-1]
                    ),
                    flush=True,
                )
        seconds = time.monotonic() - start
        seen = web.requests()
        connections = len({request.connection for request in seen})
        print(f"{options.shards / seconds:.0f} shards a second, {len(seen)} requests through {connections} connections")
    with tempfile.TemporaryDirectory() as directory, nginx(latency=LATENCY) as web:
        paths = make_shards(directory, shards=4, samples=64, fields={"bin": lambda rng, _: rng.randbytes(100_000)})
        for path in paths:
            web.write(os.path.basename(path), content(path))
        pipe = (
            wp.ShardList([f"{web.url}/{os.path.basename(path)}" for path in paths])
            .open_shards()
            .load_tar()
            .group_by_key()
        )
        loader = wp.PipeLoader(pipe, batch_size=32, collate=keys_of)
        next(iter(loader))  # imports, connections to names
        loader.close()
        loader = wp.PipeLoader(pipe, batch_size=32, collate=keys_of)
        start = time.monotonic()
        next(iter(loader))
        trips = (time.monotonic() - start) / LATENCY
        loader.close()
        print(f"first batch within {trips:.1f} round trips of {LATENCY * 1000:.0f} ms")
    grown = [abs(last - first) for first, last in zip(rows[1], rows[-1])][1:]
    sys.exit(trips > 3 or any(more > limit for more, limit in zip(grown, (8, 8, 30, 8, 8))))


if __name__ == "__main__":
    main()
