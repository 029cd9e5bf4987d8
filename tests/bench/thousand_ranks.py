"""A job of a thousand ranks, simulated in one process.

    python tests/bench/thousand_ranks.py [DIRECTORY]      writes some MB there (default: a temporary
    directory), takes some minutes

1. The state: 1,024 ranks of 8 workers each read some batches over 49,152 shards, and save; 768 ranks
   load that, go on and save. Bytes of the checkpoint, seconds of a load on one rank, milliseconds of
   ``state_dict()``.

Exits with 1 if a bar is missed.
"""

import itertools
import os
import pickle
import statistics
import sys
import time
from pathlib import Path

from bars import bar, directory, exit_if_missed

import wds_pipes as wp
from wds_pipes import checkpoint

RANKS, WORKERS, FEWER = 1024, 8, 768
SHARDS, SAMPLES, BATCH, LINKS = 49_152, 32, 4, 256


def shards(folder: Path) -> list[str]:
    """One shard under many names."""
    if not (folder / "shards").exists():
        (folder / "shards").mkdir()
        with wp.TarWriter(folder / "shards" / "x-000.tar") as writer:
            for number in range(SAMPLES):
                writer.write({"__key__": f"k{number}", "txt": b"text"})
        for number in range(1, LINKS):
            os.link(folder / "shards" / "x-000.tar", folder / "shards" / f"x-{number:03}.tar")
        for number in range(SHARDS // LINKS):
            os.symlink("shards", folder / f"s{number:03}")
    return [f"{folder}/s{number // LINKS:03}/x-{number % LINKS:03}.tar" for number in range(SHARDS)]


def make_loader(urls: list[str], rank: int, ranks: int) -> wp.PipeLoader:
    pipe = wp.ShardList(urls, shuffle=True, seed=3, samples_per_shard=SAMPLES).open_shards().load_tar().group_by_key()
    # the lanes of the workers, in this process
    options = {"lanes": ranks * WORKERS, "rank": rank, "world_size": ranks, "epoch_end": "drop"}
    return wp.PipeLoader(pipe.shuffle_buffer(20), batch_size=BATCH, collate="list", **options)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.json"))


def measure_states(folder: Path) -> None:
    urls, first, second = shards(folder), folder / "first", folder / "second"
    pipe = make_loader(urls, 0, RANKS)
    own = 0
    for rank in range(RANKS):
        loader = make_loader(urls, rank, RANKS) if rank else pipe
        for _ in itertools.islice(loader, 2 * WORKERS + rank % 3 * WORKERS if False else 2 * WORKERS):
            pass
        checkpoint.save(first, loader, step=1, keep=1)
        loader.close()
    print(f"  first checkpoint: {size_of(first) / 1e6:.2f} MB, {size_of(first) / RANKS / WORKERS:.0f} bytes a lane")
    loads, firsts, others = [], [], []
    for rank in (0, 1, FEWER - 1):
        loader = make_loader(urls, rank, FEWER)
        start = time.perf_counter()
        checkpoint.load(first, loader)
        loads.append(time.perf_counter() - start)
        start = time.perf_counter()
        loader.state_dict()
        firsts.append(1000 * (time.perf_counter() - start))
        for _ in range(20):
            start = time.perf_counter()
            loader.state_dict()
            others.append(1000 * (time.perf_counter() - start))
    print(loads, firsts, others[:4])
    bar("seconds of a load", statistics.median(loads), 3)
    bar("milliseconds of the first state_dict()", statistics.median(firsts), 20)
    bar("milliseconds of a later state_dict()", statistics.median(others), 2)


if __name__ == "__main__":
    with directory() as folder:
        measure_states(folder)
    exit_if_missed()
