"""A job of a thousand ranks, simulated: checkpoints, the start, the caches of nodes.

    python tests/bench/thousand_ranks.py [DIRECTORY]      writes 10 MB there (default: a temporary
    directory), takes two minutes; needs a server of tests/support for the start

1. Checkpoints. 1,024 ranks of 8 workers read a batch in each of their 8,192 lanes, over 49,152
   shards, and save. 768 ranks load that, go on and save again. All lanes are read in this process,
   since lanes do not depend on the processes that host them. Of the 768 ranks, some are measured:
   the rank that has the shared part, and others; the bytes of all are those of rank 0 and 767 times
   the mean of the others. Times are of the processor.
2. The start. 16 ranks (processes of gloo) of 2 workers read an epoch from an S3 server that counts
   requests; beside it one rank with one worker.
3. Caches. 4 nodes of 8 ranks of 4 workers read 5 epochs of ``ShardList(sticky=True)``, then 3
   nodes: which shards the nodes have to fetch, by the partition.

Exits with 1 if a bar is missed.
"""

import copy
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
REMOTE = 64  # shards in a store


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


def measure_checkpoints(folder: Path) -> None:
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
        loader = make_loader(copy.deepcopy(pipe), rank, FEWER, FEWER * WORKERS)
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


def read_epoch(rank: int, ranks: int, url: str, options: dict, workers: int) -> int:
    """The batches of a rank in an epoch over shards that an index in a store lists."""
    pipe = wp.ShardList(f"{url}/d/index.json", shuffle=True, storage_options=options).open_shards()
    loader = wp.PipeLoader(
        pipe.load_tar().group_by_key(), batch_size=4, collate="list", num_workers=workers, epoch_end="drop"
    )
    listed = wp.ShardList(f"{url}/d/*.tar", storage_options=options)
    assert len(listed._stream.stage.urls) == REMOTE
    count = sum(1 for _ in loader)
    loader.close()
    return count


def measure_start(folder: Path) -> None:
    from process_group import on_ranks
    from servers import Servers

    from wds_pipes.tar import index_shards
    from wds_pipes.testing import make_shards

    paths = make_shards(folder / "remote", shards=REMOTE, samples=SAMPLES)
    index_shards(paths, str(folder / "remote" / "index.json"))
    with Servers() as servers:
        store = servers.s3
        for path in [*paths, f"{folder}/remote/index.json"]:
            store.put(f"d/{os.path.basename(path)}", Path(path).read_bytes())
        requests = []
        for ranks, workers in ((1, 1), (16, 2)):
            store.faults.clear()
            counts = on_ranks(ranks, read_epoch, store.url, store.storage_options, workers)
            assert set(counts) == {REMOTE * SAMPLES // 4 // ranks}
            kinds = [store.faults.stats(match) for match in ("list-type", r"index\.json", r"\.tar$")]
            requests.append([len(found) for found in kinds])
    (_, _, alone), (listings, indexes, shards_read) = requests
    print(f"16 ranks x 2 workers: {listings} listing, {indexes} of the index, {shards_read} of shards ({alone} alone)")
    bar("listings", listings, 1)
    bar("requests of the index, per request of one rank", indexes / requests[0][1], 1)
    bar("requests of shards, per request of one rank", shards_read / alone, 1.1)


def of_nodes(urls: list[str], nodes: int, epoch: int) -> list[set[int]]:
    """Which shards each node of 8 ranks x 4 workers reads in an epoch."""
    from wds_pipes.loader.ranges import Ranges

    ranks, samples = 8 * nodes, [50 + 37 * number % 101 for number in range(len(urls))]
    source = wp.ShardList(urls, shuffle=True, sticky=True, samples_per_shard=samples)._stream.stage
    shares = Ranges.first(4 * ranks, source, epoch, ranks).shares(source, epoch)
    held = [set[int]() for _ in range(nodes)]
    for lane, share in enumerate(shares):
        held[lane % ranks // 8].update(share.numbers.tolist())
    return held


def measure_caches() -> None:
    urls = [f"/d/x-{number:05}.tar" for number in range(10_000)]
    held = [set.union(*parts) for parts in zip(*(of_nodes(urls, 4, epoch) for epoch in range(5)), strict=True)]
    moved = sum(len(now - before) for now, before in zip(of_nodes(urls, 3, 5), held, strict=False))
    print("4 nodes x 8 ranks x 4 workers, 10,000 shards, 5 epochs, then 3 nodes")
    bar("share of the data that all nodes fetch", sum(map(len, held)) / len(urls), 1.02)
    bar("share that 3 nodes fetch again", moved / len(urls), 0.35)


if __name__ == "__main__":
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # all lanes have a shard open
    with directory() as place:
        measure_caches()
        measure_start(place)
        measure_checkpoints(place)
    exit_if_missed()
