"""Python in a new process: code, a script, one of tests/proofs."""

import subprocess
import sys
import textwrap
from pathlib import Path

import warm

PROOFS = Path(__file__).parents[1] / "proofs"


def run_code(code: str, *arguments, environment=None, has_torch=False) -> str:
    """Returns what the code prints; the process must end well. If it ``has_torch``, it begins with
    torch imported.
    """
    if has_torch:
        done = warm.run(code, *arguments, environment=environment)
    else:
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


def run_file(path, code: str, *arguments, has_torch=False) -> subprocess.CompletedProcess:
    """Writes the code to a file, which spawned workers can import, and runs it; if it
    ``has_torch``, in a process that begins with torch imported.

    Returns when the streams have ended, so after all processes that the code has started.
    """
    path.write_text(code)
    return warm.run(path, *arguments) if has_torch else _run(path, *arguments)


def run_proof(name: str, *arguments, has_torch=False) -> subprocess.CompletedProcess:
    """Runs a script of tests/proofs."""
    return warm.run(PROOFS / name, *arguments) if has_torch else _run(PROOFS / name, *arguments)


def _run(path, *arguments):
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
