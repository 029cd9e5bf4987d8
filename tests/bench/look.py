"""What ``wds-pipes verify`` and ``wds-pipes cat`` cost, warm cache, one process: against the raw
reader, and against copying the bytes; in one run, alternating; medians.

    python tests/bench/look.py [DIRECTORY]      writes about 280 MB there (default: a temporary
    directory), takes a minute

Prints the rates; exits with 1 if a bar is missed.
"""

import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bars import bar, exit_if_missed
from data import images, tiny

import wds_pipes as wp
from wds_pipes.cli.look.checking import Options
from wds_pipes.cli.look.findings import verify
from wds_pipes.cli.look.output import write_tar
from wds_pipes.cli.look.reading import Source

ROUNDS = 7


def read(urls):
    return sum(1 for _ in wp.ShardList(urls).open_shards().load_tar().group_by_key())


def check(urls):
    report = verify(urls, Options({}, "first-dot", decode=False), ignored=("duplicate-key",))
    assert not report.counts, report.findings[:3]
    return report.samples


def check_keys(urls):
    return verify(urls, Options({}, "first-dot", decode=False)).samples


def copy(urls):
    with open(os.path.join(os.path.dirname(urls[0]), "copy"), "wb") as target:
        for url in urls:
            with open(url, "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
        return target.tell()


def cat(urls):
    with open(os.path.join(os.path.dirname(urls[0]), "copy"), "wb") as target:
        write_tar(Source(urls, {}).slice(0, None), target)
        return target.tell()


def seconds(ways, urls):
    """The median time of each way, measured in turn."""
    taken = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            gc.collect()
            start = time.perf_counter()
            way(urls)
            taken[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(times) for way, times in taken.items()}
    for way, median in medians.items():
        print(f"  {way.__name__:<12}{median:>8.3f} s")
    return medians


def main(root):
    for name, urls in (("tiny", tiny(Path(root) / "tiny")), ("107 KB", images(Path(root) / "images"))):
        print(f"{name}: load {os.getloadavg()[0]:.1f}")
        found = seconds((read, check, check_keys), urls)
        bar(f"{name}: verify / raw reader", found[read] / found[check_keys], 0.5, least=True)
        if name != "tiny":
            found = seconds((copy, cat), urls)
            bar(f"{name}: cat / copying", found[copy] / found[cat], 0.6, least=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.makedirs(sys.argv[1], exist_ok=True)
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made:
            main(made)
    exit_if_missed()
