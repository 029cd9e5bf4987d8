# %% [markdown]
# # Decode images in less time, audio, video, records, and formats of your own
#
# **You learn** how to decode images as fast as the machine can, on its cores or on a GPU; how to
# decode clips of audio and video; how one field becomes many samples; and how to add a format.
#
# **You need** `pip install 'wds_pipes[images,audio,video]'` (the extras install simplejpeg, soundfile
# and PyAV).

# %%
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import wds_pipes as wp
from wds_pipes.testing import check_codec

# When this file runs as a script, worker processes that are not forked (the default on macOS and
# Windows, and everywhere from Python 3.14 on) would run it again. With this line they start as they
# do from a notebook. In a program of your own, put the code under `if __name__ == "__main__":`.
__file__ = None

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there

# %% [markdown]
# The data are pictures of 1080 x 1440 pixels. An array in a field `jpg` is written as a JPEG:

# %%
os.mkdir("photos")
rng = np.random.default_rng(7)
down, across = np.mgrid[0:1080, 0:1440].astype(np.float32)
waves = [np.sin(across / rng.uniform(5, 200) + down / rng.uniform(5, 200)) for _ in range(3)]
picture = (128 + 90 * np.stack(waves, axis=2) + rng.integers(-4, 5, (1080, 1440, 1))).astype(np.uint8)
with wp.ShardWriter("photos/%06d.tar", max_samples=16, index="photos/index.json") as writer:
    for number in range(64):
        writer.write({"__key__": f"{number:06d}", "jpg": np.roll(picture, 16 * number, axis=1), "cls": number % 10})
print(sum(entry.stat().st_size for entry in os.scandir("photos")) // 64_000, "KB in each sample")

# %% [markdown]
# ## What decodes
#
# Each format is decoded by the fastest decoder that is installed. simplejpeg and Pillow return the
# same pixels, so a machine without simplejpeg is slower, and nothing else changes. `wds-pipes info
# --codecs` shows what is used here:

# %%
done = subprocess.run(
    [sys.executable, "-m", "wds_pipes", "info", "--codecs"], capture_output=True, text=True, check=True
)
print(done.stdout)

# %% [markdown]
# ## Decode only as many pixels as you need
#
# A training rarely needs all pixels. With `size=224`, all images become 224 x 224, antialiased. A
# JPEG that is much larger is decoded at a half, a quarter or an eighth of its size, which saves most
# of the time. `fit=` is `"cover"` (crop what is too wide or too high), `"contain"` (add a border) or
# `"stretch"`; `size=(height, width)` is another shape.


# %%
def photos(*specs, **options):
    return wp.ShardList("photos/index.json").open_shards().load_tar().group_by_key().decode_by_ext(*specs, **options)


def measure(name, pipe, **options):
    """Print how many images a second a loader yields, without the first batches."""
    batches = iter(wp.PipeLoader(pipe.to_tuple("jpg", "cls"), batch_size=8, **options))
    for _ in range(2):
        next(batches)
    start, count = time.perf_counter(), sum(len(labels) for _, labels in batches)
    print(f"{name:34} {count / (time.perf_counter() - start):6.0f} images/s")


torch.set_num_threads(1)  # torch resizes, and would divide each image over threads of its own
measure("all pixels", photos("rgb8"))
measure("size=224", photos("rgb8", size=224))
measure("size=96", photos("rgb8", size=96))

# %% [markdown]
# Keep `rgb8` or `torchrgb8` (uint8) up to the GPU and convert to floats there: floats are four times
# as many bytes to copy. `wp.image_size` reads only the header: `decode_by_ext({"jpg": wp.image_size})`.
#
# ## Threads or workers
#
# Both decode on all cores, in the same order and with the same states. So a checkpoint of one is
# resumed with the other.


# %%
def make_loader(threads=None, **options):
    pipe = photos("rgb8", size=64, threads=threads).to_tuple("jpg", "__key__")
    return wp.PipeLoader(pipe, batch_size=16, lanes=2, **options)


def keys_of(batches):
    return [keys for _, keys in batches]


measure("threads=2", photos("rgb8", size=224, threads=2))
measure("num_workers=2", photos("rgb8", size=224), num_workers=2)
with_threads, with_workers = make_loader(threads=2), make_loader(num_workers=2)
first = keys_of(itertools.islice(with_threads, 2))
with_workers.load_state_dict(with_threads.state_dict())
rest = keys_of(with_workers)
assert first + rest == keys_of(make_loader())
print(len(first), "batches with threads, and", len(rest), "more with workers: the same as without both")

# %% [markdown]
# | | `decode_by_ext(threads=n)` | `PipeLoader(num_workers=n)` |
# |---|---|---|
# | runs in parallel | decoders that release Python's global lock: all images, numpy, torch | everything, also functions in Python |
# | a batch comes to the main process | it is there | through shared memory |
# | memory | that of one process | that of n more |
#
# Take threads if a step of decoding is all the work; take workers if functions of your own take time,
# too. `map_samples(fn, threads=n)` and `map_fields(..., threads=n)` run your functions in threads.
#
# ## On the device
#
# With a GPU, the workers need not decode at all. They send the encoded images, a tenth of the bytes,
# and `DecodeOnDevice` decodes each batch in one call of nvJPEG (`pip install torchcodec`, 0.16 or newer,
# in its build for CUDA), beside the training's own work there. Here, the same code runs with or without a
# GPU: with `device="cpu"` it uses the decoders from above, and returns their numbers.

# %%
has_device = torch.cuda.is_available() and importlib.util.find_spec("torchcodec") is not None
device = "cuda" if has_device else "cpu"
print("decoding on", device if has_device else "the CPU: there is no GPU, or no torchcodec")

encoded = photos(only=["cls"])  # jpg stays bytes
loader = wp.PipeLoader(
    encoded, batch_size=16, num_workers=2, on_device=wp.DecodeOnDevice("jpg", size=224, device=device)
)
batch = next(iter(loader))
loader.close()
print(batch["jpg"].shape, batch["jpg"].dtype, batch["jpg"].device)
decoded = next(iter(wp.PipeLoader(photos("torchrgb8", size=224), batch_size=16, lanes=2)))
assert batch["__key__"] == decoded["__key__"]
assert has_device or torch.equal(batch["jpg"], decoded["jpg"])

# %% [markdown]
# The state is that of the batches that were returned, so a resume is as exact as without.
#
# ## Audio and video
#
# `decode_by_ext("audio", "video")` decodes all of each file. Most trainings need a clip: pass
# `wp.audio(...)` or `wp.video(...)` for its seconds, or a reader, which decodes what you ask it for.
# Arrays of samples or frames with their rate are encoded by the writer.

# %%
with_audio = importlib.util.find_spec("soundfile") is not None
with_video = importlib.util.find_spec("av") is not None
for name, there in (("audio", with_audio), ("video", with_video)):
    if not there:
        print(f"skipped {name}: pip install 'wds_pipes[{name}]'")

seconds = np.arange(3 * 16_000) / 16_000
with wp.TarWriter("clips.tar") as writer:
    for number in range(4):
        sample = {"__key__": f"clip{number}", "cls": number}
        if with_audio:
            sample["flac"] = np.sin(2 * np.pi * (220 + 110 * number) * seconds)[None].astype(np.float32) / 2, 16_000
        if with_video:
            shade = np.linspace(0, 255, 75).astype(np.uint8)[:, None, None, None]
            sample["mp4"] = np.broadcast_to(shade, (75, 48, 64, 3)), 25
        writer.write(sample)


def clips(*specs):
    return wp.ShardList("clips.tar").open_shards().load_tar().group_by_key().decode_by_ext(*specs)


for sample in clips({"flac": wp.audio(start=1, duration=0.5), "mp4": wp.video(start=1, duration=0.2)}):
    print(
        sample["__key__"],
        {name: (sample[name][0].shape, sample[name][1]) for name in ("flac", "mp4") if name in sample},
    )

# %% [markdown]
# A clip at random needs a reader, since its start depends on the sample. `map_samples` passes it a
# generator that draws the same numbers after a resume:


# %%
def random_clip(sample, rng):
    """Half a second of audio, from anywhere."""
    reader = sample["flac"]
    start = rng.uniform(0, reader.seconds - 0.5)
    return {**sample, "flac": reader.read(start, 0.5), "start": start}


if with_audio:
    samples = clips({"flac": wp.AudioReader}).map_samples(random_clip)
    print([f"{sample['start']:.2f} s" for sample in samples])

# %% [markdown]
# ## One field, many samples
#
# Text comes as files of records. `explode_records` makes a sample of each record, and a resume
# continues at the next record, in the middle of a file. It takes JSON Lines, MessagePack and CBOR,
# compressed or not.

# %%
with wp.TarWriter("documents.tar") as writer:
    for part in range(3):
        lines = [json.dumps({"text": f"document {number} of part {part}"}) for number in range(100)]
        writer.write({"__key__": f"part-{part}", "jsonl": "\n".join(lines).encode()})


def documents():
    pipe = wp.ShardList("documents.tar").open_shards().load_tar().group_by_key().explode_records("jsonl")
    return wp.PipeLoader(pipe, batch_size=30, collate="list")


loader = documents()
batch = next(iter(loader))
print(batch[0]["__key__"], batch[0]["text"], "...", batch[-1]["__key__"])
resumed = documents()
resumed.load_state_dict(loader.state_dict())
assert next(iter(resumed))[0]["__key__"] == "part-0/30"

# %% [markdown]
# ## A format of your own
#
# For one pipe, pass a function of the bytes by extension. It takes precedence over the table:

# %%
sample = next(iter(photos({"jpg": wp.image_size, "cls": lambda data: f"class {data.decode()}"})))
print(sample["jpg"], sample["cls"])

# %% [markdown]
# For a whole program, a `Codec` is both directions, and `register_codec` adds it to the table that
# `decode_by_ext` and the writers use. `check_codec` encodes and decodes its example:


# %%
def read_points(data):
    if len(data) % 12:
        raise ValueError(f"points have 12 bytes each, and these are {len(data)} bytes")
    return np.frombuffer(data, "<f4").reshape(-1, 3).copy()


def write_points(points):
    return np.ascontiguousarray(points, "<f4").tobytes()


points = wp.Codec("pts", read_points, write_points, example=np.eye(3, dtype=np.float32))
check_codec(points)
wp.register_codec(points)

with wp.TarWriter("points.tar") as writer:
    for number in range(4):
        writer.write({"__key__": f"scan{number}", "pts": rng.normal(size=(number + 1, 3))})
    writer.write({"__key__": "scan4", "pts": b"not points"})  # bytes are written as they are

scans = wp.ShardList("points.tar").open_shards().load_tar().group_by_key()
print([sample["pts"].shape for sample in scans.decode_by_ext(on_error="skip")])

# %% [markdown]
# A package offers its codecs by an entry point, so that users only install it: `help(wp.Codec)` shows
# the lines.
#
# ## What cannot be decoded
#
# The last scan was skipped, and counted. By default it is an error. It names the shard, the sample,
# the field and the cause, and in a local shard the byte where its member starts:

# %%
try:
    list(scans.decode_by_ext())
except wp.DecodeError as error:
    print(error)
    print(error.url, error.key, error.field)

# %% [markdown]
# ## What to read next
#
# - [The reference](docs/reference/codecs) lists all formats, what they are decoded to, and encoded
#   from.
# - [Limits and safety](docs/limits): what is refused, and how images with palettes, CMYK, 16 bits or
#   EXIF are treated.
# - `11_troubleshooting`, if a loader is slower than you expect.
