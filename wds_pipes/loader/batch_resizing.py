"""Resize the images of a batch on a device, with the results of Pillow's ``BILINEAR``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from wds_pipes.codecs.resizing import Resize

_MOST = 3 << 26  # numbers in memory at a time, or those of one image: 768 MiB


def resize_batch(images: Mapping[int, torch.Tensor], resize: Resize, result: torch.Tensor) -> None:
    """Resize images into their places of a batch.

    By products with the weights of all pixels, as a crop may begin inside a pixel, which
    ``interpolate`` does not do. Many images are resized in one product, padded to one size: on a
    GPU, starting one operation for each image takes more time than the operations.

    Args:
        images: the place of each image in the batch, and its pixels, uint8 of shape (3, H, W).
        resize: the size of the result.
        result: the batch, uint8 of shape (N, 3, height, width); with one channel, the images
            become grey before they are resized, as by Pillow.
    """
    with torch.autocast(result.device.type, enabled=False):  # the training's may have 8 bits
        for places in _groups(images, max(resize.height, resize.width)):
            _resize_group({place: images[place] for place in places}, resize, result)


def _groups(images: Mapping[int, torch.Tensor], size: int) -> Iterator[list[int]]:
    """Divide images, those of similar sizes together, so that each part is resized in little
    memory.
    """
    group, height, width = list[int](), 0, 0
    for place in sorted(images, key=lambda place: images[place].shape):
        _, own_height, own_width = images[place].shape
        height, width = max(height, own_height), max(width, own_width)
        # the padded image, the weights, also once for each channel, and both products
        numbers = 3 * height * width + 8 * size * max(height, width) + 3 * size * (width + 2 * size)
        if group and (len(group) + 1) * numbers > _MOST:
            yield group
            group, height, width = [], own_height, own_width
        group.append(place)
    if group:
        yield group


def _resize_group(images: Mapping[int, torch.Tensor], resize: Resize, result: torch.Tensor) -> None:
    shapes = [image.shape for image in images.values()]
    _, height, width = (max(numbers) for numbers in zip(*shapes))
    rows, columns = [], []
    for _, own_height, own_width in shapes:
        (left, top, right, bottom), new_width, new_height, first_column, first_row = resize.place(own_width, own_height)
        rows.append((top, bottom, new_height, first_row, own_height))
        columns.append((left, right, new_width, first_column, own_width))
    device = next(iter(images.values())).device
    # to the device before the work begins there, since these copies wait for what has begun
    places = torch.tensor(list(images), device=device)
    axes = torch.tensor(rows + columns, dtype=torch.float64, device=device)
    padded = torch.zeros(len(images), 3, height, width, dtype=torch.float32, device=device)
    for row, image in zip(padded, images.values()):
        row[:, : image.shape[1], : image.shape[2]] = image
    if result.shape[1] == 1:
        padded = _grey(padded)
    weights = _weights(axes, max(resize.height, resize.width), max(height, width))
    down, across = weights[: len(images), None], weights[len(images) :, None]
    resized = down[..., : resize.height, :height] @ padded @ across[..., : resize.width, :width].mT
    result[places] = resized.round_().clamp_(0, 255).to(torch.uint8)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Return the grey images of coloured ones, as by Pillow: numbers from 0 to 255, in whole
    steps. All sums are below 2 ** 24, so they are exact.
    """
    red, green, blue = images.unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) / 0x10000).floor_()[:, None]


def _weights(axes: torch.Tensor, size: int, length: int) -> torch.Tensor:
    """Return how much each pixel counts in each pixel of the result, along one axis of an image:
    those of Pillow.

    Args:
        axes: for each axis, the pixels where the box starts and ends, to how many pixels it is
            resized, the first of them in the result, and the pixels of the image; shape (N, 5).
        size: the pixels of the result, or more.
        length: the pixels of the largest image, or more.

    Returns:
        A tensor of shape (N, size, length), with zeros where the result has no pixel of the image.
    """
    start, end, own_size, first, own_length = axes[:, :, None].unbind(1)
    scale = (end - start) / own_size
    row = torch.arange(size, device=axes.device) - first
    centre = (start + (row + 0.5) * scale)[..., None].float()
    pixel = torch.arange(length, device=axes.device, dtype=torch.float32) + 0.5
    weights = (pixel - centre).abs_().div_(scale.clamp(min=1)[..., None].float()).neg_().add_(1).clamp_(0)
    weights *= ((row >= 0) & (row < own_size))[..., None] & (pixel < own_length)[:, None]
    return weights.div_(weights.sum(2, keepdim=True).clamp_(1e-9))
