"""Converts images of samples to PNGs in HTML."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from wds_pipes.codecs.images import image_decoder
from wds_pipes.codecs.table import IMAGE
from wds_pipes.display.text import shape_of

IMAGE_PIXELS = 192  # the longer side of a shown image at most
SMALL_PIXELS = 96  # an image whose longer side is at most half of this is enlarged, up to this
MIN_PIXELS = 8  # an array whose shorter side is smaller is not taken as an image
MAX_IMAGE_PIXELS = 1 << 25  # an encoded image with more pixels is not decoded


def is_pil(value: Any) -> bool:
    """Whether this is a Pillow image."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "convert")


def pictures_of(name: str, value: Any, most: int) -> list[str]:
    """Return the images of a field as PNGs in HTML, at most ``most``; an empty list if none can be
    drawn.
    """
    if most <= 0:
        return []
    try:
        if is_pil(value):
            return [_png(value)]
        if isinstance(value, (bytes, bytearray)):
            extension = name.rpartition(".")[2].lower()
            return [_png(image_decoder("pilrgba", MAX_IMAGE_PIXELS)(bytes(value)))] if extension in IMAGE else []
        if isinstance(value, (list, tuple)) and value and all(map(is_pil, value[:most])):
            return [_png(image) for image in value[:most]]
        return [] if shape_of(value) is None else [_drawn(image) for image in _images(value, most)]
    except Exception:  # showing never fails
        return []


def _images(value: Any, most: int) -> list[Any]:
    """Return the images in an array or tensor, as arrays of shape (H, W, channels)."""
    tensor = hasattr(value, "detach")
    if not tensor and value.dtype.kind not in "biuf":
        return []
    if value.ndim == 4:
        value = value[:most]
    elif value.ndim == 3:
        value = value[None]
    elif value.ndim == 2 and str(value.dtype).endswith("uint8"):
        value = value[None, ..., None] if not tensor else value[None, None]
    else:
        return []
    first, last = value.shape[1] in (1, 3, 4), value.shape[3] in (1, 3, 4)
    if not first and not last:
        return []
    channels_first = first and (tensor or not last)
    high, wide = value.shape[2:] if channels_first else value.shape[1:3]
    if min(high, wide) < MIN_PIXELS:
        return []
    step = max(1, max(high, wide) // (2 * IMAGE_PIXELS))
    value = value[:, :, ::step, ::step] if channels_first else value[:, ::step, ::step]
    if tensor:
        value = value.detach().cpu()
        value = (value.float() if value.dtype.is_floating_point else value).numpy()
    return [image.transpose(1, 2, 0) if channels_first else image for image in value]


def _drawn(image: Any) -> str:
    from PIL import Image

    if image.dtype != np.uint8:
        image = np.nan_to_num(image.astype(np.float64), posinf=0, neginf=0)
        low, high = image.min(initial=0), image.max(initial=1)
        image = ((image - low) / (high - low) * 255).astype(np.uint8)
    return _png(Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image))


def _png(image: Any) -> str:
    """Return an image as a PNG in HTML, reduced to the size that is shown; small ones are enlarged
    by the browser.
    """
    image = image.copy() if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    image.thumbnail((IMAGE_PIXELS, IMAGE_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    times = max(1, SMALL_PIXELS // max(image.size))
    style = f"margin:2px;width:{image.width * times}px;image-rendering:pixelated" if times > 1 else "margin:2px"
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}" style="{style}">'
