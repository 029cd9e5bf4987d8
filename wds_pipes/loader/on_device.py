"""Decode the images of a batch in the main process, on a device."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from wds_pipes.codecs.images import IMAGE_SPECS, image_decoder, open_image
from wds_pipes.codecs.resizing import Fit, Resize, Size
from wds_pipes.core.importing import library
from wds_pipes.core.options import check_count
from wds_pipes.core.suggest import checks_options
from wds_pipes.core.words import listed
from wds_pipes.errors import DecodeError
from wds_pipes.io.secret import hide, words
from wds_pipes.stages.fields import read_names
from wds_pipes.stages.identity import identity
from wds_pipes.tar.finding import at_byte, offset_of

_WARN_AFTER = 3  # batches in a row of which the device decoded no image
_SPECS = [spec for spec, (mode, _, kind) in IMAGE_SPECS.items() if kind == "torch" and mode in ("L", "RGB")]


class DecodeOnDevice:
    """Decodes the images of each batch on a GPU: ``PipeLoader(..., on_device=DecodeOnDevice("jpg",
    size=224))``.

    The pipe does not decode these fields, so a worker sends encoded images, about a tenth of the
    bytes of their pixels. In the main process, the JPEGs of a batch are decoded in one call, by
    nvJPEG through ``torchcodec``, and resized on the device. What nvJPEG does not decode (PNG,
    WebP, CMYK and rarer kinds of JPEG) is decoded on the CPU, as by ``decode_by_ext``.

    nvJPEG rounds differently from the decoders on the CPU, and decodes no image at a smaller scale,
    so the numbers differ a little, within the PSNR of 40 dB that ``size`` of ``decode_by_ext``
    promises. Crops are the same: images with the same pixels are resized as by Pillow, and no
    number differs by more than 1. If three batches in a row have no image that the device decodes,
    a warning says so, once.

    Args:
        fields: the names of the fields, or places of tuples; a batch has at least one of them. Its
            column is a list of bytes, as ``batch_samples`` makes it.
        spec: as in ``decode_by_ext``: ``"torchrgb8"`` (uint8) or ``"torchrgb"`` (float32 from 0 to
            1), and the same with ``l`` for one channel.
        size: as in ``decode_by_ext``; all images of a batch have this size.
        fit: as in ``decode_by_ext``.
        device: where the images are decoded and returned; on ``"cpu"``, with the decoders of
            ``decode_by_ext``.
        max_image_pixels: refuse a larger image before decoding it.

    Returns:
        The batch with a tensor of shape (N, C, H, W) for each of these fields.

    Raises:
        TypeError, ValueError: when built: an argument is wrong.
        DecodeError: an image cannot be decoded.
        TypeError: a batch has none of the fields, or a field is not a list of bytes.
        RuntimeError: there is no such device, or this is a worker process.
        ImportError: ``torchcodec`` is missing.

    The state of a loader is that of the batches that were returned: a resume decodes nothing again
    but the batch whose decoding failed.
    """

    @checks_options
    def __init__(
        self,
        *fields: str | int,
        spec: str = "torchrgb8",
        size: Size,
        fit: Fit = "cover",
        device: str | torch.device = "cuda",
        max_image_pixels: int = 1 << 26,
    ) -> None:
        places = tuple(field for field in fields if type(field) is int)
        if not fields or (places and len(places) < len(fields)):
            raise ValueError(f"DecodeOnDevice() takes names of fields, or places of tuples, not {fields!r:.80}")
        self._fields: tuple[Any, ...] = places or read_names("fields", fields)  # type: ignore[arg-type]
        if spec not in _SPECS:
            raise ValueError(f"spec is one of {', '.join(_SPECS)}, not {spec!r:.80}")
        self._mode, self._floats, _ = IMAGE_SPECS[spec]
        self._resize = Resize(size, fit)
        self._device = _read_device(device)
        self._on_cpu = 0  # how many batches in a row had no image that the device decoded
        self._why = "nvJPEG decodes JPEGs of one or three colours"  # or what it said last
        self._max_pixels = check_count("max_image_pixels", max_image_pixels)
        self._text = f"DecodeOnDevice({', '.join(map(repr, fields))}, size={size}, device={str(device)!r})"

    def __repr__(self) -> str:
        return self._text

    def __call__(self, batch: Any) -> Any:
        if get_worker_info() is not None:
            raise RuntimeError(
                f"{self} is for the main process, and this is a worker: pass it to PipeLoader(on_device=...)"
            )
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"{self} needs a CUDA device, and there is none: pass device='cpu'")
        columns: Any = dict(batch) if isinstance(batch, dict) else list(batch) if isinstance(batch, tuple) else {}
        there = range(len(columns)) if isinstance(columns, list) else columns
        found = [field for field in self._fields if field in there]
        if not found:
            raise TypeError(f"{self} finds none of its fields in a batch of {_form(batch)}")
        for field in found:
            columns[field] = self._decode(columns[field], field, batch)
        if isinstance(batch, tuple):
            return type(batch)(*columns) if hasattr(batch, "_fields") else tuple(columns)
        return columns

    def _decode(self, images: Any, field: str | int, batch: Any) -> torch.Tensor:
        if not isinstance(images, list) or not all(isinstance(image, bytes) for image in images):
            raise TypeError(
                f"{self} takes a list of bytes, and field {field!r} is {type(images).__name__}: leave its decoding "
                "out of the pipe, as in decode_by_ext(only=[...])"
            )
        decoded: dict[int, torch.Tensor] = {}
        if self._device.type != "cpu":
            decoded = self._on_device({place: image for place, image in enumerate(images) if self._is_plain(image)})
            self._watch(len(images), len(decoded))
        channels = 1 if self._mode == "L" else 3
        shape = len(images), channels, self._resize.height, self._resize.width
        result = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        weights: dict[_Axis, torch.Tensor] = {}
        on_cpu = image_decoder("torchl8" if self._mode == "L" else "torchrgb8", self._max_pixels, "", self._resize)
        for place, image in enumerate(images):
            if place in decoded:
                self._fill(result[place], decoded.pop(place), weights)
                continue
            try:
                result[place] = on_cpu(image)
            except Exception as error:
                raise _error(batch, place, field, error, image) from error
        return result.float() / 255 if self._floats else result

    def _is_plain(self, image: bytes) -> bool:
        """Whether nvJPEG decodes an image: a JPEG with one or three colours, within the limits."""
        if not image.startswith(b"\xff\xd8\xff"):
            return False
        try:
            with open_image(image, self._max_pixels, "") as opened:
                return opened.mode in ("L", "RGB")
        except Exception:  # the decoder on the CPU says why
            return False

    def _on_device(self, images: dict[int, bytes]) -> dict[int, torch.Tensor]:
        """Decode images on the device, without those that it refuses."""
        if not images:
            return {}
        codec = library("torchcodec.decoders", "torchcodec", f"{self}")
        mode = "GRAY" if self._mode == "L" else "RGB"
        try:
            decoded = codec.decode_jpeg(list(images.values()), mode=mode, device=self._device)
            return dict(zip(images, decoded, strict=True))
        except RuntimeError as error:  # of one of them, which is not named
            self._why = words(error)
            if len(images) == 1:
                return {}
        halves = list(images)
        middle = len(halves) // 2
        parts = ({place: images[place] for place in half} for half in (halves[:middle], halves[middle:]))
        return {place: image for part in parts for place, image in self._on_device(part).items()}

    def _watch(self, images: int, decoded: int) -> None:
        """Warn if nothing is gained by the device."""
        if not images:
            return
        self._on_cpu = min(self._on_cpu, 0) if decoded else self._on_cpu + 1
        if self._on_cpu == _WARN_AFTER:
            self._on_cpu = -sys.maxsize  # only once
            warnings.warn(
                f"{self} decoded no image of {_WARN_AFTER} batches on the device, but all on the CPU, in the main "
                f"process ({self._why}). If that is so for most of the data, decode_by_ext() in the workers is faster.",
                stacklevel=2,
            )

    def _fill(self, result: torch.Tensor, image: torch.Tensor, weights: dict[_Axis, torch.Tensor]) -> None:
        """Resize an image of shape (C, H, W) into its place of the batch.

        By a product with the weights of all pixels, as a crop may begin inside a pixel, which
        ``interpolate`` does not do. Images of the same size share the weights.
        """
        height, width = image.shape[1:]
        box, new_width, new_height, left, top = self._resize.place(width, height)
        axes = _Axis(box[1], box[3], new_height, height), _Axis(box[0], box[2], new_width, width)
        down, across = (weights.get(axis) for axis in axes)
        if down is None or across is None:
            down, across = (weights.setdefault(axis, axis.weights(image.device)) for axis in axes)
        with torch.autocast(image.device.type, enabled=False):  # the training's may have 8 bits
            resized = down @ image.float() @ across.T
        result[:, top : top + new_height, left : left + new_width] = resized.round_().clamp_(0, 255)


class _Axis(NamedTuple):
    """How one axis of an image is resized: the pixels from ``start`` to ``end``, of all of its
    ``length``, to ``size`` pixels.
    """

    start: float
    end: float
    size: int
    length: int

    def weights(self, device: torch.device) -> torch.Tensor:
        """Return how much each pixel counts in each pixel of the result: those of ``BILINEAR`` of
        Pillow, of shape (size, length).
        """
        scale = (self.end - self.start) / self.size
        centres = self.start + (torch.arange(self.size, device=device, dtype=torch.float64) + 0.5) * scale
        pixels = torch.arange(self.length, device=device, dtype=torch.float64) + 0.5
        found = (1 - (pixels - centres[:, None]).abs() / max(scale, 1.0)).clamp_(0)
        return (found / found.sum(1, keepdim=True)).float()


def _read_device(device: str | torch.device) -> torch.device:
    """Raises ValueError: it is neither the CPU nor a CUDA device."""
    try:
        read = torch.device(device)
    except RuntimeError:  # of a name that torch does not know
        read = torch.device("meta")
    if read.type not in ("cpu", "cuda"):
        raise ValueError(f"device is 'cuda', such as 'cuda:1', or 'cpu', not {str(device)!r:.80}")
    return read


def _form(batch: Any) -> str:
    if isinstance(batch, dict):
        return f"the fields {listed(tuple(map(str, batch)))}"
    return f"{len(batch)} columns" if isinstance(batch, tuple) else type(batch).__name__


def _error(batch: Any, place: int, field: str | int, cause: Exception, image: bytes) -> DecodeError:
    def of(column: str) -> Any:
        values = batch.get(column) if isinstance(batch, dict) else None
        return values[place] if isinstance(values, list) and place < len(values) else None

    named = identity({name: of(name) for name in ("__key__", "__url__")})
    which = f"field {field!r}" if isinstance(field, str) else f"place {field}"
    sample = f"sample {place} of the batch" if named.key is None else named.name("in")
    offset = offset_of(named.url, named.key, field, image)
    return DecodeError(
        f"{which} of {sample} cannot be decoded: {type(cause).__name__}: {hide(words(cause))}.{at_byte(offset)} "
        "Correct it, or check it in the pipe, where on_error='skip' leaves such samples out.",
        url=named.url,
        key=named.key,
        field=str(field),
        offset=offset,
    )
