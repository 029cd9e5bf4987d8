"""Decode the images of a batch in the main process, on a device."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import get_worker_info

from wds_pipes.codecs.images import IMAGE_SPECS, image_decoder, open_image
from wds_pipes.codecs.resizing import Fit, Resize, Size
from wds_pipes.core.importing import library
from wds_pipes.core.options import check_count, checks_options
from wds_pipes.core.words import listed
from wds_pipes.errors import DecodeError
from wds_pipes.io.urls import hide, words
from wds_pipes.stages.fields import identity, read_names

_SPECS = [spec for spec, (mode, _, kind) in IMAGE_SPECS.items() if kind == "torch" and mode in ("L", "RGB")]
_END = b"\xff\xd9"  # of a JPEG
_ORIENTATION = 0x0112  # of EXIF
_GREY = (0.299, 0.587, 0.114)  # how much each colour counts in grey (ITU-R BT.601)


class DecodeOnDevice:
    """Decodes the images of each batch on a GPU: ``PipeLoader(..., on_device=DecodeOnDevice("jpg",
    size=224))``.

    The pipe does not decode these fields, so a worker sends encoded images, about a tenth of the
    bytes of their pixels. In the main process, the JPEGs of a batch are decoded in one call of
    ``torchcodec`` (which uses nvJPEG), and resized by torch on the device. Other images, JPEGs in
    CMYK or RGB, turned by EXIF or cut short, and batches that torchcodec refuses are decoded on the
    CPU, as by ``decode_by_ext``, or are an error as there.

    The pixels differ a little from those of ``decode_by_ext``: nvJPEG does not smooth the colours
    that a JPEG stores for two or four pixels, and a crop begins at a whole pixel.

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
        self._max_pixels = check_count("max_image_pixels", max_image_pixels)
        self._has_warned = False
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
        return _replaced(batch, {field: self._decode(images, field, batch) for field, images in columns.items()})

    def _decode(self, images: Any, field: str | int, batch: Any) -> torch.Tensor:
        if not isinstance(images, list) or not all(isinstance(image, bytes) for image in images):
            raise TypeError(
                f"{self} takes a list of bytes, which field {field!r} is not: leave its decoding out of the pipe, as "
                "in decode_by_ext(only=[...])"
            )
        shape = len(images), 1 if self._mode == "L" else 3, self._resize.height, self._resize.width
        result = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        decoded = {} if self._device.type == "cpu" else self._on_device(images)
        on_cpu = image_decoder("torchl8" if self._mode == "L" else "torchrgb8", self._max_pixels, self._resize)
        for place, image in enumerate(images):
            if place in decoded:
                self._resize_into(decoded[place], result[place])
                continue
            try:
                result[place] = on_cpu(image)
            except Exception as error:
                raise _error(batch, place, field, error) from error
        return result.float() / 255 if self._floats else result

    def _on_device(self, images: list[bytes]) -> dict[int, torch.Tensor]:
        """Decode the JPEGs of a batch on the device: their pixels by place, uint8 of shape
        (3, H, W). The others, and a batch that torchcodec refuses, are left to the CPU.
        """
        codec = _torchcodec(f"{self}")
        places = [place for place, image in enumerate(images) if _suits_the_device(image, self._max_pixels)]
        if not places:
            return {}
        # The decoders of the hardware do not wait for what the stream has begun: they would write
        # to the memory of the batch before, which was freed, but may still have to be resized.
        # (https://github.com/meta-pytorch/torchcodec/pull/1634)
        torch.cuda.current_stream(self._device).synchronize()
        try:
            encoded = [torch.frombuffer(bytearray(images[place]), dtype=torch.uint8) for place in places]
            return dict(zip(places, codec.decode_jpeg(encoded, mode="RGB", device=self._device)))
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA error" in str(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self}: torchcodec refused a batch, which the CPU decodes ({words(error)}). If that happens "
                    "often, decode_by_ext() in the workers is faster.",
                    stacklevel=2,
                )
            return {}

    def _resize_into(self, pixels: torch.Tensor, result: torch.Tensor) -> None:
        """Resize an image, uint8 of shape (3, H, W), into its place, of shape (C, H, W)."""
        box, width, height, left, top = self._resize.place(pixels.shape[2], pixels.shape[1])
        first_column, first_row, last_column, last_row = map(round, box)
        part = pixels[None, :, first_row:last_row, first_column:last_column].float()
        resized = torch.nn.functional.interpolate(part, (height, width), mode="bilinear", antialias=True)[0]
        if len(result) == 1:
            resized = (resized * resized.new_tensor(_GREY)[:, None, None]).sum(0, keepdim=True)
        result[:, top : top + height, left : left + width] = resized.round_().clamp_(0, 255)


def _suits_the_device(image: bytes, max_pixels: int) -> bool:
    """Whether torchcodec decodes an image as ``decode_by_ext`` does: a whole JPEG that is grey or
    YCbCr, and that EXIF does not turn. Only its header is read.
    """
    if not image.endswith(_END):  # else nvJPEG returns grey for what is missing
        return False
    try:
        with open_image(image, max_pixels) as opened:
            return (
                opened.format == "JPEG"
                and opened.mode in ("L", "RGB")
                and opened.info.get("adobe_transform") != 0  # RGB, which nvJPEG takes for YCbCr
                and opened.getexif().get(_ORIENTATION, 1) == 1
            )
    except Exception:  # of any library: the CPU says what is wrong
        return False


def _torchcodec(who: str) -> Any:
    """Import torchcodec's decoders; ImportError if it is missing, too old, or does not load."""
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
    """Return a batch, a dict or a tuple, with other columns in the places of some of its own."""
    if isinstance(batch, dict):
        return {**batch, **columns}
    values = (columns.get(place, value) for place, value in enumerate(batch))
    return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)


def _form(batch: Any) -> str:
    if isinstance(batch, dict):
        return f"the fields {listed(tuple(map(str, batch)))}"
    return f"{len(batch)} columns" if isinstance(batch, tuple) else type(batch).__name__


def _error(batch: Any, place: int, field: str | int, cause: Exception) -> DecodeError:
    def of(column: str) -> Any:
        values = batch.get(column) if isinstance(batch, dict) else None
        return values[place] if isinstance(values, list) and place < len(values) else None

    named = identity({name: of(name) for name in ("__key__", "__url__")})
    which = f"field {field!r}" if isinstance(field, str) else f"place {field}"
    sample = f"sample {place} of the batch" if named.key is None else named.name("in")
    return DecodeError(
        f"{which} of {sample} cannot be decoded: {type(cause).__name__}: {hide(words(cause))}. "
        "Correct it, or check it in the pipe, where on_error='skip' leaves such samples out.",
        url=named.url,
        key=named.key,
        field=str(field),
    )
