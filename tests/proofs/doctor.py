"""Ten pipelines with a bottleneck each, and two without: ``doctor`` names them all.

    python tests/proofs/doctor.py [--rounds 1] [--minutes M] [--seconds 6]

Prints a line for each pipeline: whether its limit was named, and what was said. Exit code 1 if one
was not named.
"""

import sys
import tempfile
import time

from amount import parser, rounds
from plants import HEALTHY, PLANTS, diagnosed


def main(options):
    named, asked = 0, 0
    for _ in rounds(options):
        for plant, (limit, _) in {**PLANTS, **HEALTHY}.items():
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                found, right = diagnosed(plant, folder, options.seconds)
            named, asked = named + right, asked + 1
            verdict = "named" if right else f"NOT NAMED ({limit}, not {found.limit})"
            print(f"{plant.__name__}: {verdict} in {time.perf_counter() - begin:.0f} s. {' '.join(found.sentences)}")
            print(f"    {', '.join(f'{name} {each:.3g}' for name, each in found.microseconds.items())}", flush=True)
    print(f"named {named} of {asked}, of which {len(PLANTS)} in {len(PLANTS) + len(HEALTHY)} have a bottleneck")
    return int(named < asked)


if __name__ == "__main__":
    made = parser(__doc__, 1)
    made.add_argument("--seconds", type=float, default=6)
    sys.exit(main(made.parse_args()))
