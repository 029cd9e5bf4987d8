"""Training with epoch_end="loop" on gloo ranks, killed and resumed: for tests/proofs/loop.py, which
says what is shown, and for a short test.
"""

import functools
import json
import logging
import os
import pathlib
import signal
import time
import warnings
from collections import Counter, defaultdict
from typing import NamedTuple

from process_group import CONTEXT

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.testing import make_shards

SIZES = {"a": [9, 4, 12, 7, 3, 10, 8, 11, 5], "b": [6, 2, 8, 5, 7, 4, 3, 6]}  # samples of each shard
EPOCH, SIZE = 96, 4  # samples of an epoch of training; samples in a batch
EVERY = 3  # steps from one checkpoint to the next
TIMEOUT_SECONDS = 120


class StampLane(wp.Stage):
    """Keys with the epoch of the data in which they come."""

    keeps_count = True
    scope = "item"

    def run(self):
        for sample in self.source.items:
            yield self.lane.epoch, f"{sample['set.txt'].decode()}-{sample['__key__']}"


def number_of(stamp):
    return int(stamp[1].split("-")[1])


def wanted(stamp):
    """The shards differ in how many of their samples are kept: all, or one of three."""
    return number_of(stamp) % 3 == 0 or stamp[1][0] == "b" or number_of(stamp) < 30


def unbroken(stamp):
    """About 3 % of the samples are broken."""
    if number_of(stamp) % 33 == 5:
        raise ValueError("broken")
    return stamp


def make_loader(urls, workers, seed):
    if not hasattr(wp.ShardList(["a.tar"]), "stamp_lane"):
        wp.register_stage(StampLane)
    sources = {
        name: wp.ShardList(of_source, shuffle=True, seed=seed).open_shards().load_tar().group_by_key().shuffle_buffer(5)
        for name, of_source in urls.items()
    }
    pipe = wp.mix({name: source.stamp_lane() for name, source in sources.items()}, exhausted="drop")
    pipe = pipe.filter_samples(wanted).map_samples(unbroken, on_error="skip")
    loader = wp.PipeLoader(
        pipe,
        batch_size=SIZE,
        mix_lanes=1 + seed % 2,
        collate="list",
        epoch_end="loop",
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    return loader.with_epoch(samples=EPOCH)


def train(rank, ranks, directory, run, urls, workers, seed, steps):  # noqa: PLR0917 - passed by Process
    """Train on one rank: from the newest checkpoint, up to a number of steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    logging.getLogger("wds_pipes").setLevel(logging.ERROR)  # it names the samples that are skipped
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.setsid()  # so that its workers can be killed with it
    dist.init_process_group("gloo", init_method=f"file://{directory}/group-{run}", rank=rank, world_size=ranks)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    loader = make_loader(urls, workers, seed)
    saved = checkpoint.load(f"{directory}/data", loader)
    step = saved or 0
    first, begun = True, saved is not None
    with open(f"{directory}/log-{run}-{rank}", "w") as log:
        print(json.dumps(step), file=log, flush=True)
        while step < steps:
            left, count = loader.remaining(), 0
            for batch in loader:
                step, count = step + 1, count + 1
                model(torch.full((len(batch), 1), float(len(batch)))).sum().backward()  # waits for all ranks
                print(json.dumps([step, batch]), file=log, flush=True)
                if step % EVERY == 0:
                    dist.barrier()
                    checkpoint.save(f"{directory}/data", loader, step=step)
                if step == steps:
                    break
            else:
                assert count == left, f"an iteration had {count} batches, not {left}"
                assert (first and begun) or count * ranks * SIZE == EPOCH
            first = False
        print(json.dumps(loader.stats()["epoch"]), file=log, flush=True)  # of the last lane of this rank
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


class Ledger(NamedTuple):
    """What a history, or several, came to."""

    kills: int = 0
    changes: int = 0  # of the number of ranks
    steps: int = 0
    epochs: int = 0  # of the data, that are complete
    lost: int = 0
    repeated: int = 0

    def plus(self, other):
        return Ledger(*(mine + its for mine, its in zip(self, other, strict=True)))


def play(directory, urls, chance, runs):
    """One history: training that is killed in each run but the last; its ledger."""
    seed, steps, ranks = chance.randrange(100), 0, chance.choice([2, 4])
    (pathlib.Path(directory) / "data").mkdir()
    kept, kills, changes = defaultdict(list), 0, 0
    for run in range(runs):
        last = run == runs - 1
        if run and (chance.random() < 0.6 or last):
            new = chance.choice([count for count in (1, 2, 3, 4) if count != ranks])
            ranks, changes = new, changes + 1
        goal = steps + chance.randrange(2 * EVERY, 40)
        arguments = (ranks, str(directory), run, urls, chance.choice([0, 0, 1, 2]), seed, goal if last else 10**9)
        processes = [CONTEXT.Process(target=train, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        if last:
            until = time.monotonic() + TIMEOUT_SECONDS
            for process in processes:
                process.join(max(0, until - time.monotonic()))
            codes = [process.exitcode for process in processes]
        else:
            wait_for(directory, run, processes, goal)
            time.sleep(chance.random() * 0.05)
            codes = [0 if process.is_alive() else process.exitcode for process in processes]
            kills += 1
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()
        for process in processes:
            process.join()
        if codes != [0] * ranks:
            raise RuntimeError(f"the ranks of run {run} ended with {codes}; None is one that hangs")
        begun, of_ranks, epochs = read(directory, run, ranks)
        for step in [step for step in kept if step > begun]:
            del kept[step]
        assert not kept or max(kept) == begun, f"run {run} began at {begun}, after {max(kept)}"
        for step in range(begun + 1, min(map(len, of_ranks)) + begun + 1):
            kept[step] = [stamp for batches in of_ranks for stamp in batches[step - begun - 1]]
        steps = max(kept, default=0)
        if last:
            assert {len(batches) for batches in of_ranks} == {goal - begun}, "ranks had other numbers of steps"
    keys = {f"{name}-{number:08d}" for name, sizes in SIZES.items() for number in range(sum(sizes))}
    keys = {key for key in keys if wanted((0, key)) and number_of((0, key)) % 33 != 5}
    ledger = Counter(stamp for stamps in kept.values() for stamp in stamps)
    assert {key for _, key in ledger} <= keys
    complete = int(min(epochs))  # before the epoch of the last lane of all
    lost = sum((epoch, key) not in ledger for epoch in range(complete) for key in keys)
    return Ledger(kills, changes, steps, complete, lost, ledger.total() - len(ledger))


def wait_for(directory, run, processes, goal):
    """Wait until a run is at a step, or its ranks hang."""
    until, log = time.monotonic() + TIMEOUT_SECONDS, pathlib.Path(directory) / f"log-{run}-0"
    while time.monotonic() < until and all(process.is_alive() for process in processes):
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) > 1 and int(lines[0]) + len(lines) > goal:
            return
        time.sleep(0.02)
    raise RuntimeError(f"the {len(processes)} ranks of run {run} do not come to step {goal}")


def read(directory, run, ranks):
    """The step at which a run began, the batches of each rank in it, and the epochs of the data in
    which the ranks ended. The last line of a killed rank may be cut.
    """
    begun, of_ranks, epochs = set(), [], []
    for rank in range(ranks):
        lines = (pathlib.Path(directory) / f"log-{run}-{rank}").read_text().split("\n")[:-1]
        first, *entries = [json.loads(line) for line in lines]
        if entries and isinstance(entries[-1], float):
            epochs.append(entries.pop())
        begun.add(first)
        assert [step for step, _ in entries] == list(range(first + 1, first + len(entries) + 1))
        assert all(len(batch) == SIZE for _, batch in entries), "a batch is not full"
        of_ranks.append([[tuple(stamp) for stamp in batch] for _, batch in entries])
    assert len(begun) == 1, f"the ranks of run {run} began at {begun}"
    return begun.pop(), of_ranks, epochs


def _name_of(name, rng, number):
    return name


def make_data(directory):
    return {
        name: make_shards(
            f"{directory}/{name}",
            shards=len(sizes),
            samples=sizes,
            fields={"set.txt": functools.partial(_name_of, name)},
        )
        for name, sizes in SIZES.items()
    }
