"""The images of the demo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from wds_pipes.tar import ShardWriter

CLASSES = 10


def write_images(directory: Path, samples: int) -> list[str]:
    """Write images of ten kinds of shapes into at most 12 shards, always the same, and return their
    paths.
    """
    rng = np.random.default_rng(0)
    directory.mkdir(exist_ok=True)
    with ShardWriter(directory / "shapes-%06d.tar", max_samples=-(-samples // 12), overwrite=True) as writer:
        for number in range(samples):
            label = int(rng.integers(CLASSES))
            writer.write({"__key__": f"{number:06d}", "jpg": draw_shape(label, rng), "cls": label})
    return list(writer.shards)


def draw_shape(label: int, rng: np.random.Generator, size: int = 32) -> Image.Image:
    """Draw a polygon of 3 to 7 sides, filled or not, with a random colour at a random place on a
    noisy background.
    """
    image = Image.fromarray(rng.integers(0, 160, (size, size, 3), dtype="uint8"))
    colour = tuple(rng.integers(96, 256, 3).tolist())
    radius = int(rng.integers(size // 5, size // 3))
    x, y = rng.integers(radius, size - radius, 2).tolist()
    fill = colour if label < CLASSES // 2 else None
    ImageDraw.Draw(image).regular_polygon((x, y, radius), 3 + label % 5, fill=fill, outline=colour)
    return image
