"""Small pictures of images and arrays, encoded again: no byte of the data reaches a page."""

from __future__ import annotations

import base64
import io
from typing import Any, NamedTuple

import numpy as np

from wds_pipes.codecs.images import open_image

MAX_PIXELS = 1 << 26  # as decode_by_ext has it
SMALL, LARGE = 224, 800  # pixels of the longer side: in a grid, on the page of a sample
_ENLARGED = 96  # pixels up to which a tiny picture is enlarged
_LOSSLESS = 128  # pixels up to which a picture is a PNG
_CURVE = 64  # pixels: the height of the curve of an array with one dimension
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes of more than 8 bits


class Picture(NamedTuple):
    """A picture for a page.

    Attributes:
        url: its content, as ``data:image/...``.
        width: the width at which it is shown, in pixels.
        height: the height.
        enlarged: whether its own size is smaller.
    """

    url: str
    width: int
    height: int
    enlarged: bool


def of_image(data: bytes, side: int) -> Picture:
    """Return a picture of an encoded image, reduced to a longer side of ``side`` pixels.

    Raises:
        Exception: it cannot be decoded, or has too many pixels.
    """
    image = open_image(data, MAX_PIXELS)
    image.draft(None, (side, side))  # a JPEG is decoded to about this size, in a fraction of the time
    return of_pil(image, side)


def of_pil(image: Any, side: int) -> Picture:
    """Return a picture of an image of Pillow's."""
    if image.mode in _DEEP:
        return of_array(np.asarray(image), side)
    transparent = image.has_transparency_data
    converted = image.convert("RGBA" if transparent else "L" if image.mode in ("1", "L") else "RGB")
    return _encoded(converted, side, lossless=transparent or image.mode in ("1", "P"))


def of_array(value: Any, side: int, limits: tuple[float, float] | None = None) -> Picture:
    """Return a picture of an array or a tensor: of one dimension as a curve, else of its first
    image.

    Args:
        value: the array; uint8 is drawn as it is.
        side: the longer side of the picture in pixels, at most.
        limits: the numbers that are black and white; None: the least and the greatest one.

    Raises:
        ValueError: there is nothing to draw.
    """
    from PIL import Image

    pixels = _first_image(value)
    if pixels.dtype != np.uint8:
        low, high = limits or range_of(pixels)
        numbers = np.nan_to_num(pixels.astype(np.float64), nan=low, posinf=high, neginf=low)
        pixels = ((numbers - low) / ((high - low) or 1) * 255).astype(np.uint8)
    return _encoded(Image.fromarray(pixels), side, lossless=min(pixels.shape[:2]) <= _CURVE)


def range_of(values: Any) -> tuple[float, float]:
    """Return the least and the greatest number in an array, of those that are finite; 0 and 0:
    there is none.
    """
    finite = values[np.isfinite(values)] if values.dtype.kind in "fc" else values
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def as_numbers(value: Any) -> Any:
    """Return an array or a tensor as an array of real numbers; None: it is none."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.dtype.is_floating_point else value).numpy()
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size else None


def _first_image(value: Any) -> Any:
    """Return an array of shape (H, W) or (H, W, 3 or 4)."""
    numbers = as_numbers(value)
    if numbers is None or numbers.size == 1:
        raise ValueError("there is nothing to draw")
    array = numbers.squeeze()  # one embedding in an array of shape (1, 512) is a curve
    while array.ndim > 3 or (array.ndim == 3 and not {array.shape[0], array.shape[2]} & {1, 3, 4}):
        array = array[0]
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 1:
        return _curve(array)
    step = max(1, max(array.shape[:2]) // (2 * LARGE))
    array = array[::step, ::step]
    return np.ascontiguousarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _curve(values: Any) -> Any:
    """Return a drawing of an array of one dimension, of shape (64, 448), uint8."""
    places = np.arange(2 * SMALL) * len(values) // (2 * SMALL)
    chosen = np.nan_to_num(values[places].astype(np.float64), posinf=0, neginf=0)
    low, high = min(chosen.min(), 0.0), max(chosen.max(), 0.0)
    levels = np.linspace(high, low, _CURVE)[:, None]
    filled = ((levels > 0) & (chosen >= levels)) | ((levels <= 0) & (chosen <= levels))
    return np.where(filled, 90, 235).astype(np.uint8)


def _encoded(image: Any, side: int, *, lossless: bool) -> Picture:
    image.thumbnail((side, side))
    lossless = lossless or max(image.size) <= _LOSSLESS
    file = io.BytesIO()
    image.save(file, "PNG" if lossless else "JPEG", **({} if lossless else {"quality": 82}))
    kind = "png" if lossless else "jpeg"
    times = max(1, _ENLARGED // max(image.size))
    url = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(url, image.width * times, image.height * times, times > 1)
