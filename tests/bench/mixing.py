"""How well batches mix shards with ``mix_lanes``, against the recipe of webdataset, and what it
costs: in one run.

    python tests/bench/mixing.py [DIRECTORY]      writes about 250 MB there (default: a temporary
    directory), takes four minutes

1. Shards in a batch of 64, of 64 shards, with 4 workers: ours with ``interleave_shards(4)`` and a
   shuffle buffer in each lane; webdataset's ``unbatched().shuffle(1000).batched(64)`` after its
   loader.
2. Batches of 107 KB samples from 2 workers, raw and decoded, with ``mix_lanes=4`` and without it,
   both with 4 lanes, in turn.

Prints the figures beside their bars; exits with 1 if one is missed.
"""

import itertools
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import webdataset as wds
from bars import bar, exit_if_missed
from data import images

import wds_pipes as wp
from wds_pipes.testing import make_shards

BATCH, SHUFFLE, ROUNDS = 64, 1000, 7


def shards_in_batches(batches) -> tuple[float, float]:
    """The mean number of shards in a batch, and the share of neighbours that are of one shard."""
    batches = [batch for batch in batches if len(batch) == BATCH]
    pairs = [pair for batch in batches for pair in itertools.pairwise(batch)]
    return statistics.mean(len(set(batch)) for batch in batches), statistics.mean(one == other for one, other in pairs)


def url_of(samples):
    return [sample["__url__"] for sample in samples]


def ours(urls, mixed):
    pipe = wp.ShardList(urls, shuffle=True, seed=1).open_shards().load_tar().group_by_key()
    pipe = pipe.interleave_shards(4).shuffle_buffer(SHUFFLE)
    return wp.PipeLoader(pipe, batch_size=BATCH, num_workers=4, lanes=4, mix_lanes=mixed, collate=url_of)


def recipe(urls):
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=1).shuffle(SHUFFLE).batched(BATCH, collation_fn=url_of)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=4)
    return loader.unlisted().shuffle(SHUFFLE).batched(BATCH, collation_fn=list)


def throughput(urls, decoded) -> list[float]:
    """The time without mixing over the time with it, in rounds."""
    ratios = []
    for number in range(ROUNDS):
        seconds = {}
        for mixed in (1, 4) if number % 2 else (4, 1):
            pipe = wp.ShardList(urls, shuffle=True, seed=1).open_shards().load_tar().group_by_key()
            if decoded:
                pipe = pipe.decode_by_ext("torchrgb8").to_tuple("jpg", "cls")
            loader = wp.PipeLoader(pipe, batch_size=BATCH, num_workers=2, lanes=4, mix_lanes=mixed)
            batches = iter(loader)
            next(batches)
            start = time.perf_counter()
            count = sum(1 for _ in batches)
            seconds[mixed] = (time.perf_counter() - start) / count
            loader.close()
        ratios.append(seconds[1] / seconds[4])
    return ratios


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        many = make_shards(directory / "many", shards=64, samples=500, fields=("cls",))
        print(f"shards in a batch of {BATCH}, and share of neighbours of one shard")
        found = {}
        for name, make in (
            ("one lane", lambda: ours(many, 1)),
            ("mix_lanes=4", lambda: ours(many, 4)),
            ("webdataset", lambda: recipe(many)),
        ):
            found[name] = shards_in_batches(make())
            print(f"  {name:<12} {found[name][0]:5.1f} {found[name][1]:8.3f}")
        bar(
            "shards of ours over those of the recipe", found["mix_lanes=4"][0] / found["webdataset"][0], 1.0, least=True
        )
        urls = images(directory, shards=4)
        for what, decoded in (("raw", False), ("decoded", True)):
            ratios = throughput(urls * (1 if decoded else 8), decoded)
            bar(f"throughput with mix_lanes=4 over without, {what}", statistics.median(ratios), 0.97, least=True)
            print("    rounds:", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    exit_if_missed()


if __name__ == "__main__":
    main()
