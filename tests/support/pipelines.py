"""Pipes of samples, and what tests do with their samples, batches and states."""

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


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


def key_of(sample):
    return sample["__key__"]


def even(sample):
    return int(sample["__key__"]) % 2 == 0


def wanted(sample):
    return sample["__key__"][-1] not in "37"


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


def through_json(state):
    return json.loads(json.dumps(state))
