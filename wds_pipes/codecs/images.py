"""Images, with Pillow."""

from __future__ import annotations

import importlib
import io
import struct
import sys
from typing import Any

import numpy as np

from wds_pipes.codecs.names import IMAGE_FORMATS, MAX_SCANS, NAMED_FORMATS, Decoder, Encoder

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
    },
}


def image_decoder(spec: str, max_pixels: int, extension: str) -> Decoder:
    """A decoder of images with Pillow; ``spec`` names the kind of result, see ``decode_by_ext``."""
    mode, floats, kind = IMAGE_SPECS[spec]

    def decode(data: bytes) -> Any:
        with open_image(data, max_pixels, extension) as image:
            converted = _in_8_bits(image).convert(mode)
        del image  # free its memory before the next copy is made
        if kind == "pil":
            return converted
        array = np.asarray(converted)
        del converted
        if floats:
            array = array.astype(np.float32)
            array /= np.float32(255)
        if kind == "numpy":
            return array if array.flags.writeable else array.copy()
        import torch

        planes = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        return torch.from_numpy(np.ascontiguousarray(planes) if floats else planes.copy(order="C"))

    return decode


def open_image(data: bytes, max_pixels: int, extension: str) -> Any:
    """Open the image in ``data`` with Pillow, and check its limits. It is not decoded yet.

    Pillow's own ``open`` would warn of large images before their size can be checked, and try
    formats that run other programs, such as EPS.

    Raises:
        ValueError: it is not an image of a known format, or exceeds a limit.
    """
    from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 - these two register their formats

    Image.preinit()
    formats: tuple[str, ...] = IMAGE_FORMATS
    if extension in NAMED_FORMATS:
        named = NAMED_FORMATS[extension]
        importlib.import_module(f"PIL.{named.title()}ImagePlugin")  # registers it
        formats = (*formats, named)
    for name in formats:
        factory, accept = Image.OPEN[name]
        if accept is None or accept(data[:16]) is True:
            if name == "ICO":
                return _open_icon(data, max_pixels)
            if name == "WEBP":  # Pillow allocates memory for all pixels when it opens one
                _check_pixels(*webp_size(data), max_pixels)
            image = factory(io.BytesIO(data), "")
            _check_pixels(image.width, image.height, max_pixels)
            if name == "DDS":
                _check_dds(image, len(data))
            if name == "JPEG" and (scans := _count_scans(data)) > MAX_SCANS:
                raise ValueError(
                    f"the JPEG has {scans} scans, more than {MAX_SCANS}, each of which costs as "
                    "much time as a whole image"
                )
            return image
    raise ValueError(f"the data are none of {', '.join(formats)}")


def _check_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise ValueError(f"the image has {width} x {height} pixels, more than max_image_pixels={most}")


def _count_scans(data: bytes) -> int:
    """Count the scans of a JPEG by their marker (FF DA), which cannot occur inside compressed
    data.
    """
    # Compare 16-bit numbers at both alignments: this takes a seventh of the time of data.count().
    return sum(
        int(np.count_nonzero(np.frombuffer(data, "<u2", (len(data) - start) // 2, start) == 0xDAFF)) for start in (0, 1)
    )


def _open_icon(data: bytes, max_pixels: int) -> Any:
    """Open the largest image of an icon.

    Pillow would decode it when it opens the icon, and trust the size in the icon's directory.
    """
    from PIL import BmpImagePlugin, IcoImagePlugin

    count = int.from_bytes(data[4:6], "little")
    entries = list(struct.iter_unpack("<4B2H2I", data[6 : 6 + 16 * count]))
    if not entries:
        raise ValueError("the icon has no image")
    # width, height, colours, 0, planes, bits, size, offset; a width or height of 0 is 256
    entry = max(entries, key=lambda entry: ((entry[0] or 256) * (entry[1] or 256), entry[5]))
    size, offset = entry[6:]
    content = data[offset : offset + size]
    if len(content) < size:
        raise ValueError("the icon is cut short")
    if content.startswith(b"\x89PNG"):
        return open_image(content, max_pixels, "")
    width, height = BmpImagePlugin.DibImageFile(io.BytesIO(content)).size
    _check_pixels(width, height // 2, max_pixels)  # a mask of as many pixels follows the colours
    if width * height > 8 * len(content):  # both take at least one bit a pixel
        raise ValueError("the icon is cut short")
    alone = struct.pack("<3H4B2H2I", 0, 1, 1, *entry[:6], len(content), 22) + content
    return IcoImagePlugin.IcoFile(io.BytesIO(alone)).frame(0)


def _check_dds(image: Any, size: int) -> None:
    """Raise ValueError if uncompressed pixels are missing.

    Pillow would take them as zeros, one by one in Python.
    """
    decoder, _, _, options = image.tile[0]
    if decoder == "dds_rgb" and image.width * image.height * (options[0] // 8) > size - 128:
        raise ValueError(f"it is cut short: its header promises {image.width} x {image.height} pixels")


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


def _in_8_bits(image: Any) -> Any:
    """Convert an image whose mode Pillow does not convert well.

    Pillow clips 16-bit pixels instead of scaling them, and warns of palettes with transparency.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        from PIL import Image

        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            "the image has 32-bit pixels, whose range is not known: decode it with a function of "
            "your own, {'tif': function}"
        )
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")
    return image


_NO_IMAGE = (
    "an image must be an array of shape (H, W) or (H, W, 1, 3 or 4), a tensor of shape (1, 3 or 4, H, W), both of "
    "uint8 or of floats from 0 to 1, a PIL image or bytes, not {}"
)


# Deeper grey pixels, and the formats that keep them; Pillow would cut them off in others.
_DEEP = {"uint16": ("PNG", "PPM", "TIFF"), "int32": ("TIFF",)}


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
    array = value[..., 0] if value.shape[2:] == (1,) else value
    if array.dtype.kind == "f" and array.size and (array.ndim == 3 or name != "TIFF"):  # TIFF has grey floats
        low, high = array.min(), array.max()
        if not (low > -0.001 and high < 1.001):
            raise ValueError(f"an image has floats from 0 to 1, and these go from {low} to {high}: scale them")
        array = np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
    grey = array.ndim == 2 and (array.dtype.kind in "bf" or name in _DEEP.get(array.dtype.name, ()))
    colour = array.shape[2:] in ((3,), (4,)) and array.dtype == np.uint8
    if not array.size or not (grey or colour or (array.ndim == 2 and array.dtype == np.uint8)):
        raise TypeError(_NO_IMAGE.format(f"{value.dtype} of shape {value.shape} in a {name}"))
    return np.ascontiguousarray(array)


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
        if name in ("GIF", "WEBP") and (image.mode in ("I", "F") or image.mode.startswith("I;16")):
            raise ValueError(f"{name} has 8 bits a pixel and would cut those of mode {image.mode}: convert the image")
        file = io.BytesIO()
        image.save(file, name, **({"quality": 95} if name in ("JPEG", "WEBP") else {}))
        return file.getvalue()

    return encode
