"""A check that an epoch resumes from any topology of real ranks and workers on any other."""

import json
import os
from collections import Counter
from typing import NamedTuple

import torch.distributed as dist
from pipelines import keys_of, samples
from process_group import launch

import wds_pipes as wp

# in the middle of a shuffle, with half-filled batches in the workers; the same later; the end of
# the epoch
CUTS = (2, 6, None)
STOP = 2  # the batches of each rank between the second start and the third


class Topology(NamedTuple):
    ranks: int
    workers: int

    def __str__(self):
        return f"{self.ranks}x{self.workers}"


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


def save(directory, name, loader, batches):
    """Write this rank's state and the batches that it has returned."""
    with open(f"{directory}/{name}-rank{dist.get_rank()}.json", "w") as file:
        json.dump({"state": loader.state_dict(), "batches": batches}, file)


def read(directory, name, ranks):
    """What each rank has written."""
    found = []
    for rank in range(ranks):
        with open(f"{directory}/{name}-rank{rank}.json") as file:
            found.append(json.load(file))
    return found


def begin(directory, urls, topology):
    """Two epochs from the start, with the states at three cuts of the first."""
    loader = make(urls, topology.workers)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) in CUTS:
            save(directory, f"{topology}-{len(batches)}", loader, batches)
    for cut in CUTS:
        if cut is None or cut > len(batches):
            save(directory, f"{topology}-{cut}", loader, batches)
    save(directory, f"{topology}-second", loader, list(loader))
    loader.close()


def resume(directory, urls, topology, tasks):
    """Resume from other states: (their name, of how many ranks, the name for the results)."""
    for number, (name, ranks, target) in enumerate(tasks):
        states = [left["state"] for left in read(directory, name, ranks)]
        loader = make(urls, topology.workers)
        # The state of one rank alone; if that has ended, it would wait for the others to end too.
        own = ranks == topology.ranks and number % 2 and not name.endswith("-None")
        loader.load_state_dict(states[dist.get_rank()] if own else states)
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == STOP:
                save(directory, f"{target}-stopped", loader, batches)
        if len(batches) < STOP:
            save(directory, f"{target}-stopped", loader, batches)
        save(directory, f"{target}-end", loader, batches)
        loader.close()


class Tally(NamedTuple):
    pairs: int
    runs: int
    lost: int
    repeated: int


def run_pairs(directory, urls, keys, pairs):
    """Each pair (before, after) of topologies at each cut, and from there on a third topology: how
    many keys were lost and repeated. Shards with an index of offsets are read in a global order.

    Raises:
        AssertionError: on the same topology the order differs from that of an uninterrupted run.
    """
    topologies = sorted({topology for pair in pairs for topology in pair})
    for topology in topologies:
        launch(topology.ranks, begin, directory, urls, topology)
    second = {topology: [] for topology in topologies}
    third = {topology: [] for topology in topologies}
    checks = []  # the names of the runs that make up an epoch, each with its number of ranks
    for number, (before, after) in enumerate(pairs):
        last = topologies[number % len(topologies)]
        for cut in CUTS:
            name = f"{before}-{cut}"
            second[after].append((name, before.ranks, f"{name}-{after}"))
            third[last].append((f"{name}-{after}-stopped", after.ranks, f"{name}-{after}-{last}"))
            start = [] if cut is None else [(name, before.ranks)]
            checks.append([*start, (f"{name}-{after}-end", after.ranks)])
            checks.append(
                [*start, (f"{name}-{after}-stopped", after.ranks), (f"{name}-{after}-{last}-end", last.ranks)]
            )
    for tasks in (second, third):
        for topology in topologies:
            if tasks[topology]:
                launch(topology.ranks, resume, directory, urls, topology, tasks[topology])
    lost = repeated = 0
    for check in checks:
        given = [
            [key for left in read(directory, name, ranks) for batch in left["batches"] for key in batch]
            for name, ranks in check
        ]
        if sum(map(len, given[:-1])) == len(keys):
            assert {key for part in given[:-1] for key in part} == keys
            given = given[-1:]  # the epoch was over: what follows is the next one
        counts = Counter(key for part in given for key in part)
        lost += len(keys - counts.keys())
        repeated += counts.total() - len(counts)
        assert counts.keys() <= keys
    for before, after in pairs:
        if before == after:
            for cut in CUTS:
                whole = read(directory, f"{before}-None" if cut else f"{before}-second", before.ranks)
                again = read(directory, f"{before}-{cut}-{after}-end", before.ranks)
                assert [left["batches"] for left in again] == [left["batches"][cut or 0 :] for left in whole]
    return Tally(len(pairs), len(checks), lost, repeated)
