"""JPEG, decoded by simplejpeg if it is installed: the pixels of Pillow, in less time."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from wds_pipes.codecs.resizing import Pixels, Resize, scale_for

# What simplejpeg and Pillow decode to the same pixels: mode of the result, colours of the file.
_SAME = {("RGB", "YCbCr"), ("RGB", "RGB"), ("RGB", "Gray"), ("RGBA", "YCbCr"), ("RGBA", "RGB"), ("L", "Gray")}
_COLOURS = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}
START = b"\xff\xd8\xff"  # of every JPEG


@functools.cache
def simplejpeg() -> Any:
    """The simplejpeg package; None if it is missing or cannot be loaded."""
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None


def decode_jpeg(data: bytes, mode: str, max_pixels: int, resize: Resize | None) -> Pixels | None:
    """Decode a JPEG with simplejpeg, and resize it.

    simplejpeg releases the GIL, and uses the same library as Pillow (libjpeg-turbo) with the same
    settings. What libjpeg-turbo warns of is left to Pillow, which decides whether it is damaged.

    Args:
        data: the JPEG.
        mode: ``"L"``, ``"RGB"`` or ``"RGBA"``.
        max_pixels: refuse a larger image.
        resize: the size of the result; None: that of the image.

    Returns:
        An array of shape (H, W) or (H, W, C); None if Pillow has to decode it.

    Raises:
        ValueError: it has too many pixels.
    """
    library = simplejpeg()
    if library is None:
        return None
    try:
        height, width, colours, _ = library.decode_jpeg_header(data)
    except ValueError:
        return None
    if (mode, colours) not in _SAME:
        return None
    check_pixels(width, height, max_pixels)
    options = {} if resize is None else _options(resize, width, height)
    try:
        array: Pixels = library.decode_jpeg(data, _COLOURS[mode], **options)
    except ValueError:
        return None
    array = array[..., 0] if mode == "L" else array
    return array if resize is None else resize.resize(array, width, height)


def _options(resize: Resize, width: int, height: int) -> dict[str, Any]:
    """Return the options of simplejpeg for an image that is resized."""
    denominator, rough = scale_for(resize, width, height)
    options = {"fastdct": True, "fastupsample": True} if rough else {}
    return {**options, "min_height": -(-height // denominator), "min_width": -(-width // denominator)}


def check_pixels(width: int, height: int, most: int) -> None:
    """Raise ValueError if an image has more than ``most`` pixels."""
    if width * height > most:
        raise ValueError(f"the image has {width} x {height} pixels, more than max_image_pixels={most}")
