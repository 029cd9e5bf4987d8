"""How long a proof runs: a number of rounds, or as many as begin within some minutes.

Proofs import this module first: those after it may import what lies in tests/support.
"""

import argparse
import itertools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
START = time.monotonic()


def parser(doc: str, default: int | None) -> argparse.ArgumentParser:
    """The command line of a proof: ``--rounds`` (None: all its cases), ``--minutes``,
    ``--seed``."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=default)
    made.add_argument("--minutes", type=float, help="as many rounds as begin in this time, at least one")
    made.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    return made


def rounds(options: argparse.Namespace) -> Iterator[int]:
    """The numbers of the rounds that these options allow."""
    for number in itertools.count():
        over = time.monotonic() > START + 60 * options.minutes if options.minutes else number == options.rounds
        if over and (number or not options.minutes):
            return
        yield number


def history_parser(doc: str, kinds: Mapping[str, Callable]) -> argparse.ArgumentParser:
    """The command line of a proof of 300 histories: also ``--kind`` and ``--only NUMBER``."""
    made = parser(doc, 300)
    made.add_argument("--kind", choices=list(kinds))
    made.add_argument("--only", type=int)
    return made


def run_histories(options: argparse.Namespace, kinds: Mapping[str, Callable], note: str = "") -> int:
    """Run random histories of all kinds in turn until one fails, print one line, and return the
    exit code.
    """
    start, done = time.perf_counter(), Counter()
    for number in [options.only] if options.only is not None else rounds(options):
        kind = options.kind or list(kinds)[number % len(kinds)]
        try:
            kinds[kind](random.Random(options.seed * 1_000_003 + number))
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print(f"history {number} ({kind}) of seed {options.seed} failed")
            return 1
        done[kind] += 1
    figures = " ".join(f"{kind}={count}" for kind, count in done.items())
    seconds = time.perf_counter() - start
    print(f"histories={sum(done.values())} {figures}{note} seed={options.seed} seconds={seconds:.0f}")
    return 0
