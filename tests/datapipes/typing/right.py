"""A user's file without mistakes. After each ``reveal_type``: the type it must have."""

from collections.abc import Iterator
from typing import Any, reveal_type

import numpy as np
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes import checkpoint, nodes
from wds_pipes.display import show
from wds_pipes.tar import TarMember, TarReader


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "flip": rng.random() < 0.5}


def build(urls: str | list[str]) -> wp.WdsPipe:
    shards = wp.ShardList(urls, shuffle=True, seed=7)
    members = shards.open_shards(storage_options={"anon": True}).load_tar(on_truncated="warn")
    for member in members:
        reveal_type(member.offset)  # int
        break
    samples = members.group_by_key(fields=["jpg", "cls"]).shuffle_buffer(1000)
    reveal_type(samples)  # WdsPipe[dict[str, Any]]
    kept = samples.filter_samples(lambda sample: sample["__key__"] != "bad").decode_by_ext("torchrgb", {"seg.png": len})
    reveal_type(kept.to_tuple("jpg;png", "cls"))  # WdsPipe[tuple[Any, ...]]
    reveal_type(kept.map_samples(lambda sample: (sample["jpg"], sample["cls"])))  # WdsPipe[Any]
    reveal_type(repr(kept))  # str
    return kept.map_samples(augment).to_tuple("jpg;png", "cls").batch_samples(64, collate="numpy")


def members_of(pipe: wp.WdsPipe[TarMember]) -> Iterator[str]:
    return (member.name for member in pipe)


def train(pipe: wp.WdsPipe) -> None:
    both = wp.mix({"a": pipe, "b": pipe.batch(4).map(len)}, weights={"a": 9, "b": 0.5}, exhausted="repeat")
    reveal_type(both.interleave_shards(4).state_dict())  # dict[str, Any]
    reveal_type(wp.join({"a": pipe, "b": pipe}, on_missing="skip", prefix=True))  # Join
    number, of = wp.rank()
    reveal_type(number + of)  # int
    with wp.ShardWriter("out-%06d.tar", max_samples=1000) as writer:
        writer.write({"__key__": "a", "txt": "a cat"})
    loader = wp.PipeLoader(both, batch_size=8, num_workers=2, epoch_end="pad")
    for _ in loader:
        checkpoint.save("checkpoints", loader)
    show(next(iter(TarReader(open("a.tar", "rb")))))
    # torch's own pipes have the methods at run time; checkers see Any
    from_torch = IterableWrapper(["a.tar"]).open_shards().load_tar()
    wp.load_state_dict(from_torch, wp.state_dict(from_torch))
    graph: nodes.WdsNode = both.as_node()
    reveal_type(graph.get_state())  # dict[str, Any]
