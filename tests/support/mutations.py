"""Pipelines of every kind with states of them, and ways to damage a state: for the tests and the
benchmark of hostile states.
"""

import copy
import functools
import hashlib
import itertools
import json
import random
import warnings

import chains
from pipelines import samples, shuffled
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes import checkpoint, datapipes, nodes
from wds_pipes.testing import make_shards

COUNTS = [3, 0, 5, 2, 9, 4, 6]
GIVEN = 40  # items taken after a load, at most
# Replacements of a value. JSON cannot hold the last ones, but torch.save can.
ODD = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    511,
    512,
    513,
    1 << 31,
    1 << 53,
    1 << 63,
    1 << 64,
    10**10,
    -(1 << 70),
    10**5000,
    0.5,
    float("nan"),
    float("inf"),
]
ODD += [
    "",
    "0",
    "1",
    "-1",
    "01",
    " 1",
    "²",
    "gz",
    "x" * 500,
    "\ud800",
    [],
    [0],
    [[0, 10**9]],
    {},
    {"0": 0},
    {"²": {}},
    b"1",
    (1,),
    {1: 1},
    {2},
    1j,
    object(),
]


def take(made, count):
    """Take some items, if there are so many."""
    for _ in itertools.islice(made, count):
        pass


class Subject:
    """A pipeline that can be built anew, and states of it, which are taken when they are needed.

    Args:
        name: for people.
        make: builds it.
        cuts: after how many items a state is taken.
    """

    def __init__(self, name, make, cuts=(0, 1, 4, 9, 60)):
        self.name, self.make, self.cuts = name, make, cuts

    @functools.cached_property
    def states(self):
        return [self.state_after(cut) for cut in self.cuts]

    def state_after(self, cut):
        made = self.make()
        take(made, cut)
        return made.state_dict()

    def load(self, state):
        """Load a state and take some items."""
        made = self.make()
        made.load_state_dict(state)
        made.state_dict()
        take(made, GIVEN)
        made.state_dict()


class Node:
    """A node as something to iterate."""

    def __init__(self, node):
        self.node = node

    def __iter__(self):
        return iter(self.node)

    def state_dict(self):
        return self.node.state_dict()

    def load_state_dict(self, state):
        self.node.reset(state)


class Described:
    """The states of other subjects, only described."""

    def __init__(self, subjects):
        self.name, self.subjects = "describe_state", subjects

    @functools.cached_property
    def states(self):
        return [state for subject in self.subjects for state in subject.states if isinstance(state, dict)]

    def load(self, state):
        wp.describe_state(state)


class Merged(Subject):
    """The states of all ranks as a list."""

    def __init__(self, name, make, ranks, cuts=(0, 2, 60)):
        super().__init__(name, make, cuts)
        self.ranks = ranks

    def state_after(self, cut):
        of_ranks = [self.make(rank=rank, world_size=self.ranks) for rank in range(self.ranks)]
        for made in of_ranks:
            take(made, cut)
        return [made.state_dict() for made in of_ranks]

    def load(self, state):
        if not isinstance(state, list):
            return
        made = self.make(rank=0, world_size=1)
        made.load_state_dict(state)
        take(made, GIVEN)
        made.state_dict()


class Files:
    """Files of checkpoints with a right checksum, so that load() reads their contents."""

    def __init__(self, make, directory):
        self.name, self.make, self.directory = "checkpoint", make, directory
        self.states = []
        for cut in (0, 3):
            made = make()
            take(made, cut)
            path = checkpoint.save(directory, made, step=1) / "rank-0000-of-0001.json"
            self.states.append(json.loads(path.read_text()))
        self.path = path

    def load(self, state):
        sealed = (
            {name: value for name, value in state.items() if name not in ("format", "checksum")}
            if isinstance(state, dict)
            else {}
        )
        try:
            checksum = hashlib.blake2b(
                json.dumps(sealed, sort_keys=True, separators=(",", ":")).encode(), digest_size=16
            ).hexdigest()
            text = json.dumps({**state, "checksum": checksum} if isinstance(state, dict) else state)
        except (TypeError, ValueError):
            return  # no JSON
        self.path.write_text(text)
        made = self.make()
        checkpoint.load(self.directory, made)
        take(made, GIVEN)


def subjects(directory):
    """Every kind of pipeline, with its states."""
    urls = make_shards(directory / "a", shards=len(COUNTS), samples=COUNTS)
    others = make_shards(directory / "b", shards=3, samples=[4, 1, 6], seed=1)
    found = []
    for name, steps in chains.chains().items():
        found.append(Subject(f"pipe {name}", lambda steps=steps: chains.build(datapipes, steps, urls)))
        if name in ("Group", "All", "ShuffleInterleave"):
            found.append(Subject(f"node {name}", lambda steps=steps: Node(chains.build(nodes, steps, urls))))
            found.append(
                Subject(f"dataset {name}", lambda steps=steps: chains.build(datapipes, steps, urls).as_dataset())
            )

    def mixed(exhausted, step=None):
        pipe = wp.mix(
            {"a": samples(urls), "b": samples(others).shuffle_buffer(2)}, {"a": 3, "b": 1}, exhausted=exhausted
        )
        return pipe if step is None else step(pipe)

    for exhausted in ("stop", "drop", "repeat"):
        found.append(Subject(f"mix {exhausted}", lambda exhausted=exhausted: mixed(exhausted)))
        found.append(
            Subject(f"mix {exhausted}, shuffle", lambda exhausted=exhausted: mixed(exhausted).shuffle_buffer(3))
        )
    nested = lambda: wp.mix(  # noqa: E731
        {"m": wp.mix({"a": samples(urls), "b": samples(others)}), "c": samples(others, seed=5)}, exhausted="drop"
    )
    found.append(Subject("mix in mix", nested))
    found.append(
        Subject(
            "skip",
            lambda: (
                samples(urls).map_samples(_fragile, on_error="skip").batch_samples(2, drop_last=True, collate="list")
            ),
        )
    )
    found.append(Subject("torch", lambda: IterableWrapper(urls).open_shards().load_tar().group_by_key()))

    def loader(pipe, **options):
        return wp.PipeLoader(pipe, **{"batch_size": 2, "collate": "list", **options})

    def in_order():
        return chains.build(datapipes, chains.BY_OFFSETS, urls)

    counted = {"samples_per_shard": COUNTS}
    loaders = {
        "loader": lambda **options: loader(shuffled(urls), **{"lanes": 3, **options}),
        "loader counted": lambda **options: loader(
            samples(urls, **counted).shuffle_buffer(3), **{"lanes": 3, **options}
        ),
        "loader pad": lambda **options: loader(samples(urls, **counted), epoch_end="pad", **{"lanes": 2, **options}),
        "loader drop": lambda **options: loader(samples(urls, **counted), epoch_end="drop", **{"lanes": 4, **options}),
        "loader mix": lambda **options: loader(mixed("stop"), **{"lanes": 2, **options}),
        "loader interleave": lambda **options: loader(
            samples(urls, **counted).interleave_shards(2).shuffle_buffer(2), **{"lanes": 2, **options}
        ),
        "loader in order": lambda **options: loader(in_order(), **{"lanes": 2, **options}),
        "loader in order, drop": lambda **options: loader(in_order(), epoch_end="drop", **{"lanes": 4, **options}),
        "loader with_epoch": lambda **options: loader(
            samples(urls, **counted), epoch_end="drop", **{"lanes": 2, **options}
        ).with_epoch(batches=4),
    }
    for name, make in loaders.items():
        found.append(Subject(name, make, (0, 3, 7, 60)))
    for name in ("loader", "loader counted", "loader mix", "loader interleave", "loader in order"):
        make, repartitioned = loaders[name], []
        for cut in (2, 5):  # an epoch that is repartitioned twice
            state = make(lanes=2).state_dict()
            for lanes in (2, 3, 5):
                made = make(lanes=lanes)
                made.load_state_dict(state)
                take(made, cut)
                state = made.state_dict()
                repartitioned.append(state)
        again = Subject(f"{name} repartitioned", lambda make=make: make(lanes=4), ())
        same = Subject(f"{name} repartitioned, same lanes", lambda make=make: make(lanes=5), ())
        again.states, same.states = repartitioned, repartitioned
        found += [again, same]
        found.append(
            Merged(
                f"{name} merged",
                lambda make=make, **options: make(**{"lanes": None, "epoch_end": "exact", **options}),
                2,
            )
        )
    found.append(Files(loaders["loader counted"], directory / "checkpoints"))
    found.append(Described(found[::4]))
    return found


def _fragile(sample):
    if sample["__key__"][-1] in "25":
        raise ValueError("cannot")
    return sample


def places(value):
    """The paths to all values in a state, which may be nested deeply."""
    left = [((), value)]
    while left:
        here, value = left.pop()
        yield here
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left += [((*here, name), part) for name, part in parts]


def get(value, path):
    for name in path:
        value = value[name]
    return value


def mutated(state, others, rng: random.Random):
    """A damaged copy of a state, in which values of ``others`` may stand."""
    state = copy.deepcopy(state)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = list(places(state))
        if len(paths) == 1:
            return rng.choice(ODD)
        path = rng.choice(paths[1:])
        parent, name = get(state, path[:-1]), path[-1]
        value = parent[name]
        ways = [_odd, _swap, _cross, _odd, _remove, _double]
        ways += {dict: [_rename, _add], list: [_shuffle, _extend]}.get(type(value), [])
        ways += [_nudge] * 4 if isinstance(value, (int, float)) else []
        rng.choice(ways)(state, others, parent, name, rng)
    return state


def _odd(state, others, parent, name, rng):
    parent[name] = copy.copy(rng.choice(ODD[:-1]))


def _nudge(state, others, parent, name, rng):
    value = parent[name]
    if isinstance(value, int) and value.bit_length() > 100:
        return
    ways = [
        value + 1,
        value - 1,
        value * 2,
        value + 512,
        value + 256,
        -value,
        value + 10**6,
        float(value) if abs(value) < 1 << 60 else 0.0,
        bool(value),
    ]
    parent[name] = rng.choice([*ways, rng.randrange(40), str(value)[:50]])


def _remove(state, others, parent, name, rng):
    del parent[name]


def _double(state, others, parent, name, rng):
    if isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[name]))
    else:
        parent[rng.choice(["²", "01", "-1", "1", "x", "next", "offset", "position", "1000000", "99999999999"])] = (
            copy.deepcopy(parent[name])
        )


def _swap(state, others, parent, name, rng):
    path = rng.choice([path for path in places(state) if path])
    other = get(state, path[:-1])
    parent[name], other[path[-1]] = copy.deepcopy(other[path[-1]]), copy.deepcopy(parent[name])


def _cross(state, others, parent, name, rng):
    """The value of another state at a place of that name."""
    other = rng.choice(others)
    same = [path for path in places(other) if path and path[-1] == name]
    if same:
        parent[name] = copy.deepcopy(get(other, rng.choice(same)))


def _rename(state, others, parent, name, rng):
    value = parent[name]
    if value:
        key = rng.choice(list(value))
        value[rng.choice([*value, "²", "01", " 1", "7", "zzz"])] = value.pop(key)


def _add(state, others, parent, name, rng):
    value = parent[name]
    value[rng.choice(["next", "part", "opened", "left", "first", "number", "offset", "compression", "zzz", "²"])] = (
        copy.copy(rng.choice(ODD[:-1]))
    )


def _shuffle(state, others, parent, name, rng):
    rng.shuffle(parent[name])


def _extend(state, others, parent, name, rng):
    parent[name] += copy.deepcopy(parent[name]) if rng.random() < 0.5 else [copy.copy(rng.choice(ODD[:-1]))]


def attack(found, rng: random.Random, *, count, report):
    """Load ``count`` damaged states; calls ``report(subject, state, error)`` for each error that is
    not one of the package.
    """
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            subject = rng.choice(found)
            state = mutated(rng.choice(subject.states), subject.states, rng)
            try:
                subject.load(state)
            except wp.WdsError as error:
                str(error)
                refused += isinstance(error, wp.StateError)
            except Exception as error:
                report(subject, state, error)
    return refused
