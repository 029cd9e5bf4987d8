"""Damaged states of every kind of pipeline: a StateError, or a load that continues. What costs
memory is refused before it is allocated.
"""

import copy
import json
import random
import reprlib

import pytest
from memory import memory_below
from mutations import COUNTS, attack, damages, subjects
from pipelines import after, loaded, samples, through_json

import wds_pipes as wp
from wds_pipes.testing import make_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("hostile"), shards=len(COUNTS), samples=COUNTS)


def make(urls, **options):
    pipe = samples(urls, samples_per_shard=COUNTS).shuffle_buffer(2)
    return wp.PipeLoader(pipe, **{"batch_size": 2, "collate": "list", "lanes": 2, **options})


def a_state(urls, **options):
    loader = make(urls, **options)
    next(iter(loader))
    return loader.state_dict()


def repartitioned(urls):
    """A state of a repartitioned epoch."""
    loader = loaded(make(urls, lanes=3), a_state(urls))
    next(iter(loader))
    return loader.state_dict()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Pipelines of most kinds, with states of them, which a load leaves as they are."""
    return subjects(tmp_path_factory.mktemp("subjects"))


def test_each_value_of_a_state_is_checked(found):
    """One of a wrong type or range, or an entry too many or too few, is refused, and the pipeline
    stays where it is. Each place is damaged in one kind of pipeline that has it.
    """
    done = set()
    for subject in found:
        if subject.name in ("checkpoint", "describe_state"):  # which seal or describe it
            continue
        for what, state in damages(subject.states[len(subject.states) // 2]):
            if what not in done:
                done.add(what)
                try:
                    subject.load(state)
                except wp.StateError:
                    continue
                pytest.fail(f"{subject.name} loads {what}")
    assert len(done) > 500, len(done)


def test_mutated_states(found):
    """Some of the states of ``tests/proofs/fuzz_states.py``."""

    def report(subject, state, error):
        raise AssertionError(f"{subject.name}: {reprlib.repr(state)}") from error

    refused = attack(found, random.Random(8), count=300, report=report)
    assert 150 < refused < 295


def test_all_of_these_states_load_without_damage(found):
    for subject in found:
        subject.load(copy.deepcopy(subject.states[len(subject.states) // 2]))


HUGE = {
    "lanes": {"lane_count": 20_000_000},
    "more lanes": {"lane_count": 10**10},
    "lanes within the bound": {"lane_count": 999_999},
    "ranks": {"world_size": 10**10},
    "ranks within the bound": {"world_size": 999_999, "rank": 0},
    "epoch": {"epoch": 1 << 64},
    "an int that cannot be printed": {"epoch": 10**5000},
    "step": {"step": -(1 << 70)},
    "a name of a lane": {"lanes": {"²": {}}},
    "leading zero": {"lanes": {"01": {}}},
    "negative": {"lanes": {"-1": {}}},
    "a space": {"lanes": {" 1": {}}},
    "long": {"lanes": {"9" * 5000: {}}},
    "lanes in a partition": {
        "partition": {"sizes": [[29, 1], [0, 10**9]], "history": [[None, [[0, 10**9]]]], "remainders": [], "counts": {}}
    },
    "many partitions": {
        "partition": {
            "sizes": [[29, 1], [0, 1]],
            "history": [[None, [[0, 1]]]] * 20_000,
            "remainders": [],
            "counts": {},
        }
    },
    "lanes of many partitions": {
        "partition": {
            "sizes": [[29, 1], [0, 1]],
            "history": [[None, [[0, 900_000]]]] * 1000,
            "remainders": [],
            "counts": {},
        }
    },
}


@pytest.mark.parametrize("what", HUGE)
@pytest.mark.parametrize("merged", [False, True])
def test_huge_values_are_refused_before_anything_is_built(what, merged, shards):
    if what == "ranks within the bound" and not merged:
        pytest.skip("all lanes are there, so the number of ranks does not matter")
    state = {**a_state(shards), **HUGE[what]}
    loader = make(shards)
    loader.state_dict()
    with (
        memory_below(16 << 20 if what == "lanes of many partitions" else 2 << 20),
        pytest.raises(wp.StateError) as caught,
    ):
        loader.load_state_dict([state] if merged else state)
    assert len(str(caught.value)) < 1000
    if what not in (
        "lanes in a partition",
        "many partitions",
        "lanes of many partitions",
        "lanes within the bound",
        "ranks within the bound",
    ):
        with pytest.raises(wp.StateError):
            wp.describe_state(state)


def test_a_loader_with_more_lanes_than_a_state_can_hold_is_refused(shards):
    with pytest.raises(ValueError, match="lanes must be at most 1000000"):
        make(shards, lanes=1_000_001)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda partition: partition["remainders"].append(partition["remainders"][0]), "continues a lane twice"),
        (lambda partition: partition["remainders"][0].__setitem__(3, 9), "continues shards that were not opened"),
        (lambda partition: partition["remainders"][0].__setitem__(1, 1), "continues lanes that did not exist"),
        (
            lambda partition: partition["remainders"][0].__setitem__(4, {"0": {"next": -1}}),
            "cannot stand at next=-1",
        ),
        (lambda partition: partition["sizes"][0].__setitem__(0, 0), "samples, and .* are left of the epoch"),
        (lambda partition: partition["sizes"][0].__setitem__(0, 1000), "samples, and .* are left of the epoch"),
        (lambda partition: partition.__setitem__("sizes", None), "does not say how many samples each lane has"),
        (lambda partition: partition["history"][0].__setitem__(1, [[7, 2]]), "opened more shards than they had"),
        (
            lambda partition: partition["counts"].__setitem__("delivered", -1),
            "'delivered' of the counts of its partition is -1",
        ),
        (lambda partition: partition["counts"].__setitem__("zzz", 1), "name 'zzz'"),
    ],
)
def test_a_damaged_partition(edit, message, shards):
    state = through_json(repartitioned(shards))
    state["partition"] = json.loads(state["partition"])
    assert state["partition"]["remainders"]
    edit(state["partition"])
    with pytest.raises(wp.StateError, match=message):
        make(shards, lanes=3).load_state_dict(state)


def test_lanes_of_ranks_may_not_be_swapped(shards):
    """Each rank holds its own lanes, so that none is lost or held twice."""
    states = []
    for rank in range(2):
        loader = make(shards, rank=rank, world_size=2, epoch_end="exact")
        next(iter(loader))
        states.append(through_json(loader.state_dict()))
    for edit in (
        lambda: states[1]["lanes"].pop("1"),
        lambda: states[1]["lanes"].update({"0": states[0]["lanes"]["0"]}),
    ):
        edit()
        with pytest.raises(wp.StateError, match="rank 1 of 2 has lane"):
            wp.merge_states(states)


def test_a_lane_that_has_finished_more_than_it_had_to_read(shards):
    loader = make(shards, epoch_end="exact")
    next(iter(loader))
    state = through_json(loader.state_dict())
    state["lanes"]["0"]["position"] = [{"segment": 9, "opened": 1}, {"delivered": 1}]
    again = make(shards, epoch_end="exact")
    with pytest.raises(wp.StateError, match="has finished 9 segments, and it has 1"):
        list(loaded(again, state))


def one(position, place, **values):
    """A position with other values of one stage."""
    return [{**entry, **values} if number == place else entry for number, entry in enumerate(position)]


def test_positions_that_no_stage_can_have(shards):
    pipe = wp.ShardList(shards).open_shards().load_tar().group_by_key().shuffle_buffer(3)
    after(pipe, 4)
    state = pipe.state_dict()
    position = state["lanes"]["0"]["position"]
    for place, values, message in (
        (2, {"offset": 700}, "headers of a tar start at multiples of 512"),
        (2, {"offset": 1 << 63}, "no tar is so large"),
        (2, {"compression": "rar"}, "the compressions are gz, bz2, xz, zst"),
        (4, {"left": 0, "first": 1}, "cannot have yielded"),
        (4, {"left": 12}, "cannot have yielded"),
        (4, {"left": 1 << 60, "first": 1 << 60}, "no epoch has more than"),
    ):
        with pytest.raises(wp.StateError, match=message):
            pipe.load_state_dict(
                {**state, "lanes": {"0": {**state["lanes"]["0"], "position": one(position, place, **values)}}}
            )
    pipe.load_state_dict({**state, "lanes": {"0": {**state["lanes"]["0"], "position": one(position, 0, next=8)}}})
    with pytest.raises(wp.StateError, match="it has passed 8 shards of lane 0 of 1, which has only 7"):
        next(iter(pipe))
    mix = wp.mix({"a": pipe, "b": wp.ShardList(shards[::-1], seed=1).open_shards().load_tar().group_by_key()})
    after(mix, 4)
    state = mix.state_dict()
    state["lanes"]["0"]["position"][0]["chains"][0]["draws"] += 5
    with pytest.raises(wp.StateError, match=r"mix cannot have drawn \[7, 2\] times from its sources"):
        mix.load_state_dict(state)
