"""A SampleList of 10^9 samples in 10^5 shards, by an index.json that is made up: how long building,
``set_epoch`` and a resume take, and how much memory; and whether the order is a permutation.

    python tests/bench/huge_order.py [DIRECTORY]      takes half a minute

Exits with 1 if a bar is missed.
"""

import gc
import json
import os
import sys
import tempfile
import time

import numpy as np
import psutil
import torch  # noqa: F401 - it is there before memory is measured
from bars import bar, exit_if_missed

import wds_pipes as wp
from wds_pipes.core.order import order_of_samples

SHARDS, EACH = 100_000, 10_000
PLACES = 1_000_000  # of the order that are looked at


def megabytes() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def make(directory: str) -> str:
    path = os.path.join(directory, "index.json")
    shards = [{"url": f"{number:06d}.tar", "nsamples": EACH, "filesize": 10**9} for number in range(SHARDS)]
    with open(path, "w") as file:
        json.dump({"wids_version": 1, "shardlist": shards}, file)
    return path


def first(pipe) -> None:
    """Begin to iterate: the order is computed, and the first shard is looked for, which is not
    there.
    """
    try:
        next(iter(pipe))
    except wp.ShardError as error:
        if "no index of offsets" not in str(error):
            raise


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        index = make(sys.argv[1] if len(sys.argv) > 1 else temporary)
        before = megabytes()
        start = time.perf_counter()
        pipe = wp.SampleList(index, shuffle=True, seed=3)
        bar("seconds to build it", time.perf_counter() - start, 1)
        start = time.perf_counter()
        pipe.set_epoch(3)
        first(pipe)
        bar("seconds to begin an epoch", time.perf_counter() - start, 1)
        state = pipe.state_dict()
        place = 7 * SHARDS * EACH // 10
        state["lanes"]["0"] |= {"delivered": place, "position": [{"inside": place}]}
        state["counts"]["delivered"] = place
        again = wp.SampleList(index, shuffle=True, seed=3)
        start = time.perf_counter()
        again.load_state_dict(state)
        first(again)
        bar("seconds to resume at 70 %", time.perf_counter() - start, 1)
        bar("MB of memory for two of them", megabytes() - before, 200)
    order = order_of_samples(SHARDS * EACH, 3, 3)
    numbers = order.numbers_at(np.arange(PLACES))
    assert len(np.unique(numbers)) == PLACES
    assert 0 <= numbers.min() <= numbers.max() < SHARDS * EACH
    assert all(order.place_of(int(number)) == place for place, number in enumerate(numbers[:1000]))
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    spread = np.bincount(numbers // (SHARDS * EACH // 1000), minlength=1000)
    bar("correlation of neighbours", abs(neighbours), 5 / PLACES**0.5)
    bar("chi-square of 1000 equal parts, in standard deviations",
        abs(((spread - PLACES / 1000) ** 2 / (PLACES / 1000)).sum() - 999) / (2 * 999) ** 0.5, 5)  # fmt: skip
    exit_if_missed()


if __name__ == "__main__":
    main()
