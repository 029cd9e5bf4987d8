"""Views: how many bytes a view of a tenth reads, and what evaluating a condition costs.

    python tests/bench/views.py [DIRECTORY]      writes about 450 MB there (default: a temporary
    directory), takes a minute; needs DuckDB

1. A tenth of images of 107 KB, chosen by a condition over metadata beside the shards, in order,
   shuffled, and in runs: bytes against those of its own samples. Of local shards, what the kernel
   has in its cache afterwards counts, and nothing before; of remote ones, what the server sent.
2. A state of another view is refused.
3. Evaluating a condition over 10 000 rows beside each shard; and what a copy of the pipe for a
   worker takes: 8 bytes for each sample.

Exits with 1 if a bar is missed.
"""

import ctypes
import json
import mmap
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import duckdb
from bars import bar, exit_if_missed
from data import images
from servers import Servers

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.tar.offsets import pack_keys, pack_offsets

ORDERS = {"in order": {}, "shuffled": {"shuffle": True}, "in runs of 16": {"shuffle": True, "block_samples": 16}}
WHERE, ROWS, SHARDS = "score < 0.1", 10_000, 50

_READ = """
import json, sys
import wds_pipes as wp

for sample in wp.SampleList(json.loads(sys.argv[1]), where=sys.argv[2], **json.loads(sys.argv[3])).fetch_samples():
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


def put_tables(urls: list[str]) -> None:
    """A row for each sample, in another order, with a random score."""
    scores = random.Random(1)
    for url in urls:
        keys = list(wp.IndexedShards(url).keys())
        scores.shuffle(keys)
        rows = "".join(json.dumps({"key": key, "score": scores.random()}) + "\n" for key in keys)
        Path(url).with_suffix(".jsonl").write_text(rows)


def read(urls: list[str], where: str) -> None:
    view = wp.IndexedShards(urls).select(WHERE)
    own = sum(len(value) for sample in view for name, value in sample.items() if name[:2] != "__")
    numbers, view = view.numbers, None  # a file that is mapped stays in the cache
    print(f"{len(numbers)} of {len(wp.IndexedShards(urls))} samples, {own / 1e6:.1f} MB")
    with Servers() as servers:
        web = servers.web
        for path in urls:
            for ending in (".tar", ".tar.idx", ".tar.keys", ".jsonl"):
                file = Path(path).with_suffix(ending)
                web.put(f"{where}/{file.name}", file.read_bytes())
        far = [f"{web.put(f'{where}/x', b'').rpartition('/')[0]}/{Path(path).name}" for path in urls]
        for name, order in ORDERS.items():
            for path in urls:
                forget(path)
            before = sum(map(cached, urls))
            subprocess.run([sys.executable, "-c", _READ, json.dumps(urls), WHERE, json.dumps(order)], check=True)
            fresh = sum(map(cached, urls)) - before
            pipe = wp.SampleList(far, where=WHERE, **order).fetch_samples()
            web.faults.clear()
            assert len(list(pipe)) == len(numbers)
            sent = sum(request.sent for request in web.faults.stats(web.reads) if request.path.endswith(".tar"))
            bar(f"{name}: bytes of local shards over its own", fresh / own, 1.2)
            bar(f"{name}: bytes of remote shards over its own", sent / own, 1.2)


def refused(urls: list[str]) -> None:
    pipe = wp.SampleList(urls, where=WHERE, shuffle=True).fetch_samples()
    next(iter(pipe))
    state = pipe.state_dict()
    count = 0
    for other in ("score < 0.11", "score >= 0.1", slice(None, None, 10)):
        try:
            wp.SampleList(urls, where=other, shuffle=True).fetch_samples().load_state_dict(state)
        except wp.StateError as error:
            count += "view=" in str(error)
    bar("states of another view that are refused", count, 3, least=True)


def evaluated(directory: Path) -> None:
    """Only indexes and tables are read here, so the shards have no samples."""
    directory.mkdir(exist_ok=True)
    database = duckdb.connect()
    offsets = pack_offsets([1024 * number for number in range(ROWS + 1)])
    urls = []
    for shard in range(SHARDS):
        path = directory / f"{shard:05d}.tar"
        urls.append(str(path))
        with path.open("wb") as file:
            file.truncate(1024 * ROWS + 1024)
        path.with_suffix(".tar.idx").write_bytes(offsets)
        path.with_suffix(".tar.keys").write_bytes(pack_keys([f"{shard:05d}{number:05d}" for number in range(ROWS)]))
        database.execute(
            f"COPY (SELECT printf('{shard:05d}%05d', i) AS key, hash(i + {shard * ROWS}) / 2.0 ** 64 AS score, "
            f"'a caption ' || i AS caption FROM range({ROWS}) rows(i)) TO '{path.with_suffix('.parquet')}'"
        )
    start = time.perf_counter()
    pipe = wp.SampleList(urls, where=WHERE, shuffle=True)
    seconds = time.perf_counter() - start
    count = pipe.sample_count()
    print(f"{count:,} of {ROWS * SHARDS:,} samples: {seconds / SHARDS * 1e3:.1f} ms for a shard of {ROWS:,} rows")
    more = len(pickle.dumps(pipe)) - len(pickle.dumps(wp.SampleList(urls, shuffle=True)))
    bar("bytes of the view for each sample in a copy for a worker", more / count, 8.1)
    every = wp.SampleList(urls, where=slice(None, None, 10), shuffle=True)
    bar(
        "bytes in a copy for a worker of every tenth sample",
        len(pickle.dumps(every)) - len(pickle.dumps(wp.SampleList(urls, shuffle=True))),
        200,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        urls = images(directory, shards=2)
        index_shards(urls, offsets=True)
        put_tables(urls)
        read(urls, "views")
        refused(urls)
        evaluated(directory / "tables")
    exit_if_missed()


if __name__ == "__main__":
    main()
