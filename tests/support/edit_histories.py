"""Histories with ten edits each of a running epoch, for tests/proofs/edits.py, which says what they
show, and for short tests: each raises AssertionError where something else comes than in a model.
"""

import itertools
import json
from collections import Counter
from functools import cache

from pipelines import epochs_of, key_of, through_json

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

EDITS = 10
SIZES = [5, 4, 6, 3, 7, 5, 8, 9, 2, 6, 0, 7, 4, 8]
URLS = []


def use_shards(directory):
    """Write the shards that the histories read."""
    URLS[:] = make_shards(directory, shards=len(SIZES), samples=SIZES)
    index_shards(URLS, offsets=True)


def streamed(count, counted, window, seed=4):
    """A pipe of the first shards."""
    counts = {"samples_per_shard": SIZES[:count]} if counted else {}
    pipe = wp.ShardList(URLS[:count], shuffle=True, seed=seed, **counts).open_shards().load_tar().group_by_key()
    return pipe.shuffle_buffer(window) if window else pipe


def listed(count, block):
    return wp.SampleList(URLS[:count], shuffle=True, seed=3, block_samples=block).fetch_samples()


@cache
def order(make, epoch, *options):
    """The keys of an epoch of a pipe, in order."""
    pipe = make(*options)
    pipe.set_epoch(epoch)
    return tuple(map(key_of, pipe))


def loaders_of(pipe, ranks, states, edits, **options):
    options = {"collate": "list", "batch_size": 2, **options}
    loaders = [wp.PipeLoader(pipe.map_samples(key_of), rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    for loader in loaders if states else ():
        loader.load_state_dict(states, **edits)
    return loaders


def taken(loaders, steps):
    """The keys that the ranks yield, in the order of (step, rank)."""
    ranks = [iter(loader) for loader in loaders]
    return [key for _ in range(steps) for items in ranks for key in next(items, ())]


def one(chance):
    """A stream on one lane: the model has the order of what is left."""
    counted, window, batch = chance.random() < 0.5, chance.choice([0, 3, 30]), chance.choice([1, 2])
    count, out, states, epoch, edits = chance.randrange(3, 6), [], None, 0, 0
    left = list(order(streamed, 0, count, counted, window))
    while edits < EDITS:
        call = {"exclude": out} if out else {}
        if states is not None:
            edits += 1
            if chance.random() < 0.4 and count < len(SIZES):
                begun = bool(states[0]["lanes"]["0"]["position"])
                count, call = chance.randrange(count + 1, len(SIZES) + 1), {**call, "added": "append"}
                left = left if begun else [*order(streamed, epoch, count, counted, window)]
            elif len(left) > 8:
                some = chance.sample(order(streamed, epoch, count, counted, window), 2)
                out = [*out, *(key for key in some if key not in out)]
                call = {"exclude": out}
        left = [key for key in left if key not in out]
        pipe = streamed(count, counted, window)
        loader = loaders_of(pipe, 1, states, call, lanes=1, batch_size=batch, epoch_end="exact")[0]
        for _ in range(chance.randrange(3)):
            size = chance.randrange(1, 9)
            found = [key for batch in itertools.islice(loader, size) for key in batch]
            assert found == left[: size * batch], (found, left)
            left = left[size * batch :]
            states = [through_json(loader.state_dict())]
            loader.load_state_dict(states, **({"exclude": out} if out else {}))
            if states[0]["epoch"] > epoch:
                assert not left
                epoch += 1
                left = [key for key in order(streamed, epoch, count, counted, window) if key not in out]
        states = [through_json(loader.state_dict())]
        assert len(json.dumps(states)) < 3000


def ranks(chance):
    """Changing ranks: of each epoch each sample comes once, or at most once if it is left out."""
    counted, window = chance.random() < 0.5, chance.choice([0, 3, 30])
    count, out, states, epoch, edits = chance.randrange(4, 6), [], None, 0, 0
    whole, found = set(order(streamed, 0, count, counted, window)), []
    while edits < EDITS:
        of, call = chance.choice([1, 2, 3]), {"exclude": out} if out else {}
        if states is not None:
            edits += 1
            if chance.random() < 0.3 and count < len(SIZES):
                begun = bool(found)
                count, call = chance.randrange(count + 1, len(SIZES) + 1), {**call, "added": "append"}
                whole = whole if begun else set(order(streamed, epoch, count, counted, window))
            elif len(whole - set(out)) > 12:
                some = chance.sample(sorted(whole), 2)
                out = [*out, *(key for key in some if key not in out)]
                call = {"exclude": out}
        before = set(found)
        loaders = loaders_of(streamed(count, counted, window), of, states, call, epoch_end="exact")
        running = [iter(loader) for loader in loaders]
        found += [key for items in running for key in next(items, ())]
        if chance.random() < 0.2 or any(loader.epoch > epoch for loader in loaders):  # to the end of the epoch
            found += [key for items in running for batch in items for key in batch]
        assert len(found) == len(set(found)), "a sample came twice"
        assert not (set(found) - before) & set(out), "a sample that was left out came"
        assert set(found) <= whole
        if all(loader.epoch > epoch for loader in loaders):
            assert set(found) >= whole - set(out), f"{whole - set(out) - set(found)} was lost"
            epoch += 1
            whole, found = set(order(streamed, epoch, count, counted, window)), []
        states = through_json([loader.state_dict() for loader in loaders])


def loop(chance):
    """Without an end: each sample has come as often as there are epochs that had it."""
    counted, window = chance.random() < 0.5, chance.choice([0, 3])
    count, out, states, edits, found = chance.randrange(4, 6), [], None, 0, Counter()
    sizes = {}  # of each epoch that has ended or begun, how many shards it has
    while edits < EDITS:
        of, call = chance.choice([1, 2, 3]), {"exclude": out} if out else {}
        if states is not None:
            edits += 1
            if chance.random() < 0.4 and count < len(SIZES):
                for epoch in range(epochs_of(states)[1] + 1):
                    sizes.setdefault(epoch, count)
                count, call = chance.randrange(count + 1, len(SIZES) + 1), {**call, "added": "append"}
            elif len(out) < 8:
                some = chance.sample(order(streamed, 0, 4, counted, window), 1)
                out = [*out, *(key for key in some if key not in out)]
                call = {"exclude": out}
        loaders = loaders_of(streamed(count, counted, window), of, states, call, epoch_end="loop")
        new = taken(loaders, chance.randrange(1, 9))
        assert not set(new) & set(out), "a sample that was left out came"
        found.update(new)
        states = through_json([loader.state_dict() for loader in loaders])
    ended, begun = epochs_of(states)
    of_epoch = [set(order(streamed, 0, sizes.get(epoch, count), counted, window)) for epoch in range(begun + 1)]
    for key in set.union(*of_epoch) - set(out):
        least, most = (sum(key in keys for keys in of_epoch[:end]) for end in (ended, begun + 1))
        assert least <= found[key] <= most, (key, found[key], least, most)


def list_(chance):
    """A SampleList: all batches are full, in its order, on any ranks."""
    block, out, states, epoch, edits = chance.choice([1, 1, 3]), [], None, 0, 0
    count, begun = chance.randrange(5, len(SIZES) + 1), False
    left = list(order(listed, 0, count, block))
    while edits < EDITS:
        of, size, call = chance.choice([1, 2, 3]), chance.choice([1, 2, 3]), {}
        if states is not None:
            edits += 1
            if chance.random() < 0.3 and count < len(SIZES):
                count, call = chance.randrange(count + 1, len(SIZES) + 1), {"added": "append"}
                left = left if begun else list(order(listed, epoch, count, block))
            some = chance.sample(order(listed, epoch, count, block), chance.randrange(4))
            out = [*out, *(key for key in some if key not in out)]
        left = [key for key in left if key not in out]
        call |= {"exclude": out} if out else {}
        loaders = loaders_of(listed(count, block), of, states, call, batch_size=size, epoch_end="drop")
        steps = chance.randrange(1, 4)
        steps = min(steps, len(left) // (of * size))
        assert taken(loaders, steps) == left[: steps * of * size]
        left, begun = left[steps * of * size :], begun or steps > 0
        if len(left) < of * size:  # which makes no batch of all ranks
            assert steps or not taken(loaders, 1)
            epoch, begun = epoch + 1, False
            left = list(order(listed, epoch, count, block))
        states = through_json([loader.state_dict() for loader in loaders])
        assert {state["epoch"] for state in states} == {epoch}


SOURCES = {"a": (0, 5), "b": (5, 9), "c": (9, 14), "d": (3, 8)}  # their shards


def source(name, start, stop):
    """The samples of a source of a mix, with its name."""
    pipe = wp.ShardList(URLS[start:stop], shuffle=True, seed=ord(name)).open_shards().load_tar().group_by_key()
    return pipe.shuffle_buffer(4).map_samples(lambda sample, name=name: {"__key__": sample["__key__"], "name": name})


def rising(samples):
    return {"a": 1 + samples / 100, "b": 2, "c": 0.25}


def mix(chance):
    """One lane: each source goes on in its order, and the proportions begin anew at an edit."""
    out, states, edits, left = [], None, 0, {}
    weights = dict.fromkeys("abc", 1)
    schedule = None
    while edits < EDITS:
        call, fresh = {"exclude": out} if out else {}, states is None
        if states is not None:
            edits += 1
            kind = chance.choice(["weights", "schedule", "out", "source"])
            if kind == "out":
                some = [key for keys in left.values() for key in chance.sample(keys, min(len(keys), 1))]
                out = [*out, *(key for key in some if key not in out)]
                call = {"exclude": out} if out else {}
            elif kind == "schedule" and len(weights) == 3:
                schedule, call, fresh = rising, {**call, "mix": "changed"}, True
            else:
                extra = {"d": 1} if kind == "source" or len(weights) > 3 else {}
                weights = {name: chance.randrange(1, 9) for name in {**weights, **extra}}
                schedule, call, fresh = None, {**call, "mix": "changed"}, True
        for name in weights.keys() - left.keys():
            left[name] = [sample["__key__"] for sample in source(name, *SOURCES[name])]
        left = {name: [key for key in keys if key not in out] for name, keys in left.items()}
        sources = {name: source(name, *SOURCES[name]) for name in weights}
        how = {"weights": weights} if schedule is None else {"schedule": schedule}
        pipe = wp.mix(sources, **how, exhausted="drop")
        loader = wp.PipeLoader(pipe, batch_size=1, collate="list", lanes=1, epoch_end="exact")
        if states is not None:
            loader.load_state_dict(states, **call)
        number = chance.randrange(1, 7)
        found = [(batch[0]["name"], batch[0]["__key__"]) for batch in itertools.islice(loader, number)]
        live = all(len(keys) > number for keys in left.values())
        for name, key in found:
            assert left[name].pop(0) == key
        if fresh and live and schedule is None and not out:
            total = sum(weights.values())
            counts = Counter(name for name, _ in found)
            assert all(abs(counts[name] - len(found) * weight / total) < 1 for name, weight in weights.items())
        states = through_json([loader.state_dict()])
        if states[0]["epoch"]:
            assert not any(left.values())
            return


KINDS = {"one": one, "ranks": ranks, "loop": loop, "list": list_, "mix": mix}
