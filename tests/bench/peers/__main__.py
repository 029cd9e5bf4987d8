"""Against other loaders and the limits of the machine, each library in an environment of its own
where it clashes with others.

    python tests/bench/peers [--envs DIRECTORY] [--out DIRECTORY] [--quick] [--only NAME ...]

``--envs`` makes the environments, for which it needs the network; they are kept and take 8 GB.
Without it, the libraries of this environment are measured. A run takes 15 minutes, and 3 GB in a
temporary directory; nothing else should run then. It writes the table, its JSON and the chart; with
``--out tutorials/docs`` those that the documentation shows. Exits with 1 if a bar is missed.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where ``bars`` and this package lie

from bars import bar, exit_if_missed

from peers.data import Data
from peers.report import ratios, write
from peers.rows import EVERYWHERE, ROWS
from peers.running import Environment, Plan, chosen, compare

# torch of another version would be a build for CUDA, of some gigabytes.
CONSTRAINT = f"torch=={importlib.metadata.version('torch').partition('+')[0]}\n"
OWN_PACKAGES = ("torch", "torchdata", "fsspec", "braceexpand", "click")  # what the package needs for its rows
BARS = {  # at least; peak memory at most
    ("wds_pipes", "limit: the same function", "decoded workers"): 0.95,
    ("wds_pipes", "limit: the same function", "decoded threads"): 0.95,
    ("wds_pipes, size=(224, 224)", "limit: decode + resize", "decoded workers"): 0.95,
    ("wds_pipes, size=(224, 224)", "limit: decode + resize", "decoded threads"): 0.95,
    ("wds_pipes", "webdataset", "decoded workers"): 1.15,
    ("wds_pipes, size=(224, 224)", 'webdataset, .decode("pil")', "decoded workers"): 1.9,
    ("wds_pipes", "limit: header walk", "raw tiny"): 0.45,
    ("wds_pipes", "webdataset", "raw tiny"): 10,
    ("wds_pipes", "webdataset", "raw images"): 4.5,
}


def environments(rows, directory: Path) -> dict[str, Environment]:
    """Make the environments that do not exist, and install what the rows need."""
    directory.mkdir(parents=True, exist_ok=True)
    constraints = directory / "constraints.txt"
    constraints.write_text(CONSTRAINT)
    found = {}
    for row in rows:
        name = row.packages[0] if row.own_environment else "shared"
        python = directory / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", directory / name], check=True)
        packages = [*EVERYWHERE, *row.packages, *(OWN_PACKAGES if row.with_package else ())]
        reason = install(python, packages, constraints)
        print(f"{name}: {' '.join(packages)}: {reason or 'installed'}", flush=True)
        found[row.name] = Environment(str(python), reason)
    return found


def install(python: Path, packages, constraints: Path) -> str:
    """Install packages; return nothing, or why it failed."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", constraints, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["pip wrote nothing"]
    errors = [line for line in lines if re.match(r"(\w*Error|ERROR): ", line)]
    return f"does not install: {(errors or lines)[-1]}"[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path)
    parser.add_argument("--out", default="wds-pipes-peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few samples, and only webdataset beside this package")
    parser.add_argument("--only", action="append", default=[], choices=[row.name for row in ROWS], metavar="NAME")
    asked = parser.parse_args()
    rows = chosen(asked.only, asked.quick)
    places = environments(rows, asked.envs) if asked.envs else {}
    with tempfile.TemporaryDirectory() as work:
        plan = Plan.quick() if asked.quick else Plan(rounds=asked.rounds)
        data = Data.quick(work) if asked.quick else Data(work)
        results = compare(rows, data, work, plan, environments=places, report=lambda line: print(line, flush=True))
    print(*write(results, asked.out), sep="\n")
    if asked.quick:  # so few samples that no figure says anything
        return
    for (one, other, what), value in ratios(results).items():
        if what == "peak memory":
            bar(f"{what}, {one} over {other}", value, 1)
        elif (one, other, what) in BARS:
            bar(f"{what}, {one} over {other}", value, BARS[one, other, what], least=True)
    exit_if_missed()


if __name__ == "__main__":
    main()
