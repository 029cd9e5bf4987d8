"""A job of a thousand ranks, simulated in one process: the checkpoints.

    python tests/bench/thousand_ranks.py [DIRECTORY]      writes 10 MB there (default: a temporary
    directory), takes two minutes

1,024 ranks of 8 workers read a batch in each of their 8,192 lanes, over 49,152 shards, and save.
768 ranks load that, go on and save again. All lanes are read in this process, since lanes do not
depend on the processes that host them. Of the 768 ranks, some are measured: the rank that has the
shared part, and others; the bytes of all are those of rank 0 and 767 times the mean of the others.

Exits with 1 if a bar is missed.
"""

import itertools
import os
import resource
import statistics
import time
from pathlib import Path

from bars import bar, directory, exit_if_missed

import wds_pipes as wp
from wds_pipes import checkpoint

RANKS, WORKERS, FEWER, MEASURED = 1024, 8, 768, (0, 1, 400, 767)
SHARDS, SAMPLES, BATCH, LINKS = 49_152, 32, 4, 256
TAKEN = 6  # batches of a rank between two checkpoints


def shards(folder: Path) -> list[str]:
    """One shard under many names."""
    (folder / "shards").mkdir()
    with wp.TarWriter(folder / "shards" / "x-000.tar") as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"k{number}", "txt": b"text"})
    for number in range(1, LINKS):
        os.link(folder / "shards" / "x-000.tar", folder / "shards" / f"x-{number:03}.tar")
    for number in range(SHARDS // LINKS):
        os.symlink("shards", folder / f"s{number:03}")
    return [f"{folder}/s{number // LINKS:03}/x-{number % LINKS:03}.tar" for number in range(SHARDS)]


def make_pipe(urls: list[str]):
    pipe = wp.ShardList(urls, shuffle=True, seed=3, samples_per_shard=SAMPLES).open_shards().load_tar().group_by_key()
    return pipe.shuffle_buffer(20)


def make_loader(pipe, rank: int, ranks: int, lanes: int) -> wp.PipeLoader:
    options = {"lanes": lanes, "rank": rank, "world_size": ranks, "epoch_end": "drop"}
    return wp.PipeLoader(pipe, batch_size=BATCH, collate="list", **options)


def take(loader: wp.PipeLoader, batches: int) -> None:
    for _ in itertools.islice(loader, batches):
        pass


def of_rank(whole: dict, rank: int) -> dict:
    """The state of a rank, of that of one process that has run all lanes."""
    lanes = {number: lane for number, lane in whole["lanes"].items() if int(number) % RANKS == rank}
    counts = {name: sum(lane["counts"].get(name, 0) for lane in lanes.values()) for name in whole["counts"]}
    return {**whole, "rank": rank, "world_size": RANKS, "step": WORKERS, "lanes": lanes, "counts": counts}


def milliseconds(call) -> float:
    """How long a call takes, in processor time, which other programs do not change."""
    start = time.process_time()
    call()
    return 1000 * (time.process_time() - start)


def sizes_in(folder: Path) -> dict[int, int]:
    """The bytes of the file of each rank."""
    return {int(path.name[5:9]): path.stat().st_size for path in folder.rglob("rank-*.json")}


def measure(folder: Path) -> None:
    pipe, first, second = make_pipe(shards(folder)), folder / "first", folder / "second"
    everything = make_loader(pipe, 0, 1, RANKS * WORKERS)
    take(everything, RANKS * WORKERS)
    whole = everything.state_dict()
    everything.close()
    for rank in range(RANKS):
        loader = make_loader(pipe, rank, RANKS, RANKS * WORKERS)
        loader.load_state_dict(of_rank(whole, rank))
        checkpoint.save(first, loader, step=1)
    sizes = sizes_in(first)
    print(f"{RANKS} ranks x {WORKERS} workers: checkpoint of {sum(sizes.values()) / 1e6:.2f} MB")

    loads, firsts, others, own = [], [], [], []
    for rank in MEASURED:
        loader = make_loader(make_pipe_again(pipe), rank, FEWER, FEWER * WORKERS)
        loads.append(milliseconds(lambda: checkpoint.load(first, loader)) / 1000)  # noqa: B023
        firsts.append(milliseconds(loader.state_dict))
        others += [milliseconds(loader.state_dict) for _ in range(20)]
        take(loader, TAKEN)
        state = loader.state_dict()
        own.append(len(str(state["lanes"])) / len(state["lanes"]))
        checkpoint.save(second, loader, step=2)
        loader.close()
    sizes = sizes_in(second)
    shared = sizes.pop(0)
    total = shared + (FEWER - 1) * statistics.mean(sizes.values())
    print(
        f"after a load on {FEWER} ranks: {shared:,} bytes of rank 0, {statistics.mean(sizes.values()):,.0f} of others"
    )
    bar("MB of the checkpoint of all ranks", total / 1e6, 6)
    bar("bytes of a lane", max(own), 300)
    bar("seconds of a load", statistics.median(loads), 3)
    bar("milliseconds of the first state_dict()", statistics.median(firsts), 20)
    bar("milliseconds of a later state_dict()", statistics.median(others), 2)


def make_pipe_again(pipe):
    """The same pipe without what it keeps of a partition, as a new process has it."""
    import copy

    return copy.deepcopy(pipe)


if __name__ == "__main__":
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # all lanes have a shard open
    with directory() as place:
        measure(place)
    exit_if_missed()
