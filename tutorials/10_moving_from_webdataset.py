# %% [markdown]
# # Moving from webdataset
#
# **You learn** what replaces each call of `webdataset`, what is different on purpose, and how four
# public training scripts look after the move. All of it runs here, on small shards.
#
# **You need** `pip install wds_pipes webdataset wids`
#
# The shards stay as they are: both libraries read the same tars. Three things change in a script:
#
# 1. The pipeline has other names: see the table.
# 2. `PipeLoader` takes the place of `WebLoader`, `split_by_node`, `split_by_worker` and `with_epoch`.
# 3. The loader has a state. Save it with the model, and a run continues exactly where it stopped.
#
# | webdataset | wds_pipes | what is different, and why |
# |---|---|---|
# | `WebDataset(urls)`, `tarfile_to_samples()` | `ShardList(urls).open_shards()` `.load_tar().group_by_key()` | Each step has its own options, and its position is saved. |
# | `SimpleShardList`, `shardlists`, braces, `a::b` | `ShardList(urls)` | Also globs, directories, `@list.txt`, and an index. |
# | `ResampledShards`, `resampled=True` | `ShardList(resampled=True)` | An epoch has as many draws as there are shards. It ends, and its position is saved. On several ranks, use it with `epoch_end="loop"` and `with_epoch()`. |
# | `shardshuffle=100`, `detshuffle` | `ShardList(shuffle=True, seed=7)` | All shards are permuted, differently in each epoch, by (seed, epoch). |
# | `split_by_node`, `split_by_worker`, `nodesplitter=` | nothing: `PipeLoader` partitions the data | Several ranks without equal epochs raise an error instead of hanging. |
# | `.shuffle(1000)` | `.shuffle_buffer(1000)` | Yields its first sample at once. Resumes exactly, with two numbers as its state. |
# | `.decode("rgb8")` | `.decode_by_ext("rgb8")` | The same specs, `"torch"` for `"torchrgb"` too; `"torchl"` returns (1, H, W), not (H, W), as layers take it. Pickles are refused unless you pass `allow_pickle=True`. |
# | `.decode(wds.handle_extension("x", fn))` | `.decode_by_ext({"x": fn})` | |
# | `.decode("pil", fn)` with `fn(key, data)` | `.decode_by_ext("pil", fn)` | The same functions, tried in the same order: `key` is `".x"`, and None leaves the field to the next one. |
# | `.decode("pil", only=["jpg"], partial=True)` | `.decode_by_ext("pil", only=["jpg"], partial=True)` | `only` also takes `"jpg;png"`. |
# | `.to_tuple("jpg;png", "cls")` | `.to_tuple("jpg;png", "cls")` | A missing field is an error that lists the existing fields. |
# | `.map(fn)` | `.map_samples(fn)` | `fn(sample, rng)` receives a random generator, so augmentation resumes exactly. torch's `.map(fn)` works too. |
# | `.map(fn)` that draws from global generators | `.map_samples(fn, seed_all=True)` | For torchvision and the like: the generators of torch, numpy and `random` are seeded for each sample. |
# | `.map(fn)` that returns None to drop a sample | `.map_samples(fn, may_drop=True)` | It returns `wp.DROP`. None is an error: most often a `return` was forgotten. |
# | `.map_dict(jpg=fn)` | `.map_fields({"jpg": fn})` | Other fields stay. |
# | `.rename(image="jpg;png")` | `.rename_fields({"image": "jpg;png"})` | The old name is removed. |
# | `.map_tuple(f, g)` | `.map_fields({0: f, 1: g})` | Other places stay. |
# | `.select(fn)` | `.filter_samples(fn)` | Samples left out are counted in `counts()`. |
# | `.rsample(0.1)` | `.filter_samples(lambda sample, rng: rng.random() < 0.1)` | The same samples after a resume. |
# | `.slice(100)`, `.slice(100, 200)` | `.take_samples(100)`, `.slice_samples(100, 200)` | The numbers count for all workers and ranks together, not for each. Reading ends after the last sample. |
# | `.compose(fn)`, a generator function | `.then(fn)` | `fn` is called again whenever it returns. A resume reads again what one call takes, so let it return after some samples. |
# | `.batched(64)` | `.batch_samples(64)` | Yields tensors, also of labels, or with `collate="keep"` arrays of arrays and numbers as webdataset does, and with `"numpy"`, `"columns"` or `"list"` arrays, columns of lists, or lists of samples; `collate=` also takes a function. `partial=False` is `drop_last=True`. |
# | `.unbatched()` | `.unbatch_samples()` | |
# | after the loader: `.unbatched().shuffle(n).batched(m)` | `.interleave_shards(4)` before `.shuffle_buffer(1000)`, and `PipeLoader(mix_lanes=4)` | A batch mixes shards within a lane, and then lanes. |
# | `WebLoader(...)`, `DataLoader` | `PipeLoader(pipe, batch_size=64, num_workers=8)` | Has a state, for any number of workers and ranks. |
# | `.with_epoch(10_000)` | `PipeLoader(..., epoch_end="loop")` `.with_epoch(samples=10_000)` | The number counts for all ranks together, not for each worker, and is a multiple of ranks x batch size. Each rank gets the same number of full batches, whatever the steps filter or skip. |
# | `WebLoader(...).with_epoch(5)` on each of `world` ranks | `PipeLoader(..., epoch_end="loop")` `.with_epoch(batches=5 * world)` | There the number counts the batches of one rank, here those of all ranks together. |
# | `.repeat(2)` | `.repeat(2)` | Also between other steps. Each repetition is another epoch, in another order. |
# | `.repeat()`, `.repeat().with_epoch(n)` | `PipeLoader(..., epoch_end="loop")`, and its `.with_epoch(samples=n)` | Without `PipeLoader`, `.repeat()` has no end here either. |
# | `.with_length(n)` | `ShardList(index=...)` | The length is counted, not set by hand. |
# | `empty_check=False` | `ShardList(empty_check=False)` | An epoch whose shards have no sample is an error otherwise. |
# | `RandomMix([a, b], probs=[3, 1])` | `mix({"a": a, "b": b}, weights={"a": 3, "b": 1})` | Exact proportions at every place, not on average. |
# | `RoundRobin` | `mix` with equal weights | |
# | `multi_tarfile_samples` of 4M, `merge_in` of WhisperSpeech | `join({"rgb": a, "caption": b})` | Samples of shards with the same keys, as one. A missing key is an error, or is skipped and counted. |
# | `cache_dir=...` | `.cache_shards("cache", max_bytes="200GB")` `.open_shards()` | Each shard is downloaded once for all processes of a machine. |
# | `pipe:aws s3 cp ... -` | `s3://...` | Several concurrent requests, with retries. `pipe:` needs `allow_pipe=True`, because it runs a shell. |
# | `handler=wds.warn_and_continue` | `ShardList(urls, on_error="skip")` for all steps, or `on_error="skip", max_errors=100` of a step; or `on_error={wp.DecodeError: "skip"}`, or a function of the error | Bad data is counted; too much is an error. Half a sample is never returned. `map_samples(on_error="skip")` raises a NameError, a TypeError and the like, for a misspelt name would skip every sample. |
# | `ShardWriter("x-%06d.tar", maxcount=...)` | `ShardWriter("x-%06d.tar", max_samples=...)` | A shard gets its name when complete. Can also write the index. |
# | `TarWriter` | `TarWriter` | The same samples always produce the same bytes. A key that could not be read back is refused. Bytes in `x.gz` must be compressed already, a str in `json` is JSON text, and `.tar.gz` compresses. |
# | `wids.ShardListDataset("index.json")` | `ShardList("index.json")`; for access by number `IndexedShards(urls)` | The first reads the same index, as a stream. The second needs offsets beside the shards, which `wds-pipes index --offsets` writes; no shard is copied, and remote samples are read with ranged requests. |
# | `wids.ShardListSampler`, `ChunkedSampler`, `DistributedChunkedSampler` | `SampleOrder(len(dataset), shuffle=True, block_samples=64)` | A sampler with a state; the ranks divide one order. Blocks are permuted over the whole epoch, and keep their order inside, so use small ones. |
# | `wds.DataPipeline(...)` | a chain of methods | |
#
# Not available: `pipe:` in URLs from files, LMDB caches.
#
# The commands of `tarp` and `widsindex` have counterparts, with one trap: `tarp split` is `reshard`
# here, and `split` divides a data set into train and val. `DIR` is a directory, or a URL of a store.
#
# | before | here | what is different, and why |
# |---|---|---|
# | `tarp create -o x.tar recipe` | `wds-pipes create photos/ DIR`, or a list, CSV, JSON lines or Parquet | Files of one name are a sample, so no recipe is needed. Large sources become several shards. |
# | `tarp cat -o whole.tar a.tar b.tar` | `wds-pipes concat a.tar b.tar whole.tar` | |
# | `tarp cat --slice 0:100 -f "jpg cls" -o - a.tar` | `wds-pipes cat --slice 0:100 --fields jpg,cls a.tar` | Writes to standard output. |
# | `tarp cat -s 1000` | `wds-pipes shuffle a.tar DIR` | Any sample may come anywhere, not only within a window. |
# | `tarp split -c 1000 -o 'x-%06d.tar' a.tar` | `wds-pipes reshard a.tar DIR --max-samples 1000` | Continues after an interruption; `-j 8` for 8 processes. |
# | `tarp sort` | `wds-pipes sort` | |
# | `tarp proc` with a shell command | `wds-pipes map module:function` | A Python function for each sample, not a shell. |
# | `widsindex create -o index.json SHARDS` | `wds-pipes index -o index.json SHARDS` | The same file. A second run reads only new and changed shards. |
# | `widsindex info`, `widsindex sample` | `wds-pipes info`, `wds-pipes get` | |

# %%
import io
import json
import logging
import math
import os
import random
import tarfile
import tempfile
from functools import partial

import numpy as np
import torch
import webdataset as wds
import wids
from PIL import Image
from torch.utils.data import default_collate

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards, same

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
logging.getLogger("wds_pipes").setLevel(logging.ERROR)  # it names the samples that are skipped
urls = make_shards("data", shards=4, samples=50, fields=("jpg", "cls", "json", "txt"))


def contents(sample):
    """A sample without what the libraries add, such as URLs and paths."""
    return {name: value for name, value in sorted(sample.items()) if not name.startswith("__") or name == "__key__"}


# %% [markdown]
# ## The same samples, with the same values

# %%
for spec in ("l8", "rgb8", "rgb", "torchrgb8", "torchrgb", "torch", "pil"):
    theirs = list(wds.WebDataset(urls, shardshuffle=False).decode(spec))
    ours = list(wp.ShardList(urls).open_shards().load_tar().group_by_key().decode_by_ext(spec))
    assert same([contents(sample) for sample in theirs], [contents(sample) for sample in ours])
    print(f"{spec:>9}: {len(ours)} samples, images are {type(ours[0]['jpg']).__name__}")

theirs = wds.WebDataset(urls, shardshuffle=False).decode("torchrgb").to_tuple("jpg;png", "cls").batched(16)
ours = wp.ShardList(urls).open_shards().load_tar().group_by_key().decode_by_ext("torchrgb")
ours = ours.to_tuple("jpg;png", "cls").batch_samples(16)
for (images, labels), (our_images, our_labels) in zip(theirs, ours, strict=True):
    assert same(images, our_images)
    assert np.array_equal(labels, our_labels)
print("labels were a", type(labels).__name__, "and are a", type(our_labels).__name__)

# %% [markdown]
# ## Four scripts, before and after
#
# The rest of a training script stays as it is: only the part that makes the loader changes. Here is
# that part of four public scripts, with the calls of webdataset that each makes, and all of our
# code. The images are small and made up. `preprocess` and `tokenize` stand in for the transforms of
# torchvision and for a tokenizer; the real ones go in the same places.

# %%
SIZE = 16  # the sides of the images in a batch, in pixels


def preprocess(image):
    """Crop and flip a PIL image. Like torchvision, it draws from torch's global generator."""
    left, top = (int(torch.randint(side - SIZE + 1, ())) for side in image.size)
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + SIZE, top + SIZE))))
    pixels = pixels.permute(2, 0, 1) / 255
    return pixels.flip(-1) if torch.rand(()) < 0.5 else pixels


def tokenize(texts):
    return torch.tensor([list(text.encode().ljust(8)[:8]) for text in texts])


def write_photos(directory, first, count):
    """Write photos with captions, labels and metadata, 20 in a shard, and timm's _info.json. Some
    captions are missing, and some images are web pages.
    """
    os.makedirs(directory)
    with wp.ShardWriter(f"{directory}/%06d.tar", max_samples=20) as writer:
        for number in range(first, first + count):
            image = np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8)
            sample = {
                "__key__": f"{number:06d}",
                "jpg": b"<html>404</html>" if number % 25 == 7 else image,
                "txt": f"photo {number}",
                "cls": number % 10,
                "json": {
                    "label": number % 7 - 1,
                    "original_width": 1024 if number % 3 else 640,
                    "original_height": 1024,
                    "pwatermark": number % 5 / 5,
                },
            }
            writer.write({name: value for name, value in sample.items() if name != "txt" or number % 10 != 3})
    names = sorted(os.listdir(directory))
    split = {"num_samples": count, "filenames": names, "shard_lengths": [20] * len(names), "alt_label": "label"}
    with open(f"{directory}/_info.json", "w") as file:
        json.dump({"splits": {"train": split}}, file)
    return [f"{directory}/{name}" for name in names]


laion, cc12m = write_photos("laion", 0, 160), write_photos("cc12m", 1000, 80)

# %% [markdown]
# Each port is trained and resumed by the same few lines. The model is a single layer. The state of
# the data goes into the checkpoint as JSON.


# %%
def train(loader, steps, saved=None):
    """Train a layer from the beginning or from a checkpoint; return the losses and a checkpoint."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * SIZE * SIZE, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if saved:
        model.load_state_dict(saved["model"])
        loader.load_state_dict(json.loads(saved["data"]))
    losses = []
    while len(losses) < steps:
        for images, *_ in loader:
            loss = model(images.flatten(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    checkpoint = {"model": model.state_dict(), "data": json.dumps(loader.state_dict())}
    loader.close()
    return losses, checkpoint


def check_resume(make_loader, steps=24):
    """Stop at a random step and resume in a new loader: the losses are those of one long run."""
    whole, _ = train(make_loader(), steps)
    cut = random.Random(make_loader.__name__).randrange(1, steps)
    head, saved = train(make_loader(), cut)
    rest, _ = train(make_loader(), steps - cut, saved)
    assert head + rest == whole
    print(f"stopped after step {cut} and resumed: the same {steps} losses")


# %% [markdown]
# Three of the four scripts continue after an error in the data (`handler=log_and_continue` or
# `warn_and_continue`). Two of them have their own copy of `group_by_keys` for this. Here the list of
# shards says `on_error="skip"` for all steps: errors are logged (the first 20 of each step) and
# counted. Where a script passes no handler, the step says `on_error="raise"`.


# %%
def read(urls, **options):
    """Samples of bytes, without what is broken."""
    shards = wp.ShardList(urls, on_error="skip", **options).open_shards()
    return shards.load_tar(on_truncated="warn").group_by_key()


# %% [markdown]
# ### open_clip: `get_wds_dataset`
#
# | open_clip 3.3.0, `data.py` | here |
# |---|---|
# | `ResampledShards2("a::b", weights="1::3")`, upsampling factors | `ShardList("a::b", resampled=True, weights="1::3")`; or, as below, a ShardList for each source and `mix`, whose proportions are exact |
# | `SimpleShardList`, `detshuffle2`, `split_by_node`, `split_by_worker` | `ShardList(shuffle=True)` |
# | `tarfile_to_samples_nothrow`, `log_and_continue` | `read`, above |
# | `select(filter_no_caption_or_no_image)` | `filter_samples(has_caption_and_image)` |
# | `decode("pilrgb")`, `rename`, `map_dict`, `to_tuple` | `decode_by_ext("pilrgb")`, `rename_fields`, `map_fields`, `to_tuple` |
# | `batched`, `with_epoch` for each worker, `WebLoader` | `PipeLoader(epoch_end="loop").with_epoch(...)` |
# | `dataloader.num_batches`, `dataloader.num_samples` | `len(loader)`, and times the global batch size |
# | `SharedEpoch`, `set_epoch` | nothing: each `iter()` continues the stream |


# %%
def has_caption_and_image(sample):
    return "txt" in sample and not sample.keys().isdisjoint(("jpg", "png", "jpeg", "webp"))


def tokens(text, tokenize):
    return tokenize([text])[0]


def get_wds_dataset(
    sources,
    preprocess,
    tokenize,
    *,
    is_train,
    batch_size,
    num_samples=0,
    factors=None,
    resampled=True,
    seed=0,
    **options,
):
    """Make a loader of (images, texts). ``sources``: lists of shards by name; ``factors``: how often
    to draw a shard of each source, in relation to the others.
    """
    order = {"seed": seed, "shuffle": is_train and not resampled, "resampled": is_train and resampled}
    pipes = {name: read(urls, **order).filter_samples(has_caption_and_image) for name, urls in sources.items()}
    if is_train:
        pipes = {name: pipe.shuffle_buffer(5000) for name, pipe in pipes.items()}
    weights = {name: len(urls) * (factors[name] if factors else 1) for name, urls in sources.items()}
    pipe = wp.mix(pipes, weights, exhausted="repeat" if is_train else "drop")
    pipe = pipe.decode_by_ext("pilrgb").rename_fields({"image": "jpg;png;jpeg;webp", "text": "txt"})
    functions = {"image": preprocess, "text": partial(tokens, tokenize=tokenize)}
    pipe = pipe.map_fields(functions, seed_all=True, on_error="raise").to_tuple("image", "text")
    loader = wp.PipeLoader(pipe, batch_size=batch_size, epoch_end="loop" if is_train else "exact", **options)
    if not is_train:
        return loader
    ranks = loader.rank.of
    return loader.with_epoch(batches=math.ceil(num_samples / (batch_size * ranks)) * ranks)


def open_clip(**options):
    return get_wds_dataset(
        {"laion": laion, "cc12m": cc12m},
        preprocess,
        tokenize,
        is_train=True,
        batch_size=8,
        num_samples=150,
        factors={"laion": 1, "cc12m": 2},
        **options,
    )


check_resume(open_clip)
images, texts = next(iter(open_clip()))
print(len(open_clip()), "batches of", images.shape, texts.shape)

# %% [markdown]
# `seed_all=True` is for `preprocess`: it seeds the global generators for each sample, so a crop is
# the same after a resume and with any number of workers. Three things to know:
#
# - A weight of `mix` is the share of a source, and a factor of open_clip belongs to each shard. So
#   the weight is the factor times the number of shards.
# - `num_batches` of open_clip is rounded up to a multiple of the number of workers. Here the number
#   of workers changes nothing.
# - Each worker of each rank draws from its own part of the shards, where open_clip's workers all draw
#   from the whole list. The shards of a source with fewer shards than workers go to them in turn.
#
# On two ranks, each filters and skips other samples, but both have the same number of full batches.
# In a real run you pass neither `rank` nor `world_size`; the loader finds them.

# %%
ranks = [open_clip(rank=rank, world_size=2) for rank in range(2)]
batches = [[len(images) for images, _ in loader] for loader in ranks]
print("batches on two ranks:", [len(sizes) for sizes in batches], "counts:", ranks[0].counts())
assert batches[0] == batches[1] == [8] * 10

# %% [markdown]
# ### timm: `ReaderWds`
#
# | timm 1.0.31, `reader_wds.py` | here |
# |---|---|
# | `_info.json`: file names and lengths of a split | `ShardList(..., samples_per_shard=info["shard_lengths"])` |
# | `SimpleShardList`, `detshuffle2`, islice by rank and worker | `ShardList(shuffle=True, seed=42)` |
# | `tarfile_to_samples(handler=log_and_continue)` | `read`, above |
# | `shuffle(bufsize, initial)` | `shuffle_buffer(8192)` |
# | `map(_decode)`: image, and target from `cls` or `json` | `decode_by_ext("pil")`, `map_samples(with_target)` |
# | `_decode` returns None for a label below 0 | `return wp.DROP`, with `may_drop=True` |
# | `log_and_continue` raises a TypeError and a wrong target key | so does `map_samples(on_error="raise")` |
# | `with_epoch(samples of a worker)` | `PipeLoader(epoch_end="loop").with_epoch(...)` |


# %%
def with_target(sample, target_key, class_map):
    target = sample["json"][target_key] if target_key else sample["cls"]
    if target < 0:
        return wp.DROP  # it has no label
    return {**sample, "target": class_map[target] if class_map else target}


def image_and_target(sample, transform):
    return transform(sample["image"]), sample["target"]


def reader_wds(root, split, transform, *, is_training, batch_size, seed=42, target_key=None, class_map=None, **options):
    """Make a loader of (images, targets)."""
    with open(f"{root}/_info.json") as file:
        info = json.load(file)["splits"][split]
    urls = [f"{root}/{name}" for name in info["filenames"]]
    pipe = read(urls, samples_per_shard=info["shard_lengths"], shuffle=is_training, seed=seed)
    if is_training:
        pipe = pipe.shuffle_buffer(8192)
    pipe = pipe.decode_by_ext("pil").rename_fields({"image": "jpg;png;webp"})
    target = partial(with_target, target_key=target_key or info.get("alt_label"), class_map=class_map)
    pipe = pipe.map_samples(target, may_drop=True, on_error="raise")
    pipe = pipe.map_samples(partial(image_and_target, transform=transform), seed_all=True, on_error="raise")
    if not is_training:
        return wp.PipeLoader(pipe, batch_size=batch_size, epoch_end="exact", **options)
    loader = wp.PipeLoader(pipe, batch_size=batch_size, epoch_end="loop", **options)
    ranks = loader.rank.of
    return loader.with_epoch(batches=math.ceil(info["num_samples"] / (batch_size * ranks)) * ranks)


def timm(**options):
    return reader_wds("laion", "train", preprocess, is_training=True, batch_size=8, **options)


check_resume(timm)
loader = reader_wds("laion", "train", preprocess, is_training=False, batch_size=8)
print("validation:", sum(len(targets) for _, targets in loader), "samples;", loader.counts())

# %% [markdown]
# timm's reader says of validation on several ranks that it could miss some samples and repeat
# others. Here validation has each sample once (`"exact"`), and where all ranks need the same number
# of batches, `epoch_end="pad"` marks the repeats. It needs counted samples, so not `on_error="skip"`.
#
# ### diffusers: `SDXLText2ImageDataset`
#
# The script is `train_lcm_distill_sdxl_wds.py` of the consistency distillation examples, at commit
# 9a94547.
#
# | diffusers | here |
# |---|---|
# | `ResampledShards(urls)` | `ShardList(urls, resampled=True)` |
# | `tarfile_to_samples_nothrow`, a copy of `group_by_keys` | `read`, above |
# | `select(WebdatasetFilter(min_size, max_pwatermark))`: no if anything fails | `map_samples(wanted, may_drop=True, on_error=...)` |
# | `decode("pil")`, `rename`, `map(filter_keys(...))` | `decode_by_ext("pil")`, `rename_fields`, a tuple |
# | `map(transform)` with `RandomCrop.get_params` | `map_samples(prepare, seed_all=True)` |
# | empty captions by `random.random()` in the training loop (`proportion_empty_prompts`) | in `prepare`, so they resume, too |
# | `batched(partial=False, collation_fn=default_collate)` | `PipeLoader(batch_size=8, collate=default_collate)` |
# | `with_epoch` for each worker, `num_batches` | `PipeLoader(epoch_end="loop").with_epoch(...)`, `len(loader)` |


# %%
def wanted(sample, min_size, max_pwatermark):
    facts = json.loads(sample["json"])
    large = min(facts.get("original_width") or 0, facts.get("original_height") or 0) >= min_size
    return sample if large and (facts.get("pwatermark") or 0.0) <= max_pwatermark else wp.DROP


def prepare(sample, resolution, interpolation, empty_captions):
    image, facts = sample["image"], sample["json"]
    scale = resolution / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], interpolation)
    left, top = (int(torch.randint(side - resolution + 1, ())) for side in image.size)
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + resolution, top + resolution))))
    text = "" if random.random() < empty_captions else sample["text"]
    return pixels.permute(2, 0, 1) / 127.5 - 1, text, (facts["original_width"], facts["original_height"]), (top, left)


def text_to_image(urls, num_train_examples, batch_size, prepare, *, min_size=700, seed=0, **options):
    """Make a loader of (images, texts, original sizes, crop coordinates)."""
    pipe = read(urls, resampled=True, seed=seed)
    wants = partial(wanted, min_size=min_size, max_pwatermark=0.5)
    pipe = pipe.map_samples(wants, may_drop=True, on_error={Exception: "skip"}).shuffle_buffer(1000)
    pipe = pipe.decode_by_ext("pil").rename_fields({"image": "jpg;png;jpeg;webp", "text": "text;txt;caption"})
    pipe = pipe.map_samples(prepare, seed_all=True, on_error="raise")
    loader = wp.PipeLoader(pipe, batch_size=batch_size, collate=default_collate, epoch_end="loop", **options)
    ranks = loader.rank.of
    return loader.with_epoch(batches=math.ceil(num_train_examples / (batch_size * ranks)) * ranks)


def diffusers(**options):
    crop = partial(prepare, resolution=SIZE, interpolation=Image.Resampling.BILINEAR, empty_captions=0.1)
    return text_to_image(laion, 100, 8, crop, **options)


check_resume(diffusers)
images, texts, (widths, heights), (tops, lefts) = next(iter(diffusers()))
print(images.shape, texts[:3], widths[:3], lefts[:3])
assert (widths >= 700).all()

# %% [markdown]
# ### webdataset: the ResNet notebook
#
# The notebook is `examples/train-resnet50-wds.ipynb`.
#
# | notebook | here |
# |---|---|
# | `WebDataset(urls, resampled=True, shardshuffle=True, cache_dir=...)` | `ShardList(urls, resampled=True).open_shards(cache=...)` |
# | `shuffle(1000)`, `decode("pil")`, `map(make_sample)` | `shuffle_buffer(1000)`, `decode_by_ext("pil")`, `map_samples(make_sample)` |
# | `batched(64)`, `WebLoader(num_workers=4)` | `PipeLoader(batch_size=64, num_workers=4)` |
# | `unbatched()`, `shuffle(10)`, `batched(64)` after the loader | `interleave_shards(4)` |
# | `with_epoch(batches)` | `PipeLoader(epoch_end="loop").with_epoch(batches=...)` |


# %%
def make_sample(sample):
    return preprocess(sample["jpg"]), sample["cls"]


def image_loader(urls, batches, *, batch_size=64, cache=None, **options):
    pipe = wp.ShardList(urls, resampled=True).open_shards(cache=cache).load_tar().group_by_key().interleave_shards(4)
    pipe = pipe.shuffle_buffer(1000).decode_by_ext("pil", on_error="skip")  # some of our photos are broken
    pipe = pipe.map_samples(make_sample, seed_all=True)
    return wp.PipeLoader(pipe, batch_size=batch_size, epoch_end="loop", **options).with_epoch(batches=batches)


def resnet(**options):
    return image_loader(laion, 18, batch_size=8, **options)


check_resume(resnet)

# %% [markdown]
# The notebook's second shuffle mixes the batches of its four workers. Here `interleave_shards(4)`
# mixes four shards in each worker, and `PipeLoader(..., mix_lanes=4)` would also put samples of four
# workers into each batch.
#
# ### 4M and WhisperSpeech: two sets with the same keys
#
# `multi_tarfile_samples` of 4M reads one shard of each modality side by side, and `merge_in` of
# WhisperSpeech reads derived features beside the audio. Here that is `join`: the first source decides
# the order, and the shards at the same place of all lists are read together. As with `mix`, the rest of
# the pipeline and its state are those of one stream. We write captions of these photos as a set of
# their own; a caption of one photo is missing.


# %%
def read_together(sets, **options):
    """Samples with the fields of several sets, which are named as their directories."""
    first, *others = sets
    pipes = {first: read(f"{first}/*.tar", shuffle=True, **options)} | {name: read(f"{name}/*.tar") for name in others}
    return wp.join(pipes, on_missing="skip", prefix=True)


os.makedirs("captions")
for url in laion:
    with wp.TarWriter(f"captions/{os.path.basename(url)}") as writer:
        for sample in read(url):
            if sample["__key__"] != "000005":
                writer.write({"__key__": sample["__key__"], "json": {"caption": f"photo {sample['__key__']}"}})

pipe = read_together(["laion", "captions"]).select_fields("laion.jpg", "captions.json").decode_by_ext()
sample = next(iter(pipe))
assert sample["captions.json"]["caption"].endswith(sample["__key__"])
print([*sample], sum(1 for _ in pipe), pipe.counts())

# %% [markdown]
# ### Lines of code
#
# | script | theirs | here |
# |---|---|---|
# | open_clip 3.3.0 | 218 | 34 |
# | timm 1.0.31 | 287 | 26 |
# | diffusers | 116 | 24 |
# | ResNet notebook | 12 | 7 |
#
# Counted are the functions and classes from the list of shards to the loader, in lines of up to 120
# characters as `ruff format` writes them, without imports, comments, docstrings and blank lines.
# `read` is counted in each of the first three. Transforms, tokenizers and models are left out,
# except in diffusers, where the class contains the transform. Their code does a little more: timm
# also takes splits as brace patterns and targets of several fields (its listing of file names is
# not counted), and diffusers has a mode with fixed sizes. None of the four can save a position in
# the data and resume from it.

# %% [markdown]
# ## Bad data
#
# We make one shard with a field that cannot be decoded, and one that ends in the middle of its
# fifth sample.

# %%
with tarfile.open("bad.tar", "w") as tar:
    for number in range(10):
        for name, data in ((f"{number}.txt", b"text"), (f"{number}.json", b"{}" if number != 4 else b"{not json")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
with open("bad.tar", "rb") as whole, open("cut.tar", "wb") as cut:
    cut.write(whole.read(9 * 1024 + 300))  # in the header of the tenth member

for url in ("bad.tar", "cut.tar"):
    skipping = {"handler": wds.ignore_and_continue}
    theirs = list(wds.WebDataset(url, shardshuffle=False, **skipping).decode(**skipping))
    halves = [sample["__key__"] for sample in theirs if "json" not in sample]
    print(f"webdataset returns {len(theirs)} samples of {url}; without json: {halves}")

    pipe = wp.ShardList(url).open_shards().load_tar(on_error="skip", on_truncated="ignore")
    pipe = pipe.group_by_key(on_error="skip").decode_by_ext(on_error="skip", max_errors=100)
    ours = list(pipe)
    print(f"wds_pipes returns {len(ours)} samples of {url}; counts: {pipe.counts()}")
    assert all({"txt", "json"} <= sample.keys() for sample in ours)

# %% [markdown]
# The fifth sample of the incomplete shard is only half a sample, without its `json`. By default, bad
# data raises an error that says where it is:

# %%
try:
    list(wp.ShardList("bad.tar").open_shards().load_tar().group_by_key().decode_by_ext())
except wp.DecodeError as error:
    print(error)
else:
    raise AssertionError

# %% [markdown]
# ## Shuffling
#
# In webdataset's buffer some samples wait very long; here no sample leaves more than `2 * size`
# places late. So for the same spread, `size` must be 1.7 times as large. The first sample comes at
# once, and not when the buffer is full.

# %%
many = make_shards("many", shards=4, samples=1000, fields=("cls",))


def spread(samples):
    order = np.array([int(sample["__key__"]) for sample in samples])
    assert sorted(order) == list(range(4000))
    return np.std(order - np.arange(4000))


print(f"webdataset .shuffle(500):        {spread(wds.WebDataset(many, shardshuffle=False).shuffle(500)):.0f}")
for size in (500, 850):
    pipe = wp.ShardList(many).open_shards().load_tar().group_by_key().shuffle_buffer(size)
    print(f"wds_pipes  .shuffle_buffer({size}): {spread(pipe):.0f}")

# %% [markdown]
# ## Writing: each reads what the other wrote
#
# The index has the format of wids.

# %%
samples = [
    {
        "__key__": f"{number:04d}",
        "txt": f"text {number}",
        "cls": number,
        "json": {"a": number},
        "npy": np.arange(number),
    }
    for number in range(20)
]
with wds.ShardWriter("theirs-%06d.tar", maxcount=10, verbose=0) as writer:
    for sample in samples:
        writer.write(sample)
with wp.ShardWriter("ours-%06d.tar", max_samples=10) as writer:
    for sample in samples:
        writer.write(sample)
for pattern in ("theirs-{000000..000001}.tar", "ours-{000000..000001}.tar"):
    by_them = [contents(sample) for sample in wds.WebDataset(pattern, shardshuffle=False).decode()]
    by_us = wp.ShardList(pattern).open_shards().load_tar().group_by_key().decode_by_ext()
    by_us = [contents(sample) for sample in by_us]
    assert same(by_them, by_us)
    assert same(by_us, [contents(sample) for sample in samples])

index_shards("data/*.tar", "data/index.json")
assert len(wids.ShardListDataset("data/index.json", cache_dir="cache", transformations=[])) == 200
assert len(wp.PipeLoader(wp.ShardList("data/index.json").open_shards().load_tar().group_by_key(), batch_size=10)) == 20
print("equal, both ways")

# %% [markdown]
# ## What to read next
#
# - `03_resume_after_a_crash` and `04_ranks_and_elastic_resume`.
# - `11_troubleshooting`: error messages, and what to do.
