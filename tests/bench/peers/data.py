"""The samples to measure with: tiny ones, and samples with a JPEG of about 110 KB."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

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

    @classmethod
    def quick(cls, directory: str) -> Data:
        """Few samples, for a look at the form of the results."""
        return cls(directory, images=64, tiny=512)

    def make(self) -> None:
        """Write the shards that do not exist, and the number of samples and offsets of each."""
        from wds_pipes.tar import index_shards

        for kind, write in zip(KINDS, (images, tiny)):
            write(Path(self.directory), shards=self.shards, samples=self._each(kind))
            if not os.path.exists(self.index(kind)):
                index_shards(self.urls(kind), self.index(kind), offsets=True)

    def urls(self, kind: str) -> list[str]:
        """The paths of the shards of a kind."""
        return [os.path.join(self.directory, kind, _name(shard)) for shard in range(self.shards)]

    def index(self, kind: str) -> str:
        """The path of the index of a kind, as ``index_shards`` writes it."""
        return os.path.join(self.directory, kind, "index.json")

    def count(self, kind: str) -> int:
        """The number of samples of a kind."""
        return self.shards * self._each(kind)

    def samples(self, kind: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield key and fields of all samples of a kind, in order, for other writers."""
        for url in self.urls(kind):
            yield from tar_samples(url)

    def bytes(self, kind: str) -> int:
        """The size of all shards of a kind."""
        return sum(os.path.getsize(url) for url in self.urls(kind))

    def _each(self, kind: str) -> int:
        return self.images if kind == "images" else self.tiny


def tar_samples(url: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and fields of the samples of a shard, read with Python's own ``tarfile``."""
    key, fields = "", dict[str, bytes]()
    with tarfile.open(url, "r|") as tar:
        for member in tar:
            own, _, extension = member.name.partition(".")
            if own != key and fields:
                yield key, fields
                fields = {}
            file = tar.extractfile(member)
            if file is not None:
                key, fields[extension] = own, file.read()
    if fields:
        yield key, fields


def tiny(directory: Path, *, shards: int = 2, samples: int = 50_000) -> list[str]:
    """Write samples of a 200-byte text and a 1-byte class; return the paths of the shards."""
    import numpy as np

    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)

    def fields(rng: np.random.Generator) -> dict[str, bytes]:
        return {"txt": letters[rng.integers(0, len(letters), 200)].tobytes(), "cls": str(rng.integers(10)).encode()}

    return _write(directory / "tiny", shards, samples, fields)


def images(directory: Path, *, shards: int = 4, samples: int = 500) -> list[str]:
    """Write samples of a 500 x 375 JPEG of about 110 KB, a class and a JSON; return the paths of
    the shards.
    """
    import numpy as np
    from PIL import Image

    def fields(rng: np.random.Generator) -> dict[str, bytes]:
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

    return _write(directory / "images", shards, samples, fields)


def _name(shard: int) -> str:
    return f"shard-{shard:06d}.tar"


def _write(
    directory: Path, shards: int, samples: int, fields: Callable[[np.random.Generator], dict[str, bytes]]
) -> list[str]:
    """Write the shards that do not exist, in threads: most of the time is spent outside Python."""
    import numpy as np

    directory.mkdir(parents=True, exist_ok=True)

    def write(shard: int) -> str:
        path = directory / _name(shard)
        if not path.exists():
            rng = np.random.default_rng(shard)
            partial = path.with_suffix(".partial")
            with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
                for number in range(shard * samples, (shard + 1) * samples):
                    for name, data in fields(rng).items():
                        info = tarfile.TarInfo(f"{number:09d}.{name}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
            partial.rename(path)
        return str(path)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(write, range(shards)))
