"""All 81 pairs of topologies, ranks x workers in {1, 2, 3} x {0, 1, 3}, ranks as real processes
with gloo: an epoch resumes from each on each, exactly.

    python tests/proofs/topologies.py [--minutes M] [--seed N]

Each pair is cut at three places, resumed, and resumed again from there on a third topology: once
over a ShardList, in lanes, and once over a SampleList, in one global order. With --minutes, three
pairs a round, in a random order. Exit code 1 if a sample was lost or came twice.
"""

import itertools
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from typing import NamedTuple

from amount import parser, rounds
from pipelines import flat, keys_of, samples
from process_group import CONTEXT, on_ranks
from warm import PRELOADED

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SAMPLES = [5, 9, 0, 12, 7, 10, 3, 11, 8, 6, 9, 12, 4, 10, 8]  # of each shard
# in the middle of a shuffle, with half-filled batches in the workers; the same later; the end of
# the epoch
CUTS = (2, 6, None)
STOP = 2  # the batches of each rank between the second start and the third
CONTEXT.set_forkserver_preload(PRELOADED)


class Topology(NamedTuple):
    ranks: int
    workers: int


def wanted(sample):
    return sample["__key__"][-1] != "7"


def make(urls, workers):
    if os.path.exists(f"{urls[0]}.idx"):
        pipe = wp.SampleList(urls, shuffle=True, seed=5).fetch_samples()
    else:
        pipe = samples(urls).shuffle_buffer(6).filter_samples(wanted)
    return wp.PipeLoader(
        pipe,
        batch_size=3,
        collate=keys_of,
        epoch_end="exact",
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


def read(loader, cuts):
    """An epoch of a rank: the state and the batches so far, at each of some cuts."""
    batches, found = [], {}
    for batch in loader:
        batches.append(batch)
        if len(batches) in cuts:
            found[len(batches)] = loader.state_dict(), [*batches]
    end = loader.state_dict(), batches
    return {cut: found.get(cut, end) for cut in cuts}


def begin(rank, ranks, urls, workers):
    """Two epochs from the start, with the states at three cuts of the first."""
    loader = make(urls, workers)
    found = read(loader, CUTS), list(loader)
    loader.close()
    return found


def resume(rank, ranks, urls, workers, tasks):
    """The rest of the epoch from each of some cuts, which are given by the states of all ranks."""
    found = []
    for number, (states, is_over) in enumerate(tasks):
        loader = make(urls, workers)
        # The state of one rank alone; if that has ended, it would wait for the others to end too.
        own = len(states) == ranks and number % 2 and not is_over
        loader.load_state_dict(states[rank] if own else states)
        found.append(read(loader, (STOP, None)))
        loader.close()
    return found


class Run(NamedTuple):
    """What all ranks have at a cut: their states, their batches, and whether the epoch is over."""

    states: list
    batches: list
    is_over: bool

    @property
    def keys(self):
        return flat(flat(self.batches))


def run_at(cut, ranks):
    """The run of all ranks at a cut, from what ``read`` has returned on each."""
    return Run(*map(list, zip(*(found[cut] for found in ranks), strict=True)), is_over=cut is None)


def resumed(urls, topology, runs):
    """The stopped and the whole rest of each of some runs, on another topology."""
    tasks = [(run.states, run.is_over) for run in runs]
    found = on_ranks(topology.ranks, resume, urls, topology.workers, tasks)
    return [[run_at(cut, ranks) for cut in (STOP, None)] for ranks in zip(*found, strict=True)]


class Tally(NamedTuple):
    pairs: int
    runs: int
    lost: int
    repeated: int


def run_pairs(urls, keys, pairs):
    """Each pair (before, after) of topologies at each cut, and from there on a third topology: how
    many keys were lost and repeated. Shards with an index of offsets are read in a global order.

    Raises:
        AssertionError: on the same topology the order differs from that of an uninterrupted run.
    """
    topologies = sorted({topology for pair in pairs for topology in pair})
    firsts, second_epochs = {}, {}
    for topology in topologies:
        found, second_epochs[topology] = zip(*on_ranks(topology.ranks, begin, urls, topology.workers), strict=True)
        firsts[topology] = {cut: run_at(cut, found) for cut in CUTS}
    cases = [(number, pair, cut) for number, pair in enumerate(pairs) for cut in CUTS]
    stopped, histories = {}, []  # the runs that make up an epoch
    for topology in topologies:
        chosen = [case for case in cases if case[1][1] == topology]
        starts = [firsts[before][cut] for _, (before, _), cut in chosen]
        for case, first, (stop, end) in zip(chosen, starts, resumed(urls, topology, starts), strict=True):
            (before, _), cut = case[1:]
            start = [] if cut is None else [first]
            histories.append([*start, end])
            stopped[case] = [*start, stop]
            if before == topology:
                whole = firsts[before][None].batches if cut else second_epochs[before]
                assert end.batches == [batches[cut or 0 :] for batches in whole]
    for place, topology in enumerate(topologies):
        parts = [parts for case, parts in stopped.items() if case[0] % len(topologies) == place]
        if parts:
            rests = resumed(urls, topology, [each[-1] for each in parts])
            histories += [[*each, end] for each, (_, end) in zip(parts, rests, strict=True)]
    lost = repeated = 0
    for history in histories:
        given = [run.keys for run in history]
        if sum(map(len, given[:-1])) == len(keys):
            assert set(flat(given[:-1])) == keys
            given = given[-1:]  # the epoch was over: what follows is the next one
        counts = Counter(flat(given))
        lost += len(keys - counts.keys())
        repeated += counts.total() - len(counts)
        assert counts.keys() <= keys
    return Tally(len(pairs), len(histories), lost, repeated)


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
        return run_pairs(urls, {f"{number:08d}" for number in numbers}, pairs)


if __name__ == "__main__":
    sys.exit(main())
