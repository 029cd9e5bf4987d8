"""Training on ranks that torchrun starts, for kill and preempt: what a rank runs, and what its logs
say.
"""

import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

from amount import parser

SHARDS, SAMPLES, SIZE = 12, 100, 4
TOTAL = SHARDS * SAMPLES
STEP_SECONDS = 0.004


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


def train(directory, urls, *, saves_each_step):
    """Resume from the newest checkpoint, and train to the end of the epoch, or to SIGTERM.

    Checkpoints are saved after each step, or at SIGTERM alone. Shards with indexes are read as a
    SampleList.
    """
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())

    import torch
    import torch.distributed as dist

    import wds_pipes as wp
    from wds_pipes import checkpoint

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    dist.init_process_group("gloo")
    if os.path.exists(f"{urls[0]}.idx"):
        pipe = wp.SampleList(urls, shuffle=True, seed=3).fetch_samples()
    else:
        pipe = wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key().shuffle_buffer(50)
    loader = wp.PipeLoader(pipe, batch_size=SIZE, collate=keys_of, num_workers=2, epoch_end="exact")
    saved = f"{directory}/checkpoints"
    os.makedirs(saved, exist_ok=True)
    step = checkpoint.load(saved, loader) or 0
    if dist.get_rank() == 0:
        forget_after(directory, step)
    dist.barrier()
    with open(f"{directory}/log-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}", "a") as log:
        batches, going, stop = iter(loader), loader.epoch == 0, False
        while going and not stop:
            batch, step = next(batches, ()), step + 1
            going, stop = together = torch.tensor([float(bool(batch)), float(told.is_set())])
            dist.all_reduce(together)
            log.writelines(f"{step} {key}\n" for key in batch)
            log.flush()
            if stop or saves_each_step:
                checkpoint.save(saved, loader, step=step)
            time.sleep(STEP_SECONDS)
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


def forget_after(directory, step):
    """Remove from the logs what was trained on after a step; a killed rank may have cut a line."""
    for log in pathlib.Path(directory).glob("log-*"):
        lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        log.write_text("".join(line for line in lines if int(line.split()[0]) <= step))


def start(ranks, directory, urls, script):
    """Train on so many ranks with torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    if "--forked" in sys.argv:
        import forked_torchrun

        return forked_torchrun.start(ranks, script, "--train", directory, *urls, environment=environment)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, script, "--train", str(directory), *urls]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def resume(ranks, directory, urls, script):
    """Train on, on so many ranks, in a copy of the directory of a job that has ended."""
    again = directory.with_name(f"on-{ranks}")
    shutil.copytree(directory, again)
    return start(ranks, again, urls, script), again


def logged(directory):
    """The keys in all logs."""
    return [key for log in directory.glob("log-*") for key in log.read_text().split()[1::2]]


def mistakes(directory):
    """How many keys were lost, and how many came again."""
    counts = Counter(logged(directory))
    return TOTAL - len(counts), counts.total() - len(counts)


def new_folder(*parts):
    folder = pathlib.Path(*parts)
    folder.mkdir()
    return folder


def command(doc, main, default, *, saves_each_step):
    """The command line of a script, which torchrun also starts as a rank: with ``--train``."""
    known = parser(doc, default)
    known.add_argument("--forked", action="store_true", help="start torchrun and its ranks as forks")
    known.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = known.parse_args()
    if options.train:
        train(options.train[0], options.train[1:], saves_each_step=saves_each_step)
    else:
        sys.exit(main(options))
