"""Decode JPEGs in one call of nvJPEG, those of which it makes what the decoders on the CPU make."""

from __future__ import annotations

import functools
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from wds_pipes.codecs.jpeg import check_pixels, check_scans
from wds_pipes.codecs.jpeg_header import read_header
from wds_pipes.core.importing import library

# What torchcodec says where not an image is at fault: the driver, memory, or an earlier failure.
_OF_THE_DEVICE = re.compile(
    r"out of memory|CUDA error|CUDA stream|API call failed|not compiled|initialize nvjpeg|create (nvjpeg|jpeg)|: 5\b"
)


class Encoded:
    """An encoded image, with what its header says. From a worker its bytes come as a view of a
    block of shared memory.

    Attributes:
        data: the image; it can be written to if it has EXIF.
        size: its height and width, if nvJPEG makes of it what the decoders on the CPU make; None:
            it has to be decoded on the CPU, which also says what is wrong with it.
        exif: where the names of its EXIF segments are.
    """

    __slots__ = ("data", "exif", "size")

    def __init__(
        self, data: bytes | bytearray | memoryview, size: tuple[int, int] | None = None, exif: tuple[int, ...] = ()
    ) -> None:
        self.data, self.size, self.exif = data, size, exif

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Encoded, (pickle.PickleBuffer(self.data) if protocol >= 5 else self.data, self.size, self.exif)


def examine(data: bytes, max_pixels: int) -> Encoded:
    """Read the header of an image.

    nvJPEG takes pixels of RGB for YCbCr, and decodes a JPEG that is cut off without an error: such
    images have no ``size``.
    """
    header = read_header(data)
    if header is None:
        return Encoded(data)
    try:
        check_pixels(header.width, header.height, max_pixels)
        if header.progressive:
            check_scans(data)
    except ValueError:
        return Encoded(data)
    return Encoded(bytearray(data) if header.exif else data, (header.height, header.width), tuple(header.exif))


def load(who: str) -> Any:
    """Import torchcodec's decoders.

    Args:
        who: what needs them, for a message.

    Raises:
        ImportError: ``torchcodec`` is missing, older than 0.16, or does not load.
    """
    try:
        codec: Any = library("torchcodec.decoders", "torchcodec", who)
    except (RuntimeError, OSError) as error:
        raise ImportError(
            f"{who} needs torchcodec, which does not load: it has to be made for this version of torch and for CUDA. "
            f"({type(error).__name__}: {str(error).strip():.200})"
        ) from error
    if not hasattr(codec, "decode_jpeg"):
        raise ImportError(f"{who} needs torchcodec 0.16 or newer: pip install -U torchcodec")
    return codec


def decode(codec: Any, images: Mapping[int, Encoded], device: torch.device) -> dict[int, torch.Tensor]:
    """Decode JPEGs in one call.

    torchcodec turns a photograph as its EXIF says, which the decoders on the CPU do not; so EXIF
    has another name meanwhile.

    Args:
        codec: from ``load``.
        images: the JPEGs, by their places.
        device: the CUDA device.

    Returns:
        A tensor of uint8 of shape (3, H, W) of each image, on the device, without those that have
        another size than their headers say.

    Raises:
        RuntimeError: one of the images is not decoded, or the device has failed.
    """
    _warn_once()
    # As tensors, since for bytes torchcodec changes the filters of warnings each time, after which
    # Python repeats warnings that it has shown.
    encoded = [torch.frombuffer(image.data, dtype=torch.uint8) for image in images.values()]
    # The decoders of the hardware do not wait for what the stream has begun: they would write to
    # the memory of the batch before, which was freed, but may still have to be resized. After a
    # failure, they may still write, too. (https://github.com/meta-pytorch/torchcodec/pull/1634;
    # torchcodec waits itself in newer versions, and after each success.)
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    try:
        _name_exif(images.values(), b"exif")
        decoded = codec.decode_jpeg(encoded, mode="RGB", device=device)
    except RuntimeError:
        stream.synchronize()
        raise
    finally:
        _name_exif(images.values(), b"Exif")
    return {
        place: pixels
        for (place, image), pixels in zip(images.items(), decoded, strict=True)
        if pixels.shape[1:] == image.size
    }


def _name_exif(images: Iterable[Encoded], name: bytes) -> None:
    for image in images:
        for place in image.exif:
            image.data[place : place + len(name)] = name  # type: ignore[index]


def is_of_the_device(error: RuntimeError) -> bool:
    """Whether an error is not of an image: the device has no memory left, say, or work on it has
    failed.
    """
    return _OF_THE_DEVICE.search(str(error)) is not None


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
