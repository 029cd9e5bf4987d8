"""SampleOrder: exact at every cut in every loader that takes a sampler, and the same order on any
number of ranks.
"""

import copy
import itertools
import json
import pickle
import tracemalloc
from functools import partial

import pytest
import torch
from chains import NodeLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import after, flat, loaded, through_json
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchdata.nodes import IterableWrapper, Loader, MapStyleWrapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

import wds_pipes as wp
from wds_pipes.core.order import order_of_samples
from wds_pipes.testing import check_resume

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
N = 23


class Squares:
    """A map-style dataset."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index * index


def order(n=N, **options):
    return wp.SampleOrder(n, **{"shuffle": True, "seed": 5, **options})


def squares(epoch):
    """The items of an epoch."""
    return [index * index for index in epochs(epoch + 1)[epoch]]


def epochs(count, **options):
    sampler = order(**options)
    return [list(sampler) for _ in range(count)]


def lists(batches):
    return [batch.tolist() for batch in batches]


# The order


def test_each_iteration_is_the_next_epoch_in_another_order():
    one, two, three = epochs(3)
    assert sorted(one) == sorted(two) == sorted(three) == list(range(N))
    assert one != two != three != one
    assert one == [order_of_samples(N, 5, 0).number_at(place) for place in range(N)]
    assert epochs(1, seed=6) != [one]
    assert list(wp.SampleOrder(4)) == [0, 1, 2, 3]
    assert list(wp.SampleOrder(0)) == []


def test_blocks_stay_together():
    indices = epochs(1, n=1003, block_samples=10)[0]
    assert sorted(indices) == list(range(1003))
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(indices))
    assert 90 <= breaks <= 100
    assert epochs(1, shuffle=False, block_samples=10) == [list(range(N))]


def test_set_epoch_starts_an_epoch_and_leaves_a_loaded_state_of_it():
    expected, sampler = epochs(3), order()
    sampler.set_epoch(2)
    assert list(sampler) == expected[2]
    sampler.set_epoch(1)
    items = after(sampler, 4)
    state = sampler.state_dict()
    sampler.set_epoch(1)
    assert list(sampler) == expected[1]
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(sampler) == list(items) == expected[1][4:]
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert list(sampler) == expected[0]


def test_an_iterator_does_nothing_until_its_first_next():
    """DataLoader makes several of them."""
    sampler = order()
    assert len([iter(sampler) for _ in range(3)]) == 3
    iterators = iter(sampler), iter(sampler)
    assert [list(iterator) for iterator in iterators] == epochs(2)


def test_the_state_is_of_the_iterator_that_moved_last():
    sampler = order()
    first, second = after(sampler, 3), after(sampler, 7)
    assert sampler.state_dict()["position"] == 7
    next(first)
    resumed = loaded(order(), sampler.state_dict())
    assert list(resumed) == list(first)
    assert list(second) == epochs(2)[1][7:]


def test_a_huge_order_takes_no_memory():
    tracemalloc.start()
    try:
        sampler = order(10**9)
        items = after(sampler, 1)
        resumed = loaded(order(10**9), {**sampler.state_dict(), "position": 10**9 - 2})
        assert len([*iter(resumed)]) == 2  # list() asks for the length, and takes memory for it
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        assert len(json.dumps(sampler.state_dict())) < 200
        assert len(pickle.dumps(sampler)) < 500
    finally:
        tracemalloc.stop()
    assert len(items._block) < 10_000


# Resuming


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"block_samples": 5}, {"rank": 1, "world_size": 3}])
def test_resumes_exactly(options):
    check_resume(lambda: order(**options), epochs=3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_has_the_position(copied):
    sampler = order()
    items = after(sampler, 5)
    assert list(copied(sampler)) == list(items)
    assert list(copied(sampler)) == epochs(2)[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: StatefulDataLoader(Squares(), sampler=order(), batch_size=4, collate_fn=list),
        lambda: StatefulDataLoader(Squares(), sampler=order(), batch_size=4, drop_last=True, collate_fn=list),
        lambda: StatefulDataLoader(Squares(), sampler=order(), batch_size=None, collate_fn=int),
        lambda: StatefulDataLoader(
            Squares(), batch_sampler=StatefulBatchSampler(order(), 4, drop_last=False), collate_fn=list
        ),
        lambda: NodeLoader(MapStyleWrapper(Squares(), order())),
        lambda: NodeLoader(Prefetcher(MapStyleWrapper(Squares(), order()), 2)),
        lambda: NodeLoader(IterableWrapper(order())),
    ],
    ids=["batches", "drop_last", "single", "batch_sampler", "map_style", "prefetched", "iterable"],
)
def test_resumes_exactly_in(make):
    whole = check_resume(make, epochs=3)
    assert whole[0] != whole[1] != whole[2]
    assert len(whole[0]) == len(whole[2])


@pytest.mark.parametrize("cut", [2, 6, 9])
def test_resumes_exactly_with_workers(cut):
    """StatefulDataLoader has sent the workers indices ahead; 6 batches are an epoch, and the epoch
    after it goes on in the same way.
    """

    def loader():
        return StatefulDataLoader(Squares(), sampler=order(), batch_size=4, num_workers=2)

    first, got = loader(), []
    got += lists(itertools.islice(first, cut) if cut <= 6 else first)
    got += lists(itertools.islice(first, cut - 6)) if cut > 6 else []
    second = loaded(loader(), first.state_dict())
    ended = cut > 6
    assert flat(got + lists(second)) == flat([squares(0), squares(1)][: 1 + ended])
    assert flat(lists(second)) == squares(1 + ended)


def test_a_state_of_a_loader_after_an_epoch_that_set_epoch_selected():
    """The state is at the end of this epoch, and the caller selects the next one."""
    loader = Loader(MapStyleWrapper(Squares(), order()))
    assert [list(loader), list(loader)] == [squares(0), squares(1)]
    again = loaded(Loader(MapStyleWrapper(Squares(), order())), through_json(loader.state_dict()))
    assert list(again) == squares(2)
    sampler = order()
    sampler.set_epoch(1)
    assert len(list(sampler)) == N
    resumed = loaded(order(), sampler.state_dict())
    assert list(resumed) == []
    assert list(resumed) == epochs(3)[2]


def test_in_a_plain_dataloader():
    """By sampler or batch_sampler; the state of the sampler is right between epochs."""
    options = {"num_workers": 1, "persistent_workers": True}
    for loader in (
        DataLoader(Squares(), sampler=order(), batch_size=None, **options),
        DataLoader(Squares(), sampler=order(), batch_size=4, **options),
        DataLoader(Squares(), batch_sampler=BatchSampler(order(), 4, False), **options),
    ):
        sampler = loader.sampler if isinstance(loader.sampler, wp.SampleOrder) else loader.batch_sampler.sampler
        assert len(loader) == (N if loader.batch_sampler is None else 6)
        assert torch.hstack([torch.as_tensor(part) for part in loader]).tolist() == squares(0)
        state = sampler.state_dict()
        assert torch.hstack([torch.as_tensor(part) for part in loader]).tolist() == squares(1)
        sampler.load_state_dict(state)
        assert torch.hstack([torch.as_tensor(part) for part in loader]).tolist() == squares(1)


# Ranks


@pytest.mark.parametrize(("epoch_end", "lengths"), [("drop", [5] * 4), ("pad", [6] * 4), ("exact", [6, 6, 6, 5])])
def test_ranks_take_the_places_in_turn(epoch_end, lengths):
    whole = epochs(1)[0]
    ranks = [order(epoch_end=epoch_end, rank=rank, world_size=4) for rank in range(4)]
    indices = [list(sampler) for sampler in ranks]
    assert [len(sampler) for sampler in ranks] == [len(part) for part in indices] == lengths
    places = [indices[place % 4][place // 4] for place in range(sum(lengths))]
    assert places == (whole + whole[:1])[: sum(lengths)]


def test_several_ranks_drop_by_default_and_one_does_not(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(order()) == epochs(1, rank=0, world_size=1)[0][1:20:4]
    few = order(n=3)
    with pytest.raises(ValueError, match="3 samples cannot be divided over 4 ranks: pass epoch_end='pad'"):
        len(few)
    with pytest.raises(ValueError, match="cannot be divided"):
        next(iter(few))
    assert few.state_dict()["position"] == 0
    assert [len(order(n=1, epoch_end=end)) for end in ("pad", "exact")] == [1, 0]


def test_frameworks_see_that_ranks_are_divided_already():
    assert isinstance(order(), DistributedSampler)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 60),
    parts=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 9)), max_size=5),
    epoch_end=st.sampled_from(["drop", "pad", "exact"]),
    options=st.fixed_dictionaries({"shuffle": st.booleans(), "block_samples": st.integers(1, 9)}),
)
def test_any_numbers_of_ranks_in_turn_give_each_sample_once(n, parts, epoch_end, options):
    """Each part of the epoch is read on another number of ranks, all of them for as many steps.

    More ranks than samples can only be exact where the rest is dropped.
    """
    whole = list(wp.SampleOrder(n, **options))
    state, got = wp.SampleOrder(n, **options).state_dict(), []
    for world_size, steps in [*parts, (1, n)]:
        end = "exact" if epoch_end == "drop" and world_size > n else epoch_end
        make = partial(wp.SampleOrder, n, **options, epoch_end=end, world_size=world_size)
        ranks = [loaded(make(rank=rank), state) for rank in range(world_size)]
        taken = [list(itertools.islice(sampler, steps)) for sampler in ranks]
        assert end == "exact" or len({*map(len, taken)}) == 1
        got += [index for row in itertools.zip_longest(*taken) for index in row if index is not None]
        if len(got) >= n or len(taken[0]) < steps:
            break
        [state] = {json.dumps(sampler.state_dict()): through_json(sampler.state_dict()) for sampler in ranks}.values()
    assert got == (whole * 8)[: len(got)]
    assert len(got) > n - world_size
    assert epoch_end != "exact" or len(got) == n


# Refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": [1, 2]}, TypeError, r"pass len\(dataset\), not the list itself"),
        ({"n": 2.0}, TypeError, "n must be an int"),
        ({"n": -1}, ValueError, "n must be at least 0"),
        ({"n": 1 << 60}, ValueError, "n must be at most"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False"),
        ({"block_samples": 0}, ValueError, "block_samples must be at least 1"),
        ({"seed": "x"}, TypeError, "seed must be an int"),
        ({"epoch_end": "loop"}, ValueError, "epoch_end must be one of 'drop', 'pad', 'exact'"),
        ({"rank": 1}, ValueError, "both rank and world_size"),
        ({"rank": 2, "world_size": 2}, ValueError, "below world_size"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_built(arguments, error, message):
    with pytest.raises(error, match=message):
        wp.SampleOrder(**{"n": 5, **arguments})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"n": 24}, r"made with n=24, this one has n=23\. Build it as it was"),
        ({"shuffle": False, "seed": 1}, "shuffle=False, this one has shuffle=True; it was made with seed=1"),
        ({"block_samples": 2}, "block_samples=2"),
        ({"n": True}, "n=True"),
        ({"version": 2}, "format version 2"),
        ({"position": N + 1}, "damaged: 'position' is 24"),
        ({"position": None}, "'position' is None"),
        ({"epoch": -1}, "'epoch' is -1"),
        ({"epoch_selected": 1}, "'epoch_selected' is 1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state, message):
    sampler = order()
    state = {**sampler.state_dict(), **state}
    before = sampler.state_dict()
    with pytest.raises(wp.StateError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


@pytest.mark.parametrize("state", [None, [], {}, {"version": 2, "lanes": {}}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(wp.StateError, match="not a state of a SampleOrder"):
        order().load_state_dict(state)
