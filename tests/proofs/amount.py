"""How long a proof runs: a number of rounds, or as many as begin within some minutes.

Proofs import this module first: those after it may import what lies in tests/support.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
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
