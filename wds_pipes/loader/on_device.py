"""Decode the images of a batch in the main process, on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import get_worker_info

from wds_pipes.codecs.images import IMAGE_SPECS, image_decoder
from wds_pipes.codecs.resizing import Fit, Resize, Size
from wds_pipes.core.options import check_count
from wds_pipes.core.suggest import checks_options
from wds_pipes.core.words import listed
from wds_pipes.errors import DecodeError
from wds_pipes.io.secret import hide, words
from wds_pipes.loader import nvjpeg
from wds_pipes.loader.batch_resizing import resize_batch
from wds_pipes.loader.nvjpeg import Encoded
from wds_pipes.stages.fields import read_names
from wds_pipes.stages.identity import identity
from wds_pipes.tar.finding import at_byte, offset_of

_MOST_REFUSED = 2  # images of a batch, after which the rest of it is decoded on the CPU
_WARN_AFTER = 3  # batches of which the device decoded no image, or refused one
_SPECS = [spec for spec, (mode, _, kind) in IMAGE_SPECS.items() if kind == "torch" and mode in ("L", "RGB")]


class DecodeOnDevice:
    """Decodes the images of each batch on a GPU: ``PipeLoader(..., on_device=DecodeOnDevice("jpg",
    size=224))``.

    The pipe does not decode these fields, so a worker sends encoded images, about a tenth of the
    bytes of their pixels. It also reads their headers, if this is ``on_device`` itself and is not
    called by another function. In the main process, the JPEGs of a batch are decoded in one call,
    by nvJPEG through ``torchcodec``, and resized on the device, beside the training's own work.
    What nvJPEG does not decode as the CPU does (PNG, WebP, CMYK, RGB, rarer kinds of JPEG, and what
    is cut off) is decoded on the CPU, as by ``decode_by_ext``, or is an error as there.

    nvJPEG does not smooth the colours that a JPEG stores for two or four pixels (4:2:2, 4:2:0), so
    its numbers differ. For photographs of 500 x 375 the PSNR against Pillow is at least 40 dB at
    sizes from 224 x 224 to 448 x 448, and in the median 52 dB; at full size, at least 38 dB. Crops
    are the same, and EXIF turns no image: images with the same pixels are resized as by Pillow, and
    no number differs by more than 1. If three batches in a row have no image that the device
    decodes, or three have one that nvJPEG refuses, which takes a second, a warning says so, once.

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
        ImportError: ``torchcodec`` is missing, older than 0.16, or does not load.

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
        self._watches: dict[str | int, _Watch] = {}  # of each field
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
        columns = _columns(batch, self._fields)
        if not columns:
            raise TypeError(f"{self} finds none of its fields in a batch of {_form(batch)}")
        return _replaced(batch, self._decode_fields(columns, batch))

    def _decode_fields(self, columns: dict[Any, Any], batch: Any) -> dict[Any, torch.Tensor]:
        if self._device.type == "cpu":
            return {field: self._decode(images, field, batch, None) for field, images in columns.items()}
        codec = nvjpeg.load(f"{self}")
        with nvjpeg.beside_the_training(self._device) as hand_over:
            return {field: hand_over(self._decode(images, field, batch, codec)) for field, images in columns.items()}

    def _decode(self, images: Any, field: str | int, batch: Any, codec: Any) -> torch.Tensor:
        wrong = _other_than_images(images)
        if wrong is not None:
            raise TypeError(
                f"{self} takes a list of bytes, and field {field!r} {wrong}: leave its decoding out of the pipe, as in "
                "decode_by_ext(only=[...])"
            )
        shape = len(images), 1 if self._mode == "L" else 3, self._resize.height, self._resize.width
        result = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        decoded: dict[int, torch.Tensor] = {}
        if codec is not None:
            images = [
                image if isinstance(image, Encoded) else nvjpeg.examine(image, self._max_pixels) for image in images
            ]
            watch = self._watches.setdefault(field, _Watch())
            readable = {place: image for place, image in enumerate(images) if image.size is not None}
            decoded = self._on_device(codec, readable, watch)
            watch.look(f"{self}", field, len(images), len(decoded))
            resize_batch(decoded, self._resize, result)
        on_cpu = image_decoder("torchl8" if self._mode == "L" else "torchrgb8", self._max_pixels, "", self._resize)
        for place, image in enumerate(images):
            if place in decoded:
                continue
            data = bytes(image.data if isinstance(image, Encoded) else image)
            try:
                pixels = on_cpu(data)
            except Exception as error:
                raise _error(batch, place, field, error, data) from error
            result[place] = pixels
        return result.float() / 255 if self._floats else result

    def _on_device(self, codec: Any, images: dict[int, Encoded], watch: _Watch) -> dict[int, torch.Tensor]:
        """Decode images on the device, without those that it refuses.

        A call that fails does not say of which image, and takes a second, since torchcodec then
        makes a new decoder. So try each image alone, not halves of the batch, and give up soon.
        """

        def attempt(some: dict[int, Encoded]) -> dict[int, torch.Tensor] | None:
            try:
                return nvjpeg.decode(codec, some, self._device)
            except RuntimeError as error:
                if nvjpeg.is_of_the_device(error):
                    raise
                watch.reason = words(error)
                return None

        if not images:
            return {}
        if (together := attempt(images)) is not None:
            return together
        watch.refusing += 1
        decoded, refused = dict[int, torch.Tensor](), 0
        for place, image in images.items() if len(images) > 1 else ():
            alone = attempt({place: image})
            decoded |= alone or {}
            refused += alone is None
            if refused == _MOST_REFUSED:
                break
        return decoded


def preparation_for(on_device: Any) -> Callable[[Any], Any] | None:
    """Return what a worker does to a batch before it sends it, so that the main process has less to
    do; None for any function but ``DecodeOnDevice``: others get the batch as it is.
    """
    if type(on_device) is not DecodeOnDevice:
        return None
    max_pixels = None if on_device._device.type == "cpu" else on_device._max_pixels
    return partial(_prepared, fields=on_device._fields, max_pixels=max_pixels)


def _prepared(batch: Any, *, fields: tuple[Any, ...], max_pixels: int | None) -> Any:
    """Return a batch with ``Encoded`` images in place of bytes, which would be copied when they
    arrive. ``max_pixels``: also read their headers; None: nothing needs them.
    """
    if type(batch) not in (dict, tuple):  # another class may check what it is made of
        return batch
    made: dict[int, Encoded] = {}  # so that an object that comes several times is sent once

    def encoded(image: Any) -> Any:
        if not isinstance(image, bytes):  # an error in the main process
            return image
        if id(image) not in made:
            data = bytes(image)  # of a subclass; bytes are not copied
            made[id(image)] = Encoded(data) if max_pixels is None else nvjpeg.examine(data, max_pixels)
        return made[id(image)]

    columns = _columns(batch, fields)
    return _replaced(
        batch,
        {field: list(map(encoded, images)) for field, images in columns.items() if isinstance(images, list)},
    )


@dataclass(slots=True)
class _Watch:
    """Warns, once, if nothing is gained by the device for a field.

    Attributes:
        idle: how many batches in a row had no image that the device decoded.
        refusing: how many batches had an image that it refused.
        reason: what it said then.
        has_warned: whether it has warned.
    """

    idle: int = 0
    refusing: int = 0
    reason: str = ""
    has_warned: bool = False

    def look(self, who: str, field: str | int, images: int, decoded: int) -> None:
        """Take note of a batch."""
        self.idle = 0 if decoded else self.idle + bool(images)
        if self.has_warned or max(self.idle, self.refusing) < _WARN_AFTER:
            return
        self.has_warned = True
        if self.refusing >= _WARN_AFTER:
            what = f"refused images of {self.refusing} batches, each of which takes a second ({self.reason})"
        else:
            what = f"decoded no image of {self.idle} batches in a row"
            what += f" ({self.reason})" if self.reason else ", as it takes whole JPEGs of the common kinds"
        warnings.warn(
            f"{who}: for field {field!r}, nvJPEG {what}. The CPU decodes them, in the main process. If that is so for "
            "most of the data, decode_by_ext() in the workers is faster.",
            stacklevel=2,
        )


def _read_device(device: str | torch.device) -> torch.device:
    """Raises ValueError: it is neither the CPU nor a CUDA device."""
    try:
        read = torch.device(device)
    except RuntimeError:  # of a name that torch does not know
        read = torch.device("meta")
    if read.type not in ("cpu", "cuda"):
        raise ValueError(f"device is 'cuda', such as 'cuda:1', or 'cpu', not {str(device)!r:.80}")
    return read


def _columns(batch: Any, fields: tuple[Any, ...]) -> dict[Any, Any]:
    """Return the columns of a batch that are among these fields or places."""
    there: Any = batch if isinstance(batch, dict) else dict(enumerate(batch)) if isinstance(batch, tuple) else {}
    return {field: there[field] for field in fields if field in there}


def _replaced(batch: Any, columns: dict[Any, Any]) -> Any:
    """Return a batch with other columns in the places of some of its own."""
    if isinstance(batch, dict):
        return {**batch, **columns}
    if not isinstance(batch, tuple):
        return batch
    values = (columns.get(place, value) for place, value in enumerate(batch))
    return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)


def _other_than_images(column: Any) -> str | None:
    """Return what a column is or has, for a message, if it is no list of bytes."""
    if not isinstance(column, list):
        return f"is {type(column).__name__}"
    others = (place for place, image in enumerate(column) if not isinstance(image, (bytes, Encoded)))
    wrong = next(others, None)
    return None if wrong is None else f"has {type(column[wrong]).__name__} at place {wrong}"


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
