"""Random crops of images as a training takes them: beside webdataset with Pillow, the same work on
images in memory, DALI and FFCV, in one run.

    python tests/bench/crops.py [DIRECTORY]        writes 500 MB there (default: a temporary
    directory), takes some minutes; PEERS=PYTHON names an interpreter whose environment has
    nvidia-dali-cuda120, or ffcv (which also needs torch, numba and opencv-python): without it, or
    where one of them is not installed, that one is left out

2,048 JPEGs of 500 x 375 in tars, batches of 64 crops of 224 x 224, uint8, half of them mirrored, by
1 and by 2 workers (DALI and FFCV: threads). The crop is that of RandomResizedCrop of torchvision,
by Pillow for webdataset. FFCV reads its own format, with JPEGs of the same size and quality. Each
measurement is a process of its own, and takes the second epoch from its first batch on: images a
second, and the processor time of the process and its workers for each image. The bars are ratios of
processor time, which what else runs on the machine changes least.
"""

import io
import json
import math
import os
import subprocess
import sys
import time

SIDE, BATCH, COUNT, ROUNDS = 224, 64, 2048, 3
BARS = {"webdataset, Pillow": 2.0, "DALI (CPU)": 1.0, "FFCV": 1.0, "in memory": 0.93}


def urls_in(place):
    from peers.data import shard_paths

    return shard_paths(place, "images", 4)


def ours(place, workers):
    import wds_pipes as wp

    samples = wp.ShardList(urls_in(place), samples_per_shard=COUNT // 4).open_shards().load_tar()
    cropped = samples.group_by_key(fields=["jpg", "cls"]).decode_by_ext(
        "torchrgb8", size=SIDE, crop="random", flip=True
    )
    return wp.PipeLoader(cropped.to_tuple("jpg", "cls"), batch_size=BATCH, num_workers=workers)


def in_memory(place, workers):
    """The decoder of this package on images in memory, by torch's DataLoader."""
    import numpy as np
    import torch
    from peers.data import tar_samples

    from wds_pipes.codecs.images import image_decoder
    from wds_pipes.codecs.resizing import RandomCrop

    class Images(torch.utils.data.Dataset):
        def __init__(self):
            self.images = [fields["jpg"] for url in urls_in(place) for _, fields in tar_samples(url)]
            self.labels = [int(fields["cls"]) for url in urls_in(place) for _, fields in tar_samples(url)]
            rng = np.random.default_rng(0)
            self.decode = image_decoder("torchrgb8", 1 << 26, RandomCrop(SIDE, flip=True), rng=lambda: rng)

        def __len__(self):
            return len(self.images)

        def __getitem__(self, number):
            return self.decode(self.images[number]), self.labels[number]

    return torch.utils.data.DataLoader(Images(), batch_size=BATCH, num_workers=workers)


def crop_with_pillow(image):
    """As torchvision crops PIL images."""
    import random

    import numpy as np
    import torch
    from PIL import Image

    width, height = image.size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            break
    else:
        across = down = min(width, height)
    left, top = random.randint(0, width - across), random.randint(0, height - down)
    box = (left, top, left + across, top + down)
    image = image.crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def webdataset(place, workers):
    import webdataset as wds

    decoded = wds.WebDataset(urls_in(place), shardshuffle=False).decode("pil").to_tuple("jpg", "cls")
    batches = decoded.map_tuple(crop_with_pillow, int).batched(BATCH)
    return wds.WebLoader(batches, batch_size=None, num_workers=workers)


def dali(place, workers):
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=BATCH, num_threads=workers, device_id=None, seed=1)
    with pipeline:
        data, labels = fn.readers.webdataset(paths=urls_in(place), ext=["jpg", "cls"])
        cropped = fn.decoders.image_random_crop(
            data, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        resized = fn.resize(cropped, size=(SIDE, SIDE), interp_type=types.INTERP_TRIANGULAR)
        mirrored = fn.flip(resized, horizontal=fn.random.coin_flip())
        pipeline.set_outputs(fn.transpose(mirrored, perm=[2, 0, 1]), labels)
    pipeline.build()

    class Batches:
        def __iter__(self):
            return (pipeline.run()[0].as_array() for _ in range(COUNT // BATCH))

    return Batches()


def ffcv(place, workers):
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from peers.data import tar_samples
    from PIL import Image

    path = f"{place}/images.beton"
    if not os.path.exists(path):
        pairs = [(fields["jpg"], int(fields["cls"])) for url in urls_in(place) for _, fields in tar_samples(url)]

        class Pairs:
            def __len__(self):
                return len(pairs)

            def __getitem__(self, number):
                data, label = pairs[number]
                return np.array(Image.open(io.BytesIO(data)).convert("RGB")), label

        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
        DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(Pairs())
    image = [RandomResizedCropRGBImageDecoder((SIDE, SIDE)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    return Loader(
        path, batch_size=BATCH, num_workers=workers, pipelines={"image": image, "label": [IntDecoder(), ToTensor()]}
    )


ROWS = {
    "wds_pipes": (ours, "wds_pipes"),
    "in memory": (in_memory, "wds_pipes"),
    "webdataset, Pillow": (webdataset, "webdataset"),
    "DALI (CPU)": (dali, "nvidia.dali"),
    "FFCV": (ffcv, "ffcv"),
}


def processor(process):
    used = [each.cpu_times() for each in [process, *process.children(recursive=True)]]
    return sum(times.user + times.system + times.children_user + times.children_system for times in used)


def measure(name, place, workers):
    """Images a second, and processor microseconds of each."""
    import psutil

    function, _ = ROWS[name]
    batches, process = function(place, workers), psutil.Process()
    for _ in batches:  # whatever is compiled or started
        pass
    items = iter(batches)
    next(items)
    start, busy = time.perf_counter(), processor(process)
    count = sum(1 for _ in items) * BATCH
    return count / (time.perf_counter() - start), (processor(process) - busy) / count * 1e6


def measured(python, *job):
    command = [python, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def has(python, module):
    return not subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode


def main():
    import statistics

    from bars import bar, directory, exit_if_missed, in_turn, median_ratio
    from peers.data import images

    peers = os.environ.get("PEERS", sys.executable)
    pythons = {
        name: sys.executable if module in ("wds_pipes", "webdataset") else peers for name, (_, module) in ROWS.items()
    }
    pythons = {name: python for name, python in pythons.items() if has(python, ROWS[name][1])}
    with directory() as place:
        images(place, samples=COUNT // 4)
        for workers in (1, 2):
            print(f"{workers} workers" if workers > 1 else "1 worker")
            ways = {
                name: lambda name=name, python=python, workers=workers: measured(python, name, str(place), workers)
                for name, python in pythons.items()
            }
            found = in_turn(ways, ROUNDS)
            for name, runs in found.items():
                rates, costs = (statistics.median(values) for values in zip(*runs, strict=True))
                print(f"  {name:<20} {rates:>7,.0f} images/s, {costs:>6,.0f} us of processor time each")
            costs = {name: [cost for _, cost in runs] for name, runs in found.items()}
            for name, least in BARS.items():
                if name in costs:
                    ratio = median_ratio(costs[name], costs["wds_pipes"])
                    bar(f"processor time of {name}, beside that of wds_pipes", ratio, least, least=True)
    exit_if_missed()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        main()
