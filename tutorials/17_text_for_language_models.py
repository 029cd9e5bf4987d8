# %% [markdown]
# # Text for language models
#
# **You learn** how documents in JSON Lines become shards of tokens, how `pack_samples` fills
# sequences without cutting documents, how to mix data sets by a schedule, how attention keeps the
# documents of a sequence apart, and how a training that crashed resumes exactly, also on two ranks.
#
# **You need** `pip install 'wds_pipes[demo]' tokenizers` (demo installs matplotlib, for one plot).

# %%
import ast
import gzip
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

import wds_pipes as wp

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
threads = torch.get_num_threads()
torch.set_num_threads(1)  # sums of floats depend on how they are split

# %% [markdown]
# ## Documents
#
# Corpora come as JSON Lines, a document in each line, mostly compressed. We make two small ones of
# what every Python has: the docstrings of its library are our text, and its functions are our code.


# %%
def documents(path):
    """The docstrings and the sources of the functions and classes of a module."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield ast.get_docstring(node) or "", "\n".join(lines[node.lineno - 1 : node.end_lineno])


corpora = {"text": [], "code": []}
for path in sorted(Path(ast.__file__).parent.glob("[a-d]*.py")):
    for docstring, code in documents(path):
        corpora["text"] += [docstring] * (len(docstring) > 80)
        corpora["code"] += [code] * (len(code) < 2000)
for name, texts in corpora.items():
    with gzip.open(f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": f"{name}-{number:05d}", "text": text}) + "\n")
    print(len(texts), "documents of", name)

# %% [markdown]
# ## Shards
#
# `wds-pipes create` reads JSON Lines, plain or compressed (gz, bz2, xz, zst), and makes a sample of
# each line. `--key` names the column of the keys, and each `--value` a field and its column.
# `--shuffle` writes them in a random order, so that a shard is not all of one source. In a shell
# you would type the line as it is; a function runs it here.


# %%
def shell(line):
    """Run a wds-pipes command."""
    print("$", line)
    command = [sys.executable, "-m", "wds_pipes", *shlex.split(line)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


for name in corpora:
    shell(f"wds-pipes create {name}.jsonl.gz raw/{name} --key id --value txt=text --shuffle 7 --max-samples 150")

# %% [markdown]
# Shards of a real corpus have 256 MB to 1 GB; ours are small, so that there are some. A tar has a
# header of 512 bytes for each field, which is nothing beside a web page, but much beside a tweet.
# For documents of a few hundred bytes use `--group 100`: a sample has the lines of 100 documents,
# and `explode_records("jsonl")` in the pipeline makes them documents again.
#
# ## Tokens
#
# A byte-level BPE, trained on our text and code, with a token that ends each document:

# %%
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
tokenizer.train_from_iterator((text for texts in corpora.values() for text in texts), trainer)
tokenizer.save("tokenizer.json")
print(tokenizer.encode("def tokens(text):").tokens)

# %% [markdown]
# Tokenize once, and not in each epoch: `wds-pipes map` calls a function on each sample and writes
# new shards, on many processes (`-j 8`) or machines. Two bytes are enough for a token here. If you
# try several tokenizers, call the same function in the pipeline instead, with `map_samples`.

# %%
TOKENIZE = """\
import numpy as np
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")


def tokenize(sample):
    ids = tokenizer.encode(sample["txt"].decode()).ids
    return {"npy": np.array([*ids, tokenizer.token_to_id("<end>")], np.uint16)}
"""
with open("tokens.py", "w") as file:
    file.write(TOKENIZE)
for name in corpora:
    shell(f"wds-pipes map tokens:tokenize 'raw/{name}/*.tar' tokens/{name}")

# %% [markdown]
# ## Packs
#
# Documents differ in length, and a model takes sequences of one length. `pack_samples` puts whole
# documents together to packs of at most `budget` tokens: of a window of documents, the longest
# first, each where it leaves the least room (best-fit decreasing). Put `shuffle_buffer` before it,
# so that neighbours in a pack have nothing to do with each other.


# %%
BUDGET = 512


def tokens_of(name):
    shards = wp.ShardList(f"tokens/{name}/index.json", shuffle=True, seed=1).open_shards().load_tar()
    return shards.group_by_key().shuffle_buffer(200).decode_by_ext().rename_fields({"tokens": "npy"})


pack = next(iter(tokens_of("text").pack_samples("tokens", BUDGET, too_long="cut")))
print({name: tuple(value.shape) for name, value in pack.items() if isinstance(value, torch.Tensor)})
print("documents:", pack["__key__"])
print("begin at:", pack["cu_seqlens"].tolist(), "- the longest has", pack["max_seqlen"])
print("numbers of documents:", pack["document_ids"].unique().tolist())
second = slice(*pack["cu_seqlens"][1:3].tolist())
print(repr(tokenizer.decode(pack["tokens"][second].tolist())[:70]), pack["position_ids"][second][:5].tolist())

# %% [markdown]
# - `cu_seqlens` and `max_seqlen` are what kernels for sequences of different lengths take, such as
#   flash-attn's `flash_attn_varlen_func` or torch's `varlen_attn`, on a GPU.
# - `position_ids` begin at 0 in each document; rotary or learned positions take them.
# - `document_ids` make a mask, as below, or a block mask of FlexAttention.
# - `too_long="cut"` keeps the first 512 tokens of a longer document, and counts it. `method="wrap"`
#   cuts documents where a pack ends, so that nothing is lost and all packs are full.
#
# [Packing and buckets](docs/packing) has the code for FlexAttention, and more.
#
# ## A mixture with a schedule
#
# `mix` draws from several pipelines in exact proportions, and `schedule=` makes them a function of
# the number of documents so far: here code comes in over the first 300 documents. It must return
# the same for the same number. `exhausted="repeat"` begins a source again that has ended.
#
# The labels are the next token of the same document; the last token of a document has none. They go
# through the packing as an aligned field, and `pad=` fills packs up, so that they can be stacked.


# %%
LANES = 2


def weights(documents):
    return {"text": 1, "code": min(documents / 300, 1)}


def with_labels(sample):
    tokens = sample["tokens"].astype(np.int64)
    return {**sample, "tokens": tokens, "labels": np.append(tokens[1:], -100)}


def make_loader(exhausted="repeat", epoch_end="loop", **options):
    sources = {name: tokens_of(name) for name in ("text", "code")}
    documents = wp.mix(sources, schedule=weights, exhausted=exhausted).map_samples(with_labels)
    packs = documents.pack_samples(
        "tokens", BUDGET, aligned=["labels"], window=64, too_long="cut", pad={"tokens": 0, "labels": -100}
    )
    batches = packs.to_tuple("tokens", "labels", "position_ids", "document_ids", "__key__")
    return wp.PipeLoader(batches, batch_size=2, epoch_end=epoch_end, lanes=LANES, ledger=True, **options)


loader = make_loader()
tokens = filled = 0
shares = []
for number, (_, _, _, ids, packed) in enumerate(loader):
    tokens, filled = tokens + ids.numel(), filled + int((ids >= 0).sum())
    keys = [key for keys in packed for key in keys]
    shares.append(sum(key.startswith("code") for key in keys) / len(keys))
    if number == 59:
        break
print(f"{filled / tokens:.1%} of the tokens are of documents, the rest fills up")
print("share of code:", [round(sum(shares[start : start + 12]) / 12, 2) for start in range(0, 60, 12)])
assert filled / tokens > 0.97

# %% [markdown]
# How many packs an epoch has is not known before it was read, and may differ between ranks. So with
# `epoch_end="loop"` the epochs follow each other without end, all batches are full, and all ranks
# get as many.
#
# `lanes=2`: the epoch is divided into two lanes, each with its own shards and packs. Ranks and
# workers host lanes, so the batches are the same on one rank and on two. Take a multiple of every
# number of ranks x workers that you may use. Without `lanes`, or on three ranks, each document
# still comes once in an epoch, but in other packs; the lanes of a mix are then not divided but
# handed over as a whole.
#
# ## A model
#
# A small transformer. Its mask lets a token see the earlier tokens of its own document: the mask is
# block-diagonal.


# %%
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def mask_of(document_ids):
    """Which tokens each token sees: bool, shape (batch, 1, tokens, tokens)."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return (same & torch.ones_like(same).tril())[:, None]


class Model(nn.Module):
    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.token, self.position = nn.Embedding(1024, width), nn.Embedding(BUDGET, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 1024)

    def forward(self, tokens, position_ids, document_ids):
        x, mask = self.token(tokens) + self.position(position_ids), mask_of(document_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


# %% [markdown]
# A document in a pack has the same predictions as a document alone:

# %%
torch.manual_seed(0)
model = Model()
tokens, _, position_ids, document_ids, keys = next(iter(make_loader()))
with torch.no_grad():
    packed = model(tokens, position_ids, document_ids)
    for number, key in enumerate(keys[0]):
        own = document_ids[0] == number
        alone = model(tokens[:1, own], position_ids[:1, own], document_ids[:1, own])
        assert torch.allclose(packed[0, own], alone[0], atol=1e-5), key
print(len(keys[0]), "documents in a pack do not see each other")

# %% [markdown]
# ## A training that crashes
#
# A step takes one batch of each lane. On one rank these are two batches, whose gradients are added
# up; on two ranks each has one. (All ranks are in this process here, so that we can compare. In a
# real training each has its own, DDP adds up the gradients, and `checkpoint.save` of
# `04_ranks_and_elastic_resume` saves the states.) The checkpoint has the states of the loaders of
# all ranks, which any number of ranks can load.


# %%
class CrashError(Exception):
    pass


def train(folder, steps, ranks=1, crash_after=None):
    """Train from the newest checkpoint in a folder, if there is one; return the loss and the
    documents of each step.
    """
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loaders = [make_loader(rank=rank, world_size=ranks) for rank in range(ranks)]
    step, history = 0, []
    os.makedirs(folder, exist_ok=True)
    if checkpoints := sorted(Path(folder).glob("*.pt")):
        saved = torch.load(checkpoints[-1])
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for loader in loaders:
            loader.load_state_dict(saved["data"])
    batches = [iter(loader) for loader in loaders]
    while step < steps:
        loss, documents = 0.0, []
        for rank in range(ranks):
            for _ in range(LANES // ranks):
                tokens, labels, position_ids, document_ids, keys = next(batches[rank])
                logits = model(tokens, position_ids, document_ids)
                part = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / LANES
                part.backward()
                loss += part.item()
                documents += keys
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        history.append((loss, documents))
        if step % 6 == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            data = [loader.state_dict() for loader in loaders]
            torch.save({"step": step, "data": data, **parts}, f"{folder}/new")
            os.replace(f"{folder}/new", f"{folder}/step-{step:06d}.pt")  # it is complete, or not there
        if step == crash_after:
            raise CrashError
    return history


whole = train("whole", 24)
try:
    train("run", 24, crash_after=16)
except CrashError:
    print("crashed after step 16; the checkpoints are", sorted(os.listdir("run")))

# %% [markdown]
# The run goes on with step 13, on two ranks. Each lane was cut within a window of documents, with
# two shuffle buffers. Losses and documents are those of the run without a crash, to the last bit:

# %%
resumed = train("run", 24, ranks=2)
assert resumed == whole[12:]
print(len(resumed), "steps on two ranks: the same losses, the same documents in the same packs")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
left.imshow(mask_of(document_ids[:1])[0, 0], cmap="Greys", interpolation="nearest")
left.set(title="what each token of a pack sees", xlabel="token", ylabel="by the token")
right.plot(range(1, 25), [loss for loss, _ in whole], linewidth=6, color="0.8", label="without a crash")
right.plot(range(13, 25), [loss for loss, _ in resumed], color="C0", label="resumed on two ranks")
right.set(title="loss", xlabel="step")
right.legend()
plt.show()

# %% [markdown]
# The checkpoints alone say it, too. With `ledger=True`, a state has a digest of the documents that
# came: the sum of a hash of each, which depends neither on their order nor on ranks. `wds-pipes
# state diff --ledger` compares two runs:

# %%
shell("wds-pipes state diff --ledger whole/step-000024.pt run/step-000024.pt")

# %% [markdown]
# ## Each document once
#
# With `exhausted="drop"`, the mix goes on with the other source where one has ended, and
# `epoch_end="exact"` ends with the epoch, so that an epoch is each document once. Is it, if one
# rank stops in the middle and two go on?


# %%
def documents_in(batches):
    return [key for *_, packed in batches for keys in packed for key in keys]


one = make_loader("drop", "exact")
before = documents_in(itertools.islice(one, 75))
after = []
for rank in range(2):
    loader = make_loader("drop", "exact", rank=rank, world_size=2)
    loader.load_state_dict([one.state_dict()])
    after.append(documents_in(loader))
everything = [f"{name}-{number:05d}" for name, texts in corpora.items() for number in range(len(texts))]
assert sorted(before + after[0] + after[1]) == sorted(everything)
print(len(before), "documents on one rank, then", [len(keys) for keys in after], "on two: each once")

# %% [markdown]
# Where the keys are too many for a list, `wds-pipes state diff --ledger` says whether two runs have had
# the same samples; see the ledger in the guide to epochs.

# %% [markdown]
# ## Where a run stands, and which documents a step had
#
# `wds-pipes state show` prints where the loaders of a checkpoint stand:

# %%
shell("wds-pipes state show run/step-000024.pt")
saved = torch.load("run/step-000012.pt")
print(os.path.getsize("run/step-000012.pt"), "bytes, of them", len(json.dumps(saved["data"])), "for the data")

# %% [markdown]
# Suppose that the loss goes up at step 18. Which documents did it have? Without `mix` and
# `pack_samples`, the order alone says it, and `wds-pipes state at --step 17 train:make_loader` or
# `loader.plan` answer without reading. These two decide by what they read, so the answer is an
# exact resume: load the checkpoint before that step, and read on to it.

# %%
try:
    loader.plan(17)
except ValueError as error:
    print(error)

loader = make_loader()
loader.load_state_dict(saved["data"])
again = [keys for _, (*_, keys) in zip(range(LANES * (18 - saved["step"])), loader)]
suspects = [pack for keys in again[-LANES:] for pack in keys]
assert suspects == whole[17][1]
print("step 18 had", suspects[0])

# %%
torch.set_num_threads(threads)

# %% [markdown]
# ## Things to know
#
# - **Proportions are of documents**, not of tokens. If a document of code has three times the
#   tokens of one of text, give text three times the weight for equal shares of the tokens.
# - **Window and memory**: `pack_samples` holds `window` documents of each lane, 512 by default. A
#   resume reads at most two windows again, and the samples of the shuffle buffers.
# - **Tokens in the pipeline**: a tokenizer in `map_samples` needs workers (`num_workers=8`), and
#   each resume is as exact. Let it return the same for the same text.
# - **Another way to shuffle**: over `SampleList(..., shuffle=True).fetch_samples()` documents come
#   from everywhere in the corpus, without a buffer.
# - **Leaving out documents**: put `filter_samples` before `pack_samples`, from the next epoch on.
#
# ## What to read next
#
# - [Packing and buckets](docs/packing): FlexAttention, wrapped packs, padded batches of like
#   length.
# - [How exact resume works](docs/resume).
# - `04_ranks_and_elastic_resume`: checkpoints of all ranks. `16_your_trainer`: TorchTitan, Megatron
#   and others.
