"""The proofs in turn, each in a process of its own, and a table of what came of them.

    python tests/proofs all --minutes 20
    python tests/proofs kill fuzz_tar --minutes 10

The proofs share the minutes; what one does not need is left for those after it. Each can also be
run alone, with options of its own: ``python tests/proofs/kill.py --help``. Exit code 1 if one
failed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

PROOFS = (  # the quick ones first
    "fuzz_states",
    "fuzz_tar",
    "half_samples",
    "histories",
    "ledger",
    "edits",
    "packs",
    "interrupts",
    "forks",
    "lying_server",
    "doctor",
    "faults",
    "job_faults",
    "kill_jobs",
    "loop",
    "topologies",
    "preempt",
    "kill",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=("all", *PROOFS), metavar="NAME", help=", ".join(("all", *PROOFS)))
    parser.add_argument("--minutes", type=float, default=20)
    options = parser.parse_args()
    names = PROOFS if "all" in options.names else options.names
    end, rows = time.monotonic() + 60 * options.minutes, []
    for number, name in enumerate(names):
        start = time.monotonic()
        minutes = max(0.01, (end - start) / 60 / (len(names) - number))
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name(f"{name}.py"), "--minutes", str(minutes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        result = (done.stdout.strip().splitlines() or ["it printed nothing"])[-1]
        rows.append((name, time.monotonic() - start, done.returncode, result))
        print(f"{name}: {result}", flush=True)
        if done.returncode:
            print(done.stdout, flush=True)
    print()
    for name, seconds, code, result in rows:
        print(f"{name:<13} {seconds:5.0f} s  {'ok    ' if code == 0 else 'FAILED'}  {result}")
    return int(any(code for _, _, code, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
