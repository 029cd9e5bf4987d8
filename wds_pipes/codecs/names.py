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
Encoder = Callable[[Any], bytes]

TEXT = frozenset(["txt", "text", "transcript", "html", "htm"])
INTEGER = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id"])
IMAGE = frozenset(["jpg", "jpeg", "png", "ppm", "pgm", "pbm", "bmp", "tif", "tiff", "webp", "gif"])
PICKLE = frozenset(["pyd", "pkl", "pickle"])
PACKED = {"gz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zst"}
# decoded only if the caller names them, since one text has several meanings: a csv with or without
# a header, a YAML 1.1 "no"
ON_REQUEST = frozenset(["csv", "yaml", "yml"])
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM")  # Pillow's names
MAX_DECODED_BYTES = 1 << 30
MAX_PACKED = 2  # layers of gz, bz2, xz and zst that are unpacked
MAX_MERGED = 100_000  # pairs that merge keys may add to a YAML mapping
MAX_SCANS = 100  # of a JPEG: decoding a scan takes time for all pixels; usual files have 1 or 10
