"""Shards to measure with: many tiny samples, and samples with a JPEG of about 110 KB.

Written once, into a directory that is kept.
"""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def tiny(directory: Path, *, shards: int = 2, samples: int = 50_000) -> list[str]:
    """Samples of a 200-byte text and a 1-byte class."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)

    def fields(rng: np.random.Generator) -> dict[str, bytes]:
        return {"txt": letters[rng.integers(0, len(letters), 200)].tobytes(), "cls": str(rng.integers(10)).encode()}

    return _write(directory / "tiny", shards, samples, fields)


def images(directory: Path, *, shards: int = 4, samples: int = 500) -> list[str]:
    """Samples of a 500 x 375 JPEG of about 110 KB, a class and a JSON."""

    def fields(rng: np.random.Generator) -> dict[str, bytes]:
        low = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        picture = np.asarray(Image.fromarray(low).resize((500, 375), Image.Resampling.BICUBIC)).astype(np.float32)
        noisy = np.clip(picture + rng.normal(0, 28, (375, 500, 1)), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        return {
            "jpg": file.getvalue(),
            "cls": str(rng.integers(1000)).encode(),
            "json": b'{"width": 500, "height": 375, "caption": "noise over a gradient"}',
        }

    return _write(directory / "images", shards, samples, fields)


def _write(directory: Path, shards: int, samples: int, fields) -> list[str]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(shards):
        path = directory / f"shard-{shard:06d}.tar"
        paths.append(str(path))
        if path.exists():
            continue
        rng = np.random.default_rng(shard)
        partial = path.with_suffix(".partial")
        with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * samples, (shard + 1) * samples):
                for name, data in fields(rng).items():
                    info = tarfile.TarInfo(f"{number:09d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        partial.rename(path)
    return paths


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(*tiny(where), *images(where), sep="\n")
