"""What it costs to hand batches from two workers to the main process, beside torch's DataLoader:
in one run, alternating, medians.

    python tests/bench/hand_off.py [DIRECTORY]      writes about 30 MB there (default: a temporary
    directory), takes two minutes

Both run the same pipeline, whose last step copies a batch that exists. ``collated`` is DataLoader
alone over a list of tensors: its workers stack these into shared memory. The processor time of the
main process is that of all of its threads, from one batch to the next, with that of DataLoader's
queues. ``made`` is a PipeLoader whose workers make the same batch, and hand over a number instead:
what the main process needs beyond it is the cost of the batch, and what the copy into the block
costs it. Slices are of 40 batches: after another loader had its turn, the code of this one has to
come back into the caches too, which would count with shorter ones.
Prints the figures beside their bars; exits with 1 if one is missed.
"""

import os
import statistics
import time
import warnings
from functools import partial
from itertools import islice

import torch
from bars import bar, directory, exit_if_missed, in_turn, median_ratio
from peers.data import tiny
from torch.utils.data import DataLoader

import wds_pipes as wp

WORKERS, SLICES, SLICE = 2, 10, 40
IMAGES = torch.randint(0, 255, (64, 3, 224, 224), dtype=torch.uint8)
SMALL = {f"field {number}": torch.randn(64, 4) for number in range(114)}
ENCODED = [os.urandom(107_000) for _ in range(64)]


def made(batch):
    """A number, after making the batch of ``images``."""
    images(batch)
    return 0


def small(batch):
    """114 small tensors."""
    return {name: tensor.clone() for name, tensor in SMALL.items()}


def images(batch):
    """64 x 3 x 224 x 224 uint8, with labels."""
    return IMAGES.clone(), torch.arange(64)


def encoded(batch):
    """64 encoded images of 107 KB."""
    return [bytes(memoryview(image)) for image in ENCODED]


def pipe(urls, make):
    return wp.ShardList(urls).open_shards().load_tar().group_by_key().batch_samples(2).map_samples(make)


def torchs(urls, make):
    """The pipeline in torch's DataLoader."""
    return DataLoader(pipe(urls, make), batch_size=None, num_workers=WORKERS)


def ours(urls, make):
    """The same in PipeLoader."""
    return wp.PipeLoader(pipe(urls, make), num_workers=WORKERS)


def collated():
    """DataLoader that stacks 64 tensors into shared memory."""
    return DataLoader(list(IMAGES) * 10_000, batch_size=64, num_workers=WORKERS)


def measure(sources):
    """Return the milliseconds per batch, and those of the main process, of each slice."""

    def read(items):
        start, own = time.perf_counter(), time.process_time()
        assert sum(1 for _ in islice(items, SLICE)) == SLICE
        return (time.perf_counter() - start) * 1e3 / SLICE, (time.process_time() - own) * 1e3 / SLICE

    running = {name: iter(source) for name, source in sources.items()}
    for items in running.values():
        assert sum(1 for _ in islice(items, 5)) == 5
    found = in_turn({name: partial(read, items) for name, items in running.items()}, SLICES)
    return {name: tuple(zip(*slices, strict=True)) for name, slices in found.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    with directory() as place:
        urls = tiny(place, shards=2)
        for make, least in ((small, 1.3), (images, 1.2), (encoded, 1.0)):
            print(f"{make.__doc__} The load of the machine is {os.getloadavg()[0]:.1f}.")
            sources = {"torch": torchs(urls, make), "ours": ours(urls, make)}
            if make is images:
                sources |= {"made": ours(urls, made), "collated": collated()}
            found = measure(sources)
            for name, (spent, own) in found.items():
                print(
                    f"  {name:<11}{statistics.median(spent):8.2f} ms a batch, main process "
                    f"{statistics.median(own):6.3f} ms of processor time"
                )
            for name in ("torch", "collated"):
                if name in found:
                    bar(f"ours against {name}", median_ratio(found[name][0], found["ours"][0]), least, least=True)
            if make is images:
                beyond = statistics.median(found["ours"][1]) - statistics.median(found["made"][1])
                bar("ms of the main process beyond 'made'", beyond, 0.1)
    exit_if_missed()


if __name__ == "__main__":
    main()
