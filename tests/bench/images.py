"""Images decoded and resized to 224 x 224, against webdataset with Pillow and against decoding and
resizing alone, in one run and one process.

    python tests/bench/images.py [SHARD ...]      shards with jpg and cls; without them, 300 JPEGs
    of about 110 KB are written to a temporary directory; takes two minutes

1. ``decode_by_ext("rgb8", size=224)`` in batches, against webdataset's ``.decode("pil")`` and the
   same resize by Pillow, for ``cover`` and ``stretch``.
2. The same against simplejpeg and torch alone, called by hand on bytes in memory.
3. The least PSNR against decoding and resizing with Pillow.

Rounds alternate, and processor time is measured, because other programs would disturb the clock;
the figures are medians of the ratios of the rounds. Exits with 1 if a bar is missed.
"""

import io
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import simplejpeg
import torch
import webdataset
from bars import bar, exit_if_missed
from data import images
from PIL import Image, ImageOps

import wds_pipes as wp
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.resizing import read_resize

ROUNDS, SIDE, BATCH = 9, 224, 50
BILINEAR = Image.Resampling.BILINEAR


def cover(image):
    return np.asarray(ImageOps.fit(image, (SIDE, SIDE), BILINEAR))


def stretch(image):
    return np.asarray(image.resize((SIDE, SIDE), BILINEAR))


def seconds(run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def by_wds_pipes(urls, fit):
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key(fields=["jpg", "cls"])
    return pipe.decode_by_ext("rgb8", size=SIDE, fit=fit).to_tuple("jpg", "cls").batch_samples(BATCH)


def by_webdataset(urls, resize):
    pipe = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode("pil")
    return pipe.to_tuple("jpg", "cls").map_tuple(resize, int).batched(BATCH)


def alone(photographs):
    """Decode and resize to (224, 224), and nothing else."""
    for data in photographs:
        pixels = torch.from_numpy(simplejpeg.decode_jpeg(data))[None].permute(0, 3, 1, 2)
        torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="bilinear", antialias=True)


def decibels(found, expected) -> float:
    error = np.mean((found.astype(float) - expected) ** 2)
    return 10 * np.log10(255**2 / error) if error else 100.0


def main(urls: list[str]) -> None:
    torch.set_num_threads(1)
    photographs = []
    for url in urls:
        with tarfile.open(url) as shard:
            photographs += [shard.extractfile(name).read() for name in shard.getnames() if name.endswith(".jpg")]
    runs = {
        "alone": lambda: alone(photographs),
        "cover": lambda: [None for _ in by_wds_pipes(urls, "cover")],
        "stretch": lambda: [None for _ in by_wds_pipes(urls, "stretch")],
        "webdataset cover": lambda: [None for _ in by_webdataset(urls, cover)],
        "webdataset stretch": lambda: [None for _ in by_webdataset(urls, stretch)],
    }
    took = {name: [] for name in runs}
    for number in range(ROUNDS):
        for name in runs if number % 2 else reversed(runs):
            took[name].append(seconds(runs[name]))
    for name, found in took.items():
        print(f"{name}: {statistics.median(found) / len(photographs) * 1e6:.0f} us for an image")

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(took[one], took[other], strict=True))

    for fit in ("cover", "stretch"):
        bar(f"webdataset and Pillow over size=, {fit}", ratio(f"webdataset {fit}", fit), 1.9, least=True)
        bar(
            f"decoding and resizing alone over size=, {fit}",
            ratio("alone", fit),
            0.95 if fit == "stretch" else 0.9,
            least=True,
        )
    for fit, by_pillow in (("cover", cover), ("stretch", stretch)):
        decode = Decoding(
            ("rgb8",), allow_pickle=False, max_image_pixels=1 << 26, resize=read_resize(SIDE, fit)
        ).decoder("jpg")
        least = min(
            decibels(decode(data), by_pillow(Image.open(io.BytesIO(data)).convert("RGB"))) for data in photographs
        )
        bar(f"least PSNR in dB, {fit}", least, 40, least=True)
    exit_if_missed()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(images(Path(directory), shards=2, samples=150))
