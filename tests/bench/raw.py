"""Raw reading in one process, warm cache: this package against webdataset and the plain walker, in
one run, alternating; medians.

    python tests/bench/raw.py [DIRECTORY]      writes about 280 MB there (default: a temporary
    directory), takes two minutes

Prints the rates and ratios, what shuffling and a state cost, and memory over 20 epochs; exits with
1 if a bar is missed.
"""

import gc
import itertools
import json
import os
import statistics
import time
import warnings
from functools import partial

import psutil
import webdataset
from bars import bar, directory, exit_if_missed, in_turn
from peers.adapters.limits import shuffled_by_hand, walk
from peers.data import images, tiny

import wds_pipes as wp

SHUFFLED = 10_000  # the buffer
BATCHES, STATES = 800, 2_000  # of 64 tiny samples, about half of the epoch; how often its state is taken


def measure(makers, rounds: int) -> dict[str, float]:
    """The median samples per second of an epoch of each reader, measured in turn."""

    def rate(make):
        gc.collect()
        start = time.perf_counter()
        count = sum(1 for _ in make())
        return count / (time.perf_counter() - start)

    rates = in_turn({name: partial(rate, make) for name, make in makers.items()}, rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in medians.items():
        print(f"  {name:<22}{value:>12,.0f} samples/s")
    return medians


def raw(urls):
    return wp.ShardList(urls).open_shards().load_tar().group_by_key()


def ways(urls):
    return {
        "plain walker": lambda: (sample for url in urls for sample in walk(url)),
        "webdataset": lambda: webdataset.WebDataset(urls, shardshuffle=False, empty_check=False),
        "wds_pipes": lambda: raw(urls),
    }


def state_seconds(urls) -> tuple[float, float, float]:
    """Return the median seconds of a batch, of its state, and of a first batch after loading it."""

    def make():
        return raw(urls).shuffle_buffer(SHUFFLED).decode_by_ext().batch_samples(64, collate="list")

    found = []
    for _ in range(5):
        gc.collect()
        pipe = make()
        items = iter(pipe)
        times = [time.perf_counter()]
        for _ in range(BATCHES):
            next(items)
        times.append(time.perf_counter())
        for _ in range(STATES):
            state = pipe.state_dict()
        times.append(time.perf_counter())
        resumed = make()
        resumed.load_state_dict(state)
        next(iter(resumed))
        times.append(time.perf_counter())
        found.append([end - start for start, end in itertools.pairwise(times)])
    bar("size of a state, bytes", len(json.dumps(state)), 1024)
    reading, states, loading = (statistics.median(times) for times in zip(*found, strict=True))
    return reading / BATCHES, states / STATES, loading


def main() -> None:
    warnings.simplefilter("ignore")  # of webdataset, which leaves files open
    with directory() as place:
        small, large = tiny(place), images(place)

        print("tiny samples (200-byte text, class)")
        shuffles = {
            "wds_pipes, shuffled": lambda: raw(small).shuffle_buffer(SHUFFLED),
            "shuffled by hand": lambda: shuffled_by_hand(raw(small), SHUFFLED),
        }
        found = measure({**ways(small), **shuffles}, 7)
        bar("against webdataset", found["wds_pipes"] / found["webdataset"], 10, least=True)
        bar("against the walker", found["wds_pipes"] / found["plain walker"], 0.45, least=True)
        bar("shuffled, against by hand", found["wds_pipes, shuffled"] / found["shuffled by hand"], 0.95, least=True)
        fills = SHUFFLED / found["wds_pipes"]

        print("images (110 KB JPEG, class, JSON)")
        found = measure(ways(large), 7)
        bar("against webdataset", found["wds_pipes"] / found["webdataset"], 4.5, least=True)

        print("state (seven stages, shuffled)")
        batch, one_state, resumed = state_seconds(small)
        bar("state_dict() against a batch of 64", one_state / batch, 0.05)
        bar("first batch at half of the epoch, against filling the buffer", resumed / fills, 4)

        print("20 epochs")
        process, descriptors = psutil.Process(), len(os.listdir("/proc/self/fd"))
        pipe, sizes = raw(large).shuffle_buffer(100), []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(20):
                for _sample in pipe:
                    pass
                gc.collect()
                sizes.append(process.memory_info().rss)
        bar("warnings", len(warned), 0)
        bar("memory after the last epoch against the first", sizes[-1] / sizes[0], 1.05)
        bar("file descriptors left", len(os.listdir("/proc/self/fd")) - descriptors, 0)
    exit_if_missed()


if __name__ == "__main__":
    main()
