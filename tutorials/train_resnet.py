"""Train a ResNet on shards of images, on one device or many, and resume after a crash.

    python train_resnet.py --train data/train/index.json --val 'data/val/*.tar' \\
        --classes 1000 --out run
    torchrun --nproc-per-node 8 train_resnet.py ...

Started again with the same --out, it continues from the last checkpoint, on any number
of devices. On SIGTERM (when a cluster ends the job) it saves a checkpoint first. The
samples have the fields jpg and cls; this makes the index:
wds-pipes index 'data/train/*.tar' -o data/train/index.json
"""

import argparse
import json
import math
import os
import signal
import threading

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

import wds_pipes as wp
from wds_pipes import checkpoint as data_checkpoint

MEAN, STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])

# Data


def to_array(image):
    """Convert a PIL image to float32 of shape (3, height, width), normalised."""
    return ((np.asarray(image, np.float32) / 255 - MEAN) / STD).transpose(2, 0, 1)


class RandomCrop:
    """Cut a random part of the image (8 to 100 % of its area), and mirror it or not.

    All random numbers come from ``rng``, which draws the same ones after a resume.
    """

    def __init__(self, size):
        self.size = size

    def __call__(self, sample, rng):
        image = sample["jpg"]
        area, ratio = (
            image.width * image.height * rng.uniform(0.08, 1),
            math.exp(rng.uniform(-math.log(4 / 3), math.log(4 / 3))),
        )
        width, height = (
            min(image.width, math.sqrt(area * ratio)),
            min(image.height, math.sqrt(area / ratio)),
        )
        left, top = (
            rng.uniform(0, image.width - width),
            rng.uniform(0, image.height - height),
        )
        image = image.resize(
            (self.size, self.size),
            Image.Resampling.BILINEAR,
            box=(left, top, left + width, top + height),
        )
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return {**sample, "jpg": to_array(image)}


class CenterCrop:
    """Cut the middle of the image."""

    def __init__(self, size):
        self.size = size

    def __call__(self, sample):
        image = sample["jpg"]
        side = 0.875 * min(image.width, image.height)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.resize(
            (self.size, self.size),
            Image.Resampling.BILINEAR,
            box=(left, top, left + side, top + side),
        )
        return {**sample, "jpg": to_array(image)}


def make_loader(urls, args, *, train):
    samples = (
        wp.ShardList(urls, shuffle=train, seed=args.seed)
        .open_shards()
        .load_tar()
        .group_by_key(fields=["jpg", "cls"])
    )
    if train:
        # before decoding, while samples are small
        samples = samples.shuffle_buffer(args.shuffle)
    samples = (
        samples.decode_by_ext("pil")
        .map_samples(RandomCrop(args.size) if train else CenterCrop(args.size))
        .to_tuple("jpg", "cls")
    )
    # "drop" in training: the same number of full batches on each rank. "exact" in
    # validation: each
    # image once.
    options = (
        {"epoch_end": "drop", "lanes": args.lanes} if train else {"epoch_end": "exact"}
    )
    return wp.PipeLoader(
        samples,
        batch_size=args.batch_size,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        **options,
    )


# Model


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        nn.init.zeros_(self.body[-1].weight)  # at first each block is only its shortcut
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )
        )

    def forward(self, images):
        return torch.relu(self.body(images) + self.shortcut(images))


def make_model(classes, width):
    """A ResNet-18 if ``width`` is 64."""
    layers = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage in range(4):
        outputs = width << stage
        layers += [
            Block(inputs, outputs, 1 if stage == 0 else 2),
            Block(outputs, outputs, 1),
        ]
        inputs = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
    )


# Training


def learning_rate(args, step, steps):
    """Warm-up, then a cosine: a function of the step alone, so it needs no state."""
    warm = max(1, steps // 20)
    return (
        args.lr * (step + 1) / warm
        if step < warm
        else args.lr
        * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
        / 2
    )


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", required=True, help="an index of shards")
    parser.add_argument("--val", help="shards")
    parser.add_argument("--out", required=True, help="the directory of the checkpoint")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=128, help="of each rank")
    parser.add_argument("--workers", type=int, default=8, help="of each rank")
    parser.add_argument(
        "--lanes",
        type=int,
        help="number of lanes: a multiple of every ranks x workers that you will use; "
        "default: ranks x workers of the first start",
    )
    parser.add_argument(
        "--shuffle",
        type=int,
        default=5000,
        help="images in the shuffle buffer of each lane",
    )
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument(
        "--width", type=int, default=64, help="channels of the first layers"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument(
        "--log-every",
        type=int,
        default=10,
        help="steps; the signal to stop is checked as often",
    )
    parser.add_argument("--save-every", type=int, default=500, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(args, distributed):
    cuda = torch.cuda.is_available()
    first = not distributed or dist.get_rank() == 0
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if cuda
        else torch.device("cpu")
    )

    if cuda:
        torch.cuda.set_device(device)

    # A signal may come at any time, and at another time on each rank: the handler only
    # sets a flag.
    told_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())

    torch.manual_seed(args.seed)
    bare = make_model(args.classes, args.width).to(device)
    model = nn.parallel.DistributedDataParallel(bare) if distributed else bare
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    loader, val = (
        make_loader(args.train, args, train=True),
        make_loader(args.val, args, train=False) if args.val else None,
    )
    steps, step = len(loader) * args.epochs, 0

    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "checkpoint.pt")
    if os.path.exists(path):
        saved = torch.load(path, map_location=device, weights_only=True)
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        step = saved["step"]

    def save():
        # of all ranks, so that any number of ranks can resume
        data = data_checkpoint.gather(loader)
        if first:
            torch.save(
                {
                    "model": bare.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "data": data,
                    "step": step,
                },
                f"{path}.new",
            )
            # a crash leaves the old file or the new one
            os.replace(f"{path}.new", path)

    def tell(**facts):
        if first:
            print(json.dumps(facts), flush=True)

    while (epoch := loader.state_dict()["epoch"]) < args.epochs:
        model.train()
        for images, labels in loader:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step, steps)
            images, labels = (
                images.to(device, non_blocking=True),
                labels.to(device, non_blocking=True),
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = nn.functional.cross_entropy(
                    model(images), labels, label_smoothing=0.1
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.save_every == 0:
                save()
            if step % args.log_every:
                continue
            stats = loader.stats()
            tell(
                step=step,
                epoch=epoch,
                loss=loss.item(),
                samples_per_second=round(stats["samples_per_second"]),
                wait_share=round(stats["wait_share"], 3),
            )
            if any_rank(told_to_stop.is_set(), device, distributed):
                save()
                tell(stopped=step)
                return
        if val is not None:
            tell(epoch=epoch, accuracy=evaluate(bare, val, device, distributed))
        save()


def any_rank(flag, device, distributed):
    """Return whether the flag is set on any rank: the same on all ranks."""
    flags = torch.tensor(float(flag), device=device)
    if distributed:
        dist.all_reduce(flags)
    return flags.item() > 0


@torch.no_grad()
def evaluate(model, loader, device, distributed):
    """Return the share of images that the model classifies correctly.

    Ranks may have different numbers of batches, so they exchange data only at the end.
    """
    model.eval()
    loader.set_epoch(0)
    right = torch.zeros(2, device=device, dtype=torch.float64)
    for images, labels in loader:
        labels = labels.to(device)
        right += torch.stack(
            [
                (model(images.to(device)).argmax(1) == labels).sum(),
                torch.tensor(len(labels), device=device),
            ]
        )
    if distributed:
        dist.all_reduce(right)
    loader.close()
    return (right[0] / right[1]).item()


def main():
    args = parse()
    distributed = "RANK" in os.environ  # torchrun sets it
    if distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(args, distributed)
    finally:
        if distributed:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
