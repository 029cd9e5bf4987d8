"""The torchdata.nodes skin: the traps of Loader, Prefetcher and ParallelMapper."""

import json

import pytest
from torchdata.nodes import Loader, ParallelMapper, Prefetcher

import wds_pipes as wp
from wds_pipes import nodes


def node(urls):
    return nodes.ShuffleBuffer(nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls, shuffle=True, seed=5)))), 3)


def keys(source):
    return [sample["__key__"] for sample in source]


def epochs(urls, count):
    pipe = wp.ShardList(urls, shuffle=True, seed=5).open_shards().load_tar().group_by_key().shuffle_buffer(3)
    return [keys(pipe) for _ in range(count)]


def test_each_pass_of_a_loader_is_the_next_epoch(urls):
    loader = Loader(node(urls))
    assert [keys(loader) for _ in range(3)] == epochs(urls, 3)


def test_a_node_by_itself(urls):
    source = node(urls)
    expected = epochs(urls, 2)
    assert keys(source) == expected[0]
    source.reset()
    source.reset()
    assert keys(source) == expected[1]
    with pytest.raises(StopIteration):
        next(source)
    source.set_epoch(0)
    source.reset()
    assert keys(source) == expected[0]
    assert source.counts()["delivered"] == 14


@pytest.mark.parametrize("wrap", [lambda source: source, lambda source: Prefetcher(source, 2), lambda source: ParallelMapper(source, dict, 2, method="thread")])
@pytest.mark.parametrize("cut", [3, 14])
def test_a_second_resume_after_the_end_of_an_epoch_is_exact(cut, wrap, urls):
    """Loader keeps an old state for the whole epoch after it has resumed at an end, if the node below it says so once."""
    expected = [key for epoch in epochs(urls, 3) for key in epoch]
    first = Loader(wrap(node(urls)))
    items = iter(first)
    got = [next(items)["__key__"] for _ in range(cut)]
    for _ in range(4):
        state = json.loads(json.dumps(first.state_dict()))
        first = Loader(wrap(node(urls)))
        first.load_state_dict(state)
        for number, item in enumerate(first, 1):
            got.append(item["__key__"])
            if number == 7:
                break
    assert got == expected[: len(got)]
    assert len(got) > cut + 14


def text(sample):
    return sample["__key__"]


@pytest.mark.parametrize("wrap", [lambda source: Prefetcher(source, 2), lambda source: ParallelMapper(source, dict, 2, method="thread")])
def test_a_resume_after_the_last_item_between_nodes_of_ours(wrap, urls):
    """A node of ours below another's must not begin the next epoch by itself, as that of the one above is still the old."""

    def graph():
        return Loader(nodes.MapSamples(wrap(node(urls)), text))

    first = graph()
    items = iter(first)
    assert len([next(items) for _ in range(14)]) == 14
    second = graph()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [list(second), list(second)] == epochs(urls, 3)[1:]


def test_a_state_of_another_graph_is_refused(urls):
    state = node(urls).state_dict()
    other = nodes.BatchSamples(node(urls), 2)
    with pytest.raises(wp.StateError, match="this one is .* > batch_samples"):
        other.reset(state)


def test_repr_reads_as_the_chain(urls):
    assert repr(node(urls)).endswith("group_by_key > shuffle_buffer(size=3)")
