"""The data of the demo: generated images, or the user's own shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import is_metadata

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

SHAPES = ("disc", "ring", "square", "frame", "triangle", "plus", "cross", "rows", "columns", "checks")


def write_images(directory: Path, samples: int) -> list[str]:
    """Write images of ten kinds of shapes into at most 12 shards, always the same, and return their
    paths.
    """
    import numpy as np

    from wds_pipes.tar import ShardWriter

    rng = np.random.default_rng(0)
    directory.mkdir(exist_ok=True)
    with ShardWriter(directory / "shapes-%06d.tar", max_samples=-(-samples // 12), overwrite=True) as writer:
        for number in range(samples):
            label = int(rng.integers(len(SHAPES)))
            writer.write({"__key__": f"{number:06d}", "jpg": draw_shape(SHAPES[label], rng), "cls": label})
    return list(writer.shards)


def draw_shape(shape: str, rng: np.random.Generator, size: int = 32) -> Image.Image:
    """Draw a shape with a random colour at a random place on a noisy background."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(rng.integers(0, 160, (size, size, 3), dtype="uint8"))
    pen = ImageDraw.Draw(image)
    colour = tuple(rng.integers(96, 256, 3).tolist())
    radius = int(rng.integers(size // 5, size // 3))
    x, y = rng.integers(radius, size - radius, 2).tolist()
    left, top, right, bottom = box = (x - radius, y - radius, x + radius, y + radius)
    lines = range(-radius, radius + 1, 4)
    match shape:
        case "disc":
            pen.ellipse(box, fill=colour)
        case "ring":
            pen.ellipse(box, outline=colour, width=2)
        case "square":
            pen.rectangle(box, fill=colour)
        case "frame":
            pen.rectangle(box, outline=colour, width=2)
        case "triangle":
            pen.polygon([(x, top), (right, bottom), (left, bottom)], fill=colour)
        case "plus":
            pen.line([(x, top), (x, bottom)], fill=colour, width=3)
            pen.line([(left, y), (right, y)], fill=colour, width=3)
        case "cross":
            pen.line([(left, top), (right, bottom)], fill=colour, width=3)
            pen.line([(right, top), (left, bottom)], fill=colour, width=3)
        case "rows":
            for offset in lines:
                pen.line([(left, y + offset), (right, y + offset)], fill=colour, width=2)
        case "columns":
            for offset in lines:
                pen.line([(x + offset, top), (x + offset, bottom)], fill=colour, width=2)
        case "checks":
            for row in lines:
                for column in lines:
                    if (row + column + 2 * radius) % 8 == 0:
                        pen.rectangle((x + column, y + row, x + column + 3, y + row + 3), fill=colour)
    return image


def inspect_shards(urls: Sequence[str]) -> tuple[list[str], str, str | None]:
    """Return the shards of ``urls``, the image field (with likely alternatives), and the label
    field, if any.

    The fields are those of the first sample.

    Raises:
        click.BadParameter: the shards cannot be read or have no sample, or the sample has no image.
    """
    import wds_pipes as wp
    from wds_pipes.codecs.table import IMAGE
    from wds_pipes.stages import ShardList

    try:
        shards = ShardList(urls).urls
        first = next(iter(wp.ShardList(shards, empty_check=False).open_shards().load_tar().group_by_key()), None)
    except Exception as error:  # a storage may raise any error
        raise click.BadParameter(str(error) or repr(error), param_hint="--data") from error
    if first is None:
        raise click.BadParameter(f"there is no sample in {shards[0]}", param_hint="--data")
    names = [name for name in first if not is_metadata(name)]
    common = [name for name in ("jpg", "jpeg", "png", "webp") if name in names]
    images = common + [name for name in names if name.rpartition(".")[2] in IMAGE]
    if not images:
        message = (
            f"sample {first['__key__']!r} of {redact(first['__url__'])} has no image (jpg, png, ...); its "
            f"fields are: {', '.join(names)}"
        )
        raise click.BadParameter(message, param_hint="--data")
    label = next((name for name in ("cls", "class", "cls2") if name in names), None)
    return shards, ";".join(dict.fromkeys([images[0], "jpg", "jpeg", "png", "webp"])), label
