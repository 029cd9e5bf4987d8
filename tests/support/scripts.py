"""Python in a new process: code, a script, one of tests/bench."""

import subprocess
import sys
import textwrap
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"


def run_code(code: str, *arguments, environment=None) -> str:
    """Returns what the code prints; the process must end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_file(path, code: str, *arguments) -> subprocess.CompletedProcess:
    """Writes the code to a file, which spawned workers can import, and runs it.

    Returns when the streams have ended, so after all processes that the code has started.
    """
    path.write_text(code)
    return _run(path, *arguments)


def run_bench(name: str, *arguments) -> subprocess.CompletedProcess:
    """Runs a script of tests/bench."""
    return _run(BENCH / name, *arguments)


def _run(path, *arguments):
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
