"""Commands that write shards, killed for real: SIGKILL at random moments, of the command alone or
with its processes, and then the same command again.

    python tests/proofs/kill_jobs.py [--rounds 10] [--minutes M] [--kills 3] [--seed N]
                                      [--samples 4000] [--only COMMAND]

After each kill, every file under a final name must be that of a run without an interruption, and at
the end all files must be. A round is each command once. Exit code 1 if one is not.
"""

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from amount import parser, rounds

COMMANDS = {
    "create": lambda data, place: ["create", f"{data}/files", place, "--max-samples", "50", "--shuffle", "3"],
    "convert": lambda data, place: ["convert", f"{data}/tables", place, "--from", "parquet", "--max-samples", "50"],
    "export-parquet": lambda data, place: ["export", f"{data}/shards", place, "--to", "parquet"],
    "export-imagefolder": lambda data, place: ["export", f"{data}/shards", place, "--to", "imagefolder"],
    "download": lambda data, place: ["download", f"{data}/shards", place],
    "index": lambda data, place: ["index", f"{data}/shards", "-o", f"{place}/index.json", "--offsets-to", place],
    "filter": lambda data, place: ["filter", f"{data}/shards", place, "--every", "2"],
    "map": lambda data, place: ["map", "copy:copy", f"{data}/shards", place],
    "dedup": lambda data, place: ["dedup", f"{data}/shards", place, "--by", "content"],
    "join": lambda data, place: [*["join", f"{data}/shards", place, "--with", f"{data}/indexed", "--prefer", "last"]],
    "repair": lambda data, place: ["repair", f"{data}/shards", place],
    "reshard": lambda data, place: ["reshard", f"{data}/shards", place, "--max-bytes", "1MB"],
    "reshard-md5": lambda data, place: ["reshard", f"{data}/shards", place, "--max-bytes", "1MB", "--md5"],
    "split": lambda data, place: ["split", f"{data}/shards", place, "--shares", "a=0.6,b=0.4", "--max-samples", "50"],
    "shuffle": lambda data, place: ["shuffle", f"{data}/shards", place, "--seed", "3", "--max-samples", "50"],
    "sort": lambda data, place: ["sort", f"{data}/shards", place, "--by", "cls", "--max-samples", "50"],
    "mix": lambda data, place: [
        *["mix", f"{data}/shards=0.7", f"{data}/others=0.3", place, "--exhausted", "drop", "--max-samples", "50"]
    ],
}


def make_files(folder: Path, count: int) -> None:
    """Files of samples with two fields, of 1 to 40 kB."""
    numbers = random.Random(0)
    for number in range(count):
        path = folder / "files" / f"{number % 17:02d}" / f"{number:06d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".bin").write_bytes(numbers.randbytes(numbers.randrange(1000, 40_000)))
        path.with_suffix(".cls").write_text(str(number % 10))


def make_shards(folder: Path) -> None:
    """Shards of these files, with offsets, the same without, as tables, and some other ones."""
    finish(start(["create", f"{folder}/files", f"{folder}/indexed", "--max-samples", "50"], 2))
    finish(start(["export", f"{folder}/indexed", f"{folder}/tables", "--to", "parquet"], 2))
    finish(start(["create", f"{folder}/files/03", f"{folder}/others"], 2))
    (folder / "shards").mkdir()
    for path in (folder / "indexed").glob("*.tar"):
        shutil.copy(path, folder / "shards")
    time.sleep(4)  # an index records the versions of files only when they are not quite new


def outputs(place: Path) -> dict[str, bytes]:
    """The files under their final names; an index without the hash of where it was written."""
    return {
        str(path.relative_to(place)): re.sub(rb'"place": "\w+"', b"", path.read_bytes())
        for path in sorted(place.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(place).parts)
    }


def start(arguments: list[str], jobs: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "wds_pipes", *arguments, "-j", str(jobs), "--no-progress"]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_files(process: subprocess.Popen, place: Path, count: int) -> None:
    """Wait until the command has begun, and there are so many files more."""
    while not any(names for _, _, names in os.walk(place)) and process.poll() is None:
        time.sleep(0.002)
    before = count_of(place)
    while count_of(place) < before + count and process.poll() is None:
        time.sleep(0.002)


def count_of(place: Path) -> int:
    return sum(not name.startswith(".") for _, _, names in os.walk(place) for name in names)


def finish(process: subprocess.Popen) -> None:
    errors = process.communicate()[1]
    if process.returncode:
        sys.exit(f"the command failed with {process.returncode}: {errors}")


def one_round(name: str, data: Path, place: Path, *, whole: dict, kills: int, numbers) -> tuple[int, int]:
    """Kill and repeat a command; return how many kills found it at work, and the files then."""
    hit = found = 0
    place.mkdir()
    for _ in range(kills):
        process = start(COMMANDS[name](str(data), str(place)), numbers.choice([1, 2]))
        wait_for_files(process, place, numbers.randrange(len(whole) // kills))
        time.sleep(numbers.random() * 0.1)
        hit += process.poll() is None
        if numbers.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
        now = outputs(place)
        found = len(now)
        wrong = [path for path, content in now.items() if whole.get(path) != content]
        if wrong:
            sys.exit(f"{name}: after a kill, {wrong} are not as in a run without an interruption")
    finish(start(COMMANDS[name](str(data), str(place)), 2))
    now = outputs(place)
    if now != whole:
        wrong = sorted(path for path in {*now, *whole} if now.get(path) != whole.get(path))
        sys.exit(f"{name}: at the end {wrong} are not as in a run without an interruption")
    return hit, found


def uninterrupted(name: str, data: Path) -> dict[str, bytes]:
    """The files that a command writes if nothing interrupts it."""
    place = data / f"whole-{name}"
    place.mkdir()
    finish(start(COMMANDS[name](str(data), str(place)), 1))
    return outputs(place)


def main() -> None:
    known = parser(__doc__, 10)
    known.add_argument("--kills", type=int, default=3)
    known.add_argument("--samples", type=int, default=4000)
    known.add_argument("--only", choices=list(COMMANDS), help="one command")
    arguments = known.parse_args()
    numbers, names = random.Random(arguments.seed), [arguments.only] if arguments.only else list(COMMANDS)
    if arguments.rounds is not None:
        arguments.rounds *= len(names)
    wholes: dict[str, dict[str, bytes]] = {}
    hits, kills = Counter(), 0
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        make_files(data, arguments.samples)
        if arguments.only != "create":  # which reads the files
            make_shards(data)
        for number, name in zip(rounds(arguments), itertools.cycle(names)):
            if name not in wholes:
                wholes[name] = uninterrupted(name, data)
            place = data / f"{name}-{number}"
            hit, found = one_round(name, data, place, whole=wholes[name], kills=arguments.kills, numbers=numbers)
            shutil.rmtree(place)
            hits[name] += hit
            kills += arguments.kills
            print(f"{name}, round {number}: killed {hit} times at work, the last time with {found} files", flush=True)
    missed = [name for name in wholes if not hits[name]]
    if missed and not arguments.minutes:
        sys.exit(f"{', '.join(missed)}: never killed at work: pass more --samples")
    print(f"commands={len(wholes)} kills={kills} at_work={hits.total()} wrong=0 seed={arguments.seed}")


if __name__ == "__main__":
    main()
