"""Training that is killed for real: torchrun on 2 ranks with 2 workers each, SIGKILL of a random
process at a random time, resumed on 1 and on 3 ranks. Every second round reads a SampleList, in one
global order, the others a ShardList.

    python tests/proofs/kill.py [--rounds 20] [--minutes M] [--seed N] [--forked]

Each rank appends the keys that it has trained on to a log and saves its state with the length of
the log, all ranks at each step. On a restart the newest step for which all ranks have a file
counts, and the logs are cut back to it. Exit code 1 if a sample was lost or came twice.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter

from amount import parser, rounds

SHARDS, SAMPLES, SIZE, KEPT = 12, 100, 4, 8
STEP_SECONDS = 0.004


# What each rank runs


def train(directory, urls):
    """Resume from the last run and train to the end of the epoch."""
    import torch
    import torch.distributed as dist

    import wds_pipes as wp

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if os.path.exists(f"{urls[0]}.idx"):
        pipe = wp.SampleList(urls, shuffle=True, seed=3).fetch_samples()
    else:
        pipe = wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key().shuffle_buffer(50)
    loader = wp.PipeLoader(pipe, batch_size=SIZE, collate=keys_of, num_workers=2, epoch_end="exact")
    found = [recover(directory) if rank == 0 else None]
    dist.broadcast_object_list(found)
    states, run = found[0]
    if states:
        loader.load_state_dict(wp.merge_states(states))
    if loader.state_dict()["epoch"] == 0:
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
                with contextlib.suppress(FileNotFoundError):
                    os.remove(f"{run}/state-{step - KEPT}-{rank}")
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


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
    new = pathlib.Path(directory) / f"run-{len(runs):03d}"
    new.mkdir()
    return states, str(new)


# Who starts and kills them


def start(ranks, directory, urls, script=__file__):
    """Train on so many ranks with torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    if "--forked" in sys.argv:
        sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))
        import forked_torchrun

        return forked_torchrun.start(ranks, script, "--train", directory, *urls, environment=environment)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        script,
        "--train",
        str(directory),
        *urls,
    ]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def logged(directory):
    """The keys in the logs of all runs."""
    return [key for log in pathlib.Path(directory).glob("run-*/log-*") for key in log.read_text().split()]


def kill(process, directory, rng):
    """Kill a rank or a worker once a random number of keys is logged; returns its kind when all
    other processes have ended, or None if training ended before.
    """
    import psutil

    target, victim, family = rng.randrange(SHARDS * SAMPLES), None, []
    while process.poll() is None and victim is None:
        time.sleep(0.001)
        if sum(log.stat().st_size for log in pathlib.Path(directory).glob("run-*/log-*")) < target * 9:
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
    first, victim = pathlib.Path(directory) / "killed", None
    while victim is None:
        shutil.rmtree(first, ignore_errors=True)
        first.mkdir()
        victim = kill(start(2, first, urls), first, rng)
    lost = repeated = 0
    runs = []
    for ranks in (1, 3):
        again = pathlib.Path(directory) / f"on-{ranks}"
        shutil.copytree(first, again)
        runs.append((start(ranks, again, urls), again))
    for process, again in runs:
        _, errors = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"a resumed run failed:\n{errors}")
        counts = Counter(logged(again))
        lost += SHARDS * SAMPLES - len(counts)
        repeated += counts.total() - len(counts)
    last = max(path for path in again.glob("run-*") if path.name != "run-000")
    done = SHARDS * SAMPLES - sum(len(log.read_text().split()) for log in last.glob("log-*"))
    return victim, done, lost, repeated


def main(options):
    from wds_pipes.tar import index_shards
    from wds_pipes.testing import make_shards

    rng, victims, lost, repeated = random.Random(options.seed), [], 0, 0
    with tempfile.TemporaryDirectory() as directory:
        lists = [make_shards(f"{directory}/{name}", shards=SHARDS, samples=SAMPLES) for name in ("data", "indexed")]
        index_shards(lists[1], offsets=True)
        for number in rounds(options):
            (place := pathlib.Path(directory) / f"round-{number}").mkdir()
            victim, done, *mistakes = play(place, lists[number % 2], rng)
            victims.append(victim)
            lost, repeated = lost + mistakes[0], repeated + mistakes[1]
            print(
                f"round {number}: killed a {victim} with {done} of {SHARDS * SAMPLES} samples saved",
                file=sys.stderr,
                flush=True,
            )
    print(f"rounds={len(victims)} lost={lost} repeated={repeated} seed={options.seed}")
    return int(lost + repeated > 0)


def command(doc, train, main, default):
    """The command line of this script, which torchrun also starts as a rank: with ``--train``."""
    known = parser(doc, default)
    known.add_argument("--forked", action="store_true", help="start torchrun and its ranks as forks")
    known.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = known.parse_args()
    if options.train:
        train(options.train[0], options.train[1:])
    else:
        sys.exit(main(options))


if __name__ == "__main__":
    command(__doc__, train, main, default=20)
