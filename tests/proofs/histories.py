"""Random histories: random chains of all stages, cut, interrupted, closed and resumed at random,
against the run that nothing interrupted.

    python tests/proofs/histories.py [--rounds 1000] [--minutes M] [--seed N]
                                       [--kind same|ledger|equal]

``same``: a pipe, a node, a dataset or a PipeLoader resumes on the same lanes: the same items in
the same order. ``ledger``: PipeLoaders on changing numbers of ranks, lanes and workers: each sample
of the epoch once, with the same draws, and counts that add up. ``equal``: epoch_end="drop" and
"pad" likewise: ranks return equally many batches, all full. A failed history prints its number;
``--only NUMBER`` with the same seed repeats it. Exit code 1 if one failed.
"""

import gzip
import itertools
import json
import logging
import pathlib
import pickle
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass

import torchdata.nodes as torch_nodes
from amount import parser, rounds
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes.core.order import hash_text
from wds_pipes.core.stage import Stage
from wds_pipes.testing import make_shards

SIZES = (
    [3, 0, 5, 2, 9, 4, 6],
    [7, 11],
    [13],
    [1, 2, 0, 3, 1, 2, 0, 0, 4, 1, 2, 1, 3, 2],
    [0, 0, 3],
    [2, 1],
    [20, 1, 1, 17],
    [4] * 6,
)
NONE = object()


class Stop(Stage):
    """Ends before its source does; if it ``swallows``, it takes the last item and yields it not."""

    scope = "window"

    @dataclass(slots=True)
    class At:
        seen: int = 0

    order_options = ("count", "swallows")

    def __init__(self, source, count, swallows):
        super().__init__(source)
        self.count, self.swallows = count, swallows

    def run(self):
        at = self.at
        while at.seen < self.count and (item := next(self.source.items, NONE)) is not NONE:
            at.seen += 1
            if self.swallows and at.seen == self.count:
                return
            yield item


class Lag(Stage):
    """Holds an item, and changes a list that was made when it was built."""

    scope = "window"

    def __init__(self, source):
        super().__init__(source)
        self.before = None
        self.held = []

    def run(self):
        source, held = self.source, self.held
        held[:] = [next(source.items, NONE)]
        while held[0] is not NONE:
            after = source.mark()
            coming = next(source.items, NONE)
            self.before = after
            yield held[0]
            held[0] = coming
        self.before = source.mark()  # for the counts of the whole epoch

    def mark(self):
        return self._own(self.at), self.before or self.source.mark()


class Twice(Stage):
    """Yields each item twice."""

    scope = "window"

    @dataclass(slots=True)
    class At:
        half: int = 0

    def __init__(self, source):
        super().__init__(source)
        self.before = None

    def run(self):
        at, source = self.at, self.source
        self.before = source.mark()
        for item in source.items:
            if at.half == 0:
                at.half = 1
                yield item
            self.before, at.half = source.mark(), 0
            yield item
            self.before = source.mark()

    def mark(self):
        return self._own(self.at), self.before if self.at.half and self.before is not None else self.source.mark()


for kind in (Stop, Lag, Twice):
    wp.register_stage(kind)


class Trap:
    """Raises ``error`` at one of the next calls."""

    calls, error = 0, None

    @classmethod
    def set(cls, calls, error):
        cls.calls, cls.error = calls, error

    @classmethod
    def step(cls, item):
        if cls.error is not None:
            cls.calls -= 1
            if cls.calls <= 0:
                error, cls.error = cls.error, None
                raise error
        return item


def number_of(item):
    return int(item["__key__"]) if isinstance(item, dict) else len(canon(item))


def wanted(item):
    return number_of(item) % 5 != 2


def break_some(item):
    if number_of(item) % 6 == 1:
        raise ValueError("bad")
    return item


def draw(item, rng):
    value = int(rng.integers(1 << 30))
    return {**item, "draw": value} if isinstance(item, dict) else item


def keep_member(member):
    return not member.name.endswith("7.txt")


def bad_field(rng, number):
    return b"none" if number % 7 == 3 else b"%d" % number


def canon(item):
    """An item as text that can be compared."""
    if isinstance(item, dict):
        return f"{item.get('__key__')}/{item.get('draw', '')}/{','.join(sorted(item))}"
    if type(item) in (list, tuple):
        return [canon(part) for part in item]
    if hasattr(item, "url") and not hasattr(item, "name"):
        return str(item.url)
    return [str(part) for part in item[:2]] if isinstance(item, tuple) else repr(item)


def make_data(directory):
    """Collections of shards, whole and damaged: (urls, sizes, form)."""
    fields, found = {"txt": lambda rng, n: "x" * rng.randrange(900), "cls": bad_field}, []
    for (place, sizes), form in itertools.product(enumerate(SIZES), ("plain", "gz", "damaged")):
        urls = make_shards(f"{directory}/{place}-{form}", shards=len(sizes), samples=sizes, fields=fields)
        for shard, path in enumerate(map(pathlib.Path, urls)):
            data, middle = path.read_bytes(), path.stat().st_size // 1024 * 512
            if form == "gz":
                urls[shard] = f"{path}.gz"
                pathlib.Path(urls[shard]).write_bytes(gzip.compress(data, mtime=0))
                path.unlink()
            elif form == "damaged" and len(data) > 10240 and shard % 4 == 0:  # a block of other bytes
                path.write_bytes(data[:middle] + bytes(range(256)) * 2 + data[middle + 512 :])
            elif form == "damaged" and len(data) > 10240 and shard % 4 == 2:  # a cut
                path.write_bytes(data[: middle + 100])
        found.append((urls, sizes, form))
    return found


def listed(rng, urls, sizes, form, *, counted):
    options = {"seed": rng.randrange(50), "shuffle": rng.random() < 0.7}
    if rng.random() < 0.15:
        options["resampled"] = True
    if form != "damaged" and counted:
        options["samples_per_shard"] = sizes
    return wp.ShardList(urls, empty_check=False, **options)


def grouped(rng, data):
    urls, sizes, form = rng.choice(data)
    skip = {"on_error": "skip"} if form == "damaged" else {}
    pipe = listed(rng, urls, sizes, form, counted=rng.random() < 0.4)
    pipe = pipe.open_shards().load_tar(**skip)
    if rng.random() < 0.1:
        step, function = rng.choice(
            [("filter_samples", keep_member), ("map_samples", Trap.step), ("filter", keep_member)]
        )
        pipe = getattr(pipe, step)(function)
    fields = {"fields": rng.choice([["cls"], ["txt", "cls"]])} if rng.random() < 0.2 else {}
    pipe = pipe.group_by_key(**fields, **skip)
    return beside(rng, pipe, urls, sizes, form) if rng.random() < 0.2 else pipe


def beside(rng, pipe, urls, sizes, form, *, counted=True):
    """A join of a pipe and of another one over the same shards, which may lack keys."""
    options = {"on_error": "skip" if form == "damaged" else "raise", "empty_check": False}
    if form != "damaged" and counted:
        options["samples_per_shard"] = sizes
    other = wp.ShardList(urls, **options).open_shards().load_tar().group_by_key()
    other = other.rename_fields({"text": "txt", "class": "cls"})
    may_lack = form == "damaged" or not counted
    if may_lack:
        other = other.filter_samples(wanted)
    return wp.join({"a": pipe, "b": other}, on_missing=rng.choice(["skip", "none"]) if may_lack else "error")


STEPS = {  # random steps after a pipe, by name
    "shuffle": lambda rng, pipe: pipe.shuffle_buffer(
        rng.choice([1, 2, 3, 4, 5, 8, 20, 1000]), seed=rng.choice([None, 5])
    ),
    "filter": lambda rng, pipe: pipe.filter_samples(wanted),
    "map": lambda rng, pipe: pipe.map_samples(Trap.step),
    "skip": lambda rng, pipe: pipe.map_samples(break_some, on_error="skip", max_errors=rng.choice([None, 1000])),
    "draw": lambda rng, pipe: pipe.map_samples(draw),
    "decode": lambda rng, pipe: pipe.decode_by_ext(on_error="skip", partial=True),
    "interleave": lambda rng, pipe: pipe.interleave_shards(rng.randrange(1, 5)),
    "batch": lambda rng, pipe: pipe.batch_samples(rng.randrange(1, 5), collate="list", drop_last=rng.random() < 0.3),
    "tuple": lambda rng, pipe: pipe.to_tuple("__key__", "cls"),
    "torch map": lambda rng, pipe: pipe.map(Trap.step),
    "torch filter": lambda rng, pipe: pipe.filter(wanted),
    "torch batch": lambda rng, pipe: pipe.batch(rng.randrange(1, 4), drop_last=rng.random() < 0.3, wrapper_class=list),
    "torch collate": lambda rng, pipe: pipe.collate(list),
    "take": lambda rng, pipe: pipe.stop(rng.randrange(0, 12), swallows=False),
    "until": lambda rng, pipe: pipe.stop(rng.randrange(1, 12), swallows=True),
    "lag": lambda rng, pipe: pipe.lag(),
    "twice": lambda rng, pipe: pipe.twice(),
}
NO_DICTS_AFTER = ("batch", "torch batch", "torch collate", "tuple")
ANYWHERE = ["shuffle", "map", *sorted(STEPS.keys() - {"interleave", "decode", "tuple"})]  # these two more often


def extend(rng, pipe, most, *, first=True):
    """``pipe`` with up to ``most`` random steps; interleave_shards if they are the ``first``."""
    dicts = not any(step in repr(pipe) for step in ("batch", "collate", "to_tuple"))
    for place in range(rng.randrange(most + 1)):
        step = rng.choice([
            *ANYWHERE,
            *(["interleave"] * 2 if first and place < 3 else []),
            *(["decode", "tuple"] if dicts else []),
        ])  # fmt: skip
        pipe = STEPS[step](rng, pipe)
        dicts = dicts and step not in NO_DICTS_AFTER
    return pipe


def anything(rng, data, depth=0):
    """A random chain; the same for a generator in the same state."""
    chance = rng.random()
    if chance < 0.06 and depth == 0:
        urls, sizes, form = rng.choice([entry for entry in data if entry[2] != "damaged"])
        pipe = listed(rng, urls, sizes, form, counted=rng.random() < 0.3)
        opened = rng.choice(["ShardList", "open_shards", "load_tar"])
        pipe = pipe if opened == "ShardList" else pipe.open_shards()
        return pipe.load_tar() if opened == "load_tar" else pipe
    if chance >= 0.35 or depth == 2:
        return extend(rng, grouped(rng, data), 5)
    sources = {
        name: anything(rng, data, depth + 1) if rng.random() < 0.3 else extend(rng, grouped(rng, data), 2)
        for name in "abc"[: rng.randrange(1, 4)]
    }
    return extend(rng, mixed(rng, sources, rng.choice(["stop", "drop", "repeat"])), 4, first=False)


def mixed(rng, sources, exhausted):
    weights = [rng.randrange(1, 4) for _ in sources]
    by = rng.choice([None, size_of])
    return wp.mix(sources, weights=weights, by=by, exhausted=exhausted, seed=rng.randrange(9))


def size_of(item):
    """A quantity of an item that follows from its key, from 0 to 16."""
    key = item.get("__key__") if isinstance(item, dict) else None
    return hash_text(str(key)) % 17


# The same lanes: the same items

EPOCHS = 3
WORKERS = 0.0  # the share of histories with two workers
LONGEST = 400  # items of an epoch; one with more may have no end
KINDS = {"pipe": 3, "node": 3, "dataset": 1, "dataloader": 1, "stateful": 1, "loader": 6}  # with their weights
OURS = ("pipe", "dataset", "loader")  # those whose states and ends are this package's own
WRAPS = {  # nodes of torchdata after ours
    "": lambda node: node,
    "prefetch": lambda node: torch_nodes.Prefetcher(node, 2, snapshot_frequency=1),
    "batch": lambda node: torch_nodes.Batcher(node, 2, drop_last=False),
    "map": lambda node: torch_nodes.Mapper(node, same),
    "weighted": lambda node: torch_nodes.MultiNodeWeightedSampler(
        {"a": node}, {"a": 1.0}, torch_nodes.StopCriteria.FIRST_DATASET_EXHAUSTED
    ),
}


def same(item):
    return item


class Host:
    """Something that is iterated: how it is made."""

    def __init__(self, rng, data):
        [self.kind] = rng.choices(list(KINDS), KINDS.values())
        self.chain_seed, self.data = rng.randrange(1 << 40), data
        self.options, self.cut = {}, None
        self.wrap = rng.choice(["", *WRAPS]) if self.kind == "node" else ""
        if self.kind == "loader":
            world = rng.choice([1, 1, 1, 2, 3])
            self.options = {"rank": rng.randrange(world), "world_size": world, "epoch_end": "exact"}
            self.options["lanes"] = world * rng.randrange(1, 4)
            if rng.random() < 0.5:
                self.options |= {"batch_size": rng.randrange(1, 5), "collate": "list", "drop_last": rng.random() < 0.3}
            if rng.random() < 0.25 and world == 1:
                self.cut = rng.randrange(1, 8)
        has_workers = self.kind in ("loader", "stateful") and rng.random() < WORKERS
        self.workers = 2 if has_workers else 0

    def __str__(self):
        workers, cut = " 2 workers" if self.workers else "", " with_epoch" if self.cut else ""
        return f"{self.kind} {self.wrap}{workers}{cut}"

    def pipe(self):
        return anything(random.Random(self.chain_seed), self.data)

    def make(self, workers, *, whole_epochs=False):
        pipe = self.pipe()
        context = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        match self.kind:
            case "pipe":
                return pipe
            case "node":
                return torch_nodes.Loader(WRAPS[self.wrap](pipe.as_node()))
            case "dataset":
                return pipe.as_dataset()
            case "dataloader":  # the state of its dataset is taken beside it
                dataset = pipe.as_dataset()
                loader = DataLoader(dataset, batch_size=None)
                loader.state_dict, loader.load_state_dict = dataset.state_dict, dataset.load_state_dict
                return loader
            case "stateful":
                return StatefulDataLoader(pipe.as_dataset(), batch_size=None, **context)
        loader = wp.PipeLoader(pipe, **context, **self.options)
        return loader.with_epoch(batches=self.cut) if self.cut and not whole_epochs else loader


def close(loader):
    """End what iterates; of a pipe, its stream."""
    if isinstance(loader, wp.datapipes.WdsPipe):
        loader._stream.close()
    elif hasattr(loader, "close"):
        loader.close()


def whole_run(host):
    """The items of each epoch without an interruption; None if one may have no end."""
    loader = host.make(host.workers if host.kind == "stateful" else 0, whole_epochs=True)
    epochs = []
    for _ in range(EPOCHS):
        epochs.append([canon(item) for item in itertools.islice(loader, LONGEST + 1)])
        if len(epochs[-1]) > LONGEST:
            return None
    return epochs


class Interrupted:
    """The same run, cut, interrupted, closed and resumed at random; AssertionError where it differs
    from ``epochs``.
    """

    def __init__(self, rng, host, epochs, log):
        self.rng, self.host, self.epochs, self.log = rng, host, epochs, log
        self.flat = [item for epoch in epochs for item in epoch]
        self.starts = [sum(map(len, epochs[:epoch])) for epoch in range(EPOCHS + 1)]
        self.loader = host.make(host.workers)
        self.place = 0  # the next item of ``flat``
        self.given = 0  # items in this pass of with_epoch
        self.fresh = False  # a state was loaded, and not left by break, close or set_epoch
        self.left = False  # by break or close

    def is_over(self):
        """Whether the last epoch has begun."""
        return self.place > self.starts[EPOCHS - 1] or self.place == len(self.flat)

    def turn(self):
        """Take some items and stop in some way; returns whether there is more to do."""
        rng, begun = self.rng, self.place
        items, count = iter(self.loader), self.choose_count()
        self.log.append(f"at {self.place}: take {count}")
        if self.host.workers == 0 and self.host.wrap not in ("prefetch", "batch") and rng.random() < 0.3:
            Trap.set(rng.randrange(1, 12), rng.choice([KeyboardInterrupt("trap"), OSError("trap")]))
            self.log.append(f"  with {Trap.error!r} in {Trap.calls} calls")
        ended, broken = self.take(items, count)
        Trap.set(0, None)
        self.check_end(ended)
        if self.is_over():
            return False
        if self.host.kind == "loader":
            self.check_figures(broken)
        action = self.choose_action(begun, ended, broken)
        self.log.append(f"at {self.place}{' (ended)' if ended else ''}: {action}")
        self.left = action in ("break", "close")
        if self.left:
            self.leave(action, begun)
            return self.place < self.starts[EPOCHS - 1]
        if action == "epoch":
            self.set_epoch(waits=self.fresh and self.place == begun and not ended)
            return True
        self.resume(action)
        if self.host.kind in ("node", "stateful") and not ended and begun < self.place in self.starts:
            self.check_rest()
        return not self.is_over()

    def choose_count(self):
        """How many items to take: none, some, or about as many as are left of the epoch."""
        rng, chance = self.rng, self.rng.random()
        to_end = next((end for end in self.starts if end > self.place), self.place) - self.place
        count = rng.randrange(1, 12) if chance < 0.5 else max(0, to_end - rng.choice([0, 0, 1, 1, 2, 3, 5]))
        count = 0 if chance < 0.1 else count
        count += rng.choice([0, 0, 0, 1])  # over the end
        # Until an item is taken, a state stands where the iterator was left.
        return max(1, count) if self.left else count

    def take(self, items, count):
        """Take items; returns whether the iterator has ended, and whether an error broke it."""
        for _ in range(count):
            try:
                item = next(items, NONE)
            except (KeyboardInterrupt, OSError, RuntimeError) as error:
                if not re.search("trap|Caught|[Ii]nterrupt", str(error)):
                    raise
                self.log.append(f"at {self.place}: {type(error).__name__}: {error!s:.60}")
                if not self.goes_on(items, error):
                    return False, True
                continue
            if item is NONE:
                return True, False
            self.check(item)
            if self.place > self.starts[EPOCHS - 1]:
                break
        return False, False

    def goes_on(self, items, error):
        """Sometimes, try the iterator again after an error; returns whether it continues."""
        if self.rng.random() < 0.5:
            return False
        try:
            again = next(items, NONE)
        except (Exception, KeyboardInterrupt):
            return False
        if again is NONE:
            if self.host.kind in OURS:
                raise AssertionError("an iterator that was interrupted says that it has ended") from error
            return False
        self.check(again)
        if self.host.kind != "loader":
            raise AssertionError("goes on after an interrupt") from error
        return True

    def check(self, item):
        """An item is the next one."""
        item, place = canon(item), self.place
        if place >= len(self.flat):
            raise AssertionError(f"item {place} is one too many: {item}")
        if item != self.flat[place]:
            raise AssertionError(f"item {place} is {item!s:.300}, not {self.flat[place]!s:.300}")
        self.place, self.given = place + 1, self.given + 1

    def check_end(self, ended):
        """An epoch, or a pass of with_epoch, ends where it should."""
        cut = self.host.cut
        if cut and (self.given > cut or (ended and self.given != cut)):
            raise AssertionError(f"a pass of with_epoch({cut}) gave {self.given}, at {self.place}")
        if ended and not cut and self.place not in self.starts:
            raise AssertionError(f"ends at {self.place}, not at one of {self.starts}")
        if ended:
            self.given = 0

    def check_figures(self, broken):
        """What stats() and remaining() say of a PipeLoader."""
        stats, cut, given = self.loader.stats(), self.host.cut, self.given
        if any(value < 0 for value in stats.values()):
            raise AssertionError(f"stats: {stats}")
        if cut and given and not broken and self.place < self.starts[EPOCHS - 1]:
            remaining = self.loader.remaining()
            if remaining != (cut - given if given < cut else cut):
                raise AssertionError(f"remaining: {remaining} of {cut} after {given}")

    def choose_action(self, begun, ended, broken):
        """What to do with the iterator, unless the result of that is undefined."""
        host, place = self.host, self.place
        action = self.rng.choice(["new", "new", "new", "same", "break", "close", "epoch", "twice"])
        inside = begun < place < self.starts[-1] and place not in self.starts and not ended
        if action in ("break", "close") and (broken or host.cut or host.kind not in OURS or not inside):
            return "new"
        if action == "epoch" and (host.cut or host.kind not in OURS or broken):
            return "new" if broken else "same"
        return action

    def leave(self, action, begun):
        """Leave the iterator within an epoch: the next one begins the next epoch."""
        if action == "close":
            close(self.loader)
        self.place, self.fresh = next(start for start in self.starts if start > begun), False

    def set_epoch(self, *, waits):
        """Set an epoch, which begins anew unless a loaded state ``waits`` that stands in it."""
        epoch, now = self.rng.randrange(EPOCHS - 1), self.loader.state_dict()["epoch"]
        self.loader.set_epoch(epoch)
        nothing_left = self.host.kind == "loader" and waits and self.place == self.starts[epoch + 1]
        if (not waits or epoch != now) and not nothing_left:
            self.place, self.fresh = self.starts[epoch], False

    def resume(self, action):
        """Load the state into the same loader, into a new one, or into two, one after the other."""
        host, state = self.host, self.loader.state_dict()
        state = pickle.loads(pickle.dumps(state)) if host.wrap == "weighted" else json.loads(json.dumps(state))
        if host.cut and self.given >= host.cut:
            self.given = 0
        self.fresh = True
        if action == "same":
            self.loader.load_state_dict(state)
            return
        if host.workers and host.kind == "loader":
            self.loader.close()
        for _ in range(2 if action == "twice" else 1):
            in_process = host.kind == "loader" and self.rng.random() < 0.5
            self.loader = host.make(0 if in_process else host.workers)
            self.loader.load_state_dict(state)
            again = self.loader.state_dict()
            if host.kind in OURS and again != state:
                raise AssertionError(f"another state after it was loaded: {state} {again}")

    def check_rest(self):
        """To torchdata, a state after the last item means an empty rest, or the next epoch."""
        rest, place = [canon(item) for item in self.loader], self.place
        if rest and rest != self.epochs[self.starts.index(place)] and self.flat[place : place + len(rest)] != rest:
            raise AssertionError(f"at the end, gives {rest}")
        self.place += len(rest)


def same_history(rng, data, told):
    host = Host(rng, data)
    close(host.make(0))  # it may be refused
    told["host"], told["pipe"] = str(host), repr(host.pipe())
    told["options"] = host.options | {"cut": host.cut}
    epochs = whole_run(host)
    if epochs is None:
        return "endless"
    told["epochs"], told["log"] = [len(epoch) for epoch in epochs], []
    if host.cut and not all(epochs):
        return "with_epoch over empty epochs"
    run = Interrupted(rng, host, epochs, told["log"])
    for _ in range(rng.randrange(2, 6)):
        if not run.turn():
            break
    close(run.loader)
    return host.kind


# Other lanes: each sample once


def leaves(item):
    return [leaf for part in item for leaf in leaves(part)] if isinstance(item, list) else [item]


def name(sample):
    fields = ",".join(sorted(field for field in sample if field != "__padding__"))
    return f"{sample['__url__']}#{sample['__key__']}#{sample.get('draw', '')}#{fields}"


def ledger_chain(rng, data, form, *, exact):
    """A chain, how many samples its shards have, and whether it yields batches."""
    names = ["shuffle", "shuffle", "draw", *(["filter", "skip", "decode", "lag", "torch map"] if exact else [])]
    total = 0

    def base():
        nonlocal total
        urls, sizes, _ = rng.choice([entry for entry in data if entry[2] == form])
        total += sum(sizes)
        counted = form != "damaged" and (not exact or rng.random() < 0.5)
        options = {"samples_per_shard": sizes} if counted else {}
        skip = {"on_error": "skip"} if form == "damaged" else {}
        options |= {"shuffle": rng.random() < 0.8, "seed": rng.randrange(99)}
        pipe = wp.ShardList(urls, empty_check=False, **options).open_shards().load_tar(**skip).group_by_key(**skip)
        return beside(rng, pipe, urls, sizes, form, counted=counted) if rng.random() < 0.25 else pipe

    def extended(pipe, most, *, interleave=True):
        for _ in range(rng.randrange(most + 1)):
            step = rng.choice([*names, "interleave"] if interleave else names)
            pipe = STEPS[step](rng, pipe)
            interleave = interleave and step != "interleave"
        return pipe

    if exact and rng.random() < 0.25:
        # sources over the same collection have the same keys: distinguished by URL
        sources = {name: extended(base(), 2) for name in rng.sample("abc", rng.randrange(1, 4))}
        pipe = extended(mixed(rng, sources, "drop"), 3, interleave=False)
    else:
        pipe = extended(base(), 4)
    batched = exact and rng.random() < 0.3
    if batched:
        pipe = pipe.batch_samples(rng.randrange(1, 4), collate="list")
        if rng.random() < 0.3:
            pipe = pipe.shuffle_buffer(rng.randrange(1, 4))
    return pipe, total, batched


class Ledger:
    """Two epochs over PipeLoaders on changing numbers of ranks, lanes and workers; it raises
    AssertionError where they differ from those of the pipe alone.
    """

    def __init__(self, rng, data, told, mode):
        self.rng, self.data, self.mode = rng, data, mode
        self.form = rng.choice(["plain", "gz", "damaged"] if mode == "exact" else ["plain", "gz"])
        self.chain_seed, self.log = rng.randrange(1 << 40), []
        once, self.total, self.batched = self.build()
        text = repr(once)
        told["pipe"], told["log"] = text, self.log
        # as documented, a shuffle of batches delivers to itself
        self.delivers_early = self.batched and ".shuffle_buffer" in text.rpartition("batch_samples")[2]
        first = list(map(name, leaves(list(once))))
        self.first_counts = Counter(once.counts())
        self.expected = [first, list(map(name, leaves(list(once))))]  # of each epoch
        self.size = rng.randrange(1, 5)
        self.states, self.epoch, self.got = None, 0, []
        self.outcome = f"{mode} {self.form}"

    def build(self):
        return ledger_chain(random.Random(self.chain_seed), self.data, self.form, exact=self.mode == "exact")

    def turn(self):
        """Continue on other ranks, lanes and workers; returns whether there is more to do."""
        rng, loaders = self.rng, self.start()
        remaining = [loader.remaining() for loader in loaders]
        given, is_through = self.take(loaders, most=rng.choice([0, 1, 1, 2, 2, 3, 5, 8, 1000]))
        if is_through and any(left not in (None, count) for left, count in zip(remaining, given)):
            raise AssertionError(f"ranks gave {given} batches, and remaining() was {remaining}")
        counts = Counter()
        for loader in loaders:
            counts.update(loader.counts())
            if any(value < 0 for value in loader.stats().values()):
                raise AssertionError(f"stats: {loader.stats()}")
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        self.ranks = len(loaders)
        for loader in loaders:
            loader.close()
        ended = is_through or all(lane["ended"] for state in states for lane in state["lanes"].values())
        self.log.append(f"  ended: {ended}, given {given}, counts {dict(counts)}")
        self.check_so_far(counts, ended)
        epochs = {state["epoch"] for state in states}
        if len(epochs) > 1:  # a rank is through with the epoch before others: not compared further
            self.outcome = "uneven"
            return False
        if ended or epochs == {self.epoch + 1}:
            self.check_epoch(counts)
            self.got, self.epoch = [], self.epoch + 1
        self.states = wp.merge_states(states) if rng.random() < 0.5 else states
        return self.epoch < 2

    def start(self):
        """The loaders of all ranks, which continue in the epoch that they should."""
        rng, options = self.rng, {}
        ranks, lanes_each = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
        if not self.batched:
            other_size = self.mode == "exact" and rng.random() < 0.5
            options |= {"batch_size": rng.randrange(1, 5) if other_size else self.size, "collate": "list"}
        if rng.random() < WORKERS:
            options |= {"num_workers": 2, "multiprocessing_context": "fork"}
        if "num_workers" in options or rng.random() < 0.9:
            options["lanes"] = ranks * lanes_each
        self.log.append(f"{ranks} ranks, {options}")
        loaders = [
            wp.PipeLoader(self.build()[0], rank=rank, world_size=ranks, epoch_end=self.mode, **options)
            for rank in range(ranks)
        ]
        for loader in loaders if self.states is not None else ():
            loader.load_state_dict(self.states)
        now = {loader.state_dict()["epoch"] for loader in loaders}
        if now != {self.epoch}:
            raise AssertionError(f"ranks begin in epochs {now}, not in {self.epoch}")
        return loaders

    def take(self, loaders, most):
        """Take batches from each rank in turn; returns how many, and whether all have ended."""
        given, running = [0] * len(loaders), dict(enumerate(map(iter, loaders)))
        for _ in range(most):
            for rank, items in list(running.items()):
                batch = next(items, NONE)
                if batch is NONE:
                    del running[rank]
                    continue
                given[rank] += 1
                if self.mode != "exact" and len(batch) != self.size:
                    raise AssertionError(f"a batch of {len(batch)}, not {self.size}")
                self.got += [name(sample) for sample in leaves(batch) if not sample.get("__padding__")]
        if self.mode != "exact" and len(set(given)) > 1:
            raise AssertionError(f"ranks gave {given} batches, and ranks {list(running)} go on")
        return given, not running

    def check_so_far(self, counts, ended):
        """No sample came twice, and what was delivered is what was given."""
        expected, delivered = self.expected[self.epoch], counts["delivered"]
        twice = [one for one, count in Counter(self.got).items() if count > 1]
        if twice and len(set(expected)) == len(expected):
            raise AssertionError(f"twice: {twice[:4]}")
        early = self.delivers_early and not ended and delivered < len(self.got)
        if self.mode == "exact" and delivered != len(self.got) and not early:
            raise AssertionError(f"counts {dict(counts)}, and {len(self.got)} were given")

    def check_epoch(self, counts):
        """The samples and the counts of an epoch that is over."""
        got, expected = Counter(self.got), Counter(self.expected[self.epoch])
        lost, more = expected - got, got - expected
        if more or (lost and self.mode != "drop"):
            raise AssertionError(f"lost {list(lost)[:3]} ({len(lost)}), too many {list(more)[:3]} ({len(more)})")
        if self.mode == "exact" and self.epoch == 0 and +counts != +self.first_counts:
            raise AssertionError(f"counts {dict(counts)}, not {dict(self.first_counts)}")
        accounted = sum(counts[what] for what in ("delivered", "dropped", "filtered", "skipped"))
        if self.mode == "drop" and accounted != self.total:
            raise AssertionError(f"counts {dict(counts)} of {self.total}")
        if self.mode == "drop" and counts["dropped"] >= self.ranks * self.size:
            raise AssertionError(f"{self.ranks} ranks dropped {counts['dropped']}, in batches of {self.size}")


def ledger_history(rng, data, told, mode):
    ledger = Ledger(rng, data, told, mode)
    for _ in range(rng.randrange(2, 7)):
        if not ledger.turn():
            break
    return ledger.outcome


def main():
    known = parser(__doc__, 1000)
    known.add_argument("--kind", choices=["same", "ledger", "equal"])
    known.add_argument("--only", type=int, help="the number of a single history")
    known.add_argument("--workers", type=float, default=0.0, help="how many of the histories have two workers")
    known.add_argument("--most", type=int, default=10, help="stop after so many failures")
    args = known.parse_args()
    global WORKERS
    WORKERS = args.workers
    warnings.simplefilter("ignore")
    logging.getLogger("wds_pipes").setLevel(logging.ERROR)
    tally, failed = Counter(), 0
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        data = make_data(directory)
        for number in rounds(args) if args.only is None else [args.only]:
            rng, told = random.Random(f"{args.seed} {number}"), {}
            kind = args.kind or rng.choice(["same", "same", "same", "ledger", "equal"])
            try:
                if kind == "same":
                    tally[f"same {same_history(rng, data, told)}"] += 1
                else:
                    mode = "exact" if kind == "ledger" else rng.choice(["drop", "pad"])
                    tally[ledger_history(rng, data, told, mode)] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and "trap" not in str(error):
                    raise
                if not told and isinstance(error, (TypeError, ValueError, wp.StateError)):
                    tally[f"refused {type(error).__name__}: {error!s:.60}"] += 1
                    continue
                failed += 1
                report(args, number, kind, told)
            finally:
                Trap.set(0, None)
            if failed >= args.most:
                break
    for what, count in sorted(tally.items()):
        print(f"{count:6} {what}")
    print(f"histories={tally.total() + failed} failed={failed} seed={args.seed}")
    return int(failed > 0)


def report(args, number, kind, told):
    """Print a history that failed."""
    same_kind = f" --kind {args.kind}" if args.kind else ""
    print(f"--- history {number} failed: --seed {args.seed} --only {number}{same_kind}  ({kind})")
    for what, value in told.items():
        print(f"    {what}: " + ("\n      ".join(["", *value]) if what == "log" else str(value)))
    print("    " + "    ".join(traceback.format_exc().splitlines(keepends=True)[-6:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
