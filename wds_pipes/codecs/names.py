"""What decoders and encoders share: extensions, limits and the error of what is not allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NotAllowedError(Exception):
    """A field is not decoded for safety, not because it is damaged. This error is never skipped."""


UNPICKLING = (
    "unpickling runs code from the data; pass allow_pickle=True only if you trust the author of "
    "the shards, or leave the field out with fields="
)
TOO_LARGE = "it unpacks to more than {} bytes"

Decoder = Callable[[bytes], Any]
Handler = Callable[[str, bytes], Any]  # fn(key, data), where key is the field's name after a dot
Encoder = Callable[[Any], bytes]

# Images are recognised by content, whatever the field is called.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM")  # Pillow's names
# Fields that people take for images, and that are not decoded. Pillow cannot read most of them,
# runs a program for some, and knows others by their name alone. JPEG 2000 (jp2) and AVIF take
# memory that the size in their header does not bound: 151 bytes of JPEG 2000, for 2048 x 2048
# pixels, took 2.3 GB and 6 seconds, and an AVIF that claims 64 x 64 pixels may have 8192 x 8192.
NOT_DECODED = frozenset(
    "image img heic heif hif avif avifs jxl jxr jp2 j2k jpf jpx j2c svg svgz raw dng cr2 cr3 nef arw orf rw2 raf "  # noqa: SIM905
    "psd exr qoi dib cur icns eps pfm xbm xpm emf wmf tga ico pcx dds sgi".split()
)
PACKED = {"gz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zst"}
MAX_DECODED_BYTES = 1 << 30
MAX_PACKED = 2  # layers of gz, bz2, xz and zst that are unpacked
MAX_MERGED = 100_000  # pairs that merge keys may add to a YAML mapping
