"""Training on two ranks with the real libraries: see ``ranks.py``."""

import os
import sys
from pathlib import Path

import pytest
import warm

from wds_pipes.testing import make_shards


@pytest.mark.slow
def test_two_ranks_are_killed_and_resumed(tmp_path):
    """Started by torchrun's agent, which starts both again after one is killed by SIGKILL."""
    pytest.importorskip("accelerate")
    make_shards(tmp_path / "shards", shards=6, samples=8, fields=("npy", "txt"))
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = warm.run(Path(__file__).with_name("ranks.py"), tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
