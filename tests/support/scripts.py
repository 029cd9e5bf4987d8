"""Python code in a new process."""

import subprocess
import sys
import textwrap


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
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
