"""A notebook's cell is interrupted and runs again."""

import pytest
from jupyter_client.manager import start_new_kernel

from wds_pipes.testing import make_shards

SETUP = """
import os, time
import wds_pipes as wp

def slow(sample):
    time.sleep(0.05)
    return sample["__key__"]

pipe = wp.ShardList({urls!r}).open_shards().load_tar().group_by_key().map_samples(slow)
loader = wp.PipeLoader(pipe, num_workers=2, multiprocessing_context="fork")
seen = []
"""
CELL = "for key in loader:\n    seen.append(key)\n    print('.', flush=True)"
SAME = "loader.load_state_dict(loader.state_dict())\n" + CELL


def run(client, manager, code, interrupt_after=None):
    """The lines that a cell prints, and the name of its error or None. The cell is interrupted
    after ``interrupt_after`` lines.
    """
    message, lines, error = client.execute(code), [], None
    while True:
        got = client.get_iopub_msg(timeout=120)
        if got["parent_header"].get("msg_id") != message:
            continue
        content = got["content"]
        if got["msg_type"] == "stream":
            assert content["name"] == "stdout", content["text"]
            lines += content["text"].split()
            if interrupt_after is not None and len(lines) >= interrupt_after:
                interrupt_after = None
                manager.interrupt_kernel()
        elif got["msg_type"] == "error":
            error = content["ename"]
        elif got["msg_type"] == "status" and content["execution_state"] == "idle":
            return lines, error


@pytest.mark.slow
def test_an_interrupted_cell_runs_again(tmp_path):
    """It continues with the next epoch, or with the loader's own state at the next sample."""
    urls = make_shards(tmp_path, shards=2, samples=20)
    manager, client = start_new_kernel()
    try:
        assert run(client, manager, SETUP.format(urls=urls)) == ([], None)
        assert run(client, manager, CELL, interrupt_after=4)[1] == "KeyboardInterrupt"
        assert run(client, manager, SAME, interrupt_after=4)[1] == "KeyboardInterrupt"
        assert run(client, manager, SAME)[1] is None
        assert sorted(run(client, manager, "print(*seen)")[0]) == [f"{number:08d}" for number in range(40)]
        lines, error = run(client, manager, CELL)
        assert (error, len(lines)) == (None, 40)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
