"""What it costs to hand batches from two workers to the main process, beside torch's DataLoader:
in one run, alternating, medians.

    python tests/bench/hand_off.py [DIRECTORY]      writes about 120 MB there (default: a temporary
    directory), takes three minutes

Both run the same pipeline, whose last step copies a batch that exists. ``collated`` is DataLoader
alone over a list of tensors: its workers stack these into shared memory. The processor time of the
main process is that of all of its threads, from one batch to the next, with that of DataLoader's
queues. ``made`` is a PipeLoader whose workers make the same batch, and hand over a number instead:
what the main process needs beyond it is the cost of the batch, and what the copy into the block
costs it. For ``copied`` they also copy the batch once more, as into a block, which leaves the cost
of the batch alone. Beyond ``numbers``, whose workers make nothing, there is also what all copies in
the workers cost the main process: they replace what it had in the processor's caches, and it sleeps
and is woken for each batch. ``least`` and ``least made`` are these numbers from DataLoader: what it
needs for any batch at all. Slices are of 40 batches: after another loader had its turn, the code of
this one has to come back into the caches too, which would count with shorter ones.

Last, the processor time of one worker's batch of 64 JPEGs, by its parts: of decoding and resizing
alone, of stacking the samples together and of copying the batch into a block. ``batch_samples``
copies each image as it comes, into the block, instead of both. A decoder that wrote into rows of a
batch was built and measured before that, in one process: 0 to 2 % quicker than stacking images of
500 x 375 that are resized to 224 x 224, 2 to 5 % with images that have this size. The memory of the
batch is written once either way. This is why decoders know nothing of batches.
Prints the figures beside their bars; exits with 1 if one is missed.
"""

import os
import pickle
import statistics
import time
import warnings
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler

import torch
from bars import bar, directory, exit_if_missed, in_turn, median_ratio
from peers.data import images as make_images
from peers.data import tiny
from torch.utils.data import DataLoader

import wds_pipes as wp
from wds_pipes.loader.transport import Inbox, Outbox
from wds_pipes.stages.collating import stack_samples

WORKERS, SLICES, SLICE = 2, 10, 40
BLOCKS: list[torch.Tensor] = []
IMAGES = torch.randint(0, 255, (64, 3, 224, 224), dtype=torch.uint8)
SMALL = {f"field {number}": torch.randn(64, 4) for number in range(114)}
ENCODED = [os.urandom(107_000) for _ in range(64)]


def nothing(batch):
    """A number instead of a batch."""
    return 0


def made(batch):
    """A number, after making the batch of ``images``."""
    images(batch)
    return 0


def copied(batch):
    """A number, after making the batch of ``images``, and copying it to one of three blocks."""
    pixels, _ = images(batch)
    if not BLOCKS:
        BLOCKS.extend(torch.empty_like(pixels) for _ in range(3))
    BLOCKS.append(BLOCKS.pop(0).copy_(pixels))
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


def copies(place, batches=6):
    """Print the processor time of decoding batches, stacking them, and copying them into blocks."""
    urls = make_images(place, shards=1)
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key().decode_by_ext("rgb8", size=(224, 224))
    samples = iter(pipe.to_tuple("jpg", "cls"))
    inbox = Inbox(100)
    outbox = Outbox()
    spent = [[], [], []]
    for _ in range(batches):
        times = [time.thread_time()]
        batch = list(islice(samples, 64))
        times.append(time.thread_time())
        stacked = stack_samples(batch)
        times.append(time.thread_time())
        parcel = outbox.pack(stacked)
        times.append(time.thread_time())
        for part, start, end in zip(spent, times, times[1:], strict=False):
            part.append((end - start) * 1e3)
        inbox.open(pickle.loads(ForkingPickler.dumps(parcel)))  # gives the block back
    decoding, *others = (statistics.median(part) for part in spent)
    print(f"64 JPEGs to 224 x 224, in one worker: {decoding:.1f} ms of processor time to decode and resize")
    for what, part in zip(("stacking the samples", "copying the batch into its block"), others, strict=True):
        print(f"  {what:<34}{part:6.2f} ms, {part / decoding:.1%} of it")


def main() -> None:
    warnings.simplefilter("ignore")
    with directory() as place:
        urls = tiny(place, shards=2)
        for make, least in ((small, 1.3), (images, 1.2), (encoded, 1.0)):
            print(f"{make.__doc__} The load of the machine is {os.getloadavg()[0]:.1f}.")
            sources = {"torch": torchs(urls, make), "ours": ours(urls, make), "numbers": ours(urls, nothing)}
            if make is images:
                sources |= {"made": ours(urls, made), "copied": ours(urls, copied), "collated": collated()}
                sources |= {"least": torchs(urls, nothing), "least made": torchs(urls, made)}
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
                for other in ("made", "copied", "numbers"):
                    beyond = statistics.median(found["ours"][1]) - statistics.median(found[other][1])
                    if other == "made":
                        bar("ms of the main process beyond 'made'", beyond, 0.1)
                    else:
                        print(f"  ms of the main process beyond {other!r} {beyond:.3f}")
        copies(place)
    exit_if_missed()


if __name__ == "__main__":
    main()
