"""One global order: random histories over a SampleList (ranks 1 to 8, workers 0 to 3, batch sizes,
ends of epochs, cuts, up to five changes of all of these) yield the sequence of an uninterrupted
run in a single process: the digests of both are compared.

    python tests/bench/global_order.py [--histories 300] [--processes 30] [--seed N]

Each rank is a loader of its own, and the states go through JSON. In as many histories as
``--processes`` says, the workers are processes, in the others their lanes run in one process. Exit
code 1 if a sample was lost or came twice, or came at another place.
"""

import argparse
import logging
import pathlib
import random
import sys
import tempfile
import time
import warnings
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from orders import Order, Phase, play

from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SAMPLES = [31, 7, 0, 52, 18, 44, 9, 26]  # of each shard


def a_phase(chance: random.Random) -> Phase:
    return Phase(
        ranks=chance.randint(1, 8),
        workers=chance.randint(0, 3),
        size=chance.randint(1, 5),
        end=chance.choice(("exact", "drop", "pad")),
        cut=chance.choice((0, 1, 2, 3, 5, 8, 13)),
        own=chance.random() < 0.5,
    )


def a_history(chance: random.Random) -> list[Phase]:
    """Up to five changes: of everything, of the workers alone, or with the same global batch."""
    phases = [a_phase(chance) for _ in range(chance.randint(1, 6))]
    kind = chance.choice(("all", "workers", "same"))
    if kind == "workers":
        phases = [phases[0]._replace(workers=phase.workers, cut=phase.cut, own=phase.own) for phase in phases]
    elif kind == "same":
        sizes = chance.choice(([(1, 4), (2, 2), (4, 1)], [(1, 8), (2, 4), (4, 2), (8, 1)], [(2, 3), (3, 2), (6, 1)]))
        same = [chance.choice(sizes) for _ in phases]
        phases = [
            phase._replace(ranks=ranks, size=size, end=phases[0].end)
            for phase, (ranks, size) in zip(phases, same, strict=True)
        ]
    return phases


def main(histories: int, processes: int, seed: int) -> int:
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    logging.getLogger("wds_pipes").setLevel("ERROR")  # runs that are shorter than a step yield nothing
    chance, total, start = random.Random(seed), Counter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        urls = make_shards(directory, shards=len(SAMPLES), samples=SAMPLES)
        index_shards(urls, offsets=True)
        for number in range(histories):
            order = Order(
                chance.random() < 0.8,
                chance.choice((1, 1, 8)),
                chance.randrange(1000),
                chance.choice(("dicts", "tuples")),
            )
            phases = a_history(chance)
            outcome = play(urls, sum(SAMPLES), order, phases, processes=number < processes)
            found, expected = outcome.digests
            if found != expected:
                print(f"history {number} of seed {seed} differs: {order} {phases}")
            total.update(
                changes=outcome.changes, samples=len(outcome.found), lost=outcome.lost, repeated=outcome.repeated,
                differing=found != expected,
            )  # fmt: skip
    names = ("changes", "samples", "lost", "repeated", "differing")
    figures = " ".join(f"{name}={total[name]}" for name in names)
    print(f"histories={histories} seed={seed} {figures} seconds={time.perf_counter() - start:.0f}")
    return int(total["lost"] + total["repeated"] + total["differing"] > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=300)
    parser.add_argument("--processes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(main(options.histories, options.processes, options.seed))
