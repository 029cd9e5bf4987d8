"""How much processor time a start takes, more than Python's own: the package, ``wds_pipes.tar``,
the command line, and its completion by TAB.

    python tests/bench/start.py      takes some seconds

Each command runs ten times in a process of its own; the least user + system time counts, and
Python's own is that of ``python -c pass``. Prints the figures beside their bar; exits with 1 if one
is missed. ``python -X importtime -m wds_pipes --help`` says what takes it.
"""

import os
import resource
import subprocess
import sys

BAR = 0.3  # seconds
RUNS = 10
COMMANDS = ("bench", "cache", "demo", "index")


def seconds(arguments: list[str], environment: dict[str, str] | None = None) -> float:
    """The least processor time of Python with these arguments."""
    taken = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **(environment or {})},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def completion(words: str) -> dict[str, str]:
    """What the shell says when TAB is pressed after these words."""
    return {"_WDS_PIPES_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}


def main() -> int:
    main_of = ["-c", "from wds_pipes.cli import main; main(prog_name='wds-pipes')"]
    own = seconds(["-c", "pass"])
    print(f"python itself: {own:.3f} s; more than that:")
    starts = {
        "import wds_pipes": seconds(["-c", "import wds_pipes"]),
        "import wds_pipes.tar": seconds(["-c", "import wds_pipes.tar"]),
        "wds-pipes --help": seconds([*main_of, "--help"]),
        "wds-pipes --version": seconds([*main_of, "--version"]),
        **{f"wds-pipes {command} -h": seconds([*main_of, command, "-h"]) for command in COMMANDS},
        "wds-pipes <TAB>": seconds(main_of, completion("wds-pipes c")),
        "wds-pipes demo --<TAB>": seconds(main_of, completion("wds-pipes demo --")),
    }
    for name, taken in starts.items():
        print(f"{name:>24}: {taken - own:.3f} s (below {BAR})")
    return int(max(starts.values()) - own >= BAR)


if __name__ == "__main__":
    sys.exit(main())
