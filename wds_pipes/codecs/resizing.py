"""Resizing images to one size, antialiased, with the results of Pillow's ``BILINEAR``."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.core.options import check_choice, check_count

Size = int | tuple[int, int]
Fit = Literal["cover", "contain", "stretch"]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
Pixels = npt.NDArray[np.uint8]

# A scaled JPEG must still have this many times the requested width and height. It costs little
# time, because the halves and quarters that are left to resize are small, and the difference from
# decoding all pixels stays above 40 dB: at 1.5 it is 38 dB, at 1 it is 30 dB.
_LEAST_RATIO = 2.25
# And this many pixels in both directions: its last row and column may be of less than a pixel.
_LEAST_SIDE = 16
# How far the grid of whole pixels may lie beside the exact one, in pixels of the image.
_TOLERANCE = 1 / 16
_TRIES = 24


class Place(NamedTuple):
    """Which part of an image is resized, and where it lies in the result."""

    box: Box
    width: int
    height: int
    left: int = 0
    top: int = 0


class Resize:
    """The size that images are resized to.

    Args:
        size: height and width, or one number for both.
        fit: see ``decode_by_ext``.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, size: Size, fit: Fit) -> None:
        pair = (size, size) if not isinstance(size, (tuple, list)) else tuple(size)
        if len(pair) != 2:
            raise ValueError(f"size is one number, or (height, width), not {size!r:.80}")
        self.height, self.width = (check_count("size", number, most=1 << 16) for number in pair)
        self.fit = check_choice("fit", fit, "cover", "contain", "stretch")

    def place(self, width: int, height: int) -> Place:
        """Return the part of an image that is resized, as ``ImageOps.fit`` and ``ImageOps.pad`` of
        Pillow choose it.
        """
        if self.fit == "stretch":
            return Place((0, 0, width, height), self.width, self.height)
        # Fractions are compared as products of ints, which are exact.
        wider = width * self.height - height * self.width  # positive: the image is wider than the result
        if self.fit == "cover":
            used_width = height * self.width / self.height if wider > 0 else width
            used_height = width * self.height / self.width if wider < 0 else height
            left, top = (width - used_width) / 2, (height - used_height) / 2
            return Place((left, top, left + used_width, top + used_height), self.width, self.height)
        new_width = max(1, round(width / height * self.height)) if wider < 0 else self.width
        new_height = max(1, round(height / width * self.width)) if wider > 0 else self.height
        left, top = round((self.width - new_width) / 2), round((self.height - new_height) / 2)
        return Place((0, 0, width, height), new_width, new_height, left, top)

    def denominator(self, width: int, height: int) -> int:
        """Return by how much a JPEG may be scaled when it is decoded: 1, 2, 4 or 8.

        libjpeg-turbo also has scales such as 5/8, but they take longer than decoding all pixels.
        """
        (left, top, right, bottom), new_width, new_height, *_ = self.place(width, height)
        ratio = min((right - left) / new_width, (bottom - top) / new_height)
        most = min(ratio / _LEAST_RATIO, min(width, height) / _LEAST_SIDE)
        return next((denominator for denominator in (8, 4, 2) if denominator <= most), 1)

    def resize(self, array: Pixels, width: int, height: int) -> Pixels:
        """Resize an image.

        Args:
            array: the image, of shape (H, W) or (H, W, C).
            width: the width of the image before a JPEG was scaled.
            height: its height.

        Returns:
            An array of the size, which can be written to.
        """
        place = self.place(width, height)
        scale = next(scale for scale in (1, 2, 4, 8) if -(-width // scale) == array.shape[1])
        box = tuple(edge / scale for edge in place.box)
        resized = _resize(array, (box[0], box[1], box[2], box[3]), place.width, place.height)
        if resized.shape[:2] == (self.height, self.width):
            return resized
        result = np.zeros((self.height, self.width, *array.shape[2:]), np.uint8)
        result[place.top : place.top + place.height, place.left : place.left + place.width] = resized
        return result


def read_resize(size: Size | None, fit: Fit) -> Resize | None:
    """Read the arguments of ``decode_by_ext``; None: images keep their sizes.

    Raises:
        TypeError, ValueError: an argument is wrong, or there is a fit without a size.
    """
    if size is not None:
        return Resize(size, fit)
    if check_choice("fit", fit, "cover", "contain", "stretch") != "cover":
        raise ValueError(f"fit={fit!r} says how images become one size: also pass size=, such as size=224")
    return None


def _resize(array: Pixels, box: Box, width: int, height: int) -> Pixels:
    """Resize a part of an image: torch takes a third of the time of Pillow for colours, and
    rounds differently in one pixel of thousands.
    """
    if array.shape[:2] == (height, width) and (box[2] - box[0], box[3] - box[1]) == (width, height):
        return array
    if array.shape[2:] == (3,):
        across = _grid(box[0], box[2], width, array.shape[1])
        down = _grid(box[1], box[3], height, array.shape[0])
        if across is not None and down is not None:
            return _resize_with_torch(array, across, down, width, height)
    from PIL import Image

    # Pillow weighs the colours of pixels by their alpha.
    image = Image.fromarray(array).resize((width, height), Image.Resampling.BILINEAR, box)
    return np.array(image)


class _Grid(NamedTuple):
    """Where torch resizes one axis: pixels ``first`` to ``last``, of whose result the first
    ``dropped`` pixels are outside the box.
    """

    first: int
    last: int
    dropped: int
    factor: float


def _grid(start: float, end: float, size: int, length: int) -> _Grid | None:
    """Find the whole pixels of an axis that torch resizes to the pixels of the result.

    torch resizes from a whole pixel on, but a box may begin inside a pixel: if 500 pixels are
    cropped to 375, at 62.5. So resize from a pixel further left on, which lies a whole number of
    pixels of the result before the box, and drop those. None: there is no such pixel nearby.
    """
    scale = (end - start) / size
    reach = max(scale, 1.0)  # the filter reaches this far beyond the box
    least = math.ceil(reach / scale) if start else 0
    best, error = 0, math.inf
    for dropped in range(least, least + _TRIES if start else 1):
        first = start - dropped * scale
        if first < -_TOLERANCE:
            break
        if abs(first - round(first)) < error:
            best, error = dropped, abs(first - round(first))
        if error < _TOLERANCE:
            whole = round(start - best * scale)
            factor = (best + size / 2) / ((start + end) / 2 - whole)  # so that the centre of the box is exact
            # a little larger, so that rounding does not cost the last pixel
            return _Grid(whole, min(length, math.ceil(end + reach)), best, factor * (1 + 1e-9))
    return None


def _resize_with_torch(array: Pixels, across: _Grid, down: _Grid, width: int, height: int) -> Pixels:
    import torch

    part = torch.from_numpy(array)[None, down.first : down.last, across.first : across.last]
    resized: Any = torch.nn.functional.interpolate(
        part.permute(0, 3, 1, 2),  # torch sees that the channels are last, and is twice as quick
        scale_factor=(down.factor, across.factor),
        mode="bilinear",
        antialias=True,
        recompute_scale_factor=False,
    )[0].permute(1, 2, 0)
    resized = resized[down.dropped : down.dropped + height, across.dropped : across.dropped + width]
    found: Pixels = resized.contiguous().numpy()
    return found
