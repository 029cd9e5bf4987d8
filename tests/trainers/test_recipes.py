"""The recipes for other trainers, with the real libraries: stopped and resumed twice, they train on
the batches of an uninterrupted run.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
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
        ("stateful_dataloader", "torchdata"),
        ("graph_of_nodes", "torchdata"),
        ("jax_step", "jax"),
    ],
)
def test_a_second_resume_on_one_rank(name, package, urls, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    recipe, parts = getattr(recipes, name), []
    for directory in ("whole", "parts"):
        (tmp_path / directory).mkdir()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def run(*arguments):
            # JAX would warn of every later fork of this process.
            return process.submit(recipe, *arguments).result() if package == "jax" else recipe(*arguments)

        whole = run(urls, str(tmp_path / "whole"), None)
        check_epochs(whole)
        for stop, done in zip(STOPS[name in TOTAL], (4, 9, None), strict=True):
            parts += run(urls, str(tmp_path / "parts"), stop)
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


@pytest.mark.slow
def test_ray_train(urls, tmp_path):
    """A worker is killed by SIGKILL twice. Ray starts both again, and each step trains on the batch
    that it would have had.
    """
    if not find_spec("ray"):
        pytest.skip("needs Ray, which is half a gigabyte: pip install 'ray[train]'")
    here = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, *sys.path]),
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    command = [sys.executable, f"{here}/on_ray.py", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"keys-{rank}.jsonl").read_text().splitlines()]
        loader = recipes.make_loader(urls, rank=rank, world_size=2)
        whole = dict(enumerate((batch["__key__"] for _ in range(2) for batch in loader), 1))
        assert len(lines) > len(whole) == 12
        assert dict(lines) == whole
        assert all(keys == whole[step] for step, keys in lines)
