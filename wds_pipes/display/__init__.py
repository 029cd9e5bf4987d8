"""Samples and pipelines for people: as short text, and as HTML in notebooks.

Rules:
1. Text, images and numbers of others are shown as data: escaped, cut to a bounded length, and pictures always drawn anew by Pillow.
2. Showing never fails: what cannot be shown as a picture is told by its type and shape.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from html import escape
from typing import Any

import numpy as np

from wds_pipes.codecs import IMAGE, image_decoder
from wds_pipes.core.words import plural
from wds_pipes.io.urls import hide, is_secret

__all__ = ["View", "show"]

MAX_TEXT = 80  # characters of a string in a call
MAX_PREVIEW = 300  # characters of a field
MAX_FIELDS = 50
MAX_IMAGES = 16  # of a sample or a batch
IMAGE_PIXELS = 192  # along the longer side
SMALL_PIXELS = 96  # an image with less than half of this is enlarged, up to this
MAX_VALUES = 16  # of a row of numbers, such as labels
SHORT_BYTES = 20  # of a field that is not decoded: shown if they are text, such as those of a label
MAX_SAMPLES = 16  # of a list of them
MIN_PIXELS = 8  # along the shorter side of an array: a smaller one is hardly an image
MAX_IMAGE_PIXELS = 1 << 25  # of an encoded image: a larger one is not decoded to show it

_OPTIONS_WITH_SECRETS = ("storage_options", "headers", "client_kwargs")


def shown(value: Any, name: str = "", *, depth: int = 0, limit: int = MAX_TEXT) -> str:
    """A value as short text without secrets, as it would be written where that is possible.

    Args:
        value: anything; its own ``repr`` is called only for plain values.
        name: that of the option whose value it is: some are told without their values. Empty for data.
        depth: how deep it lies in others.
        limit: so many characters of a string.
    """
    kind = type(value)
    if isinstance(value, (str, os.PathLike)):
        text = str(value)
        return "'...'" if is_secret(name) else repr(cut(hide(text, text), limit))
    if is_secret(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return "..."
    if value is None or isinstance(value, (bool, int, float, complex, Fraction, np.number, np.bool_)):
        return cut(str(value) if isinstance(value, np.generic) else repr(value), limit)
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        return _shown_mapping(value, name, depth, limit)
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        left, right = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        items = [] if depth > 2 else [shown(item, name, depth=depth + 1, limit=limit) for item, _ in zip(value, range(3), strict=False)]
        return left + ", ".join([*items, *(["..."] if len(value) > len(items) else [])]) + ("," if left == "(" and len(value) == 1 else "") + right
    if (shape := _shape(value)) is not None:
        return f"<{shape}>"
    if callable(value):
        return _name_of(getattr(value, "func", value))
    return f"{kind.__name__}(...)"


def _shown_mapping(value: Mapping[Any, Any], name: str, depth: int, limit: int) -> str:
    secret = name in _OPTIONS_WITH_SECRETS
    items: list[str] = []
    for option, item in value.items():
        if len(items) == 6 or depth > 2:
            items.append("...")
            break
        plain = item is None or isinstance(item, bool)
        text = "..." if secret and not plain else shown(item, str(option) if name else "", depth=depth + 1, limit=limit)
        items.append(f"{shown(option, limit=limit)}: {text}")
    return "{" + ", ".join(items) + "}"


def _name_of(value: Any) -> str:
    """The name of a function or class, or that of an object's class."""
    name = getattr(value, "__name__", None)
    if not isinstance(name, str):
        return f"{type(value).__name__}(...)"
    return "lambda" if name == "<lambda>" else name


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` with what a terminal would obey (escape sequences, changes of direction) written out; line breaks and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut(text: str, limit: int) -> str:
    """``text``, or its beginning and its end with dots between."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]}...{text[-(limit // 3) :]}"


def _shape(value: Any) -> str | None:
    """An array or a tensor by its type, dtype and shape; None for anything else."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or isinstance(value, type):
        return None
    device = str(getattr(value, "device", "cpu"))
    where = "" if device == "cpu" else f" on {device}"
    return f"{type(value).__name__} {str(dtype).removeprefix('torch.')} {tuple(map(int, shape))}{where}"


class View:
    """Something to look at: HTML where a notebook shows it, text anywhere else."""

    def __init__(self, text: str, html: str) -> None:
        self._text, self._html = text, html

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


def show(item: Any) -> View:
    """Look at a sample, a batch, or a pipeline: as the last line of a notebook's cell it is a table with its pictures, in a terminal it is text.

    A list of samples (dicts or tuples) is a grid. Images are drawn at up to 192 pixels, and small ones enlarged: encoded ones by the name of their field, PIL
    images, arrays of shape (H, W, 1, 3 or 4) or, of uint8, (H, W), tensors of shape (1, 3 or 4, H, W), and batches of those. Floats outside of 0 to 1 are
    scaled to their range. Other arrays and tensors are told by type and shape, with the values of a row of numbers; long text is cut.

    Args:
        item: what a pipe or a loader gave, or any pipe, also one of torch's. It stays as it is, and a pipe is not iterated.
    """
    if hasattr(type(item), "_repr_html_"):  # it knows how to show itself
        return View(repr(item), item._repr_html_())
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(item, torch_data.IterDataPipe):
        from wds_pipes.display.graph import to_html, to_text

        return View(to_text(item), to_html(item))
    if isinstance(item, (list, tuple)) and not hasattr(item, "_fields") and len(item) > 1 and all(isinstance(part, (Mapping, tuple)) for part in item):
        return _grid(item)
    fields = _fields(item)
    told = fields[:MAX_FIELDS]
    more = f"and {len(fields) - MAX_FIELDS:,} more fields" if len(fields) > MAX_FIELDS else ""
    width = max((len(name) for name, _ in told), default=0)
    lines = [f"{cut(name, 40):<{min(width, 40)}}  {_preview(name, value)}" for name, value in told]
    rows, images = [], 0
    for name, value in told:
        pictures = _pictures(name, value, MAX_IMAGES - images)
        images += len(pictures)
        drawn = "".join(pictures)
        text = f'<div style="white-space:pre-wrap;text-align:left">{escape(_preview(name, value))}</div>'
        rows.append(f'<tr><th style="text-align:left;vertical-align:top">{escape(cut(name, 40))}</th><td style="text-align:left">{drawn}{text}</td></tr>')
    rows += [f'<tr><td colspan="2">{more}</td></tr>'] if more else []
    return View("\n".join([*lines, *([more] if more else [])]), f'<table class="wds-pipes">{"".join(rows)}</table>')


def _grid(samples: Any) -> View:
    """Several samples side by side."""
    views = [show(sample) for sample in samples[:MAX_SAMPLES]]
    more = f"and {len(samples) - MAX_SAMPLES:,} more" if len(samples) > MAX_SAMPLES else ""
    cells = "".join(f'<div style="border:1px solid #8884;padding:4px;overflow:auto">{view._repr_html_()}</div>' for view in views)
    text = "\n\n".join([*map(repr, views), *([more] if more else [])])
    columns = "display:grid;grid-template-columns:repeat(auto-fill,minmax(260px,1fr));gap:6px"
    return View(text, f'<div class="wds-pipes" style="{columns}">{cells}</div>{more}')


def _fields(item: Any) -> list[tuple[str, Any]]:
    """The parts of a sample by name."""
    if isinstance(item, Mapping):
        return [(plain(str(name)), value) for name, value in item.items()]
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return list(zip(map(str, item._fields), item, strict=False))
    if isinstance(item, (tuple, list)):
        return [(str(number), value) for number, value in enumerate(item)]
    return [("", item)]


def _preview(name: str, value: Any) -> str:
    """A field in a line or a few."""
    if isinstance(value, str):
        return plain(cut(hide(value, value) if name.strip("_") == "url" else value, MAX_PREVIEW))
    if isinstance(value, (bytes, bytearray)):
        size = plural(len(value), "byte")
        text = bytes(value[:SHORT_BYTES]).decode("ascii", "replace")
        return f"{size}: {text}" if 0 < len(value) <= SHORT_BYTES and text.isprintable() and text.isascii() else size
    if _is_pil(value):
        return f"{type(value).__name__} {value.mode} {value.width} x {value.height}"
    if (shape := _shape(value)) is not None:
        return f"{shape} {_values(value)}".strip()
    many = f"{type(value).__name__} of {len(value):,}: " if isinstance(value, (list, tuple)) and len(value) > 3 else ""
    return cut(many + shown(value, limit=MAX_PREVIEW), MAX_PREVIEW)


def _values(value: Any) -> str:
    """The number in an array of one, or the first ones of a row of numbers."""
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
    except Exception:  # rule 2
        return ""


def _is_pil(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "convert")


def _pictures(name: str, value: Any, most: int) -> list[str]:
    """The images of a field as PNGs in HTML; none where there is no image, or none that can be drawn."""
    if most <= 0:
        return []
    try:
        if _is_pil(value):
            return [_png(value)]
        if isinstance(value, (bytes, bytearray)):
            return [_png(image_decoder("pilrgba", MAX_IMAGE_PIXELS)(bytes(value)))] if name.rpartition(".")[2].lower() in IMAGE else []
        if isinstance(value, (list, tuple)) and value and all(map(_is_pil, value[:most])):
            return [_png(image) for image in value[:most]]
        return [] if _shape(value) is None else [_drawn(image) for image in _images(value, most)]
    except Exception:  # rule 2
        return []


def _images(value: Any, most: int) -> list[Any]:
    """The images in an array or tensor, as arrays of shape (H, W) or (H, W, channels)."""
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
    """An image as a PNG in HTML, no larger than is shown; a small one with large pixels."""
    image = image.copy() if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    image.thumbnail((IMAGE_PIXELS, IMAGE_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    times = max(1, SMALL_PIXELS // max(image.size))
    style = f"margin:2px;width:{image.width * times}px;image-rendering:pixelated" if times > 1 else "margin:2px"
    return f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}" style="{style}">'
