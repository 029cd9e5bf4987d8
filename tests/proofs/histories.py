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

import collections
import gzip
import json
import logging
import pathlib
import pickle
import random
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass

import torchdata.nodes as torch_nodes
from amount import parser, rounds
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
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


class Take(Stage):
    """Ends before its source does."""

    scope = "window"

    @dataclass(slots=True)
    class At:
        taken: int = 0

    order_options = ("count",)

    def __init__(self, source, count):
        super().__init__(source)
        self.count = count

    def run(self):
        at = self.at
        while at.taken < self.count and (item := next(self.source.items, NONE)) is not NONE:
            at.taken += 1
            yield item


class Until(Stage):
    """Takes an item that it does not yield, and ends."""

    scope = "window"

    @dataclass(slots=True)
    class At:
        seen: int = 0

    order_options = ("count",)

    def __init__(self, source, count):
        super().__init__(source)
        self.count = count

    def run(self):
        for item in self.source.items:
            self.at.seen += 1
            if self.at.seen == self.count:
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


for kind in (Take, Until, Lag, Twice):
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


class Data:
    """Collections of shards, whole and damaged."""

    def __init__(self, directory):
        self.found = []
        for place, sizes in enumerate(SIZES):
            for form in ("plain", "gz", "damaged"):
                urls = make_shards(
                    f"{directory}/{place}-{form}",
                    shards=len(sizes),
                    samples=sizes,
                    fields={"txt": lambda rng, n: "x" * rng.randrange(900), "cls": bad_field},
                )
                for shard, url in enumerate(urls):
                    path = pathlib.Path(url)
                    data = path.read_bytes()
                    if form == "gz":
                        pathlib.Path(url + ".gz").write_bytes(gzip.compress(data, mtime=0))
                        path.unlink()
                        urls[shard] = url + ".gz"
                    elif form == "damaged" and shard % 2 == 0 and len(data) > 10240:
                        at = (len(data) // 1024) * 512
                        path.write_bytes(
                            data[:at] + bytes(range(256)) * 2 + data[at + 512 :] if shard % 4 == 0 else data[: at + 100]
                        )
                self.found.append((urls, sizes, form))


def listed(rng, urls, sizes, form, *, counted):
    options = {"seed": rng.randrange(50), "shuffle": rng.random() < 0.7}
    if rng.random() < 0.15:
        options["resampled"] = True
    if form != "damaged" and counted:
        options["samples_per_shard"] = sizes
    return wp.ShardList(urls, empty_check=False, **options)


def grouped(rng, data, *, counted=None):
    urls, sizes, form = rng.choice(data.found)
    pipe = listed(rng, urls, sizes, form, counted=rng.random() < 0.4 if counted is None else counted)
    skip = {"on_error": "skip"} if form == "damaged" else {}
    pipe = pipe.open_shards(buffer_bytes=rng.choice([512, 1 << 20])).load_tar(**skip)
    if rng.random() < 0.1:
        pipe = rng.choice(
            [
                lambda: pipe.filter_samples(keep_member),
                lambda: pipe.map_samples(Trap.step),
                lambda: pipe.filter(keep_member),
            ]
        )()
    fields = {"fields": rng.choice([["cls"], ["txt", "cls"]])} if rng.random() < 0.2 else {}
    return pipe.group_by_key(**fields, **skip)


def extend(rng, pipe, most, *, torch=True, own=True, first=True):
    """``pipe`` with up to ``most`` random steps after it."""
    text = repr(pipe)
    dicts = not any(step in text for step in ("batch", "collate", "to_tuple"))
    for place in range(rng.randrange(most + 1)):
        steps = ["shuffle", "shuffle", "filter", "map", "skip", "draw", "batch", "trap"]
        steps += ["torch map", "torch filter", "torch batch", "torch collate"] if torch else []
        steps += ["take", "until", "lag", "twice"] if own else []
        steps += ["interleave"] * 2 if first and place < 3 else []
        steps += ["decode", "tuple"] if dicts else []
        step = rng.choice(steps)
        if step == "shuffle":
            pipe = pipe.shuffle_buffer(rng.choice([1, 2, 3, 4, 8, 20, 1000]), seed=rng.choice([None, 5]))
        elif step == "filter":
            pipe = pipe.filter_samples(wanted)
        elif step in ("map", "trap"):
            pipe = pipe.map_samples(Trap.step)
        elif step == "skip":
            pipe = pipe.map_samples(break_some, on_error="skip", max_errors=rng.choice([None, 1000]))
        elif step == "draw":
            pipe = pipe.map_samples(draw)
        elif step == "batch":
            pipe, dicts = pipe.batch_samples(rng.randrange(1, 5), collate="list", drop_last=rng.random() < 0.3), False
        elif step == "torch map":
            pipe = pipe.map(Trap.step)
        elif step == "torch filter":
            pipe = pipe.filter(wanted)
        elif step == "torch batch":
            pipe, dicts = pipe.batch(rng.randrange(1, 4), drop_last=rng.random() < 0.3, wrapper_class=list), False
        elif step == "torch collate":
            pipe, dicts = pipe.collate(list), False
        elif step == "take":
            pipe = pipe.take(rng.randrange(0, 12))
        elif step == "until":
            pipe = pipe.until(rng.randrange(1, 12))
        elif step == "lag":
            pipe = pipe.lag()
        elif step == "twice":
            pipe = pipe.twice()
        elif step == "interleave":
            pipe = pipe.interleave_shards(rng.randrange(1, 5))
        elif step == "decode":
            pipe = pipe.decode_by_ext(on_error="skip", partial=True)
        elif step == "tuple":
            pipe, dicts = pipe.to_tuple("__key__", "cls"), False
    return pipe


def anything(rng, data, depth=0):
    """A random chain; the same for a generator in the same state."""
    chance = rng.random()
    if chance < 0.06 and depth == 0:
        urls, sizes, form = rng.choice([entry for entry in data.found if entry[2] != "damaged"])
        pipe = listed(rng, urls, sizes, form, counted=rng.random() < 0.3)
        if rng.random() < 0.7:
            pipe = pipe.open_shards()
            if rng.random() < 0.7:
                pipe = pipe.load_tar()
        return pipe
    if chance < 0.35 and depth < 2:
        sources = {
            name: anything(rng, data, depth + 1) if rng.random() < 0.3 else extend(rng, grouped(rng, data), 2)
            for name in "abc"[: rng.randrange(1, 4)]
        }
        pipe = wp.mix(
            sources,
            weights=[rng.randrange(1, 4) for _ in sources],
            exhausted=rng.choice(["stop", "drop", "repeat"]),
            seed=rng.randrange(9),
        )
        return extend(rng, pipe, 4, first=False)
    return extend(rng, grouped(rng, data), 5)


# The same lanes: the same items


class Host:
    """Something that is iterated: how it is made, run and saved."""

    def __init__(self, rng, data):
        self.kind = rng.choices(
            ["pipe", "node", "dataset", "dataloader", "stateful", "loader", "loader"], [3, 3, 1, 1, 1, 3, 3]
        )[0]
        self.chain_seed, self.data = rng.randrange(1 << 40), data
        self.options, self.cut = {}, None
        self.wrap = rng.choice(["", "", "prefetch", "batch", "map", "weighted"]) if self.kind == "node" else ""
        self.workers = 0
        if self.kind == "loader":
            world = rng.choice([1, 1, 1, 2, 3])
            self.options = {
                "rank": rng.randrange(world),
                "world_size": world,
                "lanes": world * rng.randrange(1, 4),
                "epoch_end": "exact",
            }
            if rng.random() < 0.5:
                self.options |= {"batch_size": rng.randrange(1, 5), "collate": "list", "drop_last": rng.random() < 0.3}
            if rng.random() < 0.25 and world == 1:
                self.cut = rng.randrange(1, 8)
            self.workers = 2 if rng.random() < WORKERS else 0
        elif self.kind == "stateful":
            self.workers = 2 if rng.random() < WORKERS else 0

    def pipe(self):
        return anything(random.Random(self.chain_seed), self.data)

    def make(self, workers=None, plain=False):
        pipe, workers = self.pipe(), self.workers if workers is None else workers
        if self.kind == "pipe":
            return wp_pipe(pipe)
        if self.kind == "node":
            node = pipe.as_node()
            if self.wrap == "prefetch":
                node = torch_nodes.Prefetcher(node, 2, snapshot_frequency=1)
            elif self.wrap == "batch":
                node = torch_nodes.Batcher(node, 2, drop_last=False)
            elif self.wrap == "map":
                node = torch_nodes.Mapper(node, same)
            elif self.wrap == "weighted":
                node = torch_nodes.MultiNodeWeightedSampler(
                    {"a": node}, {"a": 1.0}, torch_nodes.StopCriteria.FIRST_DATASET_EXHAUSTED
                )
            return torch_nodes.Loader(node)
        if self.kind == "dataset":
            return pipe.as_dataset()
        if self.kind == "dataloader":
            return Wrapped(pipe.as_dataset())
        if self.kind == "stateful":
            context = {"multiprocessing_context": "fork"} if workers else {}
            return StatefulDataLoader(pipe.as_dataset(), batch_size=None, num_workers=workers, **context)
        context = {"multiprocessing_context": "fork"} if workers else {}
        loader = wp.PipeLoader(pipe, num_workers=workers, **context, **self.options)
        return loader.with_epoch(batches=self.cut) if self.cut and not plain else loader


def same(item):
    return item


class Wrapped:
    """A DataLoader over a dataset whose state is taken beside it."""

    def __init__(self, dataset):
        self.dataset, self.loader = dataset, DataLoader(dataset, batch_size=None)

    def __iter__(self):
        return iter(self.loader)

    def state_dict(self):
        return self.dataset.state_dict()

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state)


class wp_pipe:
    """A pipe by the functions of the package."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __iter__(self):
        return iter(self.pipe)

    def state_dict(self):
        return wp.state_dict(self.pipe)

    def load_state_dict(self, state):
        wp.load_state_dict(self.pipe, state)

    def set_epoch(self, epoch):
        self.pipe.set_epoch(epoch)

    def close(self):
        self.pipe._stream.close()


EPOCHS = 3
WORKERS = 0.0


def same_history(rng, data, told):
    host = Host(rng, data)
    told["host"] = (
        host.kind
        + (f" {host.wrap}" if host.wrap else "")
        + (" 2 workers" if host.workers else "")
        + (" with_epoch" if host.cut else "")
    )
    told["pipe"] = repr(host.pipe())
    told["options"] = host.options | {"cut": host.cut}
    workers = host.workers if host.kind == "stateful" else 0
    whole = host.make(workers, plain=True)
    epochs = []
    for _ in range(EPOCHS):
        epochs.append([])
        for item in whole:
            epochs[-1].append(canon(item))
            if len(epochs[-1]) > 400:
                break
        if len(epochs[-1]) > 400:
            return "endless"
    flat = [item for epoch in epochs for item in epoch]
    starts = [sum(map(len, epochs[:epoch])) for epoch in range(EPOCHS + 1)]
    del whole
    told["epochs"] = [len(epoch) for epoch in epochs]
    loader, place, log = host.make(), 0, []
    told["log"] = log
    # given: in this epoch of with_epoch; fresh: a state was loaded and nothing was taken since;
    # left: by break or close
    given, fresh, left = 0, False, False
    if host.cut and not all(epochs):
        return "with_epoch over empty epochs"
    last_start = starts[EPOCHS - 1]
    for _ in range(rng.randrange(2, 6)):
        items = iter(loader)
        ends = [end for end in starts if end > place]
        chance = rng.random()
        count = (
            0
            if chance < 0.1
            else rng.randrange(1, 12)
            if chance < 0.5
            else max(0, (ends or [place])[0] - place - rng.choice([0, 0, 1, 1, 2, 3, 5]))
        )
        count += rng.choice([0, 0, 0, 1])  # over the end
        if left:
            count = max(1, count)  # until then, a state stands where the iterator was left
        trap = None
        if host.workers == 0 and host.wrap not in ("prefetch", "batch") and rng.random() < 0.3:
            trap = rng.choice([KeyboardInterrupt("trap"), OSError("trap")])
            Trap.set(rng.randrange(1, 12), trap)
        log.append(f"at {place}: take {count}" + (f" with {trap!r} in {Trap.calls} calls" if trap else ""))
        ended = broken = left = False
        begun = place
        for _ in range(count):
            try:
                item = next(items, NONE)
            except (KeyboardInterrupt, OSError, RuntimeError) as error:
                if "trap" not in str(error) and "interrupt" not in str(error).lower() and "Caught" not in str(error):
                    raise
                broken = True
                log.append(f"at {place}: {type(error).__name__}: {error!s:.60}")
                if rng.random() < 0.5:
                    try:
                        again = next(items, NONE)
                    except (Exception, KeyboardInterrupt):
                        pass
                    else:
                        if again is NONE and host.kind in ("pipe", "dataset", "loader"):
                            raise AssertionError("an iterator that was interrupted says that it has ended") from error
                        if again is not NONE:
                            check(again, flat, place)
                            place, given = place + 1, given + 1
                            if host.kind != "loader":
                                raise AssertionError("goes on after an interrupt") from error
                            broken = False
                            continue
                break
            if item is NONE:
                ended = True
                break
            check(item, flat, place)
            place, given = place + 1, given + 1
            if place > last_start:
                break
        Trap.set(0, None)
        if ended:
            if host.cut:
                if given != host.cut:
                    raise AssertionError(f"a pass of with_epoch({host.cut}) gave {given}, at {place}")
                given = 0
            elif place not in starts:
                raise AssertionError(f"ends at {place}, not at one of {starts}")
        elif host.cut and given > host.cut:
            raise AssertionError(f"with_epoch({host.cut}) gave {given}")
        if place > last_start or place == len(flat):
            break
        if host.kind == "loader":
            stats = loader.stats()
            if any(value < 0 for value in stats.values()):
                raise AssertionError(f"stats: {stats}")
            if (
                host.cut
                and not broken
                and given
                and place < last_start
                and loader.remaining() != (host.cut - given if given < host.cut else host.cut)
            ):
                raise AssertionError(f"remaining: {loader.remaining()} of {host.cut} after {given}")
        action = rng.choice(["new", "new", "new", "same", "break", "close", "epoch", "twice"])
        if broken and action in ("break", "close", "epoch"):
            action = "new"
        over = place in starts and place > begun and host.kind in ("pipe", "dataset", "dataloader", "loader")
        if action in ("break", "close") and (
            place == begun
            or over
            or ended
            or host.cut
            or place not in range(starts[-1])
            or host.kind in ("node", "stateful", "dataloader")
        ):
            action = "new"
        if action == "epoch" and (host.kind not in ("pipe", "dataset", "loader") or host.cut):
            action = "same"
        log.append(f"at {place}{' (ended)' if ended else ''}: {action}")
        if action in ("break", "close"):
            if action == "close" and hasattr(loader, "close"):
                loader.close()
            epoch = next(epoch for epoch in range(EPOCHS) if starts[epoch] <= begun < starts[epoch + 1])
            place, fresh, left = starts[epoch + 1], False, True
            del items
            if place >= last_start:
                break
            continue
        if action == "epoch":
            epoch, now = rng.randrange(EPOCHS - 1), loader.state_dict()["epoch"]
            waits = fresh and place == begun and not ended
            loader.set_epoch(epoch)
            over = host.kind == "loader" and waits and place == starts[epoch + 1]  # nothing is left of it
            if (not waits or epoch != now) and not over:  # else the loaded state continues
                place, fresh = starts[epoch], False
            continue
        state = loader.state_dict()
        state = pickle.loads(pickle.dumps(state)) if host.wrap == "weighted" else json.loads(json.dumps(state))
        if host.cut and given >= host.cut:
            given = 0
        fresh = True
        if action == "same":
            loader.load_state_dict(state)
        else:
            if host.kind == "loader" and host.workers:
                loader.close()
            for _ in range(2 if action == "twice" else 1):
                loader = host.make(0 if host.kind == "loader" and rng.random() < 0.5 else None)
                loader.load_state_dict(state)
                again = loader.state_dict()
                if host.kind in ("pipe", "dataset", "loader") and again != state:
                    raise AssertionError(f"another state after it was loaded: {state} {again}")
                if host.kind in ("pipe", "dataset", "loader"):
                    state = again
        if host.kind in ("node", "stateful") and not ended and place in starts and place > begun:
            # torchdata: a state after the last item means an empty rest
            rest = [canon(item) for item in loader]
            if rest and rest != epochs[starts.index(place)] and flat[place : place + len(rest)] != rest:
                raise AssertionError(f"at the end, gives {rest}")
            if rest:
                place += len(rest)
                if place > last_start or place == len(flat):
                    break
    if hasattr(loader, "close"):
        loader.close()
    return host.kind


def check(item, flat, place):
    item = canon(item)
    if place >= len(flat):
        raise AssertionError(f"item {place} is one too many: {item}")
    if item != flat[place]:
        raise AssertionError(f"item {place} is {item!s:.300}, not {flat[place]!s:.300}")


# Other lanes: each sample once


def leaves(item):
    return [leaf for part in item for leaf in leaves(part)] if isinstance(item, list) else [item]


def ledger_chain(rng, data, form, exact):
    """A chain that yields single samples, and whether it yields them all, and the total of
    its epoch.
    """
    choices = [entry for entry in data.found if entry[2] == form]

    def base():
        urls, sizes, _ = rng.choice(choices)
        options = {"samples_per_shard": sizes} if form != "damaged" and (not exact or rng.random() < 0.5) else {}
        skip = {"on_error": "skip"} if form == "damaged" else {}
        return wp.ShardList(
            urls, empty_check=False, shuffle=rng.random() < 0.8, seed=rng.randrange(99), **options
        ).open_shards().load_tar(**skip).group_by_key(**skip), sum(sizes)

    def steps(pipe, most, interleave=True):
        for _ in range(rng.randrange(most + 1)):
            step = rng.choice(
                [
                    "shuffle",
                    "shuffle",
                    "draw",
                    *(["interleave"] if interleave else []),
                    *(["filter", "skip", "decode", "lag", "torch"] if exact else ["decode all"]),
                ]
            )
            if step == "shuffle":
                pipe = pipe.shuffle_buffer(rng.choice([1, 2, 3, 5, 9, 1000]))
            elif step == "draw":
                pipe = pipe.map_samples(draw)
            elif step == "interleave":
                pipe, interleave = pipe.interleave_shards(rng.randrange(1, 5)), False
            elif step == "filter":
                pipe = pipe.filter_samples(wanted)
            elif step == "skip":
                pipe = pipe.map_samples(break_some, on_error="skip")
            elif step == "decode":
                pipe = pipe.decode_by_ext(on_error="skip", partial=True)
            elif step == "torch":
                pipe = pipe.map(dict)
            elif step == "lag":
                pipe = pipe.lag()
        return pipe

    if exact and rng.random() < 0.25:
        # sources over the same collection have the same keys: distinguished by URL
        sources, total = {}, 0
        for name in rng.sample("abc", rng.randrange(1, 4)):
            pipe, size = base()
            sources[name], total = steps(pipe, 2), total + size
        pipe = steps(
            wp.mix(sources, exhausted="drop", weights=[rng.randrange(1, 4) for _ in sources], seed=rng.randrange(9)),
            3,
            interleave=False,
        )
    else:
        pipe, total = base()
        pipe = steps(pipe, 4)
    whole = True
    if exact and rng.random() < 0.3:
        pipe = pipe.batch_samples(rng.randrange(1, 4), collate="list")
        if rng.random() < 0.3:
            pipe = pipe.shuffle_buffer(rng.randrange(1, 4))
        return pipe, whole, total, True
    return pipe, whole, total, False


def name(sample):
    return f"{sample['__url__']}#{sample['__key__']}#{sample.get('draw', '')}#{','.join(sorted(field for field in sample if field != '__padding__'))}"  # noqa: E501


def ledger_history(rng, data, told, mode="exact"):
    form = rng.choice(["plain", "gz", "damaged"] if mode == "exact" else ["plain", "gz"])
    chain_seed = rng.randrange(1 << 40)
    build = lambda: ledger_chain(random.Random(chain_seed), data, form, mode == "exact")  # noqa: E731
    pipe, _, total, batched = build()
    told["pipe"], log = repr(pipe), []
    told["log"] = log
    flatten = lambda items: [  # noqa: E731
        sample for item in items for sample in (flatten(item) if isinstance(item, list) else [item])
    ]
    once = build()[0]
    expected = [[name(sample) for sample in flatten(list(once))] for _ in range(2)]
    size = rng.randrange(1, 5)
    states, got, epoch = None, [], 0
    padded = False
    for _ in range(rng.randrange(2, 7)):
        ranks, lanes_each = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
        workers = 2 if rng.random() < WORKERS else 0
        context = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        options = {} if batched else {"batch_size": size, "collate": "list"}
        if mode == "exact" and not batched and rng.random() < 0.5:
            options["batch_size"] = rng.randrange(1, 5)
        lanes = {} if rng.random() < 0.1 and not workers else {"lanes": ranks * lanes_each}
        loaders = [
            wp.PipeLoader(build()[0], rank=rank, world_size=ranks, epoch_end=mode, **lanes, **context, **options)
            for rank in range(ranks)
        ]
        log.append(f"{ranks} ranks, {lanes}, {workers} workers, {options}")
        for loader in loaders if states is not None else ():
            loader.load_state_dict(states)
        now = {loader.state_dict()["epoch"] for loader in loaders}
        if len(now) > 1:
            raise AssertionError(f"ranks begin in epochs {now}")
        if now != {epoch}:
            raise AssertionError(f"begins in epoch {now}, not {epoch}")
        remaining, before = [loader.remaining() for loader in loaders], [0] * ranks
        running = {rank: iter(loader) for rank, loader in enumerate(loaders)}
        cut = rng.choice([0, 1, 1, 2, 2, 3, 5, 8, 1000])
        step = 0
        while running and step < cut:
            for rank, items in list(running.items()):
                batch = next(items, NONE)
                if batch is NONE:
                    del running[rank]
                    continue
                before[rank] += 1
                if mode != "exact" and len(batch) != size:
                    raise AssertionError(f"a batch of {len(batch)}, not {size}")
                got += [sample for sample in flatten([batch]) if not (mode == "pad" and sample["__padding__"])]
                padded = padded or any(sample.get("__padding__") for sample in flatten([batch]))
            step += 1
        if mode != "exact" and 0 < len(running) < ranks:
            raise AssertionError(f"some ranks have ended, and ranks {list(running)} go on after {before}")
        if mode != "exact" and len(set(before)) > 1:
            raise AssertionError(f"ranks gave {before} batches")
        if not running:
            for rank, (left, count) in enumerate(zip(remaining, before, strict=True)):
                if left is not None and left != count:
                    raise AssertionError(f"rank {rank} gave {count} batches, and remaining() was {left}")
        counts = collections.Counter()
        for loader in loaders:
            counts.update(loader.counts())
            if any(value < 0 for value in loader.stats().values()):
                raise AssertionError(f"stats: {loader.stats()}")
        names = [name(sample) for sample in got]
        if len(set(names)) < len(names) and len(set(expected[epoch])) == len(expected[epoch]):
            raise AssertionError(
                f"twice: {[one for one, count in collections.Counter(names).items() if count > 1][:4]}"
            )
        all_states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        ended = not running or all(lane["ended"] for state in all_states for lane in state["lanes"].values())
        for loader in loaders:
            loader.close()
        log.append(f"  {step} steps, ended: {ended}, given {before}, counts {dict(counts)}")
        lags = ".shuffle_buffer" in told["pipe"].rpartition("batch_samples")[2] and batched  # as documented
        if (
            mode == "exact"
            and counts["delivered"] != len(got)
            and not (lags and not ended and counts["delivered"] < len(got))
        ):
            raise AssertionError(f"counts {dict(counts)}, and {len(got)} were given")
        if len({state["epoch"] for state in all_states}) > 1:
            return "uneven"
        if all(state["epoch"] == epoch + 1 for state in all_states) or ended:
            if mode == "exact":
                if sorted(names) != sorted(expected[epoch]):
                    lost = collections.Counter(expected[epoch]) - collections.Counter(names)
                    more = collections.Counter(names) - collections.Counter(expected[epoch])
                    raise AssertionError(
                        f"lost {list(lost)[:3]} ({len(lost)}), too many {list(more)[:3]} ({len(more)})"
                    )
                if epoch == 0 and {what: count for what, count in counts.items() if count} != {
                    what: count for what, count in once_counts(build, 0).items() if count
                }:
                    raise AssertionError(f"counts {dict(counts)}, not {once_counts(build, 0)}")
            else:
                if not set(names) <= set(expected[epoch]):
                    raise AssertionError("samples of another epoch")
                if mode == "pad" and sorted(names) != sorted(expected[epoch]):
                    raise AssertionError(f"lost {len(set(expected[epoch]) - set(names))}")
                if (
                    mode == "drop"
                    and counts["delivered"] + counts["dropped"] + counts["filtered"] + counts["skipped"] != total
                ):
                    raise AssertionError(f"counts {dict(counts)} of {total}")
            got, epoch = [], epoch + 1
            if epoch == 2:
                break
        states = wp.merge_states(all_states) if rng.random() < 0.5 else all_states
    return f"{mode} {form}"


def once_counts(build, epoch):
    pipe = build()[0]
    pipe.set_epoch(epoch)
    for _ in pipe:
        pass
    return pipe.counts()


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
    tally, failed = collections.Counter(), 0
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        data = Data(directory)
        for number in rounds(args) if args.only is None else [args.only]:
            rng, told = random.Random(f"{args.seed} {number}"), {}
            kind = args.kind or rng.choice(["same", "same", "same", "ledger", "equal"])
            try:
                if kind == "same":
                    tally[f"same {same_history(rng, data, told)}"] += 1
                else:
                    tally[
                        ledger_history(rng, data, told, "exact" if kind == "ledger" else rng.choice(["drop", "pad"]))
                    ] += 1
            except (TypeError, ValueError, wp.StateError) as error:
                if "build" not in told and not told:
                    tally[f"refused {type(error).__name__}: {error!s:.60}"] += 1
                    continue
                failed += report(args, number, kind, told)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and "trap" not in str(error):
                    raise
                failed += report(args, number, kind, told)
            finally:
                Trap.set(0, None)
            if failed >= args.most:
                break
    for what, count in sorted(tally.items()):
        print(f"{count:6} {what}")
    print(f"histories={sum(tally.values()) + failed} failed={failed} seed={args.seed}")
    return int(failed > 0)


def report(args, number, kind, told):
    print(
        f"--- history {number} failed: --seed {args.seed} --only {number}"
        + (f" --kind {args.kind}" if args.kind else "")
        + f"  ({kind})"
    )
    for what, value in told.items():
        print(
            f"    {what}: "
            + (
                "\n      ".join(["", *value])
                if isinstance(value, list) and value and isinstance(value[0], str)
                else str(value)
            )
        )
    print("    " + "    ".join(traceback.format_exc().splitlines(keepends=True)[-6:]), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
