"""Decoded batches of 224 x 224 images on two cores, with two workers and with two threads, against
decoding and resizing alone on both cores, and against webdataset with two workers, in one run.

    python tests/bench/decoded.py [DIRECTORY]      writes about 140 MB there (default: a temporary
    directory), takes four minutes

"by hand" is the least code that decodes shards. In threads: one thread reads samples and stacks
batches, two decode. In processes: each of two reads every second shard with a loop that checks
nothing, decodes, and copies into shared memory. They show what a loader can reach.

The limit is the decoder of ``decode_by_ext("rgb8", size=224)`` itself, called in two threads or in
two processes, whichever has the least median, on JPEGs that are in memory. "alone again" is the
same as "alone in threads": their ratio says what the noise of the machine does to such a figure.
(The quicker of both in each round is no limit. On a machine whose speed changes by a tenth, it is
about 4 % quicker than either of them, and so than a loader that does nothing but decode.)

Loaders are measured from one batch in the middle of an epoch to another: at both times, as many
batches are in flight. Rounds alternate, and the figures are medians of the ratios of the rounds: of
the clock, which has the bars and needs a machine that does nothing else, and of processor time,
which other programs disturb less. Exits with 1 if a bar is missed.
"""

import gc
import itertools
import mmap
import multiprocessing
import os
import statistics
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
import webdataset
from bars import bar, directory, exit_if_missed, in_turn, median_ratio, processor_seconds
from peers.data import images
from peers.pictures import resize_with_pillow

import wds_pipes as wp
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.resizing import read_resize

BATCH, CORES, SIDE, ROUNDS = 64, 2, 224, 11
SHARDS, SAMPLES = 4, 320
FIRST, LAST = 4, 32  # of the 40 batches of an epoch, which reads the shards twice

decode = Decoding(("rgb8",), allow_pickle=False, max_image_pixels=1 << 26, resize=read_resize(SIDE, "cover")).decoder(
    "jpg"
)


def decode_all(photographs) -> None:
    for data in photographs:
        decode(data)


def alone_in_threads(photographs) -> None:
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(decode_all, (photographs[number::CORES] for number in range(CORES))))


def alone_in_processes(photographs) -> None:
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=decode_all, args=(photographs[number::CORES],)) for number in range(CORES)]
    for process in both:
        process.start()
    for process in both:
        process.join()


def by_hand_in_threads(urls):
    """Batches that an executor of two threads decodes, a batch ahead."""

    def images():
        ahead = deque()
        with ThreadPoolExecutor(CORES) as pool:
            for sample in wp.ShardList(urls).open_shards().load_tar().group_by_key(fields=["jpg", "cls"]):
                ahead.append((pool.submit(decode, sample["jpg"]), int(sample["cls"])))
                if len(ahead) > BATCH:
                    yield ahead.popleft()
            yield from ahead

    found = images()
    while batch := [(image.result(), label) for image, label in itertools.islice(found, BATCH)]:
        yield np.stack([image for image, _ in batch]), [label for _, label in batch]


def by_hand_in_processes(urls):
    """Batches that two processes decode and copy into shared memory, by the least code: it checks
    nothing of the tars. Each has room for three batches, and sends their numbers through a pipe.
    """
    fork, room = multiprocessing.get_context("fork"), 3
    pixels = [mmap.mmap(-1, room * BATCH * SIDE * SIDE * 3) for _ in range(CORES)]
    rows = [np.frombuffer(memory, np.uint8).reshape(room, BATCH, SIDE, SIDE, 3) for memory in pixels]
    pipes = [fork.Pipe() for _ in range(CORES)]

    def decode_shards(number: int) -> None:
        batches, mine = rows[number], pipes[number][1]
        place = count = 0
        labels = []
        for url in urls[number::CORES]:
            with open(url, "rb") as stream:
                while (head := stream.read(512))[:1] != b"\0":
                    size = int(head[124:135], 8)
                    data = stream.read(size)
                    stream.read(-size % 512)
                    field = head[: head.index(0)].rpartition(b".")[2]
                    if field == b"jpg":
                        batches[place, count] = decode(data)
                    elif field == b"cls":
                        labels.append(int(data))
                        count += 1
                        if count == BATCH:
                            mine.send((place, labels))
                            place, count, labels = (place + 1) % room, 0, []
                            mine.recv()
        mine.send(None)

    workers = [fork.Process(target=decode_shards, args=(number,)) for number in range(CORES)]
    for (end, _), worker in zip(pipes, workers, strict=True):
        worker.start()
        for _ in range(room - 1):
            end.send(None)
    for number in itertools.cycle(range(CORES)):
        found = pipes[number][0].recv()
        if found is None:
            break
        yield rows[number][found[0]], found[1]
        pipes[number][0].send(None)
    for worker in workers:
        worker.kill()
        worker.join()


def ours(urls, **options):
    raw = wp.ShardList(urls).open_shards().load_tar().group_by_key(fields=["jpg", "cls"])
    pipe = raw.decode_by_ext("rgb8", size=SIDE, threads=options.pop("threads", None)).to_tuple("jpg", "cls")
    return wp.PipeLoader(pipe, batch_size=BATCH, **options)


def webdataset_loader(urls, decoder):
    raw = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    raw = raw if decoder is decode else raw.decode("pil")
    pipe = raw.to_tuple("jpg", "cls").map_tuple(decoder, int)
    return webdataset.WebLoader(pipe.batched(BATCH), batch_size=None, num_workers=CORES)


def seconds_of_a_sample(loader) -> float:
    """Clock seconds for each sample between two batches."""
    times = []
    for _ in loader:
        times.append(time.perf_counter())
    return (times[LAST] - times[FIRST]) / (LAST - FIRST) / BATCH


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with directory() as place:
        urls = images(place, shards=SHARDS, samples=SAMPLES)
        photographs = [
            sample["jpg"] for sample in wp.ShardList(urls).open_shards().load_tar().group_by_key(fields=["jpg"])
        ]

        def alone(run):
            start = time.perf_counter()
            run(photographs)
            return (time.perf_counter() - start) / len(photographs)

        def epoch(make, **options):
            loader = make(urls * 2, **options)
            found = seconds_of_a_sample(loader)
            getattr(loader, "close", lambda: None)()
            return found

        def measured(way, *what, **options):
            gc.collect()
            before = processor_seconds()
            seconds = way(*what, **options)
            samples = len(photographs) * (1 if way is alone else 2)
            return seconds, (processor_seconds() - before) / samples

        ways = {
            "alone in threads": partial(measured, alone, alone_in_threads),
            "alone again": partial(measured, alone, alone_in_threads),
            "alone in processes": partial(measured, alone, alone_in_processes),
            "by hand in threads": partial(measured, epoch, by_hand_in_threads),
            "by hand in processes": partial(measured, epoch, by_hand_in_processes),
            "threads": partial(measured, epoch, ours, threads=CORES),
            "workers": partial(measured, epoch, ours, num_workers=CORES),
            "webdataset, same function": partial(measured, epoch, webdataset_loader, decoder=decode),
            "webdataset and Pillow": partial(measured, epoch, webdataset_loader, decoder=resize_with_pillow),
        }
        found = in_turn(ways, ROUNDS)
    clock = {name: [seconds for seconds, _ in rounds] for name, rounds in found.items()}
    used = {name: [seconds for _, seconds in rounds] for name, rounds in found.items()}
    print(f"load {os.getloadavg()[0]:.1f} at the end; decoded 224 x 224, batches of {BATCH}, {CORES} cores")
    for name, seconds in clock.items():
        print(
            f"  {name:<27}{1 / statistics.median(seconds):>8,.0f} samples/s"
            f"{statistics.median(used[name]) * 1e6:>8,.0f} us of a processor"
        )
    limit = min(("alone in threads", "alone in processes"), key=lambda name: statistics.median(clock[name]))
    print(f"the limit: {limit}")

    def ratio(times, one, other):
        return median_ratio(times[one], times[other])

    for one, least in ((limit, 0.95), ("webdataset, same function", 1.15), ("webdataset and Pillow", 1.9)):
        for other in ("workers", "threads"):
            bar(f"{one} over {other}", ratio(clock, one, other), least, least=True)
            print(f"    of processor time {ratio(used, one, other):.3f}")
    bar("by hand in processes over workers", ratio(clock, "by hand in processes", "workers"), 0.95, least=True)
    bar("by hand in threads over threads", ratio(clock, "by hand in threads", "threads"), 0.95, least=True)
    print(f"  alone in threads over alone again {ratio(clock, 'alone in threads', 'alone again'):.3f}")
    for other in ("by hand in processes", "by hand in threads"):
        print(f"  {limit} over {other} {ratio(clock, limit, other):.3f}")
    exit_if_missed()


if __name__ == "__main__":
    main()
