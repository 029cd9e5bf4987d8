"""The recipe for Ray Train on a cluster of this machine, with a worker killed by SIGKILL twice:
python on_ray.py DIRECTORY.
"""

import json
import os
import signal
import sys
from functools import partial
from glob import glob

import ray
import recipes
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

KILLED = (4, 9)  # after these steps, which are trained on again


def note(directory, rank, steps, keys):
    """Write down what was trained on; then rank 1 is killed, once at each of the steps."""
    with open(f"{directory}/keys-{rank}.jsonl", "a") as file:
        print(json.dumps([steps, keys]), file=file, flush=True)
    mark = f"{directory}/killed-{steps}"
    if rank == 1 and steps in KILLED and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def main(directory):
    ray.init(num_cpus=2, include_dashboard=False)
    urls = sorted(glob(f"{directory}/shards/*.tar"))
    TorchTrainer(
        recipes.ray_train_worker,
        train_loop_config={"urls": urls, "note": partial(note, directory)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=f"{directory}/ray", name="run", failure_config=FailureConfig(max_failures=2)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
