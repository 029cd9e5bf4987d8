"""Write constraints.txt anew, or compare this environment with it.

    python .ci/constraints.py PYTHON3.11 PYTHON3.12 PYTHON3.13
    VENV/bin/python .ci/constraints.py

With interpreters, the file names the version of every package that the groups of pyproject.toml
install on each of them: the newest that the ranges there allow today. Without, the exit status is
1 if this environment has a package that the file does not name, or has it in another version.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("constraints.txt")
HELD = ["torch==2.13.0"]  # the newest of which there are builds without CUDA
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]


def newest_on(python: str) -> tuple[str, dict[str, str]]:
    """The minor version of an interpreter, and the versions of what pip installs into a fresh
    environment of it.
    """
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([python, "-m", "venv", directory], check=True)
        python = f"{directory}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "-q", "-U", "pip"], check=True)
        together = [part for group in GROUPS if group != "alone" for part in ("--group", group)]
        found = {}
        for wanted in ([*HELD, "-e", ".", *together], ["--no-deps", "--group", "alone"]):
            report = f"{directory}/report.json"
            ask = [python, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report", report, *wanted]
            subprocess.run(ask, cwd=ROOT, check=True)
            for package in json.loads(Path(report).read_text())["install"]:
                about = package["metadata"]
                found[canonicalize_name(about["name"])] = about["version"].partition("+")[0]  # as torch's 2.13.0+cpu
        about = subprocess.run([python, "-m", "pip", "--version"], check=True, capture_output=True, text=True).stdout
        found["pip"] = about.split()[1]
        minor = subprocess.run(
            [python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    found.pop("wds-pipes")
    return minor, found


def lines_of(versions: dict[str, dict[str, str]]) -> list[str]:
    """The lines that pin what ``versions`` has for each Python, oldest first. A version is for all
    Pythons from one up to the next that has another.
    """
    lines = []
    for name in sorted({name for found in versions.values() for name in found}):
        runs: list[tuple[str, str]] = []  # the first Python of each version, and the version
        for python, found in versions.items():
            if name in found and (not runs or runs[-1][1] != found[name]):
                runs.append((python, found[name]))
        for number, (python, version) in enumerate(runs):
            bounds = [f"python_version >= '{python}'"] if number else []
            bounds += [f"python_version < '{runs[number + 1][0]}'"] if number + 1 < len(runs) else []
            lines.append(f"{name}=={version}{'; ' if bounds else ''}{' and '.join(bounds)}")
    return lines


def differences() -> list[str]:
    """What is installed here, and not as the file says."""
    pinned = [Requirement(line) for line in FILE.read_text().splitlines()]
    allowed = {each.name: each.specifier for each in pinned if each.marker is None or each.marker.evaluate()}
    installed = {canonicalize_name(each.name): each.version for each in importlib.metadata.distributions()}
    installed.pop("wds-pipes", None)
    return [
        f"{name} {version} is installed, and .ci/constraints.txt has {name}{allowed.get(name, ' in no version')}"
        for name, version in sorted(installed.items())
        if name not in allowed or version not in allowed[name]
    ]


if __name__ == "__main__":
    if sys.argv[1:]:
        FILE.write_text("\n".join(lines_of(dict(map(newest_on, sys.argv[1:])))) + "\n")
    else:
        sys.exit("\n".join(differences()) or 0)
