"""Read a shard from a server that lies in every way, and print what came of it: exact bytes or an
error in time, or else a defect.

    python tests/proofs/lying_server.py [--minutes M] [--seed N] [--threads 48]

The cases are taken in a random order; a round is one for each thread.
"""

import collections
import os
import random
import tempfile
import warnings
from pathlib import Path

from amount import parser, rounds
from lies import TIMEOUT_SECONDS, Trials, all_cases


def main():
    known = parser(__doc__, None)
    known.add_argument("--threads", type=int, default=48)
    known.add_argument("--seconds", type=float, default=120, help="after these, a case hangs")
    options = known.parse_args()
    cases, outcomes, tried = all_cases(), {}, []
    random.Random(options.seed).shuffle(cases)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        trials = Trials(Path(directory))
        with trials.server:
            for number in rounds(options):
                some = cases[number * options.threads :][: options.threads]
                if not some:
                    break
                tried += some
                outcomes |= trials.read_all(some, threads=options.threads, seconds=options.seconds)
    counts = collections.Counter(outcome.kind for outcome in outcomes.values())
    slowest = max(outcomes, key=lambda case: outcomes[case].seconds)
    print(f"slowest {outcomes[slowest].seconds:.1f} s, with timeout_seconds={TIMEOUT_SECONDS}: {slowest}")
    bad = [case for case in tried if case not in outcomes or outcomes[case].kind == "WRONG"]
    for case in bad[:40]:
        print(case, outcomes.get(case, "no outcome"))
    print(
        f"cases={len(tried)} of {len(cases)} {dict(counts)} wrong_or_hanging={len(bad)} seed={options.seed}", flush=True
    )
    os._exit(bool(bad))  # a case that hung would be waited for


if __name__ == "__main__":
    main()
