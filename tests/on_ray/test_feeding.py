"""Decoders on a Ray cluster, as the tutorial 15_ray has them: killed at any moment, the batches are
those of one process.
"""

import random
from collections import deque

import jupytext
import pytest
import ray
from documents import ROOT
from ray.exceptions import ObjectLostError, RayActorError

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


def test_killed_decoders_change_nothing(tmp_path):
    cells = [cell.source for cell in jupytext.read(ROOT / "tutorials/15_ray.py").cells if cell.cell_type == "code"]
    names = {"HERE": str(tmp_path), "wp": wp, "ray": ray, "deque": deque, "__name__": "feeding"}
    names |= {"ObjectLostError": ObjectLostError, "RayActorError": RayActorError}
    for cell in cells:
        if "class Decoder" in cell or "class Feed" in cell:
            exec(cell.replace("num_cpus=1", "num_cpus=0.5"), names)
    make_shards(tmp_path / "shards", shards=6, samples=30)
    index_shards(str(tmp_path / "shards/*.tar"), tmp_path / "shards/index.json")
    loader = names["make_loader"]()
    epochs = [[list(keys) for keys, _ in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [18, 18]

    decoders, numbers, checkpoint = [names["Decoder"].remote() for _ in range(3)], random.Random(0), {}
    for epoch in epochs:
        seen = []
        while len(seen) < len(epoch):
            feed = names["Feed"](decoders, ahead=numbers.randrange(1, 4), **checkpoint)
            until = numbers.randrange(len(seen) + 1, len(epoch) + 1)
            for keys, _ in feed:
                seen.append(list(keys))
                if numbers.random() < 0.2:
                    ray.kill(decoders[numbers.randrange(3)], no_restart=False)
                if len(seen) == until < len(epoch):
                    break
            checkpoint = feed.state_dict()
        assert seen == epoch
    for decoder in decoders:
        ray.kill(decoder)
