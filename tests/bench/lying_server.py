"""Read a shard from a server that lies in every way, and print what came of it: exact bytes or an
error in time, or else a defect.

python tests/bench/lying_server.py [--every N] [--threads 48]
"""

import argparse
import collections
import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support"))

from lies import TIMEOUT_SECONDS, Trials, all_cases


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only each n-th case")
    parser.add_argument("--threads", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=480)
    options = parser.parse_args()
    cases = all_cases()[:: options.every]
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        trials = Trials(Path(directory))
        with trials.server:
            outcomes = trials.read_all(cases, threads=options.threads, seconds=options.seconds)
    counts = collections.Counter(outcome.kind for outcome in outcomes.values())
    slowest = max(outcomes, key=lambda case: outcomes[case].seconds)
    print(f"{len(cases)} cases: {dict(counts)}, {len(cases) - len(outcomes)} without an outcome")
    print(f"slowest {outcomes[slowest].seconds:.1f} s, with timeout_seconds={TIMEOUT_SECONDS}: {slowest}")
    bad = [case for case in cases if case not in outcomes or outcomes[case].kind == "WRONG"]
    for case in bad[:40]:
        print(case, outcomes.get(case, "no outcome"))
    os._exit(bool(bad))  # a case that hung would be waited for


if __name__ == "__main__":
    main()
