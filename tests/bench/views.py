"""Views: how many bytes a view of a tenth reads.

    python tests/bench/views.py [DIRECTORY]      writes about 110 MB there (default: a temporary
    directory), takes a minute

A tenth of images of 107 KB, chosen at random by their keys, in order, shuffled, and in runs: bytes
against those of its own samples. Of local shards, what the kernel has in its cache afterwards
counts, and nothing before; of remote ones, what the server sent.

Exits with 1 if a bar is missed.
"""

import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from bars import bar, exit_if_missed
from data import images
from servers import Servers

import wds_pipes as wp
from wds_pipes.tar import index_shards

ORDERS = {"in order": {}, "shuffled": {"shuffle": True}, "in runs of 16": {"shuffle": True, "block_samples": 16}}

_READ = """
import json, sys
import wds_pipes as wp

urls, keys, order = sys.argv[1:]
for sample in wp.SampleList(json.loads(urls), where=f"@{keys}", **json.loads(order)).fetch_samples():
    pass
"""


def forget(path: str) -> None:
    """Drop a file from the cache of the kernel."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def cached(path: str) -> int:
    """How many bytes of a file are in the cache of the kernel."""
    libc, size = ctypes.CDLL(None), os.path.getsize(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        assert not libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def tenth(keys: list[str]) -> list[str]:
    """A tenth of keys, chosen at random."""
    return random.Random(1).sample(keys, len(keys) // 10)


def read(urls: list[str], where: str, directory: Path) -> None:
    keys = tenth(list(wp.IndexedShards(urls).keys()))
    listed = directory / "keys.txt"
    listed.write_text("\n".join(keys))
    own = sum(
        len(value)
        for sample in wp.IndexedShards(urls).select(keys)
        for name, value in sample.items()
        if name[:2] != "__"
    )
    print(f"{len(keys)} of {len(wp.IndexedShards(urls))} samples, {own / 1e6:.1f} MB")
    with Servers() as servers:
        web = servers.web
        for path in urls:
            for ending in (".tar", ".tar.idx", ".tar.keys"):
                file = Path(path).with_suffix(ending)
                web.put(f"{where}/{file.name}", file.read_bytes())
        far = [f"{web.put(f'{where}/x', b'').rpartition('/')[0]}/{Path(path).name}" for path in urls]
        for name, order in ORDERS.items():
            for path in urls:
                forget(path)
            before = sum(map(cached, urls))
            subprocess.run([sys.executable, "-c", _READ, json.dumps(urls), str(listed), json.dumps(order)], check=True)
            fresh = sum(map(cached, urls)) - before
            pipe = wp.SampleList(far, where=keys, **order).fetch_samples()
            web.faults.clear()
            assert len(list(pipe)) == len(keys)
            sent = sum(request.sent for request in web.faults.stats(web.reads) if request.path.endswith(".tar"))
            bar(f"{name}: bytes of local shards over its own", fresh / own, 1.2)
            bar(f"{name}: bytes of remote shards over its own", sent / own, 1.2)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        urls = images(directory, shards=2)
        index_shards(urls, offsets=True)
        read(urls, "views", directory)
    exit_if_missed()


if __name__ == "__main__":
    main()
