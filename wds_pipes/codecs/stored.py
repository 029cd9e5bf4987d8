"""Images as the file stores them: bands, bit depths and pages, of which Pillow keeps some.

The header says what is stored. What Pillow would change (colours of 16 bits, unsigned and signed
integers of other sizes, more bands than colours, alpha that is multiplied with the colours, several
pages) is decoded by ``tifffile`` and ``imagecodecs``, the extra ``deep``, and refused without them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_pipes.codecs.codec import MAX_DECODED_BYTES, TOO_LARGE
from wds_pipes.core.importing import library
from wds_pipes.errors import mended

# Tags of TIFF.
_BITS, _PHOTOMETRIC, _ORIENTATION, _EXTRA, _SAMPLE_FORMAT, _PLANES = 258, 262, 274, 338, 339, 32997
_REDUCED, _MASK = 1, 4  # kinds of pages that are no pictures of their own, such as thumbnails
_UNSIGNED, _SIGNED, _FLOAT = 1, 2, 3
_ALPHA = 2  # the extra sample of TIFF that is alpha, not multiplied with the colours
_BLACK_IS_0, _RGB, _PALETTE, _CMYK, _YCBCR = 1, 2, 3, 5, 6
_PNG_DEEP = {2: 3, 4: 2, 6: 4}  # types of PNG with several samples, and how many

# The bits of the samples of a TIFF, their format, the extra samples and the colours that Pillow
# keeps as they are.
_KEPT: dict[tuple[tuple[int, ...], int, tuple[int, ...]], tuple[int, ...]] = {
    **{((bits,), _UNSIGNED, ()): (_BLACK_IS_0, _PALETTE) for bits in (1, 8, 16)},
    ((32,), _SIGNED, ()): (_BLACK_IS_0,),
    ((32,), _FLOAT, ()): (_BLACK_IS_0,),
    ((8, 8, 8), _UNSIGNED, ()): (_RGB, _YCBCR),
    ((8, 8, 8, 8), _UNSIGNED, (_ALPHA,)): (_RGB,),
    ((8, 8, 8, 8), _UNSIGNED, ()): (_CMYK,),
}

# How an array of shape (H, W, ...) is turned upright, by its orientation in EXIF and TIFF.
TURNS: dict[int, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    1: lambda array: array,
    2: lambda array: array[:, ::-1],
    3: lambda array: array[::-1, ::-1],
    4: lambda array: array[::-1],
    5: lambda array: array.swapaxes(0, 1),
    6: lambda array: array.swapaxes(0, 1)[:, ::-1],
    7: lambda array: array[::-1, ::-1].swapaxes(0, 1),
    8: lambda array: array.swapaxes(0, 1)[::-1],
}


def is_deep_grey(image: Any) -> bool:
    """Whether an image that Pillow has opened is grey with 16 bits a pixel."""
    return bool(image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")))


def is_deep_colour(data: bytes, image: Any) -> bool:
    """Whether an image has several samples of 16 bits a pixel, of which Pillow would keep 8."""
    if image.format == "PNG":
        return data[24] == 16 and data[25] in _PNG_DEEP
    return image.format == "TIFF" and len(_bits(image)) > 1 and _bits(image)[0] == 16


def read_deep(data: bytes, image: Any) -> npt.NDArray[Any]:
    """Decode an image with several samples a pixel: an array of shape (H, W, C).

    Raises:
        ImportError: the extra ``deep`` is missing.
        ValueError: it is damaged, or unpacks to too many bytes.
    """
    return _read_png(data) if image.format == "PNG" else _read_tiff(data, image.width * image.height, pages=None)


def has_alpha(image: Any, channels: int) -> bool:
    """Whether the last of the channels of an image is alpha."""
    if image.format == "PNG":
        return channels in (2, 4)
    return channels in (2, 4) and _extra(image) == (_ALPHA,)


def read_stored(data: bytes, image: Any, max_pixels: int, pages: str | None) -> npt.NDArray[Any]:
    """Return the array of an image as its file stores it.

    Args:
        data: the image.
        image: the same, as Pillow has opened it; None: Pillow does not know its kind of TIFF.
        max_pixels: of all pages together.
        pages: ``"all"``: those of a TIFF; None: it must have one.

    Returns:
        An array of shape (H, W) or (H, W, C), or (pages, H, W) or (pages, H, W, C): of 16 bits
        uint16, numbers of a palette, bool of 1 bit.

    Raises:
        ImportError: the extra ``deep`` is missing.
        ValueError: it has several pages, or unpacks to too many bytes; or its values would change.
    """
    if image is None or image.format == "TIFF":
        if image is None or pages or image.is_animated or not _kept(image):
            return _read_tiff(data, max_pixels, pages)
    elif is_deep_colour(data, image):
        return np.ascontiguousarray(_read_png(data)[..., : _PNG_DEEP[data[25]]])  # a transparent colour is no band
    _check_scale(image)
    array = np.array(image)
    if image.format == "PNG" and data[24] in (2, 4) and image.mode == "L":
        return array // (255 // ((1 << data[24]) - 1))  # Pillow stretches them to 8 bits
    return array.astype(np.uint16 if is_deep_grey(image) else array.dtype.newbyteorder("="), copy=False)


def _bits(image: Any) -> tuple[int, ...]:
    return tuple(image.tag_v2.get(_BITS, (1,)))


def _extra(image: Any) -> tuple[int, ...]:
    return tuple(image.tag_v2.get(_EXTRA, ()))


def _kept(image: Any) -> bool:
    """Whether Pillow keeps the samples of a TIFF as they are."""
    formats = set(image.tag_v2.get(_SAMPLE_FORMAT, (_UNSIGNED,)))
    form = (_bits(image), formats.pop(), _extra(image))
    is_flat = not formats and image.tag_v2.get(_PLANES, 1) == 1
    return is_flat and image.tag_v2.get(_PHOTOMETRIC) in _KEPT.get(form, ())


def _check_scale(image: Any) -> None:
    """Raise ValueError for a PPM whose values Pillow would stretch to 8 or 16 bits."""
    arguments = image.tile[0][3] if image.format == "PPM" and image.tile else None  # a tuple in old versions of Pillow
    if isinstance(arguments, tuple):
        largest = arguments[-1]
        if isinstance(largest, int) and largest not in ((1, 255) if image.mode == "RGB" else (1, 255, 65535)):
            raise mended(
                ValueError,
                f"its values go to {largest}, and would be stretched",
                mend="Pass a function of your own: {'ppm': function}",
                mend_cli="",
            )


def _check_bytes(count: int) -> None:
    if count > MAX_DECODED_BYTES:
        raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))


def _read_png(data: bytes) -> npt.NDArray[Any]:
    imagecodecs = _library("imagecodecs")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    _check_bytes(8 * width * height)  # the caller has checked the pixels; there are at most four samples
    try:
        array: npt.NDArray[Any] = imagecodecs.png_decode(data)
    except imagecodecs.PngError as error:
        raise ValueError(f"it is damaged: {error}") from error
    return array


def _read_tiff(data: bytes, max_pixels: int, pages: str | None) -> npt.NDArray[Any]:
    tifffile = _library("tifffile")
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            found = [page for page in file.pages if not page.subfiletype & (_REDUCED | _MASK)] or [file.pages[0]]
            if len(found) > 1 and pages is None:
                raise mended(
                    ValueError,
                    f"it has {len(found)} pages",
                    mend="pass pages='all' for an array of all of them, or a function of your own: {'tif': function}",
                    mend_cli="",
                )
            _check_bytes(sum(page.nbytes for page in found))
            if (pixels := sum(page.imagewidth * page.imagelength for page in found)) > max_pixels:
                raise mended(
                    ValueError,
                    f"it has {pixels} pixels in all, more than {max_pixels}",
                    mend="Pass a larger max_image_pixels if its size is right",
                    mend_cli="",
                )
            arrays = [_of_page(page) for page in found]
    except tifffile.TiffFileError as error:
        raise ValueError(f"it is damaged: {error}") from error
    if pages is None:
        return arrays[0]
    return np.stack(arrays)  # ValueError: they differ in shape


def _of_page(page: Any) -> npt.NDArray[Any]:
    """The array of a page: of shape (H, W), or (H, W, C) also where each sample is a plane. It is
    turned by its orientation, as Pillow turns it.
    """
    array: npt.NDArray[Any] = page.asarray(maxworkers=1)
    if page.axes == "SYX":
        array = np.moveaxis(array, 0, 2)
    elif page.axes not in ("YX", "YXS"):
        raise ValueError(f"its pages have the axes {page.axes}, which are not those of an image")
    turn = TURNS.get(page.tags.valueof(_ORIENTATION, 1), TURNS[1])
    return np.ascontiguousarray(turn(array), array.dtype.newbyteorder("="))


def _library(name: str) -> Any:
    return library(name, name, "an image that Pillow would change", extra="deep")
