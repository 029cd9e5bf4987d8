"""Resizing images to one size, antialiased, with the results of Pillow's ``BILINEAR``."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.core.options import check_choice, check_count

Size = int | tuple[int, int]
Fit = Literal["cover", "contain", "stretch"]
Crop = Literal["center", "random"]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
Pixels = npt.NDArray[Any]  # uint8; float32 of grey images of 16 bits

# A scaled JPEG must still have this many times the requested width and height. It costs little
# time, because the halves and quarters that are left to resize are small. The PSNR against decoding
# all pixels was at least 36 dB for 200 photographs of 500 x 375, and below 40 dB for at most 7.
# Twice this number would change little.
_LEAST_RATIO = 2.25
# And this many pixels in both directions: its last row and column may be of less than a pixel.
_LEAST_SIDE = 16
# And a JPEG must have this many times the requested width and height to be decoded roughly, which
# saves 8 % of the time. The PSNR of those photographs is then at least 41 dB; at 1 it would be 38.
_LEAST_ROUGH = 1.5
# How far the grid of whole pixels may lie beside the exact one, in pixels of the image.
_TOLERANCE = 1 / 16
_TRIES = 24
_DRAWS = 10  # tries to choose a part that fits into an image, as torchvision makes
TURNED = (5, 6, 7, 8)  # the orientations of EXIF that exchange width and height


class Place(NamedTuple):
    """Which part of an image is resized, and where it lies in the result."""

    box: Box
    width: int
    height: int
    left: int = 0
    top: int = 0


class Scale(NamedTuple):
    """How a JPEG may be decoded if it is resized.

    Attributes:
        denominator: to which part of its size: 1, 2, 4 or 8. libjpeg-turbo also has scales such as
            5/8, but they take longer than decoding all pixels.
        rough: with its quick cosine transform, and without smoothing the colours.
    """

    denominator: int
    rough: bool


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
        self.fit: Fit = check_choice("fit", fit, "cover", "contain", "stretch")  # type: ignore[assignment]

    def as_stored(self, orientation: int) -> Resize:
        """Return the same for images as they are stored, which are turned by this orientation of
        their EXIF after they are resized.
        """
        return Resize((self.width, self.height), self.fit) if orientation in TURNED else self

    def scale(self, width: int, height: int) -> Scale:
        """Return how a JPEG of this size may be decoded."""
        return _scale_for(self, width, height)

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

    def crop_of(self, width: int, height: int) -> npt.NDArray[Any]:
        """The part of an image of this size, as in ``__crop__``: see ``decode_by_ext``."""
        return _as_field(self.place(width, height).box, mirrored=False)

    def resize(self, array: Pixels, width: int, height: int) -> Pixels:
        """Resize an image.

        Args:
            array: the image, of shape (H, W) or (H, W, C).
            width: the width of the image before a JPEG was scaled.
            height: its height.

        Returns:
            An array of the size, which can be written to.
        """
        denominator = next(scale for scale in (1, 2, 4, 8) if -(-width // scale) == array.shape[1])
        plan = _plan(self, width, height, denominator)
        place = plan.place
        resized = _resize(array, plan)
        if resized.shape[:2] == (self.height, self.width):
            return resized
        result = np.zeros((self.height, self.width, *array.shape[2:]), array.dtype)
        result[place.top : place.top + place.height, place.left : place.left + place.width] = resized
        return result


class CenterCrop(Resize):
    """The middle of images whose shorter side is resized to a number of pixels.

    Args:
        size: height and width of the result, or one number for both.
        side: the pixels to which the shorter side is resized.

    Raises:
        TypeError, ValueError: an argument is wrong, or the size is larger than the side.
    """

    def __init__(self, size: Size, side: int) -> None:
        super().__init__(size, "cover")
        self.side = check_count("resize", side, most=1 << 16)
        if max(self.height, self.width) > self.side:
            raise ValueError(f"size={size} does not fit into images whose shorter side is resize={side}")

    def as_stored(self, orientation: int) -> Resize:
        return CenterCrop((self.width, self.height), self.side) if orientation in TURNED else self

    def place(self, width: int, height: int) -> Place:
        factor = min(width, height) / self.side
        across, down = self.width * factor, self.height * factor
        left, top = (width - across) / 2, (height - down) / 2
        return Place((left, top, left + across, top + down), self.width, self.height)


class RandomCrop:
    """A random part of images, as in torchvision's RandomResizedCrop and RandomHorizontalFlip.

    Of the area of an image, a part between the bounds of ``scale`` is chosen, of a ratio of width
    to height between those of ``ratio``, uniform in its logarithm. After ten tries that do not fit
    into the image, the part is the largest one in its middle whose ratio is within the bounds.

    Args:
        size: height and width of the result, or one number for both.
        scale: the bounds of the part of the area.
        ratio: the bounds of width / height.
        flip: mirror one half of the images, left to right.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        size: Size,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = False,
    ) -> None:
        self.resize = Resize(size, "stretch")
        for name, bounds, most in (("scale", scale, 1.0), ("ratio", ratio, math.inf)):
            if not (isinstance(bounds, (tuple, list)) and len(bounds) == 2 and 0 < bounds[0] <= bounds[1] <= most):
                raise ValueError(f"{name} is a pair of bounds, such as (0.08, 1.0), not {bounds!r:.80}")
        self.scale, self.ratio, self.flip = tuple(scale), tuple(ratio), bool(flip)

    def drawn(self, rng: np.random.Generator) -> DrawnCrop:
        """Return the crop that a generator draws; it depends on the size of an image, too."""
        return DrawnCrop(self, rng.random((_DRAWS + 1, 4)).tolist())


class DrawnCrop:
    """A crop, with the random numbers that choose it.

    Args:
        crop: its bounds.
        numbers: for each try four numbers from 0 to 1: of the area, the ratio, the top and the left
            of the part. After those of all tries comes that of the mirror.
        orientation: by which the image is turned after it is resized. The bounds and the numbers
            are those of the turned image.
    """

    def __init__(self, crop: RandomCrop, numbers: list[list[float]], orientation: int = 1) -> None:
        self._crop, self._numbers, self._orientation = crop, numbers, orientation
        self._resize = crop.resize.as_stored(orientation)

    def as_stored(self, orientation: int) -> DrawnCrop:
        """Return the same for images as they are stored: see ``Resize.as_stored``."""
        return DrawnCrop(self._crop, self._numbers, orientation)

    def crop_of(self, width: int, height: int) -> npt.NDArray[Any]:
        """The part of an image of this size: see ``Resize.crop_of``."""
        return _as_field(self.box(width, height), mirrored=self.mirrored)

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The left, top, right and bottom of the part of an image of this size."""
        (least, most), (narrow, wide) = self._crop.scale, self._crop.ratio
        for area, shape, down, across in self._numbers[:-1]:
            part = width * height * (least + (most - least) * area)
            ratio = math.exp(math.log(narrow) + (math.log(wide) - math.log(narrow)) * shape)
            new_width, new_height = round(math.sqrt(part * ratio)), round(math.sqrt(part / ratio))
            if 0 < new_width <= width and 0 < new_height <= height:
                left, top = int(across * (width - new_width + 1)), int(down * (height - new_height + 1))
                return left, top, left + new_width, top + new_height
        new_width = width if width / height <= wide else max(1, round(height * wide))
        new_height = height if width / height >= narrow else max(1, round(width / narrow))
        left, top = (width - new_width) // 2, (height - new_height) // 2
        return left, top, left + new_width, top + new_height

    @property
    def mirrored(self) -> bool:
        """Whether the part is mirrored, left to right."""
        return self._crop.flip and self._numbers[-1][0] < 0.5

    def _stored_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The left, top, right and bottom in the image as it is stored, of this size."""
        turned = self._orientation in TURNED
        width, height = (height, width) if turned else (width, height)
        left, top, right, bottom = self.box(width, height)
        if self._orientation in (2, 3, 6, 7):
            left, right = width - right, width - left
        if self._orientation in (3, 4, 7, 8):
            top, bottom = height - bottom, height - top
        return (top, left, bottom, right) if turned else (left, top, right, bottom)

    def scale(self, width: int, height: int) -> Scale:
        """Return how a JPEG of this size may be decoded."""
        (left, top, right, bottom), resize = self._stored_box(width, height), self._resize
        return _scale(min((right - left) / resize.width, (bottom - top) / resize.height), width, height)

    def resize(self, array: Pixels, width: int, height: int) -> Pixels:
        """Crop and resize an image: see ``Resize.resize``."""
        denominator = next(scale for scale in (1, 2, 4, 8) if -(-width // scale) == array.shape[1])
        left, top, right, bottom = (round(edge / denominator) for edge in self._stored_box(width, height))
        part = array[top : max(bottom, top + 1), left : max(right, left + 1)]
        resized = self._resize.resize(part, part.shape[1], part.shape[0])
        if self.mirrored:
            import torch

            # 18 us for 224 x 224 colours, for which numpy takes 220
            resized = torch.from_numpy(resized).flip(0 if self._orientation in TURNED else 1).numpy()
        return np.ascontiguousarray(resized)


def _as_field(box: Box, *, mirrored: bool) -> npt.NDArray[Any]:
    """A box as left, top, width, height, and whether the part is mirrored: all ints, or floats."""
    left, top, right, bottom = box
    return np.array([left, top, right - left, bottom - top, mirrored])


Scaling = Resize | DrawnCrop  # what changes the size of decoded images


def read_resize(
    size: Size | None,
    fit: Fit,
    crop: str | None = None,
    resize: int | None = None,
    *,
    scale: tuple[float, float] | None = None,
    ratio: tuple[float, float] | None = None,
    flip: bool = False,
) -> Resize | RandomCrop | None:
    """Read the arguments of ``decode_by_ext``; None: images keep their sizes.

    Raises:
        TypeError, ValueError: an argument is wrong, or there is one without those that it needs.
    """
    if crop is not None:
        check_choice("crop", crop, "random", "center")
        if size is None or fit != "cover":
            raise ValueError(f"crop={crop!r} chooses a part of images and resizes it: pass size=, and no fit=")
    if crop != "random" and (scale or ratio or flip):
        raise ValueError("scale, ratio and flip are those of crop='random'")
    if (crop == "center") != (resize is not None):
        raise ValueError("crop='center' takes the middle of images resized to resize=: pass both, or none")
    if size is not None and crop == "random":
        return RandomCrop(size, scale or (0.08, 1.0), ratio or (3 / 4, 4 / 3), flip)
    if size is not None and resize is not None:
        return CenterCrop(size, resize)
    if size is not None:
        return Resize(size, fit)
    if check_choice("fit", fit, "cover", "contain", "stretch") != "cover":
        raise ValueError(f"fit={fit!r} says how images become one size: also pass size=, such as size=224")
    return None


class _Grid(NamedTuple):
    """Where torch resizes one axis: pixels ``first`` to ``last``, of whose result the first
    ``dropped`` pixels are outside the box.
    """

    first: int
    last: int
    dropped: int
    factor: float


class _Plan(NamedTuple):
    """How an image is resized: ``place`` is for the image as it was decoded; the grids of torch are
    None if Pillow has to do it.
    """

    place: Place
    across: _Grid | None
    down: _Grid | None


# Images of one size are common, and computing this takes 2 % of the time of decoding one.
@functools.lru_cache(1024)
def _scale_for(resize: Resize, width: int, height: int) -> Scale:
    (left, top, right, bottom), new_width, new_height, *_ = resize.place(width, height)
    return _scale(min((right - left) / new_width, (bottom - top) / new_height), width, height)


def _scale(ratio: float, width: int, height: int) -> Scale:
    """Return how a JPEG may be decoded of which a part becomes smaller by this ratio."""
    most = min(ratio / _LEAST_RATIO, min(width, height) / _LEAST_SIDE)
    denominator = next((denominator for denominator in (8, 4, 2) if denominator <= most), 1)
    return Scale(denominator, ratio >= _LEAST_ROUGH)


@functools.lru_cache(1024)
def _plan(resize: Resize, width: int, height: int, denominator: int) -> _Plan:
    place = resize.place(width, height)
    left, top, right, bottom = (edge / denominator for edge in place.box)
    across = _grid(left, right, place.width, -(-width // denominator))
    down = _grid(top, bottom, place.height, -(-height // denominator))
    return _Plan(place._replace(box=(left, top, right, bottom)), across, down)


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


def _resize(array: Pixels, plan: _Plan) -> Pixels:
    """Resize a part of an image: torch takes a sixth of the time of Pillow for colours, and rounds
    differently.
    """
    place, across, down = plan
    (left, top, right, bottom), width, height, *_ = place
    if array.shape[:2] == (height, width) and (right - left, bottom - top) == (width, height):
        return array
    if array.shape[2:] == (3,) and across is not None and down is not None:
        return _resize_with_torch(array, across, down, width, height)
    from PIL import Image

    # Pillow weighs the colours of pixels by their alpha.
    image = Image.fromarray(array).resize((width, height), Image.Resampling.BILINEAR, place.box)
    return np.array(image)


def _resize_with_torch(array: Pixels, across: _Grid, down: _Grid, width: int, height: int) -> Pixels:
    # First the rows, which torch does twice as quickly as columns; in one call, it would begin with
    # the columns. Slices and copies are those of numpy, which are quicker.
    part = np.ascontiguousarray(array[down.first : down.last, across.first : across.last])
    rows = _interpolate(part, down.factor, 1.0)[down.dropped : down.dropped + height]
    columns = _interpolate(rows, 1.0, across.factor)[:, across.dropped : across.dropped + width]
    return np.ascontiguousarray(columns)


def _interpolate(array: Pixels, down: float, across: float) -> Pixels:
    """Resize an array of shape (H, W, 3) by two factors."""
    import torch

    # From the strides of this view torch sees that channels are last. Methods of torch would
    # release the GIL each time, and then wait for it.
    image = torch.from_numpy(array.reshape(1, *array.shape).transpose(0, 3, 1, 2))
    resized = torch.nn.functional.interpolate(
        image, scale_factor=(down, across), mode="bilinear", antialias=True, recompute_scale_factor=False
    )
    found: Pixels = resized.numpy()[0].transpose(1, 2, 0)
    return found
