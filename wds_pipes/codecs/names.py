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
PACKED = {"gz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zst"}
MAX_DECODED_BYTES = 1 << 30
MAX_PACKED = 2  # layers of gz, bz2, xz and zst that are unpacked
