# %% [markdown]
# # A data set on the command line: make it, look at it, check it, mend it
#
# **You learn** how `wds-pipes` turns a folder of images into shards that are divided, indexed and
# checked, how to look inside, what happens when you interrupt it, and how to repair damaged shards.
#
# **You need** `pip install wds_pipes`

# %%
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import wds_pipes as wp

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there

# %% [markdown]
# In a shell you would type the commands of this tutorial as they are. Here, a function runs them,
# prints what they print, and checks their exit code: 0 means that all is well, 1 that something is
# wrong with the data, and 2 that the command was not called rightly.


# %%
def shell(line, code=0):
    """Run a wds-pipes command."""
    print("$", line)
    program, *arguments = shlex.split(line)
    assert program == "wds-pipes"
    command = [sys.executable, "-m", "wds_pipes", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    assert done.returncode == code, done.returncode


# %% [markdown]
# ## The data: a folder for each class
#
# This is the layout of torchvision's ImageFolder.

# %%
rng = np.random.default_rng(0)
for kind in ("birds", "cats", "dogs"):
    Path("photos", kind).mkdir(parents=True)
    for number in range(100):
        picture = Image.fromarray(rng.integers(0, 256, (48, 64, 3), np.uint8))
        picture.save(f"photos/{kind}/{number:03d}.jpg")
Path("photos/cats/Thumbs.db").write_bytes(b"not a picture")

# %% [markdown]
# ## Make shards
#
# First see what would be written. `--dry-run` reads all names and sizes, and writes nothing:

# %%
options = "--from classes --shuffle 7 --split train=0.9,val=0.1 --max-samples 100 --ignore Thumbs.db"
shell(f"wds-pipes create photos shards {options} --dry-run")

# %% [markdown]
# - `--from classes`: the directory of a file is its class. The field `cls` has its number, and
#   `classes.json` the names.
# - `--shuffle 7`: a random order, which depends on the keys and on the 7. Samples of a class that
#   are next to each other would stay near each other in training.
# - `--split`: a key is always in the same part, also when you add samples later.
# - `--max-samples`, `--max-bytes`: how large shards are. 100 is for this tutorial: take 256 MB to
#   1 GB.

# %%
shell(f"wds-pipes create photos shards {options} -j 2")

# %% [markdown]
# ## Interrupt it
#
# A shard appears under its name when it is complete, so whatever stops the command, no half shard is
# there. Run the same command again: what is finished is kept, and the bytes are those of a run
# without an interruption. Here one shard is lost:

# %%
before = Path("shards/train/train-000001.tar").read_bytes()
Path("shards/train/train-000001.tar").unlink()
shell(f"wds-pipes create photos shards {options}")
assert Path("shards/train/train-000001.tar").read_bytes() == before

# %% [markdown]
# With other input or other options the command refuses, because the shards would not belong
# together:

# %%
shell(f"wds-pipes create photos shards {options.replace('7', '8')}", code=2)

# %% [markdown]
# ## Look at it
#
# `info` describes the shards, `ls` lists samples with their bytes, `head` shows the first ones, and
# `wds-pipes browse shards/train` shows all of them in a web browser ([Look at a data set](docs/browse.md)).

# %%
shell("wds-pipes info shards/train")
shell("wds-pipes ls shards/val -n 3")
shell("wds-pipes head shards/val -n 2")

# %% [markdown]
# `get` finds one sample, by its number or key, without reading what is before it. `cat` writes
# samples as a tar or as lines of JSON:

# %%
shell("wds-pipes get cats/005 shards/*/index.json -o found")
print(sorted(os.listdir("found/cats")))
shell("wds-pipes cat shards/val --fields cls --slice 0:3 --jsonl")

# %% [markdown]
# ## Check it
#
# `verify` reads everything: damage, keys that come twice, fields that only some samples have, sizes and
# MD5s other than those of the index; with `--decode` also fields that cannot be decoded.

# %%
shell("wds-pipes verify shards/train shards/val --decode")

# %% [markdown]
# Now a disk changes a few bytes of a header, as disks do. `verify` says where, and which command
# mends it:

# %%
shard = Path("shards/train/train-000000.tar")
data = bytearray(shard.read_bytes())
start = wp.IndexedShards(str(shard))[40]["__key__"].encode()
place = data.index(start)
data[place + 100 : place + 160] = bytes(60)
shard.write_bytes(data)
shell("wds-pipes verify shards/train", code=1)

# %% [markdown]
# `repair` writes all samples that are whole, into new shards, and lists what was lost:

# %%
shell("wds-pipes repair shards/train mended")
print(Path("mended/lost.jsonl").read_text())
shell("wds-pipes verify mended")

# %% [markdown]
# ## Write it otherwise
#
# The shards are of other sizes now. `reshard` makes even ones; `shuffle`, `sort`, `mix`, `filter`, `map`,
# `join` and `dedup` work in the same way: from shards into another directory, the same bytes each
# time, with `-j` for several processes.

# %%
shell("wds-pipes reshard mended even --shards 4")
Path("wanted.txt").write_text("cats/001\ncats/002\ndogs/007\n")
shell("wds-pipes filter even small --keys wanted.txt")

# %% [markdown]
# ## Train with it
#
# The commands wrote the offsets of the samples and an index, so the number of samples is known, random
# access works, and a resume starts at once:

# %%
photos = wp.IndexedShards("shards/val")
print(len(photos), "samples,", "the first is", photos[0]["__key__"])
pipe = (
    wp.SampleList("shards/val", shuffle=True, seed=1)
    .fetch_samples()
    .decode_by_ext("rgb8", size=32)
    .to_tuple("jpg", "cls")
)
loader = wp.PipeLoader(pipe, batch_size=8)
print(len(loader), "batches in an epoch")
images, labels = next(iter(loader))
print(images.shape, images.dtype, labels)

# %% [markdown]
# ## What to read next
#
# - [The reference](docs/reference/commands) of all commands.
# - `14_clusters`: the same commands on many machines.
# - `12_random_access`: what the offsets are for.
