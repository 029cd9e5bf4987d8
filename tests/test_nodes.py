"""torchdata.nodes: the traps of Loader, Prefetcher and ParallelMapper."""

import pickle
from dataclasses import dataclass
from itertools import islice

import pytest
from pipelines import keys_of, shuffled, through_json
from torchdata import nodes as torchdata_nodes
from torchdata.nodes import (
    Batcher,
    Loader,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    StopCriteria,
    Unbatcher,
)

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.core.stage import Source

CRITERIA = (
    StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED,
    StopCriteria.ALL_DATASETS_EXHAUSTED,
    StopCriteria.FIRST_DATASET_EXHAUSTED,
    StopCriteria.CYCLE_FOREVER,
)


def node(urls):
    return nodes.ShuffleBuffer(
        nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls, shuffle=True, seed=5)))), 3
    )


def epochs(urls, count):
    pipe = shuffled(urls)
    return [keys_of(pipe) for _ in range(count)]


def test_each_iteration_of_a_loader_is_the_next_epoch(urls):
    loader = Loader(node(urls))
    assert [keys_of(loader) for _ in range(3)] == epochs(urls, 3)


def test_a_node_by_itself(urls):
    source = node(urls)
    expected = epochs(urls, 2)
    assert keys_of(source) == expected[0]
    source.reset()
    source.reset()
    assert keys_of(source) == expected[1]
    with pytest.raises(StopIteration):
        next(source)
    source.set_epoch(0)
    source.reset()
    assert keys_of(source) == expected[0]
    assert source.counts()["delivered"] == 14


# The nodes of torchdata over ours, compared with the same over a plain node that keeps torchdata's
# contract


class Numbered(Source):
    """(epoch, number) from 0 on: a first stage whose items show their epoch."""

    @dataclass
    class At:
        given: int = 0

    def __init__(self, count):
        super().__init__()
        self.count = count

    def run(self):
        while self.at.given < self.count:
            self.at.given += 1
            yield self.lane.epoch, self.at.given - 1


class Plain(torchdata_nodes.BaseNode):
    """The same as a node without our code."""

    def __init__(self, count):
        super().__init__()
        self.count, self.epoch, self.given = count, 0, 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        if initial_state is not None:
            self.epoch, self.given = initial_state["epoch"], initial_state["given"]
        elif self.given:
            self.epoch, self.given = self.epoch + 1, 0

    def next(self):
        if self.given == self.count:
            raise StopIteration
        self.given += 1
        return self.epoch, self.given - 1

    def get_state(self):
        return {"epoch": self.epoch, "given": self.given}


def ours(count):
    return nodes.WdsNode.of(Numbered(count))


def ours_between(count):
    """A node of ours after one of torchdata after one of ours, each with a partial batch at the
    end.
    """
    return nodes.BatchSamples(Batcher(ours(count), 2, drop_last=False), 2, collate="list")


def shuffled_plain(count):
    """Steps of ours over a node that counts its epochs itself."""
    return nodes.BatchSamples(nodes.ShuffleBuffer(Plain(count), 1), 2, collate="list")


def mixed_plain(count):
    return nodes.Mix({"a": Plain(count), "b": nodes.Repeat(Plain(1), 2)}, weights={"a": 2, "b": 1})


def weighted(criterion, wrap=lambda node: node):
    weights = {"a": 2.0, "b": 1.0}
    return lambda node: MultiNodeWeightedSampler(
        {"a": wrap(node(5)), "b": wrap(node(3))}, weights, criterion, rank=0, world_size=1, seed=3
    )


def batched(node):
    return Batcher(node, 2, drop_last=False)


GRAPHS = {
    "bare": lambda node: node(7),
    "batcher": lambda node: batched(node(7)),
    "unbatcher": lambda node: Unbatcher(batched(node(7))),
    "mapper": lambda node: Mapper(node(4), str),
    "parallel": lambda node: ParallelMapper(node(4), str, 2, method="thread"),
    "prefetcher": lambda node: Prefetcher(batched(node(5)), 2),
    "prefetcher-snapshots": lambda node: Prefetcher(node(5), 2, snapshot_frequency=2),
    "prefetcher-between": lambda node: nodes.BatchSamples(Prefetcher(node(5), 2), 2, collate="list"),
    **{criterion: weighted(criterion) for criterion in CRITERIA},
    "batched-weighted": lambda node: batched(weighted(StopCriteria.ALL_DATASETS_EXHAUSTED, batched)(node)),
    "repeated-weighted": lambda node: nodes.Repeat(weighted(StopCriteria.FIRST_DATASET_EXHAUSTED)(node), 3),
    "weighted-prefetcher": weighted(StopCriteria.ALL_DATASETS_EXHAUSTED, lambda node: Prefetcher(node, 2)),
}


FEW = "bare", "repeated-weighted", StopCriteria.FIRST_DATASET_EXHAUSTED
NODES = ours_between, shuffled_plain, mixed_plain
SEEN = 32  # items, of at least two epochs


def slow(graph):
    """Whether it takes a while to start, since it has threads."""
    return "parallel" in graph or "prefetcher" in graph


def advance(loader, count, *, see_end=False):
    """That many items, in as many epochs as it takes; with ``see_end`` the end of the last epoch is
    requested too.
    """
    got, items, end = [], iter(loader), object()
    while len(got) < count:
        item = next(items, end)
        if item is end:
            items = iter(loader)
        else:
            got.append(item)
    assert not see_end or next(items, end) is end
    return got


def saved_at_each_item(loader, count):
    """That many items, in as many epochs as it takes."""
    given = 0
    while given < count:
        for item in islice(loader, count - given):
            given += 1
            yield item
            loader.state_dict()


@pytest.mark.parametrize(
    ("graph", "node"), [*((graph, ours) for graph in GRAPHS), *((graph, node) for graph in FEW for node in NODES)]
)
def test_every_cut_below_the_nodes_of_torchdata(graph, node):
    """And second cuts, in the same epoch, and third ones, across epochs; also cuts between the last
    item and the end of an epoch, and after an end in threads, where Loader would keep an old
    state.
    """
    make = lambda: Loader(GRAPHS[graph](node))  # noqa: E731
    live, whole, ends = make(), [], []
    while len(whole) < SEEN:
        whole += islice(live, SEEN - len(whole))
        ends.append(len(whole))
    assert list(saved_at_each_item(make(), SEEN)) == whole
    end = ends[0]
    places = [0, 1, end - 1, end] if slow(graph) else range(min(end, 12) + 2)
    for cut, see_end in [(place, False) for place in places] + [(end, True)] * (end < SEEN):
        first = make()
        assert advance(first, cut, see_end=see_end) == whole[:cut]
        state = pickle.dumps(first.state_dict())
        for step in (0, 5) if slow(graph) else (0, 3):
            kept, at, rest = state, cut, SEEN - cut - step
            for more in (step, rest // 2, rest - rest // 2):
                loader = make()
                loader.load_state_dict(pickle.loads(kept))
                assert advance(loader, more) == whole[at : at + more], (cut, see_end, step, at)
                kept, at = pickle.dumps(loader.state_dict()), at + more


class Live(Plain):
    """Its state is what it goes on with, and not a copy of that."""

    def reset(self, initial_state=None):
        super(Plain, self).reset(initial_state)
        self.at = {"given": 0} if initial_state is None else initial_state

    def next(self):
        if self.at["given"] == self.count:
            raise StopIteration
        self.at["given"] += 1
        return self.at["given"]

    def get_state(self):
        return self.at


@pytest.mark.parametrize(
    "graph", [lambda: weighted(StopCriteria.ALL_DATASETS_EXHAUSTED)(Plain), lambda: Live(8)], ids=["weighted", "live"]
)
def test_a_state_does_not_change_with_the_node_of_another_library(graph):
    """Torchdata's sampler goes on with the dicts of the state that it is given."""
    make = lambda: Loader(nodes.BatchSamples(graph(), 1, collate="list"))  # noqa: E731
    whole = list(make())
    first, second = make(), make()
    items = iter(first)
    assert [next(items), next(items)] == whole[:2]
    state = first.state_dict()
    assert list(items) == whole[2:]
    second.load_state_dict(state)
    items = iter(second)
    again = second.state_dict()
    assert list(items) == whole[2:]
    for kept in (state, again):
        third = make()
        third.load_state_dict(kept)
        assert list(third) == whole[2:]


def test_a_node_at_its_end_stays_there(urls):
    """By torchdata's contract: after a state from the end a node yields nothing more, and a reset
    after that begins the next epoch.
    """
    expected = epochs(urls, 3)
    first = node(urls)
    assert keys_of(first) == expected[0]
    for source in (node(urls), node(urls)):
        source.reset(through_json(first.state_dict()))
        assert source.state_dict() == first.state_dict()
        assert keys_of(source) == []
        source.reset()
        assert keys_of(source) == expected[1]


def test_a_reset_before_the_first_item_leaves_the_loaded_epoch(urls):
    """Unless none of its items was returned."""
    expected = epochs(urls, 2)
    first = node(urls)
    beginning = through_json(first.state_dict())
    next(first)
    for state, rest in ((beginning, expected[0]), (first.state_dict(), expected[1])):
        source = node(urls)
        source.reset(state)
        source.reset()
        source.reset()
        assert source.state_dict()["counts"]["delivered"] == 0
        assert keys_of(source) == rest


def test_a_pipe_in_the_place_of_a_node_is_refused(urls):
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    with pytest.raises(TypeError, match=r"takes nodes, and this is a pipe: pass pipe.as_node\(\)"):
        list(Loader(pipe))
    assert len(list(Loader(pipe.as_node()))) == len(list(pipe))
