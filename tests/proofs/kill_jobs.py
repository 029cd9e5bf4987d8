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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from amount import parser, rounds
from jobs import COMMANDS, command_line, make_files, outputs


def start(template: str, data: Path, place: Path, jobs: int) -> subprocess.Popen:
    """Start a command that writes to ``place``."""
    places = {"from": data / "shards", "files": data / "files", "data": data, "to": place}
    command = [*command_line(template, **places), "-j", str(jobs)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen) -> None:
    errors = process.communicate()[1]
    if process.returncode:
        sys.exit(f"the command failed with {process.returncode}: {errors}")


def make_shards(data: Path) -> None:
    """Shards of the files, with offsets, the same without, as tables, and some other ones."""
    finish(start("create {files} {to} --max-samples 50", data, data / "indexed", 2))
    finish(start("export {data}/indexed {to} --to parquet", data, data / "tables", 2))
    finish(start("create {files}/03 {to}", data, data / "others", 2))
    shutil.copytree(data / "indexed", data / "shards", ignore=lambda _, names: {n for n in names if n[-4:] != ".tar"})
    time.sleep(4)  # an index records the versions of files only when they are not quite new


def wait_for_files(process: subprocess.Popen, place: Path, count: int) -> None:
    """Wait until the command has begun, and there are so many files more."""
    while not any(names for _, _, names in os.walk(place)) and process.poll() is None:
        time.sleep(0.002)
    before = count_of(place)
    while count_of(place) < before + count and process.poll() is None:
        time.sleep(0.002)


def count_of(place: Path) -> int:
    return sum(not name.startswith(".") for _, _, names in os.walk(place) for name in names)


def one_round(name: str, data: Path, place: Path, *, whole: dict, kills: int, numbers) -> tuple[int, int]:
    """Kill and repeat a command; return how many kills found it at work, and the files then."""
    hit = found = 0
    place.mkdir()
    for _ in range(kills):
        process = start(COMMANDS[name], data, place, numbers.choice([1, 2]))
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
    finish(start(COMMANDS[name], data, place, 2))
    now = outputs(place)
    if now != whole:
        wrong = sorted(path for path in {*now, *whole} if now.get(path) != whole.get(path))
        sys.exit(f"{name}: at the end {wrong} are not as in a run without an interruption")
    return hit, found


def uninterrupted(name: str, data: Path) -> dict[str, bytes]:
    """The files that a command writes if nothing interrupts it."""
    place = data / f"whole-{name}"
    place.mkdir()
    finish(start(COMMANDS[name], data, place, 1))
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
        make_files(data / "files", arguments.samples)
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
