"""What ``wds-pipes reshard``, ``sort`` and ``shuffle`` cost, one process.

    python tests/bench/reshape.py [DIRECTORY] [--only speed | memory]     writes about 2 GB there
    (default: a temporary directory), takes some minutes

1. ``reshard`` against copying the shards file by file, each written to the disk (fsync), as shards
   are; ``reshard --md5`` against the same with an MD5 of each in a thread, one shard at a time and
   two. In one run, alternating; medians. MD5 runs at 650 to 900 MB/s on a core, so it decides where
   copying is quicker.
2. The memory of ``shuffle`` and ``sort``, of data ten times larger than ``--memory 64MB``: the peak
   of the process, less that of the same process when it has imported what it needs.

Prints the figures; exits with 1 if a bar is missed.
"""

import argparse
import hashlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bars import bar, exit_if_missed
from data import images, tiny

import wds_pipes as wp
from wds_pipes.cli.jobs import Running
from wds_pipes.cli.reshaping.inputs import open_inputs
from wds_pipes.cli.reshaping.plan import Division, plan
from wds_pipes.io.tasks.running import run
from wds_pipes.io.tasks.task import Place

ROUNDS = 5
MEMORY = 64 * 10**6
# In a process of its own: runs a command, or with "idle" only imports; prints the peak in bytes.
PEAK = """
import sys
from click.testing import CliRunner
import wds_pipes.cli.reshaping.sorting, wds_pipes.io.cache.shard_cache, numpy, wds_pipes.codecs.encoding
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.cli import main
from wds_pipes.tar import shard_file
Decoding((), allow_pickle=False, max_image_pixels=1)
if sys.argv[1:] != ["idle"]:
    result = CliRunner().invoke(main, sys.argv[1:])
    assert result.exit_code == 0, result.output
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")))
"""


def copy(urls, folder):
    for url in urls:
        with open(url, "rb") as source, open(folder / os.path.basename(url), "wb", buffering=0) as target:
            shutil.copyfileobj(source, target, 1 << 20)
            os.fsync(target.fileno())


def hash_and_copy(urls, folder):
    for url in urls:
        digest, calls = hashlib.md5(usedforsecurity=False), deque()
        with (
            ThreadPoolExecutor(1) as thread,
            open(url, "rb", buffering=0) as source,
            open(folder / os.path.basename(url), "wb", buffering=0) as target,
        ):
            while block := source.read(1 << 20):
                calls.append(thread.submit(digest.update, block))
                target.write(block)
                if len(calls) > 4:
                    calls.popleft().result()
            os.fsync(target.fileno())


def hash_two_at_once(urls, folder):
    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(lambda url: hash_and_copy([url], folder), urls):
            pass


def reshard_md5(urls, folder):
    reshard(urls, folder, md5=True)


def reshard(urls, folder, md5=False):
    place = Place(str(folder))
    inputs = open_inputs(urls, Place(str(folder / ".wds-pipes")), Running(), memory=MEMORY // 8)
    division, order = Division(100_000, 1 << 26), range(inputs.count)
    report = run(
        plan(
            "reshard",
            inputs,
            place,
            {"": order},
            division=division,
            memory=MEMORY // 2,
            options={"md5": True} if md5 else {},
            given=urls,
        )
    )
    assert report.complete


def speed(root):
    for name, urls in (("107 KB", images(root / "images")), ("200 bytes", tiny(root / "tiny", samples=25_000))):
        wp.tar.index_shards(urls, offsets=True)
        taken = {copy: [], hash_and_copy: [], hash_two_at_once: [], reshard: [], reshard_md5: []}
        for number in range(ROUNDS):
            for way, times in taken.items():
                folder = root / f"{way.__name__}-{number}"
                folder.mkdir()
                os.sync()
                start = time.perf_counter()
                way(urls, folder)
                times.append(time.perf_counter() - start)
                shutil.rmtree(folder)
        medians = {way: statistics.median(times) for way, times in taken.items()}
        size = sum(map(os.path.getsize, urls))
        print(f"{name}: load {os.getloadavg()[0]:.1f}")
        for way, seconds in medians.items():
            print(f"  {way.__name__:<17}{seconds:>8.3f} s, {size / seconds / 1e6:>6.0f} MB/s")
        for way in (hash_and_copy, hash_two_at_once, reshard_md5):
            print(f"  {name}: {way.__name__} / copying {medians[copy] / medians[way]:.3f}")
        print(f"  {name}: reshard_md5 / hash_and_copy {medians[hash_and_copy] / medians[reshard_md5]:.3f}")
        ratio = medians[copy] / medians[reshard]
        if name == "107 KB":
            bar(f"{name}: reshard / copying", ratio, 0.6, least=True)
        else:
            count = len(wp.IndexedShards(urls))
            print(f"  {name}: reshard / copying {ratio:.3f}, {count / medians[reshard]:,.0f} samples/s")


def peak(*arguments):
    result = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True)
    return int(result.stdout)


def many(folder, count, size):
    """Shards of samples with keys in no order, a field of so many bytes and a class."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(0)
    with wp.ShardWriter(f"{folder}/in-%06d.tar", max_bytes=100 * 10**6, offsets=True, overwrite=True) as writer:
        for _ in range(count):
            key = f"{numbers.getrandbits(64):016x}"
            writer.write({"__key__": key, "bin": numbers.randbytes(size), "cls": str(numbers.randrange(1000)).encode()})
    return list(writer.shards)


def memory(root):
    idle = peak("idle")
    for name, count, field in (("107 KB", 6200, 107_000), ("200 bytes", 315_000, 200)):
        urls = many(root / f"many-{field}", count, field)
        size = sum(map(os.path.getsize, urls))
        assert size > 10 * MEMORY, size
        for command in (["shuffle"], ["sort"], ["sort", "--by", "cls"]):
            folder = root / "made"
            used = peak(*command, *urls, str(folder), "--memory", "64MB") - idle
            shutil.rmtree(folder)
            bar(f"{name}, {size / 1e6:.0f} MB: {' '.join(command)}: peak / --memory", used / MEMORY, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--only", choices=["speed", "memory"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = Path(arguments.directory or made)
        for part in (speed, memory):
            if arguments.only in (None, part.__name__):
                part(root)


if __name__ == "__main__":
    main()
    exit_if_missed()
