"""Training whose job is ended by a cluster: SIGTERM to torchrun, which sends it to its 2 ranks with
2 workers each; resumed on 1 and on 3 ranks.

    python tests/proofs/preempt.py [--rounds 10] [--minutes M] [--seed N] [--forked]

The ranks only remember the signal, agree on a step, save there with checkpoint.save() and leave;
this is their only checkpoint. Each appends the keys that it has trained on to a log. Exit code 1 if
no checkpoint is there, a process is left, or a sample was lost or came twice.
"""

import random
import signal
import sys
import tempfile
import time

from amount import rounds
from training import SAMPLES, SHARDS, TOTAL, command, logged, mistakes, new_folder, resume, start


def end(process, directory, target):
    """End a job once ``target`` keys are logged; returns how many of its processes are left, and
    what it printed.
    """
    import psutil

    while process.poll() is None and len(logged(directory)) < target:
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=300)
    _, left = psutil.wait_procs(family, timeout=60)
    for rest in left:
        rest.kill()
    return len(left), printed


def play(directory, urls, rng):
    """One round: how many keys were logged when the job had ended, and what went wrong, as text."""
    first = new_folder(directory, "ended")
    left, printed = end(start(2, first, urls, __file__), first, rng.randrange(1, TOTAL * 9 // 10))
    wrong = [f"{left} processes are left"] if left else []
    if not list(first.glob("checkpoints/**/*.json")):
        return len(logged(first)), [*wrong, f"there is no checkpoint:\n{printed}"]
    for ranks in (1, 3):
        process, again = resume(ranks, first, urls, __file__)
        _, printed = process.communicate(timeout=300)
        lost, repeated = mistakes(again)
        if process.returncode or lost or repeated:
            wrong.append(
                f"on {ranks} ranks {lost} samples were lost and {repeated} repeated, exit code "
                f"{process.returncode}:\n{printed}"
            )
    return len(logged(first)), wrong


def main(options):
    from wds_pipes.testing import make_shards

    rng, bad, count = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        urls = make_shards(f"{directory}/data", shards=SHARDS, samples=SAMPLES)
        for number in rounds(options):
            trained, wrong = play(new_folder(directory, f"round-{number}"), urls, rng)
            count, bad = count + 1, bad + bool(wrong)
            what = f"round {number}: ended with {trained} of {TOTAL} samples trained on"
            print(what, *wrong, sep="\n  ", file=sys.stderr, flush=True)
    print(f"rounds={count} bad={bad} seed={options.seed}")
    return int(bad > 0)


if __name__ == "__main__":
    command(__doc__, main, default=10, saves_each_step=False)
