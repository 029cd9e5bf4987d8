"""Decoders on a Ray cluster that feed a trainer, as tutorial 14 does it, killed at random moments.

    python tests/bench/ray_feeding.py [--rounds 3] [--kills 3] [--stops 3] [--seed N]

A round is two epochs. Meanwhile random processes of decoders get SIGKILL. At random batches the
trainer is lost with its decoders: another one continues from its last checkpoint, which is up to
three batches old, and with another number of decoders if the checkpoint is at the end of a round of
lanes, as about half of them are. Exit code 1 if the digests of the batches are not those of one
process without an interruption; needs ray. The trainers are objects of this process.
"""

import argparse
import contextlib
import hashlib
import os
import pickle
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

TUTORIAL = Path(__file__).parents[2] / "tutorials/14_clusters.py"
LANES, EPOCHS, STEP_SECONDS = 6, 2, 0.05


def recipe():
    """What tutorial 14 defines, and its shards in the current directory."""
    names = {"__name__": "__main__"}
    slurm, on_ray = TUTORIAL.read_text().split("\n# ## Ray:")
    exec(slurm, names)  # which writes the shards
    for cell in on_ray.split("\n# %%"):
        if any(begins in cell for begins in ("\nimport ray\n", "\ndef make_loader", "\nclass Feed")):
            exec(cell.partition("\ncluster = ")[0], names)  # a cluster is started below
    return names


def digest(batch):
    keys, numbers = batch
    return hashlib.sha256(repr((list(keys), numbers.tolist())).encode()).hexdigest()


def kill_decoders(count, numbers, over, killed):
    """Kill random processes of decoders at random moments."""
    while len(killed) < count and not over.wait(numbers.random() * 2):
        with contextlib.suppress(psutil.Error):
            family = psutil.Process().children(recursive=True)
            decoders = [process for process in family if "ray::Decoder" in " ".join(process.cmdline())]
            if decoders:
                victim = numbers.choice(decoders)
                os.kill(victim.pid, signal.SIGKILL)
                killed.append(victim.pid)


def play(names, whole, kills, stops, numbers):
    """One round: the digests of its batches, how many kills, and the numbers of decoders."""
    ray, merge = names["ray"], names["wp"].merge_states
    over, killed, used, seen = threading.Event(), [], [], []
    threading.Thread(target=kill_decoders, args=(kills, numbers, over, killed), daemon=True).start()
    ends = [*sorted(numbers.sample(range(1, whole), stops)), whole]
    checkpoint, count = pickle.dumps((0, None)), numbers.choice([1, 2, 3])
    for end in ends:
        at, state = pickle.loads(checkpoint)
        if state is not None and at % LANES == 0:
            count = numbers.choice([1, 2, 3])
            state = {"states": [merge(state["states"])] * count, "epoch": state["epoch"]}
        used.append(count)
        del seen[at:]
        decoders = [names["Decoder"].remote() for _ in range(count)]
        feed = names["Feed"](decoders, **(state or {}))
        while len(seen) < end:
            for batch in feed:
                time.sleep(STEP_SECONDS)
                seen.append(digest(batch))
                saved = len(seen) % 3 == 0 if numbers.random() < 0.7 else numbers.random() < 0.5
                if saved:
                    checkpoint = pickle.dumps((len(seen), feed.state_dict()))
                if len(seen) == end:
                    break
        for decoder in decoders:
            ray.kill(decoder)
    over.set()
    return seen, len(killed), used


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("rounds", 3), ("kills", 3), ("stops", 3), ("seed", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    names, numbers, bad = recipe(), random.Random(seed), 0
    loader = names["make_loader"]()
    whole = [digest(batch) for _ in range(EPOCHS) for batch in loader]
    assert len(set(whole)) == len(whole)
    ray = names["ray"]
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for number in range(options.rounds):
        seen, killed, used = play(names, len(whole), options.kills, options.stops, numbers)
        bad += seen != whole
        first = next((at for at, (one, two) in enumerate(zip(seen, whole)) if one != two), None)
        print(
            f"round {number}: {killed} decoders killed, trainers with {used} decoders,",
            "exact" if seen == whole else f"WRONG: {len(seen)} of {len(whole)} batches, first difference at {first}",
            flush=True,
        )
    ray.shutdown()
    print(f"rounds={options.rounds} bad={bad} seed={seed}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
