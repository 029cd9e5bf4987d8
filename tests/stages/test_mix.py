"""mix: exact proportions at every prefix, exhaustion, states by name that fit other weights and
sources, and exact resume.
"""

import itertools
import json
import logging
import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pipelines import keys_of, loaded, samples, through_json
from sources import Given
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.core.lane import Lane
from wds_pipes.core.order import stream
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BatchSamples, FilterSamples, Mix, ShuffleBuffer
from wds_pipes.stages.proportions import UNITS, how_far_behind, in_units, turns
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume, make_shards

# The first draws for weights and the hashes stream(7, 0, ...): they never change, see ordering.py.
GOLDEN = {
    (1,): [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    (1, 1): [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0],
    (3, 1): [0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0],
    (1, 1, 1): [1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2],
    (5, 2, 1): [0, 1, 0, 0, 1, 0, 2, 0, 0, 1, 0, 0, 1, 0, 2, 0, 0, 1, 0, 0, 1, 0, 2, 0],
    (7, 1, 1, 1, 2, 3): [0, 5, 0, 4, 0, 5, 0, 1, 0, 3, 0, 2, 5, 0, 4, 0, 5, 0, 4, 0, 5, 0, 1, 0],
}
# The sources in epochs 0 and 1 of lane 0 of 1, and epoch 0 of lane 1 of 2, with weights 5, 2, 1 and
# seed 0.
GOLDEN_MIX = [
    "aabacabaaabacabaaabacabaaabacabaaabacaba",
    "abaabacaabaabacaabaabacaabaabacaabaabaca",
    "abaacabaabaacabaabaacabaabaacabaabaacaba",
]


def hashes(count, key=7):
    return [int(value) for value in stream(key, 0, count)]


def shards(directory, name, sizes):
    """Shards whose samples have keys with ``name`` in their URLs."""
    return make_shards(directory / name, shards=len(sizes), samples=sizes, seed=len(name))


@pytest.fixture
def three(tmp_path):
    """The shards of three sources: 10, 7 and no samples."""
    return {
        "a": shards(tmp_path, "a", [3, 0, 5, 2]),
        "b": shards(tmp_path, "b", [4, 1, 2]),
        "none": shards(tmp_path, "none", [0]),
    }


def numbers(weights, length=1000, **options):
    """A stream over a source for each name that yields (name, 0), (name, 1) ..."""
    counts = length if isinstance(length, dict) else dict.fromkeys(weights, length)
    return Stream(
        Mix({name: Given([(name, number) for number in range(counts[name])]) for name in weights}, weights, **options)
    )


def names(items):
    return "".join(item[0] for item in items)


def deviation(drawn, weights):
    """The largest distance of any source from its share at any prefix, as an exact fraction."""
    total, places = sum(weights), np.arange(1, len(drawn) + 1)
    return (
        max(
            int(np.abs(np.cumsum(drawn == source) * total - weight * places).max())
            for source, weight in enumerate(weights)
        )
        / total
    )


# The order of draws


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 10), st.integers(1, 1_000_000)), min_size=1, max_size=6),
    st.integers(0, (1 << 64) - 1),
)
def test_proportions_hold_at_every_prefix(weights, key):
    """For 1 to 6 sources with weights up to 10^6, whatever the phases. The draws continue from any
    position as if they had not stopped.
    """
    drawn = np.fromiter(
        itertools.islice(turns(weights, hashes(len(weights), key), [0] * len(weights)), 3_000), np.int64, 3_000
    )
    assert deviation(drawn, weights) < 1
    cut = key % 2_900
    counts = [int((drawn[:cut] == source).sum()) for source in range(len(weights))]
    resumed = turns(weights, hashes(len(weights), key), how_far_behind(weights, counts))
    assert list(itertools.islice(resumed, 100)) == drawn[cut : cut + 100].tolist()


def test_golden_draws():
    """The order is part of the checkpoint format."""
    for weights, expected in GOLDEN.items():
        assert list(itertools.islice(turns(weights, hashes(len(weights)), [0] * len(weights)), 24)) == expected
    mixed = numbers({"a": 5, "b": 2, "c": 1})
    epochs = [names(itertools.islice(mixed, 40)) for _ in range(2)]
    lane = numbers({"a": 5, "b": 2, "c": 1})
    lane.chain.root.context.lane, lane.chain.root.context.lanes = 1, 2
    assert [*epochs, names(itertools.islice(lane, 40))] == GOLDEN_MIX


def test_order_depends_on_names_not_on_their_order():
    """A dict in another order, or multiples of the weights, are the same mix."""
    one = names(itertools.islice(numbers({"a": 5, "b": 2, "c": 1}), 200))
    assert names(itertools.islice(numbers({"c": 1, "a": 5, "b": 2}), 200)) == one
    assert names(itertools.islice(numbers({"a": 0.5, "b": 0.2, "c": 0.1}), 200)) == one
    assert names(itertools.islice(numbers({"a": 5, "b": 2, "c": 1}, seed=1), 200)) != one


def test_weights_are_exact():
    """Decimal numbers, fractions and numpy's numbers; none, or a list."""
    sources = {"a": Given([]), "b": Given([]), "c": Given([])}
    assert Mix(sources, {"a": 0.7, "b": 0.2, "c": 0.1}).weights == {"a": 7, "b": 2, "c": 1}
    assert Mix(sources, [1e-9, 1, 0.5]).weights == {"a": 1, "b": 10**9, "c": 5 * 10**8}
    assert Mix(sources, [Fraction(1, 3), Fraction(1, 6), Fraction(1, 2)]).weights == {"a": 2, "b": 1, "c": 3}
    assert Mix(sources, [np.float64(0.25), np.int64(1), 3]).weights == {"a": 1, "b": 4, "c": 12}
    assert Mix(sources).weights == {"a": 1, "b": 1, "c": 1}


def test_each_source_yields_the_samples_that_it_yields_alone(three):
    """In the same order, in each epoch."""
    mixed = wp.mix({name: samples(three[name]) for name in ("a", "b")}, exhausted="drop")
    alone = {name: samples(three[name]) for name in ("a", "b")}
    for _ in range(3):
        given_ = list(mixed)
        for name, pipe in alone.items():
            assert [sample for sample in given_ if sample["__url__"].split("/")[-2] == name] == list(pipe)


# Exact resume


CHAINS = {
    "nested": lambda urls, **options: wp.mix(
        {
            "plain": samples(urls["a"]),
            "mixed": wp.mix({name: samples(urls[name]).shuffle_buffer(3) for name in urls}, seed=4, **options),
        },
        exhausted=options["exhausted"],
    ),
    "interleaved": lambda urls, **options: wp.mix(
        {name: samples(urls[name]).interleave_shards(2) for name in urls}, **options
    ),
}


def draw(sample, rng):
    return {**sample, "draws": [*sample.get("draws", []), int(rng.integers(1 << 30))]}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_resumes_exactly(three, chain):
    """At every cut, and again at every cut of the resumed ones, into the next epoch; other chains
    and hosts are in tests/test_resume.py and tests/test_nodes.py.
    """
    urls = {name: three[name] for name in ("a", "b")}
    epochs = check_resume(lambda: CHAINS[chain](urls, weights={"a": 2.5, "b": 1}, exhausted="drop"))
    assert epochs[0] != epochs[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this epoch gave nothing")
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from(["stop", "drop", "repeat"]),
    st.booleans(),
)
def test_random_mixes_at_every_pair_of_cuts(sources, exhausted, shuffle):
    """Any lengths and weights, with sources that filter and shuffle."""

    def make():
        given_ = {
            str(number): Given([(str(number), item) for item in range(length)], seed=number)
            for number, (length, _) in enumerate(sources)
        }
        chains = {
            name: ShuffleBuffer(source, 2) if shuffle else FilterSamples(source, third)
            for name, source in given_.items()
        }
        return Stream(Mix(chains, [weight for _, weight in sources], exhausted=exhausted))

    for epoch in check_resume(make):
        found = Counter(epoch)
        if exhausted == "drop":
            assert set(found.values()) <= {1}
        if exhausted != "stop":
            whole = {
                (str(number), item)
                for number, (length, _) in enumerate(sources)
                for item in range(length)
                if shuffle or item % 3
            }
            assert found.keys() == whole


def third(item):
    return item[1] % 3


# Exhaustion


def test_stop_ends_with_the_first_exhausted_source():
    """When it would be drawn next: the proportions hold to the end."""
    mixed = numbers({"a": 2, "b": 1}, {"a": 100, "b": 5})
    given_ = list(mixed)
    assert Counter(names(given_))["b"] == 5
    assert 10 <= Counter(names(given_))["a"] <= 12
    assert deviation(np.array(["ab".index(name) for name in names(given_)]), [2, 1]) < 1
    assert len(names(mixed)) > 10  # the next epoch begins anew


def test_drop_continues_with_the_other_sources_in_their_proportions():
    mixed = numbers({"a": 3, "b": 1, "c": 2}, {"a": 600, "b": 200, "c": 100}, exhausted="drop")
    given_ = names(mixed)
    assert Counter(given_) == {"a": 600, "b": 200, "c": 100}
    end = given_.rindex("c") + 1
    assert deviation(np.array(["abc".index(name) for name in given_[:end]]), [3, 1, 2]) < 1
    start = next(place for place in range(end, end + 5) if mixed_from(given_, place, [3, 1]))
    assert start <= end + 3


def mixed_from(given_, place, weights):
    """Whether the proportions of a and b hold at every prefix from a position on, until one of them
    ends.
    """
    rest = given_[place : min(given_.rindex("a"), given_.rindex("b")) + 1]
    return deviation(np.array(["ab".index(name) for name in rest]), weights) < 1


def test_repeat_begins_sources_again_in_another_order_until_all_have_ended(three):
    """The proportions hold throughout. A source that ends first is repeated as often as needed."""
    mixed = wp.mix({"a": samples(three["a"]), "b": samples(three["b"])}, weights={"a": 1, "b": 3}, exhausted="repeat")
    given_ = [(sample["__url__"].split("/")[-2], sample["__key__"]) for sample in mixed]
    assert deviation(np.array(["ab".index(name) for name, _ in given_]), [1, 3]) < 1
    found = Counter(given_)
    assert {key for name, key in found if name == "a"} == {f"{number:08d}" for number in range(10)}
    assert {found[key] for key in found if key[0] == "a"} == {1}
    assert {found[key] for key in found if key[0] == "b"} <= {4, 5}
    of_b = [key for name, key in given_ if name == "b"]
    assert len({tuple(of_b[start : start + 7]) for start in (0, 7, 14, 21)}) > 1


def test_an_empty_source_is_logged(caplog):
    for exhausted in ("stop", "drop", "repeat"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "wds_pipes"):
            list(numbers({"a": 1, "b": 1}, {"a": 5, "b": 0}, exhausted=exhausted))
        assert "source 'b' of mix() gives nothing in lane 0 of 1" in caplog.text


def test_a_source_with_fewer_shards_than_lanes_keeps_its_share(fifty, caplog):
    """If it repeats: its few shards go to the lanes in turn."""

    def make():
        sources = {
            name: wp.ShardList(urls, shuffle=True, seed=2).open_shards().load_tar().group_by_key()
            for name, urls in (("a", fifty), ("b", fifty[1:2]))
        }
        for name, source in sources.items():
            sources[name] = source.map_samples(lambda sample, name=name: (name, sample["__key__"]))
        mixed = wp.mix(sources, exhausted="repeat")
        return wp.PipeLoader(mixed, batch_size=2, lanes=4, collate="list", epoch_end="loop").with_epoch(batches=200)

    loader, batches, states = make(), [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    of_b = sum(name == "b" for batch in batches for name, _ in batch)
    assert abs(of_b - 200) <= 20, "each lane starts the proportions anew in each epoch of the data"
    assert not caplog.records
    for cut in (50, 120):
        assert list(loaded(make(), through_json(states[cut - 1]))) == batches[cut:]


# Other weights, other sources


def after(stream_, count):
    taken = list(itertools.islice(stream_, count))
    return taken, through_json(stream_.state_dict())


@pytest.mark.parametrize("weights", [{"a": 1, "b": 4}, {"a": 5, "c": 2, "b": 1}])
def test_weights_may_change_and_sources_may_be_added(weights):
    """The sources continue at their positions, a new one begins at its beginning, and the new
    proportions hold from there on, also after a further resume.
    """
    before, state = after(numbers({"a": 5, "b": 1}), 77)
    first, state = after(loaded(numbers(weights, changed=True), state), 50)
    again = loaded(numbers(weights), state)
    rest = [*first, *itertools.islice(again, 300)]
    assert deviation(np.array([list(weights).index(name) for name in names(rest)]), list(weights.values())) < 1
    for name in weights:
        assert [number for found, number in [*before, *rest] if found == name] == list(
            range(names([*before, *rest]).count(name))
        )


@pytest.mark.parametrize("weights", [{"a": 1, "b": 4}, {"a": 5, "c": 2, "b": 1}])
def test_what_has_changed_must_be_declared(weights):
    """By the mix, or by the call; the same proportions are no change."""
    for cut in (0, 77):
        _, state = after(numbers({"a": 5, "b": 1}), cut)
        with pytest.raises(wp.StateError, match=r"this mix has .*pass load_state_dict\(state, mix='changed'\)"):
            numbers(weights).load_state_dict(state)
        rest = names(numbers_after(numbers(weights), state, changed=True))
        assert rest == names(numbers_after(numbers(weights, changed=True), state))
        numbers({"b": 2, "a": 10}).load_state_dict(state)


def numbers_after(stream_, state, **options):
    return itertools.islice(loaded(stream_, state, **options), 60)


# By a quantity


def documents(sizes, **options):
    """A stream over a source for each name, whose samples have so many tokens."""
    sources = {
        name: Given([{"__key__": f"{name}{place}", "tokens": [0] * size} for place, size in enumerate(lengths)])
        for name, lengths in sizes.items()
    }
    return Stream(Mix(sources, **options))


SIZES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 3000)), min_size=1, max_size=40)


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(1, 1000)), min_size=1, max_size=5), st.integers(0, 99))
def test_proportions_of_tokens_hold_at_every_prefix(sources, seed):
    """No source is ahead by more than its largest sample, or behind by more than those of the other
    sources.
    """
    names_of = "abcde"[: len(sources)]
    sizes, weights = (dict(zip(names_of, values, strict=True)) for values in zip(*sources, strict=True))
    amounts, largest = dict.fromkeys(names_of, 0), {name: max(1, *lengths, 1) for name, lengths in sizes.items()}
    for sample in documents(sizes, weights=weights, by="tokens", seed=seed):
        amounts[sample["__key__"][0]] += max(1, len(sample["tokens"]))
        whole, total = sum(amounts.values()), sum(weights.values())
        for name, amount in amounts.items():
            ahead = Fraction(amount) - Fraction(whole * weights[name], total)
            assert -sum(largest.values()) + largest[name] <= ahead <= largest[name]


DOCUMENTS = {"a": [3, 0, 9, 4, 4, 1, 12, 2], "b": [30, 1, 5], "c": [2] * 12}


@pytest.mark.parametrize("exhausted", ["stop", "drop", "repeat"])
@pytest.mark.parametrize("by", ["tokens", lambda sample: len(sample["tokens"])], ids=["field", "function"])
def test_a_mix_by_tokens_at_every_cut(by, exhausted):
    check_resume(lambda: documents(DOCUMENTS, weights=[3, 2, 1], by=by, exhausted=exhausted))


def test_the_quantity_belongs_to_the_state():
    """Other weights may be declared, and hold from there on."""
    sizes = {name: list(range(200)) for name in "ab"}
    _, state = after(documents(sizes, weights=[3, 1], by="tokens"), 30)
    with pytest.raises(
        wp.StateError, match="was mix.exhausted='stop', by='tokens'., and of this one is mix.exhausted='stop'."
    ):
        documents(sizes, weights=[3, 1]).load_state_dict(state)
    amounts = dict.fromkeys("ab", 0)
    for sample in after(loaded(documents(sizes, weights=[1, 1], by="tokens"), state, changed=True), 100)[0]:
        amounts[sample["__key__"][0]] += max(1, len(sample["tokens"]))
        assert abs(amounts["a"] - amounts["b"]) <= 200


def test_lanes_of_a_mix_by_tokens_continue_on_other_ranks(tmp_path):
    """Each sample of the epoch once."""
    pipes = {
        name: samples(shards(tmp_path, name, [5, 3, 7, 4, 6])).map_samples(
            lambda sample: {**sample, "tokens": [0] * (1 + int(sample["__key__"]) % 7)}
        )
        for name in "ab"
    }

    def loader(rank, world):
        mixed = wp.mix(pipes, weights=[3, 1], by="tokens", exhausted="drop")
        options = {"batch_size": 2, "rank": rank, "world_size": world, "collate": keys_and_urls}
        return wp.PipeLoader(mixed, epoch_end="exact", **options)

    first = [loader(rank, 3) for rank in range(3)]
    found = [item for each in first for batch in itertools.islice(each, 3) for item in batch]
    state = through_json(wp.merge_states([each.state_dict() for each in first]))
    found += [item for rank in range(2) for batch in loaded(loader(rank, 2), state) for item in batch]
    assert len(found) == len(set(found)) == 50


def keys_and_urls(batch):
    return [(sample["__url__"], sample["__key__"]) for sample in batch]


def test_wrong_quantities():
    for by in (3, "", ["tokens"]):
        with pytest.raises(TypeError, match="by must be the name of a field or a function"):
            documents(DOCUMENTS, by=by)
    with pytest.raises(ValueError, match=r"by= of mix\(\) goes with weights=, not with schedule="):
        documents(DOCUMENTS, by="tokens", schedule=rising)
    with pytest.raises(wp.SampleError, match="sample '.*' has no field 'words'"):
        list(documents(DOCUMENTS, by="words"))
    with pytest.raises(TypeError, match=r"by= of mix\(\) returned must be an int, not 1.5"):
        list(documents(DOCUMENTS, by=lambda sample: 1.5))
    number = Stream(Mix({"a": Given([{"__key__": "a", "tokens": 7}])}, by="tokens"))
    with pytest.raises(wp.SampleError, match="sample 'a' has int in field 'tokens', which has no length"):
        list(number)


# Weights by a schedule


def rising(samples):
    """Weights that change with the number of samples."""
    return {"a": 3, "b": samples / 400, "c": 0.7 if samples < 300 else 0}


def test_a_schedule_decides_the_weights():
    """In each lane by about how many samples all lanes have had; a source of weight 0 has none."""
    stage = Mix({name: Given([(name, number) for number in range(2000)]) for name in "abc"}, schedule=rising)
    for lanes in (1, 4):
        found = names(itertools.islice(stage.open(Lane(0, 0, lanes - 1, lanes)).items, 1000))
        due = dict.fromkeys("abc", 0.0)
        for place in range(1000):
            weights = rising(place // 100 * 100 * lanes)
            for name, weight in weights.items():
                due[name] += weight / sum(weights.values())
            if weights["c"]:
                assert all(abs(due[name] - found.count(name, 0, place + 1)) < 1.5 for name in "abc"), place
        assert "b" not in found[:100]
        assert "c" not in found[-(-300 // (100 * lanes)) * 100 :]
        assert found.count("b", 900) > found.count("b", 100, 200)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1)), min_size=3, max_size=3).filter(any),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, (1 << 64) - 1),
)
@example([[1.0, 0.5, 0.25], [0.25, 1.0, 0.0]], 0)  # no draw is allowed after the change
def test_shares_that_change_hold_at_every_prefix(weights, key):
    """Whatever they were before, by less than two; a source without a share is not drawn."""
    behind = [0, 0, 0]
    for shares in map(in_units, weights):
        for turn in itertools.islice(turns(shares, hashes(3, key), behind), 25):
            behind = [late + share for late, share in zip(behind, shares, strict=True)]
            behind[turn] -= sum(shares)
            assert shares[turn]
            assert max(map(abs, behind)) < 2 * UNITS


@pytest.mark.parametrize("exhausted", ["drop", "repeat"])
def test_a_schedule_at_every_cut(exhausted, monkeypatch):
    monkeypatch.setattr("wds_pipes.stages.mix._EVERY", 5)

    def make():
        sources = {name: Given([(name, number) for number in range(length)]) for name, length in SCHEDULED.items()}
        return Stream(Mix(sources, schedule=lambda n: {"a": 1, "b": 0.3 + n / 20, "c": 2}, exhausted=exhausted))

    assert len(check_resume(make)[0]) > 12
    _, state = after(make(), 9)
    shuffled = loaded(
        Stream(
            Mix(
                {name: Given([(name, number) for number in range(SCHEDULED[name])]) for name in "cab"},
                schedule=lambda n: {"a": 1, "b": 0.3 + n / 20, "c": 2},
                exhausted=exhausted,
            )
        ),
        state,
    )
    assert list(loaded(make(), state)) == list(shuffled)
    for wrong in ([0], [0, 0, 1 << 60], [0, "a", 0], [0.0, 0.0, 0.0], "abc"):
        state["lanes"]["0"]["position"][0]["behind"] = wrong
        with pytest.raises(wp.StateError, match="damaged"):
            make().load_state_dict(state)


SCHEDULED = {"a": 7, "b": 3, "c": 8}


def test_weights_may_become_a_schedule():
    """It goes on with the number of samples that there were."""
    asked = []

    def schedule(samples):
        asked.append(samples)
        return {"a": 1, "b": 1}

    _, state = after(numbers({"a": 5, "b": 1}), 230)
    scheduled = Stream(Mix({name: Given([(name, n) for n in range(900)]) for name in "ab"}, schedule=schedule))
    with pytest.raises(wp.StateError, match="the weights 'a': schedule, 'b': schedule, and"):
        scheduled.load_state_dict(state)
    found, state = after(loaded(scheduled, state, changed=True), 200)
    assert asked == [0, 200, 300, 400]
    assert abs(names(found).count("a") - 100) <= 1
    assert names(after(loaded(numbers({"a": 1, "b": 3}), state, changed=True), 4)[0]).count("b") == 3


def test_wrong_weights_of_a_schedule_later():
    both = {name: Given([(name, number) for number in range(150)]) for name in "ab"}
    with pytest.raises(ValueError, match=r"schedule\(100\) of mix\(\) returned"):
        list(Stream(Mix(both, schedule=lambda n: {"a": 1, "b": 1} if n < 100 else {})))
    with pytest.raises(ValueError, match="no weight to the sources that are left: 'b'"):
        list(Stream(Mix(both, schedule=lambda n: {"a": 1, "b": 0}, exhausted="drop")))


def test_sources_may_be_left_out_on_request():
    _, state = after(numbers({"a": 5, "b": 1, "c": 1}), 20)
    with pytest.raises(
        wp.StateError,
        match=r"the state has 'b', 'c'.*without=\['b', 'c'\]\)",
    ):
        numbers({"a": 1}).load_state_dict(state)
    rest = loaded(numbers({"a": 5, "c": 1}, without=["b"]), state)
    given_ = list(itertools.islice(rest, 60))
    assert given_[0][1] > 0
    assert deviation(np.array(["ac".index(name) for name in names(given_)]), [5, 1]) < 1


@pytest.mark.parametrize(("lanes", "steps"), [(None, 1), (1, 0), (2, 1)])
def test_a_source_that_was_left_out_is_forgotten(three, lanes, steps):
    """Also by lanes that were not continued: so another source may have its name. Without
    ``lanes`` it is a pipe.
    """

    def make(lanes, **sources):
        mixed = wp.mix(
            {name: samples(urls) for name, urls in sources.items()},
            without=() if "b" in sources else ("b",),
            exhausted="drop",
            changed="b" in sources,
        )
        return mixed if lanes is None else wp.PipeLoader(mixed, batch_size=None, lanes=lanes, epoch_end="exact")

    whole = make(lanes and 2, a=three["a"], b=three["b"])
    list(itertools.islice(whole, 4))
    rest = loaded(make(lanes, a=three["a"]), through_json(whole.state_dict()))
    list(itertools.islice(rest, steps))
    other = loaded(make(lanes, a=three["a"], b=three["b"][::-1]), through_json(rest.state_dict()))
    keys = Counter(sample["__key__"] for sample in other if "/b/" in sample["__url__"])
    assert keys == Counter(sample["__key__"] for sample in samples(three["b"]))


@pytest.mark.parametrize("exhausted", ["stop", "drop", "repeat"])
def test_changes_are_refused_while_a_later_step_holds_samples(exhausted):
    """These samples were drawn by the old weights, and a resume draws them again; also at the end,
    where the buffer empties. Between epochs changes are accepted.
    """

    def make(weights):
        sources = {name: Given([(name, number) for number in range(20)]) for name in weights}
        return Stream(ShuffleBuffer(Mix(sources, weights, exhausted=exhausted, changed=True), 4))

    length = len(list(make({"a": 2, "b": 1})))
    for cut in range(length + 1):
        _, state = after(make({"a": 2, "b": 1}), cut)
        loaded(make({"b": 2, "a": 4}), state)
        for weights in ({"a": 1, "b": 1}, {"a": 2, "b": 1, "c": 1}):
            other = make(weights)
            if cut > 0:
                with pytest.raises(wp.StateError, match="a step after it, such as shuffle_buffer, still held samples"):
                    other.load_state_dict(state)
    whole = make({"a": 2, "b": 1})
    list(whole)
    other = loaded(make({"a": 1, "b": 1, "c": 5}), whole.state_dict())
    assert {name for name, _ in other} == {"a", "b", "c"}


@pytest.mark.parametrize("kind", ["mix of mixes", "repeat", "repeat in a mix"])
def test_changes_are_refused_while_a_step_after_the_whole_holds_samples(three, kind):
    """The mix whose weights change may be part of another mix, or be repeated."""

    def make(weights):
        mixed = wp.mix({"a": samples(three["a"]), "b": samples(three["b"])}, weights, changed=True)
        other = {"c": samples(three["a"])}
        if kind == "repeat":
            return mixed.repeat(2).shuffle_buffer(4)
        return wp.mix({"in": mixed.repeat(2) if kind == "repeat in a mix" else mixed, **other}).shuffle_buffer(4)

    _, state = after(make([1, 1]), 6)
    make([2, 2]).load_state_dict(state)
    with pytest.raises(wp.StateError, match="a step after it, such as shuffle_buffer, still held samples"):
        make([2, 1]).load_state_dict(state)


def test_a_state_says_what_its_mix_reads_from(three):
    pipe = wp.mix({"in": wp.mix({"a": samples(three["a"])}), "b": samples(three["b"])})
    for names in ((), ("in",)):
        state = pipe.state_dict()
        entry = state
        for name in names:
            entry = entry["sources"][name]
        del entry["sources"]
        with pytest.raises(wp.StateError, match="the state is damaged: it does not say what its sources are"):
            pipe.load_state_dict(state)


@pytest.mark.parametrize("what", ["seed", "steps"])
def test_ranks_with_other_sources_are_not_merged(three, what):
    """Their lanes would continue with the sources of the first rank."""

    def state_of(rank, change):
        source = samples(three["a"], **({"seed": 9} if change and what == "seed" else {}))
        source = source.shuffle_buffer(2) if change and what == "steps" else source
        mixed = wp.mix({"in": wp.mix({"a": source, "b": samples(three["b"])})})
        return wp.PipeLoader(mixed, batch_size=2, rank=rank, world_size=2, epoch_end="exact").state_dict()

    wp.merge_states([state_of(0, False), state_of(1, False)])
    with pytest.raises(wp.StateError, match=f"the states of ranks 0 and 1 differ in '{what}' of source 'a'"):
        wp.merge_states([state_of(0, False), state_of(1, True)])


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda three: samples(three["b"][::-1]), {}, "'a' of this mix .* it had 4 shards and has 3"),
        (lambda three: samples(three["a"][::-1]), {}, "'a' of this mix .* other URLs or another order.*moved=True"),
        (lambda three: samples(three["a"], seed=4), {}, "'a' of this mix .* its seed was 5 and is 4"),
        (lambda three: samples(three["a"]).shuffle_buffer(2), {}, "others than shard_list.* > shuffle_buffer"),
        (lambda three: samples(three["a"]), {"exhausted": "drop"}, "mix.exhausted='stop'.*mix.exhausted='drop'"),
        (lambda three: samples(three["a"]), {"seed": 1}, "seed=0.*seed=1"),
    ],
)
def test_a_changed_source_is_refused_by_name(three, change, options, words):
    """Other shards, another seed or other steps under the same name; other options of the mix."""
    state = wp.mix({"a": samples(three["a"]), "b": samples(three["b"])}).state_dict()
    with pytest.raises(wp.StateError, match=words):
        wp.mix({"a": change(three), "b": samples(three["b"])}, **options).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"draws": -1},
        {"draws": True},
        {"draws": 3, "since": 4},
        {"weight": 3},
        {"position": {}},
        {"position": [{}, {}]},
        {"position": [1, {}, {}, {}]},
        {"passes": "1"},
        {"ended": 1},
        {"more": 1},
    ],
)
def test_damaged_states_are_refused(three, change):
    pipe = wp.mix({"a": samples(three["a"])})
    state = pipe.state_dict()
    state["lanes"]["0"]["position"][0]["chains"] = [{"name": "a", "weight": "1", **change}]
    with pytest.raises(wp.StateError, match="the state is damaged"):
        pipe.load_state_dict(state)


# Lanes, counts, errors, arguments


def test_a_plain_dataloader_partitions_a_bare_mix(three):
    """torch partitions the shards of the sources over the workers; also sources that are torch's
    own.
    """
    pipe = wp.mix(
        {"a": samples(three["a"]), "t": IterableWrapper(list(range(9))), "b": samples(three["b"])}, exhausted="drop"
    ).shuffle_buffer(2)
    loader = DataLoader(pipe, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        found = [item if isinstance(item, int) else item["__url__"] + item["__key__"] for item in loader]
        assert len(found) == len(set(found)) == 10 + 9 + 7


def test_maps_after_a_mix_draw_other_numbers_than_maps_in_its_sources(three):
    """Otherwise augmentation before and after the mix would be the same."""
    for sample in wp.mix({"a": samples(three["a"]).map_samples(draw)}).map_samples(draw):
        assert sample["draws"][0] != sample["draws"][1]


def test_counts_are_those_of_all_sources():
    """Also over several epochs and dropped sources, and the same after a resume."""

    def make(exhausted):
        sources = {
            "a": FilterSamples(Given([("a", number) for number in range(9)]), third),
            "b": Given([("b", number) for number in range(30)]),
        }
        return Stream(Mix(sources, exhausted=exhausted))

    for exhausted, filtered in (("stop", 3), ("drop", 3), ("repeat", 15)):
        mixed = make(exhausted)
        for number, _ in enumerate(mixed, 1):
            counts = mixed.counts()
            assert counts["delivered"] == number
            assert loaded(make(exhausted), mixed.state_dict()).counts() == counts
        assert mixed.counts()["filtered"] >= filtered
        assert exhausted != "drop" or mixed.counts() == {"delivered": 36, "filtered": 3, "skipped": 0, "dropped": 0}


def test_counts_of_batches():
    """Samples, not batches, where a source yields batches."""
    mixed = Stream(
        Mix(
            {"a": BatchSamples(Given(range(10)), 4, collate="list"), "b": Given([[number] for number in range(4)])},
            exhausted="drop",
        )
    )
    given_ = 0
    for batch in mixed:
        given_ += len(batch)
        assert mixed.counts()["delivered"] == given_
    assert given_ == 14


def test_state_is_small_and_by_name(three):
    mixed = wp.mix({"a": samples(three["a"]), "b": samples(three["b"])}, weights=[3, 1])
    next(iter(mixed))
    [entry] = mixed.state_dict()["lanes"]["0"]["position"]
    assert entry["last"] in "ab"
    assert {source["name"]: source["weight"] for source in entry["chains"]} == {"a": "3", "b": "1"}
    assert sum(source.get("draws", 0) for source in entry["chains"]) == 1
    assert len(json.dumps(entry)) < 2 * 200
    assert mixed.state_dict()["lanes"]["0"]["url"].split("/")[-2] == entry["last"]


def test_a_source_without_a_state_is_named():
    with pytest.raises(wp.StateError, match="torch's Shuffler"):
        wp.mix({"a": IterableWrapper([1, 2]).shuffle()}).state_dict()


@pytest.mark.parametrize("module", [wp.mix, nodes.Mix, Mix])
def test_wrong_sources_are_refused_when_it_is_built(module):
    for sources, error, message in (({}, ValueError, "at least one source"), ([Given([])], TypeError, "by name")):
        with pytest.raises(error, match=message):
            module(sources)
    with pytest.raises(TypeError, match="'a'"):
        module({"a": [1, 2]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exhausted": "loop"}, ValueError, "exhausted must be one of 'stop', 'drop', 'repeat', not 'loop'"),
        ({"seed": 1.5}, TypeError, "seed must be an int"),
        ({"seed": 1 << 64}, ValueError, "seed must be at most 18446744073709551615"),  # a state could not hold it
        ({"sources": {3: Given([])}}, TypeError, "must be str, not 3"),
        ({"without": "b"}, TypeError, "write without="),
        ({"without": ["a"]}, ValueError, "without names .'a'., which is in the mix"),
        ({"weights": {"a": -1, "b": 1}}, ValueError, "the weight of 'a' must be above 0"),
        ({"weights": {"a": 1, "b": 0}}, ValueError, "the weight of 'b' must be above 0 and finite, not 0: leave out"),
        ({"weights": [1, float("nan")]}, ValueError, "the weight of 'b' must be above 0 and finite"),
        ({"weights": [float("inf"), 1]}, ValueError, "the weight of 'a' must be above 0 and finite"),
        ({"weights": {"a": "1", "b": 1}}, TypeError, "the weight of 'a' must be a number"),
        ({"weights": {"a": True, "b": 1}}, TypeError, "the weight of 'a' must be a number"),
        ({"weights": {"a": None, "b": 1}}, TypeError, "the weight of 'a' must be a number"),
        ({"weights": {"a": 1}}, ValueError, "no weight for 'b'"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, ValueError, "a weight for an unknown source 'c'"),
        ({"weights": [1]}, ValueError, "1 weights for 2 sources"),
        ({"weights": "11"}, TypeError, "must be a dict or a list"),
        ({"weights": 3}, TypeError, "must be a dict or a list"),
        ({"schedule": {"a": 1, "b": 1}}, TypeError, "schedule must be a function"),
        ({"weights": [1, 1], "schedule": rising}, ValueError, "weights= or schedule=, one of them"),
        (
            {"schedule": lambda n: {"a": 1}},
            ValueError,
            r"schedule\(0\) of mix\(\) returned .*: return a weight for each of 'a', 'b'",
        ),
        ({"schedule": lambda n: None}, ValueError, r"returned None: return a weight"),
        ({"schedule": lambda n: {"a": 0, "b": 0}}, ValueError, "and one above 0"),
        ({"schedule": lambda n: {"a": -1, "b": 2}}, ValueError, "at least 0"),
        ({"schedule": lambda n: {"a": float("nan"), "b": 2}}, ValueError, "at least 0"),
        ({"schedule": lambda n: {"a": "1", "b": 2}}, ValueError, "at least 0"),
    ],
)
def test_wrong_options_are_refused_when_it_is_built(options, error, message):
    with pytest.raises(error, match=message):
        Mix(**{"sources": {"a": Given([]), "b": Given([])}, **options})


def test_a_source_that_torch_distributes_is_refused(urls):
    with pytest.raises(ValueError, match="leave out sharding_filter"):
        wp.mix({"a": IterableWrapper(urls).sharding_filter().open_shards()})


def test_is_a_function_that_pickles(three):
    pipe = wp.mix({"a": samples(three["a"]), "b": samples(three["b"])}).shuffle_buffer(2)
    assert list(pickle.loads(pickle.dumps(pipe))) == list(pipe)
    assert wp.mix.__doc__ == Mix.__doc__


# Seeds and lists of the sources


def test_sources_without_a_seed_have_different_orders(three):
    """They derive it from the seed of the mix and their names; a seed that was passed stays."""
    make = lambda seed=None: wp.ShardList(three["a"], shuffle=True, seed=seed).open_shards().load_tar().group_by_key()  # noqa: E731
    with pytest.warns(
        UserWarning, match=r"sources 'x' and 'y' of mix\(\) read the same shards, so each sample comes from"
    ):
        mix = wp.mix({"x": make().shuffle_buffer(5), "y": make().shuffle_buffer(5)})
    found = keys_of(mix)
    assert sorted(found[::2]) == sorted(found[1::2])
    assert found[::2] != found[1::2]
    orders = [keys_of(wp.mix({name: make().shuffle_buffer(9)}, seed=seed)) for name in "xy" for seed in (0, 1)]
    assert len({*map(tuple, orders)}) == 4
    assert keys_of(wp.mix({"x": make(3)}, seed=1)) == keys_of(make(3))
    state = wp.mix({"x": make()}).state_dict()
    with pytest.raises(wp.StateError, match="source 'x' of this mix is not the one of the state: its seed was"):
        wp.mix({"x": make(0)}).load_state_dict(state)


def test_sources_in_a_nested_mix_have_different_orders(three):
    make = lambda: wp.ShardList(three["a"], shuffle=True).open_shards().load_tar().group_by_key()  # noqa: E731
    inner = lambda: wp.mix({"x": make().shuffle_buffer(9)})  # noqa: E731
    found = keys_of(wp.mix({"a": inner(), "b": inner()}))
    assert found[::2] != found[1::2]
    check_resume(lambda: wp.mix({"a": inner(), "b": inner()}))


def test_sources_that_filter_one_list_are_no_reason_for_a_warning(three):
    """Each takes its own samples."""
    make = lambda odd: samples(three["a"]).filter_samples(lambda sample: int(sample["__key__"]) % 2 == odd)  # noqa: E731
    wp.mix({"odd": make(1), "even": make(0)})


def test_views_of_one_list_are_different_data(tmp_path):
    """Only the same view of the same shards twice is a mistake."""
    [url] = make_shards(str(tmp_path), shards=1, samples=6)
    index_shards(url, offsets=True)
    views = {name: wp.SampleList(url, where=where) for name, where in (("a", [0, 1]), ("b", [2, 3]), ("c", [0, 1]))}
    wp.mix({name: views[name].fetch_samples() for name in "ab"})
    with pytest.warns(UserWarning, match="sources 'a' and 'c'"):
        wp.mix({name: views[name].fetch_samples() for name in "abc"})
