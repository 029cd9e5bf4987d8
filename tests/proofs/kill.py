"""Training that is killed for real: torchrun on 2 ranks with 2 workers each, SIGKILL of a random
process at a random time, resumed on 1 and on 3 ranks. Every second round reads a SampleList, in one
global order, the others a ShardList.

    python tests/proofs/kill.py [--rounds 20] [--minutes M] [--seed N] [--forked]

Each rank appends the keys that it has trained on to a log, and calls checkpoint.save() after each
step. On a restart, what the logs have after the step of the newest checkpoint does not count. Exit
code 1 if a sample was lost or came twice.
"""

import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time

from amount import rounds
from training import SAMPLES, SHARDS, TOTAL, command, mistakes, new_folder, resume, start


def kill(process, directory, rng):
    """Kill a rank or a worker once a random number of keys is logged; returns its kind when all
    other processes have ended, or None if training ended before.
    """
    import psutil

    target, victim, family = rng.randrange(TOTAL), None, []
    while process.poll() is None and victim is None:
        time.sleep(0.001)
        if sum(log.stat().st_size for log in directory.glob("log-*")) < target * 12:
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
    """One round: the kind of the killed process, and how many keys were lost and repeated on 1 and
    on 3 ranks.
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
    return victim, lost, repeated


def main(options):
    from wds_pipes.tar import index_shards
    from wds_pipes.testing import make_shards

    rng, count, lost, repeated = random.Random(options.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as directory:
        lists = [make_shards(f"{directory}/{name}", shards=SHARDS, samples=SAMPLES) for name in ("data", "indexed")]
        index_shards(lists[1], offsets=True)
        for number in rounds(options):
            place = new_folder(directory, f"round-{number}")
            victim, lost_here, repeated_here = play(place, lists[number % 2], rng)
            count, lost, repeated = count + 1, lost + lost_here, repeated + repeated_here
            print(f"round {number}: killed a {victim}", file=sys.stderr, flush=True)
    print(f"rounds={count} lost={lost} repeated={repeated} seed={options.seed}")
    return int(lost + repeated > 0)


if __name__ == "__main__":
    command(__doc__, main, default=20, saves_each_step=True)
