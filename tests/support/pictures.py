"""Pictures, and JPEGs that are unusual."""

import io
import struct

import numpy as np
from PIL import Image


def saved(image, form="JPEG", **options):
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, form, **options)
    return file.getvalue()


def smooth(height, width, seed=0):
    """A picture with the smooth shapes of a photograph, and some grain."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return np.clip(np.asarray(small) + rng.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)


def taller(data, height, width):
    """A JPEG whose header claims another size."""
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


def turned(orientation):
    """EXIF that says how a picture was turned."""
    return b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0" + bytes([orientation, *bytes(6)])


PIXELS = smooth(61, 83)
ODD = {
    "colours": saved(PIXELS),
    "4:4:4": saved(PIXELS, subsampling=0),
    "4:2:2": saved(PIXELS, subsampling=1),
    "progressive": saved(PIXELS, progressive=True),
    "rgb": saved(PIXELS, keep_rgb=True),
    "grey": saved(Image.fromarray(PIXELS).convert("L")),
    "cmyk": saved(Image.fromarray(PIXELS).convert("CMYK")),
    "restarts": saved(PIXELS, restart_marker_rows=1),
    "1 x 1": saved(PIXELS[:1, :1]),
    "1 x 83": saved(PIXELS[:1]),
    "61 x 1": saved(PIXELS[:, :1]),
    "exif": saved(PIXELS, exif=turned(6)),
    "a thumbnail": saved(PIXELS, exif=b"Exif\0\0" + saved(PIXELS[:9, :9])),
    "data after its end": saved(PIXELS) + b"more",
    "two pictures": saved(Image.fromarray(PIXELS), "MPO", save_all=True, append_images=[Image.fromarray(PIXELS[::-1])]),
}
