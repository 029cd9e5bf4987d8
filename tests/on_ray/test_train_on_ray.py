"""The recipe for Ray Train of the tutorial "Your trainer": killed, and resumed twice."""

import itertools
import json
import os
import signal
import time

import pytest
from your_trainer import shown_under

import wds_pipes as wp
from wds_pipes.testing import make_shards

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


def test_two_workers_killed_twice(tmp_path, monkeypatch):
    """One of both by SIGKILL, two steps and one step after a checkpoint; Ray starts both again."""
    pytest.importorskip("tensorboardX", reason="Ray Train needs what ray[train] installs")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # how often it takes note of reports
    urls = make_shards(tmp_path / "shards", shards=12, samples=4)

    def make_pipe():
        samples = wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key()
        return samples.shuffle_buffer(5).select_fields("__key__")

    def runs_of(rank):
        lines = map(json.loads, (tmp_path / f"rank-{rank}").read_text().splitlines())
        return [[keys for _, keys in run] for _, run in itertools.groupby(lines, lambda line: line[0])]

    def checkpoints():
        known = json.loads((tmp_path / "runs/run/checkpoint_manager_snapshot.json").read_text())
        return len(known["checkpoint_results"])

    def train(batch):
        rank = wp.rank().number
        with open(tmp_path / f"rank-{rank}", "a") as file:
            file.write(json.dumps([os.getpid(), batch["__key__"]]) + "\n")
        runs = runs_of(rank)
        if (rank, len(runs), len(runs[-1])) in ((1, 1, 5), (0, 2, 4)):
            while checkpoints() < len(runs):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    result = TorchTrainer(
        shown_under("Ray Train", {"make_pipe": make_pipe, "train": train})["train_func"],
        train_loop_config={"batch_size": 2, "every": 3, "steps": 10},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig("run", str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=2)),
    ).fit()
    assert result.metrics["step"] == 9
    for rank in range(2):
        loader = wp.PipeLoader(make_pipe(), batch_size=2, epoch_end="loop", rank=rank, world_size=2)
        whole = [batch["__key__"] for batch in itertools.islice(loader, 10)]
        first, second, third = runs_of(rank)
        assert [first, second, third] == [whole[: len(first)], whole[3 : 3 + len(second)], whole[6:]]
