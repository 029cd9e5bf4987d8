"""The recipes for other trainers, with the real libraries: stopped and resumed twice, they train on
the batches of an uninterrupted run.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import recipes
import warm
from pipelines import flat
from ranks import STOPS, TOTAL

from wds_pipes.testing import make_shards

KEYS = [f"{number:08d}" for number in range(36)]

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:torch.distributed is disabled", "ignore:.*pin_memory.*:UserWarning"
    )
]


@pytest.fixture
def urls(tmp_path):
    return make_shards(tmp_path / "shards", shards=6, samples=6)


def check_epochs(whole):
    """Two epochs, each with all keys, in different orders."""
    keys = flat(whole)
    assert sorted(keys[:36]) == sorted(keys[36:]) == KEYS
    assert keys[:36] != keys[36:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("own_loop", "torch"),
        ("distributed_checkpoint", "torch"),
        ("accelerate", "accelerate"),
        ("huggingface", "transformers"),
    ],
)
def test_a_second_resume_on_one_rank(name, package, urls, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    recipe, parts = getattr(recipes, name), []
    for directory in ("whole", "parts"):
        (tmp_path / directory).mkdir()
    whole = recipe(urls, str(tmp_path / "whole"), None)
    check_epochs(whole)
    for stop, done in zip(STOPS[name in TOTAL], (4, 9, None), strict=True):
        parts += recipe(urls, str(tmp_path / "parts"), stop)
        assert parts == whole[:done]


@pytest.mark.slow
def test_on_two_ranks(urls, tmp_path):
    """Started by torchrun's agent, which starts both again after one is killed by SIGKILL. Then
    each recipe is resumed twice.
    """
    names = ["own_loop", "distributed_checkpoint"]
    names += [
        name for name, package in (("accelerate", "accelerate"), ("huggingface", "transformers")) if find_spec(package)
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}-whole").mkdir()
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = warm.run(Path(__file__).with_name("ranks.py"), tmp_path, *names, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for name in names:
        for rank in ranks:
            whole, parts = rank[name]
            assert parts == whole, name
            assert len(whole) == 12
        assert sorted(flat(batch for rank in ranks for batch in rank[name][0][:6])) == KEYS
    for rank in ranks:
        whole, resumed = rank["own_loop"][0], rank["killed"][1]
        assert len(resumed) in (9, 10)  # a checkpoint does not count if the other rank was killed before it saved
        assert resumed == whole[-len(resumed) :]
