"""Pipes of samples, and what tests do with their samples, batches and states."""

import itertools
import json

import wds_pipes as wp

FIFTY = [7, 5, 8, 0, 9, 6, 7, 8]  # samples in each shard of the fixture ``fifty``


def samples(urls, **options):
    """A pipe of raw samples from shards in random order; ``options`` are those of ShardList."""
    return (
        wp.ShardList(urls, **{"shuffle": True, "seed": 5, "empty_check": False, **options})
        .open_shards()
        .load_tar()
        .group_by_key()
    )


def shuffled(urls, **options):
    """``samples()`` through a small shuffle buffer."""
    return samples(urls, **options).shuffle_buffer(3)


class StampEpoch(wp.Stage):
    """Writes the epoch of the data into each sample, which is another one in each repetition."""

    keeps_count = True
    scope = "item"

    def run(self):
        for sample in self.source.items:
            yield {**sample, "epoch": self.lane.epoch}


wp.register_stage(StampEpoch)


def stamps(samples):
    return [(sample["epoch"], sample["__key__"]) for sample in samples]


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


def key_of(sample):
    return sample["__key__"]


def even(sample):
    return int(sample["__key__"]) % 2 == 0


def wanted(sample):
    return sample["__key__"][-1] not in "37"


def tokens_of(sample):
    """From 1 to 7 tokens, which are the number of the sample."""
    number = int(sample["__key__"])
    return {"__key__": sample["__key__"], "tokens": [number] * (1 + number * 5 % 7)}


def draw(sample, rng):
    return {**sample, "draw": int(rng.integers(1 << 30))}


def flat(batches):
    return [item for batch in batches for item in batch]


def after(source, count):
    """An iterator over ``source`` that has returned ``count`` items."""
    items = iter(source)
    for _ in range(count):
        next(items)
    return items


def loaded(source, state, **options):
    """``source``, into which a state was loaded."""
    source.load_state_dict(state, **options)
    return source


def resumed(make, cut, again=None):
    """The first ``cut`` items of a pipeline, and another one that goes on after them; ``again``
    makes that, if it is not ``make``.
    """
    first = make()
    items = iter(first)
    taken = [next(items) for _ in range(cut)]
    return taken, loaded((again or make)(), through_json(first.state_dict()))


def over_lanes(make, history, **options):
    """The items of an epoch in PipeLoader, which goes on over several topologies, each as its lanes
    and the batches until it is cut (None: none), and the counts at the end.
    """
    got, state, counts = [], None, {}
    for lanes, cut in history:
        loader = wp.PipeLoader(make(), batch_size=2, lanes=lanes, epoch_end="exact", **options)
        if state is not None:
            loader.load_state_dict(state)
            if loader.state_dict()["epoch"]:
                break
        got += itertools.islice(loader, cut)
        state, counts = through_json(loader.state_dict()), loader.counts()
    return flat(got), counts


def through_json(state):
    return json.loads(json.dumps(state))


def epochs_of(states):
    """How many epochs have ended, and the last one that a lane has begun."""
    ahead = [(lane["position"] or [{}])[0].get("epoch", 0) for state in states for lane in state["lanes"].values()]
    later = len(json.loads(states[0].get("partition") or "{}").get("later", []))
    return states[0]["epoch"] + min(ahead), states[0]["epoch"] + max(later, *ahead)
