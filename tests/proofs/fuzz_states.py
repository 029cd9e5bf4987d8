"""Damaged states of every kind of pipeline: each is refused with a StateError, or loads and goes
on; nothing else, and never a hang.

    python tests/proofs/fuzz_states.py [--rounds 45000] [--minutes M] [--seed N]

The same seed gives the same states. Exit code 1 if anything else was raised,
or if one state took more than ten seconds.
"""

import collections
import logging
import pathlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback

from amount import parser, rounds
from mutations import attack, subjects

SLOW_SECONDS = 10


class Slow(Exception):
    pass


def too_slow(number, frame):
    raise Slow("".join(traceback.format_stack(frame)[-6:]))


def shown(state):
    """A state for people; an int of thousands of digits cannot be printed."""
    try:
        return f"{state!r:.1500}"
    except ValueError:
        return "(a state with an int that is too long to print)"


def main():
    known = parser(__doc__, 45_000)
    known.add_argument("--only", default="", help="subjects whose names hold this")
    options = known.parse_args()
    logging.disable(logging.CRITICAL)
    others, examples = collections.Counter(), {}

    def report(subject, state, error):
        places = traceback.extract_tb(error.__traceback__)
        ours = next((place for place in reversed(places) if "wds_pipes/" in place.filename), places[-1])
        what = f"{type(error).__name__} at {pathlib.Path(ours.filename).name}:{ours.lineno} ({str(error)[:80]!r})"
        kind = what.partition("(")[0]
        others[kind] += 1
        examples.setdefault(kind, f"{subject.name}: {what}\n    {shown(state)}")

    signal.signal(signal.SIGALRM, too_slow)
    start, tried, refused = time.perf_counter(), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        found = [subject for subject in subjects(pathlib.Path(directory)) if options.only in subject.name]
        rng = random.Random(options.seed)
        for _ in rounds(options):
            tried += 1
            signal.setitimer(signal.ITIMER_REAL, SLOW_SECONDS)
            refused += attack(found, rng, count=1, report=report)
        signal.setitimer(signal.ITIMER_REAL, 0)
    for kind, count in others.most_common():
        print(f"{count:6} {examples[kind]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"states={tried} refused={refused} others={others.total()} seed={options.seed} "
        f"seconds={time.perf_counter() - start:.0f} peak_mb={peak:.0f}"
    )
    return int(others.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
