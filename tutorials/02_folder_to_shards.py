# %% [markdown]
# # From a folder of images to shards
#
# **You learn** how to write shards, how large to make them, how to count their samples once with an
# index, and how to check what you wrote.
#
# If your files need no changes, a command makes shards of them: see
# `15_data_sets_on_the_command_line`. This tutorial shows how a program of your own writes them.
#
# **You need** `pip install wds_pipes`

# %%
import os
import random
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import wds_pipes as wp
from wds_pipes.display import show

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there

# %% [markdown]
# ## The data: one folder for each class

# %%
CLASSES = ["disc", "ring", "square"]


def draw(kind, rng):
    image = Image.fromarray(rng.integers(0, 90, (48, 48, 3), np.uint8))
    size = int(rng.integers(12, 20))
    box, color = (24 - size, 24 - size, 24 + size, 24 + size), tuple(int(value) for value in rng.integers(120, 256, 3))
    pencil = ImageDraw.Draw(image)
    if kind == "square":
        pencil.rectangle(box, fill=color)
    else:
        pencil.ellipse(box, fill=color if kind == "disc" else None, outline=color, width=4)
    return image


rng = np.random.default_rng(0)
for number in range(300):
    kind = CLASSES[number % 3]
    Path("images", kind).mkdir(parents=True, exist_ok=True)
    draw(kind, rng).save(f"images/{kind}/photo.{number:04d}.jpg", quality=90)
print(sorted(os.listdir("images/disc"))[:3])

# %% [markdown]
# ## Write shards
#
# A sample is a dict with a `"__key__"` and its fields. Bytes are written unchanged, so copy the
# bytes of a JPEG instead of decoding and encoding it again. Other values are encoded by the field's
# name: `txt`, `cls` (integers), `json`, `npy` (arrays), `png` (images), ...
#
# Three rules:
#
# 1. **Shuffle now.** Samples of one class that are next to each other in a shard stay near each
#    other in training, even with a shuffle buffer.
# 2. **Keys** are unique, sort in the order that you want, and contain no dots: the first dot ends
#    the key. `photo.0001.jpg` would be a sample `photo` with a field `0001.jpg`.
# 3. **Names** of the shards of one data set follow one pattern, such as `train-000000.tar`.

# %%
paths = sorted(Path("images").rglob("*.jpg"))
random.Random(0).shuffle(paths)

os.mkdir("shards")
with wp.ShardWriter("shards/train-%06d.tar", max_samples=100, index="shards/index.json") as writer:
    for path in paths:
        kind = path.parent.name
        key = f"{kind}-{path.stem.partition('.')[2]}"
        writer.write(
            {"__key__": key, "jpg": path.read_bytes(), "cls": CLASSES.index(kind), "json": {"file": path.name}}
        )
print(writer.shards)
assert sum(writer.shards.values()) == 300

# %% [markdown]
# A shard gets its name only when it is complete; if writing stops in the middle, no incomplete
# shard has that name. The same samples always produce the same bytes, so you can compare checksums.
# A name that could not be read back as it was written is refused at once:

# %%
with wp.TarWriter("refused.tar") as one:
    try:
        one.write({"__key__": "photo.0001", "jpg": paths[0].read_bytes()})
    except wp.SampleError as error:
        print(error)
    one.write({"__key__": "photo-0001", "jpg": paths[0].read_bytes()})

# %% [markdown]
# ## How large?
#
# - **100 MB to 1 GB** per shard is a good size for images: large enough that the time to open one
#   (about 50 ms from a cloud store) does not matter, and small enough to copy and to divide over
#   workers. By default, `ShardWriter` begins a new shard at 1 GiB or 100 000 samples.
# - **Many more shards than ranks x workers**, about ten times as many: each worker of each rank
#   reads its own shards, and the more shards there are, the better their shuffling mixes the
#   samples. With an index (below) a few shards are enough, because then samples are partitioned
#   instead of shards.
# - **Shards with equal numbers of samples** (`max_samples=`) give workers equal amounts of work.
# - A tar has a header of 512 bytes for each file, and pads each file to a multiple of 512 bytes. If
#   samples are very small, put several values into one field (`json`, `npy`).

# %%
data = sum(path.stat().st_size for path in paths)
stored = sum(os.path.getsize(shard) for shard in writer.shards)
print(
    f"{data:,} bytes of JPEG take {stored:,} bytes: with three files a sample, "
    f"{(stored - data) / 300:.0f} more for each"
)

# %% [markdown]
# ## An index
#
# `index="shards/index.json"` above wrote the number of samples, the size in bytes and the MD5 of
# each shard. With it, the length of an epoch is known and all ranks can get the same number of
# batches. A `ShardList` of an index needs no other argument:

# %%
pipe = (
    wp.ShardList("shards/index.json", shuffle=True, seed=1)
    .open_shards()
    .load_tar()
    .group_by_key()
    .decode_by_ext("rgb8")
    .to_tuple("jpg", "cls")
)
loader = wp.PipeLoader(pipe, batch_size=32)
assert len(loader) == 10
assert len(list(loader)) == 10

# %% [markdown]
# For existing shards, `wds-pipes index 'shards/train-*.tar' -o again.json` reads each shard once and
# writes the same file. So does a function, which also returns the facts:

# %%
from wds_pipes.tar import index_shards

counted = index_shards("shards/train-{000000..000002}.tar", "again.json")
for url, facts in counted.items():
    print(url, facts)
assert [facts.samples for facts in counted.values()] == list(writer.shards.values())

# %% [markdown]
# ## Check what you wrote
#
# Read everything once, and compare it with the folder.

# %%
by_key = {}
for sample in wp.ShardList("shards/*.tar").open_shards().load_tar().group_by_key().decode_by_ext():
    by_key[sample["__key__"]] = sample
assert len(by_key) == 300
for path in paths:
    sample = by_key[f"{path.parent.name}-{path.stem.partition('.')[2]}"]
    assert sample["jpg"] == path.read_bytes()
    assert CLASSES[sample["cls"]] == path.parent.name
    assert sample["json"] == {"file": path.name}
print("all 300 are there, byte for byte")

# %% [markdown]
# Look at some samples:

# %%
show(
    next(
        iter(
            wp.ShardList("shards/*.tar")
            .open_shards()
            .load_tar()
            .group_by_key()
            .decode_by_ext("rgb8")
            .to_tuple("jpg", "cls")
            .batch_samples(8)
        )
    )
)

# %% [markdown]
# ## From a data set of Mosaic Streaming or LitData
#
# Their libraries read what they wrote, and `ShardWriter` writes it. Both programs take the bytes of
# a JPEG as they are, instead of decoding and encoding it again. With `pip install mosaicml-streaming`:
#
# ```python
# from streaming import StreamingDataset
# from streaming.base.format.mds.encodings import Bytes, _encodings
#
# import wds_pipes as wp
#
# _encodings["jpeg"] = Bytes
# data = StreamingDataset(local="mds", shuffle=False, batch_size=1)
# with wp.ShardWriter("train-%06d.tar", offsets=True) as writer:
#     for number in range(len(data)):
#         sample = data[number]
#         writer.write({"__key__": f"{number:09d}", "jpg": sample["image"], "cls": sample["label"]})
# ```
#
# With `pip install litdata`:
#
# ```python
# from litdata import StreamingDataset
# from litdata.streaming.serializers import BytesSerializer
#
# import wds_pipes as wp
#
# data = StreamingDataset("optimized", shuffle=False, serializers={"jpeg": BytesSerializer()})
# with wp.ShardWriter("train-%06d.tar", offsets=True) as writer:
#     for number, sample in enumerate(data):
#         writer.write({"__key__": f"{number:09d}", "jpg": sample["image"], "cls": sample["label"]})
# ```
#
# `wds-pipes convert` makes shards of TFRecord, Parquet, saved Hugging Face data sets and LMDB.

# %% [markdown]
# ## Writing on several machines
#
# `wds-pipes create` divides the work by itself: see `14_clusters`. In a program, let each writer
# write its own shards: `ShardWriter("shards/train-%06d.tar", start=1000 * rank)`. Make the index of
# all shards afterwards. The function passed as `on_shard=` is called with the path of each complete
# shard, for example to upload it and remove the local file.
#
# ## What to read next
#
# - `03_resume_after_a_crash` trains on shards like these.
# - `05_s3_gcs_http` reads shards from a store.
