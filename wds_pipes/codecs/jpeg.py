"""JPEG, decoded by simplejpeg if it is installed: the pixels of Pillow, in less time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from wds_pipes.codecs.names import MAX_SCANS
from wds_pipes.codecs.resizing import Pixels, Resize

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
        ValueError: it has too many pixels or scans.
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
    check_scans(data)
    options = {} if resize is None else _options(resize, width, height)
    try:
        array: Pixels = library.decode_jpeg(data, _COLOURS[mode], **options)
    except ValueError:
        return None
    array = array[..., 0] if mode == "L" else array
    return array if resize is None else resize.resize(array, width, height)


def _options(resize: Resize, width: int, height: int) -> dict[str, Any]:
    """Return the options of simplejpeg for an image that is resized."""
    denominator, rough = resize.scale(width, height)
    options = {"fastdct": True, "fastupsample": True} if rough else {}
    return {**options, "min_height": -(-height // denominator), "min_width": -(-width // denominator)}


def check_pixels(width: int, height: int, most: int) -> None:
    """Raise ValueError if an image has more than ``most`` pixels."""
    if width * height > most:
        raise ValueError(f"the image has {width} x {height} pixels, more than max_image_pixels={most}")


def check_scans(data: bytes) -> None:
    """Raise ValueError if a JPEG has more than MAX_SCANS scans that would be decoded."""
    if not _ends_after_one_scan(data) and (scans := _count_scans(data)) > MAX_SCANS:
        raise ValueError(
            f"the JPEG has {scans} scans, more than {MAX_SCANS}, each of which costs as much time as a whole image"
        )


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the segments of a JPEG's header, from the second marker to that of the first scan:
    which marker, and where its parameters start and end. Ends early at what is no segment.
    """
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        yield data[place + 1], place + 4, end
        if data[place + 1] == 0xDA:
            return
        place = end


def _ends_after_one_scan(data: bytes) -> bool:
    """Whether the header says that a decoder stops after the first scan, as with most JPEGs: they
    are not progressive, and the scan has all colours. Counting scans would take 4 % of the time of
    decoding. False if the header has anything unusual.
    """
    colours = b""
    for marker, start, _ in segments(data):
        if marker == 0xDA:
            return bool(colours) and data[start : start + 1] == colours
        if marker in (0xC0, 0xC1):  # the frame of a JPEG that is not progressive
            colours = data[start + 5 : start + 6]
        elif not (marker in (0xC4, 0xDB, 0xDD, 0xFE) or 0xE0 <= marker <= 0xEF):  # tables, comments
            return False
    return False


def _count_scans(data: bytes) -> int:
    """Count the scans of a JPEG by their marker (FF DA), which cannot occur inside compressed
    data.
    """
    # Compare 16-bit numbers at both alignments: this takes a seventh of the time of data.count().
    return sum(
        int(np.count_nonzero(np.frombuffer(data, "<u2", (len(data) - start) // 2, start) == 0xDAFF)) for start in (0, 1)
    )
