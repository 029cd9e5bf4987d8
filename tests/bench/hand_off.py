"""What it costs to hand batches from two workers to the main process, beside torch's DataLoader:
in one run, alternating, medians.

    python tests/bench/hand_off.py [DIRECTORY]      writes about 60 MB there (default: a temporary
    directory), takes two minutes

Both run the same pipeline, whose last step copies a batch that exists. ``collated`` is DataLoader
alone over a list of tensors: its workers stack these into shared memory. The processor time of the
main process is that of all of its threads; from it goes that of a PipeLoader that hands over
numbers.
Prints the figures beside their bars; exits with 1 if one is missed.
"""

import os
import statistics
import sys
import tempfile
import time
import warnings
from itertools import islice
from pathlib import Path

import torch
from bars import bar, exit_if_missed
from data import tiny
from torch.utils.data import DataLoader

import wds_pipes as wp

WORKERS, SLICES, SLICE = 2, 16, 10
IMAGES = torch.randint(0, 255, (64, 3, 224, 224), dtype=torch.uint8)
SMALL = {f"field {number}": torch.randn(64, 4) for number in range(114)}
ENCODED = [os.urandom(107_000) for _ in range(64)]


def nothing(batch):
    """A number instead of a batch."""
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
    running = {name: iter(source) for name, source in sources.items()}
    found = {name: ([], []) for name in running}
    for items in running.values():
        assert sum(1 for _ in islice(items, 5)) == 5
    order = list(running)
    for _ in range(SLICES):
        for name in order:
            start, own = time.perf_counter(), time.process_time()
            assert sum(1 for _ in islice(running[name], SLICE)) == SLICE
            found[name][0].append((time.perf_counter() - start) * 1e3 / SLICE)
            found[name][1].append((time.process_time() - own) * 1e3 / SLICE)
        order.reverse()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        urls = tiny(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary), shards=2)
        for make, least in ((small, 1.3), (images, 1.2), (encoded, 1.0)):
            print(f"{make.__doc__} The load of the machine is {os.getloadavg()[0]:.1f}.")
            sources = {"torch": torchs(urls, make), "ours": ours(urls, make), "numbers": ours(urls, nothing)}
            if make is images:
                sources["collated"] = collated()
            found = measure(sources)
            for name, (spent, own) in found.items():
                print(
                    f"  {name:<10}{statistics.median(spent):8.2f} ms a batch, main process "
                    f"{statistics.median(own):6.3f} ms of processor time"
                )
            for name in ("torch", "collated"):
                if name in found:
                    ratios = [other / own for own, other in zip(found["ours"][0], found[name][0], strict=True)]
                    bar(f"ours against {name}", statistics.median(ratios), least, least=True)
            if make is images:
                above = statistics.median(found["ours"][1]) - statistics.median(found["numbers"][1])
                bar("ms of the main process above a PipeLoader of numbers", above, 0.1)
    exit_if_missed()


if __name__ == "__main__":
    main()
