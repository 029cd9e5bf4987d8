"""epoch_end="loop" on real ranks that are killed: a short run of tests/proofs/loop.py."""

import random

import loops
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4])
def test_ranks_that_are_killed_resume_on_another_number(seed, tmp_path):
    """Equal steps of full batches under DistributedDataParallel, and no sample lost or repeated."""
    urls = loops.make_data(tmp_path)
    ledger = loops.play(tmp_path, urls, random.Random(seed), runs=2, worlds=(1, 2))
    assert (ledger.kills, ledger.changes) == (1, 1)
    assert ledger.epochs > 0
    assert (ledger.lost, ledger.repeated) == (0, 0)
