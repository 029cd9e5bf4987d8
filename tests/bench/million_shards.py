"""A list of 10**6 shards from an ``index.json``, in one run.

    python tests/bench/million_shards.py [--shards N]      writes 170 MB to a temporary directory,
    and removes it; takes a minute

The index lists 10**6 paths, through 1,000 links to a directory of 1,000 links to one shard of four
samples. The figures, each of new processes:

1. A pipeline: the least seconds from building it to its first sample, the most memory of the
   process until then, torch included, and the time of the first ``state_dict()``.
2. PipeLoader, and torch's DataLoader over ``as_dataset()``, with two workers that are forked or
   spawned: how much more memory of its own a worker has than one of a pipeline over 1,000 shards.

Exits with 1 if a bar is missed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from hashlib import md5
from pathlib import Path

import psutil
from bars import bar, exit_if_missed, in_new_process

LINKS = 1000  # of each kind
RUNS = 3


def write(folder: Path, shards: int) -> str:
    """Write an index of this many paths, and what they lead to; return its path."""
    import wds_pipes as wp
    from wds_pipes.tar.index import place_of

    path = folder / f"{shards}.json"
    if not (folder / "shards").exists():
        (folder / "shards").mkdir()
        with wp.TarWriter(folder / "shards" / "x-000.tar") as writer:
            for number in range(4):
                writer.write({"__key__": f"k{number}", "txt": b"text"})
        for number in range(LINKS):
            os.symlink("shards", folder / f"s{number:03}")
            if number:
                os.link(folder / "shards" / "x-000.tar", folder / "shards" / f"x-{number:03}.tar")
    content = (folder / "shards" / "x-000.tar").read_bytes()
    facts = {"nsamples": 4, "filesize": len(content), "md5sum": md5(content).hexdigest()}
    shardlist = [
        {"url": f"s{number // LINKS:03}/x-{number % LINKS:03}.tar", **facts, "version": f"17{number:017}"}
        for number in range(shards)
    ]
    index = {"wids_version": 1, "place": place_of(str(path)), "shardlist": shardlist}
    path.write_text(json.dumps(index, indent=1))
    return str(path)


def pipeline(index: str):
    import wds_pipes as wp

    return wp.ShardList(index, shuffle=True).open_shards().load_tar().group_by_key()


def chain(index: str) -> list[float]:
    """Return the figures of a pipeline in this process; imports do not count."""
    next(iter(pipeline(str(Path(index).with_name(f"{LINKS}.json")))))
    start = time.perf_counter()
    pipe = pipeline(index)
    next(iter(pipe))
    first = time.perf_counter()
    pipe.state_dict()
    state = time.perf_counter() - first
    most = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return [first - start, state, int(most.split()[1]) / 1000]


def workers(index: str, kind: str, context: str) -> list[float]:
    """Return how many MB the two workers of a loader have of their own."""
    from torch.utils.data import DataLoader

    import wds_pipes as wp

    options = {"num_workers": 2, "multiprocessing_context": context}
    pipe = pipeline(index)
    loader = (
        wp.PipeLoader(pipe, batch_size=2, collate="list", **options)
        if kind == "PipeLoader"
        else DataLoader(pipe.as_dataset(), batch_size=None, **options)
    )
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    found = sorted(own_mb(child.pid) for child in psutil.Process().children())[-2:]
    del batches
    return found


def own_mb(process: int) -> float:
    """The memory of a process that it shares with no other."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=10**6)
    parser.add_argument("--job", action="store_true")
    options = parser.parse_args()
    if options.job:
        name, *rest = json.load(sys.stdin)
        print(json.dumps({"chain": chain, "workers": workers}[name](*rest)))
        return
    with tempfile.TemporaryDirectory() as folder:
        few, many = (write(Path(folder), shards) for shards in (LINKS, options.shards))
        print(f"{options.shards:,} shards, {os.path.getsize(many) >> 20} MB of index.json")
        seconds, states, memory = zip(*(in_new_process(__file__, ["chain", many]) for _ in range(RUNS)), strict=True)
        bar("seconds to the first sample", min(seconds), 3)
        bar("MB of the process", max(memory), 400)
        bar("ms of the first state_dict()", max(states) * 1000, 1)
        for kind in ("PipeLoader", "DataLoader"):
            for context in ("fork", "spawn"):
                own, usual = (max(in_new_process(__file__, ["workers", index, kind, context])) for index in (many, few))
                bar(f"MB more in a worker of {kind}, {context}", own - usual, 50)
    exit_if_missed()


if __name__ == "__main__":
    main()
