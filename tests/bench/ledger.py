"""What the ledger of PipeLoader costs: with and without it, in one run, alternating slices of one
epoch, in one process; the processor time of the slices that other processes disturbed least.

    python tests/bench/ledger.py [DIRECTORY]      writes about 280 MB there (default: a temporary
    directory), takes two minutes

Prints the figures beside their bars; exits with 1 if one is missed.
"""

import gc
import itertools
import statistics
import time
from functools import partial

from bars import bar, directory, exit_if_missed, in_turn
from peers.data import images, tiny

import wds_pipes as wp

BATCH, SLICES = 64, 30


def shuffled(urls):
    pipe = wp.ShardList(urls, shuffle=True, seed=1).open_shards().load_tar().group_by_key()
    return pipe.shuffle_buffer(1000)


def raw(urls):
    return wp.ShardList(urls, shuffle=True, seed=1).open_shards().load_tar().group_by_key()


def decoded(urls):
    return shuffled(urls).decode_by_ext("torchrgb8", size=224).to_tuple("jpg", "cls")


def cost(make, urls, steps, slices, *, size=BATCH, path=None):
    """Print the microseconds of a sample without and with a ledger; return how much more it is."""

    def read(items):
        gc.collect()
        start = time.process_time()
        assert sum(1 for _ in itertools.islice(items, steps)) == steps
        return time.process_time() - start

    collate = None if make is decoded else "columns"
    ways = {}
    for name, ledger in (("without", False), ("with", path or True)):
        loader = wp.PipeLoader(make(urls), batch_size=size, collate=collate, ledger=ledger, epoch_end="loop")
        items = iter(loader)
        for _ in itertools.islice(items, steps):
            pass
        ways[name] = partial(read, items)
    spent = in_turn(ways, slices)
    one, other = (statistics.quantiles(values, n=10)[0] / steps / size * 1e6 for values in spent.values())
    more = other / one - 1
    print(f"    {one:.2f} us a sample, {other:.2f} with a ledger: {other - one:+.2f} us, {100 * more:+.1f} %")
    return more


def main() -> None:
    with directory() as place:
        small, large = tiny(place, shards=4), images(place)
        print("  tiny samples (200-byte text, class), raw, batches of 64, 256, and 64 with a file")
        bar("more processor time", cost(raw, small, 40, SLICES), 0.25)
        bar("more processor time", cost(raw, small, 10, SLICES, size=256), 0.25)
        bar("more processor time", cost(raw, small, 40, SLICES, path=place / "a.ledger"), 0.4)
        print("  the same, shuffled")
        bar("more processor time", cost(shuffled, small, 40, SLICES), 0.25)
        print("  images (110 KB JPEG, class, JSON), raw, shuffled")
        bar("more processor time", cost(shuffled, large, 5, SLICES // 3), 0.25)
        print("  images, decoded to 224 x 224")
        bar("more processor time", cost(decoded, large, 3, SLICES // 3), 0.01)
    exit_if_missed()


if __name__ == "__main__":
    main()
