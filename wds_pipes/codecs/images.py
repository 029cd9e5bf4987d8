"""Images: the quickest installed decoder of each format, sizes, and encoding with Pillow."""

from __future__ import annotations

import functools
import importlib
import io
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.codecs.arrays import as_array
from wds_pipes.codecs.codec import IMAGE_FORMATS, Decoder, Encoder
from wds_pipes.codecs.resizing import TURNED, Pixels, RandomCrop, Resize, Scaling
from wds_pipes.codecs.stored import TURNS, has_alpha, is_deep_colour, is_deep_grey, read_deep, read_stored
from wds_pipes.errors import mended

_ORIENTATION, _WIDTH, _LENGTH = 0x0112, 0x0100, 0x0101  # tags of TIFF
_MODULES = {"WEBP": "WebP"}  # the names of Pillow's modules where they are not those of their formats

# What simplejpeg and Pillow decode to the same pixels: mode of the result, colours of the file.
_SAME = {("RGB", "YCbCr"), ("RGB", "RGB"), ("RGB", "Gray"), ("RGBA", "YCbCr"), ("RGBA", "RGB"), ("L", "Gray")}
_COLOURS = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}
_LUMINANCE = (np.float32(0.299), np.float32(0.587), np.float32(0.114))  # of Pillow's L (ITU-R 601)
_START_OF_JPEG = b"\xff\xd8\xff"  # of every JPEG

# The result of an image spec: Pillow's mode, floats in 0..1 instead of uint8, the kind of object.
IMAGE_SPECS: dict[str, tuple[str, bool, str]] = {
    **{f"{name}8": (mode, False, "numpy") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{name: (mode, True, "numpy") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{f"torch{name}8": (mode, False, "torch") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{f"torch{name}": (mode, True, "torch") for name, mode in (("l", "L"), ("rgb", "RGB"), ("rgba", "RGBA"))},
    **{
        "torch": ("RGB", True, "torch"),  # webdataset's other name of torchrgb
        "pill": ("L", False, "pil"),
        "pil": ("RGB", False, "pil"),
        "pilrgb": ("RGB", False, "pil"),
        "pilrgba": ("RGBA", False, "pil"),
        "raw": ("", False, "numpy"),  # as the file stores it
    },
}


class Cropped(NamedTuple):
    """A decoded image, and which part of the stored image it is, as in ``__crop__``."""

    image: Any
    crop: npt.NDArray[Any]


def decoders_in_use() -> dict[str, str]:
    """Return what decodes each format: ``"simplejpeg"`` or ``"pillow"``."""
    quick = {"JPEG": "simplejpeg"} if simplejpeg() is not None else {}
    return {name: quick.get(name, "pillow") for name in IMAGE_FORMATS}


def image_decoder(
    spec: str,
    max_pixels: int,
    resize: Resize | RandomCrop | None = None,
    *,
    pages: str | None = None,
    upright: bool = False,
    boxes: bool = False,
    rng: Callable[[], np.random.Generator] | None = None,
) -> Decoder:
    """A decoder of images.

    Args:
        spec: the kind of result, see ``decode_by_ext``.
        max_pixels: of the images that are decoded.
        resize: how they come to one size.
        pages: ``"all"``: those of a TIFF.
        upright: turn them by their EXIF.
        boxes: return each as Cropped.
        rng: returns the random generator of an image, for a RandomCrop.
    """
    mode, floats, kind = IMAGE_SPECS[spec]

    def decode(data: bytes) -> Any:
        data = bytes(data)  # of a memoryview; bytes are not copied
        if not mode:
            return _raw(data, max_pixels, pages)
        orientation = _orientation(data, max_pixels) if upright else 1
        if kind == "pil" and resize is None and orientation == 1:
            with open_image(data, max_pixels) as image:
                return _in_mode(image, mode, spec)
        scaling: Scaling | None
        if isinstance(resize, RandomCrop):
            assert rng is not None
            scaling = resize.drawn(rng())
        else:
            scaling = resize
        array = _decode(data, spec, max_pixels, None if scaling is None else scaling.as_stored(orientation))
        image = _of_kind(np.ascontiguousarray(TURNS[orientation](array)) if orientation != 1 else array, floats, kind)
        if not boxes or scaling is None:
            return image
        height, width = image_size(data)
        return Cropped(image, scaling.crop_of(*((height, width) if orientation in TURNED else (width, height))))

    return decode


def _of_kind(array: Pixels, floats: bool, kind: str) -> Any:
    """Return decoded pixels as the object that an image spec names."""
    if kind == "pil":
        from PIL import Image

        return Image.fromarray(array)
    if floats and array.dtype == np.uint8:
        array = array.astype(np.float32) / np.float32(255)
    if kind == "numpy":
        return array
    import torch

    planes = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(planes) if floats else planes.copy(order="C"))


def _decode(data: bytes, spec: str, max_pixels: int, resize: Scaling | None) -> Pixels:
    """Decode an image to an array of shape (H, W) or (H, W, C), which can be written to.

    It is uint8; or float32 from 0 to 1 of a grey image of 16 bits, if the spec is for floats.
    """
    mode, floats, _ = IMAGE_SPECS[spec]
    if data.startswith(_START_OF_JPEG) and (decoded := decode_jpeg(data, mode, max_pixels, resize)) is not None:
        return decoded
    with open_image(data, max_pixels) as image:
        width, height = image.size
        if floats and (is_deep_grey(image) or is_deep_colour(data, image)):
            return _deep(data, image, mode, resize)
        if resize is not None and image.format in ("JPEG", "MPO"):
            denominator, rough = resize.scale(width, height)
            image.draft(None, (width // denominator, height // denominator))
            image.decoderconfig = (denominator, rough)
        if image.mode == mode:
            image.load()
            converted = image  # Pillow would make a copy
        else:
            converted = _in_mode(image, mode, spec)
    if image.format == "TIFF":  # some versions of Pillow turn it only when they decode it
        width, height = converted.size
    array: Pixels = np.asarray(converted)
    del converted  # free its memory before the next copy is made
    array = array if array.flags.writeable else array.copy()
    return array if resize is None else resize.resize(array, width, height)


@functools.cache
def simplejpeg() -> Any:
    """The simplejpeg package; None if it is missing or cannot be loaded."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def decode_jpeg(data: bytes, mode: str, max_pixels: int, resize: Scaling | None) -> Pixels | None:
    """Decode a JPEG with simplejpeg, and resize it.

    simplejpeg releases the GIL, and uses the same library as Pillow (libjpeg-turbo) with the same
    settings. What libjpeg-turbo warns of is left to Pillow, which decides whether it is damaged.

    Args:
        data: the JPEG.
        mode: ``"L"``, ``"RGB"`` or ``"RGBA"``.
        max_pixels: refuse a larger image.
        resize: the size of the result; None: that of the image.

    Returns:
        An array of shape (H, W) or (H, W, C); None if Pillow has to decode it.

    Raises:
        ValueError: it has too many pixels.
    """
    library = simplejpeg()
    if library is None:
        return None
    try:
        height, width, colours, _ = library.decode_jpeg_header(data)
    except ValueError:
        return None
    if (mode, colours) not in _SAME:
        return None
    check_pixels(width, height, max_pixels)
    options: dict[str, Any] = {}
    if resize is not None:
        denominator, rough = resize.scale(width, height)
        options = {"fastdct": rough, "fastupsample": rough}
        options |= {"min_height": -(-height // denominator), "min_width": -(-width // denominator)}
    try:
        array: Pixels = library.decode_jpeg(data, _COLOURS[mode], **options)
    except ValueError:
        return None
    array = array[..., 0] if mode == "L" else array
    return array if resize is None else resize.resize(array, width, height)


def check_pixels(width: int, height: int, most: int) -> None:
    """Raise ValueError if an image has more than ``most`` pixels."""
    if width * height > most:
        raise mended(
            ValueError,
            f"the image has {width} x {height} pixels, more than {most}",
            mend="Pass a larger max_image_pixels if its size is right",
            mend_cli="",
        )


def _raw(data: bytes, max_pixels: int, pages: str | None) -> npt.NDArray[Any]:
    """Decode an image to the array that the file stores."""
    try:
        opened = open_image(data, max_pixels)
    except SyntaxError:  # of Pillow, for a kind of TIFF that it does not know
        if _format_of(data) != "TIFF":
            raise
        return read_stored(data, None, max_pixels, pages)
    with opened as image:
        return read_stored(data, image, max_pixels, pages)


def _orientation(data: bytes, max_pixels: int) -> int:
    """The orientation in the EXIF of an image; 1, which is upright: it has none, or a damaged one.

    Pillow turns a TIFF by its own tag when it decodes it.
    """
    with open_image(data, max_pixels) as image:
        if image.format == "TIFF":
            return 1
        try:
            found = image.getexif().get(_ORIENTATION, 1)
        except (SyntaxError, ValueError, TypeError, KeyError, OSError, struct.error):
            return 1
    return found if found in TURNS else 1


def _deep(data: bytes, image: Any, mode: str, resize: Scaling | None) -> Pixels:
    """Decode an image of 16 bits a sample to floats from 0 to 1."""
    deep = np.array(image).astype(np.uint16)[..., None] if is_deep_grey(image) else read_deep(data, image)
    planes = list((deep.astype(np.float32) / np.float32(65535)).transpose(2, 0, 1))
    alpha = planes[-1] if has_alpha(image, len(planes)) else np.ones_like(planes[0])
    colours = planes[:3] if len(planes) > 2 else planes[:1] * 3
    if mode == "L":
        colours = [sum(map(np.multiply, colours, _LUMINANCE))] if len(planes) > 2 else planes[:1]
    planes = colours + [alpha] * (mode == "RGBA")
    if resize is not None:
        planes = [resize.resize(plane, plane.shape[1], plane.shape[0]) for plane in planes]
    return planes[0] if mode == "L" else np.stack(planes, axis=2)


def _in_mode(image: Any, mode: str, spec: str) -> Any:
    """Convert an image of 8 bits to a mode; ``spec``: the image spec, for a message.

    Raises:
        ValueError: its pixels have more bits, which would be cut.
    """
    if is_deep_grey(image):
        floats = f"{'torch' * spec.startswith('torch')}{mode.lower()}"
        raise ValueError(
            f"the image has 16 bits a pixel, of which {spec!r} would keep 8: use {floats!r} (floats, value / 65535) or "
            "'raw' (as stored)"
        )
    if image.mode in ("I", "F"):
        raise ValueError(f"the image has 32 bits a pixel, whose range {spec!r} does not know: use 'raw'")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # else Pillow warns
    return image.convert(mode)


def image_size(data: bytes) -> tuple[int, int]:
    """Return the height and width of an image, from its header: nothing is decoded.

    It is also a decoder, ``decode_by_ext({"jpg;png": wp.image_size})``, which then takes the place
    of decoding the pixels. The format is recognised by the content: JPEG, PNG, WebP, TIFF, GIF, BMP
    or PPM.

    Args:
        data: the image.

    Returns:
        (height, width) in pixels, as in the shape of the array to which ``decode_by_ext`` decodes
        it.

    Raises:
        ValueError: it is not an image of these formats, or its header is damaged.
        OSError, SyntaxError: its header is damaged, as Pillow says.
    """
    data = bytes(data)  # of a memoryview; bytes are not copied
    name = _format_of(data)
    if name == "WEBP":
        width, height = webp_size(data)
        if not width:
            raise ValueError("the header of the WebP is damaged")
        return height, width
    with _open_as(name, data) as image:
        if name == "TIFF" and image.tag_v2.get(_ORIENTATION, 1) in TURNED:
            # some versions of Pillow turn it only when they decode it
            return image.tag_v2[_WIDTH], image.tag_v2[_LENGTH]
        return image.height, image.width


def open_image(data: bytes, max_pixels: int) -> Any:
    """Open the image in ``data`` with Pillow, and check its size. It is not decoded yet.

    Pillow's own ``open`` would warn of large images before their size can be checked.

    Raises:
        ValueError: it is not an image of a known format, or has too many pixels.
    """
    name = _format_of(data)
    if name == "WEBP":  # Pillow allocates memory for all pixels when it opens one
        check_pixels(*webp_size(data), max_pixels)
    image = _open_as(name, data)
    check_pixels(image.width, image.height, max_pixels)
    return image


def _format_of(data: bytes) -> str:
    """Return which of Pillow's formats the data have by their first bytes.

    Raises:
        ValueError: none of them.
    """
    from PIL import Image

    Image.preinit()
    for name in IMAGE_FORMATS:
        if name not in Image.OPEN:
            importlib.import_module(f"PIL.{_MODULES.get(name, name.title())}ImagePlugin")  # registers it
        accept = Image.OPEN[name][1]
        if accept is None or accept(data[:16]) is True:
            return name
    raise ValueError(f"the data are none of {', '.join(IMAGE_FORMATS)}")


def _open_as(name: str, data: bytes) -> Any:
    from PIL import Image

    return Image.OPEN[name][0](io.BytesIO(data), "")


def webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in the first chunk of a WebP (RFC 9649); 0 if it is damaged.

    Pillow reports that damage.
    """
    kind, head = data[12:16], data[20:30]
    if len(head) == 10 and kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if len(head) == 10 and kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 6)
        return width & 0x3FFF, height & 0x3FFF
    if len(head) >= 5 and kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return 0, 0


_NO_IMAGE = (
    "an image must be an array of shape (H, W) or (H, W, 1, 3 or 4), a tensor of shape (1, 3 or 4, H, W), both of "
    "uint8 or of floats from 0 to 1, a PIL image or bytes, not {}"
)


_DEEP = ("PNG", "PPM", "TIFF")  # the formats that keep grey pixels of 16 bits


def _pixels(value: Any, name: str) -> Any:
    """Return the array of an image as PIL takes it; None if ``value`` is no array or tensor."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.ndim != 3 or len(value) not in (1, 3, 4):
            raise TypeError(_NO_IMAGE.format(f"a tensor of shape {tuple(value.shape)}"))
        value = value.detach().cpu().permute(1, 2, 0)
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    if not isinstance(value, np.ndarray):
        return None
    array = as_array(value[..., 0] if value.shape[2:] == (1,) else value)
    if array.dtype.kind == "f" and array.size:
        low, high = array.min(), array.max()
        if not (low > -0.001 and high < 1.001):
            raise ValueError(f"an image has floats from 0 to 1, and these go from {low} to {high}: scale them")
        array = np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
    shallow = array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2:] in ((3,), (4,)))
    grey = array.ndim == 2 and (array.dtype == np.bool_ or (array.dtype == np.uint16 and name in _DEEP))
    if not array.size or not (shallow or grey):
        raise TypeError(_NO_IMAGE.format(f"{value.dtype} of shape {value.shape} in a {name}"))
    return np.ascontiguousarray(array)


# The formats that hold an alpha channel. Pillow drops it in some of the others without a word.
_ALPHA = ("PNG", "WEBP", "TIFF")


def image_encoder(extension: str) -> Encoder:
    """An encoder of arrays and PIL images to the format of an extension."""
    formats = {
        **dict.fromkeys(("jpg", "jpe", "jfif"), "JPEG"),
        **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "PPM"),
        "apng": "PNG",
        "tif": "TIFF",
    }
    name = formats.get(extension, extension.upper())

    def encode(value: Any) -> bytes:
        from PIL import Image

        array = _pixels(value, name)
        image = value if array is None else Image.fromarray(array)
        if not isinstance(image, Image.Image):
            raise TypeError(_NO_IMAGE.format(type(value).__name__))
        if image.has_transparency_data and name not in _ALPHA and (name, image.mode) != ("GIF", "P"):
            raise ValueError(f"{name} would drop the transparency of the image: convert it, or write png")
        file = io.BytesIO()
        image.save(file, name, **({"quality": 95} if name in ("JPEG", "WEBP") else {}))
        return file.getvalue()

    return encode
