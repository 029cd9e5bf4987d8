"""Read shards through one fault after another, compare each sample with the local ones, and print
what it took.

    python tests/proofs/faults.py [--gb 0.5] [--minutes M] [--store web --store s3] [--fault mixed]

With --minutes, as many pairs of a store and a fault as begin in that time, in a random order.
"""

import hashlib
import itertools
import os
import random
import sys
import tempfile
import time

from amount import parser, rounds
from remote import content, samples
from servers import Servers

from wds_pipes.testing import make_shards

FAULTS = {
    "none": [],
    "mixed": [{"prob": 0.2, "status": 503}, {"prob": 0.1, "reset_after": 1_000_000}],
    "429": [{"prob": 0.1, "status": 429, "headers": {"Retry-After": "1"}}],
    "short": [{"prob": 0.3, "truncate": 500_000}],
    "stall": [{"prob": 0.05, "stall_after": 1_000_000, "stall": 60}],
}


def digest(pipe):
    """The number of samples, and a sum of all that is in them."""
    total, count = hashlib.sha256(), 0
    for sample in pipe:
        count += 1
        total.update(sample["__key__"].encode())
        total.update(sample["bin"])
    return count, total.hexdigest()


def main():
    known = parser(__doc__, None)
    known.add_argument("--gb", type=float, default=0.5)
    known.add_argument("--shard-mb", type=int, default=50)
    known.add_argument("--store", action="append", choices=("s3", "gcs", "web"))
    known.add_argument("--fault", action="append", choices=FAULTS, help="a stall also stops the imitation of GCS")
    options = known.parse_args()
    count, tried, bad = max(1, round(options.gb * 1000 / options.shard_mb)), 0, 0
    pairs = list(itertools.product(options.store or ("web", "s3"), options.fault or FAULTS))
    if options.minutes:
        random.Random(options.seed).shuffle(pairs)
    with tempfile.TemporaryDirectory() as directory, Servers() as servers:
        local = make_shards(
            directory, shards=count, samples=options.shard_mb * 5, fields={"bin": lambda rng, _: rng.randbytes(200_000)}
        )
        whole, urls = digest(samples(local)), {}
        for _, (name, fault) in zip(rounds(options), pairs):
            store = getattr(servers, name)
            store.faults.clear()
            if name not in urls:
                urls[name] = [store.put(f"bench/{os.path.basename(path)}", content(path)) for path in local]
            store.faults.rules(*({"match": store.reads, **rule} for rule in FAULTS[fault]), seed=1)
            start = time.monotonic()
            found = digest(samples(urls[name], storage_options=store.storage_options, timeout_seconds=20))
            seconds = time.monotonic() - start
            seen = store.faults.stats(store.reads)
            faulty = sum(bool(request.faults) for request in seen)
            sent = sum(request.sent for request in seen) / sum(map(os.path.getsize, local))
            tried, bad = tried + 1, bad + (found != whole)
            same = "the same" if found == whole else "ANOTHER"
            print(
                f"{name:4} {fault:6} {seconds:6.1f} s  {len(seen):5} requests  {faulty:4} "
                f"faulty  {sent:.3f} x the bytes  {same}",
                flush=True,
            )
    print(f"runs={tried} of {len(pairs)} wrong={bad}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
