"""TIFF: how large its tiles are, and what its grey pixels mean."""

from __future__ import annotations

import struct
from typing import Any

_SIDES = (322, 323)  # the tags TileWidth and TileLength
_NUMBERS = {3: "H", 4: "I"}  # the types that these may have, SHORT and LONG
# Pixels that a tile may have whatever the limit: tiles are often larger than a small image.
_LEAST_TILE = 1 << 20


def check_tiles(data: bytes, max_pixels: int) -> None:
    """Raise ValueError if a TIFF has tiles of more pixels than its image may have, and than 2^20.

    libtiff takes the memory of a whole tile. If there are several tags, or of odd types, it and the
    versions of Pillow differ in which they take: so there must be one of each, as in the
    specification.
    """
    if data[:4] == b"MM\0\x2b":  # Pillow reads it otherwise than libtiff
        raise ValueError("a BigTIFF whose bytes are in big-endian order is not decoded")
    order = "<" if data[:2] == b"II" else ">"
    big = data[2] == 43
    (start,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, start)
    start, size, inside = start + (8 if big else 2), 20 if big else 12, 12 if big else 8
    found = []
    for place in range(start, min(start + size * count, len(data) - size + 1), size):
        tag, kind = struct.unpack_from(order + "HH", data, place)
        if tag in _SIDES:
            (value,) = struct.unpack_from(order + _NUMBERS.get(kind, "I"), data, place + inside)
            found.append((tag, kind in _NUMBERS, value))
    if not found:
        return
    if [(tag, known) for tag, known, _ in sorted(found)] != [(tag, True) for tag in _SIDES]:
        raise ValueError("the size of its tiles is damaged")
    width, height = (value for _, _, value in sorted(found))
    if width * height > max(max_pixels, _LEAST_TILE):
        raise ValueError(f"its tiles have {width} x {height} pixels, more than max_image_pixels={max_pixels}")


def deep_grey(image: Any) -> tuple[int, bool]:
    """Return how many bits the grey pixels of a TIFF have that Pillow has opened as 16 bits, and
    whether 0 is white: Pillow looks at neither.
    """
    bits = image.tag_v2.get(258, 16)
    return (bits[0] if isinstance(bits, tuple) else bits), image.tag_v2.get(262) == 0
