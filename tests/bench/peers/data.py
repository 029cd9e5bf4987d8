"""The samples to measure with: tiny ones, and samples with a JPEG of about 110 KB."""

import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KINDS = ("images", "tiny")


@dataclass(frozen=True)
class Data:
    """Shards of both kinds in a directory, made from a fixed seed.

    Args:
        directory: where ``make`` writes them, and where they are.
        images: samples of each shard of images.
        tiny: samples of each shard of tiny samples.
        shards: shards of each kind.
    """

    directory: str
    images: int = 512
    tiny: int = 10_240
    shards: int = 4

    def make(self):
        """Write the shards that do not exist, with their offsets."""
        from wds_pipes.tar import index_shards

        for urls in (
            images(self.directory, shards=self.shards, samples=self.images),
            tiny(self.directory, shards=self.shards, samples=self.tiny),
        ):
            index_shards(urls, offsets=True)

    def urls(self, kind):
        """The paths of the shards of a kind."""
        return shard_paths(self.directory, kind, self.shards)

    def count(self, kind):
        """The number of samples of a kind."""
        return self.shards * getattr(self, kind)

    def samples(self, kind):
        """Yield key and fields of all samples of a kind, in order, for other writers."""
        for url in self.urls(kind):
            yield from tar_samples(url)

    def bytes(self, kind):
        """The size of all shards of a kind."""
        return sum(map(os.path.getsize, self.urls(kind)))


def tar_samples(url):
    """Yield key and fields of the samples of a shard, read with Python's own ``tarfile``."""
    key, fields = "", {}
    with tarfile.open(url, "r|") as tar:
        for member in tar:
            own, _, extension = member.name.partition(".")
            if own != key and fields:
                yield key, fields
                fields = {}
            key, fields[extension] = own, tar.extractfile(member).read()
    yield key, fields


def shard_paths(directory, kind, shards):
    return [os.path.join(directory, kind, f"shard-{shard:06d}.tar") for shard in range(shards)]


def tiny(directory, *, shards=2, samples=50_000):
    """Write samples of a 200-byte text and a 1-byte class; return the paths of the shards."""
    import numpy as np

    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)

    def fields(rng):
        return {"txt": letters[rng.integers(0, len(letters), 200)].tobytes(), "cls": str(rng.integers(10)).encode()}

    return write(shard_paths(directory, "tiny", shards), samples, fields)


def images(directory, *, shards=4, samples=500):
    """Write samples of a 500 x 375 JPEG of about 110 KB, a class and a JSON; return the paths of
    the shards.
    """
    import numpy as np
    from PIL import Image

    def fields(rng):
        low = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        picture = np.asarray(Image.fromarray(low).resize((500, 375), Image.Resampling.BICUBIC)).astype(np.float32)
        noisy = np.clip(picture + rng.normal(0, 22, (375, 500, 1)), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        return {
            "jpg": file.getvalue(),
            "cls": str(rng.integers(1000)).encode(),
            "json": b'{"width": 500, "height": 375, "caption": "noise over a gradient"}',
        }

    return write(shard_paths(directory, "images", shards), samples, fields)


def write(paths, samples, fields):
    """Write the shards that do not exist, in threads: most of the time is spent outside Python."""
    import numpy as np

    os.makedirs(os.path.dirname(paths[0]), exist_ok=True)

    def write_shard(shard):
        path = Path(paths[shard])
        if path.exists():
            return
        rng, partial = np.random.default_rng(shard), path.with_suffix(".partial")
        with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * samples, (shard + 1) * samples):
                for name, data in fields(rng).items():
                    info = tarfile.TarInfo(f"{number:09d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        partial.rename(path)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write_shard, range(len(paths))))
    return paths
