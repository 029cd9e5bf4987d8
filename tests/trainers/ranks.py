"""Trains on two ranks, started by torchrun's agent.

    python ranks.py DIRECTORY

First a loop of one's own, killed by SIGKILL before its fifth step; then the agent starts both ranks
again, and the loop resumes. Then the functions of the tutorial "Your trainer" for
torch.distributed.checkpoint and Accelerate are stopped and resumed twice. The ranks are forks of
the agent, which imports once for all of them what takes seconds.
"""

import os
import signal
import sys
import warnings

import accelerate
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import send_to_device
from forked_torchrun import launch
from your_trainer import defined

import wds_pipes as wp
from wds_pipes import checkpoint

STEPS = 12


def own_loop(loader, dies):
    """With DistributedDataParallel. Every rank writes its own small file; the model is saved by one
    of them.
    """
    model = torch.nn.Linear(3, 1)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    os.makedirs("data", exist_ok=True)
    steps, given = checkpoint.load("data", loader) or 0, []
    if steps:
        model.load_state_dict(torch.load(f"model-{steps}.pt", weights_only=True))
    for batch in loader:
        if steps == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        given.append(batch["__key__"])
        ddp(batch["npy"].float()).mean().backward()
        steps += 1
        if loader.rank.number == 0:
            torch.save(model.state_dict(), f"model-{steps}.pt")
        dist.barrier()  # the model first: a checkpoint of the data is never without it
        checkpoint.save("data", loader, step=steps)
        if steps == STEPS:
            break
    return given


def main(directory):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(directory)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # By a file: after a restart, gloo may still find the addresses of the processes that were.
    place = f"file://{directory}/group-{attempt}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    wanted = ("make_loader", "is_kept", "first_keys", "train", "Model", "train_with_accelerate")
    known = {"os": os, "torch": torch, "dist": dist, "dcp": dcp, "wp": wp, "checkpoint": checkpoint}
    known |= {"Accelerator": accelerate.Accelerator, "send_to_device": send_to_device}
    tutorial = defined(*wanted, **known)
    whole = tutorial.first_keys(20)
    ranks = [None, None]
    dist.all_gather_object(ranks, whole[:5])
    assert len({key for batches in ranks for batch in batches for key in batch}) == 40
    resumed = own_loop(tutorial.make_loader(), 4 if attempt == rank == 0 else None)
    assert len(resumed) in (8, 9)  # a checkpoint does not count if the other rank was killed before it saved
    assert resumed == whole[STEPS - len(resumed) : STEPS]
    os.makedirs("dcp", exist_ok=True)
    for name, run, every in (("dcp", tutorial.train, 3), ("accelerate", tutorial.train_with_accelerate, 4)):
        for stop, begin in ((every + 2, 0), (2 * every + 1, every), (20, 2 * every)):
            dist.barrier()
            assert run(name, stop) == whole[begin:stop], name
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch(main, *sys.argv[1:], ranks=2, restarts=1)
