"""Read the headers of a JPEG strictly: what every decoder reads in the same way.

The format is ITU-T T.81; JFIF and the segment of Adobe say which colours it has.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from wds_pipes.codecs.jpeg import START, segments

_BASELINE, _PROGRESSIVE = (0xC0, 0xC1), 0xC2  # the frames
_HUFFMAN, _QUANTIZATION, _RESTARTS, _SCAN = 0xC4, 0xDB, 0xDD, 0xDA
_END = 0xD9
_ADOBE = 0xEE
_OTHERS = {0xFE, *range(0xE0, 0xF0)}  # comments, and what applications add
_MOST_SEGMENTS = 1000
_MOST_CODES = 256
_MOST_TABLES = 8 * (17 + _MOST_CODES)  # bytes of a segment of Huffman codes
# Of one colour, and of three: how many pixels of the image share one of a colour, as 4:4:4, 4:2:2,
# 4:2:0, 4:4:0 and 4:1:1 have it.
_SAMPLINGS = {1: [b"\x11"], 3: [bytes((first, 0x11, 0x11)) for first in (0x11, 0x21, 0x22, 0x12, 0x41)]}
_COEFFICIENTS = 64  # of a block of 8 x 8 pixels
_NOT_THERE = 14  # one more than the highest bit


class JpegHeader(NamedTuple):
    """What the headers of a JPEG say.

    Attributes:
        height, width: in pixels.
        exif: where the names of its EXIF segments are.
        progressive: whether it has several scans.
    """

    height: int
    width: int
    exif: list[int]
    progressive: bool


def read_header(data: bytes) -> JpegHeader | None:
    """Read the headers of a JPEG of 8 bits that is grey, or has three colours as YCbCr.

    Returns:
        What they say; None: it is another image, is damaged or cut off, or has anything that
        decoders might read in different ways.
    """
    if not data.startswith(START):
        return None
    frame, progressive, exif = b"", False, list[int]()
    jfif, transform = False, None
    tables = set[tuple[str, int]]()
    for number, (marker, start, end) in enumerate(segments(data)):
        if number == _MOST_SEGMENTS or end > len(data):
            return None
        if marker == _SCAN:
            break
        if marker in (*_BASELINE, _PROGRESSIVE):
            if frame:
                return None
            frame, progressive = data[start:end], marker == _PROGRESSIVE
        elif marker in (_HUFFMAN, _QUANTIZATION, _RESTARTS):
            if (found := _tables(marker, data[start:end])) is None:
                return None
            tables |= found
        elif marker not in _OTHERS:
            return None
        elif marker == 0xE0:
            jfif = jfif or (data.startswith(b"JFIF\0", start) and end - start >= 14)
        elif marker == _ADOBE and data.startswith(b"Adobe", start) and end - start >= 12:
            transform = data[start + 11]
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", start):
            exif.append(start)
    else:
        return None
    if len(frame) < 6:
        return None
    bits, height, width, colours = struct.unpack_from(">BHHB", frame)
    names = frame[6::3]
    if (
        bits != 8
        or not height
        or not width
        or len(frame) != 6 + 3 * colours
        or len(set(names)) < colours
        or frame[7::3] not in _SAMPLINGS.get(colours, [])
        or any(("quantization", table) not in tables for table in frame[8::3])
    ):
        return None
    if colours == 3 and (transform not in (None, 1) or not (jfif or transform == 1 or names == b"\1\2\3")):
        return None  # perhaps RGB
    is_whole = _has_all_scans if progressive else _has_one_scan
    return JpegHeader(height, width, exif, progressive) if is_whole(data, names, tables, start, end) else None


@functools.lru_cache(256)  # most JPEGs have the same ones
def _tables(marker: int, content: bytes) -> frozenset[tuple[str, int]] | None:
    """Return which tables a segment defines, each by its kind and number; None: it is damaged."""
    if marker == _RESTARTS:
        return frozenset() if len(content) == 2 else None
    if len(content) > _MOST_TABLES:
        return None
    found, place = set[tuple[str, int]](), 0
    while place < len(content):
        kind, number = divmod(content[place], 16)
        counts = content[place + 1 : place + 17]
        if number > 3 or kind > (marker == _HUFFMAN):  # quantization of 16 bits is rare
            return None
        if marker == _QUANTIZATION:
            found.add(("quantization", number))
            place += 1 + _COEFFICIENTS
            continue
        symbols = content[place + 17 : place + 17 + sum(counts)]
        # the code of all ones is not used, so there is room for one more code
        room = (1 << 16) - sum(count << (15 - bits) for bits, count in enumerate(counts))
        if len(counts) < 16 or room < 1 or len(symbols) > _MOST_CODES or (not kind and max(symbols, default=0) > 15):
            return None
        found.add(("AC" if kind else "DC", number))
        place += 17 + sum(counts)
    return frozenset(found) if place == len(content) else None


def _has_one_scan(data: bytes, names: bytes, tables: set[tuple[str, int]], start: int, end: int) -> bool:
    """Whether the scan whose header is from ``start`` to ``end`` has all colours, and is followed
    by the end of the image.
    """
    colours = len(names)
    used = data[start + 2 : start + 1 + 2 * colours : 2]
    return (
        data[start : start + 1] == bytes([colours])
        and end - start == 4 + 2 * colours
        and data[start + 1 : start + 1 + 2 * colours : 2] == names
        and data[end - 3 : end] == bytes([0, _COEFFICIENTS - 1, 0])
        and all(("DC", table >> 4) in tables and ("AC", table & 15) in tables for table in used)
        and (markers := _markers(data, end)) != []
        and data[markers[0] + 1] == _END
    )


def _markers(data: bytes, start: int) -> list[int]:
    """Return where markers are from a place on, as those that end compressed data: neither restarts
    nor a byte of compressed data that is FF.
    """
    numbers = np.frombuffer(data, np.uint8)
    places = start + np.flatnonzero(numbers[start:-1] == 0xFF)
    after = numbers[places + 1]
    found: list[int] = places[(after != 0) & (after != 0xFF) & ((after < 0xD0) | (after > 0xD7))].tolist()
    return found


def _has_all_scans(data: bytes, names: bytes, tables: set[tuple[str, int]], start: int, end: int) -> bool:
    """Whether the scans of a progressive JPEG give all bits of all coefficients: the first begins
    as for ``_has_one_scan``. Where some are missing, decoders guess them in different ways.
    """
    lowest = {name: [_NOT_THERE] * _COEFFICIENTS for name in names}  # the lowest bit of each coefficient that is there
    markers, at = _markers(data, end), 0
    marker = _SCAN
    for _ in range(_MOST_SEGMENTS):
        if marker == _SCAN:
            if not _adds_bits(data[start:end], names, tables, lowest):
                return False
        elif marker in (_HUFFMAN, _RESTARTS):
            if (found := _tables(marker, data[start:end])) is None:
                return False
            tables |= found
        elif marker == _END:
            return not any(map(any, lowest.values()))
        elif marker not in _OTHERS or marker == _ADOBE:  # other numbers of quantization, too
            return False
        at = bisect_left(markers, end, at)
        if at == len(markers):
            return False
        marker, start = data[markers[at] + 1], markers[at] + 4
        end = start - 2 + int.from_bytes(data[start - 2 : start], "big")
        if marker != _END and not start <= end <= len(data):
            return False
    return False


def _adds_bits(scan: bytes, names: bytes, tables: set[tuple[str, int]], lowest: dict[int, list[int]]) -> bool:
    """Note which bits a scan of a progressive JPEG adds; False: they are not those that come
    next.
    """
    colours = scan[0] if scan else 0
    if not colours or len(scan) != 4 + 2 * colours:
        return False
    own, used = scan[1:-3:2], scan[2:-3:2]
    first, last, bits = scan[-3:]
    high, low = divmod(bits, 16)  # the lowest bit before this scan and after it
    if own != bytes(name for name in names if name in own):
        return False
    if not (first == last == 0 or (0 < first <= last < _COEFFICIENTS and colours == 1)):
        return False
    if low >= _NOT_THERE or (high and low != high - 1):
        return False
    if not (high and not first) and any(
        (("AC", table & 15) if first else ("DC", table >> 4)) not in tables for table in used
    ):
        return False
    for name in own:
        if any(bit != (high or _NOT_THERE) for bit in lowest[name][first : last + 1]):
            return False
        lowest[name][first : last + 1] = [low] * (last + 1 - first)
    return True
