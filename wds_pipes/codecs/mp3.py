"""The frames of an MP3, where it does not say how many it has.

An encoder writes their number to the first frame, in a header of its own: Xing, Info or VBRI. Where
that is missing, libsndfile estimates the length from the first frames, and ends there: of a file
whose bit rate changes, it would return only a part.
"""

from __future__ import annotations

from typing import NamedTuple

# ISO/IEC 11172-3 and 13818-3, layer III, by the two bits of the version: 3 for MPEG-1, 2 for
# MPEG-2, 0 for 2.5.
_KBITS = {
    3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_KBITS[0] = _KBITS[2]
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_INFO_KBITS = 9  # the index of a bit rate whose frames hold the header
_SEARCHED = 1 << 16  # bytes in which the next frame is looked for
_MANY = 0x7FFFFFFF  # more frames than any file has


class _Frame(NamedTuple):
    size: int
    version: int
    mono: bool
    same: int  # equal for all frames of a stream


def with_length(data: bytes) -> bytes:
    """Return an MP3 that is read to its end: itself if it says how many frames it has, or is not
    layer III; else without tags, and with a header that says very many.

    Raises:
        ValueError: it does not say how many, and its last frame is not complete.
    """
    start = _after_tags(data)
    first = _frame(data, start) or _frame(data, start := _next(data, start, None))
    if first is None:
        return data
    header = start + 4 + {(3, True): 17, (3, False): 32}.get((first.version, first.mono), 9 if first.mono else 17)
    # after a checksum, if there is one
    says = [at for at in (header, header + 2) if data[at : at + 4] in (b"Xing", b"Info")]
    if data[start + 36 : start + 40] == b"VBRI" or any(data[at + 7] & 1 for at in says):
        return data
    _check_end(data, start, first)
    own = bytearray(data[start : start + 4])
    own[1] |= 1  # without a checksum
    own[2] = _INFO_KBITS << 4 | own[2] & 0x0C
    frame = _frame(bytes(own), 0)
    assert frame is not None
    own += bytes(header - start - 4) + b"Info" + (1).to_bytes(4, "big") + _MANY.to_bytes(4, "big")
    return bytes(own).ljust(frame.size, b"\0") + data[start + first.size * bool(says) :]


def _frame(data: bytes, at: int) -> _Frame | None:
    """The frame whose header is at a byte; None: there is no header of layer III."""
    head = data[at : at + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version, kbits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or not 0 < kbits < 15 or rate == 3:
        return None
    size = (144_000 if version == 3 else 72_000) * _KBITS[version][kbits] // _RATES[version][rate] + (head[2] >> 1 & 1)
    return _Frame(size, version, head[3] >> 6 == 3, version << 2 | rate)


def _next(data: bytes, at: int, like: _Frame | None) -> int:
    """The next byte where a frame begins, as the one after it shows; -1: there is none."""
    stop = min(len(data), at + _SEARCHED)
    while (at := data.find(b"\xff", at, stop)) >= 0:
        found = _frame(data, at)
        after = None if found is None else _frame(data, at + found.size)
        if found is not None and after is not None and found.same == after.same == (like or found).same:
            return at
        at += 1
    return -1


def _after_tags(data: bytes) -> int:
    """The byte after the ID3 tags at the beginning."""
    at = 0
    while data[at : at + 3] == b"ID3" and len(data) >= at + 10:
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 127
        at += 10 + size + (10 if data[at + 5] & 16 else 0)
    return at


def _check_end(data: bytes, at: int, first: _Frame) -> None:
    while at >= 0:
        frame = _frame(data, at)
        if frame is None or frame.same != first.same:
            at = _next(data, at, first)
        elif at + frame.size > len(data):
            raise ValueError(f"it is cut short: its last frame, at byte {at}, is not complete")
        else:
            at += frame.size
