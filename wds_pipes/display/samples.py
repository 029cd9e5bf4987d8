"""Shows samples and batches: as short text, and as HTML in notebooks.

Rules:
1. The content of samples is not trusted: text is escaped and cut to a bounded length, and pictures
   are always encoded again by Pillow.
2. Showing never fails: what cannot be shown as a picture is described by its type and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from wds_pipes.codecs.table import IMAGE
from wds_pipes.core.hosts import is_pipe
from wds_pipes.core.words import plain, plural
from wds_pipes.display.pictures import Picture, as_numbers, of_array, of_image, of_pil, range_of
from wds_pipes.display.text import cut, shape_of, shown
from wds_pipes.io.urls import hide

MAX_PREVIEW = 300  # characters of a field
MAX_FIELDS = 50
MAX_IMAGES = 16  # of a sample or a batch
MAX_VALUES = 16  # of a one-dimensional array, such as labels
SHORT_BYTES = 20  # a field of at most this number of bytes is shown if it is text, such as a label
MAX_SAMPLES = 16  # of a list of samples
IMAGE_PIXELS = 192  # the longer side of a shown image at most
MIN_PIXELS = 8  # an array whose shorter side is smaller is not taken as an image
_CHANNELS = (1, 3, 4)


class View:
    """What ``show`` returns: HTML in a notebook, text elsewhere."""

    def __init__(self, text: str, html: str) -> None:
        self._text, self._html = text, html

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


def show(item: Any) -> View:
    """Show a sample, a batch, or a pipeline.

    As the last line of a notebook's cell, the result is a table with pictures; in a terminal it is
    text.

    A list of samples (dicts or tuples) becomes a grid. Images are drawn with a longer side of up to
    192 pixels, and small ones are enlarged. These are images: encoded images (recognised by the
    name of their field), PIL images, arrays of shape (H, W, 1, 3 or 4) or, if uint8, (H, W),
    tensors of shape (1, 3 or 4, H, W), and batches of these. Floats outside of 0 to 1 are scaled to
    their range. Other arrays and tensors are described by type and shape, and by their first values
    if they have one dimension. Long text is cut.

    Args:
        item: an item of a pipe or a loader, or any pipe, also one of torch's. It is not changed,
            and a pipe is not iterated.
    """
    if hasattr(type(item), "_repr_html_"):  # it can show itself
        return View(repr(item), item._repr_html_())
    if is_pipe(item):
        from wds_pipes.display.graph import to_html, to_text

        return View(to_text(item), to_html(item))
    if (
        isinstance(item, (list, tuple))
        and not hasattr(item, "_fields")
        and len(item) > 1
        and all(isinstance(part, (Mapping, tuple)) for part in item)
    ):
        return _grid(item)
    fields = _fields(item)
    more = f"and {len(fields) - MAX_FIELDS:,} more fields" if len(fields) > MAX_FIELDS else ""
    lines, rows, images = [], [], 0
    width = min(40, max((len(name) for name, _ in fields[:MAX_FIELDS]), default=0))
    for name, value in fields[:MAX_FIELDS]:
        title, text = cut(name, 40), _preview(name, value)
        pictures = pictures_of(name, value, MAX_IMAGES - images)
        images += len(pictures)
        lines.append(f"{title:<{width}}  {text}")
        rows.append(
            f'<tr><th style="text-align:left;vertical-align:top">{escape(title)}</th><td style="text-align:left">'
            f'{"".join(pictures)}<div style="white-space:pre-wrap;text-align:left">{escape(text)}</div></td></tr>'
        )
    if more:
        lines.append(more)
        rows.append(f'<tr><td colspan="2">{more}</td></tr>')
    return View("\n".join(lines), f'<table class="wds-pipes">{"".join(rows)}</table>')


def _grid(samples: Any) -> View:
    """Show several samples side by side."""
    views = [show(sample) for sample in samples[:MAX_SAMPLES]]
    more = f"and {len(samples) - MAX_SAMPLES:,} more" if len(samples) > MAX_SAMPLES else ""
    cells = "".join(
        f'<div style="border:1px solid #8884;padding:4px;overflow:auto">{view._repr_html_()}</div>' for view in views
    )
    text = "\n\n".join([*map(repr, views), *([more] if more else [])])
    columns = "display:grid;grid-template-columns:repeat(auto-fill,minmax(260px,1fr));gap:6px"
    return View(text, f'<div class="wds-pipes" style="{columns}">{cells}</div>{more}')


def _fields(item: Any) -> list[tuple[str, Any]]:
    """Return the fields of a sample by name."""
    if isinstance(item, Mapping):
        return [(plain(str(name)), value) for name, value in item.items()]
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return list(zip(map(str, item._fields), item, strict=False))
    if isinstance(item, (tuple, list)):
        return [(str(number), value) for number, value in enumerate(item)]
    return [("", item)]


def _preview(name: str, value: Any) -> str:
    """Return a field as a line or a few lines of text."""
    if isinstance(value, str):
        return plain(cut(hide(value, value) if name.strip("_") == "url" else value, MAX_PREVIEW))
    if isinstance(value, (bytes, bytearray)):
        size = plural(len(value), "byte")
        text = bytes(value[:SHORT_BYTES]).decode("ascii", "replace")
        return f"{size}: {text}" if 0 < len(value) <= SHORT_BYTES and text.isprintable() and text.isascii() else size
    if is_pil(value):
        return f"{type(value).__name__} {value.mode} {value.width} x {value.height}"
    if (shape := shape_of(value)) is not None:
        return f"{shape} {_values(value)}".strip()
    many = f"{type(value).__name__} of {len(value):,}: " if isinstance(value, (list, tuple)) and len(value) > 3 else ""
    return cut(many + shown(value, limit=MAX_PREVIEW), MAX_PREVIEW)


def _values(value: Any) -> str:
    """Return the number in an array of size 1, or the first numbers of a one-dimensional array."""
    try:
        if np.prod(value.shape) == 1:
            return shown(value.item())
        if len(value.shape) != 1:
            return ""
        first = value[:MAX_VALUES].tolist()
        if not all(isinstance(number, (bool, int, float)) for number in first):
            return ""
        texts = [f"{number:.4g}" if isinstance(number, float) else str(number) for number in first]
        return "[" + ", ".join([*texts, *(["..."] if value.shape[0] > MAX_VALUES else [])]) + "]"
    except Exception:  # showing never fails
        return ""


def is_pil(value: Any) -> bool:
    """Whether this is a Pillow image."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "convert")


def pictures_of(name: str, value: Any, most: int) -> list[str]:
    """Return the images of a field in HTML, at most ``most``; none if none can be drawn."""
    if most <= 0:
        return []
    try:
        return list(map(_html, _pictures(name, value, most)))
    except Exception:  # showing never fails
        return []


def _pictures(name: str, value: Any, most: int) -> list[Picture]:
    if isinstance(value, (bytes, bytearray)):
        return [of_image(bytes(value), IMAGE_PIXELS)] if name.rpartition(".")[2].lower() in IMAGE else []
    images = [value] if is_pil(value) else value
    if isinstance(images, (list, tuple)):
        return [of_pil(image, IMAGE_PIXELS) for image in images[:most]] if all(map(is_pil, images[:most])) else []
    return [] if shape_of(value) is None else [_of_array(image) for image in _images(value, most)]


def _images(value: Any, most: int) -> list[Any]:
    """Return the images in an array or tensor, as arrays of shape (H, W, channels)."""
    tensor = hasattr(value, "detach")
    value = as_numbers(value[:most] if value.ndim == 4 else value[None])
    if value is not None and value.ndim == 3 and value.dtype == np.uint8:  # of shape (H, W)
        value = value[..., None]
    if value is None or value.ndim != 4:
        return []
    if value.shape[1] in _CHANNELS and (tensor or value.shape[3] not in _CHANNELS):
        value = value.transpose(0, 2, 3, 1)
    high, wide, channels = value.shape[1:]
    return list(value) if channels in _CHANNELS and min(high, wide) >= MIN_PIXELS else []


def _of_array(image: Any) -> Picture:
    low, high = range_of(image)
    return of_array(image, IMAGE_PIXELS, (min(low, 0.0), max(high, 1.0)))


def _html(one: Picture) -> str:
    style = "margin:2px;image-rendering:pixelated" if one.enlarged else "margin:2px"
    return f'<img alt="a picture" src="{one.url}" width="{one.width}" height="{one.height}" style="{style}">'
