"""Pipelines of every kind with states of them, and ways to damage a state: for the tests and the
fuzzing of hostile states.
"""

import copy
import functools
import hashlib
import itertools
import json
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
ODD = [None, True, False, -1, 0, 1, 2, 7, 511, 512, 513, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**10, -(1 << 70)]
ODD += [10**5000, 0.5, float("nan"), float("inf")]
ODD += ["", "0", "1", "-1", "01", " 1", "²", "gz", "x" * 500, "\ud800", [], [0], [[0, 10**9]], {}, {"0": 0}, {"²": {}}]
ODD += [b"1", (1,), {1: 1}, {2}, 1j, object()]
NEW_NAMES = [
    "²",
    "01",
    "-1",
    "1",
    "x",
    "next",
    "offset",
    "position",
    "1000000",
    "99999999999",
    "part",
    "opened",
    "left",
]
NEW_NAMES += ["first", "number", "compression", " 1", "7", "zzz"]


class Subject:
    """A kind of pipeline.

    Args:
        name: for people.
        make_states: returns states of it; it is called when they are needed first.
        load: loads a state and takes some items.
    """

    def __init__(self, name, make_states, load):
        self.name, self.make_states, self.load = name, make_states, load

    @functools.cached_property
    def states(self):
        return self.make_states()


def take(made, count):
    """Take some items, if there are so many."""
    for _ in itertools.islice(made, count):
        pass


def states_of(make, cuts):
    """The states after so many items."""
    states = []
    for cut in cuts:
        made = make()
        take(made, cut)
        states.append(made.state_dict())
    return states


def pipeline(name, make, make_states=None, cuts=(0, 1, 4, 9, 60)):
    """A pipeline that ``make`` builds, with its states at some cuts, or others."""

    def load(state):
        made = make()
        before = made.state_dict()
        try:
            made.load_state_dict(state)
        except wp.StateError:
            assert made.state_dict() == before, "it has changed"
            raise
        made.state_dict()
        take(made, GIVEN)
        made.state_dict()

    return Subject(name, make_states or (lambda: states_of(make, cuts)), load)


def merged(name, make, ranks):
    """A PipeLoader that loads the states of all ranks as a list."""
    options = {"lanes": None, "epoch_end": "exact", "world_size": ranks}

    def make_states():
        of_ranks = [states_of(lambda rank=rank: make(rank=rank, **options), (0, 2, 60)) for rank in range(ranks)]
        return [list(each) for each in zip(*of_ranks)]

    return pipeline(name, lambda: make(lanes=None, epoch_end="exact"), make_states)


def repartitioned(make):
    """States of an epoch that is repartitioned twice."""
    states = []
    for cut in (2, 5):
        state = make(lanes=2).state_dict()
        for lanes in (2, 3, 5):
            made = make(lanes=lanes)
            made.load_state_dict(state)
            take(made, cut)
            state = made.state_dict()
            states.append(state)
    return states


def checkpoint_files(make, directory):
    """Files of checkpoints with a right checksum, so that load() reads their contents."""
    states = []
    for cut in (0, 3):
        made = make()
        take(made, cut)
        path = checkpoint.save(directory, made, step=1) / "rank-0000-of-0001.json"
        states.append(json.loads(path.read_text()))

    def load(state):
        try:
            if isinstance(state, dict):
                sealed = {name: value for name, value in state.items() if name not in ("format", "checksum")}
                text = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
                state = {**state, "checksum": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}
            path.write_text(json.dumps(state))
        except (TypeError, ValueError):
            return  # no JSON
        made = make()
        checkpoint.load(directory, made)
        take(made, GIVEN)

    return Subject("checkpoint", lambda: states, load)


class Node:
    """A node as something to iterate."""

    def __init__(self, node):
        self.node, self.state_dict, self.load_state_dict = node, node.state_dict, node.reset

    def __iter__(self):
        return iter(self.node)


def subjects(directory):
    """Every kind of pipeline, with its states."""
    urls = make_shards(directory / "a", shards=len(COUNTS), samples=COUNTS)
    others = make_shards(directory / "b", shards=3, samples=[4, 1, 6], seed=1)
    pipelines = {}
    for name, steps in chains.chains().items():
        build = lambda host, steps=steps: chains.build(host, steps, urls)  # noqa: E731
        pipelines[f"pipe {name}"] = lambda build=build: build(datapipes)
        if name in ("Group", "All", "ShuffleInterleave"):
            pipelines[f"node {name}"] = lambda build=build: Node(build(nodes))
            pipelines[f"dataset {name}"] = lambda build=build: build(datapipes).as_dataset()

    def mixed(exhausted):
        sources = {"a": samples(urls), "b": samples(others).shuffle_buffer(2)}
        return wp.mix(sources, {"a": 3, "b": 1}, exhausted=exhausted)

    for exhausted in ("stop", "drop", "repeat"):
        pipelines[f"mix {exhausted}"] = lambda exhausted=exhausted: mixed(exhausted)
        pipelines[f"mix {exhausted}, shuffle"] = lambda exhausted=exhausted: mixed(exhausted).shuffle_buffer(3)
    pipelines["mix in mix"] = lambda: wp.mix(
        {"m": wp.mix({"a": samples(urls), "b": samples(others)}), "c": samples(others, seed=5)}, exhausted="drop"
    )
    pipelines["mix by a schedule"] = lambda: wp.mix(
        {"a": samples(urls), "b": samples(others)}, schedule=lambda n: {"a": 1, "b": 1 + n / 100}, exhausted="drop"
    )
    pipelines["join"] = lambda: wp.join({"a": samples(urls), "b": samples(urls, shuffle=False)}, prefix=True)
    pipelines["skip"] = lambda: (
        samples(urls).map_samples(_fragile, on_error="skip").batch_samples(2, drop_last=True, collate="list")
    )
    pipelines["torch"] = lambda: IterableWrapper(urls).open_shards().load_tar().group_by_key()
    found = [pipeline(name, make) for name, make in pipelines.items()]

    def loader(pipe, **usual):
        return lambda **options: wp.PipeLoader(pipe(), **{"batch_size": 2, "collate": "list", **usual, **options})

    counted = lambda: samples(urls, samples_per_shard=COUNTS)  # noqa: E731
    in_order = lambda: chains.build(datapipes, chains.BY_OFFSETS, urls)  # noqa: E731
    loaders = {
        "loader": loader(lambda: shuffled(urls), lanes=3),
        "loader counted": loader(lambda: counted().shuffle_buffer(3), lanes=3),
        "loader pad": loader(counted, epoch_end="pad", lanes=2),
        "loader drop": loader(counted, epoch_end="drop", lanes=4),
        "loader mix": loader(lambda: mixed("stop"), lanes=2),
        "loader interleave": loader(lambda: counted().interleave_shards(2).shuffle_buffer(2), lanes=2),
        "loader in order": loader(in_order, lanes=2),
        "loader in order, drop": loader(in_order, epoch_end="drop", lanes=4),
        "loader ledger": loader(counted, ledger=True, lanes=2),
        "loader loop": loader(lambda: shuffled(urls), epoch_end="loop", lanes=3),
        "loader with_epoch": lambda: loader(counted, epoch_end="drop", lanes=2)().with_epoch(batches=4),
    }
    found += [pipeline(name, make, cuts=(0, 3, 7, 60)) for name, make in loaders.items()]
    for name in ("loader", "loader counted", "loader mix", "loader interleave", "loader in order", "loader loop"):
        make = loaders[name]
        states = functools.cache(lambda make=make: repartitioned(make))
        found.append(pipeline(f"{name} repartitioned", lambda make=make: make(lanes=4), states))
        found.append(pipeline(f"{name} repartitioned, same lanes", lambda make=make: make(lanes=5), states))
        found.append(merged(f"{name} merged", make, 2))
    found.append(checkpoint_files(loaders["loader counted"], directory / "checkpoints"))
    described = found[::4]
    of_some = lambda: [state for subject in described for state in subject.states if isinstance(state, dict)]  # noqa: E731
    return [*found, Subject("describe_state", of_some, wp.describe_state)]


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


# Values that no value of a type can be replaced by.
WRONG = {
    int: [-1, 1 << 70, 0.5, "1", None, []],
    bool: [2, "no", None],
    str: [5, None, []],
    list: [5, "x", {}],
    dict: [5, "x", []],
    type(None): [0.5, {1: 1}],
}
NOT_READ = ("use DCPState", "use DCPState.")


def damages(state):
    """Yield what was done, and a copy of a state with one value of a wrong type or range, or with
    an entry too many or too few. ``what`` is the same for the same place in states of any kind.
    """
    for path in places(state):
        if not path or path[0] in NOT_READ or (len(path) > 1 and path[1] in NOT_READ):
            continue
        value = get(state, path)
        names = [name for name in path if not str(name).isdigit()]
        what = f"{' '.join(names)} {sorted(value) if isinstance(value, dict) else type(value).__name__}"
        beside = sorted(get(state, path[:-1])) if isinstance(path[-1], str) else ""
        for wrong in WRONG[type(value)]:
            if names[-1:] == ["url"] and wrong is None:
                continue  # it is shown, and not used
            yield f"{what} beside {beside}: {wrong!r}", replaced(state, path, wrong)
        if isinstance(value, dict) and {*names} & {"position", "counts", "partition", "ledger"}:
            yield f"{what}: another name", replaced(state, path, {**value, "zzz": 1})
        if isinstance(value, list) and names[-1:] == ["position"]:
            yield f"{what}: longer", replaced(state, path, [*value, value[-1]])
            yield f"{what}: shorter", replaced(state, path, value[:-1])


def replaced(state, path, value):
    """A copy of a state with another value at a place."""
    state = copy.deepcopy(state)
    get(state, path[:-1])[path[-1]] = value
    return state


def mutated(state, others, rng):
    """A damaged copy of a state, in which values of ``others`` may stand."""
    state = copy.deepcopy(state)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = list(places(state))
        if len(paths) == 1:
            return rng.choice(ODD)
        path = rng.choice(paths[1:])
        value = get(state, path)
        ways = ["odd", "odd", "swap", "cross", "remove", "double"]
        ways += ["nudge"] * 4 if isinstance(value, (int, float)) else []
        ways += {dict: ["rename", "add"], list: ["shuffle", "extend"]}.get(type(value), [])
        damage(rng.choice(ways), state, path, others, rng)
    return state


def damage(way, state, path, others, rng):
    """Damage one value of a state."""
    parent, name = get(state, path[:-1]), path[-1]
    value, odd = parent[name], copy.copy(rng.choice(ODD[:-1]))
    match way:
        case "odd":
            parent[name] = odd
        case "swap":  # with another value of the state
            other = rng.choice([other for other in places(state) if other])
            other_parent = get(state, other[:-1])
            parent[name], other_parent[other[-1]] = copy.deepcopy(other_parent[other[-1]]), copy.deepcopy(value)
        case "cross":  # the value of another state at a place of that name
            other = rng.choice(others)
            same = [place for place in places(other) if place and place[-1] == name]
            if same:
                parent[name] = copy.deepcopy(get(other, rng.choice(same)))
        case "remove":
            del parent[name]
        case "double" if isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(value))
        case "double":
            parent[rng.choice(NEW_NAMES)] = copy.deepcopy(value)
        case "nudge" if not isinstance(value, int) or value.bit_length() <= 100:
            near = [value + 1, value - 1, value * 2, value + 512, value + 256, -value, value + 10**6, bool(value)]
            near.append(float(value) if abs(value) < 1 << 60 else 0.0)
            parent[name] = rng.choice([*near, rng.randrange(40), str(value)[:50]])
        case "rename" if value:
            key = rng.choice(list(value))
            value[rng.choice([*value, *NEW_NAMES])] = value.pop(key)
        case "add":
            value[rng.choice(NEW_NAMES)] = odd
        case "shuffle":
            rng.shuffle(value)
        case "extend":
            value += copy.deepcopy(value) if rng.random() < 0.5 else [odd]


def attack(found, rng, *, count, report):
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
