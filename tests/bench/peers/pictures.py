"""The one function by which all rows decode, unless a row says that it uses its own."""

import io

SIDE = 224  # pixels of width and height
BATCH = 64


def decode_image(data):
    """Decode a JPEG to a uint8 array of shape (224, 224, 3): its middle, antialiased.

    simplejpeg decodes it at the smallest scale of n/8 that covers the result, where it is
    installed, and Pillow resizes it once. Both release the interpreter lock.
    """
    from PIL import Image

    try:
        import simplejpeg
    except ModuleNotFoundError:
        with Image.open(io.BytesIO(data)) as image:
            return resize_with_pillow(image.convert("RGB"))
    decoded = simplejpeg.decode_jpeg(data, "RGB", min_height=SIDE, min_width=SIDE, min_factor=1)
    return resize_with_pillow(Image.fromarray(decoded))


def resize_with_pillow(image):
    """Resize an RGB image of Pillow to a uint8 array of shape (224, 224, 3): its middle."""
    import numpy as np
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.fit(image, (SIDE, SIDE), Image.Resampling.BILINEAR))


def decode_fields(fields):
    """Decode the fields ``jpg`` and ``cls`` of a sample."""
    return decode_image(fields["jpg"]), int(fields["cls"])


def stack(samples):
    """Make arrays (N, 224, 224, 3) and (N,) of samples as ``decode_fields`` returns them."""
    import numpy as np

    images, labels = zip(*samples)
    return np.stack(images), np.array(labels)


def stack_tensors(samples):
    """As ``stack``, of tensors, which torch's DataLoader hands over in shared memory."""
    import torch

    images, labels = stack(samples)
    return torch.from_numpy(images), torch.from_numpy(labels)


def decode_and_stack(samples):
    """Make tensors of samples whose fields are bytes."""
    return stack_tensors(map(decode_fields, samples))
