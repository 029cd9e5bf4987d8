"""The ledger: equal over ranks, lanes and workers after random histories; planted faults noticed.

    python tests/proofs/ledger.py [--rounds 300] [--minutes M] [--seed N] [--workers 0.1]

Each round is a history over 1 to 16 ranks, of which ``--workers`` is the share with worker
processes: at each cut, the digest of all ranks together is that of the samples that they returned,
and where an epoch has ended, ``state prove`` finds it again from the shards, unless samples were
dropped. Then 100 times each fault is planted in the shards of a run (lost, repeated and swapped
samples, another shard), and ``state prove`` over the shards without it must notice it, and must
hold over the shards with it. Exit code 1 if one failed.
"""

import json
import logging
import random
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from amount import parser, rounds

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from ledgers import FAULTS, Phase, play, states_after, with_fault
from pipelines import samples, shuffled

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards
from wds_pipes.tools import prove

SIZES = [3, 0, 17, 2, 29, 4, 6, 21]


def counted(urls):
    return shuffled(urls, samples_per_shard=SIZES)


def interleaved(urls):
    return samples(urls, samples_per_shard=SIZES).interleave_shards(3).decode_by_ext().shuffle_buffer(4)


def listed(urls):
    return wp.SampleList(urls, shuffle=True, seed=3).fetch_samples()


def careless(urls):
    listed = wp.ShardList(urls, empty_check=False).open_shards().load_tar()
    return listed.group_by_key(on_repeated_key="ignore").shuffle_buffer(5)


def history(rng, urls, share, tally):
    """Run one; return what it was."""
    end = rng.choice(["exact", "exact", "drop", "pad", "loop"])
    make = rng.choice(
        [counted, listed, interleaved] if end != "exact" else [samples, shuffled, counted, listed, interleaved]
    )
    mix, has_workers = rng.choice([1, 1, 2]), rng.random() < share
    phases = [
        Phase(
            rng.choice([1, 2, 3, 4]) if has_workers else rng.randrange(1, 17),
            rng.randrange(1, 3),
            rng.randrange(1, 4),
            rng.randrange(4),
            rng.randrange(4) if has_workers else 0,
        )
        for _ in range(rng.randrange(1, 5))
    ]
    place, drop_last = Path(urls[0]).with_name("state.json"), rng.random() < 0.3

    def prove_it(state):
        over = all(lane["ended"] for lane in state["lanes"].values())
        if end in ("exact", "pad") and not drop_last and (over or state["epoch"]):
            place.write_text(json.dumps(state))
            assert prove(str(place), urls).proven, prove(str(place), urls)
            tally[f"proven: {end}"] += 1

    own = rng.random() < 0.5
    play(urls, make, phases, end=end, mix=mix, drop_last=drop_last, own=own, at_cut=prove_it)
    return f"{end} {'with workers' if has_workers else 'in one process'}"


def fault(rng, kind, urls, directory):
    """Return whether the digest of a run over shards with a fault holds over these, and whether it
    is noticed that it does not hold over those without it.
    """
    place, shard = Path(directory) / "broken", rng.choice([4, 5, 6])
    place.mkdir(exist_ok=True)
    broken = with_fault(kind, urls, shard, rng.randrange(1, SIZES[shard] - 1), place)
    path = states_after(lambda: careless(broken), 100, place / "states.json", batch_size=2)
    return prove(path, broken).proven, not prove(path, urls).proven


def main():
    known = parser(__doc__, 300)
    known.add_argument("--workers", type=float, default=0.1, help="the share of histories with worker processes")
    known.add_argument("--faults", type=int, default=100, help="how often each fault is planted")
    args = known.parse_args()
    logging.getLogger("wds_pipes").setLevel(logging.ERROR)
    tally, failed = Counter(), 0
    with tempfile.TemporaryDirectory() as directory:
        urls = make_shards(directory, shards=len(SIZES), samples=SIZES)
        index_shards(urls, offsets=True)
        for number in rounds(args):
            try:
                tally[history(random.Random(f"{args.seed} {number}"), urls, args.workers, tally)] += 1
            except Exception:
                failed += 1
                print(f"--- history {number} failed, seed {args.seed}\n{traceback.format_exc()}", flush=True)
        for kind in FAULTS:
            found = [
                fault(random.Random(f"{args.seed} {kind} {number}"), kind, urls, directory)
                for number in range(args.faults)
            ]
            tally[f"{kind}: noticed"] = sum(noticed for _, noticed in found)
            tally[f"{kind}: holds over the shards of the run"] = sum(holds for holds, _ in found)
            failed += sum(found != (True, True) for found in found)
    for what, count in sorted(tally.items()):
        print(f"{count:6} {what}")
    print(f"failed={failed} seed={args.seed}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
