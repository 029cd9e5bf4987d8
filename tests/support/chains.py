"""The pipelines of the resume tests. Every registered stage takes part except mix and join,
which have several sources and their own tests.
"""

import os
import tempfile
from typing import Any

from pipelines import draw, wanted
from torchdata.nodes import Loader

import wds_pipes as wp
from wds_pipes import stages
from wds_pipes.tar import index_shards


class Torch:
    """A chain that ends in a pipe of torch's, with the functions of the package as methods."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __iter__(self) -> Any:
        return iter(self.pipe)

    def state_dict(self) -> Any:
        return wp.state_dict(self.pipe)

    def load_state_dict(self, state: Any) -> None:
        wp.load_state_dict(self.pipe, state)


class NodeLoader(Loader[Any]):
    """torchdata's, without its count of items: a resume does not use it, and adds one too many to
    it, so that the same position would be another cut after each resume.
    """

    __module__ = Loader.__module__  # check_resume knows how torchdata's loaders end an epoch

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_yielded": 0}


def backwards(value: Any) -> Any:
    """The last characters, at most three, in the other order."""
    return value[: -1 - len(value) % 4 : -1]


def pairs_of(items: Any) -> Any:
    """Each sample with the one before it, for samples whose neighbours differ in a digit."""
    before = next(items)
    for item in items:
        yield {**item, "before": before["__key__"]}
        items.put_back(item)
        return


def digits(sample: Any) -> int:
    """A length that differs between neighbours: 2 to 7."""
    return 2 + int(sample["__key__"]) * 5 % 6


def as_text(value: Any) -> bytes:
    """An encoder of what other steps make of samples."""
    return repr(value).encode()


# The arguments that a stage is tried with. Each stage has an entry, also one without arguments:
# choose them so that the stage does something on 10 samples with distinct keys, in shards of about
# 3. (A window of 1000, or a filter that lets all pass, tests nothing.)
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    # local shards are not cached
    "CacheShards": ((os.path.join(tempfile.gettempdir(), "never-made"),), {"max_bytes": "1GB"}),
    "ShuffleBuffer": ((3,), {}),
    "MapSamples": ((draw,), {"threads": 2}),
    "FilterSamples": ((wanted,), {}),
    "InterleaveShards": ((2,), {}),
    "BatchSamples": ((2,), {"collate": "list"}),
    "BucketSamples": ((digits, 2), {"boundaries": [3, 5], "window": 3}),
    "PackSamples": ((digits, 9), {"window": 3}),
    "MapFields": (({"text;txt": backwards},), {}),
    "RenameFields": (({"text": "text;txt"},), {}),
    "SelectFields": (("text;txt", "cls"), {}),
    "Then": ((pairs_of,), {}),
    "ToTuple": (("text;txt", "cls", "__key__"), {}),
    "Repeat": ((2,), {}),
    "SliceSamples": ((1, 9, 2), {}),
    "TakeSamples": ((7,), {}),
    "DecodeByExt": ((), {"threads": 2}),
    "UnbatchSamples": ((), {}),
    "WriteShards": (
        (os.path.join(tempfile.mkdtemp(), "{lane}-%d.tar"),),
        {"max_samples": 2, "overwrite": True, "codecs": {"before;draw;txt;text": as_text}},
    ),
    # each character of an ASCII text is an integer of MessagePack; MapFields leaves three at most
    "ExplodeRecords": (("msgpack",), {"field": "text;txt"}),
    "SampleList": ((), {"block_samples": 2}),
    "FetchSamples": ((), {"connections": 3}),
}
BASE = ("OpenShards", "LoadTar", "GroupByKey")
BY_OFFSETS = ("SampleList", "FetchSamples")  # instead of ShardList and BASE
FIRST = ("CacheShards",)
NEEDS = {
    "UnbatchSamples": ("BatchSamples",),
    "ExplodeRecords": ("MapFields",),
}  # the stages that must be before a stage
AFTER = tuple(name for name in stages.__all__ if name not in ("ShardList", "Mix", "Join", *FIRST, *BASE, *BY_OFFSETS))


def chains() -> dict[str, tuple[str, ...]]:
    """Names of stages by the name of the chain: each prefix of the base, each stage after it, and
    long ones.
    """
    found = {"ShardList": (), "OpenLoad": BASE[:2], "Group": BASE}
    found |= {name: (*BASE, *NEEDS.get(name, ()), name) for name in AFTER}
    found |= {name: (name, *BASE, "ShuffleBuffer") for name in FIRST}
    found["ShuffleBatch"] = (*BASE, "ShuffleBuffer", "BatchSamples")
    found["BatchShuffle"] = (*BASE, "BatchSamples", "ShuffleBuffer")
    found["UnbatchShuffle"] = (*BASE, "ToTuple", "BatchSamples", "UnbatchSamples", "ShuffleBuffer", "BatchSamples")
    found["TwoShuffles"] = (*BASE, "ShuffleBuffer", "FilterSamples", "ShuffleBuffer")
    found["TakeShuffleSlice"] = (*BASE, "TakeSamples", "ShuffleBuffer", "SliceSamples")
    found["InterleaveTakeBatchSlice"] = (*BASE, "InterleaveShards", "TakeSamples", "BatchSamples", "SliceSamples")
    found["InterleaveShuffleBatch"] = (*BASE, "InterleaveShards", "ShuffleBuffer", "MapSamples", "BatchSamples")
    found["ShuffleInterleave"] = (*BASE, "ShuffleBuffer", "FilterSamples", "InterleaveShards", "BatchSamples")
    found |= {"SampleList": BY_OFFSETS[:1], "Fetch": BY_OFFSETS, "FetchShuffle": (*BY_OFFSETS, "ShuffleBuffer")}
    found["FetchAll"] = (*BY_OFFSETS, "DecodeByExt", "MapSamples", "FilterSamples", "ToTuple", "BatchSamples")
    found["All"] = (
        *BASE,
        "ShuffleBuffer",
        "DecodeByExt",
        "MapSamples",
        "FilterSamples",
        "ToTuple",
        "BatchSamples",
        "ShuffleBuffer",
    )
    return found


def build(module: Any, names: tuple[str, ...], urls: list[str], **options: Any) -> Any:
    """A chain of the classes of ``module``: ``wds_pipes.stages``, ``.datapipes`` or ``.nodes``."""
    options = {"shuffle": True, "seed": 5, **options}
    if names[:1] == BY_OFFSETS[:1]:
        if not all(map(os.path.exists, (f"{url}.idx" for url in urls))):
            index_shards(urls, offsets=True)
        names, options = names[1:], options | ARGUMENTS["SampleList"][1]
        chain = module.SampleList(urls, **options)
    else:
        chain = module.ShardList(urls, **options)
    for name in names:
        arguments, keywords = ARGUMENTS.get(name, ((), {}))
        chain = getattr(module, name)(chain, *arguments, **keywords)
    return chain
