"""Random histories of packs and buckets of samples: ranks, workers, cuts and repartitions.

    python tests/proofs/packs.py [--rounds 300] [--minutes M] [--seed N] [--kind exact|lanes|loop]

Each history makes packs by one of the methods of ``pack_samples``, or buckets, and is cut several
times; each part runs on 1 to 4 ranks with 0 to 2 workers. All tokens are distinct. ``exact``: lanes
follow from the ranks and workers, and each token of an epoch comes once. ``lanes``: the number of
lanes stays, so the packs are those of a run without a cut. ``loop``: without an end, each token has
come as often as there are epochs that had it. Exit code 1 if one differs; ``--only NUMBER`` with
the same seed repeats it.
"""

import itertools
import json
import sys
import tempfile
from collections import Counter
from functools import partial

import numpy as np
from amount import history_parser, run_histories
from pipelines import epochs_of, through_json

import wds_pipes as wp
from wds_pipes.testing import make_shards

SIZES = [5, 14, 6, 23, 7, 0, 8, 19, 2, 16, 4, 11]
BUDGET, LANES = 10, 12
LENGTHS = [number * 7 % 11 for number in range(sum(SIZES))]  # from 0 to the budget
STARTS = [0, *itertools.accumulate(LENGTHS)]
URLS = []


def with_tokens(sample):
    start, stop = (STARTS[int(sample["__key__"]) + more] for more in (0, 1))
    return {"__key__": sample["__key__"], "tokens": np.arange(start, stop)}


def with_long_documents(sample):
    """Seven documents are one, and the other six are empty."""
    number = int(sample["__key__"])
    first, last = (min(number + more, len(LENGTHS)) for more in (0, 7))
    tokens = np.arange(STARTS[first], STARTS[last]) if number % 7 == 0 else np.empty(0, int)
    return {"__key__": sample["__key__"], "tokens": tokens}


def length_of(sample):
    return len(sample["tokens"])


KINDS_OF_PACKS = {
    "best-fit": lambda pipe, window: pipe.pack_samples("tokens", BUDGET, window=window),
    "first-fit": lambda pipe, window: pipe.pack_samples("tokens", BUDGET, method="first-fit", window=window, pad=0),
    "function": lambda pipe, window: pipe.pack_samples(length_of, BUDGET, window=window),
    "wrap": lambda pipe, window: pipe.pack_samples("tokens", BUDGET, method="wrap"),
    "wrap, long": lambda pipe, window: pipe.pack_samples("tokens", BUDGET, method="wrap"),
    "buckets": lambda pipe, window: pipe.bucket_samples("tokens", 3, boundaries=[3, 6], window=window),
    "sorted": lambda pipe, window: pipe.bucket_samples("tokens", 3, boundaries=[6], sort=True, window=window),
    "padded elements": lambda pipe, window: pipe.bucket_samples("tokens", budget=30, window=window),
}


def make(kind, window, shuffles, counted):
    counts = {"samples_per_shard": SIZES} if counted else {}
    pipe = wp.ShardList(URLS, shuffle=True, seed=3, **counts).open_shards().load_tar().group_by_key()
    pipe = pipe.shuffle_buffer(9) if shuffles else pipe
    pipe = pipe.map_samples(with_long_documents if kind == "wrap, long" else with_tokens)
    return KINDS_OF_PACKS[kind](pipe, window)


def tokens_of(pack):
    """The tokens of a pack or bucket, without what fills it up."""
    if isinstance(pack, list):
        return tuple(token for sample in pack for token in sample["tokens"].tolist())
    if "lengths" in pack:
        rows = zip(pack["tokens"].tolist(), pack["lengths"].tolist(), strict=True)
        return tuple(token for row, length in rows for token in row[:length])
    return tuple(pack["tokens"][pack["document_ids"] >= 0].tolist())


class Run:
    """The loaders of all ranks, from the states of the part before."""

    def __init__(self, pipe, states, ranks, workers, **options):
        options |= {"multiprocessing_context": "fork"} if workers else {}
        self.loaders = [
            wp.PipeLoader(pipe, rank=rank, world_size=ranks, num_workers=workers, **options) for rank in range(ranks)
        ]
        for loader in self.loaders if states else ():
            loader.load_state_dict(states)
        self.items = [iter(loader) for loader in self.loaders]

    def taken(self, steps):
        """The packs of some steps of each rank; None: of all that are left of the epoch."""
        return [tokens_of(pack) for items in self.items for pack in itertools.islice(items, steps)]

    def states(self):
        states = through_json([loader.state_dict() for loader in self.loaders])
        for loader in self.loaders:
            loader.close()
        return states


def history(chance, kind):
    """Run one; AssertionError if a token was lost or came twice, or packs are others."""
    packs = chance.choice(list(KINDS_OF_PACKS))
    options = packs, chance.choice([1, 4, 20, 64]), chance.random() < 0.5, chance.random() < 0.5
    end = "loop" if kind == "loop" else "exact"
    how = {"lanes": LANES if kind == "lanes" else None, "epoch_end": end}
    found, states = [], None
    for _ in range(chance.randrange(2, 6)):
        run = Run(make(*options), states, chance.randrange(1, 5), chance.choice([0, 0, 0, 1, 2]), **how)
        found += run.taken(chance.randrange(0, 9))
        over = end == "exact" and any(loader.epoch for loader in run.loaders)
        found += run.taken(None) if over else []  # one rank has ended
        states = run.states()
        assert len(json.dumps(states[0]["lanes"])) < 1024 * len(states[0]["lanes"])
        if over:
            break
    if end == "loop":
        ended, begun = epochs_of(states)
        counts = Counter(itertools.chain.from_iterable(found))
        assert all(ended <= counts[token] <= begun + 1 for token in range(STARTS[-1])), packs
        return
    if not over:
        found += Run(make(*options), states, 1, 0, **how).taken(None)
    assert sorted(itertools.chain.from_iterable(found)) == [*range(STARTS[-1])], packs
    if kind == "lanes":
        assert Counter(found) == Counter(Run(make(*options), None, 1, 0, **how).taken(None)), packs


KINDS = {kind: partial(history, kind=kind) for kind in ("exact", "lanes", "loop")}


def main():
    options = history_parser(__doc__, KINDS).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        URLS[:] = make_shards(directory, shards=len(SIZES), samples=SIZES)
        return run_histories(options, KINDS, " lost=0 repeated=0")


if __name__ == "__main__":
    sys.exit(main())
