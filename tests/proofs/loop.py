"""Training with epoch_end="loop" that is killed for real: gloo ranks under DistributedDataParallel,
a mix of two sources with uncounted shards, a filter that keeps another share on each rank, broken
samples that are skipped, and with_epoch(). All ranks get SIGKILL at random moments, and training
resumes from checkpoint.load on any number of ranks and workers.

    python tests/proofs/loop.py [--rounds 30] [--minutes M] [--seed N]

Each rank appends what it trains on, with its step, to a file of its own. Steps after the checkpoint
from which the next run resumes do not count. Exit code 1 if a sample of an epoch of the data was
lost or came twice, if ranks had another number of steps, a batch was not full, or a run did not end
in time (gradients are averaged at each step, so ranks with other numbers of steps wait for ever).
"""

import pathlib
import random
import sys
import tempfile
import time

from amount import parser, rounds
from loops import Ledger, make_data, play
from process_group import CONTEXT
from warm import PRELOADED

CONTEXT.set_forkserver_preload(PRELOADED)


def main(options):
    chance, total, start = random.Random(options.seed), Ledger(), time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        urls = make_data(f"{directory}/shards")
        for number in rounds(options):
            (place := pathlib.Path(directory) / f"history-{number}").mkdir()
            try:
                total = total.plus(play(place, urls, chance, runs=chance.randrange(3, 6)))
            except (AssertionError, RuntimeError) as error:
                print(f"history {number} of seed {options.seed} failed: {error}")
                return 1
    figures = " ".join(f"{name}={value}" for name, value in total._asdict().items())
    print(f"histories={number + 1} seed={options.seed} {figures} seconds={time.perf_counter() - start:.0f}")
    return int(total.lost + total.repeated > 0)


if __name__ == "__main__":
    sys.exit(main(parser(__doc__, 30).parse_args()))
