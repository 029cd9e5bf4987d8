"""The one function by which all rows decode, unless a row says that it uses its own."""

from __future__ import annotations

from typing import Any

SIDE = 224  # pixels of width and height
BATCH = 64


def decode_image(data: bytes) -> Any:
    """Decode a JPEG to a uint8 array of shape (224, 224, 3): its middle, antialiased.

    The JPEG is decoded at the smallest scale of n/8 that covers the result, with simplejpeg where
    it is installed, and resized once by Pillow. Both release the interpreter lock.
    """
    import numpy as np
    from PIL import Image

    try:
        import simplejpeg

        image = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", min_height=SIDE, min_width=SIDE, min_factor=1))
    except ModuleNotFoundError:
        return decode_with_pillow(data)
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))


def resize_with_pillow(image: Any) -> Any:
    """Resize an RGB image of Pillow to a uint8 array of shape (224, 224, 3): its middle."""
    import numpy as np
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.fit(image, (SIDE, SIDE), Image.Resampling.BILINEAR))


def decode_with_pillow(data: bytes) -> Any:
    """Decode a JPEG at its full size and resize it, both with Pillow."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return resize_with_pillow(image.convert("RGB"))


def decode_fields(fields: Any) -> tuple[Any, int]:
    """Decode the fields ``jpg`` and ``cls`` of a sample."""
    return decode_image(fields["jpg"]), int(fields["cls"])


def stack(samples: Any) -> tuple[Any, Any]:
    """Make arrays (N, 224, 224, 3) and (N,) of samples as ``decode_fields`` returns them."""
    import numpy as np

    images, labels = zip(*samples)
    return np.stack(images), np.array(labels)


def stack_tensors(samples: Any) -> tuple[Any, Any]:
    """As ``stack``, of tensors, which torch's DataLoader hands over in shared memory."""
    import torch

    images, labels = stack(samples)
    return torch.from_numpy(images), torch.from_numpy(labels)
