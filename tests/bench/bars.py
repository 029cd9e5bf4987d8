"""What the measurements share: figures and their bars, directories, processes; and the way to
tests/support, for those that import this module first.
"""

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
MISSED = []


def beside_bar(what, value, bound, *, least=False):
    """A figure beside its bar, which is an upper bound, or with ``least`` a lower one."""
    met = value >= bound if least else value <= bound
    if not met:
        MISSED.append(what)
    return f"{what} {value:.3f} ({'at least' if least else 'at most'} {bound:g}){'' if met else ' MISSED'}"


def bar(what, value, bound, *, least=False):
    """Print a figure beside its bar on a line of its own."""
    print(" ", beside_bar(what, value, bound, least=least))


def exit_if_missed():
    """Exit with 1 if a figure has missed its bar."""
    if MISSED:
        sys.exit(f"missed: {', '.join(MISSED)}")


def in_turn(ways, rounds):
    """Call each function once a round, in turn, forwards and backwards; return what they return."""
    found = {name: [] for name in ways}
    for number in range(rounds):
        for name in reversed(ways) if number % 2 else ways:
            found[name].append(ways[name]())
    return found


def median_ratio(ones, others):
    """The median of the ratios of measurements that followed each other."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


@contextlib.contextmanager
def directory():
    """The directory of the command line, or a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(sys.argv[1] if len(sys.argv) > 1 else temporary)


def processor_seconds():
    """Processor seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def in_new_process(script, job, **environment):
    """What a script prints as JSON in a new process, which is started with ``--job``."""
    command, environment = [sys.executable, script, "--job"], {**os.environ, **environment}
    done = subprocess.run(command, input=json.dumps(job), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
