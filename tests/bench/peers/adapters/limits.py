"""The limits of the machine: what reading, walking over headers and decoding alone reach."""

import io
import multiprocessing
import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from peers.adapters.base import BUFFER, NO_SHUFFLE, Adapter
from peers.pictures import BATCH, SIDE, decode_image


def walk(path, window=1 << 20):
    """Yield the samples of a plain ustar shard: the simplest and fastest Python that reads one.

    It checks nothing, and knows no long names and no state: a yardstick, not a reader to use.
    """
    with open(path, "rb", buffering=0) as raw, io.BufferedReader(raw, window) as f:
        read, key, sample = f.read, None, {}
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

    lacks = NO_SHUFFLE

    def samples(self, kind, shuffle=False):
        buffer, each = bytearray(1 << 20), self.data.count(kind) // self.data.shards
        for url in self.data.urls(kind):
            size, given, done = os.path.getsize(url), 0, 0
            with open(url, "rb", buffering=0) as file:
                while read := file.readinto(buffer):
                    done += read
                    due = each * done // size  # as many samples as these bytes are
                    yield from range(due - given)
                    given = due

    def access(self, kind):
        """One read of the bytes of a sample at a known offset."""
        import numpy as np

        urls = self.data.urls(kind)
        files = [os.open(url, os.O_RDONLY) for url in urls]
        offsets = [np.fromfile(f"{url}.idx", "<u8").tolist() for url in urls]
        each = self.data.count(kind) // len(urls)

        def read(number):
            shard, place = divmod(number, each)
            start, end = offsets[shard][place : place + 2]
            return os.pread(files[shard], end - start, start)

        return read


class HeaderWalk(Adapter):
    """Walk over the headers, group by key, and copy the fields."""

    def samples(self, kind, shuffle=False):
        samples = (sample for url in self.data.urls(kind) for sample in walk(url))
        return shuffled_by_hand(samples, BUFFER) if shuffle else samples


def shuffled_by_hand(samples, size):
    """The least code that shuffles a stream in a buffer."""
    rng, buffer = random.Random(1), []
    for sample in samples:
        if len(buffer) < size:
            buffer.append(sample)
            continue
        place = int(rng.random() * size)
        yield buffer[place]
        buffer[place] = sample
    rng.shuffle(buffer)
    yield from buffer


class Decoding(Adapter):
    """Decode and resize JPEGs that are in memory already, on one core and on two, by the function
    of all rows.
    """

    def decoder(self):
        """Return the function that decodes an image."""
        return decode_image

    def decoded(self, workers, threads):
        jpegs = [fields["jpg"] for _, fields in self.data.samples("images")]
        if workers:
            with multiprocessing.Pool(workers, _begin, (self, jpegs)) as pool:
                yield from pool.imap(_decode_batch, range(0, len(jpegs), BATCH))
            return
        decode = self.decoder()
        with ThreadPoolExecutor(threads or 1) as executor:
            images = executor.map(decode, jpegs) if threads else map(decode, jpegs)
            while batch := list(islice(images, BATCH)):
                yield batch, batch


class OwnDecoding(Decoding):
    """The same in the quickest way that is known: by the decoder of this package."""

    imports = ("torch",)

    def decoder(self):
        import torch

        from wds_pipes.codecs.images import image_decoder
        from wds_pipes.codecs.resizing import Resize

        torch.set_num_threads(1)  # it resizes, in each process and thread
        return image_decoder("rgb8", 1 << 26, Resize(SIDE, "cover"))


_HELD = {}  # what a process of ``Decoding`` decodes, and by what


def _begin(adapter, jpegs):
    """Begin a process that decodes; the JPEGs are in its memory since it was forked."""
    _HELD.update(decode=adapter.decoder(), jpegs=jpegs)


def _decode_batch(start):
    """Decode one batch in this process; the images do not leave it."""
    images = [_HELD["decode"](jpeg) for jpeg in _HELD["jpegs"][start : start + BATCH]]
    return range(len(images)), None
