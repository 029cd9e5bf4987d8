"""``wds-pipes browse``: how long the first page takes, and whether the memory of the server grows.

    python tests/bench/browse.py [DIRECTORY]      writes about 120 MB there (default: a temporary
    directory), takes five minutes; the part about a remote set needs nginx and its echo module

1. 1,000 shards of 1,000 samples each, indexed: the shard of 110 KB images, under 1,000 names. From
   the start of the command to its URL, and from there on the first page, a page of 24 samples, one
   sample, and one by its number.
2. The same set on a server that answers after 50 ms.
3. The memory of the server process after 200 pages, 2,500 and 5,000: of samples and of grids, of
   all shards in turn.

Each page is of a shard that was not looked at before. Exits with 1 if a bar is missed.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
from bars import bar, directory, exit_if_missed
from peers.data import images
from servers import Missing, paced_web

from wds_pipes.tar import index_shards
from wds_pipes.tar.index import read_entries, write_index

SHARDS, SAMPLES = 1000, 1000
PAGES, FIRST_PAGES = 5000, 200


def million(place: Path) -> Path:
    """Return a directory with the shards and their indexes: one shard under many names."""
    folder = place / "million"
    if not (folder / "index.json").exists():
        folder.mkdir()
        (shard,) = images(place, shards=1, samples=SAMPLES)
        index_shards([shard], str(place / "one.json"), offsets=True)
        entry = next(iter(read_entries(str(place / "one.json"))[0].values()))[2]
        for number in range(SHARDS):
            for ending in ("", ".idx", ".keys"):
                os.link(f"{shard}{ending}", folder / f"images-{number:06d}.tar{ending}")
        entries = {str(folder / f"images-{number:06d}.tar"): entry._replace(version=None) for number in range(SHARDS)}
        write_index(str(folder / "index.json"), entries)
    return folder


class Browsed:
    """A running command, and its pages."""

    def __init__(self, *urls: str) -> None:
        started = time.perf_counter()
        command = [sys.executable, "-m", "wds_pipes", "browse", *urls]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[0]
        self.start_seconds = time.perf_counter() - started

    def seconds(self, name: str) -> float:
        """How long a page takes."""
        started = time.perf_counter()
        with urllib.request.urlopen(f"{self.url}{name}") as response:
            page = response.read()
        assert b'role="alert"' not in page, page.decode()
        return time.perf_counter() - started

    def memory_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


@contextlib.contextmanager
def browsed(*urls: str):
    running = Browsed(*urls)
    try:
        yield running
    finally:
        running.process.terminate()
        running.process.wait()


def first_pages(what: str, urls: str, most: float) -> None:
    with browsed(urls) as pages:
        print(f"{what}: the URL after {pages.start_seconds:.2f} s, most of which Python imports modules")
        bar("the first page, in seconds", pages.seconds(""), most)
        bar("24 samples with pictures", pages.seconds("shard-321-20.html"), most)
        bar("one sample", pages.seconds("sample-777-555.html"), most)
        bar("one by its number among all", pages.seconds("go?sample=654321"), most)
        print(f"histograms over 512 samples: {pages.seconds('histograms.html'):.2f} s")


def memory(urls: str) -> None:
    chosen = random.Random(1)
    with browsed(urls) as pages:
        held, started = {}, time.perf_counter()
        for number in range(1, PAGES + 1):
            shard = chosen.randrange(SHARDS)
            grid = f"shard-{shard}-{chosen.randint(1, SAMPLES // 24)}.html"
            pages.seconds(grid if number % 10 == 0 else f"sample-{shard}-{chosen.randrange(SAMPLES)}.html")
            if number in (FIRST_PAGES, PAGES // 2, PAGES):
                held[number] = pages.memory_mb()
        print("memory in MB after so many pages:", {number: round(size) for number, size in held.items()})
        print(f"a page in {(time.perf_counter() - started) / PAGES * 1e3:.0f} ms")
        # the first half reads the indexes of all shards, 16 MB, which stay in memory
        bar("MB more after 5,000 pages than after 200", held[PAGES] - held[FIRST_PAGES], 32)
        bar("MB more after 5,000 pages than after 2,500", held[PAGES] - held[PAGES // 2], 8)


def main() -> None:
    with directory() as place:
        folder = million(place)
        first_pages("local, indexes of offsets and index.json", f"{folder}/images-{{000000..000999}}.tar", 1)
        try:
            with paced_web(0, 0.05) as web:
                os.symlink(folder, Path(web.directory) / "million")
                first_pages("remote, 50 ms, index.json", f"{web.url}/million/index.json", 2)
        except Missing as error:
            print(f"remote: {error}")
        memory(str(folder / "index.json"))
    exit_if_missed()


if __name__ == "__main__":
    main()
