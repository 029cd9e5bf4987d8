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
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where ``bars`` and this package lie

from bars import bar, exit_if_missed

from peers.data import Data
from peers.report import ratios, write
from peers.rows import EVERYWHERE, QUICK, RATIOS, ROWS
from peers.running import compare

# torch of another version would be a build for CUDA, of some gigabytes.
CONSTRAINT = f"torch=={importlib.metadata.version('torch').partition('+')[0]}\n"
OWN_PACKAGES = ("torch", "torchdata", "fsspec", "braceexpand", "click")  # what the package needs for its rows


def environments(rows, directory):
    """Make the environments that do not exist, install what the rows need, and return the
    interpreters by the names of the rows.

    A library that does not install is measured as one that is not there.
    """
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
        print(f"{name}: {' '.join(packages)}", flush=True)
        install = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", constraints]
        subprocess.run([*install, *packages], check=False)
        found[row.name] = str(python)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("wds-pipes-peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few samples, and only webdataset beside this package")
    parser.add_argument("--only", action="append", choices=[row.name for row in ROWS], metavar="NAME")
    asked = parser.parse_args()
    names = asked.only or [row.name for row in (QUICK if asked.quick else ROWS)]
    rows = [row for row in ROWS if row.name in names]
    pythons = environments(rows, asked.envs) if asked.envs else {}
    with tempfile.TemporaryDirectory() as work:
        if asked.quick:
            results = compare(rows, Data(work, images=64, tiny=512), work, pythons, rounds=1, seconds=0.05)
        else:
            results = compare(rows, Data(work), work, pythons, rounds=asked.rounds)
    print(*write(results, asked.out), sep="\n")
    if asked.quick:  # so few samples that no figure says anything
        return
    for (one, other, what), value in ratios(results).items():
        if what == "peak memory":
            bar(f"{what}, {one} over {other}", value, 1)
        elif least := RATIOS[one, other, what]:
            bar(f"{what}, {one} over {other}", value, least, least=True)
    exit_if_missed()


if __name__ == "__main__":
    main()
