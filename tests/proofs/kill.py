"""Training that is killed for real: torchrun on 2 ranks with 2 workers each, SIGKILL of a random
process at a random time, resumed on 1 and on 3 ranks. Every second round reads a SampleList, in one
global order, the others a ShardList.

    python tests/proofs/kill.py [--rounds 20] [--minutes M] [--seed N] [--forked]

Each rank appends the keys that it has trained on to a log and saves its state with the length of
the log, all ranks at each step. On a restart the newest step for which all ranks have a file
counts, and the logs are cut back to it. Exit code 1 if a sample was lost or came twice.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

from amount import rounds
from training import (
    SAMPLES,
    SHARDS,
    STEP_SECONDS,
    TOTAL,
    command,
    loader_of_rank,
    logged,
    mistakes,
    new_folder,
    resume,
    start,
)

KEPT = 8  # states of each rank


# What each rank runs


def train(directory, urls):
    """Resume from the last run and train to the end of the epoch."""
    import torch
    import torch.distributed as dist

    import wds_pipes as wp

    with loader_of_rank(urls) as loader:
        rank, world = dist.get_rank(), dist.get_world_size()
        found = [recover(directory) if rank == 0 else None]
        dist.broadcast_object_list(found)
        states, run = found[0]
        if states:
            loader.load_state_dict(wp.merge_states(states))
        if loader.state_dict()["epoch"] > 0:
            return
        with open(f"{run}/log-{rank}", "a") as log:
            batches, going, step = iter(loader), torch.ones(1), 0
            while True:
                batch = next(batches, ())
                going.fill_(len(batch))
                dist.all_reduce(going)
                if not going:
                    break
                step += 1
                time.sleep(STEP_SECONDS)
                log.writelines(f"{key}\n" for key in batch)
                log.flush()
                write(f"{run}/state-{step}-{rank}", {"world": world, "log": log.tell(), "state": loader.state_dict()})
                pathlib.Path(f"{run}/state-{step - KEPT}-{rank}").unlink(missing_ok=True)


def write(path, content):
    """Replace the file as a whole."""
    with open(f"{path}.new", "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)


def recover(directory):
    """The states of all ranks at the newest step that all have saved, with the logs cut back to
    it; and a directory for the run that starts now.
    """
    runs = sorted(pathlib.Path(directory).glob("run-*"))
    states = []
    for run in reversed(runs):
        steps = {}
        for path in run.glob("state-*-*[0-9]"):
            _, step, rank = path.name.split("-")
            steps.setdefault(int(step), {})[int(rank)] = json.loads(path.read_text())
        whole = [step for step, saved in steps.items() if len(saved) == next(iter(saved.values()))["world"]]
        if whole:
            saved = steps[max(whole)]
            for rank, entry in saved.items():
                os.truncate(run / f"log-{rank}", entry["log"])
            states = [entry["state"] for entry in saved.values()]
            break
        for log in run.glob("log-*"):
            os.truncate(log, 0)
    return states, str(new_folder(directory, f"run-{len(runs):03d}"))


# Who starts and kills them


def kill(process, directory, rng):
    """Kill a rank or a worker once a random number of keys is logged; returns its kind when all
    other processes have ended, or None if training ended before.
    """
    import psutil

    target, victim, family = rng.randrange(TOTAL), None, []
    while process.poll() is None and victim is None:
        time.sleep(0.001)
        if sum(log.stat().st_size for log in directory.rglob("log-*")) < target * 9:
            continue
        time.sleep(rng.random() * 0.02)
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(process.pid).children()
            workers = [worker for rank in ranks for worker in rank.children()]
            family = [*ranks, *workers]
            if family:
                victim = rng.choice(family)
                victim.send_signal(signal.SIGKILL)
    process.communicate()
    for left in family:  # workers of a killed rank notice it only after seconds
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(family, timeout=30)
    return None if victim is None or process.returncode == 0 else "worker" if victim in workers else "rank"


def play(directory, urls, rng):
    """One round: the kind of the killed process, how many keys were saved by then, and how many
    were lost and repeated on 1 and on 3 ranks.
    """
    victim = None
    while victim is None:
        shutil.rmtree(directory / "killed", ignore_errors=True)
        first = new_folder(directory, "killed")
        victim = kill(start(2, first, urls, __file__), first, rng)
    lost = repeated = 0
    for process, again in [resume(ranks, first, urls, __file__) for ranks in (1, 3)]:
        _, errors = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"a resumed run failed:\n{errors}")
        lost_here, repeated_here = mistakes(again)
        lost, repeated = lost + lost_here, repeated + repeated_here
    last = max(again.glob("run-*"))
    return victim, TOTAL - len(logged(last)), lost, repeated


def main(options):
    from wds_pipes.tar import index_shards
    from wds_pipes.testing import make_shards

    rng, count, lost, repeated = random.Random(options.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as directory:
        lists = [make_shards(f"{directory}/{name}", shards=SHARDS, samples=SAMPLES) for name in ("data", "indexed")]
        index_shards(lists[1], offsets=True)
        for number in rounds(options):
            place = new_folder(directory, f"round-{number}")
            victim, done, lost_here, repeated_here = play(place, lists[number % 2], rng)
            count, lost, repeated = count + 1, lost + lost_here, repeated + repeated_here
            print(
                f"round {number}: killed a {victim} with {done} of {TOTAL} samples saved", file=sys.stderr, flush=True
            )
    print(f"rounds={count} lost={lost} repeated={repeated} seed={options.seed}")
    return int(lost + repeated > 0)


if __name__ == "__main__":
    command(__doc__, train, main, default=20)
