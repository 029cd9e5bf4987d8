"""The limits of the machine: what reading, walking over headers and decoding alone reach."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from peers.adapters.base import Adapter
from peers.data import tar_samples
from peers.pictures import BATCH, SIDE, decode_image


def walk(path: str, window: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """Yield the samples of a plain ustar shard: the simplest and fastest Python that reads one.

    It checks nothing, and knows no long names and no state: a yardstick, not a reader to use.
    """
    with open(path, "rb", buffering=0) as raw, io.BufferedReader(raw, window) as f:
        read, key, sample = f.read, None, dict[str, Any]()
        while True:
            head = read(512)
            if len(head) < 512 or head[0] == 0:
                break
            name = head[: head.index(0)].decode()
            length = int(head[124:135], 8)
            data = read(length)
            pad = -length & 511
            if pad:
                read(pad)
            dot = name.find(".", name.rfind("/") + 1)
            if name[:dot] != key:
                if sample:
                    yield sample
                key = name[:dot]
                sample = {"__key__": key}
            sample[name[dot + 1 :]] = data
        if sample:
            yield sample


class Reading(Adapter):
    """Read the shards into one buffer of 1 MiB, and look at nothing."""

    def raw(self, kind: str) -> Iterable[Any]:
        buffer, each = bytearray(1 << 20), self.data.count(kind) // self.data.shards
        for url in self.data.urls(kind):
            size, given = os.path.getsize(url), 0
            with open(url, "rb", buffering=0) as file:
                done = 0
                while read := file.readinto(buffer):
                    done += read
                    due = each * done // size  # as many samples as these bytes are
                    yield from range(due - given)
                    given = due

    def access(self, kind: str) -> Callable[[int], Any]:
        """One read of the bytes of a sample at a known offset."""
        import numpy as np

        urls = self.data.urls(kind)
        files = [os.open(url, os.O_RDONLY) for url in urls]
        offsets = [np.fromfile(f"{url}.idx", "<u8").tolist() for url in urls]
        each = self.data.count(kind) // len(urls)

        def read(number: int) -> bytes:
            shard, place = divmod(number, each)
            start, end = offsets[shard][place : place + 2]
            return os.pread(files[shard], end - start, start)

        return read


class HeaderWalk(Adapter):
    """Walk over the headers, group by key, and copy the fields."""

    def raw(self, kind: str) -> Iterable[Any]:
        for url in self.data.urls(kind):
            yield from walk(url)

    def shuffled(self, kind: str) -> Iterable[Any]:
        """With a classical shuffle buffer of 1 000 samples."""
        rng, buffer = random.Random(1), list[Any]()
        for sample in self.raw(kind):
            if len(buffer) < 1000:
                buffer.append(sample)
                continue
            place = int(rng.random() * 1000)
            yield buffer[place]
            buffer[place] = sample
        yield from buffer


class Decoding(Adapter):
    """Decode and resize JPEGs that are in memory already, on one core and on two, by the function
    of all rows.
    """

    @staticmethod
    def decoder() -> Callable[[bytes], Any]:
        """Return the function that decodes an image."""
        return decode_image

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        if workers:
            seconds = _seconds_in_processes(type(self), self.data.urls("images"), workers)
            yield Measured(self.data.count("images") / seconds)
            return
        jpegs, decode = [fields["jpg"] for _, fields in self.data.samples("images")], self.decoder()
        if threads:
            with ThreadPoolExecutor(threads) as executor:
                results = executor.map(decode, jpegs)
                while batch := list(islice(results, BATCH)):
                    yield batch, batch
        else:
            for start_at in range(0, len(jpegs), BATCH):
                batch = [decode(jpeg) for jpeg in jpegs[start_at : start_at + BATCH]]
                yield batch, batch


class OwnDecoding(Decoding):
    """The same in the quickest way that is known: by the decoder of this package."""

    imports = ("torch",)

    @staticmethod
    def decoder() -> Callable[[bytes], Any]:
        import torch

        from wds_pipes.codecs.images import image_decoder
        from wds_pipes.codecs.resizing import Resize

        torch.set_num_threads(1)  # it resizes, in each process and thread
        return image_decoder("rgb8", 1 << 26, Resize(SIDE, "cover"))


class Measured(float):
    """A rate in samples per second, measured by the adapter itself."""


def _seconds_in_processes(kind: type[Decoding], urls: list[str], count: int) -> float:
    """Decode the images of all shards in processes that begin together; return the seconds."""
    barrier = multiprocessing.Barrier(count)
    results: Any = multiprocessing.SimpleQueue()
    processes = [
        multiprocessing.Process(target=_decode, args=(kind, urls[number::count], barrier, results))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    starts, ends = zip(*(results.get() for _ in processes))
    for process in processes:
        process.join()
    return float(max(ends) - min(starts))


def _decode(kind: type[Decoding], urls: list[str], barrier: Any, results: Any) -> None:
    jpegs = [fields["jpg"] for url in urls for _, fields in tar_samples(url)]
    decode = kind.decoder()
    for jpeg in jpegs[:4]:  # libraries are loaded then
        decode(jpeg)
    barrier.wait()
    start = time.monotonic()
    for jpeg in jpegs:
        decode(jpeg)
    results.put((start, time.monotonic()))
