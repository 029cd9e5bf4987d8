"""Decode JPEGs in one call of nvJPEG, those of which it makes what the decoders on the CPU make."""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from wds_pipes.codecs.jpeg import MARKER, check_pixels, check_scans, segments
from wds_pipes.core.importing import library

_BASELINE = (0xC0, 0xC1)
_PROGRESSIVE = 0xC2
_TABLES = {0xC4, 0xDB}  # of Huffman codes and of quantization; frames of Motion JPEG may lack them
_OTHERS = {0xDD, 0xFE, *range(0xE0, 0xF0)}  # restarts, comments and what applications add
_SCAN = 0xDA
_EXIF, _UNREAD = b"Exif\0\0", b"exif\0\0"
_END = b"\xff\xd9"
# Of one colour, and of three: how many pixels of the image share one of a colour, as 4:4:4, 4:2:2,
# 4:2:0, 4:4:0 and 4:1:1 have it.
_SAMPLINGS = {1: [b"\x11"], 3: [bytes((first, 0x11, 0x11)) for first in (0x11, 0x21, 0x22, 0x12, 0x41)]}


def readable(data: bytes, max_pixels: int) -> bytes | None:
    """Return a JPEG for nvJPEG, if that makes of it what the decoders on the CPU make.

    nvJPEG takes pixels of RGB for YCbCr, and decodes a JPEG that is cut off without an error. Where
    a header has anything unusual, it may read it otherwise than these decoders, its size too.
    torchcodec turns a photograph as its EXIF says, which they do not; here EXIF loses its name.

    Returns:
        The JPEG, or None: it has to be decoded on the CPU, which also says what is wrong with it.
    """
    if not data.startswith(MARKER):
        return None
    frame, progressive, exif = b"", False, list[int]()
    jfif, transform, missing = False, None, _TABLES
    for marker, start, end in segments(data):
        if marker == _SCAN:
            break
        if marker in (*_BASELINE, _PROGRESSIVE):
            if frame:
                return None
            frame, progressive = data[start:end], marker == _PROGRESSIVE
        elif marker in _TABLES:
            missing = missing - {marker}
        elif marker not in _OTHERS:
            return None
        elif marker == 0xE0:
            jfif = jfif or (data.startswith(b"JFIF\0", start) and end - start >= 14)
        elif marker == 0xEE and data.startswith(b"Adobe", start) and end - start >= 12:
            transform = data[start + 11]
        elif marker == 0xE1 and data.startswith(_EXIF, start):
            exif.append(start)
    else:
        return None
    if len(frame) < 6 or missing:
        return None
    bits, height, width, colours = struct.unpack_from(">BHHB", frame)
    if bits != 8 or len(frame) != 6 + 3 * colours or frame[7::3] not in _SAMPLINGS.get(colours, []):
        return None
    if colours == 3 and (transform not in (None, 1) or not (jfif or transform == 1 or frame[6::3] == b"\1\2\3")):
        return None
    if not progressive and data[start : start + 1] != bytes([colours]):  # a scan for each colour
        return None
    if not height or not width or data.rfind(_END, end) < 0:
        return None
    try:
        check_pixels(width, height, max_pixels)
        if progressive:
            check_scans(data)
    except ValueError:
        return None
    for place in exif:
        data = data[:place] + _UNREAD + data[place + len(_UNREAD) :]
    return data


def decode(images: Sequence[bytes], mode: str, device: torch.device, who: str) -> list[torch.Tensor]:
    """Decode JPEGs in one call.

    Args:
        images: the JPEGs.
        mode: ``"RGB"`` or ``"L"``.
        device: the CUDA device.
        who: what needs ``torchcodec``, for a message.

    Returns:
        A tensor of uint8 of shape (3 or 1, H, W) of each image, on the device.

    Raises:
        ImportError: ``torchcodec`` is missing, or older than 0.16.
        RuntimeError: one of the images is not decoded.
    """
    codec: Any = library("torchcodec.decoders", "torchcodec", who)
    if not hasattr(codec, "decode_jpeg"):
        raise ImportError(f"{who} needs torchcodec 0.16 or newer: pip install -U torchcodec")
    _warn_once()
    # As tensors, since for bytes torchcodec changes the filters of warnings each time, after which
    # Python repeats warnings that it has shown.
    encoded = [torch.frombuffer(image, dtype=torch.uint8) for image in images]
    decoded: list[torch.Tensor] = codec.decode_jpeg(encoded, mode="GRAY" if mode == "L" else mode, device=device)
    return decoded


def is_of_the_device(error: RuntimeError) -> bool:
    """Whether an error is not of an image, but says that the device has no memory left, or that
    work on it has failed.
    """
    return any(part in str(error) for part in ("out of memory", "CUDA error", "CUDA stream"))


@contextmanager
def beside_the_training(device: torch.device) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Work on a stream of its own inside the block: nvJPEG waits for all that its stream has begun,
    which would be the step of the training.

    Yields a function that hands a tensor to the training's stream, which waits for it, and returns
    it.
    """
    training = torch.cuda.current_stream(device)
    stream = _stream(torch.cuda.current_device() if device.index is None else device.index)

    def hand_over(tensor: torch.Tensor) -> torch.Tensor:
        training.wait_stream(stream)
        tensor.record_stream(training)
        return tensor

    with torch.cuda.stream(stream):
        yield hand_over


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


@functools.cache
def _warn_once() -> None:
    """Let torch warn, where nobody sees it, of tensors over bytes, which must not be written to: it
    does so once in a process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
