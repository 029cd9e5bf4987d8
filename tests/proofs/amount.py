"""How long a proof runs: a number of rounds, or as many as begin within some minutes."""

import argparse
import itertools
import random
import time
from collections.abc import Iterator

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
