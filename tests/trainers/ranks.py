"""Recipes on two ranks, started by torchrun's agent.

    python ranks.py DIRECTORY NAME...

First own_loop, killed by SIGKILL at its fourth step; then the agent starts both ranks again,
own_loop resumes, and each recipe by name is run without a break, and stopped and resumed twice. The
ranks are forks of the agent, which imports once for all of them what takes seconds.
"""

import importlib
import json
import os
import signal
import sys
import warnings
from glob import glob
from importlib.util import find_spec

import recipes
import torch.distributed as dist
from forked_torchrun import launch

IMPORTED = {"torch": "torch._dynamo", "accelerate": "accelerate", "transformers": "transformers.trainer"}

# these count the steps of all runs, the others those of one
TOTAL = ("own_loop", "distributed_checkpoint", "huggingface")
STOPS = {True: (4, 9, None), False: (4, 5, None)}


def kill_at(number):
    """Let the step of this number be the last thing that the process does."""
    step, count = recipes.step, 0

    def step_or_die(*arguments):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments)

    recipes.step = step_or_die


def main(directory, *names):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, attempt, urls = (
        int(os.environ["RANK"]),
        int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        sorted(glob(f"{directory}/shards/*.tar")),
    )
    # By a file: after a restart, gloo may still find the addresses of the processes that were.
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/group-{attempt}", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    if attempt == 0:
        kill_at(4 if rank == 0 else 100)
    found = {"killed": [[], recipes.own_loop(urls, f"{directory}/killed", None)]}
    for name in names:
        recipe = getattr(recipes, name)
        whole = recipe(urls, f"{directory}/{name}-whole", None)
        found[name] = [
            whole,
            [keys for stop in STOPS[name in TOTAL] for keys in recipe(urls, f"{directory}/{name}", stop)],
        ]
    with open(f"{directory}/rank-{rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def start(*arguments):
    for package, module in IMPORTED.items():
        if find_spec(package):
            importlib.import_module(module)
    launch(main, *arguments, ranks=2, restarts=1)


if __name__ == "__main__":
    start(*sys.argv[1:])
