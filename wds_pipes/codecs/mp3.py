"""The frames of an MP3, for libsndfile to read all of them.

An encoder writes their number to the first frame, in a header named Xing or Info. Where that is
missing, libsndfile estimates the length from the bit rate of the first frames, and ends there: of a
file whose bit rate changes, it would return only a part. So such a file gets a header that says
very many. As in any file with such a header, its first 529 samples, the delay of a decoder, are
left out then.
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
    rate: int


def with_length(data: bytes) -> tuple[bytes, bool]:
    """Return an MP3 that is read to its end, without tags at its beginning, and whether it says how
    long it is. What is not layer III stays as it is.

    Raises:
        ValueError: its last frame is not complete, it is several MP3s, or its sample rate or number
            of channels changes.
    """
    start = _after_tags(data)
    first = _frame(data, start) or _frame(data, start := _next(data, start, None))
    if first is None:
        return data, False
    side = {(3, True): 17, (3, False): 32}.get((first.version, first.mono), 9 if first.mono else 17)
    header = start + 4 + side
    kind, count = data[header : header + 4], data[header + 8 : header + 12]
    if kind in (b"Xing", b"Info") and data[header + 7] & 1 and any(count):
        _check_alone(data, start, header)
        return data[start:], True
    # Those that libsndfile does not read: after a checksum, or of another kind, and without a count
    says = kind in (b"Xing", b"Info") or data[header + 2 : header + 6] in (b"Xing", b"Info")
    begin = start + first.size * (says or data[start + 36 : start + 40] == b"VBRI")
    own = bytearray(data[start : start + 4])
    own[1] |= 1  # without a checksum
    own[2] = _INFO_KBITS << 4 | own[2] & 0x0C
    frame = _frame(bytes(own), 0)
    assert frame is not None
    own += bytes(side) + b"Info" + (1).to_bytes(4, "big") + _MANY.to_bytes(4, "big")
    return bytes(own).ljust(frame.size, b"\0") + data[begin : _end(data, begin, first)], False


def _frame(data: bytes, at: int) -> _Frame | None:
    """The frame whose header is at a byte; None: there is no header of layer III."""
    head = data[at : at + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version, kbits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or not 0 < kbits < 15 or rate == 3:
        return None
    size = (144_000 if version == 3 else 72_000) * _KBITS[version][kbits] // _RATES[version][rate] + (head[2] >> 1 & 1)
    return _Frame(size, version, head[3] >> 6 == 3, rate)


def _alike(frame: _Frame | None, other: _Frame | None) -> bool:
    """Whether two frames may be of one stream."""
    return frame is not None and other is not None and frame[1:] == other[1:]


def _next(data: bytes, at: int, like: _Frame | None) -> int:
    """The next byte where a frame begins, as the one after it shows; -1: there is none."""
    stop = min(len(data), at + _SEARCHED)
    while (at := data.find(b"\xff", at, stop)) >= 0:
        found = _frame(data, at)
        if found is not None and _alike(found, _frame(data, at + found.size)) and _alike(found, like or found):
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


def _check_alone(data: bytes, start: int, header: int) -> None:
    """Raise ValueError if another MP3 follows one that says how many bytes it has."""
    if not data[header + 7] & 2:
        return
    end = start + int.from_bytes(data[header + 12 : header + 16], "big")
    end += 128 * (data[end : end + 3] == b"TAG")
    end += _after_tags(data[end:]) if data[end : end + 3] == b"ID3" else 0
    frame = _frame(data, end)
    if frame is not None and _frame(data, end + frame.size) is not None:
        raise ValueError(_SEVERAL.format(end))


def _end(data: bytes, at: int, first: _Frame) -> int:
    """Where the last frame ends. What is no frame is passed over.

    Raises:
        ValueError: it is not complete, or the kind of the frames changes.
    """
    end = at
    while at >= 0:
        frame = _frame(data, at)
        if frame is not None and _alike(frame, first):
            if at + frame.size > len(data):
                raise ValueError(f"it is cut short: its last frame, at byte {at}, is not complete")
            at = end = at + frame.size
            continue
        if frame is not None and _alike(frame, after := _frame(data, at + frame.size)):
            third = None if after is None else _frame(data, at + frame.size + after.size)
            if _alike(frame, third):
                raise ValueError(_SEVERAL.format(at))
        at = _next(data, at, first)
    return end


_SEVERAL = (
    "it is several MP3s one after another, or its sample rate or channels change, from byte {} on, and libsndfile "
    "ends there: write it as one, or to several fields"
)
