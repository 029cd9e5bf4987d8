"""Pipelines with a bottleneck each, which ``doctor`` is to name.

What computes does so for a fixed time of the processor, and what waits sleeps: both by large
factors longer than all else, so that another load on the machine makes no difference.
"""

import contextlib
import gzip
import multiprocessing
import os
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import torch
from pictures import saved, smooth
from serving import Quiet

import wds_pipes as wp
from wds_pipes import tools
from wds_pipes.testing import make_shards

MANY_TENSORS = {f"column {number}": torch.zeros(8) for number in range(3000)}


def compute(seconds):
    """Use the processor for a time, however often other processes have it meanwhile."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def slow_lookup(sample):
    time.sleep(0.02)
    return sample


def slow_augmentation(sample):
    compute(0.003)
    return sample


def slow_collate(samples):
    compute(0.05)
    return samples


def none(sample):
    return False


def many_tensors(sample):
    return MANY_TENSORS


def pipe_of(urls, **options):
    return wp.ShardList(urls, empty_check=False).open_shards(**options).load_tar().group_by_key()


def local(folder, *, shards=4, samples=64, size=2000):
    return make_shards(folder, shards=shards, samples=samples, fields={"bin": lambda rng, _: rng.randbytes(size)})


class Store(Quiet):
    """A store of ``objects`` by their paths, which waits before each response, and sends all
    responses together at a bounded rate.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects = ()
    latency = 0.0
    rate = 0.0  # bytes a second; 0: any
    turn = None  # the lock of the link

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        time.sleep(self.latency)
        data = self.objects[self.path]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(data), int(last) + 1 if last else len(data))
        self.begin(206, {"Content-Length": stop - start, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})
        for place in range(start, 0 if self.command == "HEAD" else stop, 1 << 16):
            part = data[place : min(stop, place + (1 << 16))]
            with self.turn:
                time.sleep(len(part) / self.rate if self.rate else 0)
            self.write(part)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *request):
        pass  # a client has closed its connection


@contextlib.contextmanager
def stored(urls, **options):
    """The URLs of shards in a store, which is a process of its own."""
    objects = {f"/{os.path.basename(url)}": Path(url).read_bytes() for url in urls}
    handler = type("Handler", (Store,), {"objects": objects, "turn": threading.Lock(), **options})
    with Server(("127.0.0.1", 0), handler) as server:
        process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
        process.start()
        try:
            yield [f"http://127.0.0.1:{server.server_port}{name}" for name in objects]
        finally:
            process.kill()
            process.join()


@contextlib.contextmanager
def slow_storage(folder):
    with stored(local(folder, samples=30, size=50_000), rate=4e6) as urls:
        yield {"what": wp.PipeLoader(pipe_of(urls), batch_size=8, collate="list", num_workers=1)}


@contextlib.contextmanager
def high_latency(folder):
    with stored(local(folder, shards=64, samples=8), latency=0.05) as urls:
        yield {"what": wp.PipeLoader(pipe_of(urls), batch_size=8, collate="list")}


@contextlib.contextmanager
def compressed(folder):
    urls = make_shards(folder, shards=2, samples=64, fields={"txt": lambda rng, _: rng.randbytes(100_000).hex()})
    for url in urls:
        Path(f"{url}.gz").write_bytes(gzip.compress(Path(url).read_bytes(), 1))
    yield {"what": [f"{url}.gz" for url in urls]}


@contextlib.contextmanager
def decoding(folder):
    jpeg = saved(smooth(256, 256))
    urls = make_shards(folder, shards=4, samples=64, fields={"jpg": lambda rng, _: jpeg})
    pipe = pipe_of(urls).decode_by_ext("torchrgb8")
    yield {"what": wp.PipeLoader(pipe, batch_size=16, num_workers=2), "cores": 2}


@contextlib.contextmanager
def function(folder):
    pipe = pipe_of(local(folder)).map_samples(slow_lookup)
    yield {"what": wp.PipeLoader(pipe, batch_size=8, collate="list", num_workers=2), "cores": 8}


@contextlib.contextmanager
def collation(folder):
    yield {"what": wp.PipeLoader(pipe_of(local(folder)), batch_size=16, collate=slow_collate), "cores": 1}


@contextlib.contextmanager
def transport(folder):
    pipe = pipe_of(local(folder)).map_samples(many_tensors)
    yield {"what": wp.PipeLoader(pipe, num_workers=1), "cores": 8}


@contextlib.contextmanager
def few_workers(folder):
    pipe = pipe_of(local(folder)).map_samples(slow_augmentation)
    yield {"what": wp.PipeLoader(pipe, batch_size=8, collate="list", num_workers=1), "cores": 8}


@contextlib.contextmanager
def few_shards(folder):
    pipe = pipe_of(local(folder, shards=2)).map_samples(slow_augmentation)
    yield {"what": wp.PipeLoader(pipe, batch_size=8, collate="list", num_workers=4), "cores": 8}


@contextlib.contextmanager
def uneven_rank(folder):
    """Four ranks that train in step, one of which has a slow function."""
    urls, loaders = local(folder, samples=32), []
    for rank in range(4):
        pipe = pipe_of(urls).map_samples(slow_lookup if rank == 2 else dict)
        loaders.append(wp.PipeLoader(pipe, batch_size=8, rank=rank, world_size=4, epoch_end="exact", collate="list"))
    for _ in zip(*loaders, strict=True):
        pass
    yield {"stats": [{**loader.stats(), "rank": rank, "world_size": 4} for rank, loader in enumerate(loaders)]}


@contextlib.contextmanager
def healthy(folder):
    yield {"what": local(folder, samples=300), "cores": 8}


@contextlib.contextmanager
def slow_training(folder):
    yield {"what": local(folder), "needs": 10.0}


# each with the limit to name, and the step
PLANTS = {
    slow_storage: ("storage rate", "storage"),
    high_latency: ("storage latency", "storage"),
    compressed: ("decompression", "decompression"),
    decoding: ("decoding", "decode_by_ext('torchrgb8')"),
    function: ("function", "map_samples(slow_lookup)"),
    collation: ("collation", "batch_samples(slow_collate)"),
    transport: ("transport", "transport"),
    few_workers: ("workers", "map_samples(slow_augmentation)"),
    few_shards: ("shards", "map_samples(slow_augmentation)"),
    uneven_rank: ("rank", "rank 2"),
}
HEALTHY = {healthy: ("reading", "reading"), slow_training: ("training", "")}


def diagnosed(plant, folder, seconds):
    """What doctor says of a pipeline, and whether that is right."""
    with plant(folder) as options:
        found = tools.doctor(**options, **({} if "stats" in options else {"seconds": seconds}))
    return found, (found.limit, found.step) == {**PLANTS, **HEALTHY}[plant]
