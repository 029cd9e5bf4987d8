"""All 81 pairs of topologies, ranks x workers in {1, 2, 3} x {0, 1, 3}, ranks as real processes
with gloo: an epoch resumes from each on each, exactly.

    python tests/proofs/topologies.py [--minutes M] [--seed N]

Each pair is cut at three places, resumed, and resumed again from there on a third topology: once
over a ShardList, in lanes, and once over a SampleList, in one global order. With --minutes, three
pairs a round, in a random order. Exit code 1 if a sample was lost or came twice.
"""

import itertools
import random
import sys
import tempfile
import warnings

from amount import parser, rounds
from launch import Tally, Topology, run_pairs
from process_group import CONTEXT
from warm import PRELOADED

from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SAMPLES = [5, 9, 0, 12, 7, 10, 3, 11, 8, 6, 9, 12, 4, 10, 8]  # of each shard
CONTEXT.set_forkserver_preload(PRELOADED)


def main():
    options = parser(__doc__, None).parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    topologies = [Topology(*both) for both in itertools.product((1, 2, 3), (0, 1, 3))]
    pairs = list(itertools.product(topologies, repeat=2))
    some = len(pairs)
    if options.minutes:
        random.Random(options.seed).shuffle(pairs)
        some = 3  # a round
    total = Tally(0, 0, 0, 0)
    for number in rounds(options):
        chosen = pairs[number * some :][:some]
        if not chosen:
            break
        for kind in ("ShardList", "SampleList"):
            tally = run(kind, chosen)
            total = Tally(*map(sum, zip(total, tally)))
    figures = f"lost={total.lost} repeated={total.repeated} seed={options.seed}"
    print(f"pairs={total.pairs // 2} of {len(pairs)} resumes={total.runs} {figures}")
    return int(total.lost + total.repeated > 0)


def run(kind, pairs):
    """The tally of some pairs over a ShardList or a SampleList."""
    with tempfile.TemporaryDirectory() as directory:
        urls = make_shards(f"{directory}/data", shards=len(SAMPLES), samples=SAMPLES)
        numbers = range(sum(SAMPLES))
        if kind == "SampleList":
            index_shards(urls, offsets=True)
        else:
            numbers = [number for number in numbers if number % 10 != 7]
        return run_pairs(directory, urls, {f"{number:08d}" for number in numbers}, pairs)


if __name__ == "__main__":
    sys.exit(main())
