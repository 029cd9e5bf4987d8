"""All 81 pairs of topologies, ranks x workers in {1, 2, 3} x {0, 1, 3}, ranks as real processes
with gloo: an epoch resumes from each on each, exactly.

    python tests/bench/topologies.py

Each pair is cut at three places, resumed, and resumed again from there on a third topology: once
over a ShardList, in lanes, and once over a SampleList, in one global order. Exit code 1 if a sample
was lost or came twice.
"""

import itertools
import pathlib
import sys
import tempfile
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from launch import CONTEXT, Topology, run_pairs
from warm import PRELOADED

from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SAMPLES = [5, 9, 0, 12, 7, 10, 3, 11, 8, 6, 9, 12, 4, 10, 8]  # of each shard
CONTEXT.set_forkserver_preload(PRELOADED)


def main():
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    topologies = [Topology(*both) for both in itertools.product((1, 2, 3), (0, 1, 3))]
    pairs = list(itertools.product(topologies, repeat=2))
    bad = 0
    for kind in ("ShardList", "SampleList"):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            urls = make_shards(f"{directory}/data", shards=len(SAMPLES), samples=SAMPLES)
            numbers = range(sum(SAMPLES))
            if kind == "SampleList":
                index_shards(urls, offsets=True)
            else:
                numbers = [number for number in numbers if number % 10 != 7]
            tally = run_pairs(directory, urls, {f"{number:08d}" for number in numbers}, pairs)
        seconds = time.perf_counter() - start
        print(f"{kind}: pairs={tally.pairs} cuts={tally.runs // 2} resumes={tally.runs} seconds={seconds:.0f}")
        print(f"lost={tally.lost} repeated={tally.repeated}")
        bad += tally.lost + tally.repeated
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
