"""What newcomers' mistakes print: each is a script of a few lines, and what it prints must say what
went wrong, where, and what to do.

    python tests/bench/mistakes.py [WORDS]      (only the mistakes whose names hold these words; all
    take some three minutes on 2 cores)

Prints a table in Markdown: the mistake, and the last lines that it prints. Exits with 1 if a
message lacks the text that is expected of it, which was chosen by hand: what went wrong, where, and
what to do.
"""

import http.server
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
import types
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

SECONDS = 120  # that a script may take
AT_ONCE = 2

HEAD = """
import wds_pipes as wp

def samples(urls="data/shard-*.tar", **options):
    return wp.ShardList(urls, **options).open_shards().load_tar().group_by_key()

"""


class Mistake(NamedTuple):
    """A script that is wrong, and what it must print."""

    name: str
    code: str
    expected: tuple[str, ...]


def mistake(name, code, *expected):
    return Mistake(name, code, expected)


def in_workers(name, code, *expected):
    """The same mistake in the main process and in two workers."""
    return [
        mistake(f"{name}, {workers} workers", code.replace("WORKERS", str(workers)), *expected) for workers in (0, 2)
    ]


FUNCTION = """
def broken(sample):
    return sample["label"]

pipe = samples().decode_by_ext().map_samples(broken)
"""
OF_FUNCTION = (
    "KeyError: 'label'",
    'return sample["label"]',
    "raised by the function of map_samples() on sample '00000000' of shard data/shard-000000.tar",
)
RUN = "\nfor batch in wp.PipeLoader(pipe, batch_size=4, num_workers=WORKERS):\n    pass\n"

ARGUMENTS = [
    mistake(
        "no shard matches",
        "samples('date/*.tar')",
        "no shard matches 'date/*.tar': check the pattern, the directory and the working directory",
    ),
    mistake("an empty list of shards", "samples([])", "the list of shards is empty: name at least one"),
    mistake("None as shards", "samples(None)", "shards are named by a URL, a path or a list of them, not None"),
    mistake(
        "a number among shards",
        "samples(['data/shard-000000.tar', 3])",
        "a shard is named by a string or a path, not 3",
    ),
    mistake(
        "braces that do not match",
        "list(samples('data/shard-{000000..000003.tar'))",
        "the braces in 'data/shard-{000000..000003.tar' do not match",
        "write a range as {000000..000011}",
    ),
    mistake(
        "a list file that is missing",
        "samples('@shards.txt')",
        "the list of shards 'shards.txt' does not exist; after '@' comes the path of a text file",
    ),
    mistake(
        "samples_per_shard of too few shards", "samples(samples_per_shard=[20, 20])", "samples_per_shard", "4 shards"
    ),
    mistake("a seed as text", "samples(seed='7')", "seed must be an int, not '7'"),
    mistake(
        "no size of a shuffle",
        "samples().shuffle_buffer()",
        "missing 1 required positional argument: 'size'",
    ),
    mistake("a size as text", "samples().shuffle_buffer('1000')", "must be an int, not '1000'"),
    mistake("a size of 0", "samples().shuffle_buffer(0)", "must be at least 1, not 0"),
    mistake(
        "an option that is not there",
        "samples().shuffle_buffer(1000, initial=100)",
        "shuffle_buffer() has no option 'initial'. Here it is not needed: ",
    ),
    mistake("a batch of 0", "samples().batch_samples(0)", "must be at least 1, not 0"),
    mistake("an unknown way to decode", "samples().decode_by_ext('rgb9')", "'rgb9'", "rgb8"),
    mistake("a decoder that is no function", "samples().decode_by_ext({'jpg': 'rgb8'})", "'jpg'", "function"),
    mistake(
        "to_tuple without fields",
        "samples().to_tuple()",
        "to_tuple() needs the names of fields, such as to_tuple('jpg;png', 'cls')",
    ),
    mistake(
        "to_tuple with a list",
        "samples().to_tuple(['jpg', 'cls'])",
        "a field is named by a string such as 'jpg;png', not ['jpg', 'cls']",
    ),
    mistake(
        "map_samples without a function", "samples().map_samples(None)", "map_samples() needs a function, not None"
    ),
    mistake(
        "a function without a parameter",
        "samples().map_samples(lambda: 1)",
        "map_samples() needs fn(sample) or fn(sample, rng)",
    ),
    mistake(
        "a filter that is no function",
        "samples().filter_samples('cls')",
        "filter_samples() needs a function, not 'cls'",
    ),
    mistake(
        "an unknown on_error",
        "samples().decode_by_ext(on_error='ignore')",
        "on_error must be one of 'raise', 'skip', not 'ignore'",
    ),
    mistake(
        "storage_options as text",
        "wp.ShardList('data').open_shards(storage_options='anon')",
        "storage_options must be a dict, not str",
    ),
    mistake(
        "a size with a unit",
        "wp.ShardList('data').open_shards().load_tar(max_member_bytes='1GB')",
        "max_member_bytes must be an int, not '1GB'",
    ),
    mistake("mix of a list", "wp.mix([samples(), samples()])", "mix() takes", "name"),
    mistake(
        "weights of another name",
        "wp.mix({'a': samples(), 'b': samples()}, weights={'a': 1, 'c': 1})",
        "weights",
        "'c'",
    ),
    mistake("interleave of 0", "samples().interleave_shards(0)", "must be at least 1, not 0"),
    mistake(
        "a cache of any size", "wp.ShardList('data').cache_shards('cache', max_bytes='lots')", "max_bytes", "'lots'"
    ),
    mistake(
        "fields as text", "wp.ShardList('data').open_shards().load_tar().group_by_key(fields='jpg')", "fields", "'jpg'"
    ),
    mistake("PipeLoader of URLs", "wp.PipeLoader('data/*.tar')", "PipeLoader takes a pipe, not str"),
    mistake(
        "PipeLoader with a size as text",
        "wp.PipeLoader(samples(), batch_size='8')",
        "batch_size must be an int, not '8'",
    ),
    mistake(
        "PipeLoader with -1 workers",
        "wp.PipeLoader(samples(), num_workers=-1)",
        "num_workers must be at least 0, not -1",
    ),
    mistake(
        "PipeLoader with shuffle",
        "wp.PipeLoader(samples(), batch_size=4, shuffle=True)",
        "PipeLoader() has no option 'shuffle'. Here it is ShardList(shuffle=True)",
    ),
    mistake(
        "drop_last without batch_size",
        "wp.PipeLoader(samples(), drop_last=True)",
        "drop_last and collate go with batch_size",
    ),
    mistake(
        "padding without counts",
        "wp.PipeLoader(samples(), batch_size=4, epoch_end='pad')",
        "epoch_end='pad' needs to know",
        "ShardList(index=...)",
    ),
    mistake(
        "len() without counts",
        "len(wp.PipeLoader(samples(), batch_size=4))",
        "the number of batches is not known",
        "ShardList(index=...)",
    ),
    mistake(
        "an unknown start method",
        "wp.PipeLoader(samples(), num_workers=2, multiprocessing_context='threads')",
        "multiprocessing_context",
        "'threads'",
        "fork",
    ),
    mistake(
        "prefetch_factor of 0",
        "wp.PipeLoader(samples(), prefetch_factor=0)",
        "prefetch_factor must be at least 1, not 0",
    ),
    mistake(
        "PipeLoader over torch's source",
        "from torch.utils.data.datapipes.iter import "
        "IterableWrapper\nwp.PipeLoader(IterableWrapper(['data/shard-000000.tar']).open_shards().load_tar())",
        "ShardList",
    ),
    mistake(
        "a shard that exists",
        "wp.TarWriter('data/shard-000000.tar')",
        "there is such a file: pass overwrite=True to replace it",
        "data/shard-000000.tar",
    ),
    mistake(
        "a sample without a key",
        "with wp.TarWriter('new.tar') as writer:\n    writer.write({'txt': 'a cat'})",
        "__key__",
    ),
    mistake(
        "a field that has no form",
        "with wp.TarWriter('new.tar') as writer:\n    writer.write({'__key__': 'a', 'txt': 1.5})",
        "'txt'",
        "'a'",
        "1.5",
    ),
]

ORDER = [
    mistake("group_by_key without load_tar", "list(wp.ShardList('data').group_by_key())", "group_by_key()", "load_tar"),
    mistake("load_tar without open_shards", "list(wp.ShardList('data').load_tar())", "load_tar()", "open_shards"),
    mistake(
        "open_shards twice",
        "list(wp.ShardList('data').open_shards().open_shards())",
        "open_shards() takes URLs and paths",
        "ShardList",
    ),
    mistake(
        "decode after to_tuple",
        "list(samples().to_tuple('txt').decode_by_ext())",
        "decode_by_ext() takes samples as dicts",
        "before to_tuple()",
    ),
    mistake(
        "decode without group_by_key",
        "list(wp.ShardList('data').open_shards().load_tar().decode_by_ext())",
        "decode_by_ext() takes samples as dicts",
        "group_by_key()",
    ),
    mistake(
        "to_tuple twice",
        "list(samples().to_tuple('txt').to_tuple('txt'))",
        "to_tuple() takes samples as dicts, and its source gave tuple: put it after group_by_key(), and only once",
    ),
    mistake(
        "a step over a list",
        "from wds_pipes.datapipes import LoadTar\nLoadTar(['data/shard-000000.tar'])",
        "load_tar() needs a pipe as its source",
    ),
    mistake("a state of torch's shuffle", "wp.state_dict(samples().shuffle())", "shuffle_buffer"),
    *in_workers(
        "decode after to_tuple",
        "pipe = samples().to_tuple('txt').decode_by_ext()" + RUN,
        "decode_by_ext() takes samples as dicts",
        "before to_tuple()",
    ),
]

DATA = [
    *in_workers(
        "a field that is not there",
        "pipe = samples().to_tuple('jpg', 'cls')" + RUN,
        "'00000000' of shard data/shard-000000.tar has no field 'jpg'",
        "'txt'",
    ),
    *in_workers(
        "arrays of two sizes",
        "pipe = samples('uneven.tar').decode_by_ext()" + RUN,
        "field 'npy' cannot be stacked",
        "sample '1'",
        "map_samples(), or pass collate=",
    ),
    *in_workers(
        "a field that does not decode",
        "pipe = samples('json.tar').decode_by_ext()" + RUN,
        "field 'json' of sample 'a' in shard json.tar cannot be decoded",
        "Correct it, or pass on_error='skip'",
    ),
    *in_workers(
        "a shard that is missing",
        "pipe = samples(['data/shard-000000.tar', 'gone.tar'])" + RUN,
        "shard gone.tar does not exist",
        "Check its name",
    ),
    *in_workers(
        "a shard that is cut",
        "pipe = samples('cut.tar')" + RUN,
        "shard cut.tar, byte 3072: it is cut",
        "Write or fetch it again",
    ),
    *in_workers("a web page as a shard", "pipe = samples('page.tar')" + RUN, "shard page.tar, byte 0", "web page"),
    mistake("a shard with wrong bytes", "list(samples('wrong.tar'))", "shard wrong.tar, byte 2048", "checksum"),
    mistake(
        "an empty file",
        "list(samples('empty.tar'))",
        "shard empty.tar, byte 0: it is empty (0 bytes)",
        "Write or fetch it again",
    ),
    mistake(
        "a key in pieces",
        "list(samples('pieces.tar'))",
        "key 'a' comes again in shard pieces.tar at byte 2048",
        "Sort the shard by name",
    ),
    mistake(
        "a pickle",
        "list(samples('pickle.tar').decode_by_ext())",
        "field 'pkl' of sample 'a' in shard pickle.tar",
        "allow_pickle=True",
    ),
    mistake(
        "wrong samples_per_shard",
        "list(wp.PipeLoader(samples(samples_per_shard=21), batch_size=4, epoch_end='drop'))",
        "shard data/shard-000000.tar has only 20 samples",
        "index says 21. Correct it, or make the index again",
    ),
    mistake(
        "too many errors",
        "list(samples('json.tar').decode_by_ext(on_error='skip', max_errors=0))",
        "sample 'a' in shard json.tar",
        "max_errors=0",
    ),
]

FUNCTIONS = [
    mistake("a function that raises, bare pipe", FUNCTION + "list(pipe)", *OF_FUNCTION),
    *in_workers("a function that raises", FUNCTION + RUN, *OF_FUNCTION),
    mistake(
        "a function that raises, second call",
        FUNCTION + "items = iter(pipe)\ntry:\n    next(items)\nexcept KeyError:\n    next(items)",
        *OF_FUNCTION,
    ),
    *[
        mistake(
            f"a function that raises, {loader}, {workers} workers",
            FUNCTION + f"from {module} import {loader}\nlist({loader}(pipe.as_dataset(), "
            f"batch_size=None, num_workers={workers}))",
            *(["KeyError"] if workers else []),
            *OF_FUNCTION[bool(workers) :],
        )
        for module, loader in (
            ("torch.utils.data", "DataLoader"),
            ("torchdata.stateful_dataloader", "StatefulDataLoader"),
        )
        for workers in (0, 2)
    ],
    mistake(
        "a function that raises, node",
        FUNCTION + "from torchdata.nodes import Loader\nlist(Loader(pipe.as_node()))",
        *OF_FUNCTION,
    ),
    mistake(
        "a function that raises, before ParallelMapper",
        FUNCTION + "from torchdata.nodes import Loader, "
        "ParallelMapper\nlist(Loader(ParallelMapper(pipe.as_node(), str, num_workers=2)))",
        "KeyError",
        *OF_FUNCTION[1:],
    ),
    *in_workers(
        "a filter that raises",
        "pipe = samples().filter_samples(lambda sample: sample['cls'] > 5)" + RUN,
        "TypeError: '>'",
        "filter_samples() on sample '00000000'",
    ),
    *in_workers(
        "a step that takes tuples for dicts",
        "def flip(sample):\n    return sample['txt']\n\npipe = samples().to_tuple('txt').map_samples(flip)" + RUN,
        "tuple indices",
        "return sample['txt']",
        "map_samples() on sample 1",
    ),
    *in_workers(
        "a function that calls a library",
        ("import json\ndef read(sample):\n    return json.loads(sample['txt'])\n\npipe = samples().map_samples(read)")
        + RUN,
        "JSONDecodeError",
        "return json.loads(sample['txt'])",
        "map_samples() on sample '00000000'",
    ),
    *in_workers(
        "a decoder that raises",
        "def read(data):\n    return int(data) // 0\n\npipe = samples().decode_by_ext({'cls': read})" + RUN,
        "field 'cls' of sample '00000000' in shard data/shard-000000.tar cannot be decoded: ZeroDivisionError",
        "return int(data) // 0",
    ),
    *in_workers(
        "a collate that raises",
        "def stack(batch):\n    return batch[0]['label']\n\nfor batch in "
        "wp.PipeLoader(samples(), batch_size=4, collate=stack, num_workers=WORKERS):\n    pass",
        "KeyError: 'label'",
        "return batch[0]['label']",
    ),
    *in_workers(
        "a step of one's own that raises",
        """
class Halve(wp.Stage):
    def run(self):
        for sample in self.source.items:
            yield sample["cls"] / 2

wp.register_stage(Halve)
pipe = samples().halve()
"""
        + RUN,
        "TypeError: unsupported operand",
        'yield sample["cls"] / 2',
    ),
    mistake(
        "a lambda, spawned workers",
        "list(wp.PipeLoader(samples().map_samples(lambda s: s), num_workers=2, multiprocessing_context='spawn'))",
        "Can't pickle <function <lambda>",
        "Write the functions of its steps with def, at the top of a module",
    ),
    mistake(
        "a batch that cannot be sent",
        "def lazy(sample):\n    return lambda: "
        "sample\n\nlist(wp.PipeLoader(samples().map_samples(lazy), num_workers=2))",
        "cannot be sent to the main process",
        "num_workers=0",
    ),
    mistake(
        "a worker that is killed",
        "import os, signal\ndef die(sample):\n    os.kill(os.getpid(), "
        "signal.SIGKILL)\n\nlist(wp.PipeLoader(samples().map_samples(die), num_workers=2))",
        "killed by signal",
        "memory",
        "state_dict() is still good",
    ),
    mistake(
        "a worker that is late",
        "import time\ndef wait(sample):\n    "
        "time.sleep(60)\n\nlist(wp.PipeLoader(samples().map_samples(wait), num_workers=2, "
        "timeout_seconds=1))",
        "timed out after 1 seconds",
        "allow more",
    ),
]

CHECKPOINTS = [
    mistake(
        "a state of another shuffle",
        "samples().shuffle_buffer(5).load_state_dict(samples().shuffle_buffer(10).state_dict())",
        "group_by_key > shuffle_buffer(size=10), this",
        "group_by_key > shuffle_buffer(size=5).",
    ),
    mistake(
        "a state of another shuffle, PipeLoader",
        "wp.PipeLoader(samples().shuffle_buffer(5), "
        "batch_size=4).load_state_dict(wp.PipeLoader(samples().shuffle_buffer(10), "
        "batch_size=4).state_dict())",
        "size=10",
        "size=5",
    ),
    mistake(
        "a state without a step",
        "samples().shuffle_buffer(5).load_state_dict(samples().state_dict())",
        "shuffle_buffer(size=5)",
    ),
    mistake(
        "a state of another seed", "samples(seed=1).load_state_dict(samples(seed=2).state_dict())", "seed=2", "seed=1"
    ),
    mistake(
        "a state of more shards",
        "samples('data/shard-000000.tar').load_state_dict(samples().state_dict())",
        "4 shards",
        "1",
    ),
    mistake(
        "a pipe's state in PipeLoader",
        "wp.PipeLoader(samples()).load_state_dict(samples().state_dict())",
        "it was made by a pipe, this is a PipeLoader: load it into what you iterated",
    ),
    mistake(
        "PipeLoader's state in a pipe",
        "samples().load_state_dict(wp.PipeLoader(samples()).state_dict())",
        "it was made by a PipeLoader, this is a pipe: load it into a PipeLoader",
    ),
    mistake(
        "no state",
        "wp.PipeLoader(samples()).load_state_dict(None)",
        "this is not a state of a wds_pipes pipeline but None",
        "state_dict()",
    ),
    mistake(
        "a checkpoint for a state",
        "samples().load_state_dict({'model': {}, 'loader': samples().state_dict()})",
        "this is not a state",
        "state_dict()",
    ),
    mistake(
        "a state that was edited",
        "samples().load_state_dict(samples().state_dict() | {'epoch': -1})",
        "the state is damaged: 'epoch' is -1",
        "Use an untouched checkpoint",
    ),
    mistake(
        "a state of another format",
        "samples().load_state_dict(samples().state_dict() | {'version': 99})",
        "format version 99",
        "Resume with the wds_pipes that wrote it",
    ),
    mistake(
        "a state before the pipe is complete",
        "pipe = samples()\npipe.load_state_dict(pipe.state_dict())\npipe.decode_by_ext()",
        "load it into what you iterate",
    ),
    mistake(
        "two iterators",
        "pipe = samples()\nfirst, second = iter(pipe), iter(pipe)\nnext(first), next(second), next(first)",
        "this iterator has been replaced",
        "build a second pipe",
    ),
    mistake(
        "a bare pipe in StatefulDataLoader",
        "from torchdata.stateful_dataloader import "
        "StatefulDataLoader\nlist(StatefulDataLoader(samples(), batch_size=None, num_workers=1))",
        "Give it pipe.as_dataset()",
    ),
    mistake(
        "StatefulDataLoader with other workers",
        """
from torchdata.stateful_dataloader import StatefulDataLoader
def loader(workers):
    return StatefulDataLoader(samples().as_dataset(), batch_size=None, num_workers=workers)

first = loader(2)
next(iter(first))
second = loader(1)
second.load_state_dict(first.state_dict())
next(iter(second))
""",
        "workers",
    ),
    mistake(
        "no checkpoint",
        "from wds_pipes import checkpoint\ncheckpoint.load('nowhere', wp.PipeLoader(samples()))",
        "nowhere does not exist",
        "make it",
    ),
    mistake(
        "a checkpoint at a URL",
        "from wds_pipes import checkpoint\ncheckpoint.save('s3://bucket/run', wp.PipeLoader(samples()))",
        "not at a URL",
        "gather()",
    ),
    mistake(
        "a damaged checkpoint",
        """
import pathlib
from wds_pipes import checkpoint
saved = checkpoint.save('saved', wp.PipeLoader(samples()), step=1)
for file in pathlib.Path(saved).iterdir():
    file.write_bytes(file.read_bytes()[:100])
checkpoint.load('saved', wp.PipeLoader(samples()))
""",
        "truncated or damaged",
        "Load an older checkpoint",
    ),
    mistake(
        "a checkpoint of other data",
        "from wds_pipes import checkpoint\ncheckpoint.save('saved', wp.PipeLoader(samples()), step=1)\n"
        "checkpoint.load('saved', wp.PipeLoader(samples(seed=1)))",
        "seed=0",
        "seed=1",
        "saved/",
    ),
]

RANKS = [
    mistake("a rank alone", "wp.PipeLoader(samples(), rank=1)", "give both rank and world_size, or neither"),
    mistake(
        "a rank that is not there",
        "wp.PipeLoader(samples(), rank=2, world_size=2)",
        "rank must be at least 0 and below world_size, not 2 of 2",
    ),
    mistake(
        "ranks without counts",
        "next(iter(wp.PipeLoader(samples(), batch_size=4, rank=0, world_size=2)))",
        "same number of batches",
        "epoch_end='exact'",
    ),
    mistake(
        "lanes that ranks do not divide",
        "wp.PipeLoader(samples(), lanes=3, rank=0, world_size=2, epoch_end='exact').state_dict()",
        "lanes=3",
        "2 ranks",
    ),
    mistake(
        "batches that ranks do not divide",
        "wp.PipeLoader(samples(samples_per_shard=20), rank=0, world_size=2).with_epoch(batches=3)",
        "batches=3 cannot be divided by 2 ranks: pass a multiple of 2",
    ),
    mistake(
        "the state of one rank",
        "pipe = "
        "samples(samples_per_shard=20)\nwp.PipeLoader(pipe).load_state_dict(wp.PipeLoader(pipe, "
        "rank=0, world_size=2).state_dict())",
        "the state of rank 0 of 2 alone",
        "merge_states(states)",
    ),
    mistake(
        "the state of one rank twice",
        "state = wp.PipeLoader(samples(samples_per_shard=20), rank=0, "
        "world_size=2).state_dict()\nwp.merge_states([state, state])",
        "rank 1 is missing and rank 0 is there more than once. Collect the state of each rank once",
    ),
]

STORES = [
    *in_workers(
        "no S3 package",
        "import sys\nsys.modules['s3fs'] = None\npipe = samples(['s3://bucket/a.tar'])" + RUN,
        "shard s3://bucket/a.tar",
        "pip install 'wds_pipes[s3]'",
    ),
    *in_workers(
        "no S3 credentials",
        (
            "options = {'endpoint_url': WEB}\npipe = "
            "wp.ShardList(['s3://forbidden/a.tar']).open_shards(storage_options=options).load_tar().group_by_key()"
        )
        + RUN,
        "shard s3://forbidden/a.tar may not be read: check your credentials",
    ),
    *in_workers(
        "a URL that is missing", "pipe = samples([f'{WEB}/a.tar'])" + RUN, "/a.tar does not exist: check its name"
    ),
    *in_workers(
        "a URL that is forbidden",
        "pipe = samples([f'{WEB}/forbidden/a.tar'])" + RUN,
        "/forbidden/a.tar may not be read",
        "headers",
    ),
    mistake(
        "an unknown protocol",
        "list(samples(['minio://bucket/a.tar']))",
        "shard minio://bucket/a.tar cannot be opened",
        "Protocol not known: minio. Write a local path",
    ),
    mistake(
        "a command", "list(samples(['pipe:cat data/shard-000000.tar']))", "would run a shell command", "allow_pipe=True"
    ),
    mistake(
        "a pattern at S3, no package",
        "import sys\nsys.modules['s3fs'] = None\nsamples('s3://bucket/*.tar')",
        "pip install 'wds_pipes[s3]'",
    ),
    mistake(
        "a pattern at S3, no credentials",
        "wp.ShardList('s3://forbidden/*.tar', storage_options={'endpoint_url': WEB})",
        "may not be listed",
        "check your credentials",
    ),
    mistake("a pattern over HTTP", "samples(f'{WEB}/*.tar')", "no shard matches 'http", "does not exist or is empty"),
]

LIGHTNING = """
import logging, os, warnings
warnings.simplefilter('ignore')
logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
import torch, lightning.pytorch as pl
from wds_pipes.lightning import WdsDataModule
class Model(pl.LightningModule):
    def training_step(self, batch):
        return self.weight.sum()
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def fit(data, **options):
    quiet = {'logger': False, 'enable_progress_bar': False, 'enable_model_summary': False, 'enable_checkpointing': False}
    pl.Trainer(accelerator='cpu', devices=1, max_epochs=1, **quiet).fit(Model(), data, **options)
"""  # noqa: E501

HOSTS = [
    mistake("WdsDataModule without batch_size", LIGHTNING + "WdsDataModule('data/*.tar')", "batch_size must say"),
    mistake(
        "WdsDataModule without train",
        LIGHTNING + "fit(WdsDataModule(val=samples()))",
        "no train= to train on",
    ),
    mistake(
        "WdsDataModule of no shards",
        LIGHTNING + "fit(WdsDataModule('date/*.tar', batch_size=4))",
        "no shard matches 'date/*.tar'",
    ),
    *[
        mistake(
            name,
            LIGHTNING + FUNCTION + f"fit(WdsDataModule(pipe, batch_size=4, num_workers={workers}))",
            *OF_FUNCTION,
        )
        for name, workers in (
            ("a function that raises, Lightning, 0 workers", 0),
            ("a function that raises, Lightning, 2 workers", 2),
        )
    ],
    mistake(
        "resumable() of DataLoader",
        LIGHTNING + "WdsDataModule().resumable(torch.utils.data.DataLoader([1]))",
        "resumable() takes a PipeLoader, not DataLoader",
    ),
]

COMMANDS = [
    mistake("an unknown command", "COMMAND idx data", "No such command 'idx'"),
    mistake("index without an output", "COMMAND index data", "Missing option '-o' / '--output'"),
    mistake("index of no shards", "COMMAND index date/*.tar -o index.json", "no shard matches 'date/*.tar'"),
    mistake("index of a damaged shard", "COMMAND index cut.tar -o index.json", "shard cut.tar, byte"),
    mistake(
        "bench with wrong options", "COMMAND bench data --storage-options anon", "--storage-options is not JSON like"
    ),
    mistake("bench of a missing shard", "COMMAND bench gone.tar --seconds 0.1", "shard gone.tar does not exist"),
]

NAMES = [
    mistake("a step that is misspelt", "samples().shufle_buffer(1000)", "Did you mean shuffle_buffer?"),
    mistake("webdataset's decode", "samples().decode('rgb8')", "'decode'. Here it is .decode_by_ext("),
    mistake("webdataset's batched", "samples().batched(4)", "'batched'. Here it is .batch_samples(size)."),
    mistake("webdataset's select", "samples().select(bool)", "'select'. Here it is .filter_samples(fn)."),
    mistake("webdataset's shuffle", "list(samples().shuffle(1000))", "shuffle_buffer("),
    mistake("a name that is misspelt", "wp.Shardlist('data')", "Did you mean ShardList?"),
    *in_workers(
        "no sample has the fields",
        "pipe = wp.ShardList('data').open_shards().load_tar().group_by_key(fields=['text'])" + RUN,
        "they have 'cls', 'json', 'txt'",
    ),
    *in_workers(
        "a function that returns nothing",
        "def drop(sample):\n    sample.pop('txt')\n\npipe = samples().decode_by_ext().map_samples(drop)" + RUN,
        "returned None for sample '00000000' of shard",
        "let it return the sample",
    ),
    mistake(
        "batches of batches",
        "next(iter(wp.PipeLoader(samples().batch_samples(4), batch_size=4)))",
        "leave one of the two out",
    ),
    mistake(
        "data that were moved",
        "import shutil\nstate = samples().state_dict()\nshutil.move('data', "
        "'moved')\nsamples('moved/*.tar').load_state_dict(state)",
        "continues with the same shards at another place",
    ),
    mistake(
        "data that were renamed",
        "import os\nstate = samples().state_dict()\nos.rename('data/shard-000000.tar', "
        "'data/shard-9.tar')\nsamples().load_state_dict(state)",
        "its list of shards has other URLs",
        "pass moved=True",
    ),
    mistake(
        "a bare pipe on two ranks",
        "import os\nos.environ |= {'RANK': '0', 'WORLD_SIZE': '2'}\nnext(iter(samples()))",
        "to every rank: use wds_pipes.PipeLoader",
    ),
]

MISTAKES = [*ARGUMENTS, *ORDER, *DATA, *FUNCTIONS, *CHECKPOINTS, *RANKS, *STORES, *HOSTS, *COMMANDS, *NAMES]


def make_data():
    """The shards that the scripts read, in the working directory."""
    import io
    import tarfile

    import numpy as np

    import wds_pipes as wp
    from wds_pipes.testing import make_shards

    def write(path, *members):
        with tarfile.open(path, "w") as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

    first = Path(make_shards("data", shards=4, samples=20, fields=("txt", "cls", "json"))[0]).read_bytes()
    Path("cut.tar").write_bytes(first[:3333])
    Path("wrong.tar").write_bytes(first[:2058] + b"\xff" * 50 + first[2108:])
    Path("page.tar").write_text("<!DOCTYPE html><html><body>404 Not Found</body></html>\n" * 30)
    Path("empty.tar").touch()
    with wp.TarWriter("uneven.tar") as writer:
        for number in range(4):
            writer.write({"__key__": f"{number}", "npy": np.zeros((3, 4 + number % 2), np.float32)})
    write("json.tar", ("a.json", b"{not json"))
    write("pieces.tar", ("a.txt", b"1"), ("b.txt", b"1"), ("a.cls", b"1"), ("b.cls", b"1"))
    write("pickle.tar", ("a.pkl", b"\x80\x04N."))


class Web(http.server.BaseHTTPRequestHandler):
    """A server that has nothing, and says of some of it that it is forbidden."""

    def do_GET(self):
        self.send_error(403 if "forbidden" in self.path else 404)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


def script(chosen, path, web):
    """Run a script as the main module, in a new process; its output goes to a file beside it."""
    code = chosen.code
    if code.startswith("COMMAND"):
        code = f"import sys\nfrom wds_pipes.cli import main\nsys.argv = ['wds-pipes', *{code.split()[1:]!r}]\nmain()\n"
    else:
        code = f"WEB = {web!r}\n{HEAD}{code}\n" if "WEB" in code else f"{HEAD}{code}\n"
    path.write_text(code)
    os.chdir(path.parent)
    with open(path.with_suffix(".out"), "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    sys.path[0] = str(path.parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(path)
    try:
        exec(compile(code, str(path), "exec"), vars(main))
    except SystemExit:
        pass
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def last_lines(text):
    """What a reader sees last: the message with its notes, and no frame."""
    lines = [line for line in text.splitlines() if line.strip()]
    start = max((place for place, line in enumerate(lines) if line.startswith("    ")), default=-1)
    return " / ".join(lines[start + 1 :][:3] if start + 1 < len(lines) else lines[-1:])


def run(chosen, directory, web):
    """Run mistakes, a few at a time; returns what each has printed."""
    context, waiting, running, seen = multiprocessing.get_context("fork"), list(enumerate(chosen)), {}, {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, one = waiting.pop(0)
            home = directory / f"{number:03d}"
            shutil.copytree(directory / "home", home)
            process = context.Process(target=script, args=(one, home / "train.py", web))
            process.start()
            running[process.sentinel] = number, process, time.monotonic() + SECONDS
        connection.wait(list(running), timeout=1)
        for sentinel, (number, process, end) in list(running.items()):
            if process.is_alive() and time.monotonic() < end:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            del running[sentinel]
            seen[number] = (directory / f"{number:03d}" / "train.out").read_text()
    return [seen[number] for number in range(len(chosen))]


def main(words):
    chosen = [one for one in MISTAKES if words in one.name]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    web = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    web.start()
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "COLUMNS": "100"}
    import wds_pipes  # noqa: F401 - once, and not in each process

    if any("lightning" in one.code for one in chosen):
        import lightning.pytorch  # noqa: F401
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mistakes-") as directory:
        (Path(directory) / "home").mkdir()
        os.chdir(Path(directory) / "home")
        make_data()
        os.chdir(here)
        seen = run(chosen, Path(directory), f"http://127.0.0.1:{server.server_address[1]}")
    web.kill()
    bad = 0
    print("| mistake | what it prints last | |")
    print("|---|---|---|")
    for one, printed in zip(chosen, seen, strict=True):
        wrong = [text for text in one.expected if text not in printed]
        bad += bool(wrong)
        last = last_lines(printed).replace("|", "\\|")
        print(f"| {one.name} | {last:.400} | {f'it does not say {wrong}' if wrong else 'ok'} |")
        if words:
            print(f"\n{printed}\n")
    print(f"\n{len(chosen)} mistakes, {bad} of them not as they should be")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
