"""JPEGs decoded in batches on a GPU, against the same decoded in workers and copied there from
pinned memory, in one run. Needs a CUDA device and ``torchcodec`` in its build for CUDA.

    python tests/bench/on_device.py [SHARDS]      the photographs: a glob of tar files with jpg
    (default: shards that it writes, 140 MB), takes about two minutes

Prints samples a second, and the processor time of the main process for a batch, of both with 1, 2,
4 and 8 workers; what one batch takes by its parts; the PSNR against Pillow; and how long a step of
training takes with and without decoding beside it.
"""

import glob
import io
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from data import images
from PIL import Image, ImageOps

import wds_pipes as wp
from wds_pipes.codecs.resizing import Resize
from wds_pipes.loader import nvjpeg
from wds_pipes.loader.batch_resizing import resize_batch

BATCH, SIDE, FIRST, BATCHES = 64, 224, 6, 40
CUDA = torch.device("cuda")


def raw(urls):
    return wp.ShardList(urls).open_shards().load_tar().group_by_key(fields=["jpg"])


def times(run, rounds=15) -> str:
    """The medians of clock and processor time."""
    run()
    clock, own = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, used = time.perf_counter(), time.process_time()
        run()
        torch.cuda.synchronize()
        clock.append(time.perf_counter() - start)
        own.append(time.process_time() - used)
    return f"{statistics.median(clock) * 1e3:6.2f} ms, {statistics.median(own) * 1e3:6.2f} of the processor"


def rate(loader) -> tuple[float, str]:
    batches = iter(loader)
    for _ in itertools.islice(batches, FIRST):
        pass
    torch.cuda.synchronize()
    start, used, samples = time.perf_counter(), time.process_time(), 0
    for batch in itertools.islice(batches, BATCHES):
        samples += len(batch["jpg"])
    torch.cuda.synchronize()
    seconds, own = time.perf_counter() - start, time.process_time() - used
    loader.close()
    return samples / seconds, f"{samples / seconds:7,.0f} samples/s, main process {own / BATCHES * 1e3:5.1f} ms a batch"


def to_device(batch):
    return {**batch, "jpg": batch["jpg"].to(CUDA, non_blocking=True)}


def step(matrix) -> None:
    """About 20 ms of work on the device."""
    for _ in range(12):
        matrix @ matrix


def seconds_of_steps(batches, matrix, steps=40) -> float:
    for _ in itertools.islice(batches, FIRST):
        step(matrix)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in itertools.islice(batches, steps):
        step(matrix)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        urls = glob.glob(sys.argv[1]) if len(sys.argv) > 1 else images(Path(temporary), shards=4, samples=320)
        photographs = [sample["jpg"] for sample in raw(urls)]
        on_device = wp.DecodeOnDevice("jpg", size=SIDE)
        batch = {"jpg": list(itertools.islice(itertools.cycle(photographs), BATCH))}
        shapes = {Image.open(io.BytesIO(image)).size for image in batch["jpg"]}
        mean = sum(map(len, batch["jpg"])) // BATCH
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {BATCH} JPEGs of {mean:,} bytes")

        resize, result = Resize(SIDE, "cover"), torch.zeros(BATCH, 3, SIDE, SIDE, dtype=torch.uint8, device=CUDA)
        codec = nvjpeg.load("this benchmark")

        def headers():
            return {place: nvjpeg.examine(image, 1 << 26) for place, image in enumerate(batch["jpg"])}

        encoded = {place: image for place, image in headers().items() if image.size is not None}
        decoded = nvjpeg.decode(codec, encoded, CUDA)
        print(f"  a batch of {len(shapes)} sizes    {times(lambda: on_device(batch))}")
        print(f"    headers             {times(headers)}")
        print(f"    decoding            {times(lambda: nvjpeg.decode(codec, encoded, CUDA))}")
        print(f"    resizing            {times(lambda: resize_batch(decoded, resize, result))}")
        expected = [
            ImageOps.fit(Image.open(io.BytesIO(image)).convert("RGB"), (SIDE, SIDE), Image.Resampling.BILINEAR)
            for image in batch["jpg"]
        ]
        found = on_device(batch)["jpg"].cpu().permute(0, 2, 3, 1).float()
        errors = [
            ((one - torch.frombuffer(bytearray(other.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3)) ** 2).mean()
            for one, other in zip(found, expected, strict=True)
        ]
        print(f"  PSNR against Pillow: at least {10 * torch.log10(255**2 / max(errors)):.1f} dB")

        many = raw(urls * (-(-(FIRST + BATCHES + 20) * BATCH // len(photographs))))
        for workers in (1, 2, 4, 8):
            own, text = rate(wp.PipeLoader(many, batch_size=BATCH, num_workers=workers, on_device=on_device))
            pipe = many.decode_by_ext("torchrgb8", size=SIDE)
            options = {"num_workers": workers, "pin_memory": True, "on_device": to_device}
            other, other_text = rate(wp.PipeLoader(pipe, batch_size=BATCH, **options))
            print(f"  {workers} workers: on the device {text}")
            print(f"             in workers    {other_text}: {own / other:.1f} times", flush=True)

        matrix = torch.randn(3500, 3500, device=CUDA)
        alone = seconds_of_steps(itertools.repeat(None), matrix)
        loader = wp.PipeLoader(many, batch_size=BATCH, num_workers=2, on_device=on_device)
        beside = seconds_of_steps(iter(loader), matrix)
        loader.close()
        print(f"  a step of training {alone * 1e3:.1f} ms, {beside * 1e3:.1f} with its batch decoded beside it")


if __name__ == "__main__":
    main()
