"""How well batches mix shards with ``mix_lanes``, against the recipe of webdataset, and what it
costs: in one run.

    python tests/bench/mixing.py [DIRECTORY]      writes about 250 MB there (default: a temporary
    directory), takes four minutes

1. Shards in a batch of 64, of 64 shards, with 4 workers: ours with ``interleave_shards(4)`` and a
   shuffle buffer in each lane; webdataset's ``unbatched().shuffle(1000).batched(64)`` after its
   loader.
2. Batches of 107 KB samples from 2 workers, with ``mix_lanes=4`` and without it, both with 4 lanes,
   in turn: raw; decoded and resized to 224 x 224, as for training (10 MB in a batch); and decoded
   to 500 x 375 (36 MB), which has no bar. The parts of tensors are copied once more, in this
   process: the larger a batch for the work that it takes, the more that costs.

Prints the figures beside their bars; exits with 1 if one is missed.
"""

import itertools
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import webdataset as wds
from bars import bar, exit_if_missed
from data import images

import wds_pipes as wp
from wds_pipes.testing import make_shards

BATCH, SHUFFLE, ROUNDS = 64, 1000, 5


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


def small(image):
    return np.asarray(image.convert("RGB").resize((224, 224)))


def throughput(urls, what) -> list[float]:
    """The time without mixing over the time with it, in rounds."""
    ratios = []
    for number in range(ROUNDS):
        seconds = {}
        for mixed in (1, 4) if number % 2 else (4, 1):
            pipe = wp.ShardList(urls, shuffle=True, seed=1).open_shards().load_tar().group_by_key()
            if what == "resized":
                pipe = pipe.decode_by_ext("pil").map_fields({"jpg": small}).to_tuple("jpg", "cls")
            if what == "decoded":
                pipe = pipe.decode_by_ext("torchrgb8").to_tuple("jpg", "cls")
            loader = wp.PipeLoader(pipe, batch_size=BATCH, num_workers=2, lanes=4, mix_lanes=mixed)
            next(iter(loader))  # starts the workers
            start = time.perf_counter()
            count = sum(1 for _ in loader)
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
        for what, times in (("raw", 8), ("resized", 1), ("decoded", 1)):
            ratios = throughput(urls * times, what)
            figure = statistics.median(ratios)
            if what == "decoded":
                print(f"  throughput with mix_lanes=4 over without, {what} {figure:.3f}")
            else:
                bar(f"throughput with mix_lanes=4 over without, {what}", figure, 0.97, least=True)
            print("    rounds:", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    exit_if_missed()


if __name__ == "__main__":
    main()
