"""Making and reading indexes, each beside what it is compared with, in one run.

    python tests/bench/index.py [DIRECTORY]      writes about 450 MB there (default: a temporary
    directory), takes three minutes

1. The size of an index of offsets, and how long making it takes, against the algorithm of DALI's
   wds2idx: a walk with tarfile, or two runs of GNU tar. Indexing again, with nothing changed.
2. ``jobs=1`` against ``jobs=2``, and the same with processes instead of threads.
3. An index of 100 000 shards with 10^9 samples: how long ``ShardList`` takes to read it, and how
   much memory.

Rounds alternate; the figures are medians of their ratios. Exits with 1 if a bar is missed.
"""

import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from bars import bar, exit_if_missed
from data import images, tiny

from wds_pipes.stages import ShardList
from wds_pipes.tar import ShardFacts, index_shards
from wds_pipes.tar.index_file import Entry, write_index

ROUNDS, SHARDS, SAMPLES = 3, 100_000, 10_000


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int = ROUNDS) -> float:
    """How many times as long as ``one`` ``other`` takes."""
    found = []
    for number in range(rounds):
        took = {run: seconds(run) for run in ((one, other) if number % 2 else (other, one))}
        found.append(took[other] / took[one])
    return statistics.median(found)


def walk(urls: list[str]) -> None:
    """What wds2idx does where there is no program ``tar``."""
    for url in urls:
        lines: list[list[str]] = []
        last = None
        with tarfile.open(url) as tar:
            for member in tar:
                if member.type != tarfile.REGTYPE:
                    continue
                stem, _, extension = member.name.partition(".")
                if stem != last:
                    lines.append([])
                last = stem
                lines[-1] += [extension, str(member.offset_data), str(member.size), member.name]
        assert lines


def two_lists(urls: list[str]) -> None:
    """What wds2idx lets the program ``tar`` do, without what it does with the two lists."""
    for url in urls:
        options = (["--block-num"], ["--verbose", "--numeric-owner"])
        runs = [subprocess.Popen(["tar", "--list", *more, "--file", url], stdout=subprocess.PIPE) for more in options]
        for run in runs:
            assert run.communicate()[0]


def in_processes(urls: list[str], count: int) -> None:
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("forkserver")) as pool:
        list(pool.map(partial(index_shards, jobs=1), urls))


def make(directory: Path) -> None:
    folder = directory / "indexes"
    for name, urls in (("tiny", tiny(directory)), ("images", images(directory))):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for url in urls:
            os.utime(url, (1e9, 1e9))
        new = partial(index_shards, urls, folder / "index.json", offsets=folder, jobs=1, force=True)
        again = partial(index_shards, urls, folder / "index.json", offsets=folder, jobs=1)
        samples = sum(facts.samples or 0 for facts in new().values())
        print(f"{name}: {samples} samples in {len(urls)} shards, {seconds(new):.2f} s")
        size = sum((folder / f"{Path(url).name}.idx").stat().st_size for url in urls)
        bar("bytes of .idx for a sample", (size - 8 * len(urls)) / samples, 8)
        bar("indexing again over indexing", 1 / ratio(again, new), 0.1)
        if name == "tiny":
            bar("the walk of tarfile over index_shards", ratio(new, partial(walk, urls)), 5.0, least=True)
            print(f"  two lists by GNU tar over index_shards {ratio(new, partial(two_lists, urls)):.2f}")
        two = partial(index_shards, urls, jobs=2)
        print(f"  jobs=1 over jobs=2: {ratio(two, partial(index_shards, urls, jobs=1)):.2f}", end="")
        print(f"; 2 processes over jobs=2: {ratio(two, partial(in_processes, urls, 2)):.2f}")


def memory(name: str) -> float:
    """What Linux says of this process, in MB."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024


def read(path: str) -> None:
    """Print how many seconds of a core ShardList takes for an index, and how much memory. In a
    process of its own.
    """
    before = memory("VmRSS")
    pattern = f"{os.path.dirname(path)}/shard-{{000000..{SHARDS - 1:06d}}}.tar"
    for options in ({"urls": path}, {"urls": pattern, "index": path}):
        start = time.process_time()
        stage = ShardList(**options)
        print(time.process_time() - start)
        assert sum(stage.samples or ()) == SHARDS * SAMPLES
        del stage
    print(memory("VmHWM") - before)


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        make(directory)
        path = str(directory / "index.json")
        facts = {
            f"{directory}/shard-{number:06d}.tar": Entry(
                ShardFacts(SAMPLES, (1 << 30) + number, f"{number:032x}"), "1700000000000000000", "0" * 32, "0" * 32
            )
            for number in range(SHARDS)
        }
        write_index(path, facts)
        ran = subprocess.run([sys.executable, __file__, "--read", path], capture_output=True, text=True, check=True)
        listed, matched, held = map(float, ran.stdout.split())
        print(
            f"{SHARDS} shards with {SHARDS * SAMPLES:.0e} samples, {os.path.getsize(path) / 1e6:.0f} MB of index.json"
        )
        bar("seconds of a core for ShardList(index.json)", listed, 1.0)
        bar("seconds of a core for ShardList(urls, index=index.json)", matched, 1.0)
        bar("MB of memory", held, 200)
    exit_if_missed()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2])
    else:
        main()
