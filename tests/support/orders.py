"""Histories of one global order: an epoch over a SampleList that is cut, saved and continued on
other numbers of ranks and workers, with other batch sizes and other ends of epochs.
"""

import json
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

from pipelines import through_json

import wds_pipes as wp


class Phase(NamedTuple):
    """A run until it is cut.

    Attributes:
        ranks: the number of ranks.
        workers: the number of workers of each.
        size: how many samples a batch of a rank has.
        end: epoch_end.
        cut: after how many steps it is cut.
        own: whether each rank loads only its own state, where it can.
    """

    ranks: int
    workers: int
    size: int
    end: str
    cut: int
    own: bool = False


class Order(NamedTuple):
    """The options of a SampleList and what follows it."""

    shuffle: bool
    block_samples: int
    seed: int
    kind: str


def draw(sample: dict[str, Any], rng: Any) -> tuple[Any, ...]:
    """A sample as its key, a random number, and whether it is a repeat."""
    return sample["__key__"], int(rng.integers(1 << 40)), sample.get("__padding__")


def draw_of_tuple(sample: tuple[Any, ...], rng: Any) -> tuple[Any, ...]:
    return *sample, int(rng.integers(1 << 40)), None


def pipe(urls: list[str], order: Order) -> Any:
    """A pipe that yields each sample as (key, random number, whether it is a repeat)."""
    found = wp.SampleList(urls, shuffle=order.shuffle, block_samples=order.block_samples, seed=order.seed)
    found = found.fetch_samples().decode_by_ext()
    return found.map_samples(draw) if order.kind == "dicts" else found.to_tuple("__key__").map_samples(draw_of_tuple)


@cache
def _alone(urls: tuple[str, ...], order: Order, epoch: int) -> list[tuple[Any, ...]]:
    """An epoch in one process that is not interrupted, of a plain pipe."""
    single = pipe(list(urls), order)
    single.set_epoch(epoch)
    return list(single)


class Outcome(NamedTuple):
    """What all runs of a history yielded.

    Attributes:
        found: the samples in the order of (run, step, rank), each with its epoch.
        expected: those of an uninterrupted run in one process.
        lost: how many samples of epochs that ended came in no batch, and were not counted as
            dropped.
        repeated: how many came again, and were not counted as padded.
        changes: how often the run was continued.
    """

    found: list[Any]
    expected: list[Any]
    lost: int
    repeated: int
    changes: int


def play(urls: list[str], samples: int, order: Order, phases: list[Phase], *, processes: bool = False) -> Outcome:
    """Run a history; the last phase runs to the end of its epoch.

    Args:
        urls: the shards.
        samples: how many samples they have.
        order: the options.
        phases: the runs.
        processes: start worker processes; otherwise their lanes run in this process.
    """
    states: list[Any] = []
    found: list[Any] = []
    expected: list[Any] = []
    given: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    epoch = place = 0
    over = False
    for number, phase in enumerate(phases):
        last = number == len(phases) - 1
        host = {"num_workers": phase.workers, "multiprocessing_context": "fork"} if processes and phase.workers else {}
        options = {"batch_size": phase.size, "collate": "list", "epoch_end": phase.end, **host}
        lanes = phase.ranks * max(1, phase.workers)
        shared = pipe(urls, order)
        loaders = [
            wp.PipeLoader(shared, lanes=lanes, rank=rank, world_size=phase.ranks, **options)
            for rank in range(phase.ranks)
        ]
        same = number and not over and phase[:1] + phase[2:4] == phases[number - 1][:1] + phases[number - 1][2:4]
        for rank, loader in enumerate(loaders if states else ()):
            loader.load_state_dict(states[rank] if same and phase.own else states)
        # what this run has to yield, and where the epoch then stands
        step = phase.ranks * phase.size
        left = (samples - place) // step if phase.end == "drop" else -(-(samples - place) // step)
        assert [loader.remaining() for loader in loaders] == _batches(phase, left, samples - place)
        cut = left + 1 if last else phase.cut
        for at in range(place, place + min(cut, left) * step):
            if at < samples or phase.end == "pad":
                key, random, _ = _alone(tuple(urls), order, epoch)[at % samples]
                expected.append((epoch, key, random, at >= samples if _flagged(phase, order) else None))
        # what it yields
        running: list[Any] = [iter(loader) for loader in loaders]
        for _ in range(cut):
            for rank, items in enumerate(running):
                batch = None if items is None else next(items, None)
                if batch is None:
                    running[rank] = None
                    continue
                found += [(epoch, *sample) for sample in batch]
                given[epoch] += len(batch)
        counts: Counter[str] = Counter()
        for loader in loaders:
            counts.update(loader.counts())
        assert counts["delivered"] == given[epoch], (counts, given)
        over = cut > 0 and cut >= left
        if over:
            ended[epoch] = counts["dropped"] - counts["padded"]
        epoch, place = (epoch + 1, 0) if over else (epoch, min(samples, place + cut * step))
        states = [through_json(loader.state_dict()) for loader in loaders]
        # with "exact", a rank alone does not know that the others have ended
        assert phase.end == "exact" or {state["epoch"] for state in states} == {epoch}
        assert len(json.dumps(states[0])) < 2000 + 700 * phase.workers
        for loader in loaders:
            loader.close()
    lost = repeated = 0
    for one, balance in ended.items():
        keys = [sample[1] for sample in found if sample[0] == one]
        lost += max(0, samples - len(set(keys)) - max(0, balance))
        repeated += max(0, len(keys) - len(set(keys)) + min(0, balance))
    return Outcome(found, expected, lost, repeated, len(phases) - 1)


def _flagged(phase: Phase, order: Order) -> bool:
    """Whether samples say whether they are repeats."""
    return phase.end == "pad" and order.kind == "dicts"


def _batches(phase: Phase, steps: int, samples: int) -> list[int]:
    """How many batches each rank yields in so many steps, of so many samples."""
    if phase.end != "exact":
        return [steps] * phase.ranks
    total = -(-samples // phase.size)
    return [(total - rank + phase.ranks - 1) // phase.ranks if rank < total else 0 for rank in range(phase.ranks)]
